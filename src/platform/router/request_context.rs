//! Reads the properties of a request that do not depend on its caller.

use std::net::IpAddr;

use axum::extract::Request;
use http::HeaderValue;
use http::header::HOST;
use jiff::Timestamp;

use super::page;
use crate::config::RouterConfig;
use crate::public_host::PublicHost;
use svc_http::problem::{Code, Problem};
use svc_http::server::ConnectionInfo;

/// The properties of a request, except its caller.
pub(super) struct RequestContext {
    pub(super) host: PublicHost,
    /// The request's host name and port.
    pub(super) authority: String,
    pub(super) scheme: &'static str,
    /// The other end of the connection, which may be a proxy.
    pub(super) peer_address: IpAddr,
    /// The peer's address; `None` behind a proxy, because all of the proxy's clients share one address.
    pub(super) client_address: Option<IpAddr>,
    /// Whether the client expects an HTML page: it sent a GET or HEAD request that accepts `text/html`.
    pub(super) wants_page: bool,
    pub(super) now: Timestamp,
}

impl RequestContext {
    /// Reads the request's properties, and rejects unknown hosts. A request target in absolute form overrides `Host`
    /// (RFC 9112, section 3.2.2).
    ///
    /// # Errors
    /// `not_found` if the request does not name one of the router's hosts; `invalid_request` if its target is invalid.
    pub(super) fn read(
        config: &RouterConfig,
        connection: ConnectionInfo,
        request: &mut Request,
    ) -> Result<Self, Problem> {
        if let Some(authority) = request.uri().authority() {
            let host = HeaderValue::from_str(authority.as_str());
            let host =
                host.map_err(|_| Problem::new(Code::InvalidRequest, "The request target is not valid."))?;
            request.headers_mut().insert(HOST, host);
        }
        let mut hosts = request.headers().get_all(HOST).iter();
        let unknown = || Problem::new(Code::NotFound, "The router does not serve this host.");
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(unknown()) };
        let authority = host.to_str().map_err(|_| unknown())?.to_owned();
        let scheme = public_scheme(config, connection);
        let peer_address = connection.peer.ip().to_canonical();
        let host = config.find_host(&authority, scheme).ok_or_else(unknown)?;
        Ok(Self {
            host,
            authority,
            scheme,
            peer_address,
            client_address: client_address(config, peer_address),
            wants_page: page::wants_page(request.method(), request.headers()),
            now: Timestamp::now(),
        })
    }
}

/// Returns the scheme that the browser used.
pub(super) fn public_scheme(config: &RouterConfig, connection: ConnectionInfo) -> &'static str {
    config.public_scheme.unwrap_or(connection.scheme.as_str())
}

fn client_address(config: &RouterConfig, peer: IpAddr) -> Option<IpAddr> {
    let is_behind_proxy = config.trusted_proxies.contains(peer) || config.public_scheme.is_some();
    (!is_behind_proxy).then_some(peer)
}

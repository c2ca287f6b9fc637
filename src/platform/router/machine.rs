//! A machine as the router sees it: a row, the way to it while it runs, and the proof for what goes there.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use http::HeaderValue;
use jiff::Timestamp;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::http::proof::{Claims, ISSUER, MAX_LIFETIME_SECONDS, Route, Signer};
use crate::http::proxy::{Dial, Io, Proxy, ProxyLimits};
use crate::http::tls::{ChainCheck, SpkiPin, pinned_client_config};
use crate::machine::id::MachineId;
use crate::machine::name::{Handle, IdpUserId, Slot};
use crate::machine::state::Status;
use crate::platform::keys::SigningSet;

/// A signature serves this long; its proof is still good for the rest of [`MAX_LIFETIME_SECONDS`].
const PROOF_REUSE_SECONDS: i64 = 10;

/// What the database says of a machine.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) id: MachineId,
    pub(super) user: IdpUserId,
    pub(super) slot: Slot,
    pub(super) handle: Handle,
    pub(super) status: Status,
    /// By an operator: it is not routed to.
    pub(super) is_powered_off: bool,
    pub(super) endpoint: Option<Endpoint>,
    /// As they were when the row was read; [`Machine::acknowledge`] has later ones.
    pub(super) proof_kids: Vec<String>,
    pub(super) created_at: Timestamp,
}

/// Where a machine answers, and by which key it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Endpoint {
    pub(super) ip: Ipv4Addr,
    pub(super) port: u16,
    pub(super) pin: SpkiPin,
}

pub(super) struct Machine {
    pub(super) row: Row,
    /// Present exactly while it is routed to.
    pub(super) way: Option<Arc<Way>>,
    vouching: Mutex<Vouching>,
}

/// The connections to one endpoint; they survive changes of the row that leave the endpoint as it is.
pub(super) struct Way {
    pub(super) endpoint: Endpoint,
    pub(super) proxy: Proxy,
}

/// The keys that the host has acknowledged, and the proofs that were signed for it in the last seconds.
struct Vouching {
    kids: Vec<String>,
    proofs: Vec<Vouched>,
}

struct Vouched {
    route: Route,
    app: Option<String>,
    made: i64,
    header: HeaderValue,
}

impl Machine {
    pub(super) fn new(row: Row, way: Option<Arc<Way>>) -> Self {
        let vouching = Vouching { kids: row.proof_kids.clone(), proofs: Vec::new() };
        Self { row, way, vouching: Mutex::new(vouching) }
    }

    /// Signs with what the host has acknowledged now.
    pub(super) fn acknowledge(&self, kids: Vec<String>) {
        let mut vouching = self.vouching.lock().unwrap_or_else(PoisonError::into_inner);
        if vouching.kids != kids {
            *vouching = Vouching { kids, proofs: Vec::new() };
        }
    }

    /// The proof for a request to this machine; the owner is the only user that it can be about.
    pub(super) fn proof(
        &self,
        route: Route,
        app: Option<&str>,
        keys: &SigningSet,
        now: Timestamp,
    ) -> HeaderValue {
        let now = now.as_second();
        let mut vouching = self.vouching.lock().unwrap_or_else(PoisonError::into_inner);
        let Vouching { kids, proofs } = &mut *vouching;
        proofs.retain(|vouched| (0..PROOF_REUSE_SECONDS).contains(&(now - vouched.made)));
        let known = proofs.iter().find(|known| known.route == route && known.app.as_deref() == app);
        if let Some(known) = known {
            return known.header.clone();
        }
        let header = self.sign(route, app, keys.signer_for(kids), now);
        let app = app.map(str::to_owned);
        proofs.push(Vouched { route, app, made: now, header: header.clone() });
        header
    }

    fn sign(&self, route: Route, app: Option<&str>, signer: &Signer, now: i64) -> HeaderValue {
        let claims = Claims {
            iss: ISSUER.to_owned(),
            aud: self.row.id,
            sub: self.row.user.clone(),
            handle: self.row.handle.clone(),
            slot: self.row.slot.clone(),
            route,
            app: app.map(str::to_owned),
            method: None,
            path: None,
            jti: None,
            iat: now,
            exp: now + MAX_LIFETIME_SECONDS,
        };
        let token = signer.sign(&claims);
        let mut header = HeaderValue::from_str(&token).expect("a JWT is base64url and dots");
        header.set_sensitive(true);
        header
    }
}

impl Way {
    /// # Errors
    /// When the trusted roots cannot be read.
    pub(super) fn new(endpoint: Endpoint, check: ChainCheck) -> anyhow::Result<Self> {
        let mut config = pinned_client_config(endpoint.pin, check)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let dial = Pinned { endpoint, connector: TlsConnector::from(Arc::new(config)) };
        Ok(Self { endpoint, proxy: Proxy::new(dial, ProxyLimits::default()) })
    }
}

struct Pinned {
    endpoint: Endpoint,
    connector: TlsConnector,
}

#[async_trait]
impl Dial for Pinned {
    async fn dial(&self) -> std::io::Result<Box<dyn Io>> {
        let Endpoint { ip, port, .. } = self.endpoint;
        let stream = TcpStream::connect(SocketAddr::from((ip, port))).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(self.connector.connect(ServerName::from(std::net::IpAddr::from(ip)), stream).await?))
    }
}

//! Probes the local gateway the way the router does: over HTTPS, with its certificate key pinned.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::layout::Layout;
use svc_http::client::{self, Timeouts};
use svc_http::tls::{self, ChainCheck, Identity, SpkiPin};

/// Reads the gateway certificate's pin. Returns `None` if the gateway hasn't created the certificate yet.
///
/// # Errors
/// If the certificate exists but cannot be read.
pub fn read_pin(layout: &Layout) -> anyhow::Result<Option<SpkiPin>> {
    match Identity::read(&layout.tls_cert(), &layout.tls_key()) {
        Ok(identity) => identity.pin().map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Client for this machine's gateway.
#[derive(Debug, Clone)]
pub struct GatewayClient {
    client: reqwest::Client,
    ready_url: String,
    live_url: String,
}

impl GatewayClient {
    /// # Errors
    /// If the HTTP client cannot be created.
    pub fn new(listen: SocketAddr, pin: SpkiPin) -> anyhow::Result<Self> {
        let config = tls::pinned_client_config(pin, ChainCheck::PinOnly)?;
        let client = client::build_with_tls(Timeouts::CALL, config)?;
        let base = format!("https://{}", replace_unspecified(listen));
        Ok(Self { client, ready_url: format!("{base}/readyz"), live_url: format!("{base}/livez") })
    }

    /// Returns whether the gateway is ready.
    pub async fn is_ready(&self) -> bool {
        self.responds_with_success(&self.ready_url).await
    }

    /// Returns whether the gateway process is running and responding.
    pub async fn is_alive(&self) -> bool {
        self.responds_with_success(&self.live_url).await
    }

    async fn responds_with_success(&self, url: &str) -> bool {
        self.client.get(url).send().await.is_ok_and(|response| response.status().is_success())
    }
}

/// Replaces an unspecified listen address with the loopback address.
fn replace_unspecified(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

//! Builds all reqwest clients. They have timeouts and use our resolver and rustls with ring; they follow no redirects
//! and ignore proxy settings in the environment.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use rustls::ClientConfig;

use super::{resolve, tls};

/// Timeouts for a client's calls.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    pub connect: Duration,
    /// Timeout from the start of the call until the last byte of the response; `None` for downloads, which are limited
    /// only by `connect` and `idle`.
    pub total: Option<Duration>,
    /// Timeout from the start of the call until the response's headers, which includes sending the body; then for each
    /// read of the response's body.
    pub idle: Duration,
}

impl Timeouts {
    pub const CALL: Self = Self {
        connect: Duration::from_secs(5),
        total: Some(Duration::from_secs(10)),
        idle: Duration::from_secs(10),
    };
    pub const DOWNLOAD: Self =
        Self { connect: Duration::from_secs(5), total: None, idle: Duration::from_secs(30) };
}

/// Builds a client that trusts the public root certificates and those in `SSL_CERT_FILE`, if set.
///
/// # Errors
/// If the extra root certificates cannot be read, or reqwest rejects the configuration.
pub fn build(timeouts: Timeouts) -> anyhow::Result<reqwest::Client> {
    build_with_tls(timeouts, tls::client_config()?)
}

/// Builds a client with the given TLS configuration, such as one with a pinned key.
///
/// # Errors
/// If reqwest rejects the configuration.
pub fn build_with_tls(timeouts: Timeouts, config: ClientConfig) -> anyhow::Result<reqwest::Client> {
    Ok(builder(timeouts, config).build()?)
}

/// Like [`build_with_tls`], but connects to `address` for URLs with the host `name`.
///
/// # Errors
/// If reqwest rejects the configuration.
pub fn build_for_address(
    timeouts: Timeouts,
    config: ClientConfig,
    name: &str,
    address: IpAddr,
) -> anyhow::Result<reqwest::Client> {
    // Port 0 means the port in the URL.
    Ok(builder(timeouts, config).resolve(name, SocketAddr::new(address, 0)).build()?)
}

/// Builds a client that sends all requests to a Unix socket, regardless of their host.
///
/// # Errors
/// If the extra root certificates cannot be read, or reqwest rejects the configuration.
pub fn build_for_socket(timeouts: Timeouts, socket: &Path) -> anyhow::Result<reqwest::Client> {
    Ok(builder(timeouts, tls::client_config()?).unix_socket(socket).build()?)
}

fn builder(timeouts: Timeouts, config: ClientConfig) -> reqwest::ClientBuilder {
    let builder = reqwest::Client::builder()
        .tls_backend_preconfigured(config)
        .dns_resolver(resolve::reqwest_resolver())
        .connect_timeout(timeouts.connect)
        .read_timeout(timeouts.idle)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .user_agent(concat!("svc/", env!("CARGO_PKG_VERSION")));
    match timeouts.total {
        Some(total) => builder.timeout(total),
        None => builder,
    }
}

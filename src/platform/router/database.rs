//! Resolves the addresses of the platform's database.

use tokio_postgres::Config;
use tokio_postgres::config::Host;

use svc_http::resolve::{self, ResolveError};

/// Resolves the hosts' names, because the driver would call getaddrinfo, which a static glibc binary must not call.
/// Explicit addresses and sockets are left unchanged. Either all hosts must be sockets, or none.
///
/// # Errors
/// If a host's name cannot be resolved.
pub async fn resolve_hosts(config: &Config) -> Result<Config, ResolveError> {
    let mut config = config.clone();
    if config.get_hostaddrs().is_empty() {
        for host in config.get_hosts().to_vec() {
            if let Host::Tcp(name) = host {
                let addresses = resolve::lookup_addresses(&name).await?;
                config.hostaddr(addresses[0]);
            }
        }
    }
    Ok(config)
}

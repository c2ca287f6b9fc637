//! `svc-platform probe`: checks whether the local platform process is ready, for supervisors without an HTTP client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::anyhow;

use super::config::{ListenerConfig, PlatformConfig};
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::config::Env;
use svc_http::client::{self, Timeouts};
use svc_http::problem::format_chain;
use svc_http::tls::{self, ChainCheck, Identity};

pub async fn run(mut env: Env) -> Result<(), Failure> {
    let listener = PlatformConfig::read_api_listener(&mut env);
    let listener = env.finish(Some(listener))?;
    let (client, scheme) = build_client(&listener).or_exit(Exit::Config)?;
    let ip = match listener.address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let url = format!("{scheme}://{}/readyz", std::net::SocketAddr::new(ip, listener.address.port()));
    let detail = match client.get(&url).send().await {
        Ok(response) if response.status().is_success() => return Ok(()),
        Ok(response) => format!("{} {}", response.status(), response.text().await.unwrap_or_default()),
        Err(error) => format_chain(&error.without_url()),
    };
    Err(Failure::new(Exit::Unavailable, anyhow!("the platform is not ready: {detail}")))
}

/// Builds a client and returns it with the URL scheme. With TLS, the certificate names the public host, which differs
/// from the probed address, so the client verifies the key instead of the name.
fn build_client(listener: &ListenerConfig) -> anyhow::Result<(reqwest::Client, &'static str)> {
    let Some(files) = &listener.tls else { return Ok((client::build(Timeouts::CALL)?, "http")) };
    let pin = Identity::read(&files.cert, &files.key)?.pin()?;
    let config = tls::pinned_client_config(pin, ChainCheck::PinOnly)?;
    Ok((client::build_with_tls(Timeouts::CALL, config)?, "https"))
}

//! `svc-gateway`: the machine's HTTPS port. Owner API, bridge, apps, and the way to shell and code server.
//!
//! It listens at once, without waiting for the database. Invariant: on the public port nothing but the two health
//! routes is served without a valid proof or token.

mod apps;
mod auth;
mod body;
mod bridge;
mod certificate;
pub mod cli;
mod config;
mod database;
mod endpoint;
mod events;
mod lifetime;
mod proxy;
mod router;
pub mod routes;
mod state;
mod writers;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use axum::Extension;
use clap::Parser;
use sd_notify::NotifyState;
use tokio::net::TcpListener;

#[cfg(feature = "fuzzing")]
pub use self::bridge::fuzzing as bridge_fuzzing;
pub use self::endpoint::Endpoint;
pub use self::router::{ENDPOINTS, description};

use self::auth::Ingress;
use self::config::Config;
use self::state::Gateway;
use super::system::config::begin_log;
use super::system::layout::{BRIDGE_SOCKET, Layout};
use super::system::{systemd, unix_socket};
use crate::applet::{self, Exit, Failure, OrExit};
use crate::http::server::{self, Limits};
use crate::metrics;

#[derive(Parser)]
#[command(
    name = "svc-gateway",
    version = applet::VERSION,
    about = "The machine's HTTPS port: owner API, bridge, apps, and the way to shell and code server",
    after_help = "It is configured by the environment and /opt/svc/env/*.env below SVC_ROOT; see the README."
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Copy the release's default apps into the owner's, as the owner's user; what the owner changed stays
    InstallApps,
    /// Show what dispatches have cost, summed up
    #[command(after_help = "Example: svc-gateway usage --by model --since 2026-11-01")]
    Usage(cli::UsageArgs),
    /// Show the last lines of a record, and follow it
    #[command(after_help = "Example: svc-gateway logs audit --follow")]
    Logs(cli::LogsArgs),
}

/// The applet.
pub fn run(args: Vec<OsString>) -> ExitCode {
    let args = match applet::parse::<Args>(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    begin_log("svc-gateway", &Layout::from_process());
    match args.command {
        None => applet::block_on("svc-gateway", serve(Layout::from_process())),
        Some(Command::InstallApps) => {
            applet::block_on("svc-gateway", async { apps::install_bundled(&Layout::from_process()) })
        }
        Some(Command::Usage(args)) => {
            applet::block_on("svc-gateway", async { cli::usage(&Layout::from_process(), args) })
        }
        Some(Command::Logs(args)) => {
            applet::block_on("svc-gateway", async move { cli::logs(&Layout::from_process(), &args) })
        }
    }
}

async fn serve(layout: Layout) -> Result<(), Failure> {
    if layout.superseded().exists() {
        let why = anyhow!("another machine has taken this one's place ({})", layout.superseded().display());
        return Err(Failure::new(Exit::Permission, why));
    }
    let config = Config::load(layout)?;
    let layout = config.layout.clone();
    let identity = certificate::open(&layout).context("the machine's TLS key").or_exit(Exit::Internal)?;
    let tls = identity.server_config().context("the machine's TLS key").or_exit(Exit::Internal)?;
    // It stays for as long as the machine, and nobody else knows it.
    let change_ids = bridge::IdSecret::derive(identity.key_pem.as_bytes());
    let bound = TcpListener::bind(config.listen).await;
    let public = bound.with_context(|| format!("listen on {}", config.listen)).or_exit(Exit::Unavailable)?;
    let trusted = unix_socket::bind(&layout.gateway_sockets(), "gateway.sock");
    let trusted = trusted.context("the unix socket").or_exit(Exit::Unavailable)?;
    let agents = unix_socket::bind(&layout.bridge_sockets(), BRIDGE_SOCKET);
    let agents = agents.context("the agents' unix socket").or_exit(Exit::Unavailable)?;
    let stop = server::stop_on_signal().context("signals").or_exit(Exit::Internal)?;
    let scrape = metrics::install()?;
    scrape.spawn_upkeep(stop.clone());
    let gateway = Gateway::new(config, change_ids)?;

    let apps = tokio::spawn(apps::supervise(gateway.clone(), stop.clone()));
    tokio::spawn(apps::measure_sizes(gateway.clone(), stop.clone()));
    tokio::spawn(bridge::tend(gateway.clone(), stop.clone()));
    let tended = tokio::spawn(gateway.kernel.clone().tend(stop.clone()));
    tokio::spawn(gateway.dispatcher.clone().tend(stop.clone()));
    tokio::spawn(gateway.writers.clone().watch(gateway.dispatcher.clone(), stop.clone()));
    tokio::spawn(lifetime::watch_superseded(layout.superseded(), stop.clone()));
    tokio::spawn(systemd::feed_watchdog(stop.clone(), async || true));
    let local = router::router(&gateway, Ingress::Trusted).layer(Extension(scrape));
    let local = tokio::spawn(unix_socket::serve(trusted, local, stop.clone()));
    let of_agents = tokio::spawn(unix_socket::serve(agents, router::bridge(&gateway), stop.clone()));
    let told = stop.clone();
    tokio::spawn(async move {
        told.cancelled().await;
        systemd::notify(&[NotifyState::Stopping]);
    });

    let address = server::local_addr(&public).or_exit(Exit::Internal)?;
    tracing::info!(%address, "listening");
    let status = format!("listening on {address}");
    systemd::notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
    let routes = router::router(&gateway, Ingress::Public);
    let dispatcher = gateway.dispatcher.clone();
    let told = stop.clone();
    let dispatched = tokio::spawn(async move {
        told.cancelled().await;
        dispatcher.close().await;
    });
    // The router's processes are its clients, and may all have one address.
    let limits = Limits::default();
    let limits = Limits { connections_of_address: limits.connections / 4 * 3, ..limits };
    server::serve(public, Some(Arc::new(tls)), routes, limits, stop).await;
    // Requests are answered; what still runs belongs to nobody.
    apps.abort();
    local.abort();
    of_agents.abort();
    // A panic in one of these has been told by its own message.
    let _ = dispatched.await;
    let _ = tended.await;
    let kernel = gateway.kernel.clone();
    tokio::task::spawn_blocking(move || kernel.close()).await.or_exit(Exit::Internal)?;
    Ok(())
}

//! `svc-gateway`: serves the owner API, the bridge and apps on the machine's HTTPS port, and proxies the shell and
//! code-server.
//!
//! Starts listening without waiting for the database. Invariant: on a provisioned machine's public port, only the two
//! health routes are served without a valid proof or token.

mod apps;
mod auth;
mod body;
mod bridge;
mod certificate;
pub mod cli;
mod config;
mod database;
mod disk_watch;
mod endpoint;
mod events;
mod identify;
mod name;
mod proxy;
mod responder;
mod route_table;
pub mod routes;
mod state;
mod superseded_watch;
mod writers;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use clap::Parser;
use sd_notify::NotifyState;
use tokio::net::TcpListener;

#[cfg(feature = "fuzzing")]
pub use self::bridge::fuzzing as bridge_fuzzing;
pub use self::endpoint::Endpoint;
pub use self::route_table::{endpoints, openapi_document};

use self::auth::Ingress;
use self::certificate::{CertificateManager, CertificateManagerConfig};
use self::config::Config;
use self::responder::Responder;
use self::state::Services;
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_base::metrics;
use svc_host::system::config::init_log;
use svc_host::system::layout::{BRIDGE_SOCKET, Layout};
use svc_host::system::{release, systemd, unix_socket};
use svc_http::server::{self, ListenerLimits};

#[derive(Parser)]
#[command(
    name = "svc-gateway",
    version = applet::version(),
    about = "The machine's HTTPS port: owner API, bridge, apps, and a proxy to the shell and code-server",
    after_help = "Configured by the environment and /opt/svc/env/*.env below SVC_ROOT; docs/reference/configuration.md lists all variables."
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Copy the bundled apps into the owner's apps directory, keeping the owner's changes; run as the owner's user
    InstallApps,
    /// Show the aggregate cost of dispatches
    #[command(after_help = "Example: svc-gateway usage --by model --since 2026-11-01")]
    Usage(cli::UsageArgs),
    /// Print a certificate signing request for this machine's name and key, to submit to a certificate authority
    #[command(after_help = "Example: svc-gateway certificate-request > request.pem")]
    CertificateRequest,
    /// Show the last lines of a log, and optionally follow it
    #[command(after_help = "Example: svc-gateway logs audit --follow")]
    Logs(cli::LogsArgs),
}

/// Returns the clap command, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

/// Runs the applet.
pub fn run(args: Vec<OsString>) -> ExitCode {
    let args = match applet::parse::<Args>(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    init_log("svc-gateway", &Layout::from_process());
    match args.command {
        None => applet::block_on("svc-gateway", serve(Layout::from_process())),
        Some(Command::InstallApps) => {
            applet::block_on("svc-gateway", async { apps::run_install(&Layout::from_process()) })
        }
        Some(Command::CertificateRequest) => {
            applet::block_on("svc-gateway", async { certificate::print_csr(&Layout::from_process()) })
        }
        Some(Command::Usage(args)) => {
            applet::block_on("svc-gateway", async { cli::print_usage(&Layout::from_process(), args) })
        }
        Some(Command::Logs(args)) => {
            applet::block_on("svc-gateway", async move { cli::print_logs(&Layout::from_process(), &args) })
        }
    }
}

async fn serve(layout: Layout) -> Result<(), Failure> {
    if layout.superseded().exists() {
        let error = anyhow!("this machine has been replaced or deleted ({})", layout.superseded().display());
        return Err(Failure::new(Exit::Permission, error));
    }
    let config = Config::load(layout)?;
    let layout = config.layout.clone();
    let identity =
        certificate::load_or_create(&layout).context("cannot load the TLS key").or_exit(Exit::Internal)?;
    // Derive the change-event id secret from the TLS key, which is unique to this machine and never changes during its
    // lifetime.
    let event_id_secret = bridge::EventIdSecret::derive(identity.key_pem.as_bytes());
    let certificate_manager = CertificateManagerConfig {
        layout: layout.clone(),
        machine: config.machine_id(),
        file: config.certificate_file.clone(),
        initial_backoff: config.acme_initial_backoff,
    };
    let certificate_manager = CertificateManager::new(certificate_manager, identity).or_exit(Exit::Config)?;
    let tls = certificate_manager.resolver().server_config().or_exit(Exit::Internal)?;
    let listener = TcpListener::bind(config.listen).await;
    let public_listener =
        listener.with_context(|| format!("cannot listen on {}", config.listen)).or_exit(Exit::Unavailable)?;
    let trusted_socket = unix_socket::bind(&layout.gateway_sockets(), "gateway.sock");
    let trusted_socket = trusted_socket.context("cannot bind gateway.sock").or_exit(Exit::Unavailable)?;
    let agent_socket = unix_socket::bind(&layout.bridge_sockets(), BRIDGE_SOCKET);
    let agent_socket = agent_socket.context("cannot bind the agent socket").or_exit(Exit::Unavailable)?;
    let stop = server::stop_on_signal().context("cannot handle signals").or_exit(Exit::Internal)?;
    let metrics_handle = metrics::install()?;
    metrics_handle.spawn_upkeep(stop.clone());
    let services = Arc::new(Services::new(&config, event_id_secret, metrics_handle)?);
    let Services { apps, database, quotas, changes, kernel, dispatcher, writers, .. } = &*services;

    let release =
        release::current_version(&layout).map_or_else(String::new, |version| format!(" (release {version})"));
    kernel.note(&format!("the gateway has started{release}"));
    let supervisor = apps::SupervisorContext {
        layout: layout.clone(),
        registry: apps.clone(),
        database: database.clone(),
        writers: writers.clone(),
        kernel: kernel.clone(),
        epoch: config.epoch(),
        statement_timeout: config.statement_timeout,
    };
    let supervisor_task = tokio::spawn(apps::supervise(supervisor, stop.clone()));
    tokio::spawn(apps::measure_periodically(quotas.clone(), database.clone(), stop.clone()));
    let changes_retention = config.changes_retention;
    tokio::spawn(changes.clone().run(database.clone(), apps.clone(), changes_retention, stop.clone()));
    let kernel_task = tokio::spawn(kernel.clone().maintain(stop.clone()));
    tokio::spawn(dispatcher.clone().maintain(stop.clone()));
    tokio::spawn(disk_watch::watch_disk(layout.clone(), kernel.clone(), stop.clone()));
    tokio::spawn(writers.clone().watch(stop.clone()));
    tokio::spawn(superseded_watch::watch_superseded(layout.superseded(), stop.clone()));
    tokio::spawn(certificate_manager.run(stop.clone()));
    tokio::spawn(systemd::feed_watchdog(stop.clone(), async || true));
    let [public, trusted, agents] = [Ingress::Public, Ingress::Trusted, Ingress::Agents]
        .map(|ingress| Responder::new(services.clone(), ingress));
    let trusted_task = tokio::spawn(unix_socket::serve(trusted_socket, trusted.into_router(), stop.clone()));
    let agents_task = tokio::spawn(unix_socket::serve(agent_socket, agents.into_router(), stop.clone()));
    let stopping = stop.clone();
    tokio::spawn(async move {
        stopping.cancelled().await;
        systemd::notify(&[NotifyState::Stopping]);
    });

    let address = server::local_addr(&public_listener).or_exit(Exit::Internal)?;
    tracing::info!(%address, "listening");
    let status = format!("listening on {address}");
    systemd::notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
    let closing_dispatcher = dispatcher.clone();
    let stopping = stop.clone();
    let dispatcher_task = tokio::spawn(async move {
        stopping.cancelled().await;
        closing_dispatcher.close().await;
    });
    // Clients are the platform's router processes, which may all share one address.
    let limits = ListenerLimits::default();
    let limits = ListenerLimits { max_connections_per_address: limits.max_connections / 4 * 3, ..limits };
    server::serve(public_listener, Some(Arc::new(tls)), public, limits, stop).await;
    // The public port has drained or hit the drain timeout. We don't wait for requests on the Unix sockets.
    supervisor_task.abort();
    trusted_task.abort();
    agents_task.abort();
    // Panics in these tasks have already been logged.
    let _ = dispatcher_task.await;
    let _ = kernel_task.await;
    kernel.note("the gateway has stopped");
    let kernel = kernel.clone();
    tokio::task::spawn_blocking(move || kernel.close()).await.or_exit(Exit::Internal)?;
    Ok(())
}

//! `svc-platform`: the control plane. Only this file assembles its parts and starts the router alongside it.
//!
//! Arguments → configuration → store check → bind → migrate → key check → serve, ready → signal → drain.

pub mod alarms;
pub mod api;
pub mod bundle_keys;
pub mod certificates;
pub mod config;
pub mod context;
pub mod copies;
pub mod db;
pub mod doctor;
pub mod exercises;
pub mod file_pruning;
pub mod files_keys;
pub mod fleet;
pub mod fleet_metrics;
pub mod former_machines;
pub mod host_settings;
pub mod key_rotation;
pub mod keys;
pub mod lifecycle;
mod listing_interval;
pub mod openapi;
pub mod operations;
pub mod operators;
pub mod platform_key;
pub mod platform_key_rotation;
mod probe;
pub mod process_clock;
pub mod quote_cache;
pub mod rate_budget;
pub mod rate_limits;
pub mod readiness;
pub mod resource;
pub mod rollout_plan;
pub mod rollouts;
mod server_cost;
pub mod server_lookup_limiter;
pub mod store_access_issuer;
pub mod token_rotation;
pub mod tokens;
pub mod userdata;
pub mod vars;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Extension;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use self::api::OpenApi;
use self::config::{ListenerConfig, PlatformConfig};
use self::context::Platform;
use self::db::platform_keys::ProcessKeys;
use self::db::{Db, DbError};
use self::keys::{KeyError, Seal};
use self::platform_key_rotation::admission::AdmissionError;
use self::platform_key_rotation::marker::{self, MarkerError};
use self::process_clock::ProcessClock;
use self::quote_cache::QuoteCache;
use self::rate_budget::SharedBudget;
use self::rate_limits::ApiRateLimits;
use self::readiness::ReadinessProbe;
use self::server_lookup_limiter::ServerLookupLimiter;
use self::store_access_issuer::StoreAccessIssuer;
use self::tokens::TokenMint;
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_base::config::{Env, platform_env_file};
use svc_base::metrics;
use svc_base::telemetry;
use svc_http::client::{self, Timeouts};
use svc_http::server::{self, ListenerLimits};
use svc_http::shards::Shards;
use svc_http::tls::Identity;
use svc_provider::hetzner::Hetzner;
use svc_router::host_trust::HostTrust;
use svc_router::route_freshness::RouteFreshness;
use svc_router::{RouterContext, UserDigests, start_router};
use svc_store::{Bucket, parallel_probe};
use svc_wire::text::WireString;

/// Timeout for running steps to finish after the stop signal; the next process resumes unfinished steps.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(25);

/// Timeout for the store probe, so that an unreachable store does not delay startup.
const STORE_PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for one read or write of an object, including retries: shorter than the timeout of an operator's client.
const STORE_CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The control plane: provisions, recovers and deletes machines, and routes their owners to them.
#[derive(clap::Parser)]
#[command(
    name = "svc-platform",
    version = applet::version(),
    about = "Control plane and router; configured by environment variables"
)]
struct Args {
    /// Settings file; the environment overrides its settings, and /proc/PID/environ does not show them; default:
    /// PLATFORM_ENV_FILE
    #[arg(long, value_name = "FILE", global = true)]
    env_file: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Check whether the platform process on this server with these settings is ready; exits 69 if it is not
    Probe,
}

/// Returns the command-line definition, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args: Args = match applet::parse(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let file = platform_env_file(args.env_file);
    let env = || Env::from_process_and_file(file.as_deref());
    match args.command {
        Some(Command::Probe) => applet::block_on("svc-platform", async { probe::run(env()).await }),
        None => {
            telemetry::init("svc-platform");
            applet::block_on("svc-platform", async { serve(PlatformConfig::read(env())?).await })
        }
    }
}

async fn serve(config: PlatformConfig) -> Result<(), Failure> {
    let metrics_handle = metrics::install().or_exit(Exit::Internal)?;
    let store_access =
        StoreAccessIssuer::new(&config.store, &config.host_credentials).or_exit(Exit::Config)?;
    let store_access = store_access.with_host_endpoint(config.hosts.store_endpoint.as_ref());
    if store_access.shares_platform_credentials() {
        tracing::warn!(
            "STORE_HOST_CREDENTIALS=static: every host gets the platform's own object store credentials"
        );
    }
    if let Some(reason) = config.shared_site_warning() {
        tracing::warn!("{reason}; use another registrable domain");
    }
    let bucket = config.store.open().or_exit(Exit::Config)?.with_call_timeout(STORE_CALL_TIMEOUT);
    refuse_unsafe_store(&bucket).await?;
    let stop = server::stop_on_signal().or_exit(Exit::Internal)?;
    metrics_handle.spawn_upkeep(stop.clone());
    let api = bind(&config.api).await.or_exit(Exit::Unavailable)?;
    let public = bind(&config.router).await.or_exit(Exit::Unavailable)?;
    db::migrate::run(&config.database).await.or_exit(Exit::Unavailable)?;
    let pool = |max_connections: usize| Db::new(&config.database, max_connections).or_exit(Exit::Internal);
    let db = pool(config.connections.control)?;
    let (host_db, report_db) = (pool(config.connections.hosts)?, pool(config.connections.reports)?);
    let seal = || Seal::from_keys(&config.keys);
    let mint = TokenMint::new(&config.keys.current).with_previous(config.keys.previous.as_ref());
    let process = admit(&db, &bucket, &config, &mint).await?;
    log_start(&process, &api.url);
    let keys = keys::load(&db, &seal(), config.timing.keys.overlap).await.map_err(|error| match error {
        KeyError::Db(_) => Failure::new(Exit::Unavailable, error),
        KeyError::CannotOpen { .. } | KeyError::Corrupt { .. } => Failure::new(Exit::Config, error),
        KeyError::Randomness => Failure::new(Exit::Internal, error),
    })?;
    warn_about_missing_certificates(&report_db, &config.trust).await;
    let row_renewal = tokio::spawn(platform_key_rotation::renew_process_row(db.clone(), process.clone()));
    let installation = load_installation_id(&db).await.or_exit(Exit::Unavailable)?;
    let (keys_sender, keys) = watch::channel(Arc::new(keys));
    let (rotation_seal, platform_key_seal, file_seal) = (seal(), seal(), seal());
    // A separate pool, because its connections run on the router's threads and end with them.
    let router_db = pool(config.connections.router)?;
    let freshness = Arc::new(RouteFreshness::new(config.routing.max_staleness));
    let router_context = RouterContext {
        pool: router_db.pool().clone(),
        database: config.database.clone(),
        config: config.routing.clone(),
        trust: config.trust.clone(),
        signing_keys: keys.clone(),
        user_digests: UserDigests::new(&config.keys.current, config.keys.previous.as_ref()),
        freshness: freshness.clone(),
        stop: stop.clone(),
    };
    let clock = Arc::new(ProcessClock::new(config.timing.max_clock_skew));
    clock.compare(&db).await;
    let client = client::build(Timeouts::CALL).or_exit(Exit::Internal)?;
    let (api_url, token) = (config.provider.api_url.clone(), &config.provider.token);
    let budget = Arc::new(SharedBudget::new(db.clone(), &api_url, token));
    let provider = Hetzner::with_rate_budget(client, api_url, token, budget);
    let platform = Arc::new(Platform {
        provider: Arc::new(provider.or_exit(Exit::Config)?),
        bucket,
        store_access,
        mint,
        seal: file_seal,
        process,
        installation,
        db: db.clone(),
        host_db,
        report_db,
        clock,
        keys,
        route_freshness: freshness,
        runner_wake: Notify::new(),
        reconciler_wake: Notify::new(),
        server_lookup_limiter: ServerLookupLimiter::new(config.timing.server_check_interval),
        rate_limits: ApiRateLimits::new(&config.rate_limits),
        quotes: QuoteCache::default(),
        readiness: ReadinessProbe::default(),
        stop: stop.clone(),
        config,
    });

    let mut tasks = JoinSet::new();
    tasks.spawn(key_rotation::run(db, rotation_seal, platform.config.timing.keys, keys_sender, stop.clone()));
    tasks.spawn(platform_key_rotation::run_key_rotation(platform.clone(), platform_key_seal));
    tasks.spawn(marker::write_until_stopped(platform.clone()));
    tasks.spawn(process_clock::run(Arc::clone(&platform.clock), platform.db.clone(), platform.stop.clone()));
    tasks.spawn(operations::runner::run(platform.clone()));
    tasks.spawn(operations::reconcile::run(platform.clone()));
    tasks.spawn(rollouts::run(platform.clone()));
    for _ in 0..file_pruning::WORKERS {
        tasks.spawn(file_pruning::run(platform.clone()));
    }
    println!("listening api {}", api.url);
    let control = api::routes(platform.clone())
        .layer(Extension(metrics_handle))
        .layer(Extension(OpenApi(&openapi::JSON)));
    let trusted_proxies = platform.config.rate_limits.trusted_proxies.clone();
    let limits = ListenerLimits { trusted_proxies, ..ListenerLimits::default() };
    tasks.spawn(server::serve(api.listener, api.tls, control, limits, stop.clone()));
    let router = start_router(router_context).or_exit(Exit::Internal)?;
    println!("listening router {}", public.url);
    let trusted_proxies = platform.config.routing.trusted_proxies.clone();
    let limits = ListenerLimits { trusted_proxies, ..ListenerLimits::default() };
    let shards = Shards::start().or_exit(Exit::Internal)?;
    tasks.spawn(router.serve(shards, public.listener, public.tls, limits, stop.clone()));
    // Without systemd, this does nothing. An error is not a reason to stop.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);

    tokio::select! {
        // Tasks that end because of the stop signal have not failed.
        biased;
        () = stop.cancelled() => {}
        ended = tasks.join_next() => {
            stop.cancel();
            let error = ended.and_then(Result::err);
            let reason = error.map_or_else(|| "it returned".to_owned(), |error| error.to_string());
            let error = anyhow::anyhow!("a platform task ended unexpectedly: {reason}");
            return Err(Failure::new(Exit::Internal, error));
        }
    }
    tracing::info!("draining");
    let drained =
        tokio::time::timeout(DRAIN_TIMEOUT, async { while tasks.join_next().await.is_some() {} }).await;
    if drained.is_err() {
        tracing::warn!("some tasks did not end in time; the next process resumes their work");
    }
    row_renewal.abort();
    delete_process_row(&platform).await;
    Ok(())
}

/// Records this process as running if it may run with its platform keys alongside the other processes.
async fn admit(
    db: &Db,
    bucket: &Bucket,
    config: &PlatformConfig,
    mint: &TokenMint,
) -> Result<ProcessKeys, Failure> {
    let (process, seal) = (
        platform_key_rotation::create_process_keys(config.keys.ids(), &config.timing),
        Seal::from_keys(&config.keys),
    );
    // The check precedes every write to the database except the migrations: a process with outdated keys must leave
    // the data unchanged.
    let is_checked = handle_marker_result(marker::check(bucket, &process.ids).await.map(drop))?;
    let max_gap = config.timing.keys.max_heartbeat_gap;
    match platform_key_rotation::admission::admit(db, &process, mint, &seal, max_gap).await {
        Ok(()) => {}
        Err(error @ (AdmissionError::Db(_) | AdmissionError::Key(KeyError::Db(_)))) => {
            return Err(Failure::new(Exit::Unavailable, error));
        }
        Err(error) => return Err(Failure::new(Exit::Config, error)),
    }
    if is_checked {
        handle_marker_result(marker::write(bucket, &process.ids).await)?;
    }
    Ok(process)
}

/// Rejects outdated keys and a corrupt marker; otherwise returns whether the check or write succeeded. If the store is
/// unavailable, the process starts, and repeats the check while it is running ([`marker::write_until_stopped`]).
fn handle_marker_result(result: Result<(), MarkerError>) -> Result<bool, Failure> {
    match result {
        Err(error) if error.is_fatal() => Err(Failure::new(Exit::Config, error)),
        Err(error) => {
            tracing::warn!(error = %svc_base::error_chain::format_chain(&error), "cannot check or write the marker of the current platform key");
            Ok(false)
        }
        Ok(()) => Ok(true),
    }
}

/// Warns about machines without a trusted certificate, which are unreachable after their grace period. The platform
/// starts anyway: a few such machines must not prevent it from serving the others.
async fn warn_about_missing_certificates(db: &Db, trust: &HostTrust) {
    if trust.chain.is_none() {
        return;
    }
    let list = async { db::fleet::list_active_machines(&db.session().await?).await };
    match list.await {
        Ok(rows) => {
            let summary = certificates::summarize(&rows, trust);
            if let Some(summary) = summary.filter(|summary| summary.missing > summary.exempt) {
                let handles: Vec<_> = summary.missing_handles.iter().map(WireString::as_str).collect();
                let (machines, exempt) = (summary.missing, summary.exempt);
                tracing::warn!(
                    machines,
                    exempt,
                    ?handles,
                    "CUSTOMER_VPS_TLS_VERIFY is on, but machines have no trusted certificate; they are unreachable unless \
                     they are new or exempt: see `svcctl fleet`"
                );
            }
        }
        Err(error) => {
            tracing::warn!(error = %svc_base::error_chain::format_chain(&error), "cannot check the certificates of machines");
        }
    }
}

/// Logs the process's id and the fingerprints of its keys, so that an operator can find a process that
/// `svcctl doctor platform` names.
fn log_start(process: &ProcessKeys, api: &str) {
    let ProcessKeys { process, ids, .. } = process;
    let previous = ids.previous.as_ref().map(tracing::field::display);
    tracing::info!(%process, api, key = %ids.current, previous, "platform process started with these keys");
}

/// Deletes this process's row, so that a starting process with other platform keys need not wait until it expires.
async fn delete_process_row(platform: &Platform) {
    let delete = async { platform.process.delete(&platform.db.session().await?).await };
    if let Err(error) = delete.await {
        tracing::debug!(error = %svc_base::error_chain::format_chain(&error), "cannot delete this process's row; it will expire");
    }
}

/// Rejects a store in which concurrent conditional writes to a pointer by two hosts could both succeed. An unavailable
/// store is accepted.
async fn refuse_unsafe_store(bucket: &Bucket) -> Result<(), Failure> {
    match parallel_probe::run(bucket, STORE_PROBE_TIMEOUT).await {
        Ok(findings) => {
            if let Some(reason) = findings.refusal() {
                return Err(Failure::new(Exit::Config, anyhow::anyhow!(reason)));
            }
            if let Some(reason) = findings.warning() {
                tracing::warn!("{reason}");
            }
        }
        Err(error) => {
            tracing::warn!(error = %svc_base::error_chain::format_chain(&error), "cannot test the object store with parallel writers");
        }
    }
    Ok(())
}

async fn load_installation_id(db: &Db) -> Result<uuid::Uuid, DbError> {
    db::servers::load_installation_id(&db.session().await?).await
}

struct BoundListener {
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    url: String,
}

async fn bind(listen: &ListenerConfig) -> anyhow::Result<BoundListener> {
    let tls = match &listen.tls {
        Some(files) => {
            let identity = Identity::read(&files.cert, &files.key).with_context(|| {
                format!("cannot read {} and {}", files.cert.display(), files.key.display())
            })?;
            Some(Arc::new(identity.server_config()?))
        }
        None => None,
    };
    let listener = TcpListener::bind(listen.address)
        .await
        .with_context(|| format!("cannot listen on {}", listen.address))?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{}", server::local_addr(&listener)?);
    Ok(BoundListener { listener, tls, url })
}

//! The router: serves `APP_HOST` and `CODE_HOST`, and forwards each request to the caller's running machine.
//!
//! A token or a session identifies the caller; only database rows determine the machine. The router changes no machine.
//! Invariant: a request whose session or token is cached needs neither a query nor a signature verification.

mod account;
mod app_request;
mod app_token;
mod browser_data;
mod builtin;
mod builtin_routes;
pub mod config;
mod cookie;
pub mod database;
mod directory;
mod forward;
mod frame;
mod headers;
pub mod host_domain;
pub mod host_trust;
mod identity;
mod machine;
mod origin;
mod page;
pub mod public_host;
mod request_context;
mod responses;
mod return_path;
pub mod route_freshness;
mod serve;
mod session;
mod session_token;
mod sign_in;
mod sign_outs;
pub mod signed_lifetimes;
pub mod signing_set;
pub mod watch;

use std::sync::Arc;

use anyhow::Context;
use axum::extract::Request;
use axum::response::Response;
use deadpool_postgres::Pool;
use tokio::net::TcpListener;
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;

pub use browser_data::UserDigests;
pub use builtin_routes::{BuiltinRoute, ROUTES, openapi_servers, user_slot_schema};
#[cfg(feature = "fuzzing")]
pub use cookie::{drop_reserved, reserved_names};

use config::RouterConfig;
use directory::Directory;
use host_trust::HostTrust;
use identity::Authenticator;
use route_freshness::RouteFreshness;
use session::Sessions;
use sign_outs::SignOuts;
use signing_set::SigningSet;
use svc_http::observe::{self, Listener};
use svc_http::passthrough::Passthrough;
use svc_http::rate_limit::RateLimit;
use svc_http::server::{self, ConnectionInfo, ListenerLimits, Respond, RouterThreads};
use svc_http::shards::Shards;
use svc_http::{client, jwt};
use svc_machine::name::IdpUserId;
use watch::Watcher;

/// Burst of the limit on each user's requests, in seconds of the sustained rate.
const USER_BURST_SECONDS: u32 = 2;

/// The router's dependencies.
pub struct RouterContext {
    pub pool: Pool,
    /// For the watcher's dedicated connection, which does not wait for the pool.
    pub database: tokio_postgres::Config,
    pub config: RouterConfig,
    /// The TLS verification of connections to hosts.
    pub trust: HostTrust,
    pub signing_keys: channel::Receiver<Arc<SigningSet>>,
    pub user_digests: UserDigests,
    /// Shared with the process's readiness check.
    pub freshness: Arc<RouteFreshness>,
    pub stop: CancellationToken,
}

/// State that all requests share.
struct RouterState {
    config: RouterConfig,
    directory: Arc<Directory>,
    sessions: Arc<Sessions>,
    sign_outs: Arc<SignOuts>,
    authenticator: Authenticator,
    user_rate: RateLimit<IdpUserId>,
    signing_keys: channel::Receiver<Arc<SigningSet>>,
    user_digests: UserDigests,
}

/// The service for the public listener.
pub struct RouterService {
    pub responder: RouterResponder,
    /// Present if `HOST_DOMAIN` is set.
    passthrough: Option<Arc<Passthrough>>,
}

impl RouterService {
    /// Serves the public listener on `shards` until `stop`.
    ///
    /// [`server::serve_on`] is generic, so its code is generated in the crate that calls it. The call must be in this
    /// crate, because release builds optimize this crate for speed, but the control plane's crate for size.
    pub async fn serve(
        self,
        shards: Shards,
        listener: TcpListener,
        tls: Option<Arc<rustls::ServerConfig>>,
        limits: ListenerLimits,
        stop: CancellationToken,
    ) {
        let threads = RouterThreads { shards, passthrough: self.passthrough };
        server::serve_on(threads, listener, tls, self.responder, limits, stop).await;
    }
}

/// Responds without a route table, because all requests go through the same handler.
#[derive(Clone)]
pub struct RouterResponder(Arc<RouterState>);

impl Respond for RouterResponder {
    async fn respond(&self, request: Request, connection: ConnectionInfo) -> Response {
        observe::observe(Listener::Router, None, request, |request| self.0.respond(request, connection)).await
    }
}

/// Starts the database watcher, which runs until `stop`, and returns the service for the public listener.
///
/// # Errors
/// If the HTTP client for the identity provider cannot be created.
pub fn start_router(ctx: RouterContext) -> anyhow::Result<RouterService> {
    let client =
        client::build(client::Timeouts::CALL).context("cannot create the identity provider's HTTP client")?;
    let directory = Arc::new(Directory::new(ctx.trust, Arc::clone(&ctx.freshness)));
    let sessions = Sessions::new(ctx.pool, Arc::clone(&ctx.freshness), ctx.signing_keys.clone());
    let sessions = Arc::new(sessions);
    let sign_outs = Arc::<SignOuts>::default();
    let watcher = Watcher {
        database: ctx.database,
        directory: Arc::clone(&directory),
        sessions: Arc::clone(&sessions),
        sign_outs: Arc::clone(&sign_outs),
        freshness: ctx.freshness,
        interval: ctx.config.poll_interval,
    };
    tokio::spawn(watcher.run(ctx.stop));
    let verifier = jwt::Verifier::new(ctx.config.idp.clone(), client);
    let authenticator = Authenticator::new(verifier, Arc::clone(&sessions), ctx.config.check_rate);
    let passthrough = directory.trust().domain.is_some().then(|| {
        let directory = Arc::clone(&directory);
        Arc::new(Passthrough::new(move |name| directory.find_address(name)))
    });
    let user_rate = RateLimit::new(ctx.config.user_rate, USER_BURST_SECONDS);
    let (config, signing_keys, user_digests) = (ctx.config, ctx.signing_keys, ctx.user_digests);
    let state = RouterState {
        config,
        directory,
        sessions,
        sign_outs,
        authenticator,
        user_rate,
        signing_keys,
        user_digests,
    };
    Ok(RouterService { responder: RouterResponder(Arc::new(state)), passthrough })
}

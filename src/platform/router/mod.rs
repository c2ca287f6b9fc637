//! The router: serves `APP_HOST` and `CODE_HOST`, and forwards each request to the running machine of whoever asks.
//!
//! Who asks comes from a token or a session, the machine from the database's rows alone. It changes no machine.
//! Invariant: a request costs no query and no signature check, as long as its session or token is in memory.

mod app_door;
pub(super) mod app_token;
pub mod config;
mod cookie;
mod directory;
mod door;
mod frame;
mod freshness;
mod headers;
mod identity;
mod machine;
mod origin;
mod own;
mod own_routes;
mod page;
mod serve;
mod session;
mod sign_in;
mod sign_outs;
mod watch;

use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use deadpool_postgres::Pool;
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;

pub use config::RouterConfig;
pub use freshness::{Freshness, Routes};
pub use own::{Own, ROUTES};
pub use own_routes::{own_slot, servers};
pub use sign_outs::SIGN_OUT_TTL;

use crate::http::observe::{self, Listener};
use crate::http::{client, jwt};
use crate::platform::keys::SigningSet;
use directory::Directory;
use identity::Gate;
use session::Sessions;
use sign_outs::SignOuts;
use watch::Watcher;

/// What the router needs of the process that it runs in.
pub struct RouterContext {
    pub pool: Pool,
    /// For one connection of the router's own, which polls and listens, whatever the pool is busy with.
    pub database: tokio_postgres::Config,
    pub config: RouterConfig,
    pub proof: channel::Receiver<Arc<SigningSet>>,
    /// Shared with the process's readiness.
    pub freshness: Arc<Freshness>,
    pub stop: CancellationToken,
}

/// All that requests share.
struct Site {
    config: RouterConfig,
    directory: Arc<Directory>,
    sessions: Arc<Sessions>,
    sign_outs: Arc<SignOuts>,
    gate: Gate,
    proof: channel::Receiver<Arc<SigningSet>>,
}

/// Starts watching the database, until `stop`, and gives the service for the public listener.
///
/// # Errors
/// When the HTTP client for the identity provider cannot be made.
pub fn router(ctx: RouterContext) -> anyhow::Result<Router> {
    let client = client::build(client::Deadlines::CALL).context("the identity provider's client")?;
    let directory = Arc::new(Directory::new(ctx.config.chain_check, Arc::clone(&ctx.freshness)));
    let sessions = Arc::new(Sessions::new(ctx.pool, Arc::clone(&ctx.freshness)));
    let sign_outs = Arc::<SignOuts>::default();
    let watcher = Watcher {
        database: ctx.database,
        directory: Arc::clone(&directory),
        sessions: Arc::clone(&sessions),
        sign_outs: Arc::clone(&sign_outs),
        freshness: ctx.freshness,
        every: ctx.config.poll,
    };
    tokio::spawn(watcher.run(ctx.stop));
    let gate = Gate::new(jwt::Verifier::new(ctx.config.idp.clone(), client), Arc::clone(&sessions));
    let site = Arc::new(Site { config: ctx.config, directory, sessions, sign_outs, gate, proof: ctx.proof });
    Ok(Router::new()
        .fallback(serve::serve)
        .with_state(site)
        .layer(axum::middleware::from_fn_with_state(Listener::Router, observe::layer)))
}

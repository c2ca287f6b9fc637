//! The router: serves `APP_HOST` and `CODE_HOST`, and forwards each request to the running machine of whoever asks.
//!
//! Who asks comes from a token or a session, the machine from the database's rows alone. It changes no machine.
//! Invariant: a request costs no query and no signature check, as long as its session or token is in memory.

mod account;
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
mod session_token;
mod sign_in;
mod sign_outs;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use deadpool_postgres::Pool;
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;

pub use config::RouterConfig;
#[cfg(feature = "fuzzing")]
pub use cookie::{drop_reserved, reserved_names};
pub use freshness::{Freshness, Routes};
pub use own::{Own, ROUTES};
pub use own_routes::{own_slot, servers};
pub use sign_outs::SIGN_OUT_TTL;

const USER_BURST_SECONDS: u32 = 2;

/// The longest life of what a key for app tokens signs: an app token, or a session's cookie.
pub const MAX_SIGNED_LIFE: Duration = Duration::from_secs(session::LIFE_SECONDS);

use crate::http::observe::{self, Listener};
use crate::http::rate::RateLimit;
use crate::http::{client, jwt};
use crate::machine::name::IdpUserId;
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
    users: RateLimit<IdpUserId>,
    proof: channel::Receiver<Arc<SigningSet>>,
}

/// Starts watching the database, until `stop`, and gives the service for the public listener.
///
/// # Errors
/// When the HTTP client for the identity provider cannot be made.
pub fn router(ctx: RouterContext) -> anyhow::Result<Router> {
    let client = client::build(client::Deadlines::CALL).context("the identity provider's client")?;
    let directory = Arc::new(Directory::new(ctx.config.chain_check, Arc::clone(&ctx.freshness)));
    let sessions = Sessions::new(ctx.pool, Arc::clone(&ctx.freshness), ctx.proof.clone());
    let sessions = Arc::new(sessions);
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
    let verifier = jwt::Verifier::new(ctx.config.idp.clone(), client);
    let gate = Gate::new(verifier, Arc::clone(&sessions), ctx.config.check_rate);
    let users = RateLimit::new(ctx.config.user_rate, USER_BURST_SECONDS);
    let (config, proof) = (ctx.config, ctx.proof);
    let site = Arc::new(Site { config, directory, sessions, sign_outs, gate, users, proof });
    Ok(Router::new()
        .fallback(serve::serve)
        .with_state(site)
        .layer(axum::middleware::from_fn_with_state(Listener::Router, observe::layer)))
}

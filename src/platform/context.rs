//! State that the parts of the control plane share within one process. Only `serve` in `platform/mod.rs` assembles it.

use std::sync::Arc;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::config::PlatformConfig;
use super::db::Db;
use super::db::platform_keys::ProcessKeys;
use super::keys::Seal;
use super::process_clock::ProcessClock;
use super::quote_cache::QuoteCache;
use super::rate_limits::ApiRateLimits;
use super::readiness::ReadinessProbe;
use super::server_lookup_limiter::ServerLookupLimiter;
use super::store_access_issuer::StoreAccessIssuer;
use super::tokens::TokenMint;
use svc_provider::Provider;
use svc_router::route_freshness::RouteFreshness;
use svc_router::signing_set::SigningSet;
use svc_store::Bucket;

pub struct Platform {
    pub config: PlatformConfig,
    /// Connection pool for operators' changes, operations and the reconciler.
    pub db: Db,
    /// Connection pool for requests from hosts. It is separate, so that no operator's report delays a heartbeat.
    pub host_db: Db,
    /// Connection pool for operators' reports on the fleet.
    pub report_db: Db,
    /// This process's clock offset from the database's clock.
    pub clock: Arc<ProcessClock>,
    pub bucket: Bucket,
    /// Issues the object store access that hosts receive.
    pub store_access: StoreAccessIssuer,
    pub provider: Arc<dyn Provider>,
    pub mint: TokenMint,
    /// Seals the keys of file backups.
    pub seal: Seal,
    /// The id of this process and the fingerprints of its platform keys.
    pub process: ProcessKeys,
    /// The value of the label that marks this installation's servers at the provider.
    pub installation: Uuid,
    pub keys: watch::Receiver<Arc<SigningSet>>,
    /// Tracks the age of this process's routes.
    pub route_freshness: Arc<RouteFreshness>,
    /// Wakes this process's runner before its next poll.
    pub runner_wake: Notify,
    /// Wakes this process's reconciler before its next pass.
    pub reconciler_wake: Notify,
    /// Limits provider lookups that heartbeats trigger in this process.
    pub server_lookup_limiter: ServerLookupLimiter,
    /// Rate limits for the control API in this process.
    pub rate_limits: ApiRateLimits,
    /// Provider data that this process caches for price quotes.
    pub quotes: QuoteCache,
    /// Probes this process's dependencies for `/readyz/control`.
    pub readiness: ReadinessProbe,
    pub stop: CancellationToken,
}

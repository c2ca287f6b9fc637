//! What the control plane's parts share in one process. Put together by `run` alone.

use std::sync::Arc;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::config::PlatformConfig;
use super::db::Db;
use super::db::platform_keys::ProcessKeys;
use super::host_store::HostStore;
use super::keys::SigningSet;
use super::process_clock::ProcessClock;
use super::rates::ApiRates;
use super::router::Freshness;
use super::server_checks::ServerChecks;
use super::tokens::TokenMint;
use crate::provider::Provider;
use crate::store::Bucket;

pub struct Platform {
    pub config: PlatformConfig,
    /// For operators' changes, operations and the reconciler.
    pub db: Db,
    /// For what hosts send: no report of an operator makes a heartbeat wait.
    pub host_db: Db,
    /// For what operators read of the fleet.
    pub report_db: Db,
    /// How far this process's clock is from the database's.
    pub clock: Arc<ProcessClock>,
    pub bucket: Bucket,
    /// What hosts are told of the store.
    pub host_store: HostStore,
    pub provider: Arc<dyn Provider>,
    pub mint: TokenMint,
    /// This process among those of the platform, with the fingerprints of its platform keys.
    pub process: ProcessKeys,
    /// Labels our servers at the provider.
    pub installation: Uuid,
    pub keys: watch::Receiver<Arc<SigningSet>>,
    /// How old the routes of this process's router are.
    pub routes: Arc<Freshness>,
    /// Wakes the runner of this process before its next poll.
    pub nudge: Notify,
    /// Wakes the reconciler of this process before its time.
    pub reconcile: Notify,
    /// Which heartbeats of this process's hosts may have the provider asked.
    pub server_checks: ServerChecks,
    /// Of the control API, in this process.
    pub rates: ApiRates,
    pub stop: CancellationToken,
}

//! What the control plane's parts share in one process. Put together by `run` alone.

use std::sync::Arc;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::config::PlatformConfig;
use super::db::Db;
use super::host_store::HostStore;
use super::keys::SigningSet;
use super::router::Freshness;
use super::tokens::TokenMint;
use crate::provider::Provider;
use crate::store::Bucket;

pub struct Platform {
    pub config: PlatformConfig,
    pub db: Db,
    pub bucket: Bucket,
    /// What hosts are told of the store.
    pub host_store: HostStore,
    pub provider: Arc<dyn Provider>,
    pub mint: TokenMint,
    /// Labels our servers at the provider.
    pub installation: Uuid,
    pub keys: watch::Receiver<Arc<SigningSet>>,
    /// How old the routes of this process's router are.
    pub routes: Arc<Freshness>,
    /// Wakes the runner of this process before its next poll.
    pub nudge: Notify,
    /// Wakes the reconciler of this process before its time.
    pub reconcile: Notify,
    pub stop: CancellationToken,
}

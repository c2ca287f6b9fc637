//! Loads a snapshot into a scratch database: downloads it, loads it, and compares it with its record. The caller
//! decides what happens next: a restore puts it in the owner's place, a drill drops it.

mod database;
mod download;
mod error;
mod load;
mod roles;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use crate::system::postgres::Server;
use crate::system::postgres_tools::PgTools;
use crate::system::progress::Progress;
use crate::system::vars;
use svc_base::config::Env;
use svc_store::Bucket;
use svc_store::key::SlotPrefix;

pub use database::{Scratch, drop_scratch, drop_scratches, end_sessions_of, oid};
pub use download::{DownloadError, Dump, ensure_bytes, ensure_room, fetch, remove_all as remove_dumps};
pub use error::LoadError;
pub use load::{compare, connect_with_retries, create_database, into_scratch, refuse_newer, run_restore};
pub use roles::{RoleLifetime, drop_drills_roles};

/// The context for loading a snapshot: source, destination and limits.
pub struct RestoreContext {
    /// Name of the program, for the database's log.
    pub name: &'static str,
    pub slot: SlotPrefix,
    pub bucket: Bucket,
    pub server: Server,
    pub tools: PgTools,
    /// Maximum outage of store and database, counted from the last progress.
    pub deadline: Duration,
    pub progress: Arc<Progress>,
}

/// `RESTORE_STORE_DEADLINE_SECONDS`.
pub fn deadline(env: &mut Env) -> Duration {
    Duration::from_secs(env.or_default(&vars::RESTORE_STORE_DEADLINE_SECONDS))
}

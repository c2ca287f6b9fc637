//! Stages a snapshot in a scratch database: downloads it, loads it, and compares it with its sidecar. What happens next
//! is up to the caller: a restore replaces the owner's database with it, and a drill drops it.

mod database;
mod download;
mod error;
mod load;
mod roles;
mod settings;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use crate::system::postgres::PostgresServer;
use crate::system::postgres_tools::PgTools;
use crate::system::progress::Progress;
use crate::system::vars;
use svc_base::config::Env;
use svc_store::Bucket;
use svc_store::key::SlotPrefix;

pub use database::{
    ScratchDatabase, ScratchPurpose, drop_scratch, drop_scratch_databases, end_application_sessions, find_oid,
};
pub use download::{
    DownloadError, Dump, FREE_SPACE_MARGIN_BYTES, ensure_free_space, ensure_space_for_snapshot, fetch_dump,
    remove_dumps,
};
pub use error::LoadError;
pub use load::{
    check_postgres_version, compare_with_sidecar, connect_with_retries, create_scratch, load_into_scratch,
    run_pg_restore,
};
pub use roles::drop_temporary_roles;
pub use stream::INDEX_BUILD_TIMEOUT;

/// Source, destination and limits for loading a snapshot.
pub struct RestoreContext {
    /// Program name, also used as the application name of its database sessions.
    pub name: &'static str,
    pub slot: SlotPrefix,
    pub bucket: Bucket,
    pub server: PostgresServer,
    pub tools: PgTools,
    /// Maximum store or database outage, measured from the last progress.
    pub outage_timeout: Duration,
    pub progress: Arc<Progress>,
}

/// Reads `RESTORE_STORE_DEADLINE_SECONDS`.
pub fn read_outage_timeout(env: &mut Env) -> Duration {
    Duration::from_secs(env.or_default(&vars::RESTORE_STORE_DEADLINE_SECONDS))
}

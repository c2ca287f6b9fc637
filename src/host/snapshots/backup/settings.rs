//! The settings and clients of a run.

use std::sync::Arc;
use std::time::Duration;

use super::retry;
use crate::snapshots::staging;
use crate::snapshots::staging::RestoreContext;
use crate::system::config;
use crate::system::config::{DatabaseUrl, Identity};
use crate::system::layout::Layout;
use crate::system::postgres::PostgresServer;
use crate::system::postgres_tools::{Compression, PgTools};
use crate::system::store::HostStoreAccess;
use crate::system::store_credentials::OutagePolicy;
use crate::system::vars;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_store::Bucket;
use svc_store::key::SlotPrefix;

pub struct BackupSettings {
    pub layout: Layout,
    pub identity: Identity,
    pub slot: SlotPrefix,
    pub bucket: Bucket,
    pub server: PostgresServer,
    pub tools: PgTools,
    /// The configured compression; the tools may not support it.
    pub compression: Compression,
    /// Every snapshot is verified within this number of days.
    pub verify_within_days: u32,
    /// Maximum outage of the store or the database, measured since progress was last made. Applies to checks and to the
    /// side database, not to backups.
    pub outage_timeout: Duration,
    /// Delay before the first retry of an hourly backup.
    pub first_retry_delay: Duration,
}

impl BackupSettings {
    pub fn read(layout: Layout, outage_policy: OutagePolicy) -> Result<Self, Failure> {
        let mut env = config::environment(&layout);
        let identity = Identity::read_current(&mut env, &layout);
        let store = HostStoreAccess::read(&mut env, &layout);
        let database = DatabaseUrl::read(&mut env);
        let tools = PgTools::locate(&mut env, &layout);
        let compression = env.or_default(&vars::BACKUP_COMPRESSION);
        let verify_within_days = config::read_verify_within_days(&mut env);
        let outage_timeout = staging::read_outage_timeout(&mut env);
        let first_retry_delay = retry::read_first_delay(&mut env);
        let parts = identity.zip(store).zip(database);
        let ((identity, store), database) = env.finish(parts)?;
        Ok(Self {
            slot: SlotPrefix::new(&identity.user, &identity.slot),
            bucket: store.open_with_outage_policy(outage_policy).or_exit(Exit::Config)?,
            server: PostgresServer::new(database.config()?),
            layout,
            identity,
            tools,
            compression,
            verify_within_days,
            outage_timeout,
            first_retry_delay,
        })
    }

    /// Returns the context for loading a snapshot next to the owner's database.
    pub fn restore_context(&self) -> RestoreContext {
        RestoreContext {
            name: "svc-db-backup",
            slot: self.slot.clone(),
            bucket: self.bucket.clone(),
            server: self.server.clone(),
            tools: self.tools.clone(),
            outage_timeout: self.outage_timeout,
            progress: Arc::default(),
        }
    }
}

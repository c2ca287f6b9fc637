//! Restore settings and clients.

use std::sync::Arc;

use crate::snapshots::staging;
use crate::snapshots::staging::RestoreContext;
use crate::system::config;
use crate::system::config::{DatabaseUrl, Identity};
use crate::system::layout::Layout;
use crate::system::postgres::PostgresServer;
use crate::system::postgres_tools::PgTools;
use crate::system::store::HostStoreAccess;
use crate::system::vars;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_machine::event::RestoreMode;
use svc_machine::name::IdpUserId;
use svc_store::key::{SlotPrefix, SnapshotKey};

pub struct RestoreSettings {
    pub layout: Layout,
    /// This machine's user.
    pub user: IdpUserId,
    pub context: RestoreContext,
    /// Whether the machine may start without a snapshot.
    pub mode: RestoreMode,
    /// Snapshot for the machine's first restore, or `None` to use the one in the pointer.
    pub chosen_snapshot: Option<SnapshotKey>,
}

impl RestoreSettings {
    pub fn read(layout: Layout) -> Result<Self, Failure> {
        let mut env = config::environment(&layout);
        let identity = Identity::read(&mut env);
        let store = HostStoreAccess::read(&mut env, &layout);
        let database = DatabaseUrl::read(&mut env);
        let tools = PgTools::locate(&mut env, &layout);
        let mode = env.required::<RestoreMode>(&vars::SVC_RESTORE_MODE);
        let chosen_snapshot = env.optional::<SnapshotKey>(&vars::SVC_RESTORE_SNAPSHOT);
        let outage_timeout = staging::read_outage_timeout(&mut env);
        let parts = identity.zip(store).zip(database).zip(mode);
        let (((identity, store), database), mode) = env.finish(parts)?;
        let context = RestoreContext {
            name: "svc-restore",
            slot: SlotPrefix::new(&identity.user, &identity.slot),
            bucket: store.open().or_exit(Exit::Config)?,
            server: PostgresServer::new(database.config()?),
            tools,
            outage_timeout,
            progress: Arc::default(),
        };
        Ok(Self { layout, user: identity.user, context, mode, chosen_snapshot })
    }
}

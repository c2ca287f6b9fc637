//! Sync agent settings and connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::system::config;
use crate::system::config::{DatabaseUrl, Identity, PlatformAccess};
use crate::system::epoch;
use crate::system::layout::Layout;
use crate::system::postgres::PostgresServer;
use crate::system::store::HostStoreAccess;
use crate::system::store_credentials::{OutagePolicy, RenewingCredentials};
use crate::system::vars;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::config::Env;
use svc_base::variable::Variable;
use svc_machine::epoch::Epoch;
use svc_machine::name::ImageVersion;
use svc_store::Bucket;
use svc_store::key::SlotPrefix;

pub struct SyncConfig {
    pub layout: Layout,
    pub identity: Identity,
    pub platform: PlatformAccess,
    pub slot: SlotPrefix,
    pub bucket: Bucket,
    /// Set if the store credentials expire.
    pub credentials: Option<Arc<RenewingCredentials>>,
    pub server: PostgresServer,
    pub listen: SocketAddr,
    /// Release named in user-data, used until a release is installed.
    pub image_version: ImageVersion,
    pub heartbeat_interval: Duration,
    pub meta_interval: Duration,
    pub meta_refresh_interval: Duration,
}

impl SyncConfig {
    pub fn read(layout: Layout) -> Result<Self, Failure> {
        let mut env = config::environment(&layout);
        let identity = Identity::read(&mut env);
        let platform = PlatformAccess::read(&mut env, &layout);
        let store = HostStoreAccess::read(&mut env, &layout);
        let database = DatabaseUrl::read(&mut env);
        let image_version = config::read_image_version(&mut env);
        let listen = env.or_default(&vars::GATEWAY_LISTEN);
        let heartbeat_interval = read_seconds(&mut env, &vars::HEARTBEAT_SECONDS);
        let meta_interval = read_seconds(&mut env, &vars::VPS_META_SECONDS);
        let meta_refresh_interval = read_seconds(&mut env, &vars::VPS_META_AT_LEAST_SECONDS);
        let parts = identity.zip(platform).zip(store).zip(database).zip(image_version);
        let ((((identity, platform), store), database), image_version) = env.finish(parts)?;
        let (bucket, credentials) =
            store.open_with_source(OutagePolicy::RequirePlatform).or_exit(Exit::Config)?;
        Ok(Self {
            slot: SlotPrefix::new(&identity.user, &identity.slot),
            bucket,
            credentials,
            server: PostgresServer::new(database.config()?),
            layout,
            identity,
            platform,
            listen,
            image_version,
            heartbeat_interval,
            meta_interval,
            meta_refresh_interval,
        })
    }

    /// Returns the current epoch, which a heartbeat response may have raised.
    pub fn epoch(&self) -> Epoch {
        epoch::current(&self.layout, self.identity.epoch)
    }
}

fn read_seconds(env: &mut Env, variable: &Variable) -> Duration {
    let seconds: u64 = env.or_default(variable);
    if seconds == 0 {
        env.add_error(variable, "must be at least 1");
    }
    Duration::from_secs(seconds.max(1))
}

//! Object store access for host applets, using the credentials in `r2.env` or, if those expire, renewed ones.

use std::sync::Arc;

use super::config::PlatformAccess;
use super::layout::Layout;
use super::store_credentials::{OutagePolicy, RenewingCredentials};
use crate::system::vars;
use svc_base::applet::Exit;
use svc_base::config::Env;
use svc_machine::id::MachineId;
use svc_store::config::StoreConfig;
use svc_store::credentials::{CredentialSource, TemporaryCredentials};
use svc_store::{Bucket, StoreError};

/// Maps a store error to an exit code.
pub fn to_exit(error: &StoreError) -> Exit {
    match error {
        StoreError::Withdrawn { .. } => Exit::Permission,
        StoreError::Unavailable { .. } | StoreError::Denied { .. } | StoreError::Clock { .. } => {
            Exit::Unavailable
        }
        // Retrying is pointless until the content has shrunk.
        StoreError::TooLarge { .. } => Exit::Refused,
        StoreError::NotFound { .. } | StoreError::Precondition { .. } | StoreError::Corrupt { .. } => {
            Exit::Internal
        }
    }
}

/// Store location and this machine's credentials for it.
pub struct HostStoreAccess {
    store: StoreConfig,
    /// `None` if the credentials don't expire.
    renewal: Option<Renewal>,
}

struct Renewal {
    machine: MachineId,
    platform: PlatformAccess,
    initial: TemporaryCredentials,
    layout: Layout,
}

impl HostStoreAccess {
    pub fn read(env: &mut Env, layout: &Layout) -> Option<Self> {
        let store = StoreConfig::read(env)?;
        let renewal = match &store {
            StoreConfig::S3(s3) => s3.expires_at.map(|expires_at| TemporaryCredentials {
                access_key: s3.access_key.clone(),
                secret_key: s3.secret_key.clone(),
                session_token: s3.session_token.clone(),
                expires_at,
            }),
            StoreConfig::Directory(_) => None,
        };
        let renewal = match renewal {
            None => None,
            Some(initial) => {
                let machine = env.required(&vars::SVC_MACHINE_ID);
                let platform = PlatformAccess::read(env, layout);
                Some(Renewal { machine: machine?, platform: platform?, initial, layout: layout.clone() })
            }
        };
        Some(Self { store, renewal })
    }

    /// Returns a repository location in the form `restic` accepts.
    pub fn restic_location(&self, repository: &object_store::path::Path) -> String {
        self.store.restic_location(repository)
    }

    /// Opens the store. Doesn't send any requests.
    ///
    /// # Errors
    /// If settings conflict, or the HTTP client or the store directory can't be created.
    pub fn open(self) -> anyhow::Result<Bucket> {
        self.open_with_outage_policy(OutagePolicy::RequirePlatform)
    }

    /// Like [`Self::open`], but with an explicit outage policy: backups may store snapshots while the platform is
    /// unreachable.
    ///
    /// # Errors
    /// If settings conflict, or the HTTP client or the store directory can't be created.
    pub fn open_with_outage_policy(self, outage_policy: OutagePolicy) -> anyhow::Result<Bucket> {
        self.open_with_source(outage_policy).map(|(bucket, _)| bucket)
    }

    /// Like [`Self::open_with_outage_policy`], but also returns the credential source if the credentials expire.
    ///
    /// # Errors
    /// If settings conflict, or the HTTP client or the store directory can't be created.
    pub fn open_with_source(
        self,
        outage_policy: OutagePolicy,
    ) -> anyhow::Result<(Bucket, Option<Arc<RenewingCredentials>>)> {
        let source = match self.renewal {
            None => None,
            Some(Renewal { machine, platform, initial, layout }) => {
                let renewed =
                    RenewingCredentials::new(machine, platform, layout.store_credentials(), &initial)?;
                Some(Arc::new(renewed.with_outage_policy(outage_policy)))
            }
        };
        let credentials = source.clone().map(|source| source as Arc<dyn CredentialSource>);
        Ok((self.store.open_with(credentials)?, source))
    }
}

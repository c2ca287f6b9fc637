//! The object store as a host applet opens it: with the credentials of `r2.env`, or, where these run out, with those
//! that the platform gives in their place.

use std::sync::Arc;

use super::config::PlatformLink;
use super::layout::Layout;
use super::store_credentials::{DuringOutage, Renewed};
use crate::applet::Exit;
use crate::config::Env;
use crate::machine::id::MachineId;
use crate::store::config::StoreConfig;
use crate::store::credentials::{Source, Temporary};
use crate::store::{Bucket, StoreError};

/// With which code a program ends that could not read what it needs.
pub fn exit(error: &StoreError) -> Exit {
    match error {
        StoreError::Withdrawn { .. } => Exit::Permission,
        StoreError::Unavailable { .. } | StoreError::Denied { .. } | StoreError::Clock { .. } => {
            Exit::Unavailable
        }
        StoreError::NotFound { .. } | StoreError::Precondition { .. } | StoreError::Corrupt { .. } => {
            Exit::Internal
        }
    }
}

/// Where the store is and how this machine has access to it.
pub struct StoreLink {
    store: StoreConfig,
    /// `None` for credentials that do not run out.
    renewal: Option<Renewal>,
}

struct Renewal {
    machine: MachineId,
    platform: PlatformLink,
    first: Temporary,
    layout: Layout,
}

impl StoreLink {
    pub fn read(env: &mut Env, layout: &Layout) -> Option<Self> {
        let store = StoreConfig::read(env)?;
        let renewal = match &store {
            StoreConfig::S3(s3) => s3.expires_at.map(|expires_at| Temporary {
                access_key: s3.access_key.clone(),
                secret_key: s3.secret_key.clone(),
                session_token: s3.session_token.clone(),
                expires_at,
            }),
            StoreConfig::Directory(_) => None,
        };
        let renewal = match renewal {
            None => None,
            Some(first) => {
                let machine = env.required("SVC_MACHINE_ID");
                let platform = PlatformLink::read(env, layout);
                Some(Renewal { machine: machine?, platform: platform?, first, layout: layout.clone() })
            }
        };
        Some(Self { store, renewal })
    }

    /// Opens the store; no call is made yet.
    ///
    /// # Errors
    /// When no client can be made.
    pub fn open(self) -> anyhow::Result<Bucket> {
        self.open_for(DuringOutage::Wait)
    }

    /// The same, for a backup, which may store snapshots while the platform is unreachable.
    ///
    /// # Errors
    /// When no client can be made.
    pub fn open_for(self, during_outage: DuringOutage) -> anyhow::Result<Bucket> {
        self.open_with_source(during_outage).map(|(bucket, _)| bucket)
    }

    /// The same, with the source of its credentials, where they run out.
    ///
    /// # Errors
    /// When no client can be made.
    pub fn open_with_source(
        self,
        during_outage: DuringOutage,
    ) -> anyhow::Result<(Bucket, Option<Arc<Renewed>>)> {
        let source = match self.renewal {
            None => None,
            Some(Renewal { machine, platform, first, layout }) => {
                let renewed = Renewed::new(machine, platform, layout.store_credentials(), &first)?;
                Some(Arc::new(renewed.during_outage(during_outage)))
            }
        };
        let asked = source.clone().map(|source| source as Arc<dyn Source>);
        Ok((self.store.open_with(asked)?, source))
    }
}

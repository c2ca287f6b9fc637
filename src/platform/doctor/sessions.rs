//! Tests what a host's object store session can do, using a session for a slot that belongs to no user.

use std::time::Duration;

use futures_util::FutureExt;
use svc_base::error_chain::format_chain;
use svc_machine::name::Slot;
use svc_store::bucket::{Bucket, Condition, StoreError};
use svc_store::capabilities::{self, Capability, CapabilityNeed, ProbeResult, RaceLimits, Support};
use svc_store::config::{S3Config, StoreConfig};
use svc_store::credentials::TemporaryCredentials;
use svc_store::key::SlotPrefix;

use crate::store_access_issuer::{HostCredentials, StoreAccessIssuer};
use object_store::ObjectStoreExt;

pub const SESSIONS: Capability = Capability {
    name: "STS issues sessions with a policy (`AssumeRole`)",
    need: CapabilityNeed::Recommended,
    without: "Hosts need `STORE_HOST_CREDENTIALS=static`: each of them can read, overwrite and delete every slot.",
};
pub const SESSION_ISOLATION: Capability = Capability {
    name: "a session can access only what its policy allows",
    need: CapabilityNeed::Required,
    without: "A host's session can access every slot.",
};
pub const SESSION_WRITE_ONCE: Capability = Capability {
    name: "a session's policy can forbid overwriting (`s3:if-none-match`)",
    need: CapabilityNeed::Recommended,
    without: "`STORE_WRITE_ONCE` must be off: credentials stolen from a host can overwrite its slot's snapshots.",
};

/// Timeout for each of the two probes. Both must fit within the timeout of the doctor's check, which also requests
/// sessions and deletes the probes' objects.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// Probes all capabilities of a store, including those of host sessions, for the store comparison table.
pub async fn probe_store(
    store: &StoreConfig,
    credentials: &HostCredentials,
    races: RaceLimits,
) -> Vec<ProbeResult> {
    let mut results = capabilities::probe_all(store, races).await;
    let session = match StoreAccessIssuer::new(store, credentials) {
        Ok(hosts) => hosts.probe_session().await.map(|session| session.map_err(|error| format_chain(&error))),
        Err(error) => Some(Err(format!("{error:#}"))),
    };
    let (sessions, isolation, write_once) = match session {
        Some(Ok(session)) => {
            let stores = SessionStores::new(store, session);
            (Support::Yes, stores.probe_slot_isolation().await, stores.probe_write_once().await)
        }
        Some(Err(reason)) => {
            let unknown = || Support::Unknown("there is no session".to_owned());
            (Support::No(reason), unknown(), unknown())
        }
        None => {
            let unknown = || Support::Unknown("STS is not configured".to_owned());
            (unknown(), unknown(), unknown())
        }
    };
    for (capability, support) in
        [(SESSIONS, sessions), (SESSION_ISOLATION, isolation), (SESSION_WRITE_ONCE, write_once)]
    {
        results.push(ProbeResult::new(capability, support));
    }
    results
}

/// The store, accessed with the platform's credentials and with those of a host's session.
pub(super) struct SessionStores {
    platform: StoreConfig,
    /// `None` if the store is a directory.
    host: Option<S3Config>,
}

impl SessionStores {
    pub(super) fn new(store: &StoreConfig, session: TemporaryCredentials) -> Self {
        let host = match store {
            StoreConfig::S3(s3) => Some(S3Config {
                access_key: session.access_key,
                secret_key: session.secret_key,
                session_token: session.session_token,
                expires_at: Some(session.expires_at),
                ..s3.clone()
            }),
            StoreConfig::Directory(_) => None,
        };
        Self { platform: store.clone(), host }
    }

    fn open(&self) -> Result<(Bucket, Bucket), Support> {
        let unknown = |error: anyhow::Error| Support::Unknown(format!("{error:#}"));
        let Some(host) = &self.host else {
            return Err(Support::Unknown("a directory has no sessions".to_owned()));
        };
        let host = StoreConfig::S3(host.clone()).open().map_err(unknown)?;
        Ok((self.platform.open().map_err(unknown)?, host))
    }

    /// Tests whether the session can write to its own slot, but neither write to nor read another slot.
    pub(super) async fn probe_slot_isolation(&self) -> Support {
        let (platform, host) = match self.open() {
            Ok(stores) => stores,
            Err(unknown) => return unknown,
        };
        let name = || format!("{}.json", uuid::Uuid::new_v4());
        let own_key = StoreAccessIssuer::probe_slot().root().clone().join(name());
        let other_key = other_slot().root().clone().join(name());
        let probe = async {
            host.put(&own_key, &b"own"[..]).await?;
            let written = host.put(&other_key, &b"of another slot"[..]).await;
            if !matches!(written, Err(StoreError::Denied { .. })) {
                return written
                    .map(|()| Support::No("the session wrote an object in another slot".to_owned()));
            }
            platform.put(&other_key, &b"of another slot"[..]).await?;
            match host.get(&other_key, 1024).await {
                Err(StoreError::Denied { .. }) => Ok(Support::Yes),
                Ok(_) => Ok(Support::No("the session read an object in another slot".to_owned())),
                Err(error) => Err(error),
            }
        };
        let outcome = with_timeout(probe.boxed()).await;
        for key in [&own_key, &other_key] {
            // Only the platform's own credentials can delete objects.
            platform.raw().delete(key).await.ok();
        }
        outcome.unwrap_or_else(Support::Unknown)
    }

    /// Tests whether the session can write a snapshot, but not overwrite it.
    pub(super) async fn probe_write_once(&self) -> Support {
        let (platform, host) = match self.open() {
            Ok(stores) => stores,
            Err(unknown) => return unknown,
        };
        let key = StoreAccessIssuer::probe_slot().snapshots().join(format!("{}.dump", uuid::Uuid::new_v4()));
        let probe = async {
            match host.put_if(&key, &b"probe"[..], Condition::Absent).await {
                Ok(()) => {}
                Err(error @ StoreError::Denied { .. }) => {
                    let reason = format_chain(&error);
                    return Ok(Support::No(format!(
                        "a host's credentials cannot write a snapshot: {reason}"
                    )));
                }
                Err(error) => return Err(error),
            }
            match host.put(&key, &b"overwritten"[..]).await {
                Err(StoreError::Denied { .. }) => Ok(Support::Yes),
                Ok(()) => Ok(Support::No("a host's credentials can still overwrite a snapshot".to_owned())),
                Err(error) => Err(error),
            }
        };
        let outcome = with_timeout(probe.boxed()).await;
        platform.raw().delete(&key).await.ok();
        outcome.unwrap_or_else(Support::Unknown)
    }
}

/// Runs a probe with a timeout, and describes its error.
async fn with_timeout(probe: impl Future<Output = Result<Support, StoreError>>) -> Result<Support, String> {
    match tokio::time::timeout(PROBE_TIMEOUT, probe).await {
        Ok(outcome) => outcome.map_err(|error| format_chain(&error)),
        Err(_) => Err(format!("the store did not respond within {} s", PROBE_TIMEOUT.as_secs())),
    }
}

/// Returns a second slot that belongs to no user. The session must not be able to access it.
fn other_slot() -> SlotPrefix {
    SlotPrefix::new(&"svc-doctor-other".parse().expect("the user's id is valid"), &Slot::primary())
}

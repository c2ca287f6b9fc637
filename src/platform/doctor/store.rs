//! The object store's capabilities that the platform needs: read, list, delete, and conditional put. Without
//! conditional puts, two hosts could both believe that they hold the pointer.

use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde_json::json;

use crate::config::PlatformConfig;
use crate::host_store::HostStore;
use svc_base::chain::chain;
use svc_base::diagnosis::Findings;
use svc_store::bucket::{Bucket, Condition, StoreError};
use svc_store::config::{S3Config, StoreConfig};
use svc_store::credentials::TemporaryCredentials;
use svc_store::parallel_probe::{self, PREFIX as PROBES};
use svc_store::policy::SnapshotWrites;
use svc_store::protection::{self, Setting};

const ADVICE: &str = "check that it is running, OBJECT_STORE_URL, OBJECT_STORE_ENDPOINT, AWS_*";
const PARALLEL_TIMEOUT: Duration = Duration::from_secs(10);

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("store");
    let bucket = match config.store.open() {
        Ok(bucket) => bucket,
        Err(error) => return findings.problem(format!("{error:#}"), ADVICE),
    };
    let key = Path::from(format!("{PROBES}/{}.json", uuid::Uuid::new_v4()));
    let tried = test_conditional_puts(&bucket, &key).await;
    // Only this check uses the object; a failed deletion is reported below.
    let deleted = bucket.raw().delete(&key).await;
    match tried {
        Ok(None) => {}
        Ok(Some(broken)) => {
            let next = "use a store with exact conditional puts (If-None-Match and If-Match): without, a replaced host \
                        could move the pointer";
            return findings.problem(broken, next);
        }
        Err(error @ StoreError::Denied { .. }) => {
            return findings
                .problem(chain(&error), "the key's rights: get, put, list and delete on the bucket");
        }
        Err(error @ StoreError::Clock { .. }) => {
            return findings.problem(error.to_string(), "systemctl restart systemd-timesyncd");
        }
        Err(error) => return findings.problem(chain(&error), ADVICE),
    }
    let findings = match deleted {
        Ok(()) => findings,
        Err(error) => findings.warning(
            format!("{key} could not be deleted: {}", chain(&error)),
            "delete it manually; the platform deletes nothing",
        ),
    };
    let findings = match parallel_probe::run(&bucket, PARALLEL_TIMEOUT).await {
        Ok(found) => match (found.refusal(), found.warning()) {
            (Some(why), _) => return findings.problem(why, "svc-platform refuses to start on such a store"),
            (None, Some(why)) => {
                findings.warning(why, "update every host and platform before you rely on it")
            }
            (None, None) => findings,
        },
        Err(error) => {
            findings.warning(format!("parallel writers were not tested: {}", chain(&error)), ADVICE)
        }
    };
    let listed = bucket.raw().list(Some(&Path::from(PROBES))).try_next().await;
    match listed {
        Ok(_) => findings.or_ok("reads, lists, and puts exactly on condition"),
        Err(error) => findings.problem(format!("cannot list it: {}", chain(&error)), ADVICE),
    }
}

/// Puts a new object, a second one that must be refused, one on the version read, and one on a stale version.
async fn test_conditional_puts(bucket: &Bucket, key: &Path) -> Result<Option<String>, StoreError> {
    let put = |n: u32, condition: Condition| {
        let value = json!({"n": n});
        async move { bucket.put_json_if(key, &value, condition).await }
    };
    put(1, Condition::Absent).await?;
    let refused = |end: Result<(), StoreError>| match end {
        Err(StoreError::Precondition { .. }) => Ok(true),
        Ok(()) => Ok(false),
        Err(error) => Err(error),
    };
    if !refused(put(2, Condition::Absent).await)? {
        return Ok(Some("a put with If-None-Match replaced an existing object".to_owned()));
    }
    let Some(read) = bucket.get_json::<serde_json::Value>(key).await? else {
        return Ok(Some("an object is missing right after its put".to_owned()));
    };
    let stale = read.version.clone();
    put(3, Condition::Unchanged(read.version)).await?;
    if !refused(put(4, Condition::Unchanged(stale)).await)? {
        return Ok(Some("a put with a stale If-Match replaced a newer object".to_owned()));
    }
    Ok(None)
}

/// Whether the bucket keeps overwritten and deleted objects.
pub async fn protection(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("store-protection");
    let StoreConfig::S3(s3) = &config.store else { return findings.skipped("the store is a directory") };
    let found = match protection::read(s3).await {
        Ok(found) => found,
        Err(error) => return findings.warning(chain(&error), ADVICE),
    };
    let findings = match found.versioning {
        Setting::On => findings,
        Setting::Off => findings.warning(
            "the bucket has no versioning: an object that is overwritten or deleted is gone",
            protection::enable_versioning(s3),
        ),
        Setting::Unknown(status) => {
            return findings.skipped(format!("the store does not report its versioning ({status})"));
        }
    };
    match found.object_lock {
        Setting::On => findings.or_ok("the bucket has versioning and object lock"),
        Setting::Off => findings.warning(
            "the bucket has no object lock: credentials that may delete versions can delete every snapshot",
            protection::enable_object_lock(s3),
        ),
        Setting::Unknown(_) => {
            findings.or_ok("the bucket has versioning; the store does not support object lock")
        }
    }
}

pub async fn host_credentials(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("host-credentials");
    let hosts = match HostStore::new(&config.store, &config.host_credentials) {
        Ok(hosts) => hosts,
        Err(error) => return findings.problem(format!("{error:#}"), "STS_ENDPOINT"),
    };
    if hosts.shares_platform_credentials() {
        return findings.warning(
            "STORE_HOST_CREDENTIALS=static: every host gets the platform's own credentials and reaches every slot",
            "set STS_ROLE_ARN: hosts then get short-lived ones for their own slot",
        );
    }
    match hosts.try_session().await {
        None => findings.ok("the store is a directory, which has no credentials"),
        Some(Ok(session)) => {
            let until = session.expires_at;
            let findings = check_write_once(config, &hosts, session).await;
            check_outage_session(findings, &hosts)
                .await
                .or_ok(format!("STS gives sessions of one slot, until {until:.0}"))
        }
        Some(Err(error)) => findings.problem(
            chain(&error),
            "no machine can be provisioned: STS_ROLE_ARN, STS_ENDPOINT, and the role's trust policy",
        ),
    }
}

/// Hosts without an outage session cannot store snapshots while the platform is unreachable, and nothing else reports
/// it.
async fn check_outage_session(findings: Findings, hosts: &HostStore) -> Findings {
    match hosts.try_outage_session().await {
        Some(Err(error)) => findings.warning(
            format!("STS gives no session of STS_DURATION_SECONDS: {}", chain(&error)),
            "hosts get a session of an hour, or none: lower STS_DURATION_SECONDS, or raise the role's MaxSessionDuration",
        ),
        Some(Ok(_)) | None => findings,
    }
}

/// Whether a session that may not overwrite a snapshot can still write one, and only one.
async fn check_write_once(
    config: &PlatformConfig,
    hosts: &HostStore,
    session: TemporaryCredentials,
) -> Findings {
    let findings = Findings::new("host-credentials");
    let (StoreConfig::S3(s3), Some(writes)) = (&config.store, hosts.snapshot_writes()) else {
        return findings;
    };
    if writes == SnapshotWrites::Any {
        return match s3.endpoint {
            None => findings.warning(
                "a host's credentials can overwrite the slot's snapshots",
                "set STORE_WRITE_ONCE=on once every host runs this release",
            ),
            // Other stores may not support the condition.
            Some(_) => findings,
        };
    }
    let as_host = S3Config {
        access_key: session.access_key,
        secret_key: session.secret_key,
        session_token: session.session_token,
        expires_at: Some(session.expires_at),
        ..s3.clone()
    };
    let tried = async {
        let bucket = StoreConfig::S3(as_host).open()?;
        let key = HostStore::probe_slot().snapshots().join(format!("{}.dump", uuid::Uuid::new_v4()));
        let first = bucket.put_if(&key, &b"probe"[..], Condition::Absent).await;
        let second = bucket.put(&key, &b"overwritten"[..]).await;
        // Only the platform's own credentials can delete.
        config.store.open()?.raw().delete(&key).await.ok();
        Ok::<_, anyhow::Error>((first, second))
    };
    let next = "set STORE_WRITE_ONCE=off, or use a store that supports the condition key s3:if-none-match";
    match tried.await {
        Ok((Ok(()), Err(StoreError::Denied { .. }))) => findings,
        Ok((Ok(()), _)) => findings.problem(
            "STORE_WRITE_ONCE=on, and a host's credentials still overwrite a snapshot: the store does not enforce it",
            next,
        ),
        Ok((Err(error), _)) => findings.problem(
            format!("STORE_WRITE_ONCE=on, and a host's credentials cannot write a snapshot: {}", chain(&error)),
            next,
        ),
        Err(error) => findings.problem(format!("{error:#}"), ADVICE),
    }
}

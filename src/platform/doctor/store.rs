//! The object store as the platform needs it: read, list, delete, and a put that happens only on its condition. Without
//! that last one, two hosts could both believe that the pointer is theirs.

use futures_util::TryStreamExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde_json::json;

use crate::chain::chain;
use crate::diagnosis::Findings;
use crate::platform::config::PlatformConfig;
use crate::platform::host_store::HostStore;
use crate::store::bucket::{Bucket, Condition, StoreError};

const NEXT: &str = "is it up? OBJECT_STORE_URL, OBJECT_STORE_ENDPOINT, AWS_*";
/// Beside the slots, where no user's name can be.
const PROBES: &str = "system-doctor";

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::of("store");
    let bucket = match config.store.open() {
        Ok(bucket) => bucket,
        Err(error) => return findings.problem(format!("{error:#}"), NEXT),
    };
    let key = Path::from(format!("{PROBES}/{}.json", uuid::Uuid::new_v4()));
    let tried = conditional(&bucket, &key).await;
    // Ours alone; what cannot be deleted is said below.
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
        Err(error) => return findings.problem(chain(&error), NEXT),
    }
    let findings = match deleted {
        Ok(()) => findings,
        Err(error) => findings.warning(
            format!("{key} could not be deleted: {}", chain(&error)),
            "delete it by hand; the platform itself deletes nothing",
        ),
    };
    let listed = bucket.raw().list(Some(&Path::from(PROBES))).try_next().await;
    match listed {
        Ok(_) => findings.or_ok("reads, lists, and puts exactly on condition"),
        Err(error) => findings.problem(format!("it cannot be listed: {}", chain(&error)), NEXT),
    }
}

/// A put where there is nothing, a second one that must be refused, one on the version read, and one on a stale version.
async fn conditional(bucket: &Bucket, key: &Path) -> Result<Option<String>, StoreError> {
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
        return Ok(Some("a put with If-None-Match replaced an object that was there".to_owned()));
    }
    let Some(read) = bucket.get_json::<serde_json::Value>(key).await? else {
        return Ok(Some("an object that was just put is not there".to_owned()));
    };
    let stale = read.version.clone();
    put(3, Condition::Unchanged(read.version)).await?;
    if !refused(put(4, Condition::Unchanged(stale)).await)? {
        return Ok(Some("a put with a stale If-Match replaced a newer object".to_owned()));
    }
    Ok(None)
}

pub async fn host_credentials(config: &PlatformConfig) -> Findings {
    let findings = Findings::of("host-credentials");
    let hosts = match HostStore::new(&config.store, &config.host_credentials) {
        Ok(hosts) => hosts,
        Err(error) => return findings.problem(format!("{error:#}"), "STS_ENDPOINT"),
    };
    if hosts.gives_our_own() {
        return findings.warning(
            "STORE_HOST_CREDENTIALS=static: every host gets the platform's own credentials and reaches every slot",
            "set STS_ROLE_ARN: hosts then get short-lived ones for their own slot",
        );
    }
    match hosts.try_session().await {
        None => findings.ok("the store is a directory, which knows none"),
        Some(Ok(session)) => {
            findings.ok(format!("STS gives sessions of one slot, until {:.0}", session.expires_at))
        }
        Some(Err(error)) => findings.problem(
            chain(&error),
            "no machine can be provisioned: STS_ROLE_ARN, STS_ENDPOINT, and the role's trust policy",
        ),
    }
}

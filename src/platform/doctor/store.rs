//! The object store: whether it can do what svc relies on. Without conditional puts, two hosts could both believe that they
//! hold the pointer.

use std::time::{Duration, SystemTime};

use futures_util::TryStreamExt;
use futures_util::future::ready;
use object_store::path::Path;

use super::sessions;
use crate::config::PlatformConfig;
use crate::host_store::HostStore;
use svc_base::chain::chain;
use svc_base::diagnosis::Findings;
use svc_store::bucket::{Bucket, StoreError};
use svc_store::capabilities::{self, Need, ProbeResult, Support};
use svc_store::config::StoreConfig;
use svc_store::parallel_probe::{self, PREFIX, RUN_PREFIX};
use svc_store::policy::SnapshotWrites;
use svc_store::protection::{self, Setting};

const ADVICE: &str = "check that it is running, OBJECT_STORE_URL, OBJECT_STORE_ENDPOINT, AWS_*";
const OTHER_STORE: &str = "use a store that can do this; docs/operating/stores.md compares some";
/// Rounds of a slow store that do not fit are left out.
const PARALLEL_TIMEOUT: Duration = Duration::from_secs(8);
/// After this time the check of another process has certainly ended.
const MAX_DURATION: Duration = Duration::from_secs(3600);

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("store");
    let bucket = match config.store.open() {
        Ok(bucket) => bucket,
        Err(error) => return findings.problem(format!("{error:#}"), ADVICE),
    };
    let conditions = match capabilities::probe_conditions(&bucket).await {
        Ok(conditions) => conditions,
        Err(error @ StoreError::Denied { .. }) => {
            return findings
                .problem(chain(&error), "the key's rights: get, put, list and delete on the bucket");
        }
        Err(error @ StoreError::Clock { .. }) => {
            return findings.problem(error.to_string(), "systemctl restart systemd-timesyncd");
        }
        Err(error) => return findings.problem(chain(&error), ADVICE),
    };
    let report = |findings, probed: &ProbeResult| report(findings, probed, &config.store);
    let findings = conditions.iter().fold(findings, report);
    if !findings.is_empty() {
        return findings;
    }
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
    let further = capabilities::probe_further(&config.store, &bucket).await;
    let findings = further.iter().fold(findings, report);
    match remaining_objects(&bucket).await {
        Ok(0) => {
            findings.or_ok("does all that svc relies on: reads, lists, uploads, and exact conditional puts")
        }
        Ok(count) => findings.warning(
            format!("{count} temporary objects of this check could not be deleted"),
            format!("the key's right to delete; then delete what is below {PREFIX}/ manually"),
        ),
        Err(error) => findings.problem(format!("cannot list it: {}", chain(&error)), ADVICE),
    }
}

/// The objects that this process or an earlier one left. Those of a process that may still run do not count.
async fn remaining_objects(bucket: &Bucket) -> Result<usize, object_store::Error> {
    let own = Path::from(RUN_PREFIX.as_str());
    let ended = SystemTime::now() - MAX_DURATION;
    let objects = bucket.raw().list(Some(&Path::from(PREFIX)));
    objects
        .try_filter(|object| {
            ready(object.location.prefix_matches(&own) || SystemTime::from(object.last_modified) < ended)
        })
        .try_fold(0, async |count, _| Ok(count + 1))
        .await
}

fn report(findings: Findings, probed: &ProbeResult, store: &StoreConfig) -> Findings {
    let ProbeResult { capability, support } = probed;
    match (support, capability.need) {
        (Support::Yes, _) | (_, Need::Unused) => findings,
        (Support::No(instead), Need::Required) => {
            findings.problem(what_is_missing(capability.name, instead, capability.without), OTHER_STORE)
        }
        (Support::No(instead), Need::Recommended) => {
            findings.warning(what_is_missing(capability.name, instead, capability.without), OTHER_STORE)
        }
        (Support::Unknown(_), _)
            if capability.applies_only_to_servers() && matches!(store, StoreConfig::Directory(_)) =>
        {
            findings
        }
        (Support::Unknown(why), _) => {
            findings.warning(format!("not tested: {}: {why}", plain(capability.name)), ADVICE)
        }
    }
}

fn what_is_missing(name: &str, instead: &str, without: &str) -> String {
    plain(&format!("the store does not support this: {name}; {instead}. {without}"))
}

/// Without the marks that quote code in a page.
fn plain(text: &str) -> String {
    text.replace('`', "")
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
            protection::versioning_command(s3),
        ),
        Setting::Unknown(status) => {
            return findings.skipped(format!("the store does not report its versioning ({status})"));
        }
    };
    match found.object_lock {
        Setting::On => findings.or_ok("the bucket has versioning and object lock"),
        Setting::Off => findings.warning(
            "the bucket has no object lock: credentials that may delete versions can delete every snapshot",
            protection::object_lock_command(s3),
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
            let as_host = sessions::SessionStores::new(&config.store, session);
            let findings = check_session_keys(findings, &as_host).await;
            let findings = check_write_once(findings, config, &hosts, &as_host).await;
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

/// Whether the store enforces the policy of a session: a host must not reach another slot.
async fn check_session_keys(findings: Findings, as_host: &sessions::SessionStores) -> Findings {
    match as_host.try_other_slot().await {
        Support::Yes => findings,
        Support::No(instead) => findings.problem(
            format!("a host's session for its own slot reaches other slots: {instead}"),
            "use a store that enforces session policies: on this one, every host reaches every slot",
        ),
        Support::Unknown(why) => {
            findings.warning(format!("the limits of a host's session were not tested: {why}"), ADVICE)
        }
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
    findings: Findings,
    config: &PlatformConfig,
    hosts: &HostStore,
    as_host: &sessions::SessionStores,
) -> Findings {
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
    let next = "set STORE_WRITE_ONCE=off, or use a store that supports the condition key s3:if-none-match";
    match as_host.try_write_once().await {
        Support::Yes => findings,
        Support::No(instead) => findings
            .problem(format!("STORE_WRITE_ONCE=on, and the store does not enforce it: {instead}"), next),
        Support::Unknown(why) => {
            findings.problem(format!("STORE_WRITE_ONCE=on, and its effect could not be tested: {why}"), next)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_base::config::Env;

    #[test]
    fn only_a_directory_is_excused_from_what_servers_are_tested_for() {
        let probed =
            ProbeResult::new(capabilities::SIGNATURES, Support::Unknown("it returned 500".to_owned()));
        let store = |url| {
            let pairs =
                [("OBJECT_STORE_URL", url), ("AWS_ACCESS_KEY_ID", "k"), ("AWS_SECRET_ACCESS_KEY", "s")];
            StoreConfig::read(&mut Env::from_pairs(pairs)).unwrap()
        };
        let is_reported = |url| !report(Findings::new("store"), &probed, &store(url)).is_empty();
        assert!(is_reported("s3://bucket"));
        assert!(!is_reported("file:///tmp/store"));
    }
}

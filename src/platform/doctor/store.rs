//! Checks that the object store supports everything that svc relies on. Without conditional puts, two hosts could both
//! believe that they had written the pointer.

use std::time::{Duration, SystemTime};

use futures_util::TryStreamExt;
use futures_util::future::ready;
use object_store::path::Path;

use super::sessions;
use crate::config::PlatformConfig;
use crate::store_access_issuer::StoreAccessIssuer;
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;
use svc_base::quantity::pluralize;
use svc_store::bucket::{Bucket, StoreError};
use svc_store::capabilities::{self, CapabilityNeed, ProbeResult, Support};
use svc_store::config::StoreConfig;
use svc_store::parallel_probe::{self, PREFIX, RUN_PREFIX};
use svc_store::policy::Overwrites;
use svc_store::protection::{self, SettingState};

const CHECK_STORE: &str =
    "check that the store is running, and that OBJECT_STORE_URL, OBJECT_STORE_ENDPOINT and AWS_* are correct";
const USE_ANOTHER_STORE: &str = "use a store that supports this; docs/operating/stores.md compares several";
/// Time limit for the parallel writer test; with a slow store, fewer rounds are run.
const PARALLEL_TIMEOUT: Duration = Duration::from_secs(8);
/// Age from which temporary objects of other processes count as left behind: no check takes this long.
const MIN_LEFTOVER_AGE: Duration = Duration::from_secs(3600);

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("store");
    let bucket = match config.store.open() {
        Ok(bucket) => bucket,
        Err(error) => return findings.problem(format!("{error:#}"), CHECK_STORE),
    };
    let conditions = match capabilities::probe_conditions(&bucket).await {
        Ok(conditions) => conditions,
        Err(error @ StoreError::Denied { .. }) => {
            return findings.problem(
                format_chain(&error),
                "grant the access key get, put, list and delete on the bucket",
            );
        }
        Err(error @ StoreError::Clock { .. }) => {
            return findings.problem(error.to_string(), "run `systemctl restart systemd-timesyncd`");
        }
        Err(error) => return findings.problem(format_chain(&error), CHECK_STORE),
    };
    let report = |findings, probed: &ProbeResult| report_capability(findings, probed, &config.store);
    let findings = conditions.iter().fold(findings, report);
    if !findings.is_empty() {
        return findings;
    }
    let findings = match parallel_probe::run(&bucket, PARALLEL_TIMEOUT).await {
        Ok(result) => match (result.refusal(), result.warning()) {
            (Some(reason), _) => {
                return findings
                    .problem(reason, "use another store: svc-platform refuses to start with this store");
            }
            (None, Some(reason)) => {
                findings.warning(reason, "update all hosts and platform processes before you use this store")
            }
            (None, None) => findings,
        },
        Err(error) => findings
            .warning(format!("parallel writers were not tested: {}", format_chain(&error)), CHECK_STORE),
    };
    let other_results = capabilities::probe_other_capabilities(&config.store, &bucket).await;
    let findings = other_results.iter().fold(findings, report);
    match count_remaining_objects(&bucket).await {
        Ok(0) => findings.or_ok(
            "the store supports everything that svc relies on: reads, lists, uploads, and atomic conditional puts",
        ),
        Ok(count) => findings.warning(
            format!(
                "{} from this or an earlier check could not be deleted",
                pluralize(count as u64, "temporary object")
            ),
            format!(
                "grant the access key the right to delete, then delete the objects below {PREFIX}/ manually"
            ),
        ),
        Err(error) => {
            findings.problem(format!("cannot list the store: {}", format_chain(&error)), CHECK_STORE)
        }
    }
}

/// Counts the temporary objects that this process or an earlier check has left behind.
async fn count_remaining_objects(bucket: &Bucket) -> Result<usize, object_store::Error> {
    let own_prefix = Path::from(RUN_PREFIX.as_str());
    let cutoff = SystemTime::now() - MIN_LEFTOVER_AGE;
    let objects = bucket.raw().list(Some(&Path::from(PREFIX)));
    objects
        .try_filter(|object| {
            let is_own = object.location.prefix_matches(&own_prefix);
            ready(is_own || SystemTime::from(object.last_modified) < cutoff)
        })
        .try_fold(0, async |count, _| Ok(count + 1))
        .await
}

fn report_capability(findings: Findings, probed: &ProbeResult, store: &StoreConfig) -> Findings {
    let ProbeResult { capability, support } = probed;
    match (support, capability.need) {
        (Support::Yes, _) | (_, CapabilityNeed::Unused) => findings,
        (Support::No(observed), CapabilityNeed::Required) => findings
            .problem(describe_missing(capability.name, observed, capability.without), USE_ANOTHER_STORE),
        (Support::No(observed), CapabilityNeed::Recommended) => findings
            .warning(describe_missing(capability.name, observed, capability.without), USE_ANOTHER_STORE),
        (Support::Unknown(_), _)
            if capability.applies_only_to_servers() && matches!(store, StoreConfig::Directory(_)) =>
        {
            findings
        }
        (Support::Unknown(reason), _) => findings
            .warning(format!("not tested: {}: {reason}", strip_backticks(capability.name)), CHECK_STORE),
    }
}

fn describe_missing(name: &str, observed: &str, consequence: &str) -> String {
    strip_backticks(&format!("the store does not support this: {name}; {observed}. {consequence}"))
}

/// Removes the backticks that mark code in the reference page.
fn strip_backticks(text: &str) -> String {
    text.replace('`', "")
}

/// Checks whether the bucket keeps overwritten and deleted objects.
pub async fn check_protection(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("store-protection");
    let StoreConfig::S3(s3) = &config.store else { return findings.skipped("the store is a directory") };
    let settings = match protection::read(s3).await {
        Ok(settings) => settings,
        Err(error) => return findings.warning(format_chain(&error), CHECK_STORE),
    };
    let findings = match settings.versioning {
        SettingState::On => findings,
        SettingState::Off => findings.warning(
            "the bucket has no versioning: an object that is overwritten or deleted cannot be restored",
            format!("run `{}`", protection::versioning_command(s3)),
        ),
        SettingState::Unknown(status) => {
            return findings
                .skipped(format!("the store does not report whether the bucket has versioning ({status})"));
        }
    };
    match settings.object_lock {
        SettingState::On => findings.or_ok("the bucket has versioning and object lock"),
        SettingState::Off => findings.warning(
            "the bucket has no object lock: credentials that may delete versions can delete every snapshot",
            format!("run `{}`", protection::object_lock_command(s3)),
        ),
        SettingState::Unknown(_) => findings
            .or_ok("the bucket has versioning; the store does not report whether the bucket has object lock"),
    }
}

pub async fn check_host_credentials(config: &PlatformConfig) -> Findings {
    let findings = Findings::new("host-credentials");
    let hosts = match StoreAccessIssuer::new(&config.store, &config.host_credentials) {
        Ok(hosts) => hosts,
        Err(error) => return findings.problem(format!("{error:#}"), "check STS_ENDPOINT"),
    };
    if hosts.shares_platform_credentials() {
        return findings.warning(
            "STORE_HOST_CREDENTIALS=static: every host gets the platform's own credentials and can access every slot",
            "set STS_ROLE_ARN, and STORE_HOST_CREDENTIALS=sts: hosts then get short-lived credentials for their own slot",
        );
    }
    match hosts.probe_session().await {
        None => findings.ok("the store is a directory, which has no credentials"),
        Some(Ok(session)) => {
            let expires_at = session.expires_at;
            let stores = sessions::SessionStores::new(&config.store, session);
            let findings = check_slot_isolation(findings, &stores).await;
            let findings = check_write_once(findings, config, &hosts, &stores).await;
            check_outage_session(findings, &hosts)
                .await
                .or_ok(format!("STS issues sessions for a single slot, valid until {expires_at:.0}"))
        }
        Some(Err(error)) => findings.problem(
            format_chain(&error),
            "check STS_ROLE_ARN, STS_ENDPOINT and the role's trust policy: without sessions, no machine can be provisioned",
        ),
    }
}

/// Checks that the store enforces a session's policy: a host must not be able to access another slot.
async fn check_slot_isolation(findings: Findings, stores: &sessions::SessionStores) -> Findings {
    match stores.probe_slot_isolation().await {
        Support::Yes => findings,
        Support::No(observed) => findings.problem(
            format!("a host's session for its own slot can access other slots: {observed}"),
            "use a store that enforces session policies: on this store, every host can access every slot",
        ),
        Support::Unknown(reason) => {
            findings.warning(format!("the limits of a host's session were not tested: {reason}"), CHECK_STORE)
        }
    }
}

/// Checks that hosts get an outage session. Without one, a host cannot store snapshots while the platform is
/// unreachable, and nothing else reports this.
async fn check_outage_session(findings: Findings, hosts: &StoreAccessIssuer) -> Findings {
    match hosts.probe_outage_session().await {
        Some(Err(error)) => findings.warning(
            format!("STS does not issue a session that lasts STS_DURATION_SECONDS: {}", format_chain(&error)),
            "lower STS_DURATION_SECONDS, or raise the role's MaxSessionDuration; until then, hosts get an outage session of \
             one hour, or none",
        ),
        Some(Ok(_)) | None => findings,
    }
}

/// Checks that a session can write a snapshot, but not overwrite it.
async fn check_write_once(
    findings: Findings,
    config: &PlatformConfig,
    hosts: &StoreAccessIssuer,
    stores: &sessions::SessionStores,
) -> Findings {
    let (StoreConfig::S3(s3), Some(overwrites)) = (&config.store, hosts.overwrites()) else {
        return findings;
    };
    if overwrites == Overwrites::Allowed {
        return match s3.endpoint {
            None => findings.warning(
                "a host's credentials can overwrite the slot's snapshots",
                "set STORE_WRITE_ONCE=on once every host runs this release",
            ),
            // A store other than AWS may not support the condition.
            Some(_) => findings,
        };
    }
    let next = "set STORE_WRITE_ONCE=off, or use a store that supports the condition key s3:if-none-match";
    match stores.probe_write_once().await {
        Support::Yes => findings,
        Support::No(observed) => findings
            .problem(format!("STORE_WRITE_ONCE=on, but the store does not enforce it: {observed}"), next),
        Support::Unknown(reason) => findings
            .problem(format!("STORE_WRITE_ONCE=on, but its effect could not be tested: {reason}"), next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_base::config::Env;

    #[test]
    fn directory_store_skips_server_only_capability() {
        let probed =
            ProbeResult::new(capabilities::SIGNATURES, Support::Unknown("it returned 500".to_owned()));
        let store = |url| {
            let pairs =
                [("OBJECT_STORE_URL", url), ("AWS_ACCESS_KEY_ID", "k"), ("AWS_SECRET_ACCESS_KEY", "s")];
            StoreConfig::read(&mut Env::from_pairs(pairs)).unwrap()
        };
        let is_reported = |url| !report_capability(Findings::new("store"), &probed, &store(url)).is_empty();
        assert!(is_reported("s3://bucket"));
        assert!(!is_reported("file:///tmp/store"));
    }
}

//! Checks the object store with the current credentials, and the slot pointer. Never renews credentials: the doctor may
//! run as root, and the services couldn't read a file written by root.

use jiff::{SignedDuration, Timestamp};
use secrecy::SecretString;

use super::services_env;
use crate::system::config::Identity;
use crate::system::layout::Layout;
use crate::system::store_credentials::StoredSessions;
use svc_base::clock::rfc3339_ms;
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;
use svc_store::bucket::StoreError;
use svc_store::config::{S3Config, StoreConfig};
use svc_store::key::SlotPrefix;
use svc_store::pointer_io;

/// `svc-sync-agent` renews sessions older than 50 minutes on each metadata check, by default every five minutes. Allow
/// for a few failed renewals.
const MAX_RENEWAL_AGE: SignedDuration = SignedDuration::from_mins(75);

pub async fn check(layout: &Layout) -> Findings {
    let mut findings = Findings::new("store");
    let mut env = services_env(layout);
    let Some(mut config) = StoreConfig::read(&mut env) else {
        return findings.skipped("no valid store configuration in r2.env, or no permission to read it");
    };
    let Some(identity) = Identity::read_current(&mut env, layout) else {
        return findings.skipped("no valid machine identity in host.env, or no permission to read it");
    };
    if let StoreConfig::S3(s3) = &mut config {
        if s3.expires_at.is_none() {
            findings = findings.warning(
                "the store credentials are static: this machine can read, overwrite and delete every slot",
                "set STS_ROLE_ARN on the platform, then recover the slot",
            );
        }
        let stored = StoredSessions::read(&layout.store_credentials(), identity.machine).ok().flatten();
        let renewed_at = stored.as_ref().and_then(|stored| stored.renewed_at);
        use_stored_session(stored, s3);
        if let Some(at) = s3.expires_at.filter(|at| *at <= Timestamp::now()) {
            return assess_expired_session(findings, at, renewed_at);
        }
    }
    let bucket = match config.open() {
        Ok(bucket) => bucket,
        Err(error) => return findings.problem(format!("{error:#}"), "check the store's variables in r2.env"),
    };
    let slot = SlotPrefix::new(&identity.user, &identity.slot);
    match pointer_io::read(&bucket, &slot).await {
        Ok(Some(read)) if read.has_latest() => match read.value.admit(identity.epoch, identity.machine) {
            Ok(()) => {
                findings.or_ok("the store is reachable, and the slot's pointer allows this machine to write")
            }
            Err(fenced) => findings.problem(
                fenced.to_string(),
                "do nothing: this machine was replaced, so its backups are refused",
            ),
        },
        Ok(_) => findings.problem(
            "the slot has no pointer, not even the fence that provisioning writes",
            "system/db/latest was deleted: run `svcctl backup now MACHINE` to write it again",
        ),
        Err(error @ StoreError::Denied { .. }) => findings.problem(
            format_chain(&error),
            "check the role's permissions, its session policy, and OBJECT_STORE_URL",
        ),
        Err(error @ StoreError::Clock { .. }) => {
            findings.problem(error.to_string(), "run `systemctl restart systemd-timesyncd`")
        }
        Err(error) => findings
            .problem(format_chain(&error), "check the store's status, and OBJECT_STORE_ENDPOINT in r2.env"),
    }
}

/// Assesses an expired session. Sessions last 15 minutes and are renewed on use, so expiry is normal. Only the regular
/// `svc-sync-agent` renewals show whether renewal works.
fn assess_expired_session(
    findings: Findings,
    expired_at: Timestamp,
    renewed_at: Option<Timestamp>,
) -> Findings {
    let since = renewed_at.unwrap_or(expired_at);
    if Timestamp::now().duration_since(since) < MAX_RENEWAL_AGE {
        let renewed = rfc3339_ms(since);
        return findings.or_ok(format!(
            "the store was not checked: the last session, from {renewed}, has expired and will be renewed on its \
             next use"
        ));
    }
    findings.problem(
        format!(
            "the credentials expired at {} and have not been renewed since {}",
            rfc3339_ms(expired_at),
            rfc3339_ms(since)
        ),
        "run `journalctl -u svc-sync-agent -n 50`: svc-sync-agent renews the credentials about once an hour",
    )
}

/// Switches to the stored session if it expires later than the one in `r2.env`.
fn use_stored_session(stored: Option<StoredSessions>, s3: &mut S3Config) {
    let Some(session) = stored.map(|stored| stored.session) else { return };
    if s3.expires_at.is_some_and(|at| at < session.expires_at) {
        s3.access_key = session.access_key_id;
        s3.secret_key = SecretString::from(session.secret_access_key);
        s3.session_token = session.session_token.map(SecretString::from);
        s3.expires_at = Some(session.expires_at);
    }
}

//! The object store with the credentials at hand, and the slot's pointer. Credentials are read, never renewed: that would
//! leave a file that the services cannot read.

use jiff::Timestamp;
use secrecy::SecretString;
use serde::Deserialize;

use super::settings;
use crate::chain::chain;
use crate::clock::rfc3339_ms;
use crate::diagnosis::Findings;
use crate::fsx;
use crate::host::config::Identity;
use crate::host::layout::Layout;
use crate::store::bucket::StoreError;
use crate::store::config::{S3Config, StoreConfig};
use crate::store::key::SlotPrefix;
use crate::store::pointer_io;

/// What a host's credentials are kept as after a renewal.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kept {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expires_at: Timestamp,
}

pub async fn check(layout: &Layout) -> Findings {
    let mut findings = Findings::of("store");
    let mut env = settings(layout);
    let Some(mut config) = StoreConfig::read(&mut env) else {
        return findings.skipped("r2.env does not say where it is");
    };
    let Some(identity) = Identity::read_current(&mut env, layout) else {
        return findings.skipped("host.env does not say whose machine this is");
    };
    if let StoreConfig::S3(s3) = &mut config {
        if s3.expires_at.is_none() {
            findings = findings.warning(
                "static credentials: this machine can read, overwrite and delete every slot",
                "set STS_ROLE_ARN on the platform, then recover the machine",
            );
        }
        take_kept(layout, s3);
        if let Some(at) = s3.expires_at.filter(|at| *at <= Timestamp::now()) {
            return findings.problem(
                format!("the credentials ran out at {}", rfc3339_ms(at)),
                "svc-sync-agent renews them: journalctl -u svc-sync-agent -n 50",
            );
        }
    }
    let bucket = match config.open() {
        Ok(bucket) => bucket,
        Err(error) => return findings.problem(format!("{error:#}"), "r2.env"),
    };
    let slot = SlotPrefix::new(&identity.user, &identity.slot);
    match pointer_io::read(&bucket, &slot).await {
        Ok(Some(read)) if read.has_latest() => match read.value.admit(identity.epoch, identity.machine) {
            Ok(()) => findings.or_ok("it answers, and the slot's pointer lets this machine write"),
            Err(fenced) => findings.problem(
                fenced.to_string(),
                "this machine was replaced: nothing; its backups are refused on purpose",
            ),
        },
        Ok(_) => findings.problem(
            "the slot has no pointer, not even the fence of its provisioning",
            "somebody deleted system/db/latest: `svcctl backup now` writes it again",
        ),
        Err(error @ StoreError::Denied { .. }) => {
            findings.problem(chain(&error), "the role's rights and its session policy; OBJECT_STORE_URL")
        }
        Err(error @ StoreError::Clock { .. }) => {
            findings.problem(error.to_string(), "systemctl restart systemd-timesyncd")
        }
        Err(error) => findings.problem(chain(&error), "is the store up? OBJECT_STORE_ENDPOINT in r2.env"),
    }
}

/// The later of what r2.env says and what was kept since.
fn take_kept(layout: &Layout, s3: &mut S3Config) {
    let Ok(Some(text)) = fsx::read_if_there(&layout.store_credentials()) else { return };
    let Ok(kept) = serde_json::from_slice::<Kept>(&text) else { return };
    if s3.expires_at.is_some_and(|at| at < kept.expires_at) {
        s3.access_key = kept.access_key_id;
        s3.secret_key = SecretString::from(kept.secret_access_key);
        s3.session_token = kept.session_token.map(SecretString::from);
        s3.expires_at = Some(kept.expires_at);
    }
}

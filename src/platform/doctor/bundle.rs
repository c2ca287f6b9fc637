//! The bundle that new machines get: published whole, with its manifest and signature.

use crate::chain::chain;
use crate::diagnosis::Findings;
use crate::platform::config::PlatformConfig;
use crate::store::bucket::{Bucket, StoreError};
use crate::store::bundle::digest;
use crate::store::key;

pub async fn check(config: &PlatformConfig) -> Findings {
    let findings = Findings::of("bundle");
    let version = &config.provisioning.image_version;
    let Ok(bucket) = config.store.open() else {
        return findings.skipped("the store cannot be opened");
    };
    match look(&bucket, version).await {
        Ok(Bundle { digest: None, .. }) => findings.problem(
            format!("CUSTOMER_VPS_IMAGE_VERSION is {version}, which is not published"),
            format!("svcctl bundle publish DIR --image-version {version}"),
        ),
        Ok(Bundle { size: None, .. }) => findings.problem(
            format!("{version} has its .sha256 in the store, but not its archive"),
            "publish under a new version",
        ),
        Ok(Bundle { digest: Some(digest), size: Some(size), companions }) => {
            let missing: Vec<_> =
                companions.iter().filter(|(_, there)| !there).map(|(suffix, _)| *suffix).collect();
            if !missing.is_empty() {
                return findings.warning(
                    format!("{version} has no signed manifest ({} missing)", missing.join(", ")),
                    "hosts do not update to it by themselves: build it with --signing-key, publish a new version",
                );
            }
            findings.ok(format!("{version}, {} MiB, sha256 {digest}", size >> 20))
        }
        Err(error) => findings.problem(chain(&error), "the check of the store says more"),
    }
}

struct Bundle {
    digest: Option<String>,
    size: Option<u64>,
    companions: Vec<(&'static str, bool)>,
}

async fn look(bucket: &Bucket, version: &crate::machine::name::ImageVersion) -> Result<Bundle, StoreError> {
    let digest = digest(bucket, version).await?;
    let size = bucket.head(&key::bundle(version, "")).await?.map(|meta| meta.size);
    let mut companions = Vec::new();
    for suffix in [".json", ".json.sig"] {
        companions.push((suffix, bucket.head(&key::bundle(version, suffix)).await?.is_some()));
    }
    Ok(Bundle { digest, size, companions })
}

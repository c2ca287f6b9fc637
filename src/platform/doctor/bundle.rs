//! The bundle that new machines get: published whole, with a manifest that hosts believe.

use crate::chain::chain;
use crate::diagnosis::Findings;
use crate::machine::name::ImageVersion;
use crate::platform::config::PlatformConfig;
use crate::platform::host_settings::HostSettings;
use crate::store::bucket::{Bucket, StoreError};
use crate::store::bundle::{self, BundleUnusable, ManifestError, digest};
use crate::store::key;

const STORE: &str = "the check of the store says more";

pub async fn check(config: &PlatformConfig) -> Findings {
    let mut findings = Findings::new("bundle");
    let version = &config.provisioning.image_version;
    if config.hosts.bundle_public_keys.is_none() {
        findings = findings.warning(
            "BUNDLE_PUBLIC_KEYS is not set: machines provisioned now can never be updated by a rollout",
            "set it to the public half of the key that signs bundles before machines are provisioned; to those that \
             are there only root on each of them can give it (SVC_BUNDLE_PUBLIC_KEYS in /opt/svc/env/update.env)",
        );
    }
    let Ok(bucket) = config.store.open() else {
        return findings.skipped("the store cannot be opened");
    };
    match look(&bucket, version).await {
        Ok((None, _)) => findings.problem(
            format!("CUSTOMER_VPS_IMAGE_VERSION is {version}, which is not published"),
            format!("svcctl bundle publish DIR --image-version {version}"),
        ),
        Ok((Some(_), None)) => findings.problem(
            format!("{version} has its .sha256 in the store, but not its archive"),
            "publish under a new version",
        ),
        Ok((Some(digest), Some(size))) => manifest(findings, &config.hosts, &bucket, version, &digest)
            .await
            .or_ok(format!("{version}, {} MiB, sha256 {digest}", size >> 20)),
        Err(error) => findings.problem(chain(&error), STORE),
    }
}

/// Whether hosts would update to it.
async fn manifest(
    findings: Findings,
    hosts: &HostSettings,
    bucket: &Bucket,
    version: &ImageVersion,
    digest: &str,
) -> Findings {
    match bundle::verify_published(bucket, version, digest, &hosts.trusted_keys()).await {
        // That no key is set is told already.
        Ok(_) | Err(BundleUnusable::Manifest(ManifestError::NoKeys)) => findings,
        Err(BundleUnusable::Unsigned) => findings.warning(
            format!("{version} has no signed manifest"),
            "hosts do not update to it by themselves: build it with --signing-key, publish a new version",
        ),
        Err(BundleUnusable::Store(error)) => findings.problem(chain(&error), STORE),
        Err(why @ (BundleUnusable::Manifest(_) | BundleUnusable::OtherArchive)) => findings.problem(
            format!("hosts cannot update to {version}: {why}"),
            "build it again, signed with a key of BUNDLE_PUBLIC_KEYS, and publish it under a new version",
        ),
    }
}

/// The digest that is stated, and the size of the archive.
async fn look(bucket: &Bucket, version: &ImageVersion) -> Result<(Option<String>, Option<u64>), StoreError> {
    let digest = digest(bucket, version).await?;
    let size = bucket.head(&key::bundle(version, "")).await?.map(|meta| meta.size);
    Ok((digest, size))
}

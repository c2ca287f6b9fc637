//! Checks that the bundle for new machines is fully published and has a manifest that hosts trust.

use crate::config::PlatformConfig;
use crate::host_settings::HostSettings;
use svc_base::diagnosis::Findings;
use svc_base::error_chain::format_chain;
use svc_machine::name::ImageVersion;
use svc_store::bucket::{Bucket, StoreError};
use svc_store::bundle::{self, BundleUnusable, ManifestError, read_digest};
use svc_store::key;

const SEE_STORE_CHECK: &str = "see the check `store`";

pub async fn check(config: &PlatformConfig) -> Findings {
    let mut findings = Findings::new("bundle");
    let version = &config.provisioning.image_version;
    if config.hosts.bundle_public_keys.is_none() {
        findings = findings.warning(
            "BUNDLE_PUBLIC_KEYS is not set: machines provisioned now cannot be updated by a rollout",
            "set BUNDLE_PUBLIC_KEYS to the public half of the bundle signing key before you provision machines; on each \
             existing machine, set SVC_BUNDLE_PUBLIC_KEYS in /opt/svc/env/update.env as root",
        );
    }
    let Ok(bucket) = config.store.open() else {
        return findings.skipped("the store cannot be opened");
    };
    match find_bundle(&bucket, version).await {
        Ok((None, _)) => findings.problem(
            format!("CUSTOMER_VPS_IMAGE_VERSION is {version}, which is not published"),
            format!("run `svcctl bundle publish DIR --image-version {version}`"),
        ),
        Ok((Some(_), None)) => findings.problem(
            format!("the store has the .sha256 of {version}, but not its archive"),
            "publish the bundle under a new version",
        ),
        Ok((Some(digest), Some(size))) => check_manifest(findings, &config.hosts, &bucket, version, &digest)
            .await
            .or_ok(format!("{version}, {} MiB, sha256 {digest}", size >> 20)),
        Err(error) => findings.problem(format_chain(&error), SEE_STORE_CHECK),
    }
}

/// Checks whether hosts would update to this bundle.
async fn check_manifest(
    findings: Findings,
    hosts: &HostSettings,
    bucket: &Bucket,
    version: &ImageVersion,
    digest: &str,
) -> Findings {
    match bundle::verify_published(bucket, version, digest, &hosts.trusted_keys()).await {
        // `check` has already reported that no keys are set.
        Ok(_) | Err(BundleUnusable::Manifest(ManifestError::NoKeys)) => findings,
        Err(BundleUnusable::Unsigned) => findings.warning(
            format!("{version} has no signed manifest"),
            "hosts do not update to this release automatically: build it with --signing-key, and publish it under a new \
             version",
        ),
        Err(BundleUnusable::Store(error)) => findings.problem(format_chain(&error), SEE_STORE_CHECK),
        Err(error @ (BundleUnusable::Manifest(_) | BundleUnusable::WrongArchive)) => findings.problem(
            format!("hosts cannot update to {version}: {error}"),
            "build the bundle again, signed with a key from BUNDLE_PUBLIC_KEYS, and publish it under a new version",
        ),
    }
}

/// Reads the published digest and the archive's size.
async fn find_bundle(
    bucket: &Bucket,
    version: &ImageVersion,
) -> Result<(Option<String>, Option<u64>), StoreError> {
    let digest = read_digest(bucket, version).await?;
    let size = bucket.head(&key::bundle(version, "")).await?.map(|meta| meta.size);
    Ok((digest, size))
}

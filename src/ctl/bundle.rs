//! Lists and publishes bundles in the object store.
//!
//! The archive is uploaded first and its `.sha256` last, and that final write publishes the version. Hosts and the
//! platform trust the digest, so a published archive never changes. A missing manifest or signature can be added later,
//! and both can be replaced by ones that hosts trust for longer.

mod archive;
mod companions;
mod host_keys;
#[cfg(test)]
mod store_fault_tests;
mod stored_archive;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path as FilePath, PathBuf};

use futures_util::StreamExt;
use jiff::Timestamp;
use object_store::path::Path;
use serde::Serialize;
use serde_json::{Value, json};

use self::archive::Archive;
use self::companions::{BundleContext, Companions};
use self::host_keys::HostKeys;
use svc_base::applet::{Exit, Failure};
use svc_base::config::ConfigError;
use svc_base::quantity::format_bytes;
use svc_machine::name::ImageVersion;
use svc_store::bucket::{Bucket, Condition, StoreError};
use svc_store::bundle::{KeySet, ManifestError, digest_line, read_digest};
use svc_store::key::{self, BUNDLE_FILE};

/// Maximum upload attempts for a bundle while other processes keep replacing its archive.
const MAX_UPLOADS: usize = 3;

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("cannot read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} contains no SHA-256\n  next: rebuild the bundle", .path.display())]
    NoDigest { path: PathBuf },
    #[error(
        "{} has SHA-256 {found}, but its .sha256 says {expected}\n  next: rebuild the bundle", .path.display()
    )]
    DigestMismatch { path: PathBuf, found: String, expected: String },
    #[error("{} is not valid for the archive: {source}\n  next: build and sign the bundle again", .path.display())]
    InvalidCompanion {
        path: PathBuf,
        #[source]
        source: ManifestError,
    },
    #[error(
        "{version} is already published with different content (SHA-256 {stored})\n  next: publish under a new version"
    )]
    VersionTaken { version: ImageVersion, stored: String },
    #[error(
        "{version} was published concurrently by another process\n  next: publish again, or under a new version"
    )]
    PublishedConcurrently { version: ImageVersion },
    #[error(
        "{version} was published concurrently with different content (SHA-256 {stored})\n  next: publish this bundle under \
         a new version, and publish the other bundle again, because its archive may have been replaced"
    )]
    LostRace { version: ImageVersion, stored: String },
    #[error(
        "a different manifest or signature is published for {version}, and this one does not renew it: \
         {reason}\n  next: do nothing if hosts can update with the published one; otherwise sign the same archive \
         for longer (--valid-days)"
    )]
    NoRenewal { version: ImageVersion, reason: String },
    #[error(
        "the manifest's trustedKeys have sequence {found}, but hosts at sequence {base} accept {max} at most; nothing was \
         published\n  next: sign the release with the next sequence (`svcctl bundle keys` shows each machine's sequence); if hosts \
         have a higher sequence than {base}, set BUNDLE_KEYS_SEQUENCE to theirs"
    )]
    SequenceTooHigh { found: u32, base: u32, max: u32 },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<PublishError> for Failure {
    fn from(error: PublishError) -> Self {
        let exit = match &error {
            PublishError::Config(_) => Exit::Config,
            PublishError::Store(StoreError::Denied { .. }) => Exit::Permission,
            PublishError::Store(error) if error.is_transient() => Exit::Unavailable,
            PublishError::PublishedConcurrently { .. } => Exit::TryAgain,
            _ => Exit::Refused,
        };
        Self::new(exit, error)
    }
}

/// The result of publishing a bundle.
#[derive(Debug)]
pub struct PublishResult {
    version: ImageVersion,
    sha256: String,
    size_bytes: u64,
    outcome: PublishOutcome,
    update_support: UpdateSupport,
    /// Keys from the manifest. Hosts trust them once healthy on this release.
    key_set: Option<KeySet>,
}

/// Whether hosts on other releases can update to this one.
#[derive(Debug, Clone, PartialEq, Eq)]
enum UpdateSupport {
    Possible,
    /// Not possible, for this reason.
    Impossible(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PublishOutcome {
    Published,
    AlreadyPublished,
}

impl PublishResult {
    pub fn to_json(&self) -> Value {
        json!({
            "imageVersion": self.version,
            "key": key::bundle(&self.version, "").to_string(),
            "sha256": self.sha256,
            "sizeBytes": self.size_bytes,
            "alreadyPublished": self.outcome == PublishOutcome::AlreadyPublished,
            "updatable": self.update_support == UpdateSupport::Possible,
            "trustedKeys": self.key_set.as_ref().map(|set| json!({"sequence": set.sequence, "ids": set.keys.ids()})),
        })
    }
}

impl fmt::Display for PublishResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcome = match self.outcome {
            PublishOutcome::Published => "published",
            PublishOutcome::AlreadyPublished => "already published",
        };
        let key = key::bundle(&self.version, "");
        write!(f, "{outcome} {key}\n{}, sha256 {}", format_bytes(self.size_bytes), self.sha256)?;
        if let UpdateSupport::Impossible(reason) = &self.update_support {
            return write!(f, "\nnew machines can install it, but hosts cannot update to it: {reason}");
        }
        match &self.key_set {
            Some(KeySet { sequence, keys }) => write!(
                f,
                "\nonce they are healthy on this release, hosts trust the keys {} (sequence {sequence}); `svcctl bundle keys` lists them",
                keys.ids().join(", ")
            ),
            None => Ok(()),
        }
    }
}

/// A published bundle.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedBundle {
    pub image_version: String,
    pub key: String,
    pub size_bytes: u64,
    pub sha256: String,
    #[serde(with = "svc_base::clock::wire")]
    pub published_at: Timestamp,
}

/// Lists the published bundles, newest first. An archive without its `.sha256` is not published.
///
/// # Errors
/// [`PublishError::Store`] if the store cannot be read.
pub async fn list(bucket: &Bucket) -> Result<Vec<PublishedBundle>, PublishError> {
    let root = Path::from(key::BUNDLES_DIR);
    let mut listing = bucket.raw().list(Some(&root));
    let (mut archives, mut digests) = (BTreeMap::new(), Vec::new());
    while let Some(object) = listing.next().await {
        let object = object.map_err(|error| StoreError::classify(&root, error))?;
        let key = object.location.to_string();
        let Some((_, relative_key)) = key.split_once('/') else { continue };
        match relative_key.split_once('/') {
            Some((version, file)) if file == BUNDLE_FILE => {
                archives.insert(version.to_owned(), (key, object.size));
            }
            Some((version, file)) if file.strip_prefix(BUNDLE_FILE) == Some(".sha256") => {
                digests.push((version.to_owned(), object.last_modified));
            }
            _ => {}
        }
    }
    let mut bundles = Vec::new();
    for (version, last_modified) in digests {
        let Some((key, size_bytes)) = archives.remove(&version) else { continue };
        let Ok(parsed) = version.parse::<ImageVersion>() else { continue };
        let Some(sha256) = read_digest(bucket, &parsed).await? else { continue };
        let published_at = Timestamp::from_second(last_modified.timestamp()).unwrap_or_default();
        bundles.push(PublishedBundle { image_version: version, key, size_bytes, sha256, published_at });
    }
    bundles.sort_by(|a, b| {
        b.published_at.cmp(&a.published_at).then_with(|| b.image_version.cmp(&a.image_version))
    });
    Ok(bundles)
}

/// Publishes the bundle in `dir`. Republishing the same content adds a missing manifest and signature, or replaces them
/// with ones valid for longer. The archive is only re-uploaded if the stored one differs.
pub async fn publish(
    bucket: &Bucket,
    dir: &FilePath,
    version: &ImageVersion,
) -> Result<PublishResult, PublishError> {
    publish_with_keys(bucket, dir, version, &HostKeys::from_process()?).await
}

/// Like [`publish`], but with explicit host keys.
async fn publish_with_keys(
    bucket: &Bucket,
    dir: &FilePath,
    version: &ImageVersion,
    host_keys: &HostKeys,
) -> Result<PublishResult, PublishError> {
    let archive = Archive::read(dir).await?;
    let (sha256, size_bytes) = (&archive.sha256, archive.size_bytes);
    let context = BundleContext { version, sha256, size_bytes, keys: host_keys.keys.as_ref() };
    let companions = Companions::read(dir, &context).await?;
    let outcome = match read_digest(bucket, version).await? {
        Some(stored) if stored == *sha256 && stored_archive::is_intact(bucket, &context).await? => {
            PublishOutcome::AlreadyPublished
        }
        // A concurrent publisher may have replaced the archive, so upload it again.
        Some(stored) if stored == *sha256 => PublishOutcome::Published,
        Some(stored) => return Err(PublishError::VersionTaken { version: version.clone(), stored }),
        None => PublishOutcome::Published,
    };
    host_keys.check_sequence(companions.key_set().as_ref())?;
    match outcome {
        PublishOutcome::Published => upload_and_publish(bucket, &archive, &companions, &context).await?,
        PublishOutcome::AlreadyPublished => companions.add_or_renew(bucket, &context).await?,
    }
    let update_support = companions::check_update_support(bucket, &context).await?;
    let key_set = companions.key_set();
    let (version, sha256) = (version.clone(), archive.sha256);
    Ok(PublishResult { version, sha256, size_bytes, outcome, update_support, key_set })
}

/// Uploads the bundle and publishes it.
///
/// Other processes can replace the archive until its digest is written, so we then read it back and re-upload it if it
/// differs. A process that replaces it after this check can't write its own digest and fails with
/// [`PublishError::LostRace`], which advises republishing this bundle.
///
/// # Errors
/// [`PublishError::LostRace`] if different content was published first; [`PublishError::PublishedConcurrently`] if the
/// archive was replaced after every upload; [`PublishError::Read`] or [`PublishError::DigestMismatch`] if the local
/// archive has changed; [`PublishError::Store`] if the store fails.
async fn upload_and_publish(
    bucket: &Bucket,
    archive: &Archive,
    companions: &Companions,
    context: &BundleContext<'_>,
) -> Result<(), PublishError> {
    for _ in 0..MAX_UPLOADS {
        archive.upload(bucket, context.version).await?;
        companions.upload(bucket, context).await?;
        publish_digest(bucket, context.sha256, context.version).await?;
        if stored_archive::is_intact(bucket, context).await? {
            return Ok(());
        }
    }
    Err(PublishError::PublishedConcurrently { version: context.version.clone() })
}

/// Publishes the version by writing its digest, unless one already exists.
async fn publish_digest(bucket: &Bucket, sha256: &str, version: &ImageVersion) -> Result<(), PublishError> {
    let key = key::bundle(version, ".sha256");
    match bucket.put_if(&key, digest_line(sha256), Condition::Absent).await {
        Ok(()) => Ok(()),
        // Either another publisher won, or the response to our own write was lost.
        Err(StoreError::Precondition { .. }) => match read_digest(bucket, version).await? {
            Some(stored) if stored == sha256 => Ok(()),
            Some(stored) => Err(PublishError::LostRace { version: version.clone(), stored }),
            None => Err(PublishError::PublishedConcurrently { version: version.clone() }),
        },
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kit::bundle::SigningKey;
    use sha2::{Digest, Sha256};

    use super::*;
    use svc_store::bundle;

    pub(super) fn write_bundle(content: &[u8]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(BUNDLE_FILE), content).unwrap();
        let line = digest_line(&hex::encode(Sha256::digest(content)));
        std::fs::write(dir.path().join(format!("{BUNDLE_FILE}.sha256")), line).unwrap();
        dir
    }

    fn bucket() -> Bucket {
        Bucket::new(Arc::new(object_store::memory::InMemory::new()))
    }

    #[tokio::test]
    async fn publish_refuses_different_content_for_a_version() {
        let (bucket, version) = (bucket(), "1.0".parse().unwrap());
        let (one, other) = (write_bundle(b"one"), write_bundle(b"other"));
        let first = publish(&bucket, one.path(), &version).await.unwrap();
        assert_eq!(first.outcome, PublishOutcome::Published);
        assert_eq!(
            publish(&bucket, one.path(), &version).await.unwrap().outcome,
            PublishOutcome::AlreadyPublished
        );
        let error = publish(&bucket, other.path(), &version).await.unwrap_err();
        assert!(matches!(error, PublishError::VersionTaken { .. }), "{error}");
        // Another process uploads an archive of the same size.
        bucket.put(&key::bundle(&version, ""), b"two".to_vec()).await.unwrap();
        assert_eq!(publish(&bucket, one.path(), &version).await.unwrap().outcome, PublishOutcome::Published);
        let stored = bucket.get(&key::bundle(&version, ""), 100).await.unwrap().unwrap();
        assert_eq!(&stored.value[..], b"one");
        let listed = list(&bucket).await.unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!((listed[0].image_version.as_str(), listed[0].size_bytes), ("1.0", 3));
        assert_eq!(listed[0].sha256, hex::encode(Sha256::digest(b"one")));
    }

    #[tokio::test]
    async fn publish_refuses_archive_with_wrong_digest() {
        let (bucket, version) = (bucket(), "1.0".parse().unwrap());
        let dir = write_bundle(b"whole");
        std::fs::write(dir.path().join(BUNDLE_FILE), b"torn").unwrap();
        let error = publish(&bucket, dir.path(), &version).await.unwrap_err();
        assert!(matches!(error, PublishError::DigestMismatch { .. }), "{error}");
        assert_eq!(bucket.head(&key::bundle(&version, "")).await.unwrap(), None);
    }

    #[tokio::test]
    async fn publish_completes_interrupted_publication() {
        let (bucket, version) = (bucket(), "1.0".parse().unwrap());
        bucket.put(&key::bundle(&version, ""), b"from an earlier attempt".to_vec()).await.unwrap();
        assert!(list(&bucket).await.unwrap().is_empty(), "archives without a digest aren't listed");
        let dir = write_bundle(&vec![7; 12 << 20]);
        let sha256 = hex::encode(Sha256::digest(vec![7; 12 << 20]));
        let manifest = |sha256: &str| {
            format!(
                "{{\"version\":1,\"imageVersion\":\"1.0\",\"sha256\":\"{sha256}\",\"sizeBytes\":{},\
                 \"minVersion\":null,\"createdAt\":\"2026-01-01T00:00:00Z\",\"expiresAt\":\"2126-01-01T00:00:00Z\"}}\n",
                12 << 20
            )
        };
        let manifest_file = dir.path().join(format!("{BUNDLE_FILE}.json"));
        std::fs::write(&manifest_file, manifest(&"0".repeat(64))).unwrap();
        let error = publish(&bucket, dir.path(), &version).await.unwrap_err();
        assert!(matches!(
            error,
            PublishError::InvalidCompanion { source: ManifestError::WrongDigest { .. }, .. }
        ));
        std::fs::write(&manifest_file, manifest(&sha256)).unwrap();
        let published = publish(&bucket, dir.path(), &version).await.unwrap();
        assert!(published.to_string().contains("hosts cannot update"), "{published}");
        let archive = bucket.head(&key::bundle(&version, "")).await.unwrap().unwrap();
        assert_eq!(archive.size, 12 << 20);
        assert!(bucket.head(&key::bundle(&version, ".json")).await.unwrap().is_some());
        assert!(read_digest(&bucket, &version).await.unwrap().is_some());
    }

    fn signing_key() -> SigningKey {
        SigningKey::from_pem(include_bytes!("../../tests/kit/src/bundle/ed25519-test-only.txt")).unwrap()
    }

    /// Writes a manifest for the archive `content` to `dir`, signed if there's a key.
    fn write_manifest(dir: &tempfile::TempDir, content: &[u8], expires_at: &str, key: Option<&SigningKey>) {
        let manifest = kit::bundle::Manifest {
            version: 1,
            image_version: "1.0".to_owned(),
            sha256: hex::encode(Sha256::digest(content)),
            size_bytes: content.len() as u64,
            min_version: None,
            created_at: "2026-01-01T00:00:00.000Z".to_owned(),
            expires_at: expires_at.to_owned(),
            trusted_keys: None,
            removes: Vec::new(),
        };
        let text = manifest.render().unwrap();
        let path = |suffix: &str| dir.path().join(format!("{BUNDLE_FILE}{suffix}"));
        std::fs::write(path(".json"), &text).unwrap();
        if let Some(key) = key {
            std::fs::write(path(".json.sig"), key.signature_line(text.as_bytes())).unwrap();
        }
    }

    #[tokio::test]
    async fn publish_refuses_manifest_too_large_for_hosts() {
        let (bucket, version): (_, ImageVersion) = (bucket(), "1.0".parse().unwrap());
        let dir = write_bundle(b"one");
        write_manifest(&dir, b"one", "2125-01-01T00:00:00.000Z", None);
        let manifest_file = dir.path().join(format!("{BUNDLE_FILE}.json"));
        let mut manifest = std::fs::read(&manifest_file).unwrap();
        manifest.resize(usize::try_from(bundle::MAX_COMPANION_BYTES).unwrap() + 1, b' ');
        std::fs::write(&manifest_file, manifest).unwrap();
        let error = publish(&bucket, dir.path(), &version).await.unwrap_err();
        assert!(
            matches!(error, PublishError::InvalidCompanion { source: ManifestError::TooLarge, .. }),
            "{error}"
        );
        assert_eq!(bucket.head(&key::bundle(&version, ".sha256")).await.unwrap(), None);
    }

    #[tokio::test]
    async fn publish_adds_and_renews_signed_manifest() {
        let (bucket, version): (_, ImageVersion) = (bucket(), "1.0".parse().unwrap());
        let dir = write_bundle(b"one");
        let keys = HostKeys::with_keys(&signing_key().public_key_base64());
        let publish = async || publish_with_keys(&bucket, dir.path(), &version, &keys).await;
        let read_expiry = async || {
            let signed = bundle::read_signed_manifest(&bucket, &version).await.unwrap().unwrap();
            let verified =
                bundle::verify(&signed, keys.keys.as_ref().unwrap(), &version, Timestamp::now()).unwrap();
            verified.manifest().expires_at.to_string()
        };
        assert!(publish().await.unwrap().update_support != UpdateSupport::Possible);
        write_manifest(&dir, b"one", "2125-01-01T00:00:00.000Z", None);
        let unsigned = publish().await.unwrap();
        assert_eq!(unsigned.outcome, PublishOutcome::AlreadyPublished);
        assert_eq!(
            unsigned.update_support,
            UpdateSupport::Impossible("its manifest is not signed".to_owned())
        );
        write_manifest(&dir, b"one", "2125-01-01T00:00:00.000Z", Some(&signing_key()));
        let signed = publish().await.unwrap();
        assert_eq!(signed.outcome, PublishOutcome::AlreadyPublished);
        assert_eq!(signed.update_support, UpdateSupport::Possible);
        assert_eq!(read_expiry().await, "2125-01-01T00:00:00Z");

        write_manifest(&dir, b"one", "2126-01-01T00:00:00.000Z", Some(&signing_key()));
        let keyless =
            publish_with_keys(&bucket, dir.path(), &version, &HostKeys::default()).await.unwrap_err();
        assert!(keyless.to_string().contains("BUNDLE_PUBLIC_KEYS"), "{keyless}");
        assert_eq!(publish().await.unwrap().update_support, UpdateSupport::Possible);
        assert_eq!(read_expiry().await, "2126-01-01T00:00:00Z");
        write_manifest(&dir, b"one", "2125-06-01T00:00:00.000Z", Some(&signing_key()));
        let shorter = publish().await.unwrap_err();
        assert!(matches!(shorter, PublishError::NoRenewal { .. }), "{shorter}");
        assert!(shorter.to_string().contains("until 2126-01-01"), "{shorter}");
        assert_eq!(read_expiry().await, "2126-01-01T00:00:00Z");

        // A renewal interrupted between its two writes is completed.
        let old = bucket.get(&key::bundle(&version, ".json.sig"), 1 << 16).await.unwrap().unwrap().value;
        write_manifest(&dir, b"one", "2127-01-01T00:00:00.000Z", Some(&signing_key()));
        publish().await.unwrap();
        bucket.put(&key::bundle(&version, ".json.sig"), old).await.unwrap();
        assert_eq!(publish().await.unwrap().update_support, UpdateSupport::Possible);
        assert_eq!(read_expiry().await, "2127-01-01T00:00:00Z");
    }

    #[tokio::test]
    async fn update_support_depends_on_stored_manifest() {
        let (bucket, version): (_, ImageVersion) = (bucket(), "1.0".parse().unwrap());
        let dir = write_bundle(b"one");
        let keys = HostKeys::with_keys(&signing_key().public_key_base64());
        write_manifest(&dir, b"one", "2125-01-01T00:00:00.000Z", Some(&signing_key()));
        publish_with_keys(&bucket, dir.path(), &version, &keys).await.unwrap();
        // Republish the same archive from a build without a manifest.
        let bare = write_bundle(b"one");
        let again = publish_with_keys(&bucket, bare.path(), &version, &keys).await.unwrap();
        assert_eq!(again.outcome, PublishOutcome::AlreadyPublished);
        assert_eq!(again.update_support, UpdateSupport::Possible);
        let other_keys = HostKeys::with_keys("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=");
        let untrusted = publish_with_keys(&bucket, bare.path(), &version, &other_keys).await.unwrap();
        assert!(untrusted.to_string().contains("not signed by a key that is trusted"), "{untrusted}");
    }
}

//! Bundle companions: the manifest and signature, in a build directory or in the store.
//!
//! Invariant: once a version is published and its archive stored, its manifest is only replaced by one that hosts trust
//! for longer.

use std::path::Path as FilePath;

use bytes::Bytes;
use jiff::Timestamp;
use object_store::path::Path;

use super::{PublishError, UpdateSupport};
use svc_base::clock::rfc3339_ms;
use svc_machine::name::ImageVersion;
use svc_store::bucket::{Bucket, Condition, StoreError, VersionedValue};
use svc_store::bundle::{
    self, KeySet, MAX_COMPANION_BYTES, Manifest, ManifestError, SignedManifest, TrustedKeys,
    VerifiedManifest, verify,
};
use svc_store::key::{self, BUNDLE_FILE};

const MANIFEST_SUFFIX: &str = ".json";
const SIGNATURE_SUFFIX: &str = ".json.sig";

/// The archive described by the manifest and signature, and the host keys, if configured.
pub struct BundleContext<'a> {
    pub version: &'a ImageVersion,
    pub sha256: &'a str,
    pub size_bytes: u64,
    pub keys: Option<&'a TrustedKeys>,
}

impl BundleContext<'_> {
    fn parse_manifest(&self, manifest: &[u8]) -> Result<Manifest, ManifestError> {
        let parsed = Manifest::parse(manifest)?;
        parsed.check_version(self.version)?;
        parsed.check_archive(self.sha256, self.size_bytes)?;
        Ok(parsed)
    }

    /// Checks that hosts would trust the signed manifest now. Without configured keys, signatures can't be verified, so
    /// we only check their format, the expiry and the manifest's key set.
    fn check_trust(&self, signed: &SignedManifest) -> Result<(), ManifestError> {
        let manifest = self.parse_manifest(&signed.manifest)?;
        match self.keys {
            Some(keys) => verify(signed, keys, self.version, Timestamp::now()).map(drop),
            None if manifest.expires_at <= Timestamp::now() => {
                Err(ManifestError::Expired { at: manifest.expires_at })
            }
            None => {
                bundle::parse_signatures(&signed.signature)?;
                manifest.check_key_set(signed)
            }
        }
    }

    fn key(&self, suffix: &str) -> Path {
        key::bundle(self.version, suffix)
    }
}

/// A build's manifest and signature, either of which may be missing.
pub struct Companions {
    manifest: Option<Bytes>,
    signature: Option<Bytes>,
}

impl Companions {
    /// Reads a build's companions and validates them before anything is uploaded: hosts would reject invalid ones.
    ///
    /// # Errors
    /// [`PublishError::Read`] if a file can't be read; [`PublishError::InvalidCompanion`] if a file is too large for
    /// hosts, the manifest doesn't match the archive, or it's signed but hosts wouldn't trust it.
    pub async fn read(dir: &FilePath, context: &BundleContext<'_>) -> Result<Self, PublishError> {
        let path = |suffix: &str| dir.join(format!("{BUNDLE_FILE}{suffix}"));
        let invalid = |suffix: &str, source| PublishError::InvalidCompanion { path: path(suffix), source };
        let manifest = read_if_exists(&path(MANIFEST_SUFFIX)).await?;
        let companions = Self { manifest, signature: read_if_exists(&path(SIGNATURE_SUFFIX)).await? };
        for (suffix, content) in companions.entries() {
            if content.len() as u64 > MAX_COMPANION_BYTES {
                return Err(invalid(suffix, ManifestError::TooLarge));
            }
        }
        if let Some(manifest) = &companions.manifest {
            context.parse_manifest(manifest).map_err(|error| invalid(MANIFEST_SUFFIX, error))?;
        }
        if let Some(signed) = companions.signed() {
            context.check_trust(&signed).map_err(|error| invalid(SIGNATURE_SUFFIX, error))?;
        }
        Ok(companions)
    }

    /// Returns the keys that hosts trust once healthy on this release.
    pub fn key_set(&self) -> Option<KeySet> {
        Manifest::parse(self.manifest.as_ref()?).ok()?.trusted_keys
    }

    fn signed(&self) -> Option<SignedManifest> {
        let (manifest, signature) = self.manifest.as_ref().zip(self.signature.as_ref())?;
        Some(SignedManifest { manifest: manifest.to_vec(), signature: signature.to_vec() })
    }

    fn entries(&self) -> impl Iterator<Item = (&'static str, &Bytes)> {
        let manifest = self.manifest.as_ref().map(|manifest| (MANIFEST_SUFFIX, manifest));
        // A signature without a manifest is meaningless.
        let signature = self.signature.as_ref().filter(|_| self.manifest.is_some());
        manifest.into_iter().chain(signature.map(|signature| (SIGNATURE_SUFFIX, signature)))
    }

    /// Uploads the companions, overwriting stored ones. For versions that aren't published yet, or whose archive is
    /// being replaced.
    pub async fn upload(&self, bucket: &Bucket, context: &BundleContext<'_>) -> Result<(), StoreError> {
        for (suffix, content) in self.entries() {
            bucket.put(&context.key(suffix), content.clone()).await?;
        }
        Ok(())
    }

    /// Adds missing companions to a published version, or renews its manifest.
    ///
    /// # Errors
    /// [`PublishError::NoRenewal`] if the stored companions differ and hosts wouldn't trust these for longer;
    /// [`PublishError::PublishedConcurrently`] if another process changes the stored ones concurrently;
    /// [`PublishError::Store`] if the store fails.
    pub async fn add_or_renew(
        &self,
        bucket: &Bucket,
        context: &BundleContext<'_>,
    ) -> Result<(), PublishError> {
        let stored = StoredCompanions::read(bucket, context).await?;
        let is_different = self
            .entries()
            .any(|(suffix, content)| stored.get(suffix).is_some_and(|existing| existing.value != *content));
        if is_different {
            self.check_renewal(&stored, context)
                .map_err(|reason| PublishError::NoRenewal { version: context.version.clone(), reason })?;
        }
        for (suffix, content) in self.entries() {
            let condition = match stored.get(suffix) {
                Some(existing) if existing.value == *content => continue,
                Some(existing) => Condition::Unchanged(existing.version.clone()),
                None => Condition::Absent,
            };
            put_companion(bucket, context, suffix, content, condition).await?;
        }
        Ok(())
    }

    /// Checks that hosts trust these companions, and for longer than the stored ones (if they trust those at all).
    fn check_renewal(&self, stored: &StoredCompanions, context: &BundleContext<'_>) -> Result<(), String> {
        let Some(signed) = self.signed() else { return Err("this one is not signed".to_owned()) };
        let Some(keys) = context.keys else {
            return Err("BUNDLE_PUBLIC_KEYS is not set, so this one cannot be verified".to_owned());
        };
        let expiry = |verified: &VerifiedManifest| verified.manifest().expires_at;
        let verified =
            verify(&signed, keys, context.version, Timestamp::now()).map_err(|error| error.to_string())?;
        // Verify as of `MIN`, so that an expired stored manifest is accepted too.
        let stored =
            stored.signed().and_then(|stored| verify(&stored, keys, context.version, Timestamp::MIN).ok());
        match stored.filter(|stored| context.sha256 == stored.manifest().sha256) {
            Some(stored) if expiry(&stored) >= expiry(&verified) => Err(format!(
                "this one is valid until {}, and the published one until {}",
                rfc3339_ms(expiry(&verified)),
                rfc3339_ms(expiry(&stored))
            )),
            _ => Ok(()),
        }
    }
}

async fn read_if_exists(path: &FilePath) -> Result<Option<Bytes>, PublishError> {
    match tokio::fs::read(path).await {
        Ok(content) => Ok(Some(content.into())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PublishError::Read { path: path.to_owned(), source }),
    }
}

async fn put_companion(
    bucket: &Bucket,
    context: &BundleContext<'_>,
    suffix: &str,
    content: &Bytes,
    condition: Condition,
) -> Result<(), PublishError> {
    let key = context.key(suffix);
    match bucket.put_if(&key, content.clone(), condition).await {
        Ok(()) => Ok(()),
        // Either another publisher won, or the response to our own write was lost.
        Err(StoreError::Precondition { .. }) => match bucket.get(&key, MAX_COMPANION_BYTES).await? {
            Some(stored) if stored.value == *content => Ok(()),
            _ => Err(PublishError::PublishedConcurrently { version: context.version.clone() }),
        },
        Err(error) => Err(error.into()),
    }
}

/// The manifest and signature in the store.
struct StoredCompanions {
    manifest: Option<VersionedValue<Bytes>>,
    signature: Option<VersionedValue<Bytes>>,
}

impl StoredCompanions {
    async fn read(bucket: &Bucket, context: &BundleContext<'_>) -> Result<Self, StoreError> {
        let manifest = bucket.get(&context.key(MANIFEST_SUFFIX), MAX_COMPANION_BYTES).await?;
        let signature = bucket.get(&context.key(SIGNATURE_SUFFIX), MAX_COMPANION_BYTES).await?;
        Ok(Self { manifest, signature })
    }

    fn get(&self, suffix: &str) -> Option<&VersionedValue<Bytes>> {
        if suffix == MANIFEST_SUFFIX { self.manifest.as_ref() } else { self.signature.as_ref() }
    }

    fn signed(&self) -> Option<SignedManifest> {
        let (manifest, signature) = self.manifest.as_ref().zip(self.signature.as_ref())?;
        Some(SignedManifest { manifest: manifest.value.to_vec(), signature: signature.value.to_vec() })
    }
}

/// Checks whether hosts can update to the stored bundle.
pub async fn check_update_support(
    bucket: &Bucket,
    context: &BundleContext<'_>,
) -> Result<UpdateSupport, StoreError> {
    let stored = StoredCompanions::read(bucket, context).await?;
    let Some(manifest) = &stored.manifest else {
        return Ok(UpdateSupport::Impossible("it has no manifest".to_owned()));
    };
    let checked = match stored.signed() {
        Some(signed) => context.check_trust(&signed),
        None => match context.parse_manifest(&manifest.value) {
            Ok(_) => return Ok(UpdateSupport::Impossible("its manifest is not signed".to_owned())),
            Err(error) => Err(error),
        },
    };
    Ok(checked
        .map_or_else(|error| UpdateSupport::Impossible(error.to_string()), |()| UpdateSupport::Possible))
}

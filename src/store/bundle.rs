//! Reads and verifies a host bundle's sidecar files: the archive's digest, and the signed manifest that hosts require
//! for an update.
//!
//! A manifest is trusted only as a [`VerifiedManifest`], and only [`verify`] creates one. Unknown formats are rejected;
//! unknown fields are ignored, except in key sets.

mod keys;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::bucket::{Bucket, StoreError};
use super::key::{self, BUNDLE_FILE};
use svc_machine::name::ImageVersion;

pub use keys::{KeyListError, KeySet, KeySetError, MAX_KEYS, TrustedKeys, max_sequence_after};

/// Maximum size of a manifest or signature file.
pub const MAX_COMPANION_BYTES: u64 = 64 << 10;
/// Maximum size of the `.sha256` file.
const MAX_DIGEST_FILE_BYTES: u64 = 1024;
const FORMAT_VERSION: u32 = 1;

/// Reads the SHA-256 (hex) from a bundle's `.sha256` file; `None` if the bundle does not exist.
///
/// # Errors
/// [`StoreError`] if the file cannot be read, `Corrupt` if it contains no digest.
pub async fn read_digest(bucket: &Bucket, version: &ImageVersion) -> Result<Option<String>, StoreError> {
    let companion = key::bundle(version, ".sha256");
    let Some(read) = bucket.get(&companion, MAX_DIGEST_FILE_BYTES).await? else {
        return Ok(None);
    };
    match parse_digest(&String::from_utf8_lossy(&read.value)) {
        Some(digest) => Ok(Some(digest)),
        None => Err(StoreError::Corrupt {
            key: companion.to_string(),
            reason: "it contains no SHA-256".to_owned(),
        }),
    }
}

/// Reads the published manifest and signature; `None` if either is missing.
pub async fn read_signed_manifest(
    bucket: &Bucket,
    version: &ImageVersion,
) -> Result<Option<SignedManifest>, StoreError> {
    let manifest = bucket.get(&key::bundle(version, ".json"), MAX_COMPANION_BYTES).await?;
    let signature = bucket.get(&key::bundle(version, ".json.sig"), MAX_COMPANION_BYTES).await?;
    Ok(manifest.zip(signature).map(|(manifest, signature)| SignedManifest {
        manifest: manifest.value.to_vec(),
        signature: signature.value.to_vec(),
    }))
}

/// Parses the digest from a line of `sha256sum` output.
pub fn parse_digest(text: &str) -> Option<String> {
    let digest = text.split_whitespace().next()?;
    let is_hex = digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit());
    is_hex.then(|| digest.to_ascii_lowercase())
}

/// Returns the contents of the `.sha256` file, in `sha256sum` format.
pub fn digest_line(digest: &str) -> String {
    format!("{digest}  {BUNDLE_FILE}\n")
}

/// A bundle's manifest, `svc-host-bundle.tar.gz.json`. `version` is the format version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub version: u32,
    pub image_version: ImageVersion,
    pub sha256: String,
    pub size_bytes: u64,
    /// The oldest release that can update to this one; `None` if all can.
    #[serde(default)]
    pub min_version: Option<ImageVersion>,
    #[serde(with = "svc_base::clock::wire")]
    pub created_at: Timestamp,
    #[serde(with = "svc_base::clock::wire")]
    pub expires_at: Timestamp,
    /// The keys that hosts trust once they are healthy on this release; `None` to keep their current keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trusted_keys: Option<KeySet>,
    /// Parts of earlier releases that this one removes on purpose, by their names in `release.json`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removes: Vec<String>,
}

/// Why a bundle is not trusted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    #[error("it is larger than {} KiB, the maximum that hosts read", MAX_COMPANION_BYTES >> 10)]
    TooLarge,
    #[error("no key is trusted: BUNDLE_PUBLIC_KEYS (on a host, SVC_BUNDLE_PUBLIC_KEYS) is not set")]
    NoKeys,
    #[error("the signature file must have 1 to {MAX_KEYS} lines, each a key id and a signature")]
    MalformedSignature,
    #[error("it is not signed by a key that is trusted here (signed with {})", .ids.join(", "))]
    UnknownKey { ids: Vec<String> },
    #[error("the signature by key {id} does not match this manifest")]
    InvalidSignature { id: String },
    #[error("cannot parse the manifest: {reason}")]
    Malformed { reason: String },
    #[error("the manifest has format {found}, but this program supports only {FORMAT_VERSION}")]
    WrongFormat { found: u32 },
    #[error("the manifest is for version {found}, not for {expected}")]
    WrongVersion { expected: ImageVersion, found: ImageVersion },
    #[error("the manifest expired at {}", svc_base::clock::rfc3339_ms(*.at))]
    Expired { at: Timestamp },
    #[error(transparent)]
    KeySet(#[from] KeySetError),
    #[error("the archive's SHA-256 is {found}, but the manifest says {expected}")]
    WrongDigest { expected: String, found: String },
    #[error("the archive is {found} bytes, but the manifest says {expected}")]
    WrongSize { expected: u64, found: u64 },
}

impl Manifest {
    /// Parses a manifest without verifying it.
    ///
    /// # Errors
    /// [`ManifestError::WrongFormat`] for an unsupported format, [`ManifestError::Malformed`] for invalid JSON or an
    /// invalid SHA-256.
    pub fn parse(text: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Format {
            version: u32,
        }
        let malformed = |error: serde_json::Error| ManifestError::Malformed { reason: error.to_string() };
        let format: Format = serde_json::from_slice(text).map_err(malformed)?;
        if format.version != FORMAT_VERSION {
            return Err(ManifestError::WrongFormat { found: format.version });
        }
        let manifest: Self = serde_json::from_slice(text).map_err(malformed)?;
        match parse_digest(&manifest.sha256) {
            Some(digest) if digest == manifest.sha256 => Ok(manifest),
            _ => Err(ManifestError::Malformed {
                reason: "sha256 must be 64 lowercase hexadecimal digits".to_owned(),
            }),
        }
    }

    /// Checks that the manifest is signed by a key in its own key set, if it has one.
    pub fn check_key_set(&self, signed: &SignedManifest) -> Result<(), ManifestError> {
        self.trusted_keys.as_ref().map_or(Ok(()), |set| set.check_signed_by_own_key(signed))
    }

    /// Checks that the manifest is for this version.
    ///
    /// # Errors
    /// [`ManifestError::WrongVersion`] if it is for a different version.
    pub fn check_version(&self, expected: &ImageVersion) -> Result<(), ManifestError> {
        if self.image_version == *expected {
            return Ok(());
        }
        Err(ManifestError::WrongVersion { expected: expected.clone(), found: self.image_version.clone() })
    }

    /// Checks that the manifest is for this archive.
    ///
    /// # Errors
    /// [`ManifestError::WrongSize`] or [`ManifestError::WrongDigest`] if the archive's size or SHA-256 differs.
    pub fn check_archive(&self, sha256: &str, size_bytes: u64) -> Result<(), ManifestError> {
        if self.size_bytes != size_bytes {
            return Err(ManifestError::WrongSize { expected: self.size_bytes, found: size_bytes });
        }
        if self.sha256 != sha256 {
            return Err(ManifestError::WrongDigest {
                expected: self.sha256.clone(),
                found: sha256.to_owned(),
            });
        }
        Ok(())
    }
}

/// A manifest and its signature, as unverified bytes.
#[derive(Debug, Clone)]
pub struct SignedManifest {
    pub manifest: Vec<u8>,
    pub signature: Vec<u8>,
}

/// A manifest that [`verify`] has accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedManifest(Manifest);

impl VerifiedManifest {
    pub fn manifest(&self) -> &Manifest {
        &self.0
    }
}

/// Verifies that a manifest is signed by a trusted key, matches the expected version and has not expired. If it has a
/// key set, a key in that set must have signed it too.
pub fn verify(
    signed: &SignedManifest,
    keys: &TrustedKeys,
    expected: &ImageVersion,
    now: Timestamp,
) -> Result<VerifiedManifest, ManifestError> {
    keys.verify_signatures(&signed.manifest, &signed.signature)?;
    let manifest = Manifest::parse(&signed.manifest)?;
    manifest.check_version(expected)?;
    if manifest.expires_at <= now {
        return Err(ManifestError::Expired { at: manifest.expires_at });
    }
    manifest.check_key_set(signed)?;
    Ok(VerifiedManifest(manifest))
}

/// Why hosts would refuse to update to a published bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleUnusable {
    #[error("it was published without a signed manifest")]
    Unsigned,
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("its manifest is for another archive")]
    WrongArchive,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Verifies the published manifest against the archive's SHA-256, as hosts do.
///
/// # Errors
/// [`BundleUnusable`] if no signed manifest is published, if it cannot be read or verified, or if it is for a different
/// archive.
pub async fn verify_published(
    bucket: &Bucket,
    version: &ImageVersion,
    sha256: &str,
    keys: &TrustedKeys,
) -> Result<VerifiedManifest, BundleUnusable> {
    let signed = read_signed_manifest(bucket, version).await?.ok_or(BundleUnusable::Unsigned)?;
    let verified = verify(&signed, keys, version, Timestamp::now())?;
    if verified.manifest().sha256 == sha256 { Ok(verified) } else { Err(BundleUnusable::WrongArchive) }
}

/// Parses a signature file: 1 to [`MAX_KEYS`] lines, each a key id and a signature.
///
/// # Errors
/// [`ManifestError::MalformedSignature`] for anything else.
pub fn parse_signatures(text: &[u8]) -> Result<Vec<(String, Vec<u8>)>, ManifestError> {
    let text = std::str::from_utf8(text).map_err(|_| ManifestError::MalformedSignature)?;
    let parse_line = |line: &str| {
        let (id, signature) = line.split_once(' ')?;
        let is_valid_id =
            id.len() == 16 && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let signature = STANDARD.decode(signature).ok().filter(|bytes| bytes.len() == 64)?;
        is_valid_id.then(|| (id.to_owned(), signature))
    };
    let signatures: Option<Vec<_>> = text.lines().map(parse_line).collect();
    signatures
        .filter(|signatures| (1..=MAX_KEYS).contains(&signatures.len()))
        .ok_or(ManifestError::MalformedSignature)
}

#[cfg(test)]
mod tests;

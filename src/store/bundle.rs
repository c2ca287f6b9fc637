//! Published host bundles: the digest beside the archive.

use super::bucket::{Bucket, StoreError};
use super::key::{self, BUNDLE_FILE};
use crate::machine::name::ImageVersion;

/// The SHA-256 (hex) that the `.sha256` companion of a bundle states; `None` where there is no such bundle.
///
/// # Errors
/// [`StoreError`]; a companion without a digest is `Corrupt`.
pub async fn digest(bucket: &Bucket, version: &ImageVersion) -> Result<Option<String>, StoreError> {
    let companion = key::bundle(version, ".sha256");
    let Some(read) = bucket.get(&companion, 1024).await? else {
        return Ok(None);
    };
    match parse_digest(&String::from_utf8_lossy(&read.value)) {
        Some(digest) => Ok(Some(digest)),
        None => Err(StoreError::Corrupt { key: companion.to_string(), why: "no SHA-256 in it".to_owned() }),
    }
}

/// The digest of a `sha256sum` line.
pub fn parse_digest(text: &str) -> Option<String> {
    let digest = text.split_whitespace().next()?;
    let is_hex = digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit());
    is_hex.then(|| digest.to_ascii_lowercase())
}

/// The companion's content, as `sha256sum` writes and checks it.
pub fn digest_line(digest: &str) -> String {
    format!("{digest}  {BUNDLE_FILE}\n")
}

//! Reads and writes the marker in the object store, which names the current platform key by its fingerprint.
//!
//! If a platform server is restored from a copy made before a rotation of `PLATFORM_KEY`, its database and settings are
//! consistent, and only the store shows the rotation. A process with the old keys would reject every host and trust no
//! fence signed since the rotation.
//!
//! Invariant: a marker that names a key that this process does not have is never overwritten.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use object_store::path::Path;
use serde::{Deserialize, Serialize};

use crate::context::Platform;
use crate::platform_key::{KeyId, KeyIds};
use svc_base::clock::{self, now_ms};
use svc_http::problem::format_chain;
use svc_store::bucket::{Bucket, Condition, StoreError, VersionedValue};

/// Host sessions cannot reach this path: they can reach only objects below `USER/SLOT/`, whose paths have at least
/// three segments.
pub const MARKER_PATH: &str = "system-platform/platform-key.json";

const FORMAT_VERSION: u32 = 1;
/// Timeout for one read of the marker, and for one write.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before a retry while the store is unavailable.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of attempts to write the marker while other processes are writing it. Each attempt reads the marker
/// again.
const MAX_WRITE_ATTEMPTS: u32 = 5;

/// The stored marker. Unknown fields, which a newer release may add, are ignored.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Marker {
    version: u32,
    key_id: String,
    #[serde(with = "clock::wire")]
    noted_at: Timestamp,
}

/// Which of this process's keys the marker names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarkerKey {
    Current,
    Previous,
    /// No marker exists yet.
    NoMarker,
}

/// The marker names a key that this process does not have.
#[derive(Debug)]
pub struct UnknownKey {
    named: String,
    ids: KeyIds,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { named, ids } = self;
        let previous = ids.previous.as_ref().map_or_else(|| "not set".to_owned(), KeyId::to_string);
        write!(
            f,
            "according to the object store, the current platform key has the fingerprint {named} ({MARKER_PATH}), which is \
             neither PLATFORM_KEY ({}) nor PLATFORM_KEY_PREVIOUS ({previous})",
            ids.current
        )
    }
}

impl UnknownKey {
    /// Returns the recommended action for the operator.
    pub fn advice(&self) -> String {
        format!(
            "one of the two must be the key {named}: if you restored settings from before a key rotation, set it as \
             PLATFORM_KEY, and the restored key ({}) as PLATFORM_KEY_PREVIOUS; during a key rotation, set it as \
             PLATFORM_KEY_PREVIOUS. See \"The platform's database was restored from an older copy\" in \
             docs/operating/recovery.md",
            self.ids.current,
            named = self.named,
        )
    }
}

/// The reason the marker could not be checked or written.
#[derive(Debug, thiserror::Error)]
pub enum MarkerError {
    #[error("{}; {}", .0, .0.advice())]
    UnknownKey(Box<UnknownKey>),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("too many concurrent changes to the marker of the current platform key")]
    Contended,
}

impl MarkerError {
    /// Returns whether the process must not run. An unavailable store is not a reason to stop it.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::UnknownKey(_) | Self::Store(StoreError::Corrupt { .. }))
    }
}

/// Returns which of this process's keys the marker names.
pub async fn check(bucket: &Bucket, ids: &KeyIds) -> Result<MarkerKey, MarkerError> {
    classify(read(bucket).await?.as_ref(), ids)
}

/// Writes a marker for the current key if the store has no marker, or a marker for the previous key.
pub async fn write(bucket: &Bucket, ids: &KeyIds) -> Result<(), MarkerError> {
    for _ in 0..MAX_WRITE_ATTEMPTS {
        let stored = read(bucket).await?;
        if classify(stored.as_ref(), ids)? == MarkerKey::Current {
            return Ok(());
        }
        let condition = stored.map_or(Condition::Absent, |stored| Condition::Unchanged(stored.version));
        let marker =
            Marker { version: FORMAT_VERSION, key_id: ids.current.as_str().to_owned(), noted_at: now_ms() };
        let path = marker_path();
        let put = bucket.put_json_if(&path, &marker, condition);
        match bucket.run_with_timeout(&path, CALL_TIMEOUT, put).await {
            Ok(()) => return Ok(()),
            // Another process has written the marker, or the response to this process's write was lost.
            Err(StoreError::Precondition { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(MarkerError::Contended)
}

/// Writes the marker in case the write at startup failed, retries until the store is available, and then waits until
/// the process is stopped. If the marker is corrupt or names a key that this process does not have, returns early,
/// which ends the process.
pub async fn write_until_stopped(platform: Arc<Platform>) {
    loop {
        match write(&platform.bucket, &platform.process.ids).await {
            Ok(()) => return platform.stop.cancelled().await,
            Err(error) if error.is_fatal() => {
                return tracing::error!(error = %format_chain(&error), "the marker of the current platform key rejects this process");
            }
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "cannot store the marker of the current platform key; retrying");
            }
        }
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
        }
    }
}

fn marker_path() -> Path {
    Path::from(MARKER_PATH)
}

async fn read(bucket: &Bucket) -> Result<Option<VersionedValue<Marker>>, StoreError> {
    let path = marker_path();
    let stored = bucket.run_with_timeout(&path, CALL_TIMEOUT, bucket.get_json::<Marker>(&path)).await?;
    let is_id = |text: &str| text.len() == KeyId::CHARS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match stored {
        Some(marker) if !is_id(&marker.value.key_id) => {
            Err(StoreError::corrupt(&path, &"keyId is not a fingerprint of a platform key"))
        }
        stored => Ok(stored),
    }
}

fn classify(stored: Option<&VersionedValue<Marker>>, ids: &KeyIds) -> Result<MarkerKey, MarkerError> {
    let Some(stored) = stored else { return Ok(MarkerKey::NoMarker) };
    let key_id = &stored.value.key_id;
    if key_id == ids.current.as_str() {
        return Ok(MarkerKey::Current);
    }
    if ids.previous.as_ref().is_some_and(|previous| key_id == previous.as_str()) {
        return Ok(MarkerKey::Previous);
    }
    Err(MarkerError::UnknownKey(Box::new(UnknownKey { named: key_id.clone(), ids: ids.clone() })))
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    fn key_ids(current: u8, previous: Option<u8>) -> KeyIds {
        let id = |byte: u8| KeyId::from_key(&vec![byte; 32].into());
        KeyIds { current: id(current), previous: previous.map(id) }
    }

    #[tokio::test]
    async fn write_replaces_previous_key_but_keeps_unknown_key() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        assert_eq!(check(&bucket, &key_ids(1, None)).await.unwrap(), MarkerKey::NoMarker);
        write(&bucket, &key_ids(1, None)).await.unwrap();
        assert_eq!(check(&bucket, &key_ids(2, Some(1))).await.unwrap(), MarkerKey::Previous);
        write(&bucket, &key_ids(2, Some(1))).await.unwrap();
        write(&bucket, &key_ids(2, None)).await.unwrap();

        for old in [key_ids(1, None), key_ids(1, Some(3))] {
            for error in [check(&bucket, &old).await.unwrap_err(), write(&bucket, &old).await.unwrap_err()] {
                let message = error.to_string();
                assert!(error.is_fatal() && message.contains(key_ids(2, None).current.as_str()), "{message}");
            }
        }
        assert_eq!(
            check(&bucket, &key_ids(2, None)).await.unwrap(),
            MarkerKey::Current,
            "the marker must not be overwritten"
        );
    }

    #[tokio::test]
    async fn check_refuses_corrupt_marker() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        for text in ["{}", r#"{"version":1,"keyId":"\u001b[31m","notedAt":"2026-01-01T00:00:00.000Z"}"#] {
            bucket.put(&marker_path(), text).await.unwrap();
            let error = check(&bucket, &key_ids(1, None)).await.unwrap_err();
            assert!(error.is_fatal() && !error.to_string().contains('\u{1b}'), "{error}");
        }
    }
}

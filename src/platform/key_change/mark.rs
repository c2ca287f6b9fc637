//! The note in the object store of which platform key is current, by its fingerprint.
//!
//! A whole server that is restored from a copy of before a change of `PLATFORM_KEY` has a database and settings that agree with
//! each other; the store alone is newer. A process that has neither key of now would refuse every host, and believe none of
//! the fences that the platform has signed since.
//!
//! The invariant: a note that names a key which this process does not have in force is never written over.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use object_store::path::Path;
use serde::{Deserialize, Serialize};

use crate::clock::{self, now_ms};
use crate::http::problem::chain;
use crate::platform::context::Platform;
use crate::platform::platform_key::{KeyId, KeyIds};
use crate::store::bucket::{Bucket, Condition, StoreError, Versioned};

/// No session of a host reaches it: those reach a slot, which is two names deep.
pub const PLACE: &str = "system-platform/platform-key.json";

const FORMAT: u32 = 1;
/// Of one look, and of one attempt to write.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Between two attempts while the store does not answer.
const PAUSE: Duration = Duration::from_secs(5);
/// Of a write that others come before; each reads what they wrote.
const MAX_ROUNDS: u32 = 5;

/// What is in the store. Fields that a newer release writes are ignored.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Note {
    version: u32,
    key_id: String,
    #[serde(with = "clock::wire")]
    noted_at: Timestamp,
}

/// Which of this process's keys the note names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    Current,
    Previous,
    /// There is none yet.
    Nothing,
}

/// The note names a key that is not in force here.
#[derive(Debug)]
pub struct OtherKey {
    named: String,
    ids: KeyIds,
}

impl fmt::Display for OtherKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { named, ids } = self;
        let previous = ids.previous.as_ref().map_or_else(|| "not set".to_owned(), KeyId::to_string);
        write!(
            f,
            "the object store says that the current platform key has the fingerprint {named} ({PLACE}), which is neither \
             PLATFORM_KEY ({}) nor PLATFORM_KEY_PREVIOUS ({previous})",
            ids.current
        )
    }
}

impl OtherKey {
    /// What an operator does about it.
    pub fn advice(&self) -> String {
        format!(
            "one of the two must be the key {named}: where settings of before a change were restored, set it as PLATFORM_KEY, and \
             the key of then ({}) as PLATFORM_KEY_PREVIOUS; while the key is being changed, set it as PLATFORM_KEY_PREVIOUS. The \
             docs/operating/recovery.md's \"The platform's database was restored from an older copy\" has the rest",
            self.ids.current,
            named = self.named,
        )
    }
}

/// Why it is not known that this process has the current key.
#[derive(Debug, thiserror::Error)]
pub enum MarkError {
    #[error("{}; {}", .0, .0.advice())]
    OtherKey(Box<OtherKey>),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the note of the current platform key was changed by others too often")]
    Contended,
}

impl MarkError {
    /// Whether a process with these keys must not run. A store that does not answer says nothing.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::OtherKey(_) | Self::Store(StoreError::Corrupt { .. }))
    }
}

/// Which key the store names.
///
/// # Errors
/// [`MarkError`].
pub async fn check(bucket: &Bucket, ids: &KeyIds) -> Result<Named, MarkError> {
    named(read(bucket).await?.as_ref(), ids)
}

/// Makes the store name the current key, where it names none or the previous one.
///
/// # Errors
/// [`MarkError`].
pub async fn write(bucket: &Bucket, ids: &KeyIds) -> Result<(), MarkError> {
    for _ in 0..MAX_ROUNDS {
        let found = read(bucket).await?;
        if named(found.as_ref(), ids)? == Named::Current {
            return Ok(());
        }
        let condition = found.map_or(Condition::Absent, |found| Condition::Unchanged(found.version));
        let note = Note { version: FORMAT, key_id: ids.current.as_str().to_owned(), noted_at: now_ms() };
        let place = place();
        let put = bucket.put_json_if(&place, &note, condition);
        match bucket.within(&place, TIMEOUT, put).await {
            Ok(()) => return Ok(()),
            // Another process's, or our own whose answer was lost.
            Err(StoreError::Precondition { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(MarkError::Contended)
}

/// Writes the note that could not be written at the start; ends where the store turns out to name another key.
pub async fn keep(platform: Arc<Platform>) {
    loop {
        match write(&platform.bucket, &platform.process.ids).await {
            Ok(()) => return platform.stop.cancelled().await,
            Err(error) if error.is_refusal() => {
                return tracing::error!(error = %chain(&error), "this process has not the current platform key");
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), "the current platform key is not noted in the store yet");
            }
        }
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}

fn place() -> Path {
    Path::from(PLACE)
}

async fn read(bucket: &Bucket) -> Result<Option<Versioned<Note>>, StoreError> {
    let place = place();
    let found = bucket.within(&place, TIMEOUT, bucket.get_json::<Note>(&place)).await?;
    let is_id = |text: &str| text.len() == KeyId::CHARS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match found {
        Some(found) if !is_id(&found.value.key_id) => {
            Err(StoreError::corrupt(&place, &"keyId is no fingerprint of a platform key"))
        }
        found => Ok(found),
    }
}

fn named(found: Option<&Versioned<Note>>, ids: &KeyIds) -> Result<Named, MarkError> {
    let Some(found) = found else { return Ok(Named::Nothing) };
    let named = &found.value.key_id;
    if named == ids.current.as_str() {
        return Ok(Named::Current);
    }
    if ids.previous.as_ref().is_some_and(|previous| named == previous.as_str()) {
        return Ok(Named::Previous);
    }
    Err(MarkError::OtherKey(Box::new(OtherKey { named: named.clone(), ids: ids.clone() })))
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    fn ids(current: u8, previous: Option<u8>) -> KeyIds {
        let id = |byte: u8| KeyId::of(&vec![byte; 32].into());
        KeyIds { current: id(current), previous: previous.map(id) }
    }

    #[tokio::test]
    async fn note_follows_the_change_and_stays_with_an_unknown_key() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        assert_eq!(check(&bucket, &ids(1, None)).await.unwrap(), Named::Nothing);
        write(&bucket, &ids(1, None)).await.unwrap();
        assert_eq!(check(&bucket, &ids(2, Some(1))).await.unwrap(), Named::Previous);
        write(&bucket, &ids(2, Some(1))).await.unwrap();
        write(&bucket, &ids(2, None)).await.unwrap();

        for old in [ids(1, None), ids(1, Some(3))] {
            for error in [check(&bucket, &old).await.unwrap_err(), write(&bucket, &old).await.unwrap_err()] {
                let said = error.to_string();
                assert!(error.is_refusal() && said.contains(ids(2, None).current.as_str()), "{said}");
            }
        }
        assert_eq!(check(&bucket, &ids(2, None)).await.unwrap(), Named::Current, "nothing was written over");
    }

    #[tokio::test]
    async fn note_that_is_not_readable_is_a_refusal() {
        let bucket = Bucket::new(Arc::new(InMemory::new()));
        for text in ["{}", r#"{"version":1,"keyId":"\u001b[31m","notedAt":"2026-01-01T00:00:00.000Z"}"#] {
            bucket.put(&place(), text).await.unwrap();
            let error = check(&bucket, &ids(1, None)).await.unwrap_err();
            assert!(error.is_refusal() && !error.to_string().contains('\u{1b}'), "{error}");
        }
    }
}

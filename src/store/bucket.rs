//! Reads a bucket's objects, writes them with or without a condition, and classifies the errors for callers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    UpdateVersion,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::credentials::is_withdrawn;
use super::key::{POINTER_LOG_DIR, POINTER_SUFFIX};
use super::multipart::{MultipartBackend, OpenUpload};
use super::pointer;
use svc_base::metrics::{STORE_CALLS, STORE_DURATION};
use svc_base::untrusted_text::truncate_printable;

/// Maximum size of an object that [`Bucket::get_json`] reads.
pub const MAX_JSON_BYTES: usize = 1 << 20;

/// A store error, classified by its meaning for the caller.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{key} does not exist in the object store")]
    NotFound { key: String },
    /// A conditional write found a version other than the expected one.
    #[error("{key} was changed by another writer")]
    Precondition { key: String },
    /// `reason` may quote untrusted text; [`StoreError::corrupt`] limits its length and makes it printable.
    #[error("{key} in the object store is not readable: {reason}")]
    Corrupt { key: String, reason: String },
    /// Not written, because readers would reject it.
    #[error("{key} cannot be stored: {reason}")]
    TooLarge { key: String, reason: String },
    #[error("the object store refused access to {key}")]
    Denied {
        key: String,
        #[source]
        source: Box<Error>,
    },
    /// Signatures contain the time, and a store tolerates only a few minutes of skew. Transient: the clock may be
    /// corrected.
    #[error(
        "the object store refused access to {key} because of this machine's clock, which is wrong by several minutes; see `timedatectl status`"
    )]
    Clock {
        key: String,
        #[source]
        source: Box<Error>,
    },
    /// Permanent: another machine has replaced this one, and only that machine has access.
    #[error("this machine has been replaced and may no longer use the object store ({key})")]
    Withdrawn { key: String },
    #[error("the object store request for {key} failed")]
    Unavailable {
        key: String,
        #[source]
        source: Box<Error>,
    },
}

impl StoreError {
    /// Creates a `Corrupt` error. Truncates `reason` and makes it printable, because it may quote untrusted text of any
    /// length from the object.
    pub fn corrupt(key: &Path, reason: &impl std::fmt::Display) -> Self {
        Self::Corrupt { key: key.to_string(), reason: truncate_printable(&reason.to_string()) }
    }

    /// Converts an error from the underlying store.
    pub fn classify(key: &Path, error: Error) -> Self {
        let key = key.to_string();
        if is_withdrawn(&error) {
            return Self::Withdrawn { key };
        }
        match error {
            error if is_clock_error(&error) => Self::Clock { key, source: Box::new(error) },
            Error::NotFound { .. } => Self::NotFound { key },
            Error::Precondition { .. } | Error::AlreadyExists { .. } => Self::Precondition { key },
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
                Self::Denied { key, source: Box::new(error) }
            }
            error => Self::Unavailable { key, source: Box::new(error) },
        }
    }

    /// Returns the metric label.
    fn kind(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not_found",
            Self::Precondition { .. } => "precondition",
            Self::Corrupt { .. } => "corrupt",
            Self::TooLarge { .. } => "too_large",
            Self::Denied { .. } => "denied",
            Self::Clock { .. } => "clock",
            Self::Withdrawn { .. } => "withdrawn",
            Self::Unavailable { .. } => "unavailable",
        }
    }

    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    /// Whether a retry may succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Clock { .. })
    }
}

/// Whether an error message means that a snapshot pointer is unreadable or unsound. Matches the text, because hosts
/// report errors only as text.
pub fn is_unusable_pointer(error: &str) -> bool {
    let is_unreadable = error.match_indices(CORRUPT_MESSAGE).any(|(key_end, _)| {
        let key = error[..key_end].rsplit(char::is_whitespace).next().unwrap_or_default();
        key.ends_with(POINTER_SUFFIX) || key.contains(POINTER_LOG_DIR)
    });
    is_unreadable || pointer::is_unsound(error)
}

/// A part of [`StoreError::Corrupt`]'s message.
const CORRUPT_MESSAGE: &str = " in the object store is not readable";

/// Whether the store's error code means that the clock is wrong. There is no HTTP status for this.
fn is_clock_error(error: &Error) -> bool {
    let (Error::PermissionDenied { source, .. } | Error::Unauthenticated { source, .. }) = error else {
        return false;
    };
    source.to_string().contains("RequestTimeTooSkewed")
}

/// The version of an object that was read; a later write can require it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version(pub(crate) UpdateVersion);

impl Version {
    pub(super) fn from_meta(meta: &ObjectMeta) -> Self {
        Self(UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() })
    }

    pub fn etag(&self) -> Option<&str> {
        self.0.e_tag.as_deref()
    }
}

/// A value with its object's version.
#[derive(Debug, Clone)]
pub struct VersionedValue<T> {
    pub value: T,
    pub version: Version,
}

/// The condition for a write.
#[derive(Debug, Clone)]
pub enum Condition {
    Absent,
    Unchanged(Version),
}

impl Condition {
    /// Requires that the object has not changed since `meta` was read.
    pub(super) fn unchanged(meta: &ObjectMeta) -> Self {
        Self::Unchanged(Version::from_meta(meta))
    }
}

/// A bucket with typed operations.
#[derive(Debug, Clone)]
pub struct Bucket {
    inner: Arc<dyn ObjectStore>,
    multipart: Option<MultipartBackend>,
    /// Timeout for one call, including its retries; with `None`, only the underlying store's timeouts apply.
    call_timeout: Option<Duration>,
}

impl Bucket {
    pub fn new(inner: Arc<dyn ObjectStore>) -> Self {
        Self { inner, multipart: None, call_timeout: None }
    }

    /// Returns the same bucket, with ids for its multipart uploads, so that another process can abort them.
    #[must_use]
    pub fn with_upload_ids(self, store: Arc<dyn MultipartStore>) -> Self {
        Self { multipart: Some(MultipartBackend(store)), ..self }
    }

    /// Returns the same bucket with a timeout for each head, get and put, including retries. Calls through
    /// [`Self::raw`] have no such timeout.
    #[must_use]
    pub fn with_call_timeout(self, timeout: Duration) -> Self {
        Self { call_timeout: Some(timeout), ..self }
    }

    /// Runs one call with the call timeout, and records its metrics. Callers box the future, because it is large and
    /// would otherwise be embedded in most of the platform's futures.
    async fn call<T>(
        &self,
        name: &'static str,
        key: &Path,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        record_call(name, self.run_with_call_timeout(key, work)).await
    }

    /// Runs `work` with the call timeout, if any.
    ///
    /// # Errors
    /// The errors from `work`, or [`StoreError::Unavailable`] after the timeout.
    pub async fn run_with_call_timeout<T>(
        &self,
        key: &Path,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        match self.call_timeout {
            Some(timeout) => self.run_with_timeout(key, timeout, work).await,
            None => work.await,
        }
    }

    /// Starts an upload. Also returns its key and id if the store supports ids.
    pub(super) async fn start_upload(
        &self,
        key: &Path,
    ) -> object_store::Result<(Box<dyn MultipartUpload>, Option<OpenUpload>)> {
        match &self.multipart {
            Some(store) => store.start_upload(key).await.map(|(upload, open)| (upload, Some(open))),
            None => Ok((self.inner.put_multipart(key).await?, None)),
        }
    }

    /// Aborts another process's upload, so that the store drops its parts. Also succeeds if the upload has already
    /// ended, or if the store does not support upload ids.
    pub async fn abort_upload(&self, open: &OpenUpload) -> Result<(), StoreError> {
        let Some(store) = &self.multipart else { return Ok(()) };
        // The key is already encoded. If it is invalid, the error from the store contains it.
        let key = Path::parse(&open.key).unwrap_or_default();
        record_call("give_up", async {
            store.abort_upload(open).await.map_err(|error| StoreError::classify(&key, error))
        })
        .await
    }

    /// Runs `work` with a timeout.
    ///
    /// # Errors
    /// The errors from `work`, or [`StoreError::Unavailable`] after the timeout.
    pub async fn run_with_timeout<T>(
        &self,
        key: &Path,
        timeout: Duration,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| {
            let reason = format!("no response within {} s", timeout.as_secs());
            Err(StoreError::classify(key, Error::Generic { store: "bucket", source: reason.into() }))
        })
    }

    /// Returns the underlying store, for streams and multipart uploads.
    pub fn raw(&self) -> &Arc<dyn ObjectStore> {
        &self.inner
    }

    /// Reads an object's metadata.
    ///
    /// # Errors
    /// [`StoreError`] if the request fails; absence is `Ok(None)`.
    pub async fn head(&self, key: &Path) -> Result<Option<ObjectMeta>, StoreError> {
        self.call("head", key, Box::pin(self.head_once(key))).await
    }

    async fn head_once(&self, key: &Path) -> Result<Option<ObjectMeta>, StoreError> {
        match self.inner.head(key).await.map_err(|error| StoreError::classify(key, error)) {
            Ok(meta) => Ok(Some(meta)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(StoreError::Denied { .. }) if self.is_absent(key).await => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether a key that could not be read is absent. S3 returns 403 instead of 404 if the credentials may list only
    /// a part of the bucket, so the key is looked up in a listing of its directory. `false` if the listing fails.
    async fn is_absent(&self, key: &Path) -> bool {
        let Some((dir, name)) = key.as_ref().rsplit_once('/') else { return false };
        let mut offset = name.to_owned();
        offset.pop();
        let (Ok(dir), Ok(offset)) = (Path::parse(dir), Path::parse(format!("{dir}/{offset}"))) else {
            return false;
        };
        let mut listing = self.inner.list_with_offset(Some(&dir), &offset);
        loop {
            match listing.try_next().await {
                Ok(Some(meta)) if meta.location == *key => return false,
                Ok(Some(meta)) if meta.location.as_ref() < key.as_ref() => {}
                Ok(Some(_) | None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Reads a whole object of at most `limit` bytes.
    ///
    /// # Errors
    /// [`StoreError`] if the request fails, `Corrupt` if the object is larger; absence is `Ok(None)`.
    pub async fn get(&self, key: &Path, limit: u64) -> Result<Option<VersionedValue<Bytes>>, StoreError> {
        self.call("get", key, Box::pin(self.get_once(key, limit))).await
    }

    async fn get_once(&self, key: &Path, limit: u64) -> Result<Option<VersionedValue<Bytes>>, StoreError> {
        let object = match self.inner.get_opts(key, GetOptions::default()).await {
            Ok(object) => object,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => {
                let error = StoreError::classify(key, error);
                let is_absent = matches!(error, StoreError::Denied { .. }) && self.is_absent(key).await;
                return if is_absent { Ok(None) } else { Err(error) };
            }
        };
        if object.meta.size > limit {
            let reason = format!("{} bytes, more than the limit of {limit}", object.meta.size);
            return Err(StoreError::Corrupt { key: key.to_string(), reason });
        }
        let version = Version::from_meta(&object.meta);
        let value = object.bytes().await.map_err(|error| StoreError::classify(key, error))?;
        Ok(Some(VersionedValue { value, version }))
    }

    /// Reads a JSON object of at most [`MAX_JSON_BYTES`].
    ///
    /// # Errors
    /// [`StoreError`] if the request fails, `Corrupt` if the object is larger or is not JSON of this type; absence is
    /// `Ok(None)`.
    pub async fn get_json<T: DeserializeOwned>(
        &self,
        key: &Path,
    ) -> Result<Option<VersionedValue<T>>, StoreError> {
        let Some(object) = self.get(key, MAX_JSON_BYTES as u64).await? else {
            return Ok(None);
        };
        let value =
            serde_json::from_slice(&object.value).map_err(|error| StoreError::corrupt(key, &error))?;
        Ok(Some(VersionedValue { value, version: object.version }))
    }

    pub async fn put(&self, key: &Path, body: impl Into<Bytes>) -> Result<(), StoreError> {
        let put = self.inner.put(key, body.into().into());
        self.call(
            "put",
            key,
            Box::pin(async { put.await.map(|_| ()).map_err(|error| StoreError::classify(key, error)) }),
        )
        .await
    }

    pub async fn put_json(&self, key: &Path, value: &impl Serialize) -> Result<(), StoreError> {
        self.put(key, to_json(key, value)?).await
    }

    /// Writes an object if the condition holds, and returns `Precondition` if it does not. A retried write of our own
    /// whose response was lost can also cause `Precondition`, so after this error the caller must read the object back.
    pub async fn put_json_if(
        &self,
        key: &Path,
        value: &impl Serialize,
        condition: Condition,
    ) -> Result<(), StoreError> {
        self.put_if(key, to_json(key, value)?, condition).await
    }

    /// Like [`put_json_if`](Self::put_json_if), for bytes.
    pub async fn put_if(
        &self,
        key: &Path,
        body: impl Into<Bytes>,
        condition: Condition,
    ) -> Result<(), StoreError> {
        let mode = match condition {
            Condition::Absent => PutMode::Create,
            Condition::Unchanged(version) => PutMode::Update(version.0),
        };
        let options = PutOptions { mode, ..PutOptions::default() };
        let put = self.inner.put_opts(key, body.into().into(), options);
        let put = async { put.await.map(|_| ()).map_err(|error| StoreError::classify(key, error)) };
        self.call("put_if", key, Box::pin(put)).await
    }
}

async fn record_call<T>(
    call: &'static str,
    work: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let start = Instant::now();
    let result = work.await;
    STORE_DURATION.record([call], start.elapsed());
    STORE_CALLS.add_one([call, result.as_ref().map_or_else(StoreError::kind, |_| "ok")]);
    result
}

fn to_json(key: &Path, value: &impl Serialize) -> Result<Bytes, StoreError> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|error| StoreError::corrupt(key, &error))
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;
    use crate::key::SlotPrefix;
    use crate::pointer::{FencedError, Pointer};
    use svc_base::untrusted_text::MAX_CHARS;
    use svc_machine::epoch::Epoch;
    use svc_machine::name::Slot;

    #[test]
    fn is_unusable_pointer_recognizes_only_pointer_errors() {
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let corrupt = |key: &Path| StoreError::corrupt(key, &"expected value").to_string();
        let sidecar = slot.sidecar("system/db/snapshots/x.dump").unwrap();
        let fenced = FencedError { fence_epoch: Epoch(3), holder: None, writer_epoch: Epoch(2) };
        let implausible = FencedError { fence_epoch: Epoch(100_000), ..fenced };
        for (error, expected) in [
            (corrupt(&slot.pointer()), true),
            (format!("the pointer was not moved: {}", corrupt(&slot.pointer_entry(7))), true),
            (implausible.to_string(), true),
            (fenced.to_string(), false),
            (corrupt(&sidecar), false),
            ("the object store request for user_1/primary/system/db/latest failed".to_owned(), false),
        ] {
            assert_eq!(is_unusable_pointer(&error), expected, "{error}");
        }
    }

    #[tokio::test]
    async fn corrupt_error_quotes_only_the_start_of_the_object() {
        let (bucket, key) = (Bucket::new(Arc::new(InMemory::new())), Path::from("latest"));
        let text = format!(r#"{{"version":"{}\u001b[31m"}}"#, "x".repeat(1 << 19));
        bucket.put(&key, text).await.unwrap();
        let error = bucket.get_json::<Pointer>(&key).await.unwrap_err();
        assert!(!is_unusable_pointer(&error.to_string()), "mistook another object for a pointer");
        let StoreError::Corrupt { reason, .. } = &error else { panic!("{error}") };
        assert!(reason.chars().count() <= MAX_CHARS, "{} characters", reason.chars().count());
        assert!(!reason.contains('\u{1b}'));
    }
}

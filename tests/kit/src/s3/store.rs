//! The server's state: buckets, each with a sorted index of objects and its open uploads.
//!
//! Content is written before the lock is taken; a short critical section checks the condition and replaces the object.
//! Therefore exactly one of several racing conditional writes to a key succeeds.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use s3s::dto::{ETag, Timestamp};
use s3s::{S3Result, s3_error};

use super::attributes::Attributes;
use super::blob::{Blob, Body};
use super::condition::WriteCondition;
use super::multipart::Upload;

#[derive(Debug)]
pub(super) struct Store {
    dir: PathBuf,
    buckets: Mutex<BTreeMap<String, Bucket>>,
}

#[derive(Debug)]
pub(super) struct Bucket {
    created: SystemTime,
    objects: BTreeMap<String, Arc<Object>>,
    /// The previous content of each key, for stale reads.
    replaced: BTreeMap<String, Arc<Object>>,
    pub(super) uploads: BTreeMap<String, Upload>,
}

#[derive(Debug)]
pub(super) struct Object {
    pub(super) body: Body,
    pub(super) etag: ETag,
    pub(super) modified: SystemTime,
    pub(super) attributes: Attributes,
}

impl Object {
    /// Creates an object with one blob; its ETag is derived from the content.
    pub(super) fn from_blob(blob: Arc<Blob>, sha256: &[u8; 32], attributes: Attributes) -> Self {
        Self {
            body: Body::new(vec![blob]),
            etag: content_etag(sha256),
            modified: SystemTime::now(),
            attributes,
        }
    }

    pub(super) fn modified(&self) -> Timestamp {
        self.modified.into()
    }
}

/// Returns the ETag for content with this digest, in the format of S3's MD5 ETags: 32 hexadecimal digits.
pub(super) fn content_etag(sha256: &[u8; 32]) -> ETag {
    ETag::Strong(hex::encode(&sha256[..16]))
}

/// A page of a listing.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) objects: Vec<(String, Arc<Object>)>,
    pub(super) prefixes: Vec<String>,
    pub(super) next: Option<Cursor>,
}

/// Position from which a listing continues.
#[derive(Clone, Debug)]
pub(super) enum Cursor {
    After(String),
    /// After all keys with this prefix.
    AfterPrefix(String),
}

impl Store {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), buckets: Mutex::default() }
    }

    /// The blob directory.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn create_bucket(&self, name: &str) -> bool {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = !buckets.contains_key(name);
        buckets.entry(name.to_owned()).or_insert_with(|| Bucket {
            created: SystemTime::now(),
            objects: BTreeMap::new(),
            replaced: BTreeMap::new(),
            uploads: BTreeMap::new(),
        });
        is_new
    }

    pub(super) fn buckets(&self) -> Vec<(String, SystemTime)> {
        let buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        buckets.iter().map(|(name, bucket)| (name.clone(), bucket.created)).collect()
    }

    pub(super) fn delete_bucket(&self, name: &str) -> S3Result<()> {
        if self.with_bucket(name, |bucket| Ok(!bucket.objects.is_empty()))? {
            return Err(s3_error!(BucketNotEmpty));
        }
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        Ok(())
    }

    /// Runs `work` on a bucket under the lock.
    pub(super) fn with_bucket<T>(
        &self,
        bucket: &str,
        work: impl FnOnce(&mut Bucket) -> S3Result<T>,
    ) -> S3Result<T> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        work(buckets.get_mut(bucket).ok_or_else(|| s3_error!(NoSuchBucket))?)
    }
}

impl Bucket {
    pub(super) fn get(&self, key: &str) -> Option<Arc<Object>> {
        self.objects.get(key).cloned()
    }

    /// Returns the key's previous content.
    pub(super) fn get_stale(&self, key: &str) -> Option<Arc<Object>> {
        self.replaced.get(key).cloned()
    }

    pub(super) fn put(&mut self, key: &str, object: Arc<Object>, condition: &WriteCondition) -> S3Result<()> {
        condition.check(self.objects.get(key))?;
        match self.objects.insert(key.to_owned(), object) {
            Some(old) => self.replaced.insert(key.to_owned(), old),
            None => self.replaced.remove(key),
        };
        Ok(())
    }

    /// Removes an object; returns whether it existed.
    pub(super) fn remove(&mut self, key: &str, condition: &WriteCondition) -> S3Result<bool> {
        condition.check(self.objects.get(key))?;
        let Some(old) = self.objects.remove(key) else {
            return Ok(false);
        };
        self.replaced.insert(key.to_owned(), old);
        Ok(true)
    }

    /// Lists up to `max` keys and, with a delimiter, common prefixes, in order. The cost depends on the result, not on
    /// the bucket size.
    pub(super) fn list(
        &self,
        prefix: &str,
        delimiter: Option<&str>,
        from: Option<Cursor>,
        max: usize,
    ) -> Page {
        let mut page = Page::default();
        let mut cursor = from;
        while let Some((key, object)) = self.first_after(prefix, cursor.as_ref()) {
            if page.objects.len() + page.prefixes.len() == max {
                page.next = cursor;
                break;
            }
            let rest = &key[prefix.len()..];
            let common = delimiter.and_then(|d| rest.find(d).map(|i| &key[..prefix.len() + i + d.len()]));
            if let Some(common) = common {
                page.prefixes.push(common.to_owned());
                cursor = Some(Cursor::AfterPrefix(common.to_owned()));
            } else {
                page.objects.push((key.clone(), Arc::clone(object)));
                cursor = Some(Cursor::After(key.clone()));
            }
        }
        page
    }

    fn first_after(&self, prefix: &str, cursor: Option<&Cursor>) -> Option<(&String, &Arc<Object>)> {
        let (start, common_prefix) = match cursor {
            Some(Cursor::After(key)) if key.as_str() >= prefix => (Bound::Excluded(key.clone()), None),
            // Skips nearly all keys with this prefix in one step; the remaining ones (with U+10FFFF after the prefix)
            // are skipped one by one.
            Some(Cursor::AfterPrefix(common_prefix)) if common_prefix.as_str() >= prefix => {
                (Bound::Excluded(format!("{common_prefix}\u{10FFFF}")), Some(common_prefix))
            }
            _ => (Bound::Included(prefix.to_owned()), None),
        };
        self.objects
            .range((start, Bound::Unbounded))
            .find(|(key, _)| {
                common_prefix.is_none_or(|common_prefix| !key.starts_with(common_prefix.as_str()))
            })
            .filter(|(key, _)| key.starts_with(prefix))
    }
}

//! Probes with small objects: conditions, reads, listings and ranges.

use std::ops::Range;

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStoreExt};
use serde_json::{Value, json};

use super::{ProbeOutcome, delete, temporary_key};
use crate::bucket::{Bucket, Condition, StoreError};

/// Repetitions of probes that a store with inconsistent replicas could pass by chance.
const REPEATS: usize = 8;

/// Whether a conditional put was rejected because of its condition.
fn was_refused_by_condition(result: Result<(), StoreError>) -> Result<bool, StoreError> {
    match result {
        Err(StoreError::Precondition { .. }) => Ok(true),
        Ok(()) => Ok(false),
        Err(error) => Err(error),
    }
}

pub(super) async fn probe_create_once(bucket: &Bucket) -> ProbeOutcome {
    let key = temporary_key("created.json");
    let probe = async {
        bucket.put_json_if(&key, &json!({"n": 1}), Condition::Absent).await?;
        let put = bucket.put_json_if(&key, &json!({"n": 2}), Condition::Absent).await;
        let was_refused = was_refused_by_condition(put)?;
        Ok((!was_refused).then(|| "it replaced an existing object".to_owned()))
    };
    let outcome = probe.await;
    delete(bucket, &key).await;
    outcome
}

pub(super) async fn probe_replace_read_version(bucket: &Bucket) -> ProbeOutcome {
    let key = temporary_key("replaced.json");
    let probe = async {
        bucket.put_json(&key, &json!({"n": 1})).await?;
        let Some(read) = bucket.get_json::<Value>(&key).await? else {
            return Ok(Some("an object was missing right after its put".to_owned()));
        };
        let stale = read.version.clone();
        bucket.put_json_if(&key, &json!({"n": 2}), Condition::Unchanged(read.version)).await?;
        let put = bucket.put_json_if(&key, &json!({"n": 3}), Condition::Unchanged(stale)).await;
        let was_refused = was_refused_by_condition(put)?;
        Ok((!was_refused).then(|| "a stale version replaced a newer one".to_owned()))
    };
    let outcome = probe.await;
    delete(bucket, &key).await;
    outcome
}

pub(super) async fn probe_consistent_reads(bucket: &Bucket) -> ProbeOutcome {
    let key = temporary_key("read.json");
    let probe = async {
        for n in 0..REPEATS {
            bucket.put_json(&key, &json!({"n": n})).await?;
            let read = bucket.get_json::<Value>(&key).await?.map(|read| read.value["n"].clone());
            if read != Some(n.into()) {
                return Ok(Some("it returned an older version, or none".to_owned()));
            }
        }
        bucket.raw().delete(&key).await.map_err(|error| StoreError::classify(&key, error))?;
        Ok(bucket.head(&key).await?.map(|_| "it returned a deleted object".to_owned()))
    };
    let outcome = probe.await;
    delete(bucket, &key).await;
    outcome
}

pub(super) async fn probe_consistent_listings(bucket: &Bucket) -> ProbeOutcome {
    let dir = temporary_key("listed");
    let keys: Vec<Path> = (0..REPEATS).map(|n| dir.clone().join(format!("{n}.json"))).collect();
    let list = async || {
        let listed: Result<Vec<_>, _> =
            bucket.raw().list(Some(&dir)).map_ok(|object| object.location).try_collect().await;
        listed.map_err(|error| StoreError::classify(&dir, error))
    };
    let probe = async {
        for (n, key) in keys.iter().enumerate() {
            bucket.put_json(key, &json!({})).await?;
            if list().await? != keys[..=n] {
                return Ok(Some("a new object was missing, or the order was wrong".to_owned()));
            }
        }
        for (n, key) in keys.iter().enumerate() {
            bucket.raw().delete(key).await.map_err(|error| StoreError::classify(key, error))?;
            if list().await? != keys[n + 1..] {
                return Ok(Some("a deleted object was listed".to_owned()));
            }
        }
        Ok(None)
    };
    let outcome = probe.await;
    for key in &keys {
        delete(bucket, key).await;
    }
    outcome
}

pub(super) async fn probe_ranges(bucket: &Bucket) -> ProbeOutcome {
    const RANGE: Range<u64> = 2..6;
    let key = temporary_key("range");
    let read = async |version: Option<String>| {
        let range = Some(GetRange::Bounded(RANGE));
        let request =
            bucket.raw().get_opts(&key, GetOptions { range, if_match: version, ..GetOptions::default() });
        let object = request.await.map_err(|error| StoreError::classify(&key, error))?;
        object.bytes().await.map_err(|error| StoreError::classify(&key, error))
    };
    let probe = async {
        bucket.put(&key, &b"0123456789"[..]).await?;
        let first = bucket.head(&key).await?.and_then(|meta| meta.e_tag);
        if read(first.clone()).await? != b"2345"[..] {
            return Ok(Some("it returned the wrong bytes".to_owned()));
        }
        bucket.put(&key, &b"abcdefghij"[..]).await?;
        match read(first).await {
            Err(StoreError::Precondition { .. }) => Ok(None),
            Ok(_) => Ok(Some("it returned bytes from a different version".to_owned())),
            Err(error) => Err(error),
        }
    };
    let outcome = probe.await;
    delete(bucket, &key).await;
    outcome
}

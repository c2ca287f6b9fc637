//! Probes whether the store honors the conditions of concurrent writers. A store may reject the second of two
//! sequential writers, but accept two concurrent writers.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde_json::json;

use super::bucket::{Bucket, Condition, StoreError};
use svc_base::error_chain::format_chain;

/// Prefix, at the root of the bucket, of the objects of all probes except those of hosts' sessions.
pub const PREFIX: &str = "system-doctor";
/// Prefix of this process's objects, because other processes may probe the same store at the same time.
pub static RUN_PREFIX: LazyLock<String> = LazyLock::new(|| format!("{PREFIX}/{}", uuid::Uuid::new_v4()));
const CONCURRENT_WRITERS: usize = 6;
/// Number of rounds of each kind. A store that accepts two writers in half the rounds passes once in 256 runs.
const ROUNDS: usize = 8;

/// Whether only one of several concurrent writers succeeded in each round with one kind of condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Atomicity {
    Atomic,
    /// Several writers succeeded in the same round.
    Violated {
        /// The number of writers that succeeded in the first such round.
        winners: usize,
    },
}

impl Atomicity {
    fn with_round(self, winners: usize) -> Self {
        match self {
            Self::Atomic if winners > 1 => Self::Violated { winners },
            earlier => earlier,
        }
    }
}

/// The results of the rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeFindings {
    /// `If-None-Match: *`, which the pointer's log requires.
    pub create: Atomicity,
    /// `If-Match`.
    pub replace: Atomicity,
    /// The number of rounds of each kind.
    pub rounds: usize,
}

impl ProbeFindings {
    /// Returns the reason the store must not be used, if any.
    pub fn refusal(&self) -> Option<String> {
        let Atomicity::Violated { winners } = self.create else { return None };
        Some(format!(
            "the object store allowed {winners} of {CONCURRENT_WRITERS} concurrent writers to create the same \
             object (If-None-Match): two hosts could both move the snapshot pointer; use a store that honors \
             this condition"
        ))
    }

    /// Returns a warning about a store that may still be used, if any.
    pub fn warning(&self) -> Option<String> {
        let Atomicity::Violated { winners } = self.replace else { return None };
        Some(format!(
            "the object store allowed {winners} of {CONCURRENT_WRITERS} concurrent writers to replace the same \
             version of an object (If-Match); the snapshot pointer is safe, because its log only ever creates \
             objects; in releases without that log, it is not"
        ))
    }
}

/// Runs several rounds of concurrent writers on temporary objects. On a slow store, runs only the rounds that end
/// within `timeout`.
///
/// # Errors
/// [`StoreError`] if a call fails; `Unavailable` if the store does not finish one round within `timeout`, `NotFound` if
/// an object is missing right after its creation.
pub async fn run(bucket: &Bucket, timeout: Duration) -> Result<ProbeFindings, StoreError> {
    run_rounds(bucket, ROUNDS, timeout).await
}

/// Like [`run`], with at most `max_rounds` rounds.
///
/// # Errors
/// Same as [`run`].
pub async fn run_rounds(
    bucket: &Bucket,
    max_rounds: usize,
    timeout: Duration,
) -> Result<ProbeFindings, StoreError> {
    let deadline = Instant::now() + timeout;
    let mut findings = ProbeFindings { create: Atomicity::Atomic, replace: Atomicity::Atomic, rounds: 0 };
    while findings.rounds < max_rounds {
        let key = Path::from(format!("{}/{}.json", *RUN_PREFIX, uuid::Uuid::new_v4()));
        let remaining = deadline.saturating_duration_since(Instant::now());
        let round = bucket.run_with_timeout(&key, remaining, run_round(bucket, &key)).await;
        // Best effort: a failed deletion leaves a few bytes in the store.
        if let Err(error) = bucket.raw().delete(&key).await {
            tracing::debug!(%key, error = %format_chain(&error), "cannot delete the probe's object");
        }
        let (created, replaced) = match round {
            Err(_) if findings.rounds > 0 && Instant::now() >= deadline => break,
            round => round?,
        };
        findings.create = findings.create.with_round(created);
        findings.replace = findings.replace.with_round(replaced);
        findings.rounds += 1;
    }
    Ok(findings)
}

/// Returns the number of writers that created the object, and the number that replaced the same version of it.
async fn run_round(bucket: &Bucket, key: &Path) -> Result<(usize, usize), StoreError> {
    let created = count_winners(bucket, key, &Condition::Absent).await?;
    let Some(read) = bucket.get_json::<serde_json::Value>(key).await? else {
        return Err(StoreError::NotFound { key: key.to_string() });
    };
    let replaced = count_winners(bucket, key, &Condition::Unchanged(read.version)).await?;
    Ok((created, replaced))
}

async fn count_winners(bucket: &Bucket, key: &Path, condition: &Condition) -> Result<usize, StoreError> {
    let writers = (0..CONCURRENT_WRITERS).map(|writer| async move {
        // Each writer writes different bytes, because a store may derive versions from the content.
        let value = json!({"writer": writer, "nonce": uuid::Uuid::new_v4()});
        bucket.put_json_if(key, &value, condition.clone()).await
    });
    let mut winners = 0;
    for result in join_all(writers).await {
        match result {
            Ok(()) => winners += 1,
            Err(StoreError::Precondition { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(winners)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::TryStreamExt;
    use object_store::ObjectStore;
    use object_store::memory::InMemory;
    use object_store::throttle::{ThrottleConfig, ThrottledStore};

    use super::*;
    use crate::lenient::{IgnoredCondition, LenientStore};

    const TIMEOUT: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn probe_accepts_an_atomic_store_and_cleans_up() {
        let store = Arc::new(InMemory::new());
        let findings = run(&Bucket::new(store.clone()), TIMEOUT).await.unwrap();
        assert_eq!((findings.refusal(), findings.warning()), (None, None));
        assert_eq!(store.list(None).try_next().await.unwrap(), None);
    }

    #[tokio::test]
    async fn probe_of_a_slow_store_returns_the_completed_rounds() {
        let config =
            ThrottleConfig { wait_put_per_call: Duration::from_millis(60), ..ThrottleConfig::default() };
        let store = Bucket::new(Arc::new(ThrottledStore::new(InMemory::new(), config)));
        let findings = run(&store, Duration::from_millis(400)).await.unwrap();
        assert!((1..ROUNDS).contains(&findings.rounds), "{findings:?}");
        let error = run(&store, Duration::from_millis(30)).await.unwrap_err();
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    }

    #[tokio::test]
    async fn probe_refuses_a_store_that_creates_twice() {
        let store = Bucket::new(Arc::new(LenientStore::new(IgnoredCondition::Create)));
        let findings = run(&store, TIMEOUT).await.unwrap();
        assert!(findings.refusal().unwrap().contains("If-None-Match"));
        assert_eq!(findings.replace, Atomicity::Atomic);
    }

    #[tokio::test]
    async fn probe_warns_about_a_store_that_replaces_twice() {
        let store = Bucket::new(Arc::new(LenientStore::new(IgnoredCondition::Replace)));
        let findings = run(&store, TIMEOUT).await.unwrap();
        assert_eq!(findings.refusal(), None);
        assert!(findings.warning().unwrap().contains("If-Match"));
    }
}

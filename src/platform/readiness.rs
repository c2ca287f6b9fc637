//! Probes the database and the object store for `/readyz/control`.
//!
//! The route needs no authentication. Its requests therefore share one probe: otherwise, anyone could use up the
//! operators' database connections, and cause any number of requests to the object store.

use std::error::Error;
use std::time::{Duration, Instant};

use object_store::path::Path;
use tokio::sync::Mutex;

use super::db::{self, Db};
use svc_http::problem::format_chain;
use svc_store::Bucket;

const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a result is reused.
const RESULT_TTL: Duration = Duration::from_secs(1);

/// Whether the database and the store respond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readiness {
    pub database: bool,
    pub store: bool,
}

pub struct ReadinessProbe {
    ttl: Duration,
    last: Mutex<Option<FinishedProbe>>,
}

#[derive(Clone, Copy)]
struct FinishedProbe {
    ended_at: Instant,
    readiness: Readiness,
}

/// The error is the reason why a component does not respond.
type ProbeResult = Result<(), String>;

impl Default for ReadinessProbe {
    fn default() -> Self {
        Self { ttl: RESULT_TTL, last: Mutex::default() }
    }
}

impl ReadinessProbe {
    /// Returns the last result or, if it is too old, probes both components. Simultaneous requests share one probe.
    pub async fn check(&self, db: &Db, bucket: &Bucket) -> Readiness {
        self.check_with(async { tokio::join!(probe_database(db), probe_store(bucket)) }).await
    }

    async fn check_with(&self, probe: impl Future<Output = (ProbeResult, ProbeResult)>) -> Readiness {
        let mut last = self.last.lock().await;
        let previous = *last;
        if let Some(previous) = previous.filter(|previous| previous.ended_at.elapsed() < self.ttl) {
            return previous.readiness;
        }
        let (database, store) = probe.await;
        log_change("database", previous.is_none_or(|previous| previous.readiness.database), &database);
        log_change("object store", previous.is_none_or(|previous| previous.readiness.store), &store);
        let readiness = Readiness { database: database.is_ok(), store: store.is_ok() };
        *last = Some(FinishedProbe { ended_at: Instant::now(), readiness });
        readiness
    }
}

/// Logs that a component has stopped responding, or that it responds again.
fn log_change(component: &str, was_ok: bool, result: &ProbeResult) {
    match result {
        Err(error) if was_ok => tracing::warn!(component, %error, "not ready: a component does not respond"),
        Ok(()) if !was_ok => tracing::info!(component, "a component responds again"),
        Ok(()) | Err(_) => {}
    }
}

async fn probe_database(db: &Db) -> ProbeResult {
    let probe = async {
        let session = db.session().await?;
        db::query(&session, "SELECT 1", &[]).await
    };
    run_with_timeout(probe).await
}

/// Looks up an object, which need not exist.
async fn probe_store(bucket: &Bucket) -> ProbeResult {
    let key = Path::from("system-bundles/.ready");
    run_with_timeout(bucket.head(&key)).await
}

async fn run_with_timeout<T, E: Error + 'static>(probe: impl Future<Output = Result<T, E>>) -> ProbeResult {
    match tokio::time::timeout(PROBE_TIMEOUT, probe).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format_chain(&error)),
        Err(_) => Err(format!("no response within {} s", PROBE_TIMEOUT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Counts the probe; only the first one finds that the store is failing.
    async fn count_probe(probes: &AtomicU32) -> (ProbeResult, ProbeResult) {
        let is_first = probes.fetch_add(1, Ordering::SeqCst) == 0;
        tokio::time::sleep(Duration::from_millis(50)).await;
        (Ok(()), if is_first { Err("down".to_owned()) } else { Ok(()) })
    }

    #[tokio::test]
    async fn result_is_reused_until_its_ttl() {
        let probes = AtomicU32::new(0);
        let shared = ReadinessProbe { ttl: Duration::MAX, last: Mutex::default() };
        let failing = Readiness { database: true, store: false };
        let (first, second) =
            tokio::join!(shared.check_with(count_probe(&probes)), shared.check_with(count_probe(&probes)));
        assert_eq!((first, second), (failing, failing));
        assert_eq!(shared.check_with(count_probe(&probes)).await, failing);
        assert_eq!(probes.load(Ordering::SeqCst), 1);

        let probes = AtomicU32::new(0);
        let expired = ReadinessProbe { ttl: Duration::ZERO, last: Mutex::default() };
        assert_eq!(expired.check_with(count_probe(&probes)).await, failing);
        assert!(expired.check_with(count_probe(&probes)).await.store);
    }
}

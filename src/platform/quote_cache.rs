//! Caches, in each process, the provider data for price quotes. A client can request any number of quotes, but the
//! calls that read this data share the provider's rate limit with operations and with all other processes. Provisioning
//! does not read from the cache.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::db::servers::ListedServerCount;
use svc_http::problem::Problem;
use svc_machine::name::{Location, ServerType};
use svc_provider::ServerPrices;

/// How long prices and locations are cached.
const CATALOG_TTL: Duration = Duration::from_secs(300);
/// How long the number of servers is cached.
const COUNT_TTL: Duration = Duration::from_secs(10);
/// Maximum number of cached server types, and of cached locations.
const MAX_KEYS: usize = 32;

pub struct QuoteCache {
    prices: CachedReads<ServerType, ServerPrices>,
    locations: CachedReads<Location, bool>,
    server_count: CachedReads<(), ListedServerCount>,
}

impl Default for QuoteCache {
    fn default() -> Self {
        Self {
            prices: CachedReads::new(CATALOG_TTL),
            locations: CachedReads::new(CATALOG_TTL),
            server_count: CachedReads::new(COUNT_TTL),
        }
    }
}

impl QuoteCache {
    /// Returns the cached prices of a server type, or those that `read` returns.
    ///
    /// # Errors
    /// The error that `read` returns.
    pub async fn get_prices(
        &self,
        server_type: &ServerType,
        read: impl Future<Output = Result<ServerPrices, Problem>>,
    ) -> Result<ServerPrices, Problem> {
        self.prices.get(server_type, read).await
    }

    /// Caches prices that provisioning has read, so that the next quote uses them.
    pub fn record_prices(&self, server_type: &ServerType, prices: &ServerPrices) {
        self.prices.record(server_type, prices);
    }

    /// Returns whether the provider has a location, from the cache or from `read`.
    ///
    /// # Errors
    /// The error that `read` returns.
    pub async fn has_location(
        &self,
        location: &Location,
        read: impl Future<Output = Result<bool, Problem>>,
    ) -> Result<bool, Problem> {
        self.locations.get(location, read).await
    }

    /// Returns the cached server count, or the one that `read` returns.
    ///
    /// # Errors
    /// The error that `read` returns.
    pub async fn get_server_count(
        &self,
        read: impl Future<Output = Result<ListedServerCount, Problem>>,
    ) -> Result<ListedServerCount, Problem> {
        self.server_count.get(&(), read).await
    }
}

/// Caches the last read of each key. Simultaneous requests for a key share one read.
struct CachedReads<K, V> {
    ttl: Duration,
    entries: Mutex<HashMap<K, CacheEntry<V>>>,
}

type CacheEntry<V> = Arc<tokio::sync::Mutex<Option<FinishedRead<V>>>>;

struct FinishedRead<V> {
    ended_at: Instant,
    outcome: Result<V, Problem>,
}

impl<K: Clone + Eq + Hash, V: Clone> CachedReads<K, V> {
    fn new(ttl: Duration) -> Self {
        Self { ttl, entries: Mutex::default() }
    }

    /// Returns the last value or, if it is too old, the result of `read`. A failure is not cached: it is returned only
    /// to the requests that waited for it.
    async fn get(&self, key: &K, read: impl Future<Output = Result<V, Problem>>) -> Result<V, Problem> {
        let requested_at = Instant::now();
        let entry = self.entry(key);
        let mut last = entry.lock().await;
        let is_current = |last: &&FinishedRead<V>| {
            last.ended_at >= requested_at || last.outcome.is_ok() && last.ended_at.elapsed() < self.ttl
        };
        if let Some(last) = last.as_ref().filter(is_current) {
            return last.outcome.clone();
        }
        let outcome = read.await;
        *last = Some(FinishedRead { ended_at: Instant::now(), outcome: outcome.clone() });
        outcome
    }

    fn record(&self, key: &K, value: &V) {
        // If the entry is locked, a read is running, and its value will be about as new as this one.
        if let Ok(mut last) = self.entry(key).try_lock() {
            *last = Some(FinishedRead { ended_at: Instant::now(), outcome: Ok(value.clone()) });
        }
    }

    fn entry(&self, key: &K) -> CacheEntry<V> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= MAX_KEYS && !entries.contains_key(key) {
            // Entries in use are kept: there is at most one for each running request.
            entries.retain(|_, entry| Arc::strong_count(entry) > 1);
        }
        Arc::clone(entries.entry(key.clone()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use svc_http::problem::Code;

    #[derive(Default)]
    struct Source {
        reads: AtomicU64,
    }

    impl Source {
        /// Returns the number of this read.
        async fn read(&self) -> Result<u64, Problem> {
            let number = self.reads.fetch_add(1, Ordering::SeqCst) + 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
            Ok(number)
        }

        async fn fail(&self) -> Result<u64, Problem> {
            self.read().await?;
            Err(Problem::new(Code::Unavailable, "down"))
        }
    }

    #[tokio::test]
    async fn value_is_read_again_after_its_ttl() {
        let source = Source::default();
        let (cached, expired) = (CachedReads::new(Duration::MAX), CachedReads::new(Duration::ZERO));
        for number in [1, 1] {
            assert_eq!(cached.get(&"a", source.read()).await.unwrap(), number);
        }
        assert_eq!(cached.get(&"b", source.read()).await.unwrap(), 2, "another key");
        cached.record(&"a", &9);
        assert_eq!(cached.get(&"a", source.read()).await.unwrap(), 9);
        for number in [3, 4] {
            assert_eq!(expired.get(&"a", source.read()).await.unwrap(), number);
        }
    }

    #[tokio::test]
    async fn simultaneous_requests_share_one_read() {
        let source = Source::default();
        let reads = CachedReads::new(Duration::ZERO);
        let (a, b, c) = tokio::join!(
            reads.get(&(), source.read()),
            reads.get(&(), source.read()),
            reads.get(&(), source.read())
        );
        assert_eq!((a.unwrap(), b.unwrap(), c.unwrap()), (1, 1, 1));
    }

    #[tokio::test]
    async fn failure_is_returned_only_to_waiting_requests() {
        let source = Source::default();
        let reads = CachedReads::new(Duration::MAX);
        let (a, b) = tokio::join!(reads.get(&(), source.fail()), reads.get(&(), source.fail()));
        assert!(a.is_err() && b.is_err());
        assert_eq!(source.reads.load(Ordering::SeqCst), 1);
        assert_eq!(reads.get(&(), source.read()).await.unwrap(), 2);
    }

    #[tokio::test]
    async fn cancelled_read_is_repeated() {
        let source = Source::default();
        let reads = CachedReads::new(Duration::MAX);
        let cancelled = tokio::time::timeout(Duration::from_millis(5), reads.get(&(), source.read())).await;
        assert!(cancelled.is_err());
        assert_eq!(reads.get(&(), source.read()).await.unwrap(), 2);
    }

    #[tokio::test]
    async fn number_of_keys_is_bounded() {
        let reads = CachedReads::new(Duration::MAX);
        for key in 0..MAX_KEYS * 3 {
            reads.get(&key, async { Ok(()) }).await.unwrap();
            assert!(reads.entries.lock().unwrap().len() <= MAX_KEYS);
        }
    }
}

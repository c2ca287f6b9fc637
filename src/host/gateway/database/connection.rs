//! A connection for an app's role, and its prepared statements.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Statement};

use super::budget::ConnectionPermit;
use super::occupancy::Occupancy;

/// Maximum number of cached prepared statements per connection.
const MAX_CACHED_STATEMENTS: usize = 200;
/// Minimum lifetime of a busy connection before another app may claim its permit.
const MIN_LIFETIME_MS: u64 = 200;

pub struct Connection {
    pub client: Client,
    /// The process id of the connection's backend.
    pub(super) backend_pid: i32,
    statements: Mutex<StatementCache>,
    occupancy: Occupancy,
    /// Set when a request did not finish its work; the connection is never leased again.
    is_abandoned: AtomicBool,
    /// The time at which a request last started while the connection was idle, or last ended.
    last_activity_ms: AtomicU64,
    opened_ms: u64,
    _permit: ConnectionPermit,
}

#[derive(Default)]
struct StatementCache {
    by_text: HashMap<String, Statement>,
    oldest_first: VecDeque<String>,
}

impl Connection {
    /// Wraps a new connection, on which the opener's request already counts as in flight.
    pub(super) fn new(client: Client, backend_pid: i32, permit: ConnectionPermit) -> Self {
        Self {
            client,
            backend_pid,
            statements: Mutex::default(),
            occupancy: Occupancy::used_by_opener(),
            is_abandoned: AtomicBool::new(false),
            last_activity_ms: AtomicU64::new(now_ms()),
            opened_ms: now_ms(),
            _permit: permit,
        }
    }

    /// Returns the prepared statement for this text and its parameters' types, preparing it on first use.
    ///
    /// # Errors
    /// PostgreSQL rejects the statement, or the connection is lost.
    pub async fn prepare_cached<P>(
        &self,
        sql: &str,
        params: &[P],
        sql_type: fn(&P) -> Type,
    ) -> Result<Statement, tokio_postgres::Error> {
        let cached = self.statement_cache().by_text.get(sql).cloned();
        // The text can remain the same when a column's type changes. PostgreSQL would then interpret the bytes of a new
        // value as the earlier type.
        let has_types =
            |statement: &Statement| params.iter().map(sql_type).eq(statement.params().iter().cloned());
        if let Some(statement) = cached.filter(has_types) {
            return Ok(statement);
        }
        let types: Vec<Type> = params.iter().map(sql_type).collect();
        let statement = self.client.prepare_typed(sql, &types).await?;
        let mut cache = self.statement_cache();
        if cache.by_text.len() >= MAX_CACHED_STATEMENTS
            && let Some(oldest) = cache.oldest_first.pop_front()
        {
            cache.by_text.remove(&oldest);
        }
        if cache.by_text.insert(sql.to_owned(), statement.clone()).is_none() {
            cache.oldest_first.push_back(sql.to_owned());
        }
        Ok(statement)
    }

    pub(super) fn requests_in_flight(&self) -> usize {
        usize::try_from(self.occupancy.count()).unwrap_or(usize::MAX)
    }

    /// Counts one more request as in flight; `false` if a transaction has reserved the connection.
    pub(super) fn enter(&self) -> bool {
        let previous = self.occupancy.enter();
        if previous == Some(0) {
            self.record_activity();
        }
        previous.is_some()
    }

    /// Counts a request as ended.
    pub(super) fn leave(&self) {
        self.record_activity();
        self.occupancy.leave();
    }

    /// Reserves the connection for one transaction; `false` if it is already reserved.
    pub(super) fn reserve(&self) -> bool {
        self.occupancy.reserve()
    }

    pub(super) fn release(&self) {
        self.occupancy.release();
    }

    pub(super) fn is_reserved(&self) -> bool {
        self.occupancy.is_reserved()
    }

    /// Whether the connection is reserved and only the transaction that reserved it is in flight.
    pub(super) fn is_exclusive(&self) -> bool {
        self.occupancy.is_exclusive()
    }

    /// Abandons the connection; `false` if it was already abandoned.
    pub(super) fn abandon(&self) -> bool {
        !self.is_abandoned.swap(true, Ordering::AcqRel)
    }

    /// Whether a request left its statement unfinished: that statement is cancelled, and statements queued behind it
    /// may be cancelled too.
    pub fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Acquire)
    }

    pub(super) fn is_usable(&self) -> bool {
        !self.client.is_closed() && !self.is_abandoned()
    }

    /// Whether another app may claim the connection's permit: the connection is idle, or older than the minimum
    /// lifetime.
    pub(super) fn can_be_retired(&self) -> bool {
        self.requests_in_flight() == 0 || now_ms().saturating_sub(self.opened_ms) > MIN_LIFETIME_MS
    }

    pub(super) fn last_activity_ms(&self) -> u64 {
        self.last_activity_ms.load(Ordering::Relaxed)
    }

    fn record_activity(&self) {
        self.last_activity_ms.store(now_ms(), Ordering::Relaxed);
    }

    fn statement_cache(&self) -> std::sync::MutexGuard<'_, StatementCache> {
        self.statements.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Milliseconds on a monotonic clock shared by all pools.
pub(super) fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

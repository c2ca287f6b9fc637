//! An app's connections. When all are busy, requests share them: PostgreSQL's protocol allows pipelining, so the next
//! statement can be sent before the previous one has finished. A transaction has exclusive use of a connection.
//!
//! Invariants: all pools together never exceed the shared connection budget; an abandoned connection is never leased
//! again.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};
use tokio_postgres::error::SqlState;

use super::budget::{ConnectionBudget, ConnectionPermit};
use super::connect::{Database, DatabaseError, connect};
use super::connection::{Connection, now_ms};
use super::lease::Lease;
use svc_base::metrics::BRIDGE_WAITS;

/// Maximum connections per app.
const MAX_CONNECTIONS: usize = 16;
/// Maximum statements in flight per connection while [`MAX_CONNECTIONS`] are open.
const MAX_PIPELINED: usize = 8;
const LEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which a waiting request tries again to open a connection. When another app returns a permit, this app's
/// requests are not notified.
const RECHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Delay before an app with connections tries again to open another one after a failure.
const REOPEN_DELAY_MS: u64 = 500;
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// A busy connection without activity for this long has a slow statement in flight. No statement is queued behind it,
/// except on the app's only connection.
const SLOW_THRESHOLD: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("timed out waiting for a connection")]
    Timeout,
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

pub struct Pool {
    database: Arc<Database>,
    config: tokio_postgres::Config,
    budget: Arc<ConnectionBudget>,
    lease_permits: Arc<Semaphore>,
    state: Mutex<PoolState>,
    /// Notified when a connection may have become available.
    freed: Notify,
}

#[derive(Default)]
struct PoolState {
    connections: Vec<Arc<Connection>>,
    /// Number of connections being opened.
    opening: usize,
    /// Until this time, a request opens a connection only if the app has none.
    reopen_at_ms: u64,
}

/// The choice of a connection for a request.
enum Selection {
    Use(Arc<Connection>),
    /// Open the app's first connection, which is already counted in `opening`. Another app may have to close one.
    OpenFirst,
    /// Open another connection, which is already counted in `opening`, because all of the app's connections are busy.
    OpenAnother(ConnectionPermit),
    Wait,
    /// A transaction has reserved the chosen connection in the meantime.
    Retry,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("user", &self.config.get_user()).finish_non_exhaustive()
    }
}

/// How many of a pool's connections can be closed, and when the pool was last used.
pub(super) struct PoolUsage {
    /// Number of connections that the pool could close.
    pub retirable: usize,
    pub last_used_ms: u64,
}

impl Pool {
    /// `config` has the role and its password; all pools share `budget`.
    pub fn new(
        database: Arc<Database>,
        config: tokio_postgres::Config,
        budget: Arc<ConnectionBudget>,
    ) -> Arc<Self> {
        let pool = Arc::new(Self {
            database,
            config,
            budget,
            lease_permits: Arc::new(Semaphore::new(MAX_CONNECTIONS * MAX_PIPELINED)),
            state: Mutex::default(),
            freed: Notify::new(),
        });
        pool.budget.register(&pool);
        pool
    }

    /// Leases an idle connection, else a new one, else a share of a busy connection.
    ///
    /// # Errors
    /// No connection was available within five seconds, or the database is unreachable.
    pub async fn lease(self: &Arc<Self>) -> Result<Lease, PoolError> {
        let waited = tokio::time::timeout(LEASE_TIMEOUT, async {
            let permit = self.lease_permits.clone().acquire_owned().await.map_err(|_| PoolError::Timeout)?;
            Ok(Lease::new(self.clone(), self.acquire_connection().await?, permit))
        });
        waited.await.unwrap_or(Err(PoolError::Timeout))
    }

    /// Leases a connection exclusively, for a transaction.
    ///
    /// # Errors
    /// See [`Self::lease`].
    pub async fn lease_exclusive(self: &Arc<Self>) -> Result<Lease, PoolError> {
        let waited = tokio::time::timeout(LEASE_TIMEOUT, async {
            loop {
                let mut lease = self.lease().await?;
                // No new statements are admitted; those in flight finish first.
                if lease.reserve() {
                    loop {
                        let mut freed = pin!(self.freed.notified());
                        freed.as_mut().enable();
                        if lease.is_exclusive() {
                            // A request that was in flight may have abandoned the connection, whose statements are then
                            // cancelled.
                            if lease.is_usable() {
                                return Ok(lease);
                            }
                            break;
                        }
                        freed.await;
                    }
                }
            }
        });
        waited.await.unwrap_or(Err(PoolError::Timeout))
    }

    /// The numbers of open and busy connections.
    pub fn connection_counts(&self) -> (usize, usize) {
        let open = &self.lock().connections;
        (open.len(), open.iter().filter(|connection| connection.requests_in_flight() > 0).count())
    }

    /// Closes connections that have been idle for [`IDLE_TIMEOUT`].
    pub fn close_idle(&self) {
        let now = now_ms();
        let idle_timeout_ms = u64::try_from(IDLE_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
        self.lock().connections.retain(|connection| {
            connection.requests_in_flight() > 0
                || now.saturating_sub(connection.last_activity_ms()) < idle_timeout_ms
        });
    }

    pub(super) fn usage(&self) -> PoolUsage {
        let open = &self.lock().connections;
        let activity = open.iter().map(|connection| connection.last_activity_ms());
        let retirable = open.iter().filter(|connection| connection.can_be_retired());
        PoolUsage { retirable: retirable.count(), last_used_ms: activity.max().unwrap_or(0) }
    }

    /// Retires the least busy connection that can be retired, if any. It closes when its statements have finished.
    pub(super) fn retire_connection(&self) {
        let open = &mut self.lock().connections;
        let retirable = (0..open.len()).filter(|&index| open[index].can_be_retired());
        if let Some(index) = retirable.min_by_key(|&index| open[index].requests_in_flight()) {
            open.swap_remove(index);
        }
    }

    /// Removes a connection from the pool and abandons it; `false` if it was already abandoned.
    pub(super) fn abandon(&self, connection: &Arc<Connection>) -> bool {
        let mut state = self.lock();
        state.connections.retain(|pooled| !Arc::ptr_eq(pooled, connection));
        connection.abandon()
    }

    /// Terminates a backend that belongs to this pool's role.
    ///
    /// # Errors
    /// The database is unreachable.
    pub(super) async fn terminate(&self, backend_pid: i32) -> Result<(), DatabaseError> {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND usename = $2";
        let role = self.config.get_user().unwrap_or_default();
        self.database.shared_client().await?.query(sql, &[&backend_pid, &role]).await?;
        Ok(())
    }

    /// Wakes the requests that are waiting for a connection.
    pub(super) fn notify_freed(&self) {
        self.freed.notify_waiters();
    }

    async fn acquire_connection(&self) -> Result<Arc<Connection>, PoolError> {
        let mut wait_metric: Option<WaitMetric> = None;
        loop {
            let mut freed = pin!(self.freed.notified());
            freed.as_mut().enable();
            let connection = match self.select_connection() {
                Selection::Use(connection) => Some(connection),
                Selection::OpenFirst => Some(self.open_first().await?),
                Selection::OpenAnother(permit) => self.open_another(permit).await,
                Selection::Retry => None,
                Selection::Wait => {
                    wait_metric.get_or_insert_default();
                    let _ = tokio::time::timeout(RECHECK_INTERVAL, freed).await;
                    None
                }
            };
            if let Some(connection) = connection {
                WaitMetric::mark_served(wait_metric);
                return Ok(connection);
            }
        }
    }

    /// Chooses a connection. A request is queued behind another statement only if no further connection may be opened,
    /// and behind a slow one only on the app's only connection.
    fn select_connection(&self) -> Selection {
        let mut state = self.lock();
        state.connections.retain(|connection| connection.is_usable());
        let now = now_ms();
        let slow_threshold_ms = u64::try_from(SLOW_THRESHOLD.as_millis()).unwrap_or(u64::MAX);
        // Fewer connections may each carry more statements.
        let max_in_flight = MAX_CONNECTIONS * MAX_PIPELINED / state.connections.len().max(1);
        let is_only = state.connections.len() + state.opening == 1;
        let is_slow =
            |c: &Connection| !is_only && now.saturating_sub(c.last_activity_ms()) > slow_threshold_ms;
        let is_full = |c: &Connection| c.requests_in_flight() >= max_in_flight || is_slow(c);
        let least_busy = state.connections.iter().filter(|c| !c.is_reserved()).min_by_key(|c| {
            let in_flight = c.requests_in_flight();
            // Among equally busy connections, prefer the one with the latest activity.
            (in_flight > 0 && is_full(c), in_flight, now.saturating_sub(c.last_activity_ms()))
        });
        let is_idle = least_busy.is_some_and(|c| c.requests_in_flight() == 0);
        if !is_idle && state.connections.len() + state.opening < MAX_CONNECTIONS {
            if state.connections.is_empty() && state.opening == 0 {
                state.opening += 1;
                return Selection::OpenFirst;
            }
            // The permit is acquired under the lock, so a request that gets none is never counted in `opening` and
            // wakes no other request. Otherwise, two requests without a permit would keep waking each other.
            if now >= state.reopen_at_ms
                && let Some(permit) = self.budget.try_acquire()
            {
                state.opening += 1;
                return Selection::OpenAnother(permit);
            }
        }
        // A statement that has just started is not yet known to be slow, so requests wait for connections that are
        // being opened.
        if !is_idle && state.opening > 0 {
            return Selection::Wait;
        }
        match least_busy {
            // Entered under the lock, so that two requests do not take the same idle connection.
            Some(connection) if is_idle || !is_full(connection) => {
                if connection.enter() {
                    Selection::Use(connection.clone())
                } else {
                    Selection::Retry
                }
            }
            _ => Selection::Wait,
        }
    }

    /// Opens the app's first connection, which already counts the caller's request as in flight.
    async fn open_first(&self) -> Result<Arc<Connection>, PoolError> {
        let _guard = OpeningGuard(self);
        let permit = self.budget.acquire().await.ok_or(PoolError::Timeout)?;
        Ok(self.connect_with_permit(permit).await?)
    }

    /// Opens another connection, which already counts the caller's request as in flight; `None` if that fails.
    async fn open_another(&self, permit: ConnectionPermit) -> Option<Arc<Connection>> {
        let _guard = OpeningGuard(self);
        match self.connect_with_permit(permit).await {
            Ok(connection) => Some(connection),
            Err(error) => {
                tracing::debug!(error = %svc_http::problem::format_chain(&error), "cannot open another connection");
                // The guard wakes the waiting requests, which must not all try at once.
                self.lock().reopen_at_ms = now_ms() + REOPEN_DELAY_MS;
                None
            }
        }
    }

    async fn connect_with_permit(&self, permit: ConnectionPermit) -> Result<Arc<Connection>, DatabaseError> {
        let client = connect(&self.config).await.inspect_err(|error| self.report_rejected_login(error))?;
        let query = client.query_one("SELECT pg_backend_pid()", &[]);
        let row = tokio::time::timeout(LEASE_TIMEOUT, query).await.map_err(|_| DatabaseError::Timeout)??;
        let connection = Arc::new(Connection::new(client, row.try_get(0)?, permit));
        self.lock().connections.push(connection.clone());
        Ok(connection)
    }

    /// If the role's login was rejected, for instance after a restore, requests that it be set up again.
    fn report_rejected_login(&self, error: &DatabaseError) {
        let DatabaseError::Connect(error) = error else { return };
        let rejections = [SqlState::INVALID_PASSWORD, SqlState::INVALID_AUTHORIZATION_SPECIFICATION];
        if error.code().is_some_and(|code| rejections.contains(code)) {
            self.database.login_rejected.notify_one();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a request that had to wait for a connection: as `served` or as `given_up`.
#[derive(Default)]
struct WaitMetric {
    is_served: bool,
}

impl WaitMetric {
    fn mark_served(metric: Option<Self>) {
        if let Some(mut metric) = metric {
            metric.is_served = true;
        }
    }
}

impl Drop for WaitMetric {
    fn drop(&mut self) {
        BRIDGE_WAITS.add_one([if self.is_served { "served" } else { "given_up" }]);
    }
}

/// Counts a connection as being opened until the guard is dropped, including when the request is cancelled.
struct OpeningGuard<'p>(&'p Pool);

impl Drop for OpeningGuard<'_> {
    fn drop(&mut self) {
        self.0.lock().opening -= 1;
        self.0.notify_freed();
    }
}

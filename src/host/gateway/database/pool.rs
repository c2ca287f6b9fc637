//! An app's connections. Requests share them: PostgreSQL's protocol lets several statements be under way on one, so a
//! connection that waits for an answer already carries the next question.
//!
//! Invariant: all pools together never hold more connections than the budget they share.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Statement};

use super::budget::{Budget, Place};
use super::connect::{Database, DatabaseError, connect};

/// The most connections of one app.
const MOST: usize = 16;
/// Statements that may be under way on one connection before requests wait.
const DEPTH: usize = 8;
const WAIT: Duration = Duration::from_secs(5);
const IDLE: Duration = Duration::from_secs(60);
/// Prepared statements kept on a connection, by their text.
const STATEMENTS: usize = 200;

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("no connection came free in time")]
    Wait,
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

pub struct Pool {
    database: Arc<Database>,
    config: tokio_postgres::Config,
    budget: Arc<Budget>,
    places: Arc<Semaphore>,
    connections: Mutex<Vec<Arc<Connection>>>,
    opening: tokio::sync::Mutex<()>,
    growing: AtomicBool,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("user", &self.config.get_user()).finish_non_exhaustive()
    }
}

/// A connection and the statements prepared on it.
pub struct Connection {
    pub client: Client,
    statements: Mutex<Statements>,
    under_way: AtomicUsize,
    /// Given up by a request that waited too long: nobody takes it any more.
    stuck: AtomicBool,
    used_ms: AtomicU64,
    _place: Place,
}

#[derive(Default)]
struct Statements {
    by_text: HashMap<String, Statement>,
    oldest_first: VecDeque<String>,
}

/// What a pool has.
pub(super) struct Holding {
    pub connections: usize,
    pub last_used: u64,
}

/// A place on a connection, given back when dropped.
pub struct Lease {
    connection: Arc<Connection>,
    _place: OwnedSemaphorePermit,
}

impl std::ops::Deref for Lease {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.connection.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection {
    /// The statement of this text, prepared at its first use.
    ///
    /// # Errors
    /// When PostgreSQL refuses the text.
    pub async fn statement(&self, sql: &str, types: &[Type]) -> Result<Statement, tokio_postgres::Error> {
        let kept = self.kept().by_text.get(sql).cloned();
        if let Some(statement) = kept {
            return Ok(statement);
        }
        let statement = self.client.prepare_typed(sql, types).await?;
        let mut kept = self.kept();
        if kept.by_text.len() >= STATEMENTS
            && let Some(oldest) = kept.oldest_first.pop_front()
        {
            kept.by_text.remove(&oldest);
        }
        if kept.by_text.insert(sql.to_owned(), statement.clone()).is_none() {
            kept.oldest_first.push_back(sql.to_owned());
        }
        Ok(statement)
    }

    /// Gives the connection up: something on it does not end.
    pub fn give_up(&self) {
        self.stuck.store(true, Ordering::Relaxed);
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Statements> {
        self.statements.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_usable(&self) -> bool {
        !self.client.is_closed() && !self.stuck.load(Ordering::Relaxed)
    }
}

impl Pool {
    /// `config` names the role and its password; `budget` is shared by all pools.
    pub fn new(database: Arc<Database>, config: tokio_postgres::Config, budget: Arc<Budget>) -> Arc<Self> {
        let pool = Arc::new(Self {
            database,
            config,
            budget,
            places: Arc::new(Semaphore::new(MOST * DEPTH)),
            connections: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            growing: AtomicBool::new(false),
        });
        pool.budget.join(&pool);
        pool
    }

    /// A place on the connection with the fewest statements under way.
    ///
    /// # Errors
    /// When none came free within five seconds, or the database is away.
    pub async fn lease(self: &Arc<Self>) -> Result<Lease, PoolError> {
        let waited = tokio::time::timeout(WAIT, async {
            let place = self.places.clone().acquire_owned().await.map_err(|_| PoolError::Wait)?;
            let connection = match self.least_busy() {
                Some(connection) => connection,
                None => self.first().await?,
            };
            Ok(Lease { connection, _place: place })
        });
        waited.await.unwrap_or(Err(PoolError::Wait))
    }

    /// Closes connections that nobody used for a while.
    pub fn close_idle(&self) {
        let now = now_ms();
        let idle = u64::try_from(IDLE.as_millis()).unwrap_or(u64::MAX);
        self.open().retain(|connection| {
            let used = connection.used_ms.load(Ordering::Relaxed);
            connection.under_way.load(Ordering::Relaxed) > 0 || now.saturating_sub(used) < idle
        });
    }

    pub(super) fn holding(&self) -> Holding {
        let open = self.open();
        let used = open.iter().map(|connection| connection.used_ms.load(Ordering::Relaxed));
        Holding { connections: open.len(), last_used: used.max().unwrap_or(0) }
    }

    /// Lets go of the least busy connection; it closes when the statements under way on it have ended.
    pub(super) fn retire_one(&self) {
        let mut open = self.open();
        let least = (0..open.len()).min_by_key(|&index| open[index].under_way.load(Ordering::Relaxed));
        if let Some(index) = least {
            open.swap_remove(index);
        }
    }

    fn least_busy(self: &Arc<Self>) -> Option<Arc<Connection>> {
        let (chosen, room) = {
            let mut open = self.open();
            open.retain(|connection| connection.is_usable());
            let chosen = open.iter().min_by_key(|c| c.under_way.load(Ordering::Relaxed))?.clone();
            // Counted under the lock, so that two requests do not take the same idle connection.
            let busy = chosen.under_way.fetch_add(1, Ordering::Relaxed) > 0;
            (chosen, busy && open.len() < MOST)
        };
        chosen.used_ms.store(now_ms(), Ordering::Relaxed);
        if room && !self.growing.swap(true, Ordering::Relaxed) {
            let pool = self.clone();
            tokio::spawn(async move {
                pool.grow().await;
                pool.growing.store(false, Ordering::Relaxed);
            });
        }
        Some(chosen)
    }

    async fn first(self: &Arc<Self>) -> Result<Arc<Connection>, PoolError> {
        let _opening = self.opening.lock().await;
        if let Some(connection) = self.least_busy() {
            return Ok(connection);
        }
        let place = self.budget.place().await.ok_or(PoolError::Wait)?;
        Ok(self.add(place, 1).await?)
    }

    /// One more connection, if the budget has room; the requests of now do not wait for it.
    async fn grow(&self) {
        let Some(place) = self.budget.spare() else { return };
        if let Err(error) = self.add(place, 0).await {
            tracing::debug!(error = %crate::http::problem::chain(&error), "no further connection");
        }
    }

    async fn add(&self, place: Place, under_way: usize) -> Result<Arc<Connection>, DatabaseError> {
        let client = connect(&self.config).await.inspect_err(|error| self.tell_if_refused(error))?;
        let connection = Arc::new(Connection {
            client,
            statements: Mutex::default(),
            under_way: AtomicUsize::new(under_way),
            stuck: AtomicBool::new(false),
            used_ms: AtomicU64::new(now_ms()),
            _place: place,
        });
        self.open().push(connection.clone());
        Ok(connection)
    }

    /// A refused login means that the role's password is not ours any more, as after a restore.
    fn tell_if_refused(&self, error: &DatabaseError) {
        let DatabaseError::Connect(error) = error else { return };
        let refused = [SqlState::INVALID_PASSWORD, SqlState::INVALID_AUTHORIZATION_SPECIFICATION];
        if error.code().is_some_and(|code| refused.contains(code)) {
            self.database.login_refused.notify_one();
        }
    }

    fn open(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Connection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Milliseconds on one clock for all pools.
fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

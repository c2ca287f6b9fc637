//! An app's connections. Requests share them: PostgreSQL's protocol lets several statements be under way on one, so a
//! connection that waits for an answer already carries the next question. A transaction has one to itself.
//!
//! Invariants: all pools together never hold more connections than the budget they share; a connection whose work was
//! left unfinished is never given to anybody again.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};
use tokio_postgres::error::SqlState;

use super::budget::{Budget, Place};
use super::connect::{Database, DatabaseError, connect};
use super::connection::{Connection, now_ms};
use super::lease::Lease;

/// The most connections of one app.
const MOST: usize = 16;
/// Statements that may be under way on one connection before requests wait.
const DEPTH: usize = 8;
const WAIT: Duration = Duration::from_secs(5);
const IDLE: Duration = Duration::from_secs(60);
/// A connection on which nothing moved for so long has a long statement under way: the next does not stand behind it.
const SLOW: Duration = Duration::from_millis(50);

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
    /// Told when a connection may have come free for those that found none.
    freed: Notify,
}

/// What the connections of now offer a request.
enum Choice {
    Take(Arc<Connection>),
    /// All are busy, this one the least, and another may be opened.
    Grow(Arc<Connection>),
    Open,
    Wait,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("user", &self.config.get_user()).finish_non_exhaustive()
    }
}

/// What a pool has.
pub(super) struct Holding {
    pub connections: usize,
    pub last_used: u64,
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
            freed: Notify::new(),
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
            loop {
                let mut freed = pin!(self.freed.notified());
                freed.as_mut().enable();
                let connection = match self.choose() {
                    Choice::Take(connection) => connection,
                    Choice::Grow(busy) => self.rather_than(busy).await,
                    Choice::Open => self.first().await?,
                    Choice::Wait => {
                        freed.await;
                        continue;
                    }
                };
                return Ok(Lease::new(self.clone(), connection, place));
            }
        });
        waited.await.unwrap_or(Err(PoolError::Wait))
    }

    /// A connection that nobody else uses until the lease ends: for a transaction.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub async fn lease_alone(self: &Arc<Self>) -> Result<Lease, PoolError> {
        let waited = tokio::time::timeout(WAIT, async {
            loop {
                let mut lease = self.lease().await?;
                // Others stay away from now on; those that are there end first.
                if lease.reserve() {
                    loop {
                        let mut freed = pin!(self.freed.notified());
                        freed.as_mut().enable();
                        if lease.is_alone() {
                            return Ok(lease);
                        }
                        freed.await;
                    }
                }
            }
        });
        waited.await.unwrap_or(Err(PoolError::Wait))
    }

    /// Closes connections that nobody used for a while.
    pub fn close_idle(&self) {
        let now = now_ms();
        let idle = u64::try_from(IDLE.as_millis()).unwrap_or(u64::MAX);
        self.open().retain(|connection| {
            connection.under_way() > 0 || now.saturating_sub(connection.moved_ms()) < idle
        });
    }

    pub(super) fn holding(&self) -> Holding {
        let open = self.open();
        let used = open.iter().map(|connection| connection.moved_ms());
        Holding { connections: open.len(), last_used: used.max().unwrap_or(0) }
    }

    /// Lets go of the least busy connection; it closes when the statements under way on it have ended.
    pub(super) fn retire_one(&self) {
        let mut open = self.open();
        let least = (0..open.len()).min_by_key(|&index| open[index].under_way());
        if let Some(index) = least {
            open.swap_remove(index);
        }
    }

    /// Takes a connection out, so that nobody new comes upon it. Whoever counts on it does so under the same lock.
    pub(super) fn give_up(&self, connection: &Arc<Connection>) {
        let mut open = self.open();
        connection.give_up();
        open.retain(|known| !Arc::ptr_eq(known, connection));
    }

    /// Tells those that wait for a connection.
    pub(super) fn tell_freed(&self) {
        self.freed.notify_waiters();
    }

    fn choose(self: &Arc<Self>) -> Choice {
        let mut open = self.open();
        open.retain(|connection| connection.is_usable());
        let now = now_ms();
        let slow = u64::try_from(SLOW.as_millis()).unwrap_or(u64::MAX);
        let is_slow = |c: &Connection| c.under_way() > 0 && now.saturating_sub(c.moved_ms()) > slow;
        let shared = open.iter().filter(|connection| !connection.is_reserved());
        let Some(least) = shared.min_by_key(|c| (is_slow(c), c.under_way())).cloned() else {
            return if open.len() < MOST { Choice::Open } else { Choice::Wait };
        };
        let (is_slow, room) = (is_slow(&least), open.len() < MOST);
        // Counted under the lock, so that two requests do not take the same idle connection.
        let is_busy = least.enter() > 0;
        drop(open);
        if is_slow && room {
            return Choice::Grow(least);
        }
        if is_busy && room && !self.growing.swap(true, Ordering::Relaxed) {
            let pool = self.clone();
            tokio::spawn(async move {
                pool.grow().await;
                pool.growing.store(false, Ordering::Relaxed);
            });
        }
        Choice::Take(least)
    }

    /// A new connection in place of one that is long busy, if the budget has room.
    async fn rather_than(self: &Arc<Self>, busy: Arc<Connection>) -> Arc<Connection> {
        let mut entered = Entered(Some(busy.clone()));
        if let Some(place) = self.budget.spare()
            && let Ok(connection) = self.add(place, 1).await
        {
            return connection;
        }
        entered.0 = None;
        busy
    }

    async fn first(self: &Arc<Self>) -> Result<Arc<Connection>, PoolError> {
        let _opening = self.opening.lock().await;
        if let Choice::Take(connection) | Choice::Grow(connection) = self.choose() {
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
        let connection = Arc::new(Connection::new(client, place, under_way));
        self.open().push(connection.clone());
        self.tell_freed();
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

/// Counts as under way on a connection until this is dropped, as it is when the request goes away.
struct Entered(Option<Arc<Connection>>);

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            connection.leave();
        }
    }
}

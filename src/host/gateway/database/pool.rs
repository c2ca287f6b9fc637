//! An app's connections. When all are busy, requests share them: PostgreSQL's protocol lets several statements be under
//! way on one, so a connection that waits for an answer already carries the next question. A transaction has one to itself.
//!
//! Invariants: all pools together never hold more connections than the budget they share; a connection whose work was
//! left unfinished is never given to anybody again.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};
use tokio_postgres::error::SqlState;

use super::budget::{Budget, Place};
use super::connect::{Database, DatabaseError, connect};
use super::connection::{Connection, now_ms};
use super::lease::Lease;
use crate::metrics::BRIDGE_WAITS;

/// The most connections of one app.
const MOST: usize = 16;
/// Statements that may be under way on a connection before requests wait, when there are as many as may be.
const DEPTH: usize = 8;
const WAIT: Duration = Duration::from_secs(5);
const IDLE: Duration = Duration::from_secs(60);
/// A connection on which nothing moved for so long has a long statement under way: the next does not stand behind it.
const SLOW: Duration = Duration::from_millis(100);

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
    open: Mutex<Open>,
    /// Told when a connection may have come free for those that found none.
    freed: Notify,
}

#[derive(Default)]
struct Open {
    connections: Vec<Arc<Connection>>,
    /// How many are being opened.
    coming: usize,
}

/// What the connections of now offer a request.
enum Choice {
    Take(Arc<Connection>),
    /// Another may be opened; counted as coming.
    Open(Need),
    Wait,
    /// A transaction reserved it meanwhile.
    Again,
}

/// How much another connection is needed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    /// There is none: some other app may have to give one up.
    First,
    /// All are busy.
    Further,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("user", &self.config.get_user()).finish_non_exhaustive()
    }
}

/// What a pool has.
pub(super) struct Holding {
    /// Connections that it could give up.
    pub spare: usize,
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
            open: Mutex::default(),
            freed: Notify::new(),
        });
        pool.budget.join(&pool);
        pool
    }

    /// A place on an idle connection, else on a new one; when there may be no more, on one that others use, too.
    ///
    /// # Errors
    /// When none came free within five seconds, or the database is away.
    pub async fn lease(self: &Arc<Self>) -> Result<Lease, PoolError> {
        let waited = tokio::time::timeout(WAIT, async {
            let place = self.places.clone().acquire_owned().await.map_err(|_| PoolError::Wait)?;
            Ok(Lease::new(self.clone(), self.connection().await?, place))
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

    /// Open connections, and those of them that have something to do.
    pub fn in_use(&self) -> (usize, usize) {
        let open = &self.open().connections;
        (open.len(), open.iter().filter(|connection| connection.under_way() > 0).count())
    }

    /// Closes connections that nobody used for a while.
    pub fn close_idle(&self) {
        let now = now_ms();
        let idle = u64::try_from(IDLE.as_millis()).unwrap_or(u64::MAX);
        self.open().connections.retain(|connection| {
            connection.under_way() > 0 || now.saturating_sub(connection.moved_ms()) < idle
        });
    }

    pub(super) fn holding(&self) -> Holding {
        let open = &self.open().connections;
        let used = open.iter().map(|connection| connection.moved_ms());
        let spare = open.iter().filter(|connection| connection.has_served());
        Holding { spare: spare.count(), last_used: used.max().unwrap_or(0) }
    }

    /// Lets go of the least busy connection; it closes when the statements under way on it have ended.
    pub(super) fn retire_one(&self) {
        let open = &mut self.open().connections;
        let spare = (0..open.len()).filter(|&index| open[index].has_served());
        if let Some(index) = spare.min_by_key(|&index| open[index].under_way()) {
            open.swap_remove(index);
        }
    }

    /// Takes a connection out, so that nobody new comes upon it; whether nobody did before.
    pub(super) fn give_up(&self, connection: &Arc<Connection>) -> bool {
        let mut open = self.open();
        open.connections.retain(|known| !Arc::ptr_eq(known, connection));
        connection.give_up()
    }

    /// Ends a backend of this pool's role with all that it has still to do.
    ///
    /// # Errors
    /// When the database is away.
    pub(super) async fn terminate(&self, backend: i32) -> Result<(), DatabaseError> {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND usename = $2";
        let role = self.config.get_user().unwrap_or_default();
        self.database.shared().await?.query(sql, &[&backend, &role]).await?;
        Ok(())
    }

    /// Tells those that wait for a connection.
    pub(super) fn tell_freed(&self) {
        self.freed.notify_waiters();
    }

    async fn connection(&self) -> Result<Arc<Connection>, PoolError> {
        let mut may_open = true;
        let mut waiting = None;
        loop {
            let mut freed = pin!(self.freed.notified());
            freed.as_mut().enable();
            match self.choose(may_open) {
                Choice::Take(connection) => {
                    Waiting::served(waiting);
                    return Ok(connection);
                }
                Choice::Open(need) => match self.another(need).await? {
                    Some(connection) => {
                        Waiting::served(waiting);
                        return Ok(connection);
                    }
                    None => may_open = false,
                },
                Choice::Again => {}
                Choice::Wait => {
                    waiting.get_or_insert_default();
                    freed.await;
                    may_open = true;
                }
            }
        }
    }

    /// A request stands behind another's statement only where there may be no more connections, and not behind one that
    /// takes long.
    fn choose(&self, may_open: bool) -> Choice {
        let mut open = self.open();
        open.connections.retain(|connection| connection.is_usable());
        let now = now_ms();
        let slow = u64::try_from(SLOW.as_millis()).unwrap_or(u64::MAX);
        // The fewer there may be, the more each takes.
        let depth = MOST * DEPTH / open.connections.len().max(1);
        let is_only = open.connections.len() + open.coming == 1;
        let is_slow = |c: &Connection| !is_only && now.saturating_sub(c.moved_ms()) > slow;
        let is_full = |c: &Connection| c.under_way() >= depth || is_slow(c);
        let least = open.connections.iter().filter(|c| !c.is_reserved()).min_by_key(|c| {
            let under_way = c.under_way();
            // Of those that have as much to do, the one on which something ended last.
            (under_way > 0 && is_full(c), under_way, now.saturating_sub(c.moved_ms()))
        });
        let is_idle = least.is_some_and(|c| c.under_way() == 0);
        // What has just begun cannot be seen to take long yet: with others on their way, nobody stands behind it.
        if !is_idle && open.coming > 0 && (!may_open || open.connections.len() + open.coming >= MOST) {
            return Choice::Wait;
        }
        if !is_idle && may_open && open.connections.len() + open.coming < MOST {
            let is_first = open.connections.is_empty() && open.coming == 0;
            open.coming += 1;
            return Choice::Open(if is_first { Need::First } else { Need::Further });
        }
        match least {
            // Counted under the lock, so that two requests do not take the same idle connection.
            Some(least) if is_idle || !is_full(least) => {
                if least.enter() {
                    Choice::Take(least.clone())
                } else {
                    Choice::Again
                }
            }
            _ => Choice::Wait,
        }
    }

    /// One more connection, with a place on it taken; none where the budget has no room for it.
    async fn another(&self, need: Need) -> Result<Option<Arc<Connection>>, PoolError> {
        let _coming = Coming(self);
        let place = match need {
            Need::First => Some(self.budget.place().await.ok_or(PoolError::Wait)?),
            Need::Further => self.budget.spare(),
        };
        let Some(place) = place else { return Ok(None) };
        match self.add(place).await {
            Ok(connection) => Ok(Some(connection)),
            Err(error) if need == Need::First => Err(error.into()),
            Err(error) => {
                tracing::debug!(error = %crate::http::problem::chain(&error), "no further connection");
                Ok(None)
            }
        }
    }

    async fn add(&self, place: Place) -> Result<Arc<Connection>, DatabaseError> {
        let client = connect(&self.config).await.inspect_err(|error| self.tell_if_refused(error))?;
        let asked = client.query_one("SELECT pg_backend_pid()", &[]);
        let row = tokio::time::timeout(WAIT, asked).await.map_err(|_| DatabaseError::Deadline)??;
        let connection = Arc::new(Connection::new(client, row.try_get(0)?, place));
        self.open().connections.push(connection.clone());
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

    fn open(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that found all connections busy; dropped before it was served, it was given up.
#[derive(Default)]
struct Waiting {
    served: bool,
}

impl Waiting {
    fn served(waiting: Option<Self>) {
        if let Some(mut waiting) = waiting {
            waiting.served = true;
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        BRIDGE_WAITS.add_one([if self.served { "served" } else { "given_up" }]);
    }
}

/// Counts as coming until this is dropped, as it is when the request goes away.
struct Coming<'p>(&'p Pool);

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        self.0.open().coming -= 1;
        self.0.tell_freed();
    }
}

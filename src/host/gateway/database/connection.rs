//! One connection of an app's role, and the statements prepared on it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Statement};

use super::budget::Place;
use super::occupancy::Occupancy;

/// Prepared statements kept on a connection, by their text.
const STATEMENTS: usize = 200;
/// How long a busy connection is left alone, however many other apps wait for one.
const TURN_MS: u64 = 200;

pub struct Connection {
    pub client: Client,
    /// Its process at the server.
    pub(super) backend: i32,
    statements: Mutex<Statements>,
    occupancy: Occupancy,
    /// Something on it was left unfinished: nobody takes it any more.
    given_up: AtomicBool,
    /// When something last began on it while it was idle, or ended.
    moved_ms: AtomicU64,
    opened_ms: u64,
    _place: Place,
}

#[derive(Default)]
struct Statements {
    by_text: HashMap<String, Statement>,
    oldest_first: VecDeque<String>,
}

impl Connection {
    /// One that its opener uses.
    pub(super) fn new(client: Client, backend: i32, place: Place) -> Self {
        Self {
            client,
            backend,
            statements: Mutex::default(),
            occupancy: Occupancy::of_opener(),
            given_up: AtomicBool::new(false),
            moved_ms: AtomicU64::new(now_ms()),
            opened_ms: now_ms(),
            _place: place,
        }
    }

    /// The statement of this text, prepared at its first use.
    ///
    /// # Errors
    /// When PostgreSQL refuses the text.
    pub async fn statement(
        &self,
        sql: &str,
        types: impl FnOnce() -> Vec<Type>,
    ) -> Result<Statement, tokio_postgres::Error> {
        let kept = self.kept().by_text.get(sql).cloned();
        if let Some(statement) = kept {
            return Ok(statement);
        }
        let statement = self.client.prepare_typed(sql, &types()).await?;
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

    pub(super) fn under_way(&self) -> usize {
        usize::try_from(self.occupancy.count()).unwrap_or(usize::MAX)
    }

    /// Counts one more; `false` where a transaction has reserved the connection.
    pub(super) fn enter(&self) -> bool {
        let others = self.occupancy.enter();
        if others == Some(0) {
            self.move_on();
        }
        others.is_some()
    }

    /// Counts one less.
    pub(super) fn leave(&self) {
        self.move_on();
        self.occupancy.leave();
    }

    /// Reserves it for one transaction; `false` where it is reserved already.
    pub(super) fn reserve(&self) -> bool {
        self.occupancy.reserve()
    }

    pub(super) fn release(&self) {
        self.occupancy.release();
    }

    pub(super) fn is_reserved(&self) -> bool {
        self.occupancy.is_reserved()
    }

    /// Whether the transaction that reserved it is the only user left.
    pub(super) fn is_alone(&self) -> bool {
        self.occupancy.is_alone()
    }

    /// Whether nobody gave it up before.
    pub(super) fn give_up(&self) -> bool {
        !self.given_up.swap(true, Ordering::AcqRel)
    }

    /// Whether somebody's statement on it was left unfinished: it is cancelled, and so may be what stands behind it.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    pub(super) fn is_usable(&self) -> bool {
        !self.client.is_closed() && !self.is_given_up()
    }

    /// Whether another app may have its place: it is idle, or those that it was opened for had their turn.
    pub(super) fn has_served(&self) -> bool {
        self.under_way() == 0 || now_ms().saturating_sub(self.opened_ms) > TURN_MS
    }

    pub(super) fn moved_ms(&self) -> u64 {
        self.moved_ms.load(Ordering::Relaxed)
    }

    fn move_on(&self) {
        self.moved_ms.store(now_ms(), Ordering::Relaxed);
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Statements> {
        self.statements.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Milliseconds on one clock for all pools.
pub(super) fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

//! A place on a connection, and what becomes of the connection when a request goes away before its answer came.
//!
//! A request that is dropped cannot call its statement back: PostgreSQL goes on, and whoever came next would wait behind
//! it. So its connection leaves the pool at once, and is cancelled and closed as soon as nobody else has something under
//! way on it: a cancellation hits whatever runs, so nobody else may.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio_postgres::NoTls;

use super::connection::Connection;
use super::pool::Pool;

/// How long one cancellation may take, and then the statement to end; how often that is tried.
const CANCEL: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(100);
const CANCELS: usize = 50;

/// A place on a connection, given back when dropped. When that is between [`Self::begin`] and [`Self::settle`], the
/// connection is given up.
pub struct Lease {
    pool: Arc<Pool>,
    connection: Arc<Connection>,
    has_begun: bool,
    has_reserved: bool,
    _place: OwnedSemaphorePermit,
}

impl std::ops::Deref for Lease {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl Lease {
    /// `connection` already counts this one as under way.
    pub(super) fn new(pool: Arc<Pool>, connection: Arc<Connection>, place: OwnedSemaphorePermit) -> Self {
        Self { pool, connection, has_begun: false, has_reserved: false, _place: place }
    }

    /// From now on something is under way.
    pub fn begin(&mut self) {
        self.has_begun = true;
    }

    /// Every answer on this lease has come, and no transaction is open.
    pub fn settle(&mut self) {
        self.has_begun = false;
    }

    /// Keeps others away; `false` when another lease does so already.
    pub(super) fn reserve(&mut self) -> bool {
        self.has_reserved = self.connection.reserve();
        self.has_reserved
    }

    pub(super) fn is_alone(&self) -> bool {
        self.connection.under_way() == 1
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.has_begun {
            self.pool.give_up(&self.connection);
        }
        let left = self.connection.leave();
        if self.has_reserved {
            self.connection.release();
        }
        if left == 0
            && self.connection.is_given_up()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(end(self.connection.clone()));
        }
        self.pool.tell_freed();
    }
}

/// Cancels what runs and waits for it to end: until then the backend is there, and counts. Statements that wait behind
/// the first one are cancelled when their turn comes.
async fn end(connection: Arc<Connection>) {
    let token = connection.client.cancel_token();
    // The cancellation may come a little later than this, so the connection is never used again.
    let mut idle = pin!(connection.client.batch_execute("ROLLBACK"));
    for _ in 0..CANCELS {
        let cancelled = tokio::time::timeout(CANCEL, token.cancel_query(NoTls)).await;
        if !matches!(cancelled, Ok(Ok(()))) {
            tracing::warn!("a statement that nobody waits for could not be cancelled");
        }
        if tokio::time::timeout(AGAIN, &mut idle).await.is_ok() {
            return;
        }
    }
    tracing::warn!("a statement that nobody waits for does not end");
}

//! A place on a connection, and what becomes of the connection when a request goes away before its answer came.
//!
//! A request that is dropped cannot call its statement back: PostgreSQL goes on, and whoever stands behind it would wait.
//! So its connection leaves the pool at once, is cancelled until nothing runs on it, and closed. A cancellation hits
//! whatever runs, so others' statements on it may end with it; they did nothing then, and are run again elsewhere.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio_postgres::NoTls;

use super::connect::DatabaseError;
use super::connection::Connection;
use super::pool::Pool;

/// How long one cancellation may take, and then the statement to end; how often that is tried.
const DEADLINE: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(50);
const TRIES: usize = 100;

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
        self.connection.is_alone()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.has_begun
            && self.pool.give_up(&self.connection)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(end(self.pool.clone(), self.connection.clone()));
        }
        self.connection.leave();
        if self.has_reserved {
            self.connection.release();
        }
        self.pool.tell_freed();
    }
}

/// Cancels what runs as long as somebody waits for something behind it, then ends the backend with all that nobody waits
/// for: until that is gone, it counts.
async fn end(pool: Arc<Pool>, connection: Arc<Connection>) {
    for _ in 0..TRIES {
        let ended = tokio::time::timeout(DEADLINE, async {
            if connection.under_way() > 0 {
                let token = connection.client.cancel_token();
                token.cancel_query(NoTls).await.map_err(DatabaseError::from)
            } else {
                pool.terminate(connection.backend).await
            }
        });
        match ended.await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => tracing::warn!("what nobody waits for could not be cancelled"),
        }
        tokio::time::sleep(AGAIN).await;
        if connection.client.is_closed() {
            return;
        }
    }
    tracing::warn!("what nobody waits for does not end");
}

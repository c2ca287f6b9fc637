//! A lease on a connection, and the cleanup when a request is dropped before its response arrives.
//!
//! A dropped request cannot stop its statement: PostgreSQL continues to execute it, and statements queued behind it
//! would wait. The connection is therefore removed from the pool immediately, its statements are cancelled until it is
//! idle, and it is closed. A cancellation applies to the statement that is running, so other requests' statements on
//! the connection may be cancelled too; those had no effect and are retried on another connection.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio_postgres::NoTls;

use super::connect::DatabaseError;
use super::connection::Connection;
use super::pool::Pool;

/// Timeout for one cancellation, or for the query that terminates the backend.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay before the next attempt, during which the cancelled statement or the backend can end.
const CANCEL_RETRY_INTERVAL: Duration = Duration::from_millis(50);
const MAX_CANCEL_ATTEMPTS: usize = 100;

/// A share of a pipelined connection, returned on drop. A drop between [`Self::start_work`] and
/// [`Self::finish_work`] abandons the connection.
pub struct Lease {
    pool: Arc<Pool>,
    connection: Arc<Connection>,
    has_unfinished_work: bool,
    holds_reservation: bool,
    _permit: OwnedSemaphorePermit,
}

impl std::ops::Deref for Lease {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl Lease {
    /// `connection` already counts this lease as in flight.
    pub(super) fn new(pool: Arc<Pool>, connection: Arc<Connection>, permit: OwnedSemaphorePermit) -> Self {
        Self { pool, connection, has_unfinished_work: false, holds_reservation: false, _permit: permit }
    }

    /// Marks the start of work on the connection.
    pub fn start_work(&mut self) {
        self.has_unfinished_work = true;
    }

    /// Marks the work as complete: all results have arrived, and no transaction is open.
    pub fn finish_work(&mut self) {
        self.has_unfinished_work = false;
    }

    /// Abandons the connection and cancels its statements, but not this lease: its statement still gets a result. Other
    /// requests' statements on the connection are retried.
    pub fn cancel(&self) {
        if self.pool.abandon(&self.connection) {
            spawn_cleanup(&self.pool, &self.connection);
        }
    }

    /// Reserves the connection; `false` when another lease has reserved it.
    pub(super) fn reserve(&mut self) -> bool {
        self.holds_reservation = self.connection.reserve();
        self.holds_reservation
    }

    /// Whether no other request is using the connection at this moment.
    pub fn is_alone(&self) -> bool {
        self.connection.requests_in_flight() <= 1
    }

    pub(super) fn is_exclusive(&self) -> bool {
        self.connection.is_exclusive()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.has_unfinished_work && self.pool.abandon(&self.connection) {
            spawn_cleanup(&self.pool, &self.connection);
        }
        self.connection.leave();
        if self.holds_reservation {
            self.connection.release();
        }
        self.pool.notify_freed();
    }
}

fn spawn_cleanup(pool: &Arc<Pool>, connection: &Arc<Connection>) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(end_connection(pool.clone(), connection.clone()));
    }
}

/// Cancels running statements while requests are in flight on the connection, then terminates the backend. The
/// connection's permit is held until the backend has exited or [`MAX_CANCEL_ATTEMPTS`] attempts have failed.
async fn end_connection(pool: Arc<Pool>, connection: Arc<Connection>) {
    for _ in 0..MAX_CANCEL_ATTEMPTS {
        let attempt = tokio::time::timeout(CANCEL_TIMEOUT, async {
            if connection.requests_in_flight() > 0 {
                let token = connection.client.cancel_token();
                token.cancel_query(NoTls).await.map_err(DatabaseError::from)
            } else {
                pool.terminate(connection.backend_pid).await
            }
        });
        match attempt.await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => tracing::warn!("cannot end an abandoned connection; retrying"),
        }
        tokio::time::sleep(CANCEL_RETRY_INTERVAL).await;
        if connection.client.is_closed() {
            return;
        }
    }
    tracing::warn!("an abandoned connection is still open after all attempts to end it");
}

//! Serializes changes to schemas and roles.

use tokio_postgres::{Error, Transaction};

/// Locks schemas and roles until the transaction ends, and limits each wait for a lock in the transaction, including
/// this one, to two seconds. A backup locks all tables for as long as its dump takes: a statement that waited for it
/// would block every later statement on its table, and all other changes to schemas.
///
/// # Errors
/// The database is unreachable, or another transaction, of this or another gateway process, holds the lock for more
/// than two seconds.
pub async fn lock_schemas(transaction: &Transaction<'_>) -> Result<(), Error> {
    transaction
        .batch_execute("SET LOCAL lock_timeout = '2s'; SELECT pg_advisory_xact_lock(hashtext('svc-gateway'))")
        .await
}

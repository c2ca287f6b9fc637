//! Serializes changes to schemas and roles.

use tokio_postgres::{Error, Transaction};

/// Locks schemas and roles until the transaction ends. Waits while another transaction, of this or another gateway
/// process, holds the lock.
pub async fn lock_schemas(transaction: &Transaction<'_>) -> Result<(), Error> {
    transaction.batch_execute("SELECT pg_advisory_xact_lock(hashtext('svc-gateway'))").await
}

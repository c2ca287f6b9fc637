//! Serializes changes of schemas and roles.

use tokio_postgres::{Error, Transaction};

/// Allows only one gateway at a time to change schemas and roles.
pub async fn lock(transaction: &Transaction<'_>) -> Result<(), Error> {
    transaction.batch_execute("SELECT pg_advisory_xact_lock(hashtext('svc-gateway'))").await
}

//! Serializes changes to schemas and roles.

use tokio_postgres::{Error, Transaction};

/// Waits until no other gateway is changing schemas or roles, and locks them until the transaction ends.
pub async fn lock_schemas(transaction: &Transaction<'_>) -> Result<(), Error> {
    transaction.batch_execute("SELECT pg_advisory_xact_lock(hashtext('svc-gateway'))").await
}

//! The databases that restores replaced: they stay until the first good backup, which is when this is called.

use crate::host::pgconn::{self, Server};
use crate::http::problem::chain;

use super::snapshot::SnapshotError;

/// Drops them. One that somebody looks into stays until the next backup; no failure here spoils a backup that is good.
pub async fn drop_all(server: &Server) {
    if let Err(error) = try_drop_all(server).await {
        tracing::warn!(error = %chain(&error), "could not drop a database that was replaced");
    }
}

async fn try_drop_all(server: &Server) -> Result<(), SnapshotError> {
    let client = server.connect(pgconn::MAINTENANCE, "svc-db-backup").await?;
    let replaced = "SELECT datname::text FROM pg_database WHERE datname ~ '^svc_before_[0-9]+$'";
    for row in client.query(replaced, &[]).await? {
        let name: String = row.try_get(0)?;
        client.batch_execute(&format!("DROP DATABASE IF EXISTS {}", pgconn::ident(&name))).await?;
        tracing::info!(database = name, "dropped the database that the restore replaced");
    }
    Ok(())
}

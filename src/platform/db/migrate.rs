//! Schema migrations, embedded in the binary. They run at startup under an advisory lock, so that only one process
//! migrates at a time.

use std::time::Duration;

use anyhow::Context;
use tokio_postgres::Config;

mod embedded {
    refinery::embed_migrations!("../../migrations");
}

/// Key of the advisory lock: `svc_migr` in ASCII. No other code uses this key.
const LOCK_ID: i64 = 0x7376_635f_6d69_6772;
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(120);

/// Migrates the schema to this binary's version.
///
/// # Errors
/// When the migrations, including the wait for the lock, take longer than two minutes, when the database is
/// unreachable, or when a migration fails; a failed migration is rolled back.
pub async fn run(config: &Config) -> anyhow::Result<()> {
    tokio::time::timeout(MIGRATION_TIMEOUT, migrate(config)).await.with_context(|| {
        format!(
            "the migrations did not finish within {} s: check whether another process holds their lock",
            MIGRATION_TIMEOUT.as_secs()
        )
    })?
}

/// The version of this binary's newest migration.
pub fn newest_version() -> u32 {
    let runner = embedded::migrations::runner();
    let versions = runner.get_migrations().iter().map(|migration| migration.version().unsigned_abs());
    versions.max().unwrap_or_default()
}

async fn migrate(config: &Config) -> anyhow::Result<()> {
    let mut config = config.clone();
    config.connect_timeout(Duration::from_secs(5)).application_name("svc-platform migrations");
    let (mut client, connection_task) = super::connect(&config).await.context("connect to the database")?;
    client
        .execute("SELECT pg_advisory_lock($1)", &[&LOCK_ID])
        .await
        .context("wait for the migrations' lock")?;
    // A later release may have applied more migrations. They only add to the schema, so this release can ignore them.
    let runner = embedded::migrations::runner().set_abort_missing(false);
    let report = runner.run_async(&mut client).await.context("migrate the database")?;
    for applied in report.applied_migrations() {
        tracing::info!(migration = %applied, "migration applied");
    }
    // Closing the connection releases the lock.
    drop(client);
    connection_task.await.context("close the migrations' connection")
}

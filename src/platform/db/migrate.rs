//! The schema: migrations in the binary, run at the start under a lock, so that processes started at once take turns.

use std::time::Duration;

use anyhow::Context;
use tokio_postgres::Config;

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// Any number that nothing else in this database locks.
const LOCK: i64 = 0x7376_635f_6d69_6772;
const DEADLINE: Duration = Duration::from_secs(120);

/// Brings the schema to this binary's version.
///
/// # Errors
/// When the database cannot be reached within the deadline, or a migration fails: then nothing of it is kept.
pub async fn run(config: &Config) -> anyhow::Result<()> {
    tokio::time::timeout(DEADLINE, migrate(config)).await.context("the migrations did not end in time")?
}

/// The number of this binary's newest migration.
pub fn newest() -> u32 {
    let all = embedded::migrations::runner();
    all.get_migrations().iter().map(|one| one.version().unsigned_abs()).max().unwrap_or_default()
}

async fn migrate(config: &Config) -> anyhow::Result<()> {
    let mut config = config.clone();
    config.connect_timeout(Duration::from_secs(5)).application_name("svc-platform migrations");
    let (mut client, served) = super::connect(&config).await.context("connect to the database")?;
    client.execute("SELECT pg_advisory_lock($1)", &[&LOCK]).await.context("wait for the migrations' lock")?;
    // A later release has already migrated further: its changes are additions, which this one need not know.
    let migrations = embedded::migrations::runner().set_abort_missing(false);
    let report = migrations.run_async(&mut client).await.context("migrate the database")?;
    for applied in report.applied_migrations() {
        tracing::info!(migration = %applied, "applied");
    }
    // The lock goes with the connection.
    drop(client);
    served.await.context("close the migrations' connection")
}

//! Runs the schema migrations, which are embedded in the binary. They run at startup under an advisory lock, so that
//! only one process migrates at a time.

use std::time::Duration;

use anyhow::Context;
use refinery_core::{Migration, Runner};
use tokio_postgres::Config;

/// Generates the list of migrations, each with its name and SQL.
macro_rules! embed_migrations {
    ($($name:literal,)+) => {
        &[$(($name, include_str!(concat!("../../../migrations/", $name, ".sql")))),+]
    };
}

/// All migrations, in order. They are numbered from 1 without gaps.
const MIGRATIONS: &[(&str, &str)] = embed_migrations![
    "V1__machines",
    "V2__sessions",
    "V3__servers",
    "V4__lifecycle",
    "V5__request_ids",
    "V6__rollouts",
    "V7__rollout_patience",
    "V8__snapshots",
    "V9__kept_servers",
    "V10__containment",
    "V11__power_and_capacity",
    "V12__released_servers",
    "V13__cost_indexes",
    "V14__repeated_log_lines",
    "V15__claim_order",
    "V16__create_actions",
    "V17__sign_outs",
    "V18__operators",
    "V19__token_rotation",
    "V20__bundle_keys",
    "V21__platform_keys",
    "V22__session_parents",
    "V23__unrestored_snapshots",
    "V24__certificates",
    "V25__test_slots",
    "V26__rollout_verification",
    "V27__failed_updates",
    "V28__reported_budget",
    "V29__file_keys",
    "V30__files_report",
    "V31__file_prunings",
    "V32__file_prune_claims",
    "V33__operation_deadlines",
    "V34__registration_start",
    "V35__operator_names",
    "V36__recovery_without_files",
];

/// The advisory lock's key: `svc_migr` in ASCII. No other code uses this key.
const LOCK_ID: i64 = 0x7376_635f_6d69_6772;
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(120);

/// Migrates the schema to this binary's version.
///
/// # Errors
/// When the migrations, including the wait for the lock, take longer than `MIGRATION_TIMEOUT`, when the database is
/// unreachable, or when a migration fails; a failed migration is rolled back.
pub async fn run(config: &Config) -> anyhow::Result<()> {
    tokio::time::timeout(MIGRATION_TIMEOUT, migrate(config)).await.with_context(|| {
        format!(
            "the migrations did not finish within {} s: check whether another process holds the migration lock",
            MIGRATION_TIMEOUT.as_secs()
        )
    })?
}

/// The version of this binary's newest migration.
pub const NEWEST_VERSION: u32 = MIGRATIONS.len() as u32;

fn create_runner() -> anyhow::Result<Runner> {
    let migrations = MIGRATIONS.iter().map(|(name, sql)| Migration::unapplied(name, sql));
    let migrations =
        migrations.collect::<Result<Vec<_>, _>>().context("cannot parse the embedded migrations")?;
    // A later release may have applied more migrations. They only add to the schema, so this release can ignore them.
    Ok(Runner::new(&migrations).set_abort_missing(false))
}

async fn migrate(config: &Config) -> anyhow::Result<()> {
    let mut config = config.clone();
    config.connect_timeout(Duration::from_secs(5)).application_name("svc-platform migrations");
    let (mut client, connection_task) =
        super::connect(&config).await.context("cannot connect to the database")?;
    client
        .execute("SELECT pg_advisory_lock($1)", &[&LOCK_ID])
        .await
        .context("cannot acquire the migration lock")?;
    let report = create_runner()?.run_async(&mut client).await.context("cannot migrate the database")?;
    for applied in report.applied_migrations() {
        tracing::info!(migration = %applied, "migration applied");
    }
    // Closing the connection releases the lock.
    drop(client);
    connection_task.await.context("the connection task for migrations failed")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_migration_is_embedded_and_numbered_without_gaps() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../migrations");
        let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let files: BTreeSet<String> =
            files.map(|file| file.file_stem().unwrap().to_string_lossy().into_owned()).collect();
        assert_eq!(files, MIGRATIONS.iter().map(|(name, _)| (*name).to_owned()).collect());
        let runner = create_runner().unwrap();
        let versions = runner.get_migrations().iter().map(|migration| migration.version().unsigned_abs());
        assert!(versions.eq(1..=NEWEST_VERSION), "not numbered from 1 without gaps: {MIGRATIONS:?}");
    }
}

//! When a restore is killed at any point, the old database exists until the new one is complete, and the marker is
//! written last.

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;

use super::super::super::gate::{old_and_new_machines, reset_machine};
use super::super::super::machine::Machine;
use super::super::snapshot_checker::SnapshotChecker;
use super::{Killer, MIN_KILLS_LONG_RUN, MIN_KILLS_SHORT_RUN, assert_no_temporary_file};

const RESTORE: [&str; 1] = ["svc-restore"];

/// The content of a database.
#[derive(Debug, PartialEq)]
enum DatabaseContent {
    /// The machine's previous data.
    Old,
    /// Exactly the snapshot's content.
    Snapshot,
    /// Connections are refused: a swap was in progress.
    Closed,
    Other(String),
}

/// Computes a hash of the snapshot's rows.
const CONTENT_HASH_QUERY: &str = "SELECT (SELECT md5(string_agg(id::text, ',' ORDER BY id)) FROM kept) || \
     (SELECT md5(string_agg(md5(bytes), '' ORDER BY bytes)) FROM noise)";

async fn list_tables(client: &tokio_postgres::Client) -> Result<Vec<String>> {
    let query = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace \
                 ORDER BY 1";
    Ok(client.query(query, &[]).await?.iter().map(|row| row.get(0)).collect())
}

async fn read_database_content(
    machine: &Machine,
    database: &str,
    snapshot_hash: &str,
) -> Result<DatabaseContent> {
    let admin = machine.postgres().connect("postgres").await?;
    let sql = "SELECT datallowconn FROM pg_database WHERE datname = $1";
    let Some(row) = admin.query_opt(sql, &[&database]).await? else {
        return Ok(DatabaseContent::Other("it does not exist".to_owned()));
    };
    if !row.get::<_, bool>(0) {
        return Ok(DatabaseContent::Closed);
    }
    // The server may still be executing the last step of a killed run.
    let Ok(client) = machine.postgres().connect(database).await else { return Ok(DatabaseContent::Closed) };
    let tables = list_tables(&client).await?;
    if tables == ["local"] {
        let rows = client.query("SELECT id FROM local", &[]).await?;
        let rows: Vec<i32> = rows.iter().map(|row| row.get(0)).collect();
        return Ok(if rows.is_empty() {
            DatabaseContent::Old
        } else {
            DatabaseContent::Other(format!("local has {rows:?}"))
        });
    }
    if tables == ["kept", "noise"] && read_content_hash(&client).await?.as_deref() == Some(snapshot_hash) {
        return Ok(DatabaseContent::Snapshot);
    }
    Ok(DatabaseContent::Other(format!("{tables:?}")))
}

async fn read_content_hash(client: &tokio_postgres::Client) -> Result<Option<String>> {
    Ok(client.query_one(CONTENT_HASH_QUERY, &[]).await?.get(0))
}

struct Campaign {
    machine: Machine,
    killer: Killer,
    /// The hash of the snapshot's rows.
    snapshot_hash: String,
    restores: u64,
}

impl Campaign {
    /// Checks the state after a kill: the database `svc` is the complete new one. Without the marker, it may also be
    /// the old one, or closed for the swap.
    async fn check_state(&self) -> Result<()> {
        let has_marker = self.machine.has_marker();
        let database_content = read_database_content(&self.machine, "svc", &self.snapshot_hash).await?;
        match (&database_content, has_marker) {
            (DatabaseContent::Snapshot, _) | (DatabaseContent::Old | DatabaseContent::Closed, false) => {
                Ok(())
            }
            _ => {
                anyhow::bail!("marker present: {has_marker}, but the database contains {database_content:?}")
            }
        }
    }

    /// Completes a run and checks the result.
    async fn complete_restore(&mut self) -> Result<()> {
        let result = self.killer.complete_run(|| self.machine.spawn(&RESTORE, &[])).await?;
        ensure!(self.machine.has_marker(), "the gate is closed: {}", result.stderr);
        let content = read_database_content(&self.machine, "svc", &self.snapshot_hash).await?;
        ensure!(content == DatabaseContent::Snapshot, "{content:?}\n{}", result.stderr);
        let mut old_count = 0;
        for name in self.machine.databases().await? {
            ensure!(!name.starts_with("svc_restore_"), "{name} remains");
            if name.starts_with("svc_before_") {
                old_count += u32::from(
                    read_database_content(&self.machine, &name, &self.snapshot_hash).await?
                        == DatabaseContent::Old,
                );
            }
        }
        ensure!(old_count == 1, "{old_count} databases have the old content");
        assert_no_temporary_file(&self.machine.path("var/lib/svc/restore"))?;
        assert_no_temporary_file(&self.machine.path("opt/svc"))?;
        self.restores += 1;
        Ok(())
    }

    async fn run_round(&mut self) -> Result<()> {
        reset_machine(&self.machine).await?;
        self.check_state().await?;
        for _ in 0..self.killer.next_kill_count() {
            self.killer.kill_run(self.machine.spawn(&RESTORE, &[])?).await?;
            self.check_state().await?;
        }
        self.complete_restore().await
    }
}

async fn run_campaign(kills: u64, seed: u64) -> Result<()> {
    let (store, old, machine) = old_and_new_machines().await?;
    let snapshot_hash = read_content_hash(&old.client().await?).await?.context("the content is NULL")?;
    drop(old);
    let mut checker = SnapshotChecker::new(&store);
    checker.check()?;
    let mut campaign =
        Campaign { machine, killer: Killer::new("restores", seed), snapshot_hash, restores: 0 };
    let result = async {
        campaign.complete_restore().await?;
        while campaign.killer.kills < kills {
            campaign.run_round().await.with_context(|| format!("after {} kills", campaign.killer.kills))?;
        }
        // A restore never writes to the store.
        checker.check()?;
        ensure!((checker.complete_count(), checker.seq()) == (1, 1), "a restore wrote to the store");
        anyhow::Ok(())
    };
    let result = result.await;
    let kills_survived = campaign.killer.kills;
    println!("{} restores", campaign.restores);
    Figures { kills_survived, snapshots_taken: 1, ..Figures::new("killed restores") }.record()?;
    result
}

#[tokio::test]
async fn restores_survive_random_kills() -> Result<()> {
    run_campaign(MIN_KILLS_SHORT_RUN, 1).await
}

#[tokio::test]
#[ignore = "long: 200 kills"]
async fn restores_survive_200_kills() -> Result<()> {
    run_campaign(MIN_KILLS_LONG_RUN, Killer::new_seed()).await
}

/// Tests [`read_database_content`] itself.
#[tokio::test]
async fn unexpected_database_content_is_detected() -> Result<()> {
    let (_store, old, machine) = old_and_new_machines().await?;
    let snapshot_hash = read_content_hash(&old.client().await?).await?.context("the content is NULL")?;
    assert_eq!(read_database_content(&machine, "svc", &snapshot_hash).await?, DatabaseContent::Old);
    machine.run(&RESTORE)?.expect(0);
    assert_eq!(read_database_content(&machine, "svc", &snapshot_hash).await?, DatabaseContent::Snapshot);
    let client = machine.client().await?;
    for change in ["UPDATE kept SET id = 0 WHERE id = 1", "CREATE TABLE more (id int)"] {
        client.batch_execute(change).await?;
        let content = read_database_content(&machine, "svc", &snapshot_hash).await?;
        assert!(matches!(content, DatabaseContent::Other(_)), "{change}: {content:?}");
    }
    client
        .batch_execute(
            "DROP TABLE kept, noise, more; CREATE TABLE local (id int); INSERT INTO local VALUES (42)",
        )
        .await?;
    assert!(
        matches!(read_database_content(&machine, "svc", &snapshot_hash).await?, DatabaseContent::Other(_)),
        "an additional row in the old database was not detected"
    );
    assert!(
        matches!(
            read_database_content(&machine, "svc_else", &snapshot_hash).await?,
            DatabaseContent::Other(_)
        ),
        "a missing database was not detected"
    );
    Ok(())
}

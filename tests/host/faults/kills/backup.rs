//! When a backup is killed at any point, no stored object is lost, the pointer is valid, and the next run succeeds.

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;
use kit::s3::S3Server;

use super::super::super::machine::{self, BUCKET, Machine};
use super::super::snapshot_checker::SnapshotChecker;
use super::{Killer, MIN_KILLS_LONG_RUN, MIN_KILLS_SHORT_RUN, assert_no_temporary_file};

/// Creates a table whose rows are counted, and one that is larger than an upload part.
const CREATE_TABLES: &str = "CREATE TABLE t AS SELECT generate_series(1, 1000) AS id; \
     CREATE TABLE noise AS SELECT decode(string_agg(md5(n::text || '-' || m), ''), 'hex') AS bytes \
     FROM generate_series(1, 360) n, generate_series(1, 1000) m GROUP BY n";
const BACKUP: [&str; 1] = ["svc-db-backup"];

struct Campaign<'a> {
    store: &'a S3Server,
    machine: Machine,
    checker: SnapshotChecker<'a>,
    killer: Killer,
    rows: u64,
}

impl Campaign<'_> {
    /// Returns the newest claimed `seq`. A run that is killed after its claim has not updated `latest`; the next writer
    /// does so before its own claim.
    async fn claimed_seq(&self) -> Result<u64> {
        Ok(machine::read_pointer(self.store).await?.map_or(0, |pointer| pointer.seq))
    }

    /// Checks that an uninterrupted run stores a snapshot of the current database, regardless of earlier runs.
    async fn complete_backup(&mut self) -> Result<()> {
        let before = self.claimed_seq().await?;
        self.killer.complete_run(|| self.machine.spawn(&BACKUP, &[])).await?;
        self.checker.check()?;
        ensure!(self.checker.seq() == before + 1, "`seq` went from {before} to {}", self.checker.seq());
        let pointer = machine::read_pointer(self.store).await?.context("there is no pointer")?;
        let snapshot = pointer.snapshot.context("the pointer names no snapshot")?;
        let sidecar = self.read_sidecar(&snapshot.key)?;
        let table =
            sidecar["tables"].as_array().into_iter().flatten().find(|table| table["name"] == "public.t");
        ensure!(table.is_some_and(|table| table["rows"] == self.rows), "{sidecar}");
        // An upload started at the moment of a kill is not recorded yet, and is empty.
        let open = self.store.uploads_with_parts(BUCKET);
        ensure!(open.is_empty(), "uploads of killed runs are still open: {open:?}");
        let own_upload = self.store.uploads(BUCKET).into_iter().find(|key| key.ends_with(&snapshot.key));
        ensure!(own_upload.is_none(), "the run's own upload is still open");
        assert_no_temporary_file(&self.machine.path("var/lib/svc"))?;
        let last = self.machine.backup_records()?.pop().context("backup.jsonl is empty")?;
        ensure!(last["status"] == "success" && last["key"] == *snapshot.key, "{last}");
        Ok(())
    }

    fn read_sidecar(&self, key: &str) -> Result<serde_json::Value> {
        let path = format!("{}/{key}.json", machine::slot().root());
        Ok(serde_json::from_slice(&self.store.read(BUCKET, &path).context("the sidecar is missing")?)?)
    }

    async fn run_round(&mut self) -> Result<()> {
        self.machine.client().await?.batch_execute("INSERT INTO t VALUES (0)").await?;
        self.rows += 1;
        for _ in 0..self.killer.next_kill_count() {
            self.killer.kill_run(self.machine.spawn(&BACKUP, &[])?).await?;
            self.store.drain().await?;
            self.checker.check()?;
        }
        self.complete_backup().await
    }
}

async fn run_campaign(kills: u64, seed: u64) -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute(CREATE_TABLES).await?;
    let killer = Killer::new("backups", seed);
    let mut campaign =
        Campaign { store: &store, machine, checker: SnapshotChecker::new(&store), killer, rows: 1000 };
    let result = async {
        campaign.complete_backup().await?;
        while campaign.killer.kills < kills {
            campaign.run_round().await.with_context(|| format!("after {} kills", campaign.killer.kills))?;
        }
        anyhow::Ok(())
    };
    let result = result.await;
    let figures = Figures {
        kills_survived: campaign.killer.kills,
        snapshots_taken: campaign.checker.complete_count(),
        lost: u64::from(campaign.checker.check().is_err()),
        ..Figures::new("killed backups")
    };
    figures.record()?;
    result
}

#[tokio::test]
async fn backups_survive_random_kills() -> Result<()> {
    run_campaign(MIN_KILLS_SHORT_RUN, 1).await
}

#[tokio::test]
#[ignore = "long: 200 kills"]
async fn backups_survive_200_kills() -> Result<()> {
    run_campaign(MIN_KILLS_LONG_RUN, Killer::new_seed()).await
}

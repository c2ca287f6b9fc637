//! Restores that are killed anywhere: the old database is there until the new one is whole, and the marker comes last.

use anyhow::{Context, Result, ensure};
use kit::long::Figures;

use super::super::super::gate::{old_and_new, reset};
use super::super::super::machine::Machine;
use super::super::witness::Witness;
use super::{FEW, Killer, MANY, no_torn_file};

const RESTORE: [&str; 1] = ["svc-restore"];

/// What one database holds.
#[derive(Debug, PartialEq)]
enum Held {
    /// What the machine had before.
    Old,
    /// All of the snapshot and nothing else.
    Snapshot,
    /// Sessions are kept out: a swap was under way.
    Closed,
    Else(String),
}

/// The snapshot's rows, hashed; the same where it was taken.
const CONTENT: &str = "SELECT (SELECT md5(string_agg(id::text, ',' ORDER BY id)) FROM kept) || \
     (SELECT md5(string_agg(md5(bytes), '' ORDER BY bytes)) FROM noise)";

async fn tables(client: &tokio_postgres::Client) -> Result<Vec<String>> {
    let named = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace \
                 ORDER BY 1";
    Ok(client.query(named, &[]).await?.iter().map(|row| row.get(0)).collect())
}

async fn held(machine: &Machine, database: &str, snapshot: &str) -> Result<Held> {
    let admin = machine.postgres().connect("postgres").await?;
    let asked = "SELECT datallowconn FROM pg_database WHERE datname = $1";
    let Some(row) = admin.query_opt(asked, &[&database]).await? else {
        return Ok(Held::Else("it is not there".to_owned()));
    };
    if !row.get::<_, bool>(0) {
        return Ok(Held::Closed);
    }
    // The last step of a run that was killed may still be under way in the server.
    let Ok(client) = machine.postgres().connect(database).await else { return Ok(Held::Closed) };
    let tables = tables(&client).await?;
    if tables == ["local"] {
        let rows = client.query("SELECT id FROM local", &[]).await?;
        let rows: Vec<i32> = rows.iter().map(|row| row.get(0)).collect();
        return Ok(if rows.is_empty() { Held::Old } else { Held::Else(format!("local has {rows:?}")) });
    }
    if tables == ["kept", "noise"] && content(&client).await?.as_deref() == Some(snapshot) {
        return Ok(Held::Snapshot);
    }
    Ok(Held::Else(format!("{tables:?}")))
}

async fn content(client: &tokio_postgres::Client) -> Result<Option<String>> {
    Ok(client.query_one(CONTENT, &[]).await?.get(0))
}

struct Campaign {
    machine: Machine,
    killer: Killer,
    /// What [`CONTENT`] says of it.
    snapshot: String,
    restored: u64,
}

impl Campaign {
    /// After a kill: before the marker, the owner's name leads to the old database or to all of the new one.
    async fn look(&self) -> Result<()> {
        let marker = self.machine.marker();
        let held = held(&self.machine, "svc", &self.snapshot).await?;
        match (&held, marker) {
            (Held::Snapshot, _) | (Held::Old | Held::Closed, false) => Ok(()),
            _ => anyhow::bail!("the marker is {marker}, and the database holds {held:?}"),
        }
    }

    /// A run that nobody kills, and what is there then.
    async fn succeed(&mut self) -> Result<()> {
        let ended = self.killer.spare(|| self.machine.spawn(&RESTORE, &[])).await?;
        ensure!(self.machine.marker(), "the gate is shut: {}", ended.stderr);
        let now = held(&self.machine, "svc", &self.snapshot).await?;
        ensure!(now == Held::Snapshot, "{now:?}\n{}", ended.stderr);
        let mut old = 0;
        for name in self.machine.databases().await? {
            ensure!(!name.starts_with("svc_restore_"), "{name} is left over");
            if name.starts_with("svc_before_") {
                old += u32::from(held(&self.machine, &name, &self.snapshot).await? == Held::Old);
            }
        }
        ensure!(old == 1, "{old} databases are the old one");
        no_torn_file(&self.machine.path("var/lib/svc/restore"))?;
        no_torn_file(&self.machine.path("opt/svc"))?;
        self.restored += 1;
        Ok(())
    }

    async fn round(&mut self) -> Result<()> {
        reset(&self.machine).await?;
        self.look().await?;
        for _ in 0..self.killer.row() {
            self.killer.strike(self.machine.spawn(&RESTORE, &[])?).await?;
            self.look().await?;
        }
        self.succeed().await
    }
}

async fn survived(kills: u64, seed: u64) -> Result<()> {
    let (store, old, machine) = old_and_new().await?;
    let snapshot = content(&old.client().await?).await?.context("content")?;
    drop(old);
    let mut witness = Witness::of(&store);
    witness.look()?;
    let mut campaign = Campaign { machine, killer: Killer::new("restores", seed), snapshot, restored: 0 };
    let end = async {
        campaign.succeed().await?;
        while campaign.killer.kills < kills {
            campaign.round().await.with_context(|| format!("after {} kills", campaign.killer.kills))?;
        }
        // A restore reads and nothing else.
        witness.look()?;
        ensure!((witness.completed(), witness.seq()) == (1, 1), "a restore has written");
        anyhow::Ok(())
    };
    let end = end.await;
    let kills_survived = campaign.killer.kills;
    println!("{} restores", campaign.restored);
    Figures { kills_survived, snapshots_taken: 1, ..Figures::new("kills of restores") }.record()?;
    end
}

#[tokio::test]
async fn restores_survive_kills_at_random_moments() -> Result<()> {
    survived(FEW, 1).await
}

#[tokio::test]
#[ignore = "long: 200 kills"]
async fn long_restores_survive_200_kills() -> Result<()> {
    survived(MANY, Killer::fresh()).await
}

/// The look itself: it would be no proof if it passed for anything.
#[tokio::test]
async fn a_database_that_is_neither_is_seen() -> Result<()> {
    let (_store, old, machine) = old_and_new().await?;
    let snapshot = content(&old.client().await?).await?.context("content")?;
    assert_eq!(held(&machine, "svc", &snapshot).await?, Held::Old);
    machine.run(&RESTORE)?.expect(0);
    assert_eq!(held(&machine, "svc", &snapshot).await?, Held::Snapshot);
    let client = machine.client().await?;
    for change in ["UPDATE kept SET id = 0 WHERE id = 1", "CREATE TABLE more (id int)"] {
        client.batch_execute(change).await?;
        let now = held(&machine, "svc", &snapshot).await?;
        assert!(matches!(now, Held::Else(_)), "{change}: {now:?}");
    }
    client
        .batch_execute(
            "DROP TABLE kept, noise, more; CREATE TABLE local (id int); INSERT INTO local VALUES (42)",
        )
        .await?;
    assert!(matches!(held(&machine, "svc", &snapshot).await?, Held::Else(_)), "its row is gone");
    assert!(matches!(held(&machine, "svc_else", &snapshot).await?, Held::Else(_)), "there is none");
    Ok(())
}

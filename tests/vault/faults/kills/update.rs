//! Updates that are killed anywhere: one release is current and whole at every moment, and the next run ends what was begun.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use kit::long::Figures;

use super::super::super::stage::{OLD, Published, Stage};
use super::{FEW, Killer, MANY, no_torn_file};

const APPLY: [&str; 2] = ["apply", "--request"];

/// The version of the release that is current, whole: what its program would start from at this moment.
fn current(stage: &Stage) -> Result<String> {
    let opt = stage.machine.path("opt/svc");
    let link = fs::read_link(opt.join("current")).context("there is no current release")?;
    let version = link.strip_prefix("releases")?.to_string_lossy().into_owned();
    let dir = opt.join("current");
    let release: serde_json::Value = serde_json::from_slice(&fs::read(dir.join("release.json"))?)?;
    ensure!(release["imageVersion"] == *version, "{version} has {release}");
    ensure!(fs::read(dir.join("bin/svc"))? == b"#!/bin/sh\n", "{version} has another program");
    for n in 0..40 {
        let length = fs::metadata(dir.join(format!("runtime/noise/{n}"))).context("a part is missing")?.len();
        ensure!(length == 32_000, "part {n} of {version} has {length} bytes");
    }
    Ok(version)
}

struct Campaign {
    stage: Stage,
    killer: Killer,
    version: String,
    updates: usize,
}

impl Campaign {
    /// After a kill: the release before or the one that is asked for, and no part of another.
    fn look(&self, to: &str) -> Result<()> {
        let current = current(&self.stage)?;
        if current != self.version && current != to {
            bail!("{current} is current, neither {} nor {to}", self.version);
        }
        Ok(())
    }

    async fn round(&mut self) -> Result<()> {
        let to = format!("2026.{}.0", self.updates + 2);
        Published::new(&to, &[])?.serve(&self.stage.source)?;
        self.stage.ask_for(&to)?;
        for _ in 0..self.killer.row() {
            self.killer.strike(self.stage.spawn(&APPLY)?).await?;
            self.look(&to)?;
        }
        let running = self.stage.spawn(&APPLY)?;
        let ended = tokio::task::spawn_blocking(move || running.end()).await??.expect(0);
        self.ended(&to).with_context(|| ended.stderr)?;
        // What was served is not kept: two hundred releases are some hundred megabytes.
        self.stage.source.put(&format!("/{to}/svc-host-bundle.tar.gz"), None);
        self.version = to;
        Ok(())
    }

    /// The update is over: its release runs with its units, nothing is open, and it is told once.
    fn ended(&mut self, to: &str) -> Result<()> {
        self.updates += 1;
        ensure!(current(&self.stage)? == to, "{to} is not current");
        self.stage.runs(to)?;
        no_torn_file(&self.stage.machine.path("var/lib/svc/update"))?;
        let history = self.stage.history()?;
        let told = history.iter().filter(|line| line["version"] == to).count();
        let all_well = history.iter().all(|line| line["outcome"] == "updated");
        ensure!(told == 1 && all_well && history.len() == self.updates.min(200), "{history:?}");
        Ok(())
    }
}

async fn survived(kills: u64, seed: u64) -> Result<()> {
    let stage = Stage::new().await?;
    let mut campaign =
        Campaign { stage, killer: Killer::new("updates", seed), version: OLD.to_owned(), updates: 0 };
    let end = async {
        // The first one shows how long an update takes.
        let to = "2026.2.0";
        Published::new(to, &[])?.serve(&campaign.stage.source)?;
        campaign.stage.ask_for(to)?;
        campaign.killer.spare(|| campaign.stage.spawn(&APPLY)).await?;
        campaign.ended(to)?;
        campaign.version = to.to_owned();
        while campaign.killer.kills < kills {
            campaign.round().await.with_context(|| format!("after {} kills", campaign.killer.kills))?;
        }
        anyhow::Ok(())
    };
    let end = end.await;
    println!("{} updates", campaign.updates);
    Figures { kills_survived: campaign.killer.kills, ..Figures::new("kills of updates") }.record()?;
    end
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_survive_kills_at_random_moments() -> Result<()> {
    survived(FEW, 1).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: 200 kills"]
async fn long_updates_survive_200_kills() -> Result<()> {
    survived(MANY, Killer::fresh()).await
}

/// The look itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_is_not_whole_is_seen() -> Result<()> {
    let stage = Stage::new().await?;
    assert_eq!(current(&stage)?, OLD);
    let part = stage.machine.path("opt/svc/current/runtime/noise/7");
    let whole = fs::read(&part)?;
    fs::write(&part, &whole[..31_000])?;
    assert!(current(&stage).is_err(), "a part is short");
    fs::remove_file(&part)?;
    assert!(current(&stage).is_err(), "a part is missing");
    fs::write(&part, &whole)?;
    fs::write(stage.machine.path("opt/svc/current/bin/svc"), "")?;
    assert!(current(&stage).is_err(), "the program is another");
    fs::remove_file(stage.machine.path("opt/svc/current"))?;
    assert!(current(&stage).is_err(), "there is none");
    Ok(())
}

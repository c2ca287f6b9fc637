//! If an update is killed at any point, a complete release is still current, and the next run finishes the update.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use kit::long_tests::Figures;

use super::super::super::update_fixture::{OLD_VERSION, PublishedRelease, UpdateFixture};
use super::{Killer, MIN_KILLS_LONG_RUN, MIN_KILLS_SHORT_RUN, assert_no_temporary_file};

const APPLY: [&str; 2] = ["apply", "--request"];

/// Returns the version of the current release, after checking that it is complete.
fn current_version(fixture: &UpdateFixture) -> Result<String> {
    let opt = fixture.machine.path("opt/svc");
    let link = fs::read_link(opt.join("current")).context("there is no current release")?;
    let version = link.strip_prefix("releases")?.to_string_lossy().into_owned();
    let dir = opt.join("current");
    let release: serde_json::Value = serde_json::from_slice(&fs::read(dir.join("release.json"))?)?;
    ensure!(release["imageVersion"] == *version, "release.json of {version} is {release}");
    ensure!(fs::read(dir.join("bin/svc"))? == b"#!/bin/sh\n", "{version} has a different program");
    for n in 0..40 {
        let length = fs::metadata(dir.join(format!("runtime/noise/{n}"))).context("a file is missing")?.len();
        ensure!(length == 32_000, "file {n} of {version} has {length} bytes");
    }
    Ok(version)
}

struct Campaign {
    fixture: UpdateFixture,
    killer: Killer,
    version: String,
    updates: usize,
}

impl Campaign {
    /// Checks that after a kill, the current release is complete, and is the previous or the requested one.
    fn check_state(&self, to: &str) -> Result<()> {
        let current = current_version(&self.fixture)?;
        if current != self.version && current != to {
            bail!("{current} is current, neither {} nor {to}", self.version);
        }
        Ok(())
    }

    async fn run_round(&mut self) -> Result<()> {
        let to = format!("2026.{}.0", self.updates + 2);
        PublishedRelease::new(&to, &[])?.serve(&self.fixture.source)?;
        self.fixture.request_update(&to)?;
        for _ in 0..self.killer.next_kill_count() {
            self.killer.kill_run(self.fixture.spawn(&APPLY)?).await?;
            self.check_state(&to)?;
        }
        let running = self.fixture.spawn(&APPLY)?;
        let result = tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
        self.check_completed(&to).with_context(|| result.stderr)?;
        // The archive is removed, because two hundred of them would take several hundred megabytes.
        self.fixture.source.put(&format!("/{to}/svc-host-bundle.tar.gz"), None);
        self.version = to;
        Ok(())
    }

    /// Checks that the update is complete: its release is running with its units, no step is pending, and it is
    /// reported once.
    fn check_completed(&mut self, to: &str) -> Result<()> {
        self.updates += 1;
        ensure!(current_version(&self.fixture)? == to, "{to} is not current");
        self.fixture.assert_running(to)?;
        assert_no_temporary_file(&self.fixture.machine.path("var/lib/svc/update"))?;
        let history = self.fixture.history()?;
        let reports = history.iter().filter(|line| line["version"] == to).count();
        let all_succeeded = history.iter().all(|line| line["outcome"] == "updated");
        ensure!(reports == 1 && all_succeeded && history.len() == self.updates.min(200), "{history:?}");
        Ok(())
    }
}

async fn run_campaign(kills: u64, seed: u64) -> Result<()> {
    let fixture = UpdateFixture::new().await?;
    let mut campaign = Campaign {
        fixture,
        killer: Killer::new("updates", seed),
        version: OLD_VERSION.to_owned(),
        updates: 0,
    };
    let result = async {
        // The first update measures the duration of an update.
        let to = "2026.2.0";
        PublishedRelease::new(to, &[])?.serve(&campaign.fixture.source)?;
        campaign.fixture.request_update(to)?;
        campaign.killer.complete_run(|| campaign.fixture.spawn(&APPLY)).await?;
        campaign.check_completed(to)?;
        campaign.version = to.to_owned();
        while campaign.killer.kills < kills {
            campaign.run_round().await.with_context(|| format!("after {} kills", campaign.killer.kills))?;
        }
        anyhow::Ok(())
    };
    let result = result.await;
    println!("{} updates", campaign.updates);
    Figures { kills_survived: campaign.killer.kills, ..Figures::new("killed updates") }.record()?;
    result
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_survive_random_kills() -> Result<()> {
    run_campaign(MIN_KILLS_SHORT_RUN, 1).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: 200 kills"]
async fn updates_survive_200_kills() -> Result<()> {
    run_campaign(MIN_KILLS_LONG_RUN, Killer::new_seed()).await
}

/// Tests [`current_version`] itself.
#[tokio::test(flavor = "multi_thread")]
async fn incomplete_release_is_detected() -> Result<()> {
    let fixture = UpdateFixture::new().await?;
    assert_eq!(current_version(&fixture)?, OLD_VERSION);
    let file = fixture.machine.path("opt/svc/current/runtime/noise/7");
    let complete = fs::read(&file)?;
    fs::write(&file, &complete[..31_000])?;
    assert!(current_version(&fixture).is_err(), "a truncated file was not detected");
    fs::remove_file(&file)?;
    assert!(current_version(&fixture).is_err(), "a missing file was not detected");
    fs::write(&file, &complete)?;
    fs::write(fixture.machine.path("opt/svc/current/bin/svc"), "")?;
    assert!(current_version(&fixture).is_err(), "a changed program was not detected");
    fs::remove_file(fixture.machine.path("opt/svc/current"))?;
    assert!(current_version(&fixture).is_err(), "a missing release was not detected");
    Ok(())
}

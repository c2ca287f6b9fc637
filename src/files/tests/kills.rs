//! Kills processes at every fail point, and checks that persisted data survives and the next run completes.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::pruning::{fixture_with_history, prune_options_after};
use super::*;
use crate::verify::{PackShare, verify};
use crate::{prune, restore as restoring, save as saving};

/// Environment variable that passes a [`Job`] to the child process.
const JOB: &str = "SVC_FILES_TEST_JOB";

#[derive(Serialize, Deserialize)]
pub(super) struct Job {
    dir: PathBuf,
    store: PathBuf,
    key: String,
    action: Action,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Action {
    Save { parent: Option<(Id, Snapshot)> },
    Restore { snapshot: Snapshot, target: PathBuf },
    Prune { now: Timestamp, protected: Vec<Id> },
}

/// Child process entry point. Does nothing without a job.
#[tokio::test]
async fn child_process_runs_its_job() {
    let Ok(job) = std::env::var(JOB) else { return };
    svc_base::failpoint::arm();
    let Job { dir, store, key, action } = serde_json::from_str(&job).unwrap();
    let bucket = Bucket::new(Arc::new(LocalFileSystem::new_with_prefix(store).unwrap()));
    let mut saver = saver(&dir, &bucket, &key.parse().unwrap()).await;
    match action {
        Action::Save { parent } => drop(saver.save(parent).await.unwrap()),
        Action::Restore { snapshot, target } => {
            let options = RestoreOptions::new(target, "/".into());
            let progress = RestoreProgress::default();
            restore(saver.repository(), &snapshot, &options, &progress).await.unwrap();
        }
        Action::Prune { now, protected } => {
            let options = prune::PruneOptions { now, protected, ..prune_options_after(0) };
            prune::prune(saver.repository(), &options).await.unwrap();
        }
    }
}

impl Fixture {
    /// Runs the action in a child process that is killed at a fail point. Returns whether the point was reached.
    pub(super) fn run_killed_at(&self, point: &str, action: Action) -> bool {
        self.run_with_failpoint(&format!("{point}=return(kill)"), action)
    }

    /// Runs the action in a child process with `FAILPOINTS` set to `failpoint`. Returns whether it was killed.
    fn run_with_failpoint(&self, failpoint: &str, action: Action) -> bool {
        let job = Job {
            dir: self.dir.path().to_owned(),
            store: self.store.as_ref().expect("the store is a directory").path().to_owned(),
            key: self.key.password().expose_secret().to_owned(),
            action,
        };
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::kills::child_process_runs_its_job", "--nocapture"]);
        command.env(JOB, serde_json::to_string(&job).unwrap());
        command.env("FAILPOINTS", failpoint);
        let output = command.output().unwrap();
        let is_killed = output.status.signal() == Some(9);
        assert!(is_killed || output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        is_killed
    }

    /// Checks that no pack is damaged and every snapshot is restorable. Returns the number of snapshots.
    async fn assert_snapshots_are_complete(&self) -> usize {
        let repository = self.open(&self.key).await.unwrap().unwrap();
        let damaged = verify(&repository, PackShare::ALL).await.unwrap().damaged;
        assert!(damaged.is_empty(), "{damaged:?}");
        let snapshots = repository.list_snapshots().await.unwrap();
        for (_, snapshot) in &snapshots {
            self.restore(snapshot).await;
        }
        snapshots.len()
    }
}

#[tokio::test]
async fn save_survives_kills() {
    for point in saving::FAILPOINTS {
        let mut fixture = Fixture::in_directory().await;
        fixture.write("kept", "kept");
        let first = fixture.save().await;
        let expected = describe(&fixture.home());
        fixture.write("new", random_bytes(2 << 20));
        let parent = fixture.last.clone();
        assert!(fixture.run_killed_at(point, Action::Save { parent }), "{point}");
        assert_eq!(fixture.assert_snapshots_are_complete().await, 1, "{point}");
        let (target, _) = fixture.restore(&first.snapshot).await;
        assert_same(&describe(target.path()), &expected);

        let saved = fixture.save().await;
        let (target, _) = fixture.restore(&saved.snapshot).await;
        assert_same(&describe(target.path()), &describe(&fixture.home()));
    }
}

#[tokio::test]
async fn restore_survives_kills() {
    let mut fixture = Fixture::in_directory().await;
    for number in 0..20 {
        fixture.write(&format!("projects/{number}"), random_bytes(10_000));
    }
    let SaveResult { snapshot, .. } = fixture.save().await;
    for point in restoring::FAILPOINTS {
        let target = tempfile::tempdir().unwrap();
        let action = Action::Restore { snapshot: snapshot.clone(), target: target.path().to_owned() };
        assert!(fixture.run_killed_at(point, action), "{point}");
        if *point != "files.restore.completed" {
            // Also kill it after the first batch.
            let target = tempfile::tempdir().unwrap();
            let action = Action::Restore { snapshot: snapshot.clone(), target: target.path().to_owned() };
            assert!(fixture.run_with_failpoint(&format!("{point}=1*off->return(kill)"), action), "{point}");
        }
        let (target, _) = fixture.restore(&snapshot).await;
        assert_same(&describe(target.path()), &describe(&fixture.home()));
    }
}

#[tokio::test]
async fn prune_survives_kills() {
    for point in prune::FAILPOINTS {
        let fixture = fixture_with_history(Fixture::in_directory().await).await;
        // The second run deletes the packs marked by the first.
        let mut kills = 0;
        for days in [3, 6] {
            let protected = Vec::new();
            let action = Action::Prune { now: prune_options_after(days).now, protected };
            kills += u32::from(fixture.run_killed_at(point, action));
            fixture.assert_snapshots_are_complete().await;
            pruning::run_prune(&fixture, &prune_options_after(days)).await;
            assert_eq!(fixture.assert_snapshots_are_complete().await, 1, "{point}");
        }
        assert!(kills > 0, "no run reached {point}");
        let (target, _) = fixture.restore(&fixture.last.clone().unwrap().1).await;
        assert_same(&describe(target.path()), &describe(&fixture.home()));
        let report = pruning::run_prune(&fixture, &prune_options_after(20)).await;
        assert_eq!((report.marked_packs, report.removed_snapshots), (0, 0), "{point}: {report:?}");
    }
}

//! `svc-update apply`, `rollback` and `resume`. Updates never run concurrently, and an interrupted one is finished
//! first.

use std::time::{Duration, Instant};

use super::error::UpdateError;
use super::history;
use super::journal::{Allowances, Journal, JournalError, UpdateKind, UpdatePlan};
use super::protocol::{Outcome, UpdateResult};
use super::request::{self, RequestFile};
use super::services::{ServiceManagerError, Systemctl};
use super::state::Stage;
use super::updater::{self, Updater};
use super::{releases, snapshot, trust};
use crate::system::config;
use crate::system::config::PlatformAccess;
use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use crate::system::root_settings;
use crate::system::vars;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::config::Env;
use svc_http::request_id;
use svc_machine::name::ImageVersion;

/// Maximum time to wait for the lock. Runs started by the path unit have to wait, because systemd would restart a
/// failed run in a loop.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Interval at which a run waiting for the lock renews its snapshot waiver.
const WAIVER_INTERVAL: Duration = Duration::from_secs(5);

/// Fail points during an update, in addition to those in `svc-update boot`.
pub const APPLY_FAILPOINTS: &[&str] = &[
    "update.opened",
    "update.manifest_verified",
    "update.smoke_tested",
    "update.snapshot_taken",
    "update.prepared",
    "update.activating",
    "update.reloaded",
    "update.restarted",
    "update.healthy",
    "update.ended",
    "update.outcome_recorded",
    "update.history_written",
    "update.pruned",
    "update.request_done",
];

/// Fail points during a rollback.
pub const ROLLBACK_FAILPOINTS: &[&str] =
    &["update.reverting", "update.quarantined", "update.reverted", "update.restoring"];

/// The release to make current.
pub enum UpdateTarget {
    Version(ImageVersion, Allowances),
    /// The release in the request file.
    Requested,
    /// The release before the current one.
    Previous,
    /// Nothing: only finish an interrupted update.
    Resume,
}

/// Who started this run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caller {
    /// An operator running `svc-update apply --version` or `svc-update rollback`.
    Operator,
    /// systemd: the path unit `svc-update.path` starts `svc-update apply --request`. Includes `svc-update resume`,
    /// which finishes an interrupted update in the same way.
    Systemd,
}

fn build_updater(layout: Layout) -> Result<Updater<Systemctl>, Failure> {
    let services = Systemctl::find(&layout).ok_or(ServiceManagerError::Missing).or_exit(Exit::Config)?;
    root_settings::copy_platform_url(&layout).or_exit(Exit::Internal)?;
    let mut env = config::environment(&layout);
    let has_database = env.is_set(&vars::DATABASE_URL);
    let platform = PlatformAccess::read(&mut env, &layout);
    let listen = env.or_default(&vars::GATEWAY_LISTEN);
    let platform = env.finish(platform);
    trust::report_key_ids(&layout)?;
    let mut env = Env::from_process().with_file(&layout.update_env());
    let health_seconds: u64 = env.or_default(&vars::SVC_UPDATE_HEALTH_SECONDS);
    let snapshot_seconds: u64 = env.or_default(&vars::SVC_UPDATE_SNAPSHOT_SECONDS);
    env.finish(Some(()))?;
    Ok(Updater {
        layout,
        services,
        platform,
        listen,
        health_timeout: Duration::from_secs(health_seconds),
        has_database,
        snapshot_timeout: Duration::from_secs(snapshot_seconds),
    })
}

/// An interrupted update finished by this run.
struct ResumedUpdate {
    kind: UpdateKind,
    from: ImageVersion,
    outcome: Outcome,
}

impl ResumedUpdate {
    /// Returns whether this update completes the operator's command, so no other update is started.
    fn completes(&self, target: &UpdateTarget) -> bool {
        let Outcome { version, outcome: result, stage, .. } = &self.outcome;
        match target {
            UpdateTarget::Requested | UpdateTarget::Resume => false,
            // The operator wants off the release that the interrupted update was installing, or is retrying an
            // interrupted rollback. Only roll back again if an interrupted `apply` succeeded; otherwise we'd go back
            // one release too far.
            UpdateTarget::Previous => self.kind == UpdateKind::Rollback || *result != UpdateResult::Updated,
            UpdateTarget::Version(requested, _) => match result {
                UpdateResult::Updated | UpdateResult::Refused => false,
                // The release is quarantined now. Retrying it would be refused, and would overwrite this outcome before
                // the heartbeat has reported it.
                UpdateResult::RolledBack => version == requested,
                // After a failed rollback, the requested release may be current but unhealthy.
                UpdateResult::Failed => stage == Stage::Rollback.as_str(),
            },
        }
    }

    /// Reports the outcome of a command completed by this update.
    fn report(&self, target: &UpdateTarget, caller: Caller) -> Result<(), Failure> {
        let was_apply_rolled_back =
            self.kind == UpdateKind::Apply && self.outcome.outcome == UpdateResult::RolledBack;
        if was_apply_rolled_back && matches!(target, UpdateTarget::Previous) {
            // The previous release is running again, which is what the operator requested.
            println!("{}", self.outcome.describe(&self.from));
            return Ok(());
        }
        report_outcome(&self.outcome, caller)
    }
}

/// Finishes any interrupted update, then updates to the target unless that already completed the command.
///
/// # Errors
/// `Config` if there is no service manager or a variable is invalid; `TryAgain` if another update holds the lock;
/// `Refused` if no release is installed, there is no previous release to roll back to, the request file is malformed,
/// or an operator's update was refused or rolled back; `Internal` otherwise.
pub async fn run(layout: Layout, target: UpdateTarget) -> Result<(), Failure> {
    let updater = build_updater(layout)?;
    let _lock = acquire_lock(&updater.layout, &target).await?;
    releases::remove_leftovers(&updater.layout).or_exit(Exit::Internal)?;
    let journal = Journal::read(&updater.layout).map_err(journal_failure)?;
    let resumed = match journal {
        Some(journal) => {
            let UpdatePlan { kind, from, to, request_id: id, .. } = journal.plan.clone();
            tracing::warn!(%from, %to, "resuming interrupted update");
            let outcome = request_id::run_with_id(id, updater.run_to_completion(journal)).await?;
            Some(ResumedUpdate { kind, from, outcome })
        }
        None => None,
    };
    let caller = match target {
        UpdateTarget::Requested | UpdateTarget::Resume => Caller::Systemd,
        UpdateTarget::Version(..) | UpdateTarget::Previous => Caller::Operator,
    };
    if let Some(resumed) = &resumed
        && resumed.completes(&target)
    {
        return resumed.report(&target, caller);
    }
    let mut outcome = resumed.map(|resumed| resumed.outcome);
    if let Some((kind, to, allow, id)) = resolve_target(&updater.layout, target)? {
        let from = updater::current_release(&updater.layout)?;
        if from == to {
            request::complete(&updater.layout, &to).or_exit(Exit::Internal)?;
            println!("{to} is current");
            return Ok(());
        }
        let update =
            async { updater.run_to_completion(updater.plan_update(kind, from, to, allow).await).await };
        outcome = Some(request_id::run_with_id(id, update).await?);
    }
    match outcome {
        Some(outcome) => report_outcome(&outcome, caller),
        None => Ok(()),
    }
}

async fn acquire_lock(layout: &Layout, target: &UpdateTarget) -> Result<Lock, Failure> {
    let path = layout.update_state().join("lock");
    let lock = match target {
        UpdateTarget::Requested | UpdateTarget::Resume => Lock::wait(&path, LOCK_TIMEOUT).await,
        // The run holding the lock, or the next one to get it, may be waiting for a snapshot. Waivers only apply to
        // updates that began before they were written, so keep renewing ours.
        UpdateTarget::Version(version, allow) if allow.without_snapshot => {
            let deadline = Instant::now() + LOCK_TIMEOUT;
            loop {
                match Lock::wait(&path, WAIVER_INTERVAL).await {
                    Err(LockError::Held) if Instant::now() < deadline => {
                        snapshot::waive(layout, version).or_exit(Exit::Internal)?;
                    }
                    result => break result,
                }
            }
        }
        _ => Lock::acquire(&path),
    };
    lock.map_err(|error| match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!("another update is running")),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })
}

fn journal_failure(error: JournalError) -> Failure {
    Failure::new(Exit::Internal, error)
}

type ResolvedTarget = (UpdateKind, ImageVersion, Allowances, String);

fn resolve_target(layout: &Layout, target: UpdateTarget) -> Result<Option<ResolvedTarget>, Failure> {
    let no_allowances = Allowances::default();
    match target {
        UpdateTarget::Resume => Ok(None),
        UpdateTarget::Version(version, allow) => {
            Ok(Some((UpdateKind::Apply, version, allow, request_id::current())))
        }
        UpdateTarget::Previous => {
            let current = updater::current_release(layout)?;
            let previous = history::find_previous(layout).or_exit(Exit::Internal)?;
            let previous = previous.filter(|version| *version != current);
            let previous = previous.ok_or(UpdateError::NoPrevious)?;
            Ok(Some((UpdateKind::Rollback, previous, no_allowances, request_id::current())))
        }
        UpdateTarget::Requested => match request::read(layout) {
            RequestFile::Missing => Ok(None),
            RequestFile::Valid(request) => {
                let id = request.request_id.unwrap_or_else(request_id::generate);
                Ok(Some((UpdateKind::Apply, request.version, no_allowances, id)))
            }
            RequestFile::Invalid => {
                request::remove(layout).or_exit(Exit::Internal)?;
                let error =
                    anyhow::anyhow!("removed a malformed update request file; request the update again");
                Err(Failure::new(Exit::Refused, error))
            }
        },
    }
}

/// Reports the outcome. Runs started by systemd only fail on `Failed`, since the heartbeat reports the outcome to the
/// platform.
fn report_outcome(outcome: &Outcome, caller: Caller) -> Result<(), Failure> {
    let Outcome { version, outcome: result, stage, error, .. } = outcome;
    let error = error.as_deref().unwrap_or_default();
    let (exit, message) = match result {
        UpdateResult::Updated => {
            println!("{version} is current");
            return Ok(());
        }
        UpdateResult::RolledBack => (
            Exit::Refused,
            format!("{version} failed its checks ({stage}): {error}; the previous release is running again"),
        ),
        UpdateResult::Refused => (Exit::Refused, format!("{version} was refused ({stage}): {error}")),
        UpdateResult::Failed => {
            (Exit::Internal, format!("the update to {version} failed ({stage}): {error}"))
        }
    };
    if caller == Caller::Systemd && *result != UpdateResult::Failed {
        println!("{message}");
        return Ok(());
    }
    Err(Failure::new(exit, anyhow::anyhow!(message)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> ImageVersion {
        text.parse().unwrap()
    }

    /// Builds a finished update from release 1 to release 2 that was interrupted before.
    fn resumed(kind: UpdateKind, result: UpdateResult, stage: Stage) -> ResumedUpdate {
        let outcome = Outcome {
            version: version("2"),
            outcome: result,
            stage: stage.as_str().to_owned(),
            error: None,
            at: jiff::Timestamp::UNIX_EPOCH,
        };
        ResumedUpdate { kind, from: version("1"), outcome }
    }

    #[test]
    fn rollback_continues_only_after_resumed_update_succeeded() {
        for (kind, result, is_complete) in [
            (UpdateKind::Apply, UpdateResult::Updated, false),
            (UpdateKind::Apply, UpdateResult::RolledBack, true),
            (UpdateKind::Apply, UpdateResult::Refused, true),
            (UpdateKind::Apply, UpdateResult::Failed, true),
            (UpdateKind::Rollback, UpdateResult::Updated, true),
            (UpdateKind::Rollback, UpdateResult::RolledBack, true),
        ] {
            let update = resumed(kind, result, Stage::Health);
            assert_eq!(update.completes(&UpdateTarget::Previous), is_complete, "{kind:?} {result:?}");
            assert!(!update.completes(&UpdateTarget::Requested), "{kind:?} {result:?}");
        }
    }

    #[test]
    fn apply_continues_unless_resumed_update_completes_it() {
        for (result, stage, requested, is_complete) in [
            (UpdateResult::Updated, Stage::Done, "2", false),
            (UpdateResult::Refused, Stage::Preflight, "2", false),
            (UpdateResult::Failed, Stage::Download, "2", false),
            (UpdateResult::RolledBack, Stage::Health, "2", true),
            (UpdateResult::RolledBack, Stage::Health, "3", false),
            (UpdateResult::Failed, Stage::Rollback, "2", true),
            (UpdateResult::Failed, Stage::Rollback, "3", true),
        ] {
            let update = resumed(UpdateKind::Apply, result, stage);
            let target = UpdateTarget::Version(version(requested), Allowances::default());
            assert_eq!(update.completes(&target), is_complete, "{result:?} {stage:?} {requested}");
        }
    }
}

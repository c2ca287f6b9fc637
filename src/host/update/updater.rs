//! Runs the update state machine: writes each state to the journal, performs its step, and selects the next state.
//!
//! Every step is idempotent, so the next run can finish an interrupted update. A step's error becomes an event. Only
//! errors in writing the journal and the final records end the run.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use jiff::Timestamp;

use super::download::{BundleSource, DownloadError};
use super::error::UpdateError;
use super::fetch;
use super::fetch::{ExpectedArchive, FetchError};
use super::health::{self, CHECKED_SERVICES, GATEWAY_UNIT, GatewayProbe};
use super::history;
use super::history::{HistoryEntry, HistoryError};
use super::journal::{Allowances, Journal, UpdateKind, UpdatePlan};
use super::policy;
use super::policy::{Candidate, PolicyError};
use super::protocol::{Outcome, UpdateResult};
use super::releases;
use super::releases::InstallError;
use super::request;
use super::services::ServiceManager;
use super::smoke_test;
use super::snapshot;
use super::state::{Event, MAX_ERROR_CHARS, Stage, State, StepFailure};
use super::trust;
use super::units;
use crate::system::activity;
use crate::system::config::PlatformAccess;
use crate::system::layout::Layout;
use crate::system::probe;
use crate::system::release;
use crate::system::upgrade_token;
use svc_base::config::ConfigError;
use svc_base::error_chain::format_chain;
use svc_base::failpoint;
use svc_base::fsx;
use svc_http::request_id;
use svc_machine::name::ImageVersion;
use svc_store::bundle::{KeySet, MAX_COMPANION_BYTES, SignedManifest, VerifiedManifest, verify};
use svc_store::key::BUNDLE_FILE;

const SVC_TARGET: &str = "svc.target";
const OWN_UNIT_PREFIX: &str = "svc-update.";

/// Runs a machine's updates.
pub struct Updater<S> {
    pub layout: Layout,
    pub services: S,
    /// Required only to fetch a release; a rollback works without it.
    pub platform: Result<PlatformAccess, ConfigError>,
    pub listen: SocketAddr,
    pub health_timeout: Duration,
    /// A machine without a database needs no snapshot.
    pub has_database: bool,
    /// Maximum time without backup progress while waiting for a snapshot.
    pub snapshot_timeout: Duration,
}

/// Why a step failed.
enum StepError {
    Refused(StepFailure),
    Failed(StepFailure),
}

fn step_failure(stage: Stage, error: &(dyn Error + 'static)) -> StepFailure {
    StepFailure { stage, error: format_chain(error).chars().take(MAX_ERROR_CHARS).collect() }
}

fn refused<E: Error + 'static>(stage: Stage) -> impl FnOnce(E) -> StepError {
    move |error| StepError::Refused(step_failure(stage, &error))
}

fn failed<E: Error + 'static>(stage: Stage) -> impl FnOnce(E) -> StepError {
    move |error| StepError::Failed(step_failure(stage, &error))
}

/// Returns `Refused` if the release is at fault; `Failed` if this machine, its network or the source is at fault, in
/// which case a later update may succeed.
fn classify_fetch_error(error: FetchError) -> StepError {
    match &error {
        FetchError::NoSpace { .. } => failed(Stage::Preflight)(error),
        FetchError::Unpack(unpack) if unpack.is_local_error() => failed(Stage::Download)(error),
        FetchError::Download(_)
        | FetchError::Install(InstallError::File(_) | InstallError::Injected(_))
        | FetchError::File(_)
        | FetchError::Injected(_) => failed(Stage::Download)(error),
        FetchError::Unpack(_)
        | FetchError::DigestMismatch { .. }
        | FetchError::SizeMismatch { .. }
        | FetchError::Install(_) => refused(Stage::Download)(error),
    }
}

/// Returns `Refused` if a policy forbids the update; `Failed` if the records on this machine cannot be read.
fn classify_policy_error(error: PolicyError) -> StepError {
    match &error {
        PolicyError::History(_) => failed(Stage::Preflight)(error),
        _ => refused(Stage::Preflight)(error),
    }
}

impl<S: ServiceManager> Updater<S> {
    /// Plans an update, without writing anything yet.
    pub async fn plan_update(
        &self,
        kind: UpdateKind,
        from: ImageVersion,
        to: ImageVersion,
        allow: Allowances,
    ) -> Journal {
        let mut running = Vec::new();
        for name in CHECKED_SERVICES {
            if self.services.state(name).await.is_ok_and(|state| state.active == "active") {
                running.push(name.to_owned());
            }
        }
        let was_ready = match self.gateway_client() {
            Some(gateway) => gateway.is_ready().await,
            None => false,
        };
        let request_id = request_id::current();
        let plan = UpdatePlan { kind, from, to, allow, running, was_ready, request_id };
        Journal::new(plan, Timestamp::now())
    }

    /// Runs an update to completion.
    ///
    /// # Errors
    /// [`UpdateError`] if the journal or the final records cannot be written. The journal keeps the state that was
    /// reached.
    pub async fn run_to_completion(&self, mut journal: Journal) -> Result<Outcome, UpdateError> {
        loop {
            let has_attempts_left = journal.start_attempt();
            journal.save(&self.layout)?;
            if let State::Ended { end, stage, error } = &journal.state {
                let outcome = Outcome {
                    version: journal.plan.to.clone(),
                    outcome: *end,
                    stage: stage.as_str().to_owned(),
                    error: error.clone(),
                    at: Timestamp::now(),
                };
                self.finish_update(&journal, &outcome)?;
                return Ok(outcome);
            }
            tracing::info!(
                from = %journal.plan.from, to = %journal.plan.to, state = ?journal.state,
                "running an update step"
            );
            let event =
                if has_attempts_left { self.run_step(&mut journal).await } else { Event::AttemptsExhausted };
            if let Event::Refused(failure) | Event::Failed(failure) = &event {
                tracing::error!(
                    stage = failure.stage.as_str(),
                    error = failure.error,
                    "an update step failed"
                );
            }
            journal = journal.apply_event(event);
        }
    }

    async fn run_step(&self, journal: &mut Journal) -> Event {
        let result = match &journal.state {
            State::Preparing => self.prepare(journal).await,
            State::TakingSnapshot => self.take_snapshot(journal).await,
            State::Switching => self.switch(journal),
            State::Activating => self.activate(journal, &journal.plan.to).await,
            State::Reverting { why: failure } => self.revert(journal, failure),
            State::Restoring { .. } => self.restore(journal).await,
            State::Ended { .. } => Ok(()),
        };
        match result {
            Ok(()) => Event::Done,
            Err(StepError::Refused(failure)) => Event::Refused(failure),
            Err(StepError::Failed(failure)) => Event::Failed(failure),
        }
    }

    async fn prepare(&self, journal: &mut Journal) -> Result<(), StepError> {
        failpoint::trigger("update.opened").map_err(failed(Stage::Preflight))?;
        policy::check_machine(&self.layout, &journal.plan.to, &journal.plan.allow)
            .map_err(classify_policy_error)?;
        if journal.plan.kind == UpdateKind::Apply {
            let verified = self.fetch_manifest(&journal.plan.to).await?;
            journal.key_set = self.next_key_set(&verified)?;
            failpoint::trigger("update.manifest_verified").map_err(failed(Stage::Manifest))?;
            let candidate = Candidate::new(&self.layout, &journal.plan.from, verified.manifest());
            policy::check_release(&candidate, &journal.plan.allow).map_err(refused(Stage::Preflight))?;
            self.fetch_bundle(&journal.plan.to, &verified).await?;
            let UpdatePlan { from, allow, .. } = &journal.plan;
            policy::check_parts(&self.layout, from, verified.manifest(), allow)
                .map_err(refused(Stage::Preflight))?;
        }
        smoke_test::run(&self.layout.release(&journal.plan.to)).await.map_err(refused(Stage::SmokeTest))?;
        failpoint::trigger("update.smoke_tested").map_err(failed(Stage::SmokeTest))
    }

    async fn fetch_manifest(&self, version: &ImageVersion) -> Result<VerifiedManifest, StepError> {
        let read = async |suffix: &str| {
            let source = self.bundle_source(version, suffix)?;
            source.read(MAX_COMPANION_BYTES).await.map_err(|error| match error {
                DownloadError::Status { status: http::StatusCode::NOT_FOUND, .. } => {
                    refused(Stage::Manifest)(error)
                }
                error => failed(Stage::Manifest)(error),
            })
        };
        let signed = SignedManifest { manifest: read(".json").await?, signature: read(".json.sig").await? };
        // The keys are read only now, because an update that this run has just finished may have changed them.
        let trusted = trust::read(&self.layout).map_err(failed(Stage::Manifest))?;
        verify(&signed, &trusted.keys, version, Timestamp::now()).map_err(refused(Stage::Manifest))
    }

    /// Returns the key set to trust once the release is healthy, if the manifest contains a new one.
    fn next_key_set(&self, verified: &VerifiedManifest) -> Result<Option<KeySet>, StepError> {
        let Some(offered) = &verified.manifest().trusted_keys else { return Ok(None) };
        let trusted = trust::read(&self.layout).map_err(failed(Stage::Manifest))?;
        trusted.successor(offered).map_err(refused(Stage::Manifest))
    }

    fn bundle_source(&self, version: &ImageVersion, suffix: &str) -> Result<BundleSource, StepError> {
        let platform = self
            .platform
            .as_ref()
            .map_err(|error| StepError::Failed(step_failure(Stage::Preflight, error)))?;
        let url = platform.url(&format!("/system-bundles/{version}/{BUNDLE_FILE}{suffix}"));
        Ok(BundleSource::new(url, platform.clone()))
    }

    async fn fetch_bundle(
        &self,
        version: &ImageVersion,
        verified: &VerifiedManifest,
    ) -> Result<(), StepError> {
        let manifest = verified.manifest();
        let expected = ExpectedArchive { sha256: &manifest.sha256, size_bytes: Some(manifest.size_bytes) };
        let source = self.bundle_source(version, "")?;
        fetch::ensure_release(&self.layout, &source, version, &expected).await.map_err(classify_fetch_error)
    }

    /// Takes a snapshot, unless the machine has no database, or the update is a rollback or targets the previous
    /// release.
    async fn take_snapshot(&self, journal: &mut Journal) -> Result<(), StepError> {
        let targets_previous = journal.plan.kind == UpdateKind::Rollback
            || history::find_previous(&self.layout)
                .ok()
                .flatten()
                .is_some_and(|version| version == journal.plan.to);
        if self.has_database && !targets_previous {
            let waiter = snapshot::SnapshotWaiter::new(&self.layout, &self.services, self.snapshot_timeout);
            waiter.wait_for_snapshot(journal).await.map_err(failed(Stage::Snapshot))?;
        }
        failpoint::trigger("update.snapshot_taken").map_err(failed(Stage::Snapshot))
    }

    fn switch(&self, journal: &Journal) -> Result<(), StepError> {
        failpoint::trigger("update.prepared").map_err(failed(Stage::Switch))?;
        self.write_token_to_host_env().map_err(failed(Stage::Switch))?;
        releases::switch(&self.layout, &journal.plan.to).map_err(failed(Stage::Switch))
    }

    /// Writes the upgrade token to `host.env`, from which older releases read it.
    fn write_token_to_host_env(&self) -> Result<(), fsx::FileError> {
        match &self.platform {
            Ok(platform) => upgrade_token::write_to_host_env(&self.layout, &platform.upgrade_token),
            Err(_) => Ok(()),
        }
    }

    /// Installs the units, restarts the services and waits until they are healthy.
    async fn activate(&self, journal: &Journal, version: &ImageVersion) -> Result<(), StepError> {
        failpoint::trigger("update.activating").map_err(failed(Stage::Units))?;
        self.stop_removed_units(version).await?;
        units::install(&self.layout, version).map_err(failed(Stage::Units))?;
        self.services.reload().await.map_err(failed(Stage::Units))?;
        failpoint::trigger("update.reloaded").map_err(failed(Stage::Units))?;
        let names: Vec<String> =
            [GATEWAY_UNIT.to_owned()].into_iter().chain(journal.plan.running.iter().cloned()).collect();
        for name in &names {
            // The health check below decides whether this is a failure.
            if let Err(error) = self.services.restart(name).await {
                tracing::warn!(error = %format_chain(&error), "could not restart a service; the health check decides whether the update fails");
            }
        }
        for name in CHECKED_SERVICES.iter().filter(|name| !names.iter().any(|other| other == *name)) {
            // These services were not running when the update began, but they may have started since, from the old
            // release. A failed restart does not fail the update.
            if let Err(error) = self.services.try_restart(name).await {
                tracing::warn!(error = %format_chain(&error), "could not restart a service: it may be running the old release");
            }
        }
        if self.layout.root().join("etc/systemd/system").join(SVC_TARGET).exists() {
            // This starts services that are new in this release. A failed start does not fail the update.
            if let Err(error) = self.services.start(SVC_TARGET).await {
                tracing::warn!(error = %format_chain(&error), "could not start all of the release's units");
            }
        }
        failpoint::trigger("update.restarted").map_err(failed(Stage::Restart))?;
        let health_error = |error: String| StepError::Failed(StepFailure { stage: Stage::Health, error });
        let gateway_probe = match (self.gateway_client(), journal.plan.was_ready) {
            (None, _) => GatewayProbe::Unavailable,
            (Some(gateway), true) => GatewayProbe::Ready(gateway),
            (Some(gateway), false) => GatewayProbe::Alive(gateway),
        };
        health::wait_until_healthy(&self.services, &names, &gateway_probe, self.health_timeout)
            .await
            .map_err(health_error)?;
        failpoint::trigger("update.healthy").map_err(failed(Stage::Health))
    }

    /// Stops units that this release does not have, before their files are removed.
    async fn stop_removed_units(&self, version: &ImageVersion) -> Result<(), StepError> {
        let removed = units::list_removed_units(&self.layout, version).map_err(failed(Stage::Units))?;
        // This process may be running in one of svc-update's units, and must not stop itself.
        for unit in removed.iter().filter(|unit| !unit.starts_with(OWN_UNIT_PREFIX)) {
            if let Err(error) = self.services.stop(unit).await {
                tracing::warn!(error = %format_chain(&error), "could not stop a removed unit");
            }
        }
        Ok(())
    }

    fn revert(&self, journal: &Journal, failure: &StepFailure) -> Result<(), StepError> {
        failpoint::trigger("update.reverting").map_err(failed(Stage::Rollback))?;
        let quarantined =
            history::quarantine(&self.layout, &journal.plan.to, Timestamp::now(), &failure.error);
        // The rollback matters more than the quarantine record.
        if let Err(error) = quarantined {
            tracing::error!(error = %format_chain(&error), "could not quarantine the release");
        }
        failpoint::trigger("update.quarantined").map_err(failed(Stage::Rollback))?;
        // The rollback matters more than access to the platform.
        if let Err(error) = self.write_token_to_host_env() {
            tracing::error!(error = %format_chain(&error), "could not write the token to host.env");
        }
        releases::switch(&self.layout, &journal.plan.from).map_err(failed(Stage::Rollback))?;
        failpoint::trigger("update.reverted").map_err(failed(Stage::Rollback))
    }

    async fn restore(&self, journal: &Journal) -> Result<(), StepError> {
        failpoint::trigger("update.restoring").map_err(failed(Stage::Rollback))?;
        self.activate(journal, &journal.plan.from).await
    }

    /// Performs the last step: writes the records, removes old releases, the request and the snapshot waiver, and
    /// then the journal.
    fn finish_update(&self, journal: &Journal, outcome: &Outcome) -> Result<(), UpdateError> {
        failpoint::trigger("update.ended")?;
        match outcome.outcome {
            UpdateResult::Updated => self.record_success(journal)?,
            UpdateResult::RolledBack | UpdateResult::Refused | UpdateResult::Failed => {}
        }
        let entry = HistoryEntry::new(
            journal.id,
            journal.plan.from.clone(),
            journal.started_at,
            journal.plan.request_id.clone(),
            outcome.clone(),
        );
        history::record(&self.layout, &entry)?;
        if matches!(journal.state, State::Ended { end: UpdateResult::Failed, stage: Stage::Rollback, .. }) {
            // No release is removed, in case an operator needs one.
            self.record_rollback_target(&journal.plan.from);
        } else if let Err(error) = history::prune(&self.layout) {
            if let HistoryError::Injected(error) = error {
                return Err(error.into());
            }
            tracing::warn!(error = %format_chain(&error), "could not remove old releases");
        }
        // An update must be able to end even if another user has made the request's directory unusable.
        if let Err(error) = request::complete(&self.layout, &journal.plan.to) {
            tracing::error!(error = %format_chain(&error), "could not remove the update request");
        }
        snapshot::remove_waiver(&self.layout, &journal.plan.to)?;
        failpoint::trigger("update.request_done")?;
        fsx::remove_if_exists(&self.layout.update_journal())?;
        fsx::sync_dir(&self.layout.update_state())?;
        activity::note(&self.layout, &outcome.describe(&journal.plan.from));
        tracing::info!(
            outcome = ?outcome.outcome,
            stage = outcome.stage,
            error = outcome.error,
            "the update ended"
        );
        Ok(())
    }

    /// After a failed rollback, makes `svc-update rollback` return to the release that worked, unless the rollback has
    /// already switched to it.
    fn record_rollback_target(&self, from: &ImageVersion) {
        if release::current_version(&self.layout).as_ref() == Some(from) {
            return;
        }
        if let Err(error) = history::record_previous(&self.layout, from) {
            tracing::error!(error = %format_chain(&error), "could not record the previous release");
        }
    }

    fn record_success(&self, journal: &Journal) -> Result<(), UpdateError> {
        if let Some(keys) = &journal.key_set {
            trust::adopt(&self.layout, keys)?;
        }
        history::unquarantine(&self.layout, &journal.plan.to)?;
        match journal.plan.kind {
            UpdateKind::Apply => history::record_previous(&self.layout, &journal.plan.from)?,
            UpdateKind::Rollback => {
                let reason = "an operator rolled it back";
                history::quarantine(&self.layout, &journal.plan.from, Timestamp::now(), reason)?;
            }
        }
        Ok(())
    }

    fn gateway_client(&self) -> Option<probe::GatewayClient> {
        let pin = probe::read_pin(&self.layout).ok().flatten()?;
        probe::GatewayClient::new(self.listen, pin).ok()
    }
}

/// Returns the current release.
///
/// # Errors
/// [`UpdateError::NoRelease`] if there is none.
pub fn current_release(layout: &Layout) -> Result<ImageVersion, UpdateError> {
    release::current_version(layout).ok_or(UpdateError::NoRelease)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;

    use super::super::unpack::UnpackError;
    use super::*;

    #[test]
    fn unreadable_history_fails_update_instead_of_refusing_it() {
        let path = PathBuf::from("releases.json");
        let unreadable = PolicyError::History(HistoryError::Unreadable { path });
        assert!(matches!(classify_policy_error(unreadable), StepError::Failed(_)));
        assert!(matches!(classify_policy_error(PolicyError::NotRestored), StepError::Refused(_)));
    }

    #[test]
    fn full_disk_fails_update_without_rejecting_release() {
        let write_error = |source: io::Error| -> FetchError {
            UnpackError::Write { path: PathBuf::from("runtime/node"), source }.into()
        };
        for errno in [nix::libc::ENOSPC, nix::libc::EIO, nix::libc::EDQUOT] {
            let StepError::Failed(failure) =
                classify_fetch_error(write_error(io::Error::from_raw_os_error(errno)))
            else {
                panic!("{errno}: refused");
            };
            assert_eq!(failure.stage, Stage::Download);
        }
        let duplicate = write_error(io::ErrorKind::AlreadyExists.into());
        let corrupt = FetchError::from(UnpackError::Archive(io::ErrorKind::InvalidData.into()));
        for archive_error in [duplicate, corrupt] {
            assert!(matches!(classify_fetch_error(archive_error), StepError::Refused(_)));
        }
    }
}

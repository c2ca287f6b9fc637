//! `svc-sync-agent files`: saves the user's home directory until stopped.
//!
//! Invariant: `savedUntil` in the status and the pointer in the store only cover data that is fully persisted in the
//! store. A change is dropped only after a save that contains it. See `save_passes.rs` for the limitation on files
//! moved during a save.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use sd_notify::NotifyState;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::failpoint;
use svc_base::fsx;
use svc_files::save::{ChangeSet, Exclusions, SaveResult, estimate_pending_bytes};
use svc_store::files_pointer::{self, FilesSnapshotRef};
use tokio::signal::unix::{SignalKind, signal};

use super::access::{AccessError, FilesSettings};
use super::changes;
use super::checks::FileChecks;
use super::open_saver::OpenSaver;
use super::restore_outcome::RestoreOutcome;
use super::rules::{OwnerRules, read_rules, set_rules};
use super::save_error::SaveError;
use super::save_passes::SavePasses;
use super::save_records::{SaveRecords, SaveStart};
use super::save_request::SAVE_REQUEST;
use super::schedule::{SaveScope, Schedule};
use super::status::FilesStatus;
use super::verify;
use crate::audit::file_changes::ChangesReply;
use crate::system::layout::Layout;
use crate::system::quiesce::Quiesce;
use crate::system::systemd;

/// Interval between checks for changes, and the shorter one while changes are unsaved. Changes are settled if no new
/// ones arrive between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
const SETTLE_INTERVAL: Duration = Duration::from_millis(500);
const REQUEST_POLL_INTERVAL: Duration = Duration::from_millis(250);
const KEY_OFFER_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// Interval between measurements of the excluded files, each of which visits all of them.
const EXCLUDED_MEASURE_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// Minimum age of unsaved changes before their size is estimated, and the interval between estimates.
const MIN_PENDING_AGE: Duration = Duration::from_secs(60);
const PENDING_MEASURE_INTERVAL: Duration = Duration::from_secs(60);
/// Minimum interval between two warnings about the same failure.
const WARNING_INTERVAL: Duration = Duration::from_secs(600);
/// The service's fail points.
pub const FAILPOINTS: &[&str] = &["files.service.saved", "files.service.advanced"];

/// Runs the service until it is stopped or this machine has been replaced or deleted.
pub async fn run(layout: Layout) -> Result<(), Failure> {
    let settings = FilesSettings::read(layout)?;
    if settings.layout.superseded().exists() {
        return Err(superseded());
    }
    let mut term = signal(SignalKind::terminate()).or_exit(Exit::Internal)?;
    let mut int = signal(SignalKind::interrupt()).or_exit(Exit::Internal)?;
    systemd::notify(&[NotifyState::Ready]);
    let mut service = FileBackup::new(settings);
    let result = tokio::select! {
        result = service.run() => result,
        _ = term.recv() => Ok(()),
        _ = int.recv() => Ok(()),
    };
    systemd::notify(&[NotifyState::Stopping]);
    result
}

fn superseded() -> Failure {
    let error = anyhow::anyhow!("this machine has been replaced or deleted; no longer saving its files");
    Failure::new(Exit::Permission, error)
}

struct FileBackup {
    settings: FilesSettings,
    schedule: Schedule,
    status: FilesStatus,
    /// `None` until the repository has been opened, and after a failed save.
    saver: Option<OpenSaver>,
    /// Token of the last watcher reply whose changes have been saved.
    saved_token: Option<String>,
    /// Paths the last save couldn't read, or that changed during it.
    retry: ChangeSet,
    last_warning: Option<(String, Instant)>,
    records: SaveRecords,
    /// When the writers were stopped, as of the last check. A new value triggers a save.
    last_quiesced_at: Option<Timestamp>,
    /// Whether a full save is still due because the writers were stopped.
    is_full_save_due: bool,
    key_offered_at: Option<Instant>,
    /// The owner's rules, as of the last save.
    rules: Option<OwnerRules>,
    /// When the excluded files were last measured, and the rules at that time.
    measured_excluded: Option<(Instant, OwnerRules)>,
    measured_pending_at: Option<Instant>,
}

/// Result of a successful save, for the schedule.
struct FinishedSave {
    /// Upper bound on the delay from the upload limit.
    throttled: Duration,
    is_full: bool,
    /// Whether no snapshot was taken.
    is_unchanged: bool,
}

impl FileBackup {
    fn new(settings: FilesSettings) -> Self {
        let status = FilesStatus::read(&settings.layout).ok().flatten().unwrap_or_default();
        Self {
            settings,
            schedule: Schedule::new(Instant::now()),
            status,
            saver: None,
            saved_token: None,
            retry: ChangeSet::default(),
            last_warning: None,
            records: SaveRecords::default(),
            last_quiesced_at: None,
            is_full_save_due: false,
            key_offered_at: None,
            rules: None,
            measured_excluded: None,
            measured_pending_at: None,
        }
    }

    /// Saves until this machine has been replaced or deleted.
    async fn run(&mut self) -> Result<(), Failure> {
        loop {
            self.check_and_save().await?;
            self.wait_for_next_check().await;
        }
    }

    async fn wait_for_next_check(&self) {
        let has_changes = self.schedule.changed_since().is_some();
        let end = Instant::now() + if has_changes { SETTLE_INTERVAL } else { CHECK_INTERVAL };
        let request = self.settings.layout.request(SAVE_REQUEST);
        loop {
            tokio::time::sleep(REQUEST_POLL_INTERVAL).await;
            if request.exists() || Instant::now() >= end {
                return;
            }
        }
    }

    /// Fetches changes from the watcher and saves them if a save is due.
    async fn check_and_save(&mut self) -> Result<(), Failure> {
        if self.settings.layout.superseded().exists() {
            return Err(superseded());
        }
        self.take_requests();
        // A save that starts now includes everything written before this time.
        let checked_at = clock::now_ms();
        if self.status.correct_future_times(checked_at) {
            tracing::warn!("clock was ahead; correcting recorded times and requesting a save");
            self.schedule.request();
            self.write_status();
        }
        let sockets = self.settings.layout.watch_sockets();
        let reply = changes::request_changes(&sockets, self.saved_token.clone()).await;
        let observation = changes::to_observation(&reply);
        let scope = self.schedule.decide(observation, Instant::now());
        self.record_changed_since(checked_at);
        self.measure_pending(reply.as_ref().ok()).await;
        if scope == SaveScope::Nothing {
            return Ok(());
        }
        let start = SaveStart { checked_at, started_at: Instant::now() };
        let rules = read_rules(&self.settings.layout);
        // New rules apply to unchanged directories, too.
        let scope = if self.rules.as_ref() == Some(&rules) { scope } else { SaveScope::Everything };
        self.rules = Some(rules);
        match self.save(scope, reply.ok(), start).await {
            Ok(FinishedSave { throttled, is_full, is_unchanged }) => {
                // Count only the work: a save that mostly waits for the upload limit isn't slow.
                let duration = start.started_at.elapsed().saturating_sub(throttled);
                self.schedule.record_success(scope, is_unchanged, duration, Instant::now());
                if is_full || scope == SaveScope::Everything {
                    // After the final save, the platform checks that it has the key.
                    self.offer_key(self.last_quiesced_at.is_some()).await;
                }
                self.is_full_save_due &= !is_full;
                if self.is_full_save_due {
                    self.schedule.request_everything();
                }
            }
            // The save may have failed because another machine has replaced this one. Retry until a heartbeat confirms
            // the replacement, or the platform returns the slot to this machine.
            Err(error) => {
                // The saver's view of the repository may be stale, and new rules haven't been applied.
                (self.saver, self.rules) = (None, None);
                if error.is_withdrawn() {
                    self.settings = FilesSettings::read(self.settings.layout.clone())?;
                }
                // The platform waits only a few minutes for a machine's final save.
                let is_awaited = self.last_quiesced_at.is_some();
                self.schedule.record_failure(start.started_at.elapsed(), is_awaited, Instant::now());
                self.record_failure(&error, start);
            }
        }
        Ok(())
    }

    /// Consumes a pending save request. Once this machine's writers have been stopped, also requests a save and then a
    /// full one: the snapshot may be the machine's final one, and the watcher doesn't report writes through a hard link
    /// outside the home directory.
    fn take_requests(&mut self) {
        let layout = &self.settings.layout;
        let quiesced_at = Quiesce::read(layout).ok().flatten().and_then(|quiesce| quiesce.quiesced_at);
        if quiesced_at.is_some() && quiesced_at != self.last_quiesced_at {
            self.schedule.request();
            self.is_full_save_due = true;
        }
        self.last_quiesced_at = quiesced_at;
        if std::fs::remove_file(layout.request(SAVE_REQUEST)).is_ok() {
            self.schedule.request();
        }
    }

    /// Saves the home directory and advances the pointer to the snapshot.
    async fn save(
        &mut self,
        scope: SaveScope,
        reply: Option<ChangesReply>,
        start: SaveStart,
    ) -> Result<FinishedSave, SaveError> {
        self.ensure_home_is_complete()?;
        let checks = FileChecks::read(&self.settings.layout).map_err(AccessError::File)?;
        let is_repair = self.status.needs_repair(checks.damage_found_at);
        // A requested save must not succeed based on a stale view of the store.
        let should_check_store = self.schedule.is_requested() || scope == SaveScope::Everything;
        let open = match self.saver.take().filter(|_| !is_repair) {
            Some(open) if !should_check_store || open.is_pointer_current(&self.settings).await? => open,
            _ => {
                let (open, key_error) = OpenSaver::open(&self.settings).await?;
                self.status.record_key(key_error.as_ref());
                open
            }
        };
        let open = self.saver.insert(open);
        let lost_snapshot = if should_check_store { open.find_lost_parent().await? } else { None };
        if should_check_store {
            open.saver.require_index_check();
        }
        open.saver.set_lost_snapshot(lost_snapshot.or(checks.damaged_snapshot()));
        let paths = reply.as_ref().and_then(|reply| reply.paths.as_ref());
        let options = open.saver.options_mut();
        options.origin = self.settings.origin();
        let rules = self.rules.clone().unwrap_or_default();
        // A caller is waiting for a requested save, so postpone measuring again unless the rules have changed.
        let can_measure = !self.schedule.is_requested();
        options.should_measure_excluded = match &self.measured_excluded {
            Some((_, measured)) if *measured != rules => true,
            Some((at, _)) => can_measure && at.elapsed() >= EXCLUDED_MEASURE_INTERVAL,
            None => true,
        };
        self.status.invalid_rules = set_rules(&mut options.exclusions, &rules);
        // Content that is only in corrupt packs is written again.
        open.saver.set_damaged_packs(checks.damaged_packs());
        let scope = if is_repair { SaveScope::Everything } else { scope };
        // With a parent, currently unreadable entries would still refer to the lost part of the index, which the
        // repair's snapshot must not do.
        let parent = open.parent.clone().filter(|_| !(is_repair && checks.is_index_damaged()));
        let (result, is_full) = match (scope, parent) {
            // The changes since another machine's snapshot are unknown.
            (SaveScope::Changes, Some(parent)) if open.is_parent_from_this_machine => {
                let mut changed = changes::unwatched_changes(&self.settings.layout.user_home());
                changed.merge(self.retry.clone());
                changed.merge(changes::watched_changes(paths));
                (open.saver.save_changes(parent, changed).await?, false)
            }
            (_, parent) => (open.saver.save(parent).await?, true),
        };
        let token = reply.map(|reply| reply.token);
        let mut passes = SavePasses::new(result, is_full, token);
        passes.repeat(&mut open.saver, &self.settings.layout.watch_sockets()).await?;
        let SavePasses { result: saved, is_full, token, .. } = passes;
        failpoint::trigger("files.service.saved")?;
        open.parent = Some((saved.id, saved.snapshot.clone()));
        open.is_parent_from_this_machine = true;
        let id = saved.id.to_string();
        if open.pointer_target.as_ref() != Some(&id) {
            let snapshot = FilesSnapshotRef {
                id: id.clone(),
                machine_id: self.settings.identity.machine,
                epoch: self.settings.epoch(),
                taken_at: start.checked_at,
            };
            files_pointer::advance(&self.settings.bucket, &self.settings.slot, &snapshot).await?;
            open.pointer_target = Some(id);
        }
        failpoint::trigger("files.service.advanced")?;
        // Without a reply there's no token, so the watcher will report that anything may have changed.
        self.saved_token = token;
        if is_repair {
            self.record_repair(checks.damage_found_at);
        }
        self.record_saved(&saved, is_full, start);
        Ok(FinishedSave { throttled: saved.throttled, is_full, is_unchanged: saved.is_unchanged })
    }

    /// Records that a save has reread all files because of corruption, and requests verification of the result.
    fn record_repair(&mut self, damage_found_at: Option<Timestamp>) {
        tracing::info!("reread all files because part of the file backup is corrupt");
        self.status.repaired_damage_found_at = damage_found_at;
        let request = self.settings.layout.request(verify::REQUEST);
        if let Err(error) = fsx::write_atomic(&request, b"", 0o644) {
            tracing::warn!(error = %format_chain(&error), "cannot request file-backup verification");
        }
    }

    /// Sends the key to the platform, at most once a day unless `is_required`.
    async fn offer_key(&mut self, is_required: bool) {
        if !is_required && self.key_offered_at.is_some_and(|at| at.elapsed() < KEY_OFFER_INTERVAL) {
            return;
        }
        let offered = self.settings.offer_key().await;
        self.status.record_key(offered.as_ref().err());
        self.write_status();
        match offered {
            Ok(()) => self.key_offered_at = Some(Instant::now()),
            Err(error) => {
                tracing::debug!(error = %format_chain(&error), "cannot send the file-backup key to the platform");
            }
        }
    }

    /// Refuses to save a home directory whose restore failed: the new snapshot would hide earlier ones.
    fn ensure_home_is_complete(&self) -> Result<(), SaveError> {
        match RestoreOutcome::read(&self.settings.layout).map_err(AccessError::File)? {
            Some(RestoreOutcome { error: Some(_), .. }) => Err(AccessError::NotRestored.into()),
            _ => Ok(()),
        }
    }

    fn record_changed_since(&mut self, checked_at: Timestamp) {
        let is_changed = self.schedule.changed_since().is_some();
        if is_changed == self.status.changed_since.is_some() {
            return;
        }
        self.status.changed_since = is_changed.then_some(checked_at);
        self.write_status();
    }

    /// Estimates the size of changes that have been unsaved for at least [`MIN_PENDING_AGE`], at most once a minute.
    async fn measure_pending(&mut self, reply: Option<&ChangesReply>) {
        let since = self.schedule.changed_since();
        let is_overdue = since.is_some_and(|since| since.elapsed() >= MIN_PENDING_AGE);
        if !is_overdue || self.measured_pending_at.is_some_and(|at| at.elapsed() < PENDING_MEASURE_INTERVAL) {
            return;
        }
        self.measured_pending_at = Some(Instant::now());
        // Without the watcher's paths, the size is unknown.
        let bytes = match reply.and_then(|reply| reply.paths.as_ref()) {
            Some(paths) => {
                let mut changed = changes::watched_changes(Some(paths));
                changed.merge(self.retry.clone());
                let (layout, since) = (self.settings.layout.clone(), self.status.saved_until);
                let estimate = move || {
                    let mut exclusions = Exclusions::default();
                    set_rules(&mut exclusions, &read_rules(&layout));
                    estimate_pending_bytes(&layout.user_home(), &changed, &exclusions, since)
                };
                tokio::task::spawn_blocking(estimate).await.ok()
            }
            None => None,
        };
        if bytes != self.status.pending_bytes {
            self.status.pending_bytes = bytes;
            self.write_status();
        }
    }

    fn record_saved(&mut self, saved: &SaveResult, is_full: bool, start: SaveStart) {
        self.retry = saved.retry.clone();
        if saved.counts.excluded_sizes.is_some() {
            self.measured_excluded = Some((Instant::now(), self.rules.clone().unwrap_or_default()));
        }
        // Once the writers are stopped, only a full save is guaranteed to contain everything they wrote.
        let quiesced_at =
            Quiesce::read(&self.settings.layout).ok().flatten().and_then(|quiesce| quiesce.quiesced_at);
        let saved_until = match quiesced_at {
            Some(quiesced_at) if !is_full && !self.has_final_save(quiesced_at) => {
                start.checked_at.min(quiesced_at - SignedDuration::from_millis(1))
            }
            _ => start.checked_at,
        };
        self.status.record_saved(saved, is_full, saved_until);
        self.write_status();
        // Appending to `backup.jsonl` would itself be an unsaved change, which a final backup must not leave behind.
        if quiesced_at.is_none() {
            let (layout, bytes) = (&self.settings.layout, self.status.bytes);
            self.records.record_success(layout, saved, bytes, start);
        }
        if !saved.is_unchanged {
            tracing::info!(
                snapshot = %saved.id,
                files_read = saved.counts.files_read,
                uploaded_bytes = saved.uploaded_bytes,
                is_full,
                "saved the owner's files"
            );
        }
    }

    /// Whether a full save has succeeded since the writers were stopped at `quiesced_at`.
    fn has_final_save(&self, quiesced_at: Timestamp) -> bool {
        self.last_quiesced_at == Some(quiesced_at) && !self.is_full_save_due
    }

    fn record_failure(&mut self, error: &SaveError, start: SaveStart) {
        let text = format_chain(error);
        let is_repeated = |(last, at): &(String, Instant)| *last == text && at.elapsed() < WARNING_INTERVAL;
        if !self.last_warning.as_ref().is_some_and(is_repeated) {
            tracing::warn!(error = text, "cannot save the owner's files; retrying");
            self.last_warning = Some((text.clone(), Instant::now()));
        }
        let now = clock::now_ms();
        self.status.failing_since.get_or_insert(now);
        self.status.failed_at = Some(now);
        self.records.record_failure(&self.settings.layout, &text, start);
        self.status.error = Some(text);
        self.write_status();
    }

    fn write_status(&mut self) {
        // A full disk must not stop the backup.
        if let Err(error) = self.status.write(&self.settings.layout) {
            tracing::warn!(error = %format_chain(&error), "cannot write the file-backup status");
        }
    }
}

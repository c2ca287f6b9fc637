//! Checks whether an outgoing machine has taken its final backup.
//!
//! The pointer alone is not sufficient proof, because every working session for the slot can write it, including a
//! replaced machine's. The snapshot must be complete, its sidecar must match the pointer, and the machine,
//! authenticated by its registered key, must report the snapshot as its own. The last condition does not apply to hosts
//! whose release does not report backups.

use jiff::{SignedDuration, Timestamp};

use super::progress::FinalBackupProgress;
use crate::db::machine_row::MachineRow;
use crate::operations::host_call::{BackupOutcome, BackupProgress};
use crate::operations::leased::LeasedOperation;
use svc_base::error_chain::format_chain;
use svc_store::key::{self, SlotPrefix};
use svc_store::pointer::SnapshotRef;
use svc_store::{pointer_io, snapshot};

/// How far a snapshot's time may be ahead of the host's clock, which is extrapolated from an earlier response.
const MAX_HOST_CLOCK_DRIFT: SignedDuration = SignedDuration::from_mins(2);

/// The host's report on its own backups.
#[derive(Debug)]
pub enum HostReport {
    Backups(BackupProgress),
    /// The host's release does not report backups.
    Unsupported,
}

/// The time range, by the host's clock, in which the machine's final backup could have been taken.
#[derive(Debug, Clone, Copy)]
pub struct SnapshotWindow {
    /// The writers had stopped by this time, so every later snapshot contains all data.
    pub since: Timestamp,
    /// The current time, by the host's clock.
    pub now: Timestamp,
}

impl SnapshotWindow {
    fn contains(self, at: Timestamp) -> bool {
        let latest = self.now.checked_add(MAX_HOST_CLOCK_DRIFT).unwrap_or(Timestamp::MAX);
        (self.since..=latest).contains(&at)
    }
}

/// Returns the time of the final backup, if the store and the machine agree on one. The store is queried only if the
/// host reports a recent backup, or does not report backups at all.
pub async fn find_final_backup(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    progress: &FinalBackupProgress,
    report: &HostReport,
    now: Timestamp,
) -> Option<Timestamp> {
    let window = progress.snapshot_window(now)?;
    if !may_have_final_backup(report, window) {
        return None;
    }
    let (bucket, slot) = (&leased.platform.bucket, SlotPrefix::new(&machine.user, &machine.slot));
    let read = pointer_io::read(bucket, &slot).await.inspect_err(|error| {
        tracing::warn!(machine = %machine.id, error = %format_chain(error), "cannot read the snapshot pointer");
    });
    let pointer = read.ok()?.filter(pointer_io::PointerRead::has_latest)?;
    let snapshot_ref = pointer.value.snapshot?;
    if !is_final_snapshot_of(machine, &snapshot_ref, window) || !is_reported(report, &snapshot_ref) {
        return None;
    }
    let sidecar = snapshot::load(bucket, &slot, &snapshot_ref.key).await;
    let matches_sidecar = sidecar
        .as_ref()
        .is_ok_and(|record| record.snapshot_ref() == SnapshotRef { etag: None, ..snapshot_ref.clone() });
    if let Err(error) = &sidecar {
        tracing::warn!(machine = %machine.id, key = snapshot_ref.key, error = %format_chain(error),
            "the snapshot that the pointer names cannot be used");
    } else if !matches_sidecar {
        tracing::warn!(machine = %machine.id, key = snapshot_ref.key,
            "the pointer does not match the snapshot's sidecar");
    }
    matches_sidecar.then_some(snapshot_ref.taken_at)
}

fn reported_backup(report: &HostReport) -> Option<&BackupOutcome> {
    let HostReport::Backups(host) = report else { return None };
    host.last.as_ref().filter(|last| last.status == "success")
}

/// Returns whether, according to the report, a final backup may exist. If so, the store must be read.
fn may_have_final_backup(report: &HostReport, window: SnapshotWindow) -> bool {
    let key = reported_backup(report).and_then(|last| last.key.as_deref());
    let is_recent = || key.and_then(key::taken_at).is_some_and(|at| window.contains(at));
    matches!(report, HostReport::Unsupported) || is_recent()
}

fn is_reported(report: &HostReport, snapshot_ref: &SnapshotRef) -> bool {
    let key = reported_backup(report).and_then(|last| last.key.as_ref());
    matches!(report, HostReport::Unsupported) || key == Some(&snapshot_ref.key)
}

fn is_final_snapshot_of(machine: &MachineRow, snapshot_ref: &SnapshotRef, window: SnapshotWindow) -> bool {
    snapshot_ref.machine_id == machine.id
        && snapshot_ref.epoch >= machine.epoch
        && window.contains(snapshot_ref.taken_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time_of_day(text: &str) -> Timestamp {
        format!("2026-01-02T{text}Z").parse().unwrap()
    }

    fn success(key: Option<&str>) -> HostReport {
        let last = BackupOutcome {
            status: "success".to_owned(),
            key: key.map(str::to_owned),
            ..BackupOutcome::default()
        };
        HostReport::Backups(BackupProgress { last: Some(last), ..BackupProgress::default() })
    }

    #[test]
    fn window_ends_shortly_after_host_clock() {
        let window = SnapshotWindow { since: time_of_day("03:00:00"), now: time_of_day("03:10:00") };
        for (time, expected) in
            [("02:59:59", false), ("03:00:00", true), ("03:12:00", true), ("03:12:01", false)]
        {
            assert_eq!(window.contains(time_of_day(time)), expected, "{time}");
        }
    }

    #[test]
    fn final_backup_requires_report_of_recent_snapshot() {
        let window = SnapshotWindow { since: time_of_day("03:00:00"), now: time_of_day("03:10:00") };
        let key = |time: &str| format!("system/db/snapshots/2026-01-02T{time}.000Z-1.dump");
        let (earlier, recent) = (key("02-00-00"), key("03-05-00"));
        assert!(may_have_final_backup(&success(Some(&recent)), window));
        assert!(may_have_final_backup(&HostReport::Unsupported, window));
        for report in [
            success(Some(&earlier)),
            success(Some("x")),
            success(None),
            HostReport::Backups(BackupProgress::default()),
        ] {
            assert!(!may_have_final_backup(&report, window), "{report:?}");
        }
    }
}

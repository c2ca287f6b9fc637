//! Whether a machine that leaves has taken its last backup.
//!
//! The invariant: the pointer alone is not believed, because every store session of the slot can write it, also one of a
//! machine that was replaced. The snapshot must be there whole, its side record must say the same as the pointer, and the
//! machine must name it as its own, by the key that it registered. Only a host whose release does not report its backups
//! is believed without that.

use jiff::{SignedDuration, Timestamp};

use super::progress::Progress;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::operations::ask_host::{BackupEnd, BackupProgress};
use crate::platform::operations::held::Held;
use crate::store::key::{self, SlotPrefix};
use crate::store::pointer::SnapshotRef;
use crate::store::{pointer_io, snapshot};

/// How far a host's clock may be ahead of what its answer to the request lets expect.
const MAX_CLOCK_STEP: SignedDuration = SignedDuration::from_mins(2);

/// What the host says of its own backups.
#[derive(Debug)]
pub enum HostReport {
    Backups(BackupProgress),
    /// Its release does not say.
    Unsupported,
}

/// When a last backup of the machine can have been taken, by the clock of its host.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// The writers had stopped: every snapshot since holds all.
    pub since: Timestamp,
    /// The host's clock now.
    pub now: Timestamp,
}

impl Window {
    fn contains(self, at: Timestamp) -> bool {
        let latest = self.now.checked_add(MAX_CLOCK_STEP).unwrap_or(Timestamp::MAX);
        (self.since..=latest).contains(&at)
    }
}

/// When the last backup was taken, if the store and the machine agree that there is one. The store is read only when the
/// host reports one.
pub async fn find(
    held: &Held<'_>,
    machine: &MachineRow,
    progress: &Progress,
    report: &HostReport,
    now: Timestamp,
) -> Option<Timestamp> {
    let window = progress.snapshot_window(now)?;
    if !may_have_saved(report, window) {
        return None;
    }
    let (bucket, slot) = (&held.platform.bucket, SlotPrefix::new(&machine.user, &machine.slot));
    let pointer = pointer_io::read(bucket, &slot).await.ok()?.filter(pointer_io::PointerRead::has_latest)?;
    let named = pointer.value.snapshot?;
    if !is_of(machine, &named, window) || !names(report, &named) {
        return None;
    }
    let side = snapshot::by_key(bucket, &slot, &named.key).await;
    let is_whole =
        side.as_ref().is_ok_and(|side| side.named() == SnapshotRef { etag: None, ..named.clone() });
    if !is_whole {
        tracing::warn!(machine = %machine.id, key = named.key, "the pointer names a snapshot that is not as it says");
    }
    is_whole.then_some(named.taken_at)
}

fn reported(report: &HostReport) -> Option<&BackupEnd> {
    let HostReport::Backups(host) = report else { return None };
    host.last.as_ref().filter(|last| last.status == "success")
}

/// Whether reading the store can show a last backup.
fn may_have_saved(report: &HostReport, window: Window) -> bool {
    let key = reported(report).and_then(|last| last.key.as_deref());
    let is_recent = || key.and_then(key::taken_at).is_some_and(|at| window.contains(at));
    matches!(report, HostReport::Unsupported) || is_recent()
}

fn names(report: &HostReport, named: &SnapshotRef) -> bool {
    let key = reported(report).and_then(|last| last.key.as_ref());
    matches!(report, HostReport::Unsupported) || key == Some(&named.key)
}

fn is_of(machine: &MachineRow, named: &SnapshotRef, window: Window) -> bool {
    named.machine_id == machine.id && named.epoch >= machine.epoch && window.contains(named.taken_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        format!("2026-01-02T{text}Z").parse().unwrap()
    }

    fn success(key: Option<&str>) -> HostReport {
        let last =
            BackupEnd { status: "success".to_owned(), key: key.map(str::to_owned), ..BackupEnd::default() };
        HostReport::Backups(BackupProgress { last: Some(last), ..BackupProgress::default() })
    }

    #[test]
    fn window_ends_a_little_after_the_hosts_clock() {
        let window = Window { since: at("03:00:00"), now: at("03:10:00") };
        for (time, expected) in
            [("02:59:59", false), ("03:00:00", true), ("03:12:00", true), ("03:12:01", false)]
        {
            assert_eq!(window.contains(at(time)), expected, "{time}");
        }
    }

    #[test]
    fn store_is_read_only_for_a_backup_that_the_host_reports() {
        let window = Window { since: at("03:00:00"), now: at("03:10:00") };
        let key = |time: &str| format!("system/db/snapshots/2026-01-02T{time}.000Z-1.dump");
        let (earlier, recent) = (key("02-00-00"), key("03-05-00"));
        assert!(may_have_saved(&success(Some(&recent)), window));
        assert!(may_have_saved(&HostReport::Unsupported, window));
        for report in [
            success(Some(&earlier)),
            success(Some("x")),
            success(None),
            HostReport::Backups(BackupProgress::default()),
        ] {
            assert!(!may_have_saved(&report, window), "{report:?}");
        }
    }
}

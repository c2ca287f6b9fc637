//! File-backup verification and drill results, and the schedule for verifying pack shares.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Deserializer, Serialize};
use svc_base::clock;
use svc_base::fsx::{self, FileError};
use svc_base::quantity::pluralize;
use svc_files::Id;
use svc_files::verify::{PackShare, VerifyReport};

use crate::system::layout::Layout;

const CHECKS_FILE: &str = "checks.json";
const FORMAT_VERSION: u32 = 1;
/// Drills run weekly, after a verification. Verifications are daily but not exactly 24 hours apart, so subtract half a
/// day.
const DRILL_INTERVAL: SignedDuration = SignedDuration::from_hours(7 * 24 - 12);
/// An attention item is raised once the daily checks have been failing for this long.
const FAILURE_REPORT_DELAY: SignedDuration = SignedDuration::from_hours(36);
/// Maximum number of overdue shares verified per run, to catch up after missed days.
const MAX_OVERDUE_SHARES: usize = 3;
/// Value of `damaged_latest` for a damaged index.
pub const DAMAGED_INDEX: &str = "index";
/// Maximum number of affected files listed in a message.
const MAX_NAMED_FILES: usize = 5;
/// Minimum interval between repairs of the latest snapshot.
const MIN_REPAIR_INTERVAL: SignedDuration = SignedDuration::from_hours(1);
const DAY: SignedDuration = SignedDuration::from_hours(24);

/// Contents of `/var/lib/svc/files/checks.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FileChecks {
    version: u32,
    /// Last verification time of each pack share. `None` means never.
    share_times: Vec<Option<Timestamp>>,
    pub verify: Option<VerifyResult>,
    pub drill: Option<DrillResult>,
    /// Times of the last successful verification and drill.
    #[serde(with = "clock::wire_option")]
    verified_at: Option<Timestamp>,
    #[serde(with = "clock::wire_option")]
    drilled_at: Option<Timestamp>,
    /// Time of the first failed verification or drill since both last succeeded.
    #[serde(with = "clock::wire_option")]
    failing_since: Option<Timestamp>,
    /// Reason that the latest snapshot can't be restored completely, or can't be restored with `restic`.
    pub unreadable: Option<String>,
    /// Part found missing or corrupt by a verification, which a save can replace: the latest snapshot's id, or the name
    /// of the pointer, index or key file.
    damaged_latest: Option<String>,
    /// When `damaged_latest` was last recorded.
    #[serde(with = "clock::wire_option")]
    latest_damaged_at: Option<Timestamp>,
    /// Damaged packs, with the number of blobs that have no intact copy in another pack. Blobs aren't listed: millions
    /// can be damaged, and many programs read this file often.
    #[serde(deserialize_with = "read_damaged")]
    pub damaged: BTreeMap<String, u64>,
    /// When a run last found new damage: a damaged pack, more damaged blobs in a known one, or the damage in
    /// `damaged_latest`.
    #[serde(with = "clock::wire_option")]
    pub damage_found_at: Option<Timestamp>,
    /// First few affected files. `None` if not yet known.
    pub affected: Option<Vec<AffectedFile>>,
    pub affected_snapshots: u64,
    pub has_more_affected: bool,
}

/// Result of the last verification.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VerifyResult {
    #[serde(with = "clock::wire_option")]
    pub at: Option<Timestamp>,
    pub packs: u64,
    pub bytes: u64,
    /// Number of damaged packs whose content is still readable, from these packs or others.
    #[serde(alias = "replaced")]
    pub recoverable: u64,
    /// Error that kept the verification from completing.
    pub error: Option<String>,
}

/// Result of the last drill.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DrillResult {
    #[serde(with = "clock::wire_option")]
    pub at: Option<Timestamp>,
    /// Number and size of the restored files, and how many of them were compared with the current files.
    pub files: u64,
    pub bytes: u64,
    pub compared: u64,
    /// Number of files that differ in content, mode or time from a current file unchanged since the save, and the paths
    /// of the first few.
    pub differing_count: u64,
    pub differing: Vec<String>,
    /// Error that kept the drill from completing.
    pub error: Option<String>,
    /// Whether the drill couldn't complete because the backup is damaged.
    pub is_damaged: bool,
}

/// A file that depends on a damaged blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AffectedFile {
    pub path: String,
    /// Times of the first and last snapshots in which the file is damaged.
    #[serde(with = "clock::wire")]
    pub first: Timestamp,
    #[serde(with = "clock::wire")]
    pub last: Timestamp,
}

/// Deserializes the damaged-blob count of each pack. Earlier versions wrote a list of blobs.
fn read_damaged<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Blobs {
        Count(u64),
        Listed(Vec<String>),
    }
    let packs = BTreeMap::<String, Blobs>::deserialize(deserializer)?;
    let count = |blobs| match blobs {
        Blobs::Count(count) => count,
        Blobs::Listed(blobs) => blobs.len() as u64,
    };
    Ok(packs.into_iter().map(|(pack, blobs)| (pack, count(blobs))).collect())
}

impl FileChecks {
    /// Reads the file. Returns an empty value if it is missing, invalid or has a different format version.
    ///
    /// # Errors
    /// If the file exists but can't be read.
    pub fn read(layout: &Layout) -> Result<Self, FileError> {
        let text = fsx::read_if_exists(&layout.files_state().join(CHECKS_FILE))?;
        let checks = text.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        Ok(checks.filter(|checks| checks.version == FORMAT_VERSION).unwrap_or_default())
    }

    /// # Errors
    /// If the file can't be written.
    pub fn write(&mut self, layout: &Layout) -> Result<(), FileError> {
        self.version = FORMAT_VERSION;
        let dir = layout.files_state();
        std::fs::create_dir_all(&dir).map_err(FileError::wrap("create", &dir))?;
        let text = serde_json::to_vec(self).expect("plain fields serialize to JSON");
        fsx::write_atomic(&dir.join(CHECKS_FILE), &text, 0o644)
    }

    /// Divides the packs into `days` shares and selects all of them.
    pub fn select_all_shares(&mut self, days: u16) -> Vec<PackShare> {
        let count = self.set_share_count(days);
        (0..count).map(|index| PackShare { index, count }).collect()
    }

    fn set_share_count(&mut self, days: u16) -> u16 {
        let count = days.max(1);
        if self.share_times.len() != usize::from(count) {
            self.share_times = vec![None; usize::from(count)];
        }
        count
    }

    /// Selects the shares to verify now so that each is verified every `days` days: the least recently verified ones,
    /// plus those with damaged packs, which a save may have repaired.
    pub fn select_shares(&mut self, days: u16, now: Timestamp) -> Vec<PackShare> {
        let count = self.set_share_count(days);
        let mut indices: Vec<u16> = (0..count).collect();
        // A time in the future means that the clock was ahead. Treat such a share as never verified.
        let time = |index: &u16| self.share_times[usize::from(*index)].filter(|at| *at <= now);
        indices.sort_by_key(|index| (time(index), *index));
        let overdue_before = now - DAY * i32::from(count);
        // Never-verified shares aren't overdue: one per run covers them all within the interval.
        let is_overdue = |index: &&u16| time(index).is_some_and(|at| at <= overdue_before);
        let overdue = indices.iter().filter(is_overdue).count();
        let mut selected: BTreeSet<u16> =
            indices.into_iter().take(overdue.clamp(1, MAX_OVERDUE_SHARES)).collect();
        let damaged = self.damaged_packs();
        let has_damage =
            |index: &u16| damaged.iter().any(|pack| PackShare { index: *index, count }.contains(*pack));
        selected.extend((0..count).filter(has_damage));
        selected.into_iter().map(|index| PackShare { index, count }).collect()
    }

    pub fn record_verification(&mut self, result: VerifyResult, now: Timestamp) {
        // Copy the time before replacing the result: in files from earlier releases, only the result contains it.
        self.verified_at = self.verified_at();
        if result.error.is_none() {
            self.verified_at = Some(now);
        }
        self.verify = Some(result);
        self.update_failing_since(now);
    }

    /// Records that the latest snapshot (`part` is its id), its pointer, the index or the key file is missing or
    /// corrupt. A save then replaces it by rereading all files, but at most once per `MIN_REPAIR_INTERVAL`, in case the
    /// store loses each new snapshot.
    pub fn record_damaged_latest(&mut self, part: &str, now: Timestamp) {
        let is_recent = |at: Timestamp| at <= now && now.duration_since(at) < MIN_REPAIR_INTERVAL;
        if self.damaged_latest.as_deref() != Some(part) && !self.latest_damaged_at.is_some_and(is_recent) {
            self.damaged_latest = Some(part.to_owned());
            (self.latest_damaged_at, self.damage_found_at) = (Some(now), Some(now));
        }
    }

    /// Records that the pointer, the latest snapshot, the index and the key file are readable.
    pub fn record_readable(&mut self) {
        (self.unreadable, self.damaged_latest) = (None, None);
    }

    /// Whether part of the index is lost.
    pub fn is_index_damaged(&self) -> bool {
        self.damaged_latest.as_deref() == Some(DAMAGED_INDEX)
    }

    /// Returns the latest snapshot's id if that snapshot is missing or corrupt.
    pub fn damaged_snapshot(&self) -> Option<Id> {
        self.damaged_latest.as_ref()?.parse().ok()
    }

    /// Whether a save might repair damage by re-uploading data.
    pub fn has_repairable_damage(&self) -> bool {
        !self.damaged.is_empty() || self.damaged_latest.is_some()
    }

    /// Records a drill. If it didn't complete, differences and damage found by an earlier drill are retained.
    pub fn record_drill(&mut self, mut drill: DrillResult, now: Timestamp) {
        self.drilled_at = self.drilled_at();
        if drill.error.is_none() {
            self.drilled_at = Some(now);
        } else if let Some(earlier) = self.drill.take() {
            (drill.differing_count, drill.compared) = (earlier.differing_count, earlier.compared);
            drill.differing = earlier.differing;
            if earlier.is_damaged && !drill.is_damaged {
                (drill.error, drill.is_damaged) = (earlier.error, true);
            }
        }
        self.drill = Some(drill);
        self.update_failing_since(now);
    }

    fn update_failing_since(&mut self, now: Timestamp) {
        let is_failing = self.find_error().is_some();
        self.failing_since = is_failing.then(|| self.failing_since.map_or(now, |since| since.min(now)));
    }

    fn find_error(&self) -> Option<&str> {
        let verify = self.verify.as_ref().and_then(|verify| verify.error.as_deref());
        verify.or_else(|| self.drill.as_ref().and_then(|drill| drill.error.as_deref()))
    }

    /// Returns when a verification last succeeded. Earlier releases recorded only the last result.
    pub fn verified_at(&self) -> Option<Timestamp> {
        self.verified_at.or_else(|| self.verify.as_ref().filter(|verify| verify.error.is_none())?.at)
    }

    /// Returns when a drill last succeeded.
    pub fn drilled_at(&self) -> Option<Timestamp> {
        self.drilled_at.or_else(|| self.drill.as_ref().filter(|drill| drill.error.is_none())?.at)
    }

    /// Describes the check failure if it has lasted for `FAILURE_REPORT_DELAY`.
    pub fn find_failure(&self, now: Timestamp) -> Option<String> {
        let since = self.failing_since.filter(|since| now.duration_since(*since) >= FAILURE_REPORT_DELAY)?;
        Some(format!("its checks have failed since {}: {}", clock::rfc3339_ms(since), self.find_error()?))
    }

    pub fn is_drill_due(&self, now: Timestamp) -> bool {
        let last = self.drill.as_ref().filter(|drill| drill.error.is_none()).and_then(|drill| drill.at);
        // A time in the future means that the clock was ahead.
        last.is_none_or(|at| at > now || now.duration_since(at) >= DRILL_INTERVAL)
    }

    /// Records a verified share.
    pub fn record_share(&mut self, share: PackShare, report: &VerifyReport, now: Timestamp) {
        let before = self.damaged.clone();
        self.damaged.retain(|pack, _| pack.parse().is_ok_and(|pack: Id| !share.contains(pack)));
        for damaged in &report.damaged {
            // For a pack in another share, the report lists only some of its damaged blobs.
            let blobs = self.damaged.entry(damaged.pack.to_string()).or_default();
            *blobs = (*blobs).max(damaged.blobs.len() as u64);
        }
        if self.damaged != before {
            self.affected = None;
        }
        let is_new = |(pack, blobs): (&String, &u64)| before.get(pack).is_none_or(|earlier| blobs > earlier);
        if self.damaged.is_empty() {
            self.damage_found_at = None;
        } else if self.damaged.iter().any(is_new) {
            self.damage_found_at = Some(now);
        }
        if let Some(time) = self.share_times.get_mut(usize::from(share.index)) {
            *time = Some(now);
        }
    }

    /// Describes the most serious known problem, if any: why the latest snapshot can't be restored completely or with
    /// `restic`, damaged packs, or a drill result.
    pub fn find_problem(&self) -> Option<String> {
        if let Some(reason) = &self.unreadable {
            return Some(reason.clone());
        }
        if !self.damaged.is_empty() {
            return Some(self.describe_damage());
        }
        let drill = self.drill.as_ref()?;
        if let Some(error) = drill.error.as_ref().filter(|_| drill.is_damaged) {
            return Some(format!("a sample of the files could not be restored: {error}"));
        }
        let differing = drill.differing.first()?;
        let count = format!("{} of {} compared files", drill.differing_count, drill.compared);
        Some(format!("{count} differ from those on the machine (first: {differing})"))
    }

    /// Describes the damaged packs and the files they affect.
    fn describe_damage(&self) -> String {
        let packs = pluralize(self.damaged.len() as u64, "damaged pack");
        let Some(affected) = &self.affected else {
            return format!("{packs}; the affected files are not known yet");
        };
        let files: Vec<String> = affected
            .iter()
            .take(MAX_NAMED_FILES)
            .map(|file| {
                let (first, last) = (clock::rfc3339_ms(file.first), clock::rfc3339_ms(file.last));
                format!("{} from {first} to {last}", file.path)
            })
            .collect();
        if files.is_empty() {
            return format!("{packs}, not needed by any snapshot");
        }
        let snapshots = pluralize(self.affected_snapshots, "snapshot");
        let has_more = self.has_more_affected || affected.len() > MAX_NAMED_FILES;
        let others = if has_more { "; and others" } else { "" };
        format!("{packs}, needed by {snapshots}: {}{others}", files.join("; "))
    }

    pub fn damaged_packs(&self) -> HashSet<Id> {
        self.damaged.keys().filter_map(|pack| pack.parse().ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use svc_files::verify::DamagedPack;

    use super::*;

    fn at(day: i32) -> Timestamp {
        Timestamp::UNIX_EPOCH + DAY * day
    }

    proptest! {
        /// Once all shares have been verified, none goes unverified for longer than the interval plus the missed days.
        #[test]
        fn every_share_is_verified_within_interval(days in 1_u16..40, missed in 0_i32..3) {
            let mut checks = FileChecks::default();
            let mut day = 0;
            for run in 0..200_i32 {
                day += if run == 100 { 1 + missed } else { 1 };
                for share in checks.select_shares(days, at(day)) {
                    checks.record_share(share, &VerifyReport::default(), at(day));
                }
                let oldest = checks.share_times.iter().min().copied().flatten();
                if run >= i32::from(days) {
                    let age = at(day).duration_since(oldest.expect("all are verified")).as_hours() / 24;
                    prop_assert!(age <= i64::from(days) + i64::from(missed), "{age} days");
                }
            }
        }
    }

    #[test]
    fn select_shares_treats_future_times_as_never_verified() {
        let mut checks = FileChecks { share_times: vec![Some(at(400)); 3], ..FileChecks::default() };
        for (day, index) in [(1, 0), (2, 1), (3, 2), (4, 0)] {
            let share = PackShare { index, count: 3 };
            assert_eq!(checks.select_shares(3, at(day)), [share], "day {day}");
            checks.record_share(share, &VerifyReport::default(), at(day));
        }
    }

    #[test]
    fn damage_is_retained_until_its_share_verifies() {
        let mut checks = FileChecks::default();
        let (pack, blob) = ("ab".repeat(32), "cd".repeat(32));
        let damaged = |blobs: &[&str]| VerifyReport {
            damaged: vec![DamagedPack {
                pack: pack.parse().unwrap(),
                reason: "x".to_owned(),
                blobs: blobs.iter().map(|id| id.parse().unwrap()).collect(),
            }],
            ..VerifyReport::default()
        };
        let [share] = checks.select_shares(1, at(1))[..] else { panic!("expected one share") };
        checks.record_share(share, &damaged(&[&blob]), at(1));
        let one_blob = BTreeMap::from([(pack.clone(), 1)]);
        assert_eq!((checks.damage_found_at, &checks.damaged), (Some(at(1)), &one_blob));
        checks.record_share(share, &damaged(&[&blob]), at(2));
        assert_eq!(checks.damage_found_at, Some(at(1)), "no new damage");
        checks.record_share(share, &damaged(&[&blob, &"ef".repeat(32)]), at(3));
        assert_eq!(checks.damage_found_at, Some(at(3)));
        // Shares with damaged packs are verified on every run.
        let mut with_30_shares = FileChecks { damaged: checks.damaged.clone(), ..FileChecks::default() };
        let index = (0xabab % 30) as u16;
        assert!(with_30_shares.select_shares(30, at(4)).contains(&PackShare { index, count: 30 }));
        checks.record_share(share, &VerifyReport::default(), at(4));
        assert_eq!((checks.damage_found_at, checks.damaged.len()), (None, 0));
    }

    #[test]
    fn read_accepts_blob_lists_from_earlier_versions() {
        let text = r#"{"version":1,"damaged":{"ab":["cd","ef"]}}"#;
        let checks: FileChecks = serde_json::from_str(text).unwrap();
        assert_eq!(checks.damaged, BTreeMap::from([("ab".to_owned(), 2)]));
        let text = serde_json::to_string(&checks).unwrap();
        assert_eq!(serde_json::from_str::<FileChecks>(&text).unwrap(), checks);
    }

    #[test]
    fn find_failure_reports_only_persistent_failures() {
        let mut checks = FileChecks::default();
        checks.record_verification(VerifyResult::default(), at(0));
        let differing =
            DrillResult { differing_count: 1, differing: vec!["a".into()], ..DrillResult::default() };
        checks.record_drill(differing, at(0));
        assert_eq!(
            (checks.verified_at(), checks.drilled_at(), checks.find_failure(at(9))),
            (Some(at(0)), Some(at(0)), None)
        );
        for day in 1..=3 {
            let error = Some("the store denied access".to_owned());
            checks.record_verification(
                VerifyResult { error: error.clone(), ..VerifyResult::default() },
                at(day),
            );
            checks.record_drill(DrillResult { error, ..DrillResult::default() }, at(day));
            assert_eq!(checks.find_failure(at(day)).is_some(), day == 3, "day {day}");
        }
        assert_eq!((checks.verified_at(), checks.drilled_at()), (Some(at(0)), Some(at(0))));
        assert!(checks.find_problem().unwrap().contains("(first: a)"));
        checks.record_verification(VerifyResult::default(), at(4));
        checks.record_drill(DrillResult::default(), at(4));
        assert_eq!((checks.find_failure(at(9)), checks.find_problem()), (None, None));
    }

    #[test]
    fn find_problem_reports_drill_damage_immediately() {
        let mut checks = FileChecks::default();
        let failed = |is_damaged| DrillResult {
            error: Some("chunk ab is damaged".to_owned()),
            is_damaged,
            ..DrillResult::default()
        };
        checks.record_drill(failed(true), at(0));
        assert!(checks.find_problem().unwrap().contains("chunk ab is damaged"));
        checks.record_drill(failed(false), at(1));
        assert!(checks.find_problem().is_some(), "a later failure doesn't clear the damage");
        checks.record_drill(DrillResult::default(), at(2));
        assert_eq!(checks.find_problem(), None);
    }

    #[test]
    fn failed_check_keeps_success_time_of_earlier_release() {
        let mut checks = FileChecks {
            verify: Some(VerifyResult { at: Some(at(0)), ..VerifyResult::default() }),
            drill: Some(DrillResult { at: Some(at(0)), ..DrillResult::default() }),
            ..FileChecks::default()
        };
        let error = Some("the store denied access".to_owned());
        checks.record_verification(VerifyResult { error: error.clone(), ..VerifyResult::default() }, at(1));
        checks.record_drill(DrillResult { error, ..DrillResult::default() }, at(1));
        assert_eq!((checks.verified_at(), checks.drilled_at()), (Some(at(0)), Some(at(0))));
    }

    #[test]
    fn drill_is_due_after_a_week_and_after_a_failure() {
        let mut checks = FileChecks::default();
        assert!(checks.is_drill_due(at(0)));
        checks.drill = Some(DrillResult { at: Some(at(0)), ..DrillResult::default() });
        assert!(!checks.is_drill_due(at(6)));
        assert!(checks.is_drill_due(at(7)));
        assert!(checks.is_drill_due(at(-1)), "the clock was ahead during the last drill");
        checks.drill =
            Some(DrillResult { at: Some(at(0)), error: Some("x".into()), ..DrillResult::default() });
        assert!(checks.is_drill_due(at(1)));
    }
}

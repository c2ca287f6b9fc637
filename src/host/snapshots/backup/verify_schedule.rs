//! Selects the snapshots to read today, least recently tried first, so that each is re-read within a given number of
//! days. Performs no I/O.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

const DAY: SignedDuration = SignedDuration::from_hours(24);
/// Snapshots read more recently than this are skipped. Well under 24 hours, because reads are recorded when they
/// finish, so the next daily run starts less than a day later.
const MIN_READ_INTERVAL: SignedDuration = SignedDuration::from_hours(12);
/// Maximum daily shares per run when catching up after days without a run.
const MAX_SHARES_PER_RUN: usize = 3;

/// A snapshot and when it was last read in full, by its backup or by a later check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastRead {
    pub key: String,
    pub read_at: Timestamp,
    /// Last attempt: `read_at`, or the time of a later inconclusive read.
    pub tried_at: Timestamp,
}

/// Returns every snapshot with its last read time, or the time it was taken if no check has read it. Times after `now`
/// come from a clock that was ahead and are ignored; a snapshot with no other time is treated as never read.
///
/// `snapshots` pairs each key with the time the snapshot was taken. `checked_at` holds the last full read by a check,
/// and `failed_at` the last inconclusive one.
pub fn list_last_reads(
    snapshots: &[(String, Timestamp)],
    checked_at: &BTreeMap<String, Timestamp>,
    failed_at: &BTreeMap<String, Timestamp>,
    now: Timestamp,
) -> Vec<LastRead> {
    let last_read = |(key, taken_at): &(String, Timestamp)| {
        let times = [checked_at.get(key).copied(), Some(*taken_at)];
        let read_at = times.into_iter().flatten().find(|at| *at <= now).unwrap_or(Timestamp::UNIX_EPOCH);
        let failed_at = failed_at.get(key).copied().filter(|at| *at <= now);
        LastRead { key: key.clone(), read_at, tried_at: failed_at.map_or(read_at, |at| at.max(read_at)) }
    };
    snapshots.iter().map(last_read).collect()
}

/// Returns the keys of the snapshots to read today, in read order. A snapshot with an inconclusive read remains
/// overdue, but sorts by its last attempt so that it can't take up every day's share.
pub fn select_today(mut snapshots: Vec<LastRead>, now: Timestamp, within_days: u32) -> Vec<String> {
    let days = usize::try_from(within_days.max(1)).unwrap_or(usize::MAX);
    let daily_share = snapshots.len().div_ceil(days);
    snapshots.sort_by(|a, b| (a.tried_at, &a.key).cmp(&(b.tried_at, &b.key)));
    let overdue_before = now - DAY * i32::try_from(within_days.max(1)).unwrap_or(i32::MAX);
    let overdue = snapshots.iter().filter(|snapshot| snapshot.read_at <= overdue_before).count();
    let count = daily_share.max(overdue).min(daily_share.saturating_mul(MAX_SHARES_PER_RUN));
    let read_before = now - MIN_READ_INTERVAL;
    let candidates = snapshots.into_iter().filter(|snapshot| snapshot.read_at <= read_before);
    candidates.take(count).map(|snapshot| snapshot.key).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// With daily runs, each snapshot is re-read within `within_days` + 1 days, even as new snapshots keep
        /// arriving.
        #[test]
        fn schedule_reads_every_snapshot_within_period(
            within_days in 1_u32..20,
            per_day in 0_usize..30,
            days in 1_usize..60,
        ) {
            let mut now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
            let (mut taken, mut checked) = (Vec::new(), BTreeMap::new());
            for day in 0..days {
                for hour in 0..per_day {
                    taken.push((format!("{day:03}-{hour:02}"), now));
                }
                now += DAY;
                let last_reads = list_last_reads(&taken, &checked, &BTreeMap::new(), now);
                for key in select_today(last_reads, now, within_days) {
                    checked.insert(key, now);
                }
                // One more day, because a snapshot may become overdue just after the day's run.
                let last_reads = list_last_reads(&taken, &checked, &BTreeMap::new(), now);
                let oldest = last_reads.into_iter().map(|snapshot| snapshot.read_at).min();
                if let Some(oldest) = oldest {
                    let max_age = DAY * i32::try_from(within_days + 1).unwrap();
                    prop_assert!(now.duration_since(oldest) <= max_age, "{oldest} at {now}");
                }
            }
        }

        /// After any idle period, the next run reads at most `MAX_SHARES_PER_RUN` daily shares.
        #[test]
        fn select_today_limits_shares_after_idle_days(
            count in 1_usize..500,
            idle_days in 0_i32..400,
            within_days in 1_u32..40,
        ) {
            let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
            let taken: Vec<_> = (0..count).map(|n| (format!("{n:03}"), start)).collect();
            let now = start + DAY * idle_days;
            let last_reads = list_last_reads(&taken, &BTreeMap::new(), &BTreeMap::new(), now);
            let today = select_today(last_reads, now, within_days);
            prop_assert!(today.len() <= count.div_ceil(within_days as usize) * MAX_SHARES_PER_RUN);
            prop_assert_eq!(today.is_empty(), idle_days < 1);
        }
    }

    #[test]
    fn select_today_repeats_daily_if_period_is_one_day() {
        let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let taken = [("a".to_owned(), start)];
        let mut checked = BTreeMap::new();
        for day in 1..4 {
            let now = start + DAY * day;
            assert_eq!(
                select_today(list_last_reads(&taken, &checked, &BTreeMap::new(), now), now, 1),
                ["a"],
                "day {day}"
            );
            let finished_at = now + SignedDuration::from_mins(10);
            checked.insert("a".to_owned(), finished_at);
        }
    }

    #[test]
    fn select_today_puts_failed_snapshots_after_untried() {
        let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let taken: Vec<_> = ["a", "b", "c", "d"].map(|key| (key.to_owned(), start)).into();
        let mut failed = BTreeMap::new();
        let now = start + DAY * 40;
        let first = select_today(list_last_reads(&taken, &BTreeMap::new(), &failed, now), now, 30);
        assert_eq!(first, ["a", "b", "c"]);
        failed.extend(first.into_iter().map(|key| (key, now)));
        // A failed snapshot may be retried immediately.
        let second = select_today(list_last_reads(&taken, &BTreeMap::new(), &failed, now), now, 30);
        assert_eq!(second, ["d", "a", "b"]);
    }

    #[test]
    fn list_last_reads_ignores_future_times() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let (past, future) = (now - DAY, now + DAY);
        let taken = [("a", past), ("b", future), ("c", future)].map(|(key, at)| (key.to_owned(), at));
        let checked = BTreeMap::from([("a".to_owned(), future), ("b".to_owned(), past)]);
        let read_at: Vec<_> = list_last_reads(&taken, &checked, &BTreeMap::new(), now)
            .into_iter()
            .map(|snapshot| snapshot.read_at)
            .collect();
        assert_eq!(read_at, [past, past, Timestamp::UNIX_EPOCH]);
    }
}

//! Snapshot retention. By default, we keep all snapshots for a day, hourly ones for a week, daily ones for 90 days, and
//! monthly ones forever. The last snapshot of each machine is also kept for 90 days.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use jiff::{SignedDuration, Timestamp, tz::TimeZone};

use crate::id::Id;

/// Maximum number of machines whose last snapshot is retained. Slots have far fewer unless snapshots are forged.
const MAX_MACHINES: usize = 100;

/// How long to retain snapshots. Periods are aligned to UTC hours, days and months, so that repeated pruning retains
/// the same snapshots as pruning once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionPolicy {
    /// How long to retain every snapshot.
    pub all: SignedDuration,
    /// How long to retain the last snapshot of each hour.
    pub hourly: SignedDuration,
    /// How long to retain the last snapshot of each day.
    pub daily: SignedDuration,
    /// How long to retain the last snapshot of each month; `None` means forever.
    pub monthly: Option<SignedDuration>,
    /// How long to retain the last snapshot of each machine. Otherwise, a new machine that starts without its
    /// predecessor's files would make them expire within a day.
    pub last_of_machine: SignedDuration,
    /// Number of newest snapshots to retain regardless of age.
    pub newest: usize,
}

impl Default for RetentionPolicy {
    fn default() -> Self {
        Self {
            all: SignedDuration::from_hours(24),
            hourly: SignedDuration::from_hours(7 * 24),
            daily: SignedDuration::from_hours(90 * 24),
            monthly: None,
            last_of_machine: SignedDuration::from_hours(90 * 24),
            newest: 3,
        }
    }
}

/// Period from which only the last snapshot is retained. `Instant` contains a single snapshot, so it's always retained.
#[derive(Debug, PartialEq, Eq)]
enum Period {
    Instant(Timestamp),
    Hour(i64),
    Day(i64),
    Month(i16, i8),
}

impl RetentionPolicy {
    /// Returns the snapshots to remove. Snapshots dated in the future (clock skew) are retained.
    pub fn select_expired(&self, snapshots: &[(Id, Timestamp)], now: Timestamp) -> Vec<Id> {
        self.select_expired_among(snapshots, snapshots, now)
    }

    /// Returns the candidates to remove. Each is judged as if it were the only snapshot besides `others`.
    pub fn select_expired_among(
        &self,
        candidates: &[(Id, Timestamp)],
        others: &[(Id, Timestamp)],
        now: Timestamp,
    ) -> Vec<Id> {
        let mut newest_first = others.to_vec();
        newest_first.sort_unstable_by_key(|(id, time)| Reverse((*time, *id)));
        let is_expired = |(id, time): (Id, Timestamp)| {
            let newer_count = newest_first.partition_point(|(other, at)| (*at, *other) > (time, id));
            let period = self.period(time, now);
            // Retain only the last snapshot of a period: the one whose next newer snapshot is in a different period.
            let next_period = newest_first[..newer_count].last().and_then(|(_, at)| self.period(*at, now));
            newer_count >= self.newest && (period.is_none() || next_period == period)
        };
        candidates.iter().filter(|candidate| is_expired(**candidate)).map(|(id, _)| *id).collect()
    }

    /// Returns each machine's last snapshot unless it's older than `last_of_machine`. Machine ids may be arbitrary
    /// strings.
    pub fn select_last_of_machines<'a>(
        &self,
        snapshots: impl IntoIterator<Item = (&'a str, Id, Timestamp)>,
        now: Timestamp,
    ) -> HashSet<Id> {
        let mut last: HashMap<&str, (Timestamp, Id)> = HashMap::new();
        for (machine, id, time) in snapshots {
            if now.duration_since(time) <= self.last_of_machine {
                let newest = last.entry(machine).or_insert((time, id));
                *newest = (*newest).max((time, id));
            }
        }
        let mut newest_first: Vec<(Timestamp, Id)> = last.into_values().collect();
        newest_first.sort_unstable_by_key(|last| Reverse(*last));
        newest_first.into_iter().take(MAX_MACHINES).map(|(_, id)| id).collect()
    }

    /// Returns a snapshot's period, or `None` if no rule retains snapshots of its age.
    fn period(&self, time: Timestamp, now: Timestamp) -> Option<Period> {
        let age = now.duration_since(time);
        let date = || time.to_zoned(TimeZone::UTC).date();
        if age <= self.all {
            Some(Period::Instant(time))
        } else if age <= self.hourly {
            Some(Period::Hour(time.as_second().div_euclid(3600)))
        } else if age <= self.daily {
            Some(Period::Day(time.as_second().div_euclid(86_400)))
        } else if self.monthly.is_none_or(|monthly| age <= monthly) {
            Some(Period::Month(date().year(), date().month()))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn snapshots(times: impl IntoIterator<Item = Timestamp>) -> Vec<(Id, Timestamp)> {
        times.into_iter().enumerate().map(|(n, time)| (Id::of(&n.to_le_bytes()), time)).collect()
    }

    fn kept_times(policy: RetentionPolicy, snapshots: &[(Id, Timestamp)], now: Timestamp) -> Vec<Timestamp> {
        let expired: HashSet<Id> = policy.select_expired(snapshots, now).into_iter().collect();
        snapshots.iter().filter(|(id, _)| !expired.contains(id)).map(|(_, time)| *time).collect()
    }

    #[test]
    fn retains_last_snapshot_of_each_period() {
        let now: Timestamp = "2026-11-27T12:00:00Z".parse().unwrap();
        let times = (0..2 * 365 * 24 * 4).map(|n| now - SignedDuration::from_mins(15 * n));
        let kept = kept_times(RetentionPolicy::default(), &snapshots(times), now);
        let count = |from: i64, to: i64| {
            let days = |days| SignedDuration::from_hours(24 * days);
            kept.iter().filter(|time| (days(from)..days(to)).contains(&now.duration_since(**time))).count()
        };
        assert_eq!(count(0, 1), 96, "all for a day");
        assert_eq!(count(1, 7), 6 * 24 + 1);
        assert_eq!(count(7, 90), 83 + 1);
        assert!((20..=23).contains(&count(90, 800)), "one for each of 21 months, {}", count(90, 800));
        assert!(kept.contains(&"2025-12-31T23:45:00Z".parse().unwrap()), "the last of its month");
    }

    #[test]
    fn retains_newest_snapshots_regardless_of_age() {
        let now: Timestamp = "2026-11-27T12:00:00Z".parse().unwrap();
        let policy =
            RetentionPolicy { monthly: Some(SignedDuration::from_hours(24 * 365)), ..Default::default() };
        let old = snapshots((0..5).map(|n| now - SignedDuration::from_hours(24 * 3000 + n)));
        assert_eq!(kept_times(policy, &old, now).len(), 3);
        let future = snapshots([now + SignedDuration::from_hours(9000)]);
        assert_eq!(kept_times(RetentionPolicy { newest: 0, ..policy }, &future, now).len(), 1);
    }

    #[test]
    fn retains_last_snapshot_of_each_machine() {
        let now: Timestamp = "2026-11-27T12:00:00Z".parse().unwrap();
        let hours_ago = |hours: i64| now - SignedDuration::from_hours(hours);
        let all = snapshots([300, 200, 190, 100, 0].map(hours_ago));
        let machines = ["a", "a", "b", "b", "c"];
        let tagged = || machines.into_iter().zip(&all).map(|(machine, (id, time))| (machine, *id, *time));
        let policy = RetentionPolicy::default();
        let kept = policy.select_last_of_machines(tagged(), now);
        assert_eq!(kept, [1, 3, 4].map(|n: usize| all[n].0).into());
        let later = now + SignedDuration::from_hours(90 * 24 - 150);
        assert_eq!(policy.select_last_of_machines(tagged(), later), [3, 4].map(|n: usize| all[n].0).into());
        let names: Vec<String> = (0..300).map(|n| format!("forged-{n}")).collect();
        let forged = names.iter().map(|name| (name.as_str(), Id::of(name.as_bytes()), now));
        assert_eq!(policy.select_last_of_machines(forged, now).len(), MAX_MACHINES);
    }

    proptest! {
        #[test]
        fn repeated_pruning_matches_single_prune(
            minutes in prop::collection::btree_set(0..200_000_i64, 1..60),
            steps in prop::collection::btree_set(0..400_000_i64, 0..12),
        ) {
            let start: Timestamp = "2026-01-15T00:30:00Z".parse().unwrap();
            let at = |minutes: i64| start + SignedDuration::from_mins(minutes);
            let all = snapshots(minutes.iter().map(|minute| at(*minute)));
            let (policy, end) = (RetentionPolicy { newest: 0, ..Default::default() }, at(400_000));
            let once = kept_times(policy, &all, end);
            let mut remaining = all;
            for step in steps {
                let now = at(step);
                let expired: HashSet<Id> = policy
                    .select_expired(&remaining.iter().filter(|(_, time)| *time <= now).copied().collect::<Vec<_>>(), now)
                    .into_iter()
                    .collect();
                remaining.retain(|(id, _)| !expired.contains(id));
            }
            prop_assert_eq!(kept_times(policy, &remaining, end), once);
        }
    }
}

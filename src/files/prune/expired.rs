//! Selects expired snapshots, given when they were taken and uploaded.

use std::collections::HashSet;

use jiff::{SignedDuration, Timestamp};

use super::{MAX_SAVE_DURATION, PruneOptions};
use crate::id::Id;
use crate::snapshot::Snapshot;

/// Maximum clock skew between the machine and the store.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_hours(12);

/// Selects expired snapshots. Someone with a stolen key could pick snapshot times that make earlier snapshots expire,
/// so only snapshots uploaded within [`MAX_CLOCK_SKEW`] of their time displace others. A snapshot's time is when its
/// save started, so the snapshot of a long save is uploaded late: it may expire, but displaces no others. Any other
/// difference between the two times is implausible, and the snapshot is retained. Copied objects, for example, all have
/// the time of the copy.
pub(super) fn select_expired(snapshots: &[(Id, Snapshot, Timestamp)], options: &PruneOptions) -> HashSet<Id> {
    let find_plausible = |max_delay: SignedDuration| -> Vec<(Id, Timestamp)> {
        let delays = -MAX_CLOCK_SKEW..=max_delay;
        snapshots
            .iter()
            .filter(|(_, snapshot, uploaded)| delays.contains(&uploaded.duration_since(snapshot.time)))
            .map(|(id, snapshot, _)| (*id, snapshot.time))
            .collect()
    };
    let on_time = find_plausible(MAX_CLOCK_SKEW);
    let on_time_ids: HashSet<Id> = on_time.iter().map(|(id, _)| *id).collect();
    let mut expired = options.policy.select_expired(&on_time, options.now);
    let mut late = find_plausible(MAX_SAVE_DURATION + MAX_CLOCK_SKEW);
    late.retain(|(id, _)| !on_time_ids.contains(id));
    expired.extend(options.policy.select_expired_among(&late, &on_time, options.now));
    let plausible: HashSet<Id> = on_time_ids.into_iter().chain(late.iter().map(|(id, _)| *id)).collect();
    let taken = snapshots
        .iter()
        .filter(|(id, ..)| plausible.contains(id))
        .filter_map(|(id, snapshot, _)| Some((snapshot.machine_tag()?, *id, snapshot.time)));
    let last = options.policy.select_last_of_machines(taken, options.now);
    expired.into_iter().filter(|id| !options.protected.contains(id) && !last.contains(id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retention::RetentionPolicy;

    #[test]
    fn late_snapshot_expires_without_displacing_others() {
        // 08:00 UTC.
        let now = Timestamp::from_second(500_000 * 3600).unwrap();
        let policy = RetentionPolicy { newest: 0, ..RetentionPolicy::default() };
        let grace_period = SignedDuration::from_hours(72);
        let options = PruneOptions {
            policy,
            protected: Vec::new(),
            grace_period,
            now,
            is_dry_run: false,
            search_deadline: None,
        };
        let at = |minutes: i64| now - SignedDuration::from_mins(minutes);
        let snapshot = |minutes| Snapshot {
            time: at(minutes),
            parent: None,
            tree: Id::of(b"tree"),
            paths: Vec::new(),
            hostname: String::new(),
            username: String::new(),
            tags: Vec::new(),
        };
        // Minutes since each of two snapshots was taken and uploaded, and whether it expires.
        for (first, second, expected) in [
            ((2390, 2389), (2350, 2349), [true, false]),
            // The second one, uploaded after 39 hours, doesn't displace the first.
            ((2390, 2389), (2350, 0), [false, false]),
            ((2390, 0), (2350, 2349), [true, false]),
            ((2390, 0), (2350, 0), [false, false]),
            // Neither does one uploaded long before it was taken.
            ((2390, 2389), (2350, 2350 + 721), [false, false]),
            // Same day, but the first one was uploaded after 30 days and 12 hours, or later.
            ((43_920, 0), (43_900, 43_899), [true, false]),
            ((43_921, 0), (43_900, 43_899), [false, false]),
        ] {
            let ids = [Id::of(b"first"), Id::of(b"second")];
            let snapshots =
                [(ids[0], snapshot(first.0), at(first.1)), (ids[1], snapshot(second.0), at(second.1))];
            let expired = select_expired(&snapshots, &options);
            assert_eq!(ids.map(|id| expired.contains(&id)), expected, "{first:?}, {second:?}");
        }
    }
}

//! Selects the snapshots that have expired, given when they were taken and uploaded.

use std::collections::HashSet;

use jiff::{SignedDuration, Timestamp};

use super::{MAX_SAVE_DURATION, PruneOptions};
use crate::id::Id;
use crate::snapshot::Snapshot;

/// Maximum difference between the machine's clock and the store's.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_hours(12);

/// Selects the snapshots that have expired. Someone with a stolen key could choose times that make earlier snapshots
/// expire, so only snapshots that were uploaded soon after their time make others expire. A snapshot's time is the time
/// at which its save began, so the snapshot of a long save is uploaded late: it may expire, but makes no others expire.
/// Any other difference between the two times is implausible, and the snapshot is kept; for example, copied objects all
/// have the time of the copy.
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
    fn late_snapshot_expires_but_displaces_no_other() {
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
        // How many minutes ago each of two snapshots was taken and uploaded, and whether it expires.
        for (first, second, expected) in [
            ((2390, 2389), (2350, 2349), [true, false]),
            // The second one, uploaded after 39 hours, does not displace the first.
            ((2390, 2389), (2350, 0), [false, false]),
            ((2390, 0), (2350, 2349), [true, false]),
            ((2390, 0), (2350, 0), [false, false]),
            // Nor does a second one that was uploaded long before it was taken.
            ((2390, 2389), (2350, 2350 + 721), [false, false]),
            // Two on the same day, the first of which was uploaded after 30 days and 12 hours, or later.
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

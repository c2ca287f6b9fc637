//! Decides when to save. Pure: the caller passes the time.

use std::time::{Duration, Instant};

/// Changes are saved when nothing has changed between two looks, or when the first of them is this old.
pub const MAX_DELAY: Duration = Duration::from_secs(30);
/// Interval of looks at what the watcher does not watch, such as agents' settings.
pub const UNWATCHED_INTERVAL: Duration = Duration::from_secs(60);
/// Minimum pause after a save, because each new snapshot costs several requests to the store. A requested save does not
/// wait.
pub const MIN_INTERVAL: Duration = Duration::from_secs(15);
/// Looks at unwatched files take at most 1/50 of the time, and saves of the whole home 1/100, but they happen at least
/// at these intervals.
const UNWATCHED_SHARE: u32 = 50;
const MAX_UNWATCHED_INTERVAL: Duration = Duration::from_secs(600);
const FULL_SHARE: u32 = 100;
const MAX_FULL_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// After a save, the next one waits this many times its duration, at most `MAX_REST`: saves that read much more than
/// what has changed, for example because the cache cannot be written, must not use the processor all the time.
const REST_FACTOR: u32 = 10;
const MAX_REST: Duration = Duration::from_secs(300);
/// Interval of saves of the whole home, which need no events: a write through a shared mapping causes none.
pub const FULL_INTERVAL: Duration = Duration::from_secs(3600);
/// Interval of saves of the whole home while the watcher does not answer.
pub const UNATTENDED_INTERVAL: Duration = Duration::from_secs(600);
/// Minimum and maximum pause after a failed save.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(120));

/// What the watcher says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observation {
    Unchanged,
    /// There are changes; `is_settled` if none is newer than the previous look.
    Changed {
        is_settled: bool,
    },
    /// Anything may have changed.
    Unknown,
    /// The watcher does not answer.
    Unattended,
}

/// What to save now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Save {
    Nothing,
    /// The watcher's changes, if any, and what it does not watch.
    Changes,
    Everything,
}

#[derive(Debug)]
pub struct Schedule {
    /// When the first of the unsaved changes was seen.
    changed_since: Option<Instant>,
    last_full: Option<Instant>,
    full_interval: Duration,
    next_unwatched: Instant,
    failures: u32,
    not_before: Instant,
    is_requested: bool,
}

impl Schedule {
    pub fn new(now: Instant) -> Self {
        Self {
            changed_since: None,
            last_full: None,
            full_interval: FULL_INTERVAL,
            next_unwatched: now,
            failures: 0,
            not_before: now,
            is_requested: false,
        }
    }

    /// Requests a save at the next look: an operator asked for it, or the machine is about to stop.
    pub fn request(&mut self) {
        self.is_requested = true;
    }

    pub fn is_requested(&self) -> bool {
        self.is_requested
    }

    pub fn changed_since(&self) -> Option<Instant> {
        self.changed_since
    }

    /// Returns what to save.
    pub fn decide(&mut self, seen: Observation, now: Instant) -> Save {
        if seen != Observation::Unchanged {
            self.changed_since.get_or_insert(now);
        }
        let age = |at: Option<Instant>| at.map_or(Duration::MAX, |at| now.duration_since(at));
        let is_requested = self.is_requested;
        if now < self.not_before && !is_requested {
            return Save::Nothing;
        }
        // Without the watcher's answer, only a save of everything leaves nothing out.
        let full_interval = match seen {
            Observation::Unattended if is_requested => Duration::ZERO,
            Observation::Unattended => UNATTENDED_INTERVAL,
            _ => self.full_interval,
        };
        if seen == Observation::Unknown || age(self.last_full) >= full_interval {
            return Save::Everything;
        }
        let is_due = match seen {
            Observation::Changed { is_settled } => is_settled || age(self.changed_since) >= MAX_DELAY,
            _ => false,
        };
        let is_attended = seen != Observation::Unattended;
        if is_due || is_attended && (is_requested || now >= self.next_unwatched) {
            Save::Changes
        } else {
            Save::Nothing
        }
    }

    /// Records a save that ended at `now` and took `duration`.
    pub fn record_success(&mut self, saved: Save, duration: Duration, now: Instant) {
        if saved == Save::Everything {
            self.last_full = Some(now);
            self.full_interval = (duration * FULL_SHARE).clamp(FULL_INTERVAL, MAX_FULL_INTERVAL);
        }
        self.changed_since = None;
        self.failures = 0;
        self.not_before = now + (duration * REST_FACTOR).clamp(MIN_INTERVAL, MAX_REST);
        self.is_requested = false;
        let look = if saved == Save::Changes { duration } else { Duration::ZERO };
        self.next_unwatched =
            now + (look * UNWATCHED_SHARE).clamp(UNWATCHED_INTERVAL, MAX_UNWATCHED_INTERVAL);
    }

    /// Records a failed save: the next one waits, longer each time.
    pub fn record_failure(&mut self, now: Instant) {
        let (min, max) = RETRY_PAUSES;
        self.not_before = now + (min * 2_u32.saturating_pow(self.failures.min(10))).min(max);
        self.next_unwatched = self.next_unwatched.min(self.not_before);
        self.failures += 1;
        self.is_requested = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLED: Observation = Observation::Changed { is_settled: true };
    const CHANGING: Observation = Observation::Changed { is_settled: false };

    fn started() -> (Schedule, Instant) {
        let now = Instant::now();
        let mut schedule = Schedule::new(now);
        assert_eq!(schedule.decide(Observation::Unchanged, now), Save::Everything, "the first save");
        schedule.record_success(Save::Everything, Duration::ZERO, now);
        (schedule, now)
    }

    fn after(now: Instant, seconds: u64) -> Instant {
        now + Duration::from_secs(seconds)
    }

    #[test]
    fn settled_changes_are_saved_at_once_and_others_after_the_delay() {
        let (mut schedule, now) = started();
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 5)), Save::Nothing);
        assert_eq!(schedule.decide(CHANGING, after(now, 10)), Save::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 15)), Save::Changes);
        schedule.record_success(Save::Changes, Duration::ZERO, after(now, 15));
        assert_eq!(schedule.decide(CHANGING, after(now, 20)), Save::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 29)), Save::Nothing, "too soon after the last save");
        assert_eq!(schedule.decide(CHANGING, after(now, 49)), Save::Nothing);
        assert_eq!(schedule.decide(CHANGING, after(now, 50)), Save::Changes);
    }

    #[test]
    fn everything_is_saved_hourly_and_after_lost_events() {
        let (mut schedule, now) = started();
        assert_eq!(schedule.decide(Observation::Unknown, after(now, 15)), Save::Everything);
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 60)), Save::Changes);
        schedule.record_success(Save::Changes, Duration::ZERO, after(now, 60));
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 3600)), Save::Everything);
        assert_eq!(schedule.decide(Observation::Unattended, after(now, 599)), Save::Nothing);
        assert_eq!(schedule.decide(Observation::Unattended, after(now, 600)), Save::Everything);
    }

    #[test]
    fn slow_saves_rest_and_are_rare() {
        let (mut schedule, now) = started();
        schedule.record_success(Save::Everything, Duration::from_secs(20), now);
        assert_eq!(schedule.decide(Observation::Unknown, after(now, 199)), Save::Nothing);
        assert_eq!(schedule.decide(Observation::Unknown, after(now, 200)), Save::Everything);
        schedule.record_success(Save::Everything, Duration::from_secs(100), now);
        assert_eq!(schedule.decide(SETTLED, after(now, 299)), Save::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 9999)), Save::Changes);
        assert_eq!(schedule.decide(SETTLED, after(now, 10_000)), Save::Everything);
    }

    #[test]
    fn slow_looks_at_unwatched_files_are_rare() {
        let (mut schedule, now) = started();
        schedule.record_success(Save::Changes, Duration::from_secs(10), now);
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 499)), Save::Nothing);
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 500)), Save::Changes);
    }

    #[test]
    fn failed_saves_pause_and_requests_do_not_wait() {
        let (mut schedule, now) = started();
        schedule.record_failure(now);
        assert_eq!(schedule.decide(SETTLED, after(now, 4)), Save::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 5)), Save::Changes);
        for _ in 0..40 {
            schedule.record_failure(now);
        }
        assert_eq!(schedule.decide(SETTLED, after(now, 119)), Save::Nothing);
        schedule.request();
        assert_eq!(schedule.decide(SETTLED, after(now, 119)), Save::Changes);
        assert_eq!(schedule.decide(SETTLED, after(now, 120)), Save::Changes);
    }
}

//! Decides when to save. Pure: the caller passes the time.

use std::time::{Duration, Instant};

/// Maximum debounce delay: changes are saved once nothing changes between two checks, or once the first change is this
/// old.
pub const MAX_DELAY: Duration = Duration::from_secs(30);
/// Interval between checks of unwatched files, such as agents' settings.
pub const UNWATCHED_INTERVAL: Duration = Duration::from_secs(60);
/// Minimum pause after a save, because each new snapshot costs several store requests. Requested saves ignore it.
pub const MIN_PAUSE: Duration = Duration::from_secs(15);
/// Like [`MIN_PAUSE`], but after a save without changes.
const MIN_UNCHANGED_PAUSE: Duration = Duration::from_secs(5);
/// While the watcher reports all changes, unwatched-file checks take at most 1/50 of the time and full saves at most
/// 1/100, unless that would push the interval past its maximum.
const UNWATCHED_INTERVAL_FACTOR: u32 = 50;
const MAX_UNWATCHED_INTERVAL: Duration = Duration::from_secs(600);
const FULL_INTERVAL_FACTOR: u32 = 100;
const MAX_FULL_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// Pause after a save, as a multiple of its duration: capped at `MAX_PAUSE`, and shortened if [`MAX_CHANGE_AGE`]
/// requires it. Keeps saves that read far more than the changes (for example, with an unwritable cache) from hogging
/// the CPU.
const PAUSE_FACTOR: u32 = 10;
const MAX_PAUSE: Duration = Duration::from_secs(300);
/// Changes reported by the watcher are saved within this time, unless saves fail or take longer than 15 s. In the worst
/// case, a change is made just after a save starts, then waits for that save, the pause (or `MAX_DELAY`, if longer) and
/// the next save.
const MAX_CHANGE_AGE: Duration = Duration::from_secs(60);
/// Interval between full saves of the home directory, which also catch writes that don't raise events, such as those
/// through a shared memory map.
pub const FULL_INTERVAL: Duration = Duration::from_secs(3600);
/// Interval between full saves while the watcher is not responding.
pub const WATCHER_UNAVAILABLE_INTERVAL: Duration = Duration::from_secs(600);
/// Minimum and maximum backoff after a failed save.
const RETRY_BACKOFF_RANGE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(120));

/// The watcher's report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observation {
    Unchanged,
    /// Changes are pending; `is_settled` if none is newer than the previous check.
    Changed {
        is_settled: bool,
    },
    /// Anything may have changed.
    Unknown,
    /// The watcher is not responding.
    WatcherUnavailable,
}

/// The scope of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveScope {
    Nothing,
    /// The watcher's changes, if any, and all unwatched files.
    Changes,
    Everything,
}

/// Schedules the next save based on past saves and failures.
#[derive(Debug)]
pub struct Schedule {
    /// When the first unsaved change was detected.
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

    /// Makes the next [`Self::decide`] return a save, even during the pause after the previous one.
    pub fn request(&mut self) {
        self.is_requested = true;
    }

    /// Like [`Self::request`], but for a full save.
    pub fn request_everything(&mut self) {
        self.is_requested = true;
        self.last_full = None;
    }

    pub fn is_requested(&self) -> bool {
        self.is_requested
    }

    pub fn changed_since(&self) -> Option<Instant> {
        self.changed_since
    }

    /// Records the observation and returns the scope of the save due now.
    pub fn decide(&mut self, observation: Observation, now: Instant) -> SaveScope {
        if observation != Observation::Unchanged {
            self.changed_since.get_or_insert(now);
        }
        let age = |at: Option<Instant>| at.map_or(Duration::MAX, |at| now.duration_since(at));
        let is_requested = self.is_requested;
        if now < self.not_before && !is_requested {
            return SaveScope::Nothing;
        }
        // Without the watcher, only a full save is guaranteed to include all changes.
        let full_interval = match observation {
            Observation::WatcherUnavailable if is_requested => Duration::ZERO,
            Observation::WatcherUnavailable => WATCHER_UNAVAILABLE_INTERVAL,
            _ => self.full_interval,
        };
        if observation == Observation::Unknown || age(self.last_full) >= full_interval {
            return SaveScope::Everything;
        }
        let is_due = match observation {
            Observation::Changed { is_settled } => is_settled || age(self.changed_since) >= MAX_DELAY,
            _ => false,
        };
        let is_watcher_available = observation != Observation::WatcherUnavailable;
        if is_due || is_watcher_available && (is_requested || now >= self.next_unwatched) {
            SaveScope::Changes
        } else {
            SaveScope::Nothing
        }
    }

    /// Records a save that succeeded at `now` after running for `duration`. If nothing had changed, no snapshot was
    /// stored, so the minimum pause is shorter.
    pub fn record_success(&mut self, scope: SaveScope, is_unchanged: bool, duration: Duration, now: Instant) {
        if scope == SaveScope::Everything {
            self.last_full = Some(now);
            self.full_interval = (duration * FULL_INTERVAL_FACTOR).clamp(FULL_INTERVAL, MAX_FULL_INTERVAL);
        }
        self.changed_since = None;
        self.failures = 0;
        let pause = pause_after(duration);
        let unchanged_pause = (duration * PAUSE_FACTOR).max(MIN_UNCHANGED_PAUSE);
        self.not_before = now + if is_unchanged { pause.min(unchanged_pause) } else { pause };
        self.is_requested = false;
        let check_duration = if scope == SaveScope::Changes { duration } else { Duration::ZERO };
        self.next_unwatched = now
            + (check_duration * UNWATCHED_INTERVAL_FACTOR).clamp(UNWATCHED_INTERVAL, MAX_UNWATCHED_INTERVAL);
    }

    /// Records a save that failed at `now` after running for `duration`. The backoff grows with each failure. From the
    /// second failure on, unless the platform is waiting for the save (`is_awaited`), it also scales with the duration,
    /// because each attempt compares all files.
    pub fn record_failure(&mut self, duration: Duration, is_awaited: bool, now: Instant) {
        let (min, max) = RETRY_BACKOFF_RANGE;
        let backoff = (min * 2_u32.saturating_pow(self.failures.min(10))).min(max);
        let ignores_duration = is_awaited || self.failures == 0;
        let pause = if ignores_duration { Duration::ZERO } else { (duration * PAUSE_FACTOR).min(max) };
        self.not_before = now + backoff.max(pause);
        self.next_unwatched = self.next_unwatched.min(self.not_before);
        self.failures += 1;
        self.is_requested = false;
    }
}

/// Returns the pause after a save that took `duration`.
fn pause_after(duration: Duration) -> Duration {
    let pause = (duration * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE);
    let remaining = MAX_CHANGE_AGE.saturating_sub(duration * 2);
    if remaining < MAX_DELAY { pause } else { pause.min(remaining) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLED: Observation = Observation::Changed { is_settled: true };
    const CHANGING: Observation = Observation::Changed { is_settled: false };

    fn started() -> (Schedule, Instant) {
        let now = Instant::now();
        let mut schedule = Schedule::new(now);
        assert_eq!(schedule.decide(Observation::Unchanged, now), SaveScope::Everything, "the first save");
        schedule.record_success(SaveScope::Everything, false, Duration::ZERO, now);
        (schedule, now)
    }

    fn after(now: Instant, seconds: u64) -> Instant {
        now + Duration::from_secs(seconds)
    }

    #[test]
    fn change_is_saved_within_max_age_unless_saves_are_slow() {
        for seconds in 0..=15 {
            let duration = Duration::from_secs(seconds);
            let pause = pause_after(duration);
            assert!(pause >= MIN_PAUSE, "{seconds}");
            assert!(duration * 2 + pause.max(MAX_DELAY) <= MAX_CHANGE_AGE, "{seconds}");
        }
        assert_eq!(pause_after(Duration::from_secs(16)), Duration::from_secs(160));
        assert_eq!(pause_after(Duration::from_secs(60)), MAX_PAUSE);
    }

    #[test]
    fn settled_changes_save_immediately_others_after_delay() {
        let (mut schedule, now) = started();
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 5)), SaveScope::Nothing);
        assert_eq!(schedule.decide(CHANGING, after(now, 10)), SaveScope::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 15)), SaveScope::Changes);
        schedule.record_success(SaveScope::Changes, false, Duration::ZERO, after(now, 15));
        assert_eq!(schedule.decide(CHANGING, after(now, 20)), SaveScope::Nothing);
        assert_eq!(
            schedule.decide(SETTLED, after(now, 29)),
            SaveScope::Nothing,
            "too soon after the last save"
        );
        assert_eq!(schedule.decide(CHANGING, after(now, 49)), SaveScope::Nothing);
        assert_eq!(schedule.decide(CHANGING, after(now, 50)), SaveScope::Changes);
    }

    #[test]
    fn unchanged_save_shortens_pause() {
        let (mut schedule, now) = started();
        schedule.record_success(SaveScope::Changes, true, Duration::from_millis(50), now);
        assert_eq!(schedule.decide(SETTLED, after(now, 4)), SaveScope::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 5)), SaveScope::Changes);
        schedule.record_success(SaveScope::Everything, true, Duration::from_secs(4), now);
        assert_eq!(schedule.decide(SETTLED, after(now, 39)), SaveScope::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 40)), SaveScope::Changes);
    }

    #[test]
    fn full_save_runs_hourly_and_after_lost_events() {
        let (mut schedule, now) = started();
        assert_eq!(schedule.decide(Observation::Unknown, after(now, 15)), SaveScope::Everything);
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 60)), SaveScope::Changes);
        schedule.record_success(SaveScope::Changes, false, Duration::ZERO, after(now, 60));
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 3600)), SaveScope::Everything);
        assert_eq!(schedule.decide(Observation::WatcherUnavailable, after(now, 599)), SaveScope::Nothing);
        assert_eq!(schedule.decide(Observation::WatcherUnavailable, after(now, 600)), SaveScope::Everything);
    }

    #[test]
    fn requested_full_save_is_retried_until_it_succeeds() {
        let (mut schedule, now) = started();
        schedule.request_everything();
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 1)), SaveScope::Everything);
        schedule.record_failure(Duration::ZERO, false, after(now, 1));
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 60)), SaveScope::Everything);
        schedule.record_success(SaveScope::Everything, false, Duration::ZERO, after(now, 60));
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 70)), SaveScope::Nothing);
    }

    #[test]
    fn slow_saves_have_longer_intervals() {
        let (mut schedule, now) = started();
        schedule.record_success(SaveScope::Everything, false, Duration::from_secs(20), now);
        assert_eq!(schedule.decide(Observation::Unknown, after(now, 199)), SaveScope::Nothing);
        assert_eq!(schedule.decide(Observation::Unknown, after(now, 200)), SaveScope::Everything);
        schedule.record_success(SaveScope::Everything, false, Duration::from_secs(100), now);
        assert_eq!(schedule.decide(SETTLED, after(now, 299)), SaveScope::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 9999)), SaveScope::Changes);
        assert_eq!(schedule.decide(SETTLED, after(now, 10_000)), SaveScope::Everything);
    }

    #[test]
    fn slow_unwatched_checks_have_longer_intervals() {
        let (mut schedule, now) = started();
        schedule.record_success(SaveScope::Changes, false, Duration::from_secs(10), now);
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 499)), SaveScope::Nothing);
        assert_eq!(schedule.decide(Observation::Unchanged, after(now, 500)), SaveScope::Changes);
    }

    #[test]
    fn failed_saves_back_off_but_requests_run_immediately() {
        let (mut schedule, now) = started();
        schedule.record_failure(Duration::ZERO, false, now);
        assert_eq!(schedule.decide(SETTLED, after(now, 4)), SaveScope::Nothing);
        assert_eq!(schedule.decide(SETTLED, after(now, 5)), SaveScope::Changes);
        for _ in 0..40 {
            schedule.record_failure(Duration::ZERO, false, now);
        }
        assert_eq!(schedule.decide(SETTLED, after(now, 119)), SaveScope::Nothing);
        schedule.request();
        assert_eq!(schedule.decide(SETTLED, after(now, 119)), SaveScope::Changes);
        assert_eq!(schedule.decide(SETTLED, after(now, 120)), SaveScope::Changes);
        let mut slow = started().0;
        // Only repeated failures of slow saves lengthen the pause, and not while the platform is waiting.
        for (is_awaited, pause) in [(false, 5), (false, 100), (true, 20)] {
            slow.record_failure(Duration::from_secs(10), is_awaited, now);
            assert_eq!(slow.decide(SETTLED, after(now, pause - 1)), SaveScope::Nothing);
            assert_eq!(slow.decide(SETTLED, after(now, pause)), SaveScope::Changes);
        }
    }
}

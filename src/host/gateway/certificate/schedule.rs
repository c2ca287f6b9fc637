//! Certificate request scheduling: first requests, renewals and retry backoff.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

/// Certificates valid for at least 90 days are renewed this long before expiry; shorter-lived ones, when a third of
/// their lifetime remains.
const RENEWAL_MARGIN: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Machines younger than this request their first certificate immediately.
const NEW_MACHINE_AGE: SignedDuration = SignedDuration::from_hours(1);
/// Maximum delay before an older machine's first request under new settings.
const MAX_FIRST_REQUEST_DELAY: Duration = Duration::from_secs(600);
/// Maximum delay after a failed request, before jitter.
const MAX_BASE_DELAY: Duration = Duration::from_secs(6 * 3600);

/// Returns when to renew a certificate. The renewal margin grows by up to a tenth depending on the machine id, to
/// spread out requests from machines created together.
pub fn renewal_time(not_before: Timestamp, not_after: Timestamp, machine: Uuid) -> Timestamp {
    let lifetime = not_after.duration_since(not_before);
    let margin = (lifetime / 3).min(RENEWAL_MARGIN);
    let max_spread_ms = margin.as_millis() / 10;
    // The low bits of a UUIDv7 are random.
    let per_mille = i128::try_from(machine.as_u128() % 1000).unwrap_or(0);
    let spread = SignedDuration::from_millis(i64::try_from(max_spread_ms * per_mille / 1000).unwrap_or(0));
    not_after - margin - spread
}

/// Returns when to request the first certificate under new settings. A whole fleet may receive the settings at once, so
/// requests are spread over ten minutes by machine id. New machines don't wait.
pub fn first_request_time(now: Timestamp, machine: Uuid) -> Timestamp {
    let created = machine.get_timestamp().map(|time| time.to_unix().0);
    let age = created.and_then(|seconds| {
        Some(now.duration_since(Timestamp::from_second(i64::try_from(seconds).ok()?).ok()?))
    });
    if age.is_none_or(|age| age < NEW_MACHINE_AGE) {
        return now;
    }
    let per_mille = u32::try_from(machine.as_u128() % 1000).unwrap_or(0);
    now + SignedDuration::try_from(MAX_FIRST_REQUEST_DELAY * per_mille / 1000).unwrap_or_default()
}

/// Returns the retry backoff: `first`, doubling up to [`MAX_BASE_DELAY`], plus up to 100% jitter.
pub fn retry_delays(first: Duration) -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(first.min(MAX_BASE_DELAY))
        .with_max_delay(MAX_BASE_DELAY)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}

/// Maximum delay from [`retry_delays`], including jitter.
pub const MAX_RETRY_DELAY: SignedDuration = SignedDuration::from_secs(2 * 6 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal_margin_is_30_days_or_a_third_of_lifetime() {
        let from: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let days_before_end = |lifetime_days: i64, machine: u128| {
            let until = from + SignedDuration::from_hours(24 * lifetime_days);
            let renewal = renewal_time(from, until, Uuid::from_u128(machine));
            until.duration_since(renewal).as_secs_f64() / 86_400.0
        };
        assert!((days_before_end(90, 1000) - 30.0).abs() < 0.001);
        assert!((days_before_end(398, 1000) - 30.0).abs() < 0.001);
        assert!((days_before_end(6, 1000) - 2.0).abs() < 0.001);
        let spread = days_before_end(90, 999);
        assert!(spread > 32.9 && spread < 33.0, "{spread}");
    }

    #[test]
    fn first_request_time_spreads_older_machines() {
        let created: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let unix = uuid::Timestamp::from_unix(uuid::NoContext, created.as_second().unsigned_abs(), 0);
        let machines: Vec<_> = (0..200).map(|_| Uuid::new_v7(unix)).collect();
        let young = created + SignedDuration::from_mins(59);
        assert!(machines.iter().all(|machine| first_request_time(young, *machine) == young));
        let later = created + SignedDuration::from_hours(30 * 24);
        let mut delays: Vec<_> = machines
            .iter()
            .map(|machine| first_request_time(later, *machine).duration_since(later))
            .collect();
        delays.sort();
        let quartile = |number: usize| delays[number * delays.len() / 4 - 1].as_secs();
        assert!(quartile(1) > 60 && quartile(1) < quartile(2) && quartile(2) < quartile(3), "{delays:?}");
        assert!(quartile(3) < 600 && quartile(4) <= 600, "{delays:?}");
    }

    #[test]
    fn retry_delays_double_up_to_maximum() {
        let delays: Vec<_> = retry_delays(Duration::from_secs(120)).take(12).collect();
        for (number, delay) in delays.iter().enumerate() {
            let minimum = Duration::from_secs(120 << number.min(20)).min(MAX_BASE_DELAY);
            assert!(*delay >= minimum && *delay <= minimum * 2, "{number}: {delay:?}");
            assert!(SignedDuration::try_from(*delay).unwrap() <= MAX_RETRY_DELAY);
        }
    }
}

//! Human-readable times and sizes.

use jiff::Timestamp;

pub use svc_base::quantity::format_bytes;

const MINUTE: i64 = 60;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;

/// Formats a time as `12 s ago`, `5 min ago` or `in 3 d`. Invalid times are returned unchanged.
pub fn format_ago(now: Timestamp, at: &str) -> String {
    let Ok(then) = at.parse::<Timestamp>() else { return at.to_owned() };
    let seconds = now.as_second() - then.as_second();
    let length = format_span(seconds.unsigned_abs());
    if seconds < 0 { format!("in {length}") } else { format!("{length} ago") }
}

/// Formats a time as `2026-01-02 03:04:05 UTC, 5 min ago`.
pub fn format_time(now: Timestamp, at: &str) -> String {
    match at.parse::<Timestamp>() {
        Ok(then) => format!("{}, {}", then.strftime("%Y-%m-%d %H:%M:%S UTC"), format_ago(now, at)),
        Err(_) => at.to_owned(),
    }
}

/// Formats a duration in a single unit, rounded down.
pub fn format_span(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    match seconds {
        0..100 => format!("{seconds} s"),
        100..7200 => format!("{} min", seconds / MINUTE),
        7200..172_800 => format!("{} h", seconds / HOUR),
        _ => format!("{} d", seconds / DAY),
    }
}

/// Returns the seconds between two API timestamps, or `None` if either is invalid.
pub fn seconds_between(from: &str, to: &str) -> Option<f64> {
    let (from, to): (Timestamp, Timestamp) = (from.parse().ok()?, to.parse().ok()?);
    Some(to.duration_since(from).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_ago_uses_one_unit() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        for (at, expected) in [
            ("2026-01-02T00:00:00.000Z", "0 s ago"),
            ("2026-01-01T23:58:21Z", "99 s ago"),
            ("2026-01-01T23:58:20Z", "1 min ago"),
            ("2026-01-01T22:00:01Z", "119 min ago"),
            ("2026-01-01T22:00:00Z", "2 h ago"),
            ("2025-12-31T00:00:00Z", "2 d ago"),
            ("2026-01-02T00:00:30Z", "in 30 s"),
            ("sometime", "sometime"),
        ] {
            assert_eq!(format_ago(now, at), expected, "{at}");
        }
        assert_eq!(format_time(now, "2026-01-01T23:59:00.500Z"), "2026-01-01 23:59:00 UTC, 60 s ago");
    }
}

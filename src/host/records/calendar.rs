//! Days and months in the owner's time zone.

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

/// Calendar days and months in a time zone.
#[derive(Debug, Clone, PartialEq)]
pub struct Calendar(TimeZone);

impl Calendar {
    pub fn utc() -> Self {
        Self(TimeZone::UTC)
    }

    /// # Errors
    /// If the time zone is unknown.
    pub fn for_zone(zone: &str) -> Result<Self, jiff::Error> {
        TimeZone::get(zone).map(Self)
    }

    pub fn day(&self, at: Timestamp) -> Date {
        at.to_zoned(self.0.clone()).date()
    }

    /// Returns the first instant of a day, even if the clock skips midnight.
    pub fn start_of_day(&self, day: Date) -> Timestamp {
        // A day outside the supported range never starts.
        day.to_zoned(self.0.clone()).map_or(Timestamp::MAX, |start| start.timestamp())
    }

    pub fn start_of_next_day(&self, at: Timestamp) -> Timestamp {
        self.day(at).tomorrow().map_or(Timestamp::MAX, |day| self.start_of_day(day))
    }

    pub fn start_of_next_month(&self, at: Timestamp) -> Timestamp {
        let next = self.day(at).last_of_month().tomorrow();
        next.map_or(Timestamp::MAX, |day| self.start_of_day(day))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn days_and_months_start_in_local_time() {
        let next = |zone: &str, at: &str| {
            let (calendar, at) = (Calendar::for_zone(zone).unwrap(), at.parse().unwrap());
            (calendar.start_of_next_day(at).to_string(), calendar.start_of_next_month(at).to_string())
        };
        // A 23-hour day, a 25-hour day, a leap day, and a year end.
        for (zone, at, day, month) in [
            ("Europe/Berlin", "2026-03-28T23:30:00Z", "2026-03-29T22:00:00Z", "2026-03-31T22:00:00Z"),
            ("Europe/Berlin", "2026-10-24T22:30:00Z", "2026-10-25T23:00:00Z", "2026-10-31T23:00:00Z"),
            ("UTC", "2028-02-28T12:00:00Z", "2028-02-29T00:00:00Z", "2028-03-01T00:00:00Z"),
            ("America/New_York", "2027-01-01T04:59:59Z", "2027-01-01T05:00:00Z", "2027-01-01T05:00:00Z"),
        ] {
            assert_eq!(next(zone, at), (day.to_owned(), month.to_owned()), "{zone} {at}");
        }
        // Lebanon switched to DST at midnight on this day, so the clock skipped from 0:00 to 1:00.
        let beirut = Calendar::for_zone("Asia/Beirut").unwrap();
        assert_eq!(beirut.start_of_day("2024-03-31".parse().unwrap()).to_string(), "2024-03-30T22:00:00Z");
        assert_eq!(beirut.day("2024-03-30T22:00:00Z".parse().unwrap()).to_string(), "2024-03-31");
    }

    proptest! {
        /// In any zone, days and months start where the previous ones end, and the next ones are in the future.
        #[test]
        fn days_and_months_are_contiguous(
            zone in prop::sample::select(vec![
                "UTC", "Europe/Berlin", "America/Santiago", "Asia/Beirut", "Africa/Cairo", "America/Havana", "Australia/Lord_Howe",
                "Asia/Kathmandu", "Pacific/Apia", "America/St_Johns", "Atlantic/Azores",
            ]),
            // Starts in 2012: before that, St. John's set clocks back across midnight, so a day occurred twice.
            second in 1_325_376_000_i64..2_400_000_000,
        ) {
            let (calendar, at) = (Calendar::for_zone(zone).unwrap(), Timestamp::from_second(second).unwrap());
            let day = calendar.day(at);
            let before = |at: Timestamp| calendar.day(at.checked_sub(jiff::SignedDuration::from_nanos(1)).unwrap());
            let start = calendar.start_of_day(day);
            prop_assert!(start <= at && calendar.day(start) == day && before(start) < day, "{} {}", zone, at);
            let next = calendar.start_of_next_day(at);
            prop_assert!(next > at && before(next) == day && calendar.day(next) > day, "{} {}", zone, at);
            let month = calendar.start_of_next_month(at);
            prop_assert!(month >= next && before(month) == day.last_of_month(), "{} {}", zone, at);
            prop_assert_eq!(calendar.day(month), day.last_of_month().tomorrow().unwrap());
        }
    }
}

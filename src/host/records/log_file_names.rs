//! File names for dated logs: `audit-2026-11-20.jsonl`, or `audit-2026-11-20.2.jsonl` if the first name was taken.

use jiff::civil::Date;

/// A log with daily files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatedLog {
    pub stem: &'static str,
    pub extension: &'static str,
}

pub const ACTIVITY: DatedLog = DatedLog { stem: "activity", extension: "log" };
pub const AUDIT: DatedLog = DatedLog { stem: "audit", extension: "jsonl" };
/// Interactions go straight to the day's file; there's no current file.
pub const INTERACTIONS: DatedLog = DatedLog { stem: "interactions", extension: "jsonl" };

impl DatedLog {
    /// Returns the name of the current file, which gets renamed on rotation.
    pub fn current_name(self) -> String {
        format!("{}.{}", self.stem, self.extension)
    }

    /// Returns the name of a day's `n`th file, counting from 1.
    pub fn dated_name(self, day: Date, n: u32) -> String {
        let Self { stem, extension } = self;
        if n == 1 { format!("{stem}-{day}.{extension}") } else { format!("{stem}-{day}.{n}.{extension}") }
    }

    /// Parses the day from one of this log's file names. Returns `None` for any other name.
    pub fn parse_day(self, name: &str) -> Option<Date> {
        self.parse_day_and_number(name).map(|(day, _)| day)
    }

    /// Parses the day and the file's sequence number within it.
    pub fn parse_day_and_number(self, name: &str) -> Option<(Date, u32)> {
        let middle = name.strip_prefix(self.stem)?.strip_prefix('-')?;
        let middle = middle.strip_suffix(self.extension)?.strip_suffix('.')?;
        let (day, n) = match middle.split_once('.') {
            None => (middle, 1),
            Some((day, text)) => {
                let n = text.parse().ok().filter(|n: &u32| *n > 1 && n.to_string() == text)?;
                (day, n)
            }
        };
        let parsed: Date = day.parse().ok()?;
        (parsed.to_string() == day).then_some((parsed, n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn dated_name_round_trips(days in 0_i32..60_000, n in 1_u32..2000) {
            let day = Date::constant(1990, 1, 1).checked_add(jiff::Span::new().days(days)).unwrap();
            for log in [ACTIVITY, AUDIT, INTERACTIONS] {
                prop_assert_eq!(log.parse_day_and_number(&log.dated_name(day, n)), Some((day, n)));
            }
            prop_assert_eq!(AUDIT.parse_day(&ACTIVITY.dated_name(day, n)), None);
        }

        #[test]
        fn parse_day_never_panics(name in ".*") {
            let _ = AUDIT.parse_day(&name);
        }
    }

    #[test]
    fn parse_day_rejects_other_names() {
        for name in [
            "audit.jsonl",
            "audit-.jsonl",
            "audit-2026-11-20.log",
            "audit-2026-02-30.jsonl",
            "audit-2026-11-20.jsonl.bak",
            "audit-2026-11-20.1.jsonl",
            "audit-2026-11-20.x.jsonl",
            "audit-2026-11-20T10.jsonl",
            "audit-20261120.jsonl",
            "my-audit-2026-11-20.jsonl",
            "usage.jsonl",
        ] {
            assert_eq!(AUDIT.parse_day(name), None, "{name}");
        }
    }
}

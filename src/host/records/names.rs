//! File names of dated records: `audit-2026-11-20.jsonl`, or `audit-2026-11-20.2.jsonl` if the first name was taken.

use jiff::civil::Date;

/// A record with files by day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    pub stem: &'static str,
    pub extension: &'static str,
}

pub const ACTIVITY: Record = Record { stem: "activity", extension: "log" };
pub const AUDIT: Record = Record { stem: "audit", extension: "jsonl" };
/// Written directly to each day's file.
pub const INTERACTIONS: Record = Record { stem: "interactions", extension: "jsonl" };

impl Record {
    /// The current file.
    pub fn current(self) -> String {
        format!("{}.{}", self.stem, self.extension)
    }

    /// The `n`th file of a day, from 1.
    pub fn dated(self, day: Date, n: u32) -> String {
        let Self { stem, extension } = self;
        if n == 1 { format!("{stem}-{day}.{extension}") } else { format!("{stem}-{day}.{n}.{extension}") }
    }

    /// The day in a file name of this record; `None` for other names.
    pub fn day(self, name: &str) -> Option<Date> {
        self.day_and_number(name).map(|(day, _)| day)
    }

    /// The day, and the number of the file within it.
    pub fn day_and_number(self, name: &str) -> Option<(Date, u32)> {
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
            for record in [ACTIVITY, AUDIT, INTERACTIONS] {
                prop_assert_eq!(record.day_and_number(&record.dated(day, n)), Some((day, n)));
            }
            prop_assert_eq!(AUDIT.day(&ACTIVITY.dated(day, n)), None);
        }

        #[test]
        fn no_name_panics(name in ".*") {
            let _ = AUDIT.day(&name);
        }
    }

    #[test]
    fn other_names_have_no_day() {
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
            assert_eq!(AUDIT.day(name), None, "{name}");
        }
    }
}

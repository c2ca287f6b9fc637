//! Which day it is for the owner: `costLimits.timeZone` of `config.json`, UTC where nothing else is said.

use std::path::Path;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use serde::Deserialize;

use crate::fsx;

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Settings {
    cost_limits: CostLimits,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct CostLimits {
    time_zone: Option<String>,
}

/// Days begin by this zone's clock.
#[derive(Debug, Clone, PartialEq)]
pub struct Calendar(TimeZone);

impl Calendar {
    /// A file that cannot be used is said and means UTC: records are kept whatever becomes of it.
    pub fn read(file: &Path) -> Self {
        let settings = match fsx::read_if_there(file) {
            Ok(Some(text)) => serde_json::from_slice::<Settings>(&text).map_err(|error| error.to_string()),
            Ok(None) => Ok(Settings::default()),
            Err(error) => Err(crate::chain::chain(&error)),
        };
        let zone = settings.and_then(|settings| match settings.cost_limits.time_zone {
            Some(name) => TimeZone::get(&name).map_err(|error| error.to_string()),
            None => Ok(TimeZone::UTC),
        });
        Self(zone.unwrap_or_else(|error| {
            tracing::warn!(file = %file.display(), error, "no time zone could be read; days are those of UTC");
            TimeZone::UTC
        }))
    }

    pub fn day(&self, at: Timestamp) -> Date {
        at.to_zoned(self.0.clone()).date()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(settings: Option<&str>, at: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        if let Some(text) = settings {
            std::fs::write(&file, text).unwrap();
        }
        Calendar::read(&file).day(at.parse().unwrap()).to_string()
    }

    #[test]
    fn the_day_is_the_owners() {
        let zone = |name: &str| format!(r#"{{"costLimits": {{"daily": 5, "timeZone": "{name}"}}}}"#);
        let late = "2026-11-20T23:30:00Z";
        assert_eq!(day(None, late), "2026-11-20");
        assert_eq!(day(Some(&zone("Europe/Berlin")), late), "2026-11-21");
        assert_eq!(day(Some(&zone("Pacific/Kiritimati")), "2026-11-20T10:00:00Z"), "2026-11-21");
        assert_eq!(day(Some("{}"), late), "2026-11-20");
    }

    #[test]
    fn what_cannot_be_read_means_utc() {
        for broken in ["{", r#"{"costLimits": {"timeZone": "Mars/Olympus"}}"#, "[]", r#"{"costLimits": 3}"#] {
            assert_eq!(day(Some(broken), "2026-11-20T23:30:00Z"), "2026-11-20", "{broken}");
        }
    }
}

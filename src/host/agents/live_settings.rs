//! The owner's settings (`host::agents::owner_config`) as they are now: the file is read again when it changes.
//!
//! A broken edit changes nothing: the last good settings hold, over restarts, too, for they are kept beside the machine's
//! state; and the file's mistake is told until it is mended.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::owner_config::{Settings, read};
use crate::chain::chain;
use crate::fsx;
use crate::host::records::limits::Period;
use crate::host::records::money::Dollars;
use crate::host::records::writer::Records;

/// What tells one content of the file from another without reading it.
type Stamp = Option<(u64, u64, i64, i64)>;

/// The settings as they are now.
pub struct Live {
    path: PathBuf,
    /// What was last read of it and could be used.
    good: PathBuf,
    records: Records,
    known: Mutex<Known>,
}

struct Known {
    stamp: Option<Stamp>,
    settings: Arc<Settings>,
}

impl Live {
    pub fn new(path: PathBuf, good: PathBuf, records: Records) -> Self {
        let settings = Arc::new(Settings::last_good(&good));
        Self { path, good, records, known: Mutex::new(Known { stamp: None, settings }) }
    }

    /// A look at the file costs a microsecond: it is taken each time. `already` says what is spent of a period whose limit
    /// is another one now.
    pub fn current(&self, already: impl Fn(&Settings, Period) -> String) -> Arc<Settings> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(&self.path);
        if known.stamp != Some(stamp) {
            let settings = Arc::new(self.read(&known.settings, already));
            known.stamp = Some(stamp);
            known.settings = settings;
        }
        Arc::clone(&known.settings)
    }

    fn read(&self, before: &Settings, already: impl Fn(&Settings, Period) -> String) -> Settings {
        let parsed = match read(&self.path) {
            Ok(Some(text)) => Settings::parse(&text).map(|settings| (settings, text)),
            Ok(None) => Ok((Settings::default(), b"{}".to_vec())),
            Err(error) => Err(chain(&error)),
        };
        match parsed {
            Ok((settings, text)) => {
                self.tell_changes(before, &settings, already);
                if let Err(error) = fsx::write_atomic(&self.good, &text, 0o600) {
                    tracing::warn!(error = %chain(&error), "the good settings are kept until the next start alone");
                }
                settings
            }
            Err(mistake) => {
                self.tell(&format!("system/config.json is not used as it is now: {mistake}"));
                Settings { mistake: Some(mistake), ..before.clone() }
            }
        }
    }

    fn tell_changes(&self, before: &Settings, now: &Settings, already: impl Fn(&Settings, Period) -> String) {
        for period in Period::ALL {
            let (was, is) = (before.limits.of(period), now.limits.of(period));
            if was != is {
                let word = period.word();
                self.tell(&match is {
                    Dollars::ZERO => format!("there is no {word} cost limit any more"),
                    _ => format!("the {word} cost limit is {is}; {}", already(now, period)),
                });
            }
        }
        if before.time_zone != now.time_zone {
            self.tell(&format!("days begin by the clock of {}", now.time_zone));
        }
        if before.mistake.is_some() {
            self.tell("system/config.json is used again");
        }
    }

    fn tell(&self, what: &str) {
        tracing::info!(what, "the owner's settings");
        // One that has no room is told by its gap.
        let _ = self.records.note(what);
    }
}

fn stamp(path: &Path) -> Stamp {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::host::records::writer::Writer;

    fn said(_: &Settings, _: Period) -> String {
        "what was spent in its period already counts".to_owned()
    }

    #[test]
    fn a_broken_edit_keeps_the_last_good_settings_and_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let writer = Writer::start(dir.path().join("logs")).unwrap();
        let kept = dir.path().join("kept.json");
        let live = Live::new(path.clone(), kept.clone(), writer.records());
        assert_eq!(*live.current(said), Settings::default());
        fs::write(&path, r#"{"costLimits": {"daily": 5, "timeZone": "Europe/Berlin"}, "other": 1}"#).unwrap();
        let good = live.current(said);
        assert_eq!(
            (good.limits.daily, &*good.time_zone),
            (Dollars::from_nanos(5_000_000_000), "Europe/Berlin")
        );
        for broken in
            [r#"{"costLimits": {"daily": -1}}"#, "{", r#"{"costLimits": {"timeZone": "Mars/Olympus"}}"#]
        {
            fs::write(&path, broken).unwrap();
            let now = live.current(said);
            assert_eq!(now.limits, good.limits, "{broken}");
            assert!(now.mistake.is_some(), "{broken}");
            let started_again = Live::new(path.clone(), kept.clone(), writer.records()).current(said);
            assert_eq!(*started_again, *now, "{broken}");
        }
        fs::write(&path, r#"{"costLimits": {"daily": 6}}"#).unwrap();
        assert_eq!(live.current(said).mistake, None);
        fs::remove_file(&path).unwrap();
        assert_eq!(*live.current(said), Settings::default());
        drop(writer);
        let told = fs::read_to_string(dir.path().join("logs/activity.log")).unwrap();
        for said in
            ["daily cost limit is $5.00", "no time zone", "used again", "no daily cost limit any more"]
        {
            assert!(told.contains(said), "{said} in\n{told}");
        }
    }
}

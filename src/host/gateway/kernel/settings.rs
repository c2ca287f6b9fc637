//! `system/config.json`: the owner's settings, read again when the file changes.
//!
//! A broken edit changes nothing: the last good settings hold, over restarts, too, for they are kept beside the machine's
//! state; and the file's mistake is told until it is mended.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::OFlag;
use serde::Deserialize;

use crate::chain::chain;
use crate::fsx::{self, FileError};
use crate::host::records::calendar::Calendar;
use crate::host::records::limits::{Limits, Period};
use crate::host::records::money::Dollars;
use crate::host::records::writer::Records;

/// The settings, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub calendar: Calendar,
    /// As it is written; `UTC` where nothing is.
    pub time_zone: String,
    pub limits: Limits,
    /// Of the file as it is now, where these settings are an earlier one's.
    pub mistake: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ConfigFile {
    cost_limits: CostLimits,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct CostLimits {
    daily: Dollars,
    monthly: Dollars,
    reservation: Option<Dollars>,
    time_zone: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            calendar: Calendar::utc(),
            time_zone: "UTC".to_owned(),
            limits: Limits::default(),
            mistake: None,
        }
    }
}

impl Settings {
    /// # Errors
    /// What is wrong with it, in a sentence that quotes no value.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let file: ConfigFile = serde_json::from_slice(text).map_err(|error| {
            let kind =
                if error.is_data() { "a setting has another form than it should" } else { "it is no JSON" };
            format!("{kind} (line {}, column {})", error.line(), error.column())
        })?;
        let CostLimits { daily, monthly, reservation, time_zone } = file.cost_limits;
        let time_zone = time_zone.unwrap_or_else(|| "UTC".to_owned());
        let calendar = Calendar::of(&time_zone)
            .map_err(|_| "costLimits.timeZone is no time zone; one is written as Europe/Berlin".to_owned())?;
        let reservation = reservation.unwrap_or(Limits::DEFAULT_RESERVATION);
        Ok(Self { calendar, time_zone, limits: Limits { daily, monthly, reservation }, mistake: None })
    }
}

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
        let kept = read(&good).ok().flatten().and_then(|text| Settings::parse(&text).ok());
        let settings = Arc::new(kept.unwrap_or_default());
        Self { path, good, records, known: Mutex::new(Known { stamp: None, settings }) }
    }

    /// A look at the file costs a microsecond: it is taken each time.
    pub fn current(&self) -> Arc<Settings> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = stamp(&self.path);
        if known.stamp != Some(stamp) {
            let settings = Arc::new(self.read(&known.settings));
            known.stamp = Some(stamp);
            known.settings = settings;
        }
        Arc::clone(&known.settings)
    }

    fn read(&self, before: &Settings) -> Settings {
        let parsed = match read(&self.path) {
            Ok(Some(text)) => Settings::parse(&text).map(|settings| (settings, text)),
            Ok(None) => Ok((Settings::default(), b"{}".to_vec())),
            Err(error) => Err(chain(&error)),
        };
        match parsed {
            Ok((settings, text)) => {
                self.tell_changes(before, &settings);
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

    fn tell_changes(&self, before: &Settings, now: &Settings) {
        for period in Period::ALL {
            let (was, is) = (before.limits.of(period), now.limits.of(period));
            if was != is {
                let word = match period {
                    Period::Daily => "daily",
                    Period::Monthly => "monthly",
                };
                self.tell(&match is {
                    Dollars::ZERO => format!("there is no {word} cost limit any more"),
                    _ => {
                        format!("the {word} cost limit is {is}; what was spent in its period already counts")
                    }
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

/// A file of settings; what is none, or larger than any, is not read.
///
/// # Errors
/// [`FileError`].
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    const LARGEST: u64 = 1 << 20;
    let mut options = File::options();
    let file = match options.read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(FileError::at("read", path))?,
    };
    let mut text = Vec::new();
    let is_file = file.metadata().map_err(FileError::at("look at", path))?.is_file();
    file.take(LARGEST + 1).read_to_end(&mut text).map_err(FileError::at("read", path))?;
    if !is_file || text.len() as u64 > LARGEST {
        let why = io::Error::new(ErrorKind::InvalidInput, "it is no file of settings");
        return Err(FileError::at("read", path)(why));
    }
    Ok(Some(text))
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

    #[test]
    fn a_broken_edit_keeps_the_last_good_settings_and_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let writer = Writer::start(dir.path().join("logs")).unwrap();
        let kept = dir.path().join("kept.json");
        let live = Live::new(path.clone(), kept.clone(), writer.records());
        assert_eq!(*live.current(), Settings::default());
        fs::write(&path, r#"{"costLimits": {"daily": 5, "timeZone": "Europe/Berlin"}, "other": 1}"#).unwrap();
        let good = live.current();
        assert_eq!(
            (good.limits.daily, &*good.time_zone),
            (Dollars::from_nanos(5_000_000_000), "Europe/Berlin")
        );
        for broken in
            [r#"{"costLimits": {"daily": -1}}"#, "{", r#"{"costLimits": {"timeZone": "Mars/Olympus"}}"#]
        {
            fs::write(&path, broken).unwrap();
            let now = live.current();
            assert_eq!(now.limits, good.limits, "{broken}");
            assert!(now.mistake.is_some(), "{broken}");
            let started_again = Live::new(path.clone(), kept.clone(), writer.records()).current();
            assert_eq!(*started_again, *now, "{broken}");
        }
        fs::write(&path, r#"{"costLimits": {"daily": 6}}"#).unwrap();
        assert_eq!(live.current().mistake, None);
        fs::remove_file(&path).unwrap();
        assert_eq!(*live.current(), Settings::default());
        drop(writer);
        let told = fs::read_to_string(dir.path().join("logs/activity.log")).unwrap();
        for said in
            ["daily cost limit is $5.00", "no time zone", "used again", "no daily cost limit any more"]
        {
            assert!(told.contains(said), "{said} in\n{told}");
        }
    }

    #[test]
    fn a_mistake_quotes_nothing() {
        for text in [r#"{"costLimits": {"daily": "hunter2"}}"#, r#"{"costLimits": "hunter2"}"#, "hunter2"] {
            let mistake = Settings::parse(text.as_bytes()).unwrap_err();
            assert!(!mistake.contains("hunter2"), "{mistake}");
        }
    }
}

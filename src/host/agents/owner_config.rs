//! `system/config.json`: the owner's settings, as gateway and heartbeat read them.
//!
//! Both take the file as it is, else what was last good of it, so that they agree on the day; the gateway keeps that beside
//! the machine's state.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use serde::Deserialize;

use super::adapters::settings::{AgentFile, AgentSettings, DispatchFile, Price};
use crate::chain::chain;
use crate::fsx::FileError;
use crate::host::records::calendar::Calendar;
use crate::host::records::limits::Limits;
use crate::host::records::money::Dollars;

/// More is no file of settings.
const LARGEST: u64 = 1 << 20;

/// The settings, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub calendar: Calendar,
    /// As it is written; `UTC` where nothing is.
    pub time_zone: String,
    pub limits: Limits,
    pub agents: AgentSettings,
    pub storage: StorageQuotas,
    /// Of the file as it is now, where these settings are an earlier one's.
    pub mistake: Option<String>,
}

/// `storage` of `config.json`: how many bytes the tables of an app may take.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StorageQuotas {
    app_bytes: Option<u64>,
    apps: BTreeMap<String, u64>,
}

impl StorageQuotas {
    /// The quota of an app by its slug, if the owner has set one for it or for all.
    pub fn of(&self, slug: &str) -> Option<u64> {
        self.apps.get(slug).copied().or(self.app_bytes)
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ConfigFile {
    cost_limits: CostLimits,
    storage: StorageQuotas,
    agents: BTreeMap<String, AgentFile>,
    dispatch: DispatchFile,
    prices: BTreeMap<String, Price>,
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
            agents: AgentSettings::default(),
            storage: StorageQuotas::default(),
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
        let agents = AgentSettings::checked(file.agents, file.dispatch, file.prices)?;
        let limits = Limits { daily, monthly, reservation };
        Ok(Self { calendar, time_zone, limits, agents, storage: file.storage, mistake: None })
    }

    /// The file's; where it is broken, which is said in them, those that were last good.
    pub fn of(file: &Path, good: &Path) -> Self {
        let parsed = match read(file) {
            Ok(Some(text)) => Self::parse(&text),
            Ok(None) => Ok(Self::default()),
            Err(error) => Err(chain(&error)),
        };
        parsed.unwrap_or_else(|mistake| Self { mistake: Some(mistake), ..Self::last_good(good) })
    }

    /// Those that were kept when the file could last be used; the default, where none were.
    pub fn last_good(good: &Path) -> Self {
        let kept = read(good).ok().flatten().and_then(|text| Self::parse(&text).ok());
        kept.unwrap_or_default()
    }
}

/// A file of settings; what is none, or larger than any, is not read.
///
/// # Errors
/// [`FileError`].
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_file_means_what_was_last_good() {
        let dir = tempfile::tempdir().unwrap();
        let (file, good) = (dir.path().join("config.json"), dir.path().join("good.json"));
        let day = || {
            let settings = Settings::of(&file, &good);
            let day = settings.calendar.day("2026-11-20T23:30:00Z".parse().unwrap());
            (day.to_string(), settings.mistake.is_some())
        };
        let zone = |name: &str| format!(r#"{{"costLimits": {{"daily": 5, "timeZone": "{name}"}}}}"#);
        assert_eq!(day(), ("2026-11-20".to_owned(), false));
        std::fs::write(&file, zone("Europe/Berlin")).unwrap();
        assert_eq!(day(), ("2026-11-21".to_owned(), false));
        for broken in ["{", &zone("Mars/Olympus"), r#"{"costLimits": 3}"#, &" ".repeat(2 << 20)] {
            std::fs::write(&file, broken).unwrap();
            std::fs::write(&good, zone("Europe/Berlin")).unwrap();
            assert_eq!(day(), ("2026-11-21".to_owned(), true));
            // What was kept is broken, too: records are kept whatever becomes of it.
            std::fs::write(&good, broken).unwrap();
            assert_eq!(day(), ("2026-11-20".to_owned(), true));
        }
        // As the gateway has it: without a file there are no settings, whatever there was.
        std::fs::write(&good, zone("Europe/Berlin")).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(day(), ("2026-11-20".to_owned(), false));
    }

    #[test]
    fn a_mistake_quotes_nothing() {
        for text in [r#"{"costLimits": {"daily": "hunter2"}}"#, r#"{"costLimits": "hunter2"}"#, "hunter2"] {
            let mistake = Settings::parse(text.as_bytes()).unwrap_err();
            assert!(!mistake.contains("hunter2"), "{mistake}");
        }
    }
}

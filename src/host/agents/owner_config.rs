//! `system/config.json`: the owner's settings, shared by the gateway and `svc-heartbeat`.
//!
//! Both fall back to the last good version if the current file is invalid, so that they agree on when a day starts. The
//! gateway saves that version in the machine's state directory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use serde::Deserialize;

use super::adapters::settings::{AgentEntry, AgentSettings, DispatchSection, Price};
use super::config_names::check_names;
use crate::records::calendar::Calendar;
use crate::records::limits::Limits;
use crate::records::money::Dollars;
use svc_base::error_chain::format_chain;
use svc_base::fsx::FileError;

/// Maximum size of the settings file.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Validated settings.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnerSettings {
    pub calendar: Calendar,
    /// Time zone name as written in the file; `UTC` by default.
    pub time_zone: String,
    pub limits: Limits,
    pub agents: AgentSettings,
    pub storage: StorageQuotas,
    /// Error in the current file. If set, these are the last good settings, or the defaults if there are none.
    pub error: Option<String>,
}

/// The `storage` section of `config.json`: app storage quotas, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StorageQuotas {
    app_bytes: Option<u64>,
    apps: BTreeMap<String, u64>,
}

impl StorageQuotas {
    /// Returns the quota for this slug, or else the quota for all apps, if the owner has set either.
    pub fn quota_for(&self, slug: &str) -> Option<u64> {
        self.apps.get(slug).copied().or(self.app_bytes)
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ConfigFile {
    cost_limits: CostLimits,
    storage: StorageQuotas,
    agents: BTreeMap<String, AgentEntry>,
    dispatch: DispatchSection,
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

impl Default for OwnerSettings {
    fn default() -> Self {
        Self {
            calendar: Calendar::utc(),
            time_zone: "UTC".to_owned(),
            limits: Limits::default(),
            agents: AgentSettings::default(),
            storage: StorageQuotas::default(),
            error: None,
        }
    }
}

impl OwnerSettings {
    /// Parses and validates the settings.
    ///
    /// # Errors
    /// Returns a message if the text isn't valid JSON, a value is invalid, or a name is unknown. Values can be secrets,
    /// so they are never quoted.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let settings = Self::parse_lenient(text)?;
        check_names(text)?;
        Ok(settings)
    }

    /// Like [`Self::parse`], but ignores unknown names.
    fn parse_lenient(text: &[u8]) -> Result<Self, String> {
        let file: ConfigFile = serde_json::from_slice(text).map_err(|error| {
            let kind = if error.is_data() { "invalid value" } else { "invalid JSON" };
            format!("{kind} (line {}, column {})", error.line(), error.column())
        })?;
        let CostLimits { daily, monthly, reservation, time_zone } = file.cost_limits;
        let time_zone = time_zone.unwrap_or_else(|| "UTC".to_owned());
        let calendar = Calendar::for_zone(&time_zone)
            .map_err(|_| "costLimits.timeZone is not a time zone (example: Europe/Berlin)".to_owned())?;
        let reservation = reservation.unwrap_or(Limits::DEFAULT_RESERVATION);
        let agents = AgentSettings::validate(file.agents, file.dispatch, file.prices)?;
        let limits = Limits { daily, monthly, reservation };
        Ok(Self { calendar, time_zone, limits, agents, storage: file.storage, error: None })
    }

    /// Loads the settings, or the defaults if there is no file. If the file is invalid or unreadable, returns the last
    /// good settings along with the error.
    pub fn load(file: &Path, last_good: &Path) -> Self {
        let parsed = match read_config_file(file) {
            Ok(Some(text)) => Self::parse(&text),
            Ok(None) => Ok(Self::default()),
            Err(error) => Err(format_chain(&error)),
        };
        parsed.unwrap_or_else(|error| Self { error: Some(error), ..Self::load_last_good(last_good) })
    }

    /// Loads the last good settings, or the defaults. Ignores unknown names: the file may come from an earlier release,
    /// which ignored them too.
    pub fn load_last_good(file: &Path) -> Self {
        let settings = read_config_file(file).ok().flatten().and_then(|text| Self::parse_lenient(&text).ok());
        settings.unwrap_or_default()
    }
}

/// Reads a settings file, or returns `None` if it doesn't exist. Fails unless it is a regular file of at most
/// `MAX_CONFIG_BYTES`.
pub fn read_config_file(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    let mut options = File::options();
    let file = match options.read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(FileError::wrap("read", path))?,
    };
    let mut text = Vec::new();
    let is_file = file.metadata().map_err(FileError::wrap("stat", path))?.is_file();
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut text).map_err(FileError::wrap("read", path))?;
    if !is_file || text.len() as u64 > MAX_CONFIG_BYTES {
        let error = io::Error::new(ErrorKind::InvalidInput, "not a regular file of at most 1 MiB");
        return Err(FileError::wrap("read", path)(error));
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_file_falls_back_to_last_good_settings() {
        let dir = tempfile::tempdir().unwrap();
        let (file, good) = (dir.path().join("config.json"), dir.path().join("good.json"));
        let day = || {
            let settings = OwnerSettings::load(&file, &good);
            let day = settings.calendar.day("2026-11-20T23:30:00Z".parse().unwrap());
            (day.to_string(), settings.error.is_some())
        };
        let zone = |name: &str| format!(r#"{{"costLimits": {{"daily": 5, "timeZone": "{name}"}}}}"#);
        assert_eq!(day(), ("2026-11-20".to_owned(), false));
        std::fs::write(&file, zone("Europe/Berlin")).unwrap();
        assert_eq!(day(), ("2026-11-21".to_owned(), false));
        for broken in ["{", &zone("Mars/Olympus"), r#"{"costLimits": 3}"#, &" ".repeat(2 << 20)] {
            std::fs::write(&file, broken).unwrap();
            std::fs::write(&good, zone("Europe/Berlin")).unwrap();
            assert_eq!(day(), ("2026-11-21".to_owned(), true));
            // Fall back to the defaults if the last good version is broken as well.
            std::fs::write(&good, broken).unwrap();
            assert_eq!(day(), ("2026-11-20".to_owned(), true));
        }
        // Without a file, the defaults apply, as in the gateway.
        std::fs::write(&good, zone("Europe/Berlin")).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(day(), ("2026-11-20".to_owned(), false));
    }

    #[test]
    fn unknown_name_keeps_last_good_settings() {
        let dir = tempfile::tempdir().unwrap();
        let (file, good) = (dir.path().join("config.json"), dir.path().join("good.json"));
        std::fs::write(&file, r#"{"costLimits": {"dailly": 1}}"#).unwrap();
        // An earlier release accepted this file.
        std::fs::write(&good, r#"{"costLimits": {"daily": 5, "note": "x"}}"#).unwrap();
        let settings = OwnerSettings::load(&file, &good);
        assert_eq!(settings.limits.daily, Dollars::from_nanos(5_000_000_000));
        assert!(settings.error.is_some_and(|error| error.contains("costLimits.dailly")));
    }

    #[test]
    fn parse_errors_never_contain_values() {
        for text in [r#"{"costLimits": {"daily": "hunter2"}}"#, r#"{"costLimits": "hunter2"}"#, "hunter2"] {
            let error = OwnerSettings::parse(text.as_bytes()).unwrap_err();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}

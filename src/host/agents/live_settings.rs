//! Live-reloaded owner settings ([`super::owner_config`]).
//!
//! A broken edit has no effect: the last good settings stay active, even across restarts, thanks to a copy in the
//! machine's state directory. [`OwnerSettings::error`] holds the error until the file is fixed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::owner_config::{OwnerSettings, read_config_file};
use crate::records::limits::Period;
use crate::records::money::Dollars;
use crate::records::writer::Records;
use svc_base::error_chain::format_chain;
use svc_base::fsx;

/// Delay before retrying a failed read of the file or a failed write of its last good copy.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Cheap file version stamp: inode, size and ctime, or `None` if there is no file. Unlike mtime, ctime also changes
/// with the permissions, so an unreadable file is retried after a chmod.
type FileStamp = Option<(u64, u64, i64, i64)>;

pub struct LiveSettings {
    path: PathBuf,
    /// Copy of the last good version.
    last_good: PathBuf,
    records: Records,
    cached: Mutex<CachedSettings>,
}

struct CachedSettings {
    stamp: Option<FileStamp>,
    /// When to reload the file even if it is unchanged, after it couldn't be read or its copy couldn't be saved.
    retry_at: Option<Instant>,
    settings: Arc<OwnerSettings>,
}

impl LiveSettings {
    pub fn new(path: PathBuf, last_good: PathBuf, records: Records) -> Self {
        let settings = Arc::new(OwnerSettings::load_last_good(&last_good));
        let cached = Mutex::new(CachedSettings { stamp: None, retry_at: None, settings });
        Self { path, last_good, records, cached }
    }

    /// Returns the current settings. Every call stats the file for changes, which takes about a microsecond.
    /// `describe_spending` describes the spending that counts toward a changed limit, for `activity.log`.
    pub fn current(
        &self,
        describe_spending: impl Fn(&OwnerSettings, Period) -> String,
    ) -> Arc<OwnerSettings> {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = read_file_stamp(&self.path);
        let is_retry_due = cached.retry_at.is_some_and(|at| at <= Instant::now());
        if cached.stamp != Some(stamp) || is_retry_due {
            let (settings, is_complete) = self.reload(&cached.settings, describe_spending);
            cached.stamp = Some(stamp);
            cached.retry_at = (!is_complete).then(|| Instant::now() + RETRY_INTERVAL);
            cached.settings = Arc::new(settings);
        }
        Arc::clone(&cached.settings)
    }

    /// Reloads the file. Returns the settings to use, and whether the file was read and, if valid, copied.
    fn reload(
        &self,
        before: &OwnerSettings,
        describe_spending: impl Fn(&OwnerSettings, Period) -> String,
    ) -> (OwnerSettings, bool) {
        let parsed = match read_config_file(&self.path) {
            Ok(Some(text)) => OwnerSettings::parse(&text).map(|settings| (settings, text)),
            Ok(None) => Ok((OwnerSettings::default(), b"{}".to_vec())),
            Err(error) => {
                let error = format_chain(&error);
                // Retries fail with the same error; report it once.
                if before.error.as_ref() != Some(&error) {
                    self.report(&format!(
                        "system/config.json cannot be read; keeping the previous settings: {error}"
                    ));
                }
                return (OwnerSettings { error: Some(error), ..before.clone() }, false);
            }
        };
        match parsed {
            Ok((settings, text)) => {
                self.report_changes(before, &settings, describe_spending);
                let saved = fsx::write_atomic(&self.last_good, &text, 0o600);
                if let Err(error) = &saved {
                    tracing::warn!(error = %format_chain(error), "cannot save the last good settings; will retry");
                }
                (settings, saved.is_ok())
            }
            Err(error) => {
                self.report(&format!(
                    "system/config.json is invalid; keeping the previous settings until it is fixed: {error}"
                ));
                (OwnerSettings { error: Some(error), ..before.clone() }, true)
            }
        }
    }

    fn report_changes(
        &self,
        before: &OwnerSettings,
        current: &OwnerSettings,
        describe_spending: impl Fn(&OwnerSettings, Period) -> String,
    ) {
        for period in Period::ALL {
            let (earlier_limit, limit) =
                (before.limits.for_period(period), current.limits.for_period(period));
            if limit != earlier_limit {
                let name = period.as_str();
                self.report(&match limit {
                    Dollars::ZERO => format!("the {name} cost limit was removed"),
                    _ => format!("the {name} cost limit is {limit}; {}", describe_spending(current, period)),
                });
            }
        }
        if before.time_zone != current.time_zone {
            self.report(&format!("days now start at midnight in {}", current.time_zone));
        }
        if before.error.is_some() {
            self.report("system/config.json is in effect again");
        }
    }

    fn report(&self, message: &str) {
        tracing::info!(detail = message, "checked owner settings");
        // The writer reports a dropped line as a gap.
        let _ = self.records.note(message);
    }
}

fn read_file_stamp(path: &Path) -> FileStamp {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.ino(), meta.len(), meta.ctime(), meta.ctime_nsec()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::records::writer::Writer;

    fn describe_spending(_: &OwnerSettings, _: Period) -> String {
        "spending so far in the current period counts toward it".to_owned()
    }

    /// Makes a pending retry due and hides file changes, so that only the retry triggers a reload.
    fn expire_retry(live: &LiveSettings) {
        let mut cached = live.cached.lock().unwrap();
        cached.stamp = Some(read_file_stamp(&live.path));
        cached.retry_at = cached.retry_at.map(|_| Instant::now());
    }

    #[test]
    fn failed_read_is_retried_and_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let writer = Writer::start(dir.path().join("logs")).unwrap();
        let live = LiveSettings::new(path.clone(), dir.path().join("last-good.json"), writer.records());
        fs::create_dir(&path).unwrap();
        assert!(live.current(describe_spending).error.is_some());
        expire_retry(&live);
        assert!(live.current(describe_spending).error.is_some());
        fs::remove_dir(&path).unwrap();
        fs::write(&path, r#"{"costLimits": {"daily": 5}}"#).unwrap();
        expire_retry(&live);
        let current = live.current(describe_spending);
        assert_eq!((current.limits.daily, &current.error), (Dollars::from_nanos(5_000_000_000), &None));
        drop(writer);
        let activity = fs::read_to_string(dir.path().join("logs/activity.log")).unwrap();
        assert_eq!(activity.matches("cannot be read").count(), 1, "{activity}");
        assert!(!activity.contains("invalid") && activity.contains("in effect again"), "{activity}");
    }

    #[test]
    fn failed_write_of_last_good_copy_is_retried() {
        let dir = tempfile::tempdir().unwrap();
        let (path, state) = (dir.path().join("config.json"), dir.path().join("state"));
        let writer = Writer::start(dir.path().join("logs")).unwrap();
        fs::write(&path, r#"{"costLimits": {"daily": 5}}"#).unwrap();
        // A file in its place prevents creating the directory.
        fs::write(&state, "").unwrap();
        let live = LiveSettings::new(path, state.join("last-good.json"), writer.records());
        let current = live.current(describe_spending);
        fs::remove_file(&state).unwrap();
        expire_retry(&live);
        assert_eq!(*live.current(describe_spending), *current);
        assert_eq!(OwnerSettings::load_last_good(&live.last_good), *current);
    }

    #[test]
    fn chmod_changes_file_stamp() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let before = read_file_stamp(file.path());
        // Linux file timestamps have a granularity of a few milliseconds.
        std::thread::sleep(Duration::from_millis(50));
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o640)).unwrap();
        assert_ne!(read_file_stamp(file.path()), before);
    }

    #[test]
    fn broken_edit_keeps_last_good_settings() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let writer = Writer::start(dir.path().join("logs")).unwrap();
        let last_good = dir.path().join("last-good.json");
        let live = LiveSettings::new(path.clone(), last_good.clone(), writer.records());
        assert_eq!(*live.current(describe_spending), OwnerSettings::default());
        fs::write(&path, r#"{"costLimits": {"daily": 5, "timeZone": "Europe/Berlin"}, "other": 1}"#).unwrap();
        let good = live.current(describe_spending);
        assert_eq!(
            (good.limits.daily, &*good.time_zone),
            (Dollars::from_nanos(5_000_000_000), "Europe/Berlin")
        );
        for broken in
            [r#"{"costLimits": {"daily": -1}}"#, "{", r#"{"costLimits": {"timeZone": "Mars/Olympus"}}"#]
        {
            fs::write(&path, broken).unwrap();
            let current = live.current(describe_spending);
            assert_eq!(current.limits, good.limits, "{broken}");
            assert!(current.error.is_some(), "{broken}");
            let restarted = LiveSettings::new(path.clone(), last_good.clone(), writer.records())
                .current(describe_spending);
            assert_eq!(*restarted, *current, "{broken}");
        }
        fs::write(&path, r#"{"costLimits": {"daily": 6}}"#).unwrap();
        assert_eq!(live.current(describe_spending).error, None);
        fs::remove_file(&path).unwrap();
        assert_eq!(*live.current(describe_spending), OwnerSettings::default());
        drop(writer);
        let activity = fs::read_to_string(dir.path().join("logs/activity.log")).unwrap();
        for line in [
            "daily cost limit is $5.00",
            "not a time zone",
            "in effect again",
            "daily cost limit was removed",
        ] {
            assert!(activity.contains(line), "{line} in\n{activity}");
        }
    }
}

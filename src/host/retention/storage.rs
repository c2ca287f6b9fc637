//! Appends a daily line to `storage.jsonl` with the sizes of the disk, home directory, apps, logs and database.
//!
//! App and log sizes are included in the home directory's, and app schemas in the database's. There is at most one line
//! per day.

mod disk_usage;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::records::jsonl;
use crate::system::app_sizes;
use crate::system::layout::Layout;
use crate::system::postgres::{ConnectError, PostgresServer};
use svc_base::clock;
use svc_base::fsx::FileError;

const DATABASE_TIMEOUT: Duration = Duration::from_secs(60);
/// Directories not read within this time are not counted. The systemd unit times out after half an hour.
const WALK_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum number of apps per line; only the largest are listed.
const MAX_APPS: usize = 200;
/// Number of bytes to search for today's line at the end of the file. A line is about 300 bytes plus 70 per app, so
/// this holds a month of maximum-size lines.
const TAIL_BYTES: u64 = 512 << 10;

/// Errors from measuring the storage and appending today's line.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot measure the database")]
    Database(#[source] tokio_postgres::Error),
    #[error("timed out measuring the database")]
    TimedOut,
}

impl StorageError {
    pub fn is_database_error(&self) -> bool {
        !matches!(self, Self::File(_))
    }
}

/// A line in `storage.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageLine {
    pub version: u32,
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub date: Date,
    /// Size of the file system that holds the home directory.
    pub disk_bytes: u64,
    pub disk_free_bytes: u64,
    #[serde(flatten)]
    pub files: FileSizes,
    pub database_bytes: u64,
    pub apps: Vec<AppUsage>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FileSizes {
    pub home_bytes: u64,
    pub apps_bytes: u64,
    pub logs_bytes: u64,
    /// Number of directories that were unreadable or not reached within `WALK_TIMEOUT`. If nonzero, the sizes are
    /// underestimates.
    #[serde(rename = "unreadable", skip_serializing_if = "is_zero")]
    pub skipped_directories: u64,
}

/// Sizes of an app's directory and of its schema, including indexes and TOAST tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AppUsage {
    pub slug: String,
    pub files_bytes: u64,
    pub database_bytes: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

pub fn log_path(layout: &Layout) -> PathBuf {
    layout.logs().join("storage.jsonl")
}

/// Measures the storage and appends today's line.
///
/// # Errors
/// [`StorageError`] if the home directory, the database or the log file is inaccessible, or the database doesn't
/// respond within `DATABASE_TIMEOUT`. A later run on the same day measures again, unless the line was written but could
/// not be synced.
pub async fn measure_and_append(
    layout: &Layout,
    server: &PostgresServer,
    today: Date,
) -> Result<StorageLine, StorageError> {
    let owned = layout.clone();
    let deadline = Instant::now() + WALK_TIMEOUT;
    let walked = tokio::task::spawn_blocking(move || {
        let disk =
            fs4::statvfs(owned.home()).map_err(FileError::wrap("read the free space of", &owned.home()))?;
        let walked = disk_usage::measure_home(&owned.home(), &owned.apps(), &owned.logs(), deadline)?;
        Ok::<_, FileError>((disk, walked))
    });
    // Propagate a panic from the walk.
    let (disk, (files, directories)) =
        walked.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?;
    let result = tokio::time::timeout(DATABASE_TIMEOUT, measure_database(server)).await;
    let (database_bytes, schemas) = result.map_err(|_| StorageError::TimedOut)??;
    let line = StorageLine {
        version: 1,
        timestamp: clock::now_ms(),
        date: today,
        disk_bytes: disk.total_space(),
        disk_free_bytes: disk.available_space(),
        files,
        database_bytes,
        apps: merge_apps(directories, schemas),
    };
    let text = serde_json::to_vec(&line).expect("plain fields serialize to JSON");
    jsonl::append_line(&log_path(layout), &text)?;
    Ok(line)
}

/// Merges directory and schema sizes by slug, keeping only the largest apps.
fn merge_apps(directories: BTreeMap<String, u64>, schemas: BTreeMap<String, u64>) -> Vec<AppUsage> {
    let mut apps: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (slug, bytes) in directories {
        apps.entry(slug).or_default().0 = bytes;
    }
    for (slug, bytes) in schemas {
        apps.entry(slug).or_default().1 = bytes;
    }
    let app = |(slug, (files_bytes, database_bytes))| AppUsage { slug, files_bytes, database_bytes };
    let mut apps: Vec<AppUsage> = apps.into_iter().map(app).collect();
    apps.sort_by_key(|app| std::cmp::Reverse(app.files_bytes + app.database_bytes));
    apps.truncate(MAX_APPS);
    apps.sort_by(|a, b| a.slug.cmp(&b.slug));
    apps
}

/// Returns the database size, and each app's schema size by slug.
async fn measure_database(server: &PostgresServer) -> Result<(u64, BTreeMap<String, u64>), StorageError> {
    let client = server.connect(server.database(), "svc-heartbeat").await?;
    let size = client.query_one("SELECT pg_database_size(current_database())", &[]).await;
    let size = size.and_then(|row| row.try_get::<_, i64>(0)).map_err(StorageError::Database)?;
    let schemas = app_sizes::measure(&client).await.map_err(StorageError::Database)?;
    let schemas = schemas.into_iter().map(|(slug, size)| (slug, size.bytes)).collect();
    Ok((u64::try_from(size).unwrap_or(0), schemas))
}

/// Returns whether the file has a line for this day.
pub fn is_measured(file: &Path, day: Date) -> Result<bool, FileError> {
    #[derive(Deserialize)]
    struct DatedLine {
        date: Date,
    }
    let tail = match read_tail(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        tail => tail.map_err(FileError::wrap("read", file))?,
    };
    // A line without a newline was torn by a crash.
    let lines = tail.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
    let mut days = lines.filter_map(|line| serde_json::from_slice::<DatedLine>(line).ok());
    Ok(days.any(|line| line.date == day))
}

fn read_tail(file: &Path) -> io::Result<Vec<u8>> {
    let mut file = fs::File::open(file)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut tail)?;
    Ok(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_apps_keeps_the_largest_sorted_by_slug() {
        let sizes =
            |pairs: &[(&str, u64)]| pairs.iter().map(|(slug, bytes)| ((*slug).to_owned(), *bytes)).collect();
        let listed = merge_apps(sizes(&[("notes", 7), ("todo", 1)]), sizes(&[("notes", 5), ("old", 3)]));
        let listed: Vec<_> =
            listed.iter().map(|app| (&*app.slug, app.files_bytes, app.database_bytes)).collect();
        assert_eq!(listed, [("notes", 7, 5), ("old", 0, 3), ("todo", 1, 0)]);
        let many = (0..500).map(|n| (format!("app-{n:03}"), n)).collect();
        let listed = merge_apps(many, BTreeMap::new());
        assert_eq!((listed.len(), &*listed[0].slug), (MAX_APPS, "app-300"));
    }

    #[test]
    fn day_is_measured_once_its_line_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("storage.jsonl");
        let day = Date::constant(2026, 11, 21);
        assert!(!is_measured(&file, day).unwrap());
        fs::write(&file, "{\"date\":\"2026-11-20\"}\n{\"date\":\"2026-11-21\"").unwrap();
        assert!(!is_measured(&file, day).unwrap());
        fs::write(&file, "{\"date\":\"2026-11-21\"}\n{\"date\":\"2026-11-22\"}\n").unwrap();
        assert!(is_measured(&file, day).unwrap());
    }
}

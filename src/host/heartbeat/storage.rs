//! The day's measurement: one line of `storage.jsonl` with what home, apps, logs and database take.
//!
//! Sizes of files are what they take on the disk, each counted once whatever its names, on the home's file system alone.
//! Apps and logs are parts of the home. A day has at most one line.

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::fsx::FileError;
use crate::host::jsonl;
use crate::host::layout::Layout;
use crate::host::pgconn::{ConnectError, Server};

const DATABASE_DEADLINE: Duration = Duration::from_secs(60);
/// Lines are some 200 bytes: this holds the last year's.
const TAIL: u64 = 64 << 10;

/// Why there is no line for today yet.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("measure the database")]
    Database(#[source] tokio_postgres::Error),
    #[error("measure the database: no answer in time")]
    Silent,
}

impl StorageError {
    pub fn is_unavailable(&self) -> bool {
        !matches!(self, Self::File(_))
    }
}

/// A line of `storage.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Line {
    pub version: u32,
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub date: Date,
    #[serde(flatten)]
    pub files: Sizes,
    pub database_bytes: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sizes {
    pub home_bytes: u64,
    pub apps_bytes: u64,
    pub logs_bytes: u64,
    /// Directories that could not be looked into: the sizes are then too small.
    #[serde(skip_serializing_if = "is_zero")]
    pub unreadable: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

pub fn path(layout: &Layout) -> PathBuf {
    layout.logs().join("storage.jsonl")
}

/// Measures, and appends the line.
///
/// # Errors
/// [`StorageError`]; there is then no line, and a later run of the day measures.
pub async fn measure(layout: &Layout, server: &Server, today: Date) -> Result<Line, StorageError> {
    let of = layout.clone();
    let walked = tokio::task::spawn_blocking(move || walk(&of.home(), &of.apps(), &of.logs())).await;
    // A panic in there is no error that we could name: it goes on here.
    let files = walked.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?;
    let asked = tokio::time::timeout(DATABASE_DEADLINE, database(server)).await;
    let database_bytes = asked.map_err(|_| StorageError::Silent)??;
    let line = Line { version: 1, timestamp: clock::now_ms(), date: today, files, database_bytes };
    let text = serde_json::to_vec(&line).expect("plain fields are JSON");
    jsonl::append_line(&path(layout), &text)?;
    Ok(line)
}

async fn database(server: &Server) -> Result<u64, StorageError> {
    let client = server.connect(server.database(), "svc-heartbeat").await?;
    let row = client.query_one("SELECT pg_database_size(current_database())", &[]).await;
    let bytes: i64 = row.and_then(|row| row.try_get(0)).map_err(StorageError::Database)?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// Whether this day has its line.
///
/// # Errors
/// [`FileError`].
pub fn is_measured(file: &Path, day: Date) -> Result<bool, FileError> {
    #[derive(Deserialize)]
    struct Of {
        date: Date,
    }
    let tail = match tail(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        tail => tail.map_err(FileError::at("read", file))?,
    };
    // A line is whole with its end; what a crash tore is none.
    let lines = tail.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
    let mut days = lines.filter_map(|line| serde_json::from_slice::<Of>(line).ok());
    Ok(days.any(|of| of.date == day))
}

fn tail(file: &Path) -> io::Result<Vec<u8>> {
    let mut file = fs::File::open(file)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    file.take(TAIL).read_to_end(&mut tail)?;
    Ok(tail)
}

fn walk(home: &Path, apps: &Path, logs: &Path) -> Result<Sizes, FileError> {
    let top = fs::symlink_metadata(home).map_err(FileError::at("measure", home))?;
    let mut sizes = Sizes::default();
    let mut counted = HashSet::new();
    let mut directories = vec![home.to_owned()];
    while let Some(directory) = directories.pop() {
        let (in_apps, in_logs) = (directory.starts_with(apps), directory.starts_with(logs));
        let Ok(entries) = fs::read_dir(&directory) else {
            sizes.unreadable += 1;
            continue;
        };
        // What vanishes while we look takes no room any more.
        for (entry, meta) in
            entries.flatten().filter_map(|entry| entry.metadata().ok().map(|meta| (entry, meta)))
        {
            if meta.dev() != top.dev() || !is_first(&meta, &mut counted) {
                continue;
            }
            let bytes = meta.blocks() * 512;
            sizes.home_bytes += bytes;
            sizes.apps_bytes += if in_apps { bytes } else { 0 };
            sizes.logs_bytes += if in_logs { bytes } else { 0 };
            if meta.is_dir() {
                directories.push(entry.path());
            }
        }
    }
    Ok(sizes)
}

/// A file with several names counts by the first that is met.
fn is_first(meta: &Metadata, counted: &mut HashSet<u64>) -> bool {
    meta.is_dir() || meta.nlink() == 1 || counted.insert(meta.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_of_the_disk_and_each_file_counts_once() {
        let dir = tempfile::tempdir().unwrap();
        let (home, apps, logs) =
            (dir.path().join("h"), dir.path().join("h/apps"), dir.path().join("h/system/logs"));
        for dir in [&apps, &logs] {
            fs::create_dir_all(dir).unwrap();
        }
        let before = walk(&home, &apps, &logs).unwrap();
        fs::write(apps.join("a"), vec![1; 100_000]).unwrap();
        fs::hard_link(apps.join("a"), apps.join("b")).unwrap();
        fs::write(logs.join("activity.log"), vec![1; 50_000]).unwrap();
        std::os::unix::fs::symlink("/usr", home.join("elsewhere")).unwrap();
        let after = walk(&home, &apps, &logs).unwrap();
        let (apps, logs) = (after.apps_bytes - before.apps_bytes, after.logs_bytes - before.logs_bytes);
        assert!((100_000..200_000).contains(&apps) && (50_000..100_000).contains(&logs), "{after:?}");
        assert!(after.home_bytes - before.home_bytes < apps + logs + 10_000, "{after:?}");
    }

    #[test]
    fn a_day_is_measured_once_its_line_is_whole() {
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

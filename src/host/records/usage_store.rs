//! Usage store: the in-memory [`Ledger`] and its files.
//!
//! Interactions are the source of truth. `usage.jsonl` is written periodically, and opening the store recounts every
//! unsealed day whose interactions still exist, so after any crash the totals equal the sum of the recorded
//! interactions. Totals for days whose files have expired come from `usage.jsonl` only.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::civil::Date;
use nix::fcntl::OFlag;
use serde::Deserialize;

use super::entry::Interaction;
use super::files;
use super::ledger::{Ledger, Report, Totals, UsageQuery};
use super::log_file_names::INTERACTIONS;
use super::money::Dollars;
use super::seals::{Seal, Seals};
use super::writer::{FileStamp, LineDropped, LogFile, Records};
use svc_base::error_chain::format_chain;
use svc_base::failpoint;
use svc_base::fsx::{self, FileError};

/// Timeout for the flush before sealing days, compacting `usage.jsonl` or reading restored records.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
const USAGE_FILE: &str = "usage.jsonl";
/// Compacted file before it replaces `usage.jsonl`; left behind by an interrupted compaction.
const NEW_USAGE_FILE: &str = "usage.jsonl.new";
/// Maximum number of obsolete lines in `usage.jsonl`, on top of one per current line, before the file is compacted.
const MAX_OBSOLETE_LINES: u64 = 20_000;
/// Only the end of a longer line is kept in memory. It isn't valid JSON, so the line is ignored.
const MAX_LINE_BYTES: u64 = 8 << 20;
const CHUNK_BYTES: usize = 256 << 10;

/// The fail points in a compaction.
pub const FAILPOINTS: &[&str] = &["usage.begin", "usage.written", "usage.replaced"];

/// The ledger and its files.
pub struct UsageStore {
    ledger: Mutex<Ledger>,
    records: Records,
    logs: PathBuf,
    seal_file: PathBuf,
    /// Number of lines in `usage.jsonl`. The lock serializes writes to the file.
    line_count: Mutex<u64>,
    /// Days with dropped interactions, which are counted but missing from the files.
    incomplete_days: Mutex<BTreeSet<Date>>,
    restore_detector: Option<RestoreDetector>,
}

/// Detects restored records by a file that every restore replaces. The ledger must then be reloaded; otherwise, the
/// restored totals would be missing and the next compaction would delete them.
pub struct RestoreDetector {
    path: PathBuf,
    /// File stamp as of the last read of the records.
    last_stamp: Mutex<Option<FileStamp>>,
}

impl RestoreDetector {
    /// Remembers the file's current stamp. Call this before reading the records.
    pub fn new(path: PathBuf) -> Self {
        let detector = Self { path, last_stamp: Mutex::default() };
        *lock(&detector.last_stamp) = detector.read_stamp();
        detector
    }

    fn read_stamp(&self) -> Option<FileStamp> {
        File::open(&self.path).and_then(|file| FileStamp::of_file(&file)).ok()
    }
}

impl UsageStore {
    /// Opens the store: reads its files and removes the temporary file of an interrupted compaction. `seal_file` must
    /// be outside the log directory.
    ///
    /// # Errors
    /// [`FileError`] if an existing log file cannot be read or the temporary file cannot be removed.
    pub fn open(records: Records, logs: PathBuf, seal_file: PathBuf) -> Result<Self, FileError> {
        fsx::remove_if_exists(&logs.join(NEW_USAGE_FILE))?;
        let (ledger, line_count) = read_ledger_and_line_count(&logs, &seal_file)?;
        Ok(Self {
            ledger: Mutex::new(ledger),
            records,
            logs,
            seal_file,
            line_count: Mutex::new(line_count),
            incomplete_days: Mutex::default(),
            restore_detector: None,
        })
    }

    /// Reloads the store's files after each restore.
    #[must_use]
    pub fn with_restore_detector(self, detector: RestoreDetector) -> Self {
        Self { restore_detector: Some(detector), ..self }
    }

    /// Reloads the files if a restore has replaced them, blocking calls to [`Self::record`] meanwhile. Returns `false`
    /// if a reload is needed but fails; nothing may be written in that case.
    fn reload_if_restored(&self, line_count: &mut u64) -> bool {
        let Some(detector) = &self.restore_detector else { return true };
        let mut last_stamp = lock(&detector.last_stamp);
        let current_stamp = detector.read_stamp();
        if *last_stamp == current_stamp {
            return true;
        }
        let mut ledger = self.lock_ledger();
        if !self.records.flush(FLUSH_TIMEOUT) {
            return false;
        }
        match read_ledger_and_line_count(&self.logs, &self.seal_file) {
            Ok((restored, restored_line_count)) => {
                (*ledger, *line_count, *last_stamp) = (restored, restored_line_count, current_stamp);
                tracing::info!("reloaded records after a restore");
                true
            }
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "cannot read restored records; will retry");
                false
            }
        }
    }

    /// Returns whether a restore has replaced the files since they were last read. The next [`Self::write`] reloads
    /// them.
    pub fn is_outdated(&self) -> bool {
        let detector = self.restore_detector.as_ref();
        detector.is_some_and(|detector| *lock(&detector.last_stamp) != detector.read_stamp())
    }

    fn lock_ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    /// Records a finished dispatch and counts it toward `day`.
    ///
    /// # Errors
    /// [`LineDropped`] if the interaction could not be queued. The dispatch still counts until this process exits, but
    /// is lost when its day is recounted.
    pub fn record(&self, day: Date, interaction: &Interaction) -> Result<(), LineDropped> {
        let totals = Totals::for_dispatch(interaction.cost, interaction.tokens_in, interaction.tokens_out);
        // Hold the lock across both steps: a seal created in between would cover the interaction but not its totals.
        let mut ledger = self.lock_ledger();
        let accepted = self.records.append(LogFile::Interactions(day), interaction);
        ledger.count(day, &interaction.sender_id, &interaction.model, &totals);
        if accepted.is_err() {
            lock(&self.incomplete_days).insert(day);
        }
        accepted
    }

    pub fn report(&self, query: &UsageQuery) -> Report {
        self.lock_ledger().report(query)
    }

    pub fn spent(&self, user: &str, start: Date, end: Date) -> Dollars {
        self.lock_ledger().spent(user, start, end)
    }

    pub fn users_since(&self, start: Date) -> Vec<String> {
        self.lock_ledger().users_since(start).into_iter().map(str::to_owned).collect()
    }

    /// Appends missing lines to `usage.jsonl`; compacts it if it has too many obsolete lines.
    pub fn write(&self) {
        let mut line_count = lock(&self.line_count);
        if !self.reload_if_restored(&mut line_count) {
            return;
        }
        self.write_lines(&mut line_count);
        let keys = self.lock_ledger().key_count() as u64;
        if *line_count > 2 * keys + MAX_OBSOLETE_LINES {
            self.compact_lines(&mut line_count);
        }
    }

    /// Rewrites `usage.jsonl` with one line per day, user and model.
    pub fn compact(&self) {
        let mut line_count = lock(&self.line_count);
        if self.reload_if_restored(&mut line_count) {
            self.compact_lines(&mut line_count);
        }
    }

    /// Queues the missing lines. Returns `false` if the queue is full; the remaining lines are written next time.
    fn write_lines(&self, line_count: &mut u64) -> bool {
        let mut ledger = self.lock_ledger();
        let (mut written, mut has_room) = (0, true);
        for line in ledger.unwritten_lines() {
            has_room = self.records.append(LogFile::Usage, &line).is_ok();
            if !has_room {
                tracing::warn!("usage.jsonl lines delayed: queue full");
                break;
            }
            written += 1;
        }
        ledger.mark_written(written);
        *line_count += written as u64;
        has_room
    }

    fn compact_lines(&self, line_count: &mut u64) {
        match self.rewrite(line_count) {
            Ok(Some(after)) => {
                tracing::info!(before = *line_count, after, "usage.jsonl compacted");
                *line_count = after;
            }
            Ok(None) => tracing::debug!("usage.jsonl compaction postponed"),
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "cannot compact usage.jsonl; file unchanged");
            }
        }
    }

    /// Rewrites `usage.jsonl`. Returns the new line count, or `None` if the compaction was postponed or there is no
    /// file. The caller must prevent concurrent writes. The file is only replaced once the new one is durable.
    fn rewrite(&self, line_count: &mut u64) -> Result<Option<u64>, FileError> {
        let (path, new) = (self.logs.join(USAGE_FILE), self.logs.join(NEW_USAGE_FILE));
        if !self.write_lines(line_count) || !self.records.flush(FLUSH_TIMEOUT) {
            return Ok(None);
        }
        let Some((file, _)) = files::open_regular(&path).map_err(FileError::wrap("read", &path))? else {
            return Ok(None);
        };
        let expected = FileStamp::of_file(&file).map_err(FileError::wrap("stat", &path))?;
        let write = || -> io::Result<Option<u64>> {
            failpoint::trigger("usage.begin").map_err(io::Error::other)?;
            let written = self.write_current_lines(&new)?;
            failpoint::trigger("usage.written").map_err(io::Error::other)?;
            let is_replaced = self.records.replace(LogFile::Usage, new.clone(), expected)?;
            failpoint::trigger("usage.replaced").map_err(io::Error::other)?;
            Ok(is_replaced.then_some(written))
        };
        write().map_err(FileError::wrap("write", &new))
    }

    /// Writes the whole ledger to a file, syncs it and returns the number of lines. Locks the ledger for one day at a
    /// time.
    fn write_current_lines(&self, path: &Path) -> io::Result<u64> {
        let mut options = OpenOptions::new();
        options.create(true).write(true).truncate(true).mode(0o640).custom_flags(OFlag::O_NOFOLLOW.bits());
        let mut file = options.open(path)?;
        let (mut text, mut written) = (Vec::new(), 0);
        let dates = self.lock_ledger().dates();
        for date in dates {
            for line in self.lock_ledger().day_lines(date) {
                serde_json::to_writer(&mut text, &line)?;
                text.push(b'\n');
                written += 1;
            }
            if text.len() > CHUNK_BYTES {
                file.write_all(&text)?;
                text.clear();
            }
        }
        file.write_all(&text)?;
        file.sync_all()?;
        Ok(written)
    }

    /// Writes all usage and seals complete days. Days with dropped interactions, or with interactions recorded during
    /// this call, stay unsealed and are recounted at the next start. The previous seals are retained if the usage isn't
    /// durable within `FLUSH_TIMEOUT`, and after any failed sync: the next start may re-record a lost interaction,
    /// which a sealed day would count twice.
    pub fn seal(&self) {
        let mut line_count = lock(&self.line_count);
        let is_durable = self.reload_if_restored(&mut line_count)
            && self.write_lines(&mut line_count)
            && self.records.flush(FLUSH_TIMEOUT);
        if !is_durable || self.records.failed_syncs() > 0 {
            return;
        }
        let files_by_day = list_files_by_day(&self.logs);
        let ledger = self.lock_ledger();
        let (unwritten, incomplete) = (ledger.unwritten_days(), lock(&self.incomplete_days).clone());
        let seals = files_by_day.map(|days| {
            let complete =
                days.into_iter().filter(|(day, _)| !unwritten.contains(day) && !incomplete.contains(day));
            Seals::new(complete.map(|(day, files)| {
                (day, Seal { length: total_length(&files), totals: ledger.day_totals(day) })
            }))
        });
        drop(ledger);
        if let Err(error) = seals.and_then(|seals| seals.write(&self.seal_file)) {
            tracing::warn!(error = %format_chain(&error), "cannot seal days; will recount them at the next start");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn total_length(files: &FileLengths) -> u64 {
    files.iter().map(|(_, length)| length).sum()
}

/// Reads the ledger from the files.
///
/// # Errors
/// [`FileError`] if an existing log file cannot be read.
pub fn read_ledger(logs: &Path, seal_file: &Path) -> Result<Ledger, FileError> {
    read_ledger_and_line_count(logs, seal_file).map(|(ledger, _)| ledger)
}

/// Reads the ledger and counts the lines in `usage.jsonl`.
fn read_ledger_and_line_count(logs: &Path, seal_file: &Path) -> Result<(Ledger, u64), FileError> {
    let (mut ledger, mut line_count) = (Ledger::default(), 0);
    for_each_line(&logs.join(USAGE_FILE), |line| {
        line_count += 1;
        if let Ok(line) = serde_json::from_slice(line) {
            ledger.apply_line(&line);
        }
    })?;
    let seals = Seals::read(seal_file);
    for (day, files) in list_files_by_day(logs)? {
        let seal = Seal { length: total_length(&files), totals: ledger.day_totals(day) };
        if seals.contains(day, &seal) {
            continue;
        }
        let (mut recount, mut has_all_files) = (ledger.begin_recount(day), true);
        for (path, _) in &files {
            has_all_files &= for_each_line(path, |line| {
                if let Ok(fields) = serde_json::from_slice::<CountedFields<'_>>(line) {
                    ledger.add_to_recount(&mut recount, &fields.sender_id, &fields.model, &fields.totals());
                }
            })?;
        }
        // If a file expired concurrently, fall back to usage.jsonl.
        if has_all_files {
            ledger.finish_recount(recount);
        }
    }
    ledger.shrink_to_fit();
    Ok((ledger, line_count))
}

/// Interaction fields that count toward usage.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CountedFields<'a> {
    #[serde(borrow)]
    sender_id: Cow<'a, str>,
    #[serde(borrow)]
    model: Cow<'a, str>,
    cost: Dollars,
    tokens_in: u64,
    tokens_out: u64,
}

impl CountedFields<'_> {
    fn totals(&self) -> Totals {
        Totals::for_dispatch(self.cost, self.tokens_in, self.tokens_out)
    }
}

/// File paths and lengths.
type FileLengths = Vec<(PathBuf, u64)>;

/// Lists the interaction files by day.
fn list_files_by_day(logs: &Path) -> Result<Vec<(Date, FileLengths)>, FileError> {
    let mut days: std::collections::BTreeMap<Date, FileLengths> = std::collections::BTreeMap::new();
    let entries = match std::fs::read_dir(logs) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(FileError::wrap("read", logs))?,
    };
    for entry in entries {
        let entry = entry.map_err(FileError::wrap("read", logs))?;
        let Some(day) = entry.file_name().to_str().and_then(|name| INTERACTIONS.parse_day(name)) else {
            continue;
        };
        let meta = match entry.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            meta => meta.map_err(FileError::wrap("stat", &entry.path()))?,
        };
        if meta.is_file() {
            days.entry(day).or_default().push((entry.path(), meta.len()));
        }
    }
    Ok(days.into_iter().collect())
}

/// Calls `handle` for each line, including gap and invalid lines. Returns `false` if the file doesn't exist.
fn for_each_line(path: &Path, mut handle: impl FnMut(&[u8])) -> Result<bool, FileError> {
    let opened = files::open_regular(path).map_err(FileError::wrap("read", path))?;
    let Some((file, _)) = opened else { return Ok(false) };
    let mut reader = BufReader::with_capacity(CHUNK_BYTES, file);
    let mut line = Vec::new();
    while read_line(&mut reader, &mut line).map_err(FileError::wrap("read", path))? {
        handle(&line);
    }
    Ok(true)
}

/// Reads the next line, or the end of an overlong one. Returns `false` at the end of the file.
fn read_line(reader: &mut BufReader<File>, line: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        line.clear();
        let read = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', line)?;
        if (read as u64) < MAX_LINE_BYTES || line.ends_with(b"\n") {
            return Ok(read > 0);
        }
    }
}

#[cfg(test)]
mod tests;

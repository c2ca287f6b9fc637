//! The usage book: the [`Ledger`] in memory, and its files.
//!
//! The interactions are authoritative. `usage.jsonl` is written periodically; opening the book recounts each day whose
//! interactions exist, unless the day is sealed. So totals equal the sum of the interactions after any crash; days
//! whose files have expired come from `usage.jsonl` only.

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
use super::money::Dollars;
use super::names::INTERACTIONS;
use super::seals::{Seal, Seals};
use super::writer::{Extent, QueueFull, Record, Records};
use svc_base::chain::chain;
use svc_base::failpoint;
use svc_base::fsx::{self, FileError};

/// Timeout of a flush before days are sealed.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
const USAGE: &str = "usage.jsonl";
/// The compacted file before it replaces `usage.jsonl`; an interrupted compaction leaves it behind.
const NEW_USAGE: &str = "usage.jsonl.new";
/// Maximum obsolete lines before `usage.jsonl` is compacted.
const MAX_OBSOLETE_LINES: u64 = 20_000;
/// Longer lines are invalid.
const MAX_LINE_BYTES: u64 = 8 << 20;
const CHUNK_BYTES: usize = 256 << 10;

/// Fail points of a compaction.
pub const FAILPOINTS: &[&str] = &["usage.begin", "usage.written", "usage.replaced"];

/// The ledger and its files.
pub struct UsageBook {
    ledger: Mutex<Ledger>,
    records: Records,
    logs: PathBuf,
    seals: PathBuf,
    /// Serializes writes of usage; the number of lines in `usage.jsonl`.
    writing: Mutex<u64>,
    /// Days with dropped interactions: more was counted than their files have.
    refused: Mutex<BTreeSet<Date>>,
}

impl UsageBook {
    /// Opens the book. `seals` is a file outside the records' directory.
    ///
    /// # Errors
    /// [`FileError`] if a record exists and cannot be read.
    pub fn open(records: Records, logs: PathBuf, seals: PathBuf) -> Result<Self, FileError> {
        fsx::remove_if_exists(&logs.join(NEW_USAGE))?;
        let (ledger, lines) = read_all(&logs, &seals)?;
        let (ledger, writing) = (Mutex::new(ledger), Mutex::new(lines));
        Ok(Self { ledger, records, logs, seals, writing, refused: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        locked(&self.ledger)
    }

    /// Records an ended dispatch and counts it for this day.
    ///
    /// # Errors
    /// [`QueueFull`]: it still counts, until this process ends.
    pub fn record(&self, day: Date, one: &Interaction) -> Result<(), QueueFull> {
        let totals = Totals::one(one.cost, one.tokens_in, one.tokens_out);
        // One lock for both, so that no usage line is written in between.
        let mut ledger = self.lock();
        let accepted = self.records.append(Record::Interactions(day), one);
        ledger.count(day, &one.sender_id, &one.model, &totals);
        if accepted.is_err() {
            locked(&self.refused).insert(day);
        }
        accepted
    }

    pub fn report(&self, query: &UsageQuery) -> Report {
        self.lock().report(query)
    }

    pub fn spent(&self, user: &str, start: Date, end: Date) -> Dollars {
        self.lock().spent(user, start, end)
    }

    pub fn users_since(&self, start: Date) -> Vec<String> {
        self.lock().users_since(start).into_iter().map(str::to_owned).collect()
    }

    /// Appends missing lines to `usage.jsonl`; compacts it if most of its lines are obsolete.
    pub fn write(&self) {
        let mut lines = locked(&self.writing);
        self.write_lines(&mut lines);
        let keys = self.lock().keys() as u64;
        if *lines > 2 * keys + MAX_OBSOLETE_LINES {
            self.compact_lines(&mut lines);
        }
    }

    /// Rewrites `usage.jsonl` with one line per key.
    pub fn compact(&self) {
        self.compact_lines(&mut locked(&self.writing));
    }

    /// Returns `false` if the queue is full; the remaining lines are written next time.
    fn write_lines(&self, lines: &mut u64) -> bool {
        let mut ledger = self.lock();
        let (mut written, mut has_room) = (0, true);
        for line in ledger.lines() {
            has_room = self.records.append(Record::Usage, &line).is_ok();
            if !has_room {
                tracing::warn!("a line of usage.jsonl is delayed: queue full");
                break;
            }
            written += 1;
        }
        ledger.mark_written(written);
        *lines += written as u64;
        has_room
    }

    fn compact_lines(&self, lines: &mut u64) {
        match self.rewrite(lines) {
            Ok(Some(now)) => {
                tracing::info!(before = *lines, now, "usage.jsonl compacted");
                *lines = now;
            }
            Ok(None) => tracing::debug!("compaction of usage.jsonl postponed"),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "cannot compact usage.jsonl; it is unchanged");
            }
        }
    }

    /// Returns the new number of lines, or `None` if the compaction was postponed. The caller prevents concurrent
    /// lines, and the file is only replaced once the new one is durable.
    fn rewrite(&self, lines: &mut u64) -> Result<Option<u64>, FileError> {
        let (path, new) = (self.logs.join(USAGE), self.logs.join(NEW_USAGE));
        if !self.write_lines(lines) || !self.records.flush(FLUSH_TIMEOUT) {
            return Ok(None);
        }
        let Some((file, _)) = files::open(&path).map_err(FileError::at("read", &path))? else {
            return Ok(None);
        };
        let was = Extent::of(&file).map_err(FileError::at("stat", &path))?;
        let write = || -> io::Result<Option<u64>> {
            failpoint::pass("usage.begin").map_err(io::Error::other)?;
            let written = self.write_all(&new)?;
            failpoint::pass("usage.written").map_err(io::Error::other)?;
            let is_replaced = self.records.replace(Record::Usage, new.clone(), was)?;
            failpoint::pass("usage.replaced").map_err(io::Error::other)?;
            Ok(is_replaced.then_some(written))
        };
        write().map_err(FileError::at("write", &new))
    }

    /// Writes the whole ledger, one day at a time.
    fn write_all(&self, path: &Path) -> io::Result<u64> {
        let mut options = OpenOptions::new();
        options.create(true).write(true).truncate(true).mode(0o640).custom_flags(OFlag::O_NOFOLLOW.bits());
        let mut file = options.open(path)?;
        let (mut text, mut written) = (Vec::new(), 0);
        let dates = self.lock().dates();
        for date in dates {
            for line in self.lock().lines_of(date) {
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

    /// Writes all usage and seals complete days. Days with dropped or concurrent interactions are recounted at the next
    /// start.
    pub fn seal(&self) {
        let mut lines = locked(&self.writing);
        if !self.write_lines(&mut lines) || !self.records.flush(FLUSH_TIMEOUT) {
            return;
        }
        let lengths = days(&self.logs);
        let ledger = self.lock();
        let (unwritten, refused) = (ledger.unwritten_days(), locked(&self.refused).clone());
        let sealed = lengths.map(|days| {
            let complete =
                days.into_iter().filter(|(day, _)| !unwritten.contains(day) && !refused.contains(day));
            Seals::new(
                complete.map(|(day, files)| (day, Seal { length: length(&files), totals: ledger.day(day) })),
            )
        });
        drop(ledger);
        if let Err(error) = sealed.and_then(|seals| seals.write(&self.seals)) {
            tracing::warn!(error = %chain(&error), "cannot seal days; they are counted again at the next start");
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn length(files: &Files) -> u64 {
    files.iter().map(|(_, length)| length).sum()
}

/// Reads the ledger from the files.
///
/// # Errors
/// [`FileError`] if a record exists and cannot be read.
pub fn read(logs: &Path, seals: &Path) -> Result<Ledger, FileError> {
    read_all(logs, seals).map(|(ledger, _)| ledger)
}

/// Also returns the number of lines in `usage.jsonl`.
fn read_all(logs: &Path, seals: &Path) -> Result<(Ledger, u64), FileError> {
    let (mut ledger, mut lines) = (Ledger::default(), 0);
    each_line(&logs.join(USAGE), |line| {
        lines += 1;
        if let Ok(line) = serde_json::from_slice(line) {
            ledger.apply_line(&line);
        }
    })?;
    let sealed = Seals::read(seals);
    for (day, files) in days(logs)? {
        if sealed.holds(day, &Seal { length: length(&files), totals: ledger.day(day) }) {
            continue;
        }
        let (mut recount, mut are_there) = (ledger.begin_recount(day), true);
        for (path, _) in &files {
            are_there &= each_line(path, |line| {
                if let Ok(one) = serde_json::from_slice::<Counted<'_>>(line) {
                    ledger.add_to_recount(&mut recount, &one.sender_id, &one.model, &one.totals());
                }
            })?;
        }
        // A file may have expired just now: then usage.jsonl is authoritative.
        if are_there {
            ledger.finish_recount(recount);
        }
    }
    ledger.trim();
    Ok((ledger, lines))
}

/// The fields of an interaction that are counted.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Counted<'a> {
    #[serde(borrow)]
    sender_id: Cow<'a, str>,
    #[serde(borrow)]
    model: Cow<'a, str>,
    cost: Dollars,
    tokens_in: u64,
    tokens_out: u64,
}

impl Counted<'_> {
    fn totals(&self) -> Totals {
        Totals::one(self.cost, self.tokens_in, self.tokens_out)
    }
}

type Files = Vec<(PathBuf, u64)>;

/// The files of interactions and their lengths, by day.
fn days(logs: &Path) -> Result<Vec<(Date, Files)>, FileError> {
    let mut days: std::collections::BTreeMap<Date, Files> = std::collections::BTreeMap::new();
    let entries = match std::fs::read_dir(logs) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(FileError::at("read", logs))?,
    };
    for entry in entries {
        let entry = entry.map_err(FileError::at("read", logs))?;
        let Some(day) = entry.file_name().to_str().and_then(|name| INTERACTIONS.day(name)) else { continue };
        let meta = match entry.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            meta => meta.map_err(FileError::at("stat", &entry.path()))?,
        };
        if meta.is_file() {
            days.entry(day).or_default().push((entry.path(), meta.len()));
        }
    }
    Ok(days.into_iter().collect())
}

/// Calls `handle` for each line, also for gaps and invalid lines. Returns `false` if the file does not exist.
fn each_line(path: &Path, mut handle: impl FnMut(&[u8])) -> Result<bool, FileError> {
    let Some((file, _)) = files::open(path).map_err(FileError::at("read", path))? else { return Ok(false) };
    let mut reader = BufReader::with_capacity(CHUNK_BYTES, file);
    let mut line = Vec::new();
    while next_line(&mut reader, &mut line).map_err(FileError::at("read", path))? {
        handle(&line);
    }
    Ok(true)
}

/// Reads the next line, or the end of one that is too long. `false` at the end of the file.
fn next_line(reader: &mut BufReader<File>, line: &mut Vec<u8>) -> io::Result<bool> {
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

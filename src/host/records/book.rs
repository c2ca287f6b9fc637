//! The book of what was spent: the [`Ledger`] in memory, with what lies on the disk.
//!
//! What counts is the interactions: `usage.jsonl` is written from time to time, and when the book is opened, each day whose
//! file is there is counted again unless it is sealed. So after any crash totals are the sums of the interactions; days
//! whose files have had their time come from `usage.jsonl` alone.

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
use super::writer::{Extent, NoRoom, Record, Records};
use crate::chain::chain;
use crate::failpoint;
use crate::fsx::{self, FileError};

/// How long a disk has to take what is written before days are sealed.
const DISK: Duration = Duration::from_secs(10);
const USAGE: &str = "usage.jsonl";
/// What is to take its place; of a run that was cut off, where there is one.
const NEW_USAGE: &str = "usage.jsonl.new";
/// So many lines that say nothing any more are let be.
const MOST_SPENT_LINES: u64 = 20_000;
/// A longer line is none of ours.
const LONGEST_LINE: u64 = 8 << 20;
const PIECE: usize = 256 << 10;

/// The places of a compaction where a test can stop it.
pub const POINTS: &[&str] = &["usage.begin", "usage.written", "usage.replaced"];

/// The ledger, its record, and where both are written.
pub struct Book {
    ledger: Mutex<Ledger>,
    records: Records,
    logs: PathBuf,
    seals: PathBuf,
    /// One at a time writes usage; how many lines of it there are.
    writing: Mutex<u64>,
    /// Days of which an interaction found no room: their files say less than was counted.
    refused: Mutex<BTreeSet<Date>>,
}

impl Book {
    /// Reads what is there. `seals` is a file of ours, beside no record.
    ///
    /// # Errors
    /// [`FileError`], where a record is there and cannot be read.
    pub fn open(records: Records, logs: PathBuf, seals: PathBuf) -> Result<Self, FileError> {
        fsx::remove_if_exists(&logs.join(NEW_USAGE))?;
        let (ledger, lines) = read_all(&logs, &seals)?;
        let (ledger, writing) = (Mutex::new(ledger), Mutex::new(lines));
        Ok(Self { ledger, records, logs, seals, writing, refused: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        locked(&self.ledger)
    }

    /// A dispatch has ended: it is recorded, and counts for this day.
    ///
    /// # Errors
    /// [`NoRoom`]: it counts all the same, until this process ends.
    pub fn record(&self, day: Date, one: &Interaction) -> Result<(), NoRoom> {
        let totals = Totals::one(one.cost, one.tokens_in, one.tokens_out);
        // Under one lock: no line of usage is written between the two.
        let mut ledger = self.lock();
        let accepted = self.records.append(Record::Interactions(day), one);
        ledger.count(day, &one.sender_id, &one.model, &totals);
        if accepted.is_err() {
            locked(&self.refused).insert(day);
        }
        accepted
    }

    pub fn report(&self, asked: &UsageQuery) -> Report {
        self.lock().report(asked)
    }

    pub fn spent(&self, user: &str, start: Date, end: Date) -> Dollars {
        self.lock().spent(user, start, end)
    }

    pub fn users_since(&self, start: Date) -> Vec<String> {
        self.lock().users_since(start).into_iter().map(str::to_owned).collect()
    }

    /// Writes to `usage.jsonl` what it lacks; where most of its lines say nothing any more, it is written anew.
    pub fn write(&self) {
        let mut lines = locked(&self.writing);
        self.write_lines(&mut lines);
        let keys = self.lock().keys() as u64;
        if *lines > 2 * keys + MOST_SPENT_LINES {
            self.compact_lines(&mut lines);
        }
    }

    /// Writes `usage.jsonl` anew, with one line for each key.
    pub fn compact(&self) {
        self.compact_lines(&mut locked(&self.writing));
    }

    /// `false` where not all of it found room; the rest is written the next time.
    fn write_lines(&self, lines: &mut u64) -> bool {
        let mut ledger = self.lock();
        let (mut written, mut has_room) = (0, true);
        for line in ledger.lines() {
            has_room = self.records.append(Record::Usage, &line).is_ok();
            if !has_room {
                tracing::warn!("a line of usage.jsonl had no room; it is written later");
                break;
            }
            written += 1;
        }
        ledger.written(written);
        *lines += written as u64;
        has_room
    }

    fn compact_lines(&self, lines: &mut u64) {
        match self.anew(lines) {
            Ok(Some(now)) => {
                tracing::info!(before = *lines, now, "usage.jsonl is written anew");
                *lines = now;
            }
            Ok(None) => tracing::debug!("usage.jsonl is written anew another time"),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "usage.jsonl could not be written anew; it stays as it is");
            }
        }
    }

    /// How many lines it has then; `None` where there was something in the way. Nobody else has lines for it meanwhile, and
    /// it stays what it is until all of the new one is durable.
    fn anew(&self, lines: &mut u64) -> Result<Option<u64>, FileError> {
        let (path, new) = (self.logs.join(USAGE), self.logs.join(NEW_USAGE));
        if !self.write_lines(lines) || !self.records.flush(DISK) {
            return Ok(None);
        }
        let Some((file, _)) = files::open(&path).map_err(FileError::at("read", &path))? else {
            return Ok(None);
        };
        let was = Extent::of(&file).map_err(FileError::at("look at", &path))?;
        let write = || -> io::Result<Option<u64>> {
            failpoint::pass("usage.begin").map_err(io::Error::other)?;
            let written = self.write_all(&new)?;
            failpoint::pass("usage.written").map_err(io::Error::other)?;
            let is_put = self.records.replace(Record::Usage, new.clone(), was)?;
            failpoint::pass("usage.replaced").map_err(io::Error::other)?;
            Ok(is_put.then_some(written))
        };
        write().map_err(FileError::at("write", &new))
    }

    /// All that is known, a day at a time.
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
            if text.len() > PIECE {
                file.write_all(&text)?;
                text.clear();
            }
        }
        file.write_all(&text)?;
        file.sync_all()?;
        Ok(written)
    }

    /// Writes all of it and seals the days that are there. What a disk refuses, and what is counted meanwhile, is counted
    /// again at the next start.
    pub fn seal(&self) {
        let mut lines = locked(&self.writing);
        if !self.write_lines(&mut lines) || !self.records.flush(DISK) {
            return;
        }
        let lengths = days(&self.logs);
        let ledger = self.lock();
        let (unwritten, refused) = (ledger.unwritten_days(), locked(&self.refused).clone());
        let sealed = lengths.map(|days| {
            let whole =
                days.into_iter().filter(|(day, _)| !unwritten.contains(day) && !refused.contains(day));
            Seals::of(
                whole.map(|(day, files)| (day, Seal { length: length(&files), totals: ledger.day(day) })),
            )
        });
        drop(ledger);
        if let Err(error) = sealed.and_then(|seals| seals.write(&self.seals)) {
            tracing::warn!(error = %chain(&error), "days could not be sealed; they are counted again");
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn length(files: &Files) -> u64 {
    files.iter().map(|(_, length)| length).sum()
}

/// What was spent, by what is on the disk.
///
/// # Errors
/// [`FileError`], where a record is there and cannot be read.
pub fn read(logs: &Path, seals: &Path) -> Result<Ledger, FileError> {
    read_all(logs, seals).map(|(ledger, _)| ledger)
}

/// With how many lines `usage.jsonl` has.
fn read_all(logs: &Path, seals: &Path) -> Result<(Ledger, u64), FileError> {
    let (mut ledger, mut lines) = (Ledger::default(), 0);
    each_line(&logs.join(USAGE), |line| {
        lines += 1;
        if let Ok(line) = serde_json::from_slice(line) {
            ledger.settle(&line);
        }
    })?;
    let sealed = Seals::read(seals);
    for (day, files) in days(logs)? {
        if sealed.holds(day, &Seal { length: length(&files), totals: ledger.day(day) }) {
            continue;
        }
        let (mut counted, mut are_there) = (ledger.recount(day), true);
        for (path, _) in &files {
            are_there &= each_line(path, |line| {
                if let Ok(one) = serde_json::from_slice::<Counted<'_>>(line) {
                    ledger.counted(&mut counted, &one.sender_id, &one.model, &one.totals());
                }
            })?;
        }
        // A file may have had its time just now: then the day is what usage.jsonl says.
        if are_there {
            ledger.recounted(counted);
        }
    }
    ledger.trim();
    Ok((ledger, lines))
}

/// What is read of an interaction to count it.
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

/// The files of interactions, by their days, with their lengths.
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
            meta => meta.map_err(FileError::at("look at", &entry.path()))?,
        };
        if meta.is_file() {
            days.entry(day).or_default().push((entry.path(), meta.len()));
        }
    }
    Ok(days.into_iter().collect())
}

/// Each line; those that are none of ours, such as gaps and what a crash tore, are for the caller to tell. `false` where
/// there is no file.
fn each_line(path: &Path, mut of: impl FnMut(&[u8])) -> Result<bool, FileError> {
    let Some((file, _)) = files::open(path).map_err(FileError::at("read", path))? else { return Ok(false) };
    let mut reader = BufReader::with_capacity(PIECE, file);
    let mut line = Vec::new();
    while next_line(&mut reader, &mut line).map_err(FileError::at("read", path))? {
        of(&line);
    }
    Ok(true)
}

/// The next line; of one that is too long, its end. `false` where there is none.
fn next_line(reader: &mut BufReader<File>, line: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        line.clear();
        let read = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', line)?;
        if (read as u64) < LONGEST_LINE || line.ends_with(b"\n") {
            return Ok(read > 0);
        }
    }
}

#[cfg(test)]
mod tests;

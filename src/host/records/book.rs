//! The book of what was spent: the [`Ledger`] in memory, with what lies on the disk.
//!
//! What counts is the interactions: `usage.jsonl` is written from time to time, and when the book is opened, each day whose
//! file is there is counted again unless it is sealed. So after any crash totals are the sums of the interactions; days
//! whose files have had their time come from `usage.jsonl` alone.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::civil::Date;
use serde::Deserialize;

use super::entry::Interaction;
use super::files;
use super::ledger::{Asked, Ledger, Report, Totals, UsageLine};
use super::money::Dollars;
use super::names::INTERACTIONS;
use super::seals::{Seal, Seals};
use super::writer::{NoRoom, Record, Records};
use crate::chain::chain;
use crate::fsx::FileError;

/// How long a disk has to take what is written before days are sealed.
const DISK: Duration = Duration::from_secs(10);

/// The ledger, its record, and where both are written.
pub struct Book {
    ledger: Mutex<Ledger>,
    records: Records,
    logs: PathBuf,
    seals: PathBuf,
    /// One at a time writes usage.
    writing: Mutex<()>,
    /// Days of which an interaction found no room: their files say less than was counted.
    refused: Mutex<BTreeSet<Date>>,
}

impl Book {
    /// Reads what is there. `seals` is a file of ours, beside no record.
    ///
    /// # Errors
    /// [`FileError`], where a record is there and cannot be read.
    pub fn open(records: Records, logs: PathBuf, seals: PathBuf) -> Result<Self, FileError> {
        let ledger = Mutex::new(read(&logs, &seals)?);
        Ok(Self { ledger, records, logs, seals, writing: Mutex::default(), refused: Mutex::default() })
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

    pub fn report(&self, asked: &Asked) -> Report {
        self.lock().report(asked)
    }

    pub fn spent(&self, user: &str, start: Date, end: Date) -> Dollars {
        self.lock().spent(user, start, end)
    }

    pub fn users_since(&self, start: Date) -> Vec<String> {
        self.lock().users_since(start).into_iter().map(str::to_owned).collect()
    }

    /// Writes to `usage.jsonl` what it lacks.
    pub fn write(&self) {
        let _alone = locked(&self.writing);
        self.write_lines();
    }

    /// `false` where not all of it found room; the rest is written the next time.
    fn write_lines(&self) -> bool {
        let mut ledger = self.lock();
        for line in ledger.lines() {
            if self.records.append(Record::Usage, &line).is_err() {
                tracing::warn!("a line of usage.jsonl had no room; it is written later");
                return false;
            }
            ledger.settle(&line);
        }
        true
    }

    /// Writes all of it and seals the days that are there. What a disk refuses, and what is counted meanwhile, is counted
    /// again at the next start.
    pub fn seal(&self) {
        let _alone = locked(&self.writing);
        if !self.write_lines() || !self.records.flush(DISK) {
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
    let mut ledger = Ledger::default();
    each_line(&logs.join("usage.jsonl"), |line: UsageLine| ledger.settle(&line))?;
    let sealed = Seals::read(seals);
    for (day, files) in days(logs)? {
        if sealed.holds(day, &Seal { length: length(&files), totals: ledger.day(day) }) {
            continue;
        }
        let (mut all, mut are_there): (Vec<Counted>, bool) = (Vec::new(), true);
        for (path, _) in &files {
            are_there &= each_line(path, |one: Counted| all.push(one))?;
        }
        // A file may have had its time just now: then the day is what usage.jsonl says.
        if are_there {
            ledger.recount(day, all.iter().map(Counted::parts));
        }
    }
    Ok(ledger)
}

/// What is read of an interaction to count it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Counted {
    sender_id: String,
    model: String,
    cost: Dollars,
    tokens_in: u64,
    tokens_out: u64,
}

impl Counted {
    fn parts(&self) -> (&str, &str, Totals) {
        (&self.sender_id, &self.model, Totals::one(self.cost, self.tokens_in, self.tokens_out))
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

/// Each whole line of this form; others, such as gaps and what a crash tore, are none. `false` where there is no file.
fn each_line<T: for<'de> Deserialize<'de>>(path: &Path, mut of: impl FnMut(T)) -> Result<bool, FileError> {
    let Some((file, _)) = files::open(path).map_err(FileError::at("read", path))? else { return Ok(false) };
    let mut reader = BufReader::with_capacity(1 << 18, file);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(FileError::at("read", path))?;
        if read == 0 {
            return Ok(true);
        }
        if let Ok(entry) = serde_json::from_slice(&line) {
            of(entry);
        }
    }
}

#[cfg(test)]
mod tests;

//! The one writer of the kernel's records. Whoever has a line puts it into memory and goes on; a thread brings what is
//! there to the disk, and another makes it durable.
//!
//! What is accepted is written in order: it is lost only with the process, and then it is at most [`FLUSH`] old. The memory
//! is bounded. A line that has no room is refused, counted, and told by a gap in its record where the next one goes.
//! Files are opened by their names for each write (`host::records::jsonl`), so that rotation and deletion under its feet lose
//! nothing; a disk that is full is tried again until it is not.

mod file;
mod queue;
mod sync;

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::civil::Date;
use serde::Serialize;

pub use self::file::Extent;
use self::file::{Appended, Form};
use self::queue::{Replacement, Thread, Waiting};
use self::sync::{Durably, Syncer, Unsynced};
use super::names::{ACTIVITY, AUDIT, INTERACTIONS};
use crate::chain::chain;
use crate::clock;

/// The longest that an accepted line waits for a disk that takes it.
pub const FLUSH: Duration = Duration::from_millis(50);
/// So much is written at once, without waiting for [`FLUSH`].
const ENOUGH: usize = 256 << 10;
/// What is accepted and not written yet has at most this many bytes.
pub const MOST_BYTES: usize = 16 << 20;
/// So often the thread looks again by itself before it sleeps until it is woken: to wake it takes longer than to accept a line.
const LOOKS: u32 = 20;
/// A disk that refused is asked again after this.
const AGAIN: Duration = Duration::from_millis(500);
/// How long is waited for a file to be put in a record's place.
const PUT: Duration = Duration::from_secs(30);
/// What was written is made durable this often.
const SYNC: Duration = Duration::from_secs(5);

/// A record that this writer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Record {
    /// Of the day that a line counts for.
    Interactions(Date),
    Audit,
    /// Plain text; the others are JSON.
    Activity,
    /// The last: what it counts is written before it.
    Usage,
}

impl Record {
    /// So much of it is accepted and not written at most. What anybody may bring about by the thousand leaves room for what
    /// is paid for.
    fn share(self) -> usize {
        match self {
            Self::Audit | Self::Activity => MOST_BYTES / 4,
            Self::Interactions(_) | Self::Usage => MOST_BYTES,
        }
    }

    fn form(self) -> Form {
        if self == Self::Activity { Form::Text } else { Form::Json }
    }

    fn file_name(self) -> String {
        match self {
            Self::Interactions(day) => INTERACTIONS.dated(day, 1),
            Self::Audit => AUDIT.current(),
            Self::Activity => ACTIVITY.current(),
            Self::Usage => "usage.jsonl".to_owned(),
        }
    }
}

/// The line found no room. What was lost is told where the next line goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the records' memory is full: the disk does not take them")]
pub struct NoRoom;

struct Shared {
    logs: PathBuf,
    waiting: Mutex<Waiting>,
    wake: Condvar,
    flushed: Condvar,
    /// The disk refuses.
    is_stuck: AtomicBool,
    syncer: Syncer,
}

/// What the thread takes at once.
struct Taken {
    lines: Vec<(Record, Vec<Vec<u8>>)>,
    /// A flush that is waited for.
    asked: Option<u64>,
    replacement: Option<Replacement>,
    stop: bool,
}

/// A handle to append by; cheap to clone.
#[derive(Clone)]
pub struct Records(Arc<Shared>);

/// The threads. Dropped, they end after the last line is written and durable, or given up.
pub struct Writer {
    records: Records,
    writes: Option<JoinHandle<()>>,
    syncs: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the threads; files are in `logs`.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn start(logs: PathBuf) -> std::io::Result<Self> {
        Self::begin(logs, Box::new(File::sync_data))
    }

    fn begin(logs: PathBuf, durably: Durably) -> std::io::Result<Self> {
        let shared = Shared {
            logs,
            waiting: Mutex::default(),
            wake: Condvar::new(),
            flushed: Condvar::new(),
            is_stuck: AtomicBool::new(false),
            syncer: Syncer::default(),
        };
        let records = Records(Arc::new(shared));
        let mut writer = Self { records: records.clone(), writes: None, syncs: None };
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let work = records.clone();
        writer.syncs = Some(thread("records-sync").spawn(move || {
            work.0.syncer.work(&durably, |flush| work.0.done(flush));
        })?);
        writer.writes = Some(thread("records").spawn(move || records.0.write())?);
        Ok(writer)
    }

    pub fn records(&self) -> Records {
        self.records.clone()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let shared = &self.records.0;
        shared.lock().stop = true;
        shared.wake.notify_all();
        // A panic in a thread has been told by its own message.
        if let Some(writes) = self.writes.take() {
            let _ = writes.join();
        }
        shared.syncer.stop();
        if let Some(syncs) = self.syncs.take() {
            let _ = syncs.join();
        }
        shared.lock().thread = Thread::Ended;
        shared.flushed.notify_all();
    }
}

impl Records {
    /// Accepts a line of JSON. Never waits for the disk.
    ///
    /// # Errors
    /// [`NoRoom`].
    pub fn append(&self, record: Record, entry: &impl Serialize) -> Result<(), NoRoom> {
        thread_local! {
            static LINE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        // It is made a text before anybody is kept waiting.
        LINE.with_borrow_mut(|line| {
            line.clear();
            serde_json::to_writer(&mut *line, entry).expect("records are JSON");
            line.push(b'\n');
            self.accept(record, line)
        })
    }

    /// Accepts a line of `activity.log`: what happened, after the time.
    ///
    /// # Errors
    /// [`NoRoom`].
    pub fn note(&self, what: &str) -> Result<(), NoRoom> {
        let what: String = what.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.accept(Record::Activity, format!("{} {what}\n", clock::rfc3339_ms(Timestamp::now())).as_bytes())
    }

    fn accept(&self, record: Record, line: &[u8]) -> Result<(), NoRoom> {
        let wakes = self.0.lock().accept(record, line)?;
        if wakes {
            self.0.wake.notify_one();
        }
        Ok(())
    }

    /// Puts a file, which is durable, in a record's place between two of its lines, where the record is still what it was:
    /// whoever made it holds off those that have lines for it. `false` where something came all the same.
    ///
    /// # Errors
    /// The files'; the record is then what it was.
    pub fn replace(&self, record: Record, by: PathBuf, was: Extent) -> std::io::Result<bool> {
        let (answer, answered) = mpsc::sync_channel(1);
        {
            let mut waiting = self.0.lock();
            if waiting.stop || waiting.replacement.is_some() {
                return Ok(false);
            }
            waiting.replacement = Some(Replacement { record, by, was, answer });
        }
        self.0.wake.notify_one();
        // A disk that takes longer puts it there later, or finds that something came.
        answered.recv_timeout(PUT).unwrap_or(Ok(false))
    }

    /// Waits until all that was accepted before is on the disk, and durable; `false` where the disk does not take it in
    /// time.
    pub fn flush(&self, within: Duration) -> bool {
        let mut waiting = self.0.lock();
        waiting.flushes_asked += 1;
        let mine = waiting.flushes_asked;
        self.0.wake.notify_one();
        let end = Instant::now() + within;
        while waiting.flushes_done < mine {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || waiting.thread == Thread::Ended {
                return false;
            }
            waiting = self.0.flushed.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// The disk refuses lines at the moment.
    pub fn is_stuck(&self) -> bool {
        self.0.is_stuck.load(Ordering::Relaxed)
    }

    /// Bytes that are accepted and not written yet.
    pub fn waiting_bytes(&self) -> usize {
        self.0.lock().bytes()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's work.
    fn write(&self) {
        let mut files: Vec<(Record, Appended)> = Vec::new();
        let mut handed = Instant::now();
        loop {
            let is_dirty = files.iter().any(|(_, file)| file.is_dirty());
            let Taken { lines, asked, replacement, stop } = self.take(is_dirty.then(|| handed + SYNC));
            for (record, pieces) in lines {
                let file = file_of(&mut files, record, &self.logs);
                pieces.into_iter().for_each(|piece| file.take(piece));
            }
            files.sort_by_key(|(record, _)| *record);
            let written = self.bring(&mut files, stop);
            self.give_back(&mut files);
            let directory = replacement.and_then(|replacement| self.put(replacement, &mut files));
            let asked = asked.filter(|_| written);
            if stop || asked.is_some() || handed.elapsed() >= SYNC {
                let mut unsynced: Vec<Unsynced> =
                    files.iter_mut().flat_map(|(_, file)| file.unsynced()).collect();
                unsynced.extend(directory);
                self.syncer.hand(unsynced, asked);
                handed = Instant::now();
            } else if let Some(directory) = directory {
                self.syncer.hand(vec![directory], None);
            }
            if let Some(asked) = asked {
                self.lock().flushes_written = asked;
            }
            files.retain(|(_, file)| file.left() > 0 || file.is_dirty());
            if stop {
                return;
            }
            if !written {
                self.pause();
            }
        }
    }

    /// A flush is durable.
    fn done(&self, flush: u64) {
        let mut waiting = self.lock();
        waiting.flushes_done = waiting.flushes_done.max(flush);
        self.flushed.notify_all();
    }

    /// Waits for lines, lets them gather, and takes them; at the latest when something is to be synced.
    fn take(&self, sync_at: Option<Instant>) -> Taken {
        let mut waiting = self.gathered(self.lock(), sync_at);
        waiting.thread = Thread::Writing;
        let lines = waiting.take();
        let asked = (waiting.flushes_asked > waiting.flushes_written).then_some(waiting.flushes_asked);
        Taken { lines, asked, replacement: waiting.replacement.take(), stop: waiting.stop }
    }

    fn gathered<'a>(
        &self,
        mut waiting: MutexGuard<'a, Waiting>,
        sync_at: Option<Instant>,
    ) -> MutexGuard<'a, Waiting> {
        let is_due = || sync_at.is_some_and(|at| Instant::now() >= at);
        let mut looks = 0;
        loop {
            waiting.thread = Thread::Looking;
            // What was accepted since the last look is at most this old then.
            let end = Instant::now() + FLUSH;
            while !waiting.is_enough() && !waiting.asks() {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                waiting = self.wake.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            if waiting.has_work() || is_due() {
                return waiting;
            }
            looks += 1;
            if looks < LOOKS {
                continue;
            }
            waiting.thread = Thread::Asleep;
            while waiting.thread == Thread::Asleep && !waiting.has_work() && !is_due() {
                waiting = match sync_at {
                    Some(at) => {
                        let left = at.saturating_duration_since(Instant::now());
                        self.wake.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0
                    }
                    None => self.wake.wait(waiting).unwrap_or_else(PoisonError::into_inner),
                };
            }
            looks = 0;
        }
    }

    /// Puts a file in a record's place; the directory, which is then to be made durable.
    fn put(&self, replacement: Replacement, files: &mut [(Record, Appended)]) -> Option<Unsynced> {
        let Replacement { record, by, was, answer } = replacement;
        let is_behind = files.iter().any(|(of, file)| *of == record && file.left() > 0);
        let path = self.logs.join(record.file_name());
        let put = if is_behind { Ok(false) } else { file::replace(&path, &by, was) };
        let is_put = matches!(put, Ok(true));
        // Whoever asked may have gone.
        let _ = answer.send(put);
        let directory = File::open(&self.logs).ok().filter(|_| is_put)?;
        let inode = directory.metadata().ok()?.ino();
        Some(Unsynced::new(self.logs.clone(), inode, Arc::new(directory)))
    }

    /// Writes what there is, and says once where that ends or begins to go wrong.
    fn bring(&self, files: &mut [(Record, Appended)], stop: bool) -> bool {
        let (mut failed, mut is_behind) = (None, false);
        for (record, file) in files.iter_mut() {
            // What usage counts is on the disk before it.
            if *record == Record::Usage && is_behind {
                continue;
            }
            if let Err(error) = file.write() {
                is_behind |= matches!(record, Record::Interactions(_));
                failed = Some(error);
            }
        }
        let Some(error) = failed else {
            if self.is_stuck.swap(false, Ordering::Relaxed) {
                tracing::info!("records are written again");
            }
            return true;
        };
        if !self.is_stuck.swap(true, Ordering::Relaxed) {
            tracing::error!(error = %chain(&error), "records cannot be written; they wait in memory");
        }
        if stop {
            let bytes: usize = files.iter().map(|(_, file)| file.left()).sum();
            tracing::error!(bytes, "records that the disk did not take are lost");
        }
        false
    }

    fn give_back(&self, files: &mut [(Record, Appended)]) {
        let left = files.iter().map(|(record, file)| (*record, file.left())).filter(|(_, left)| *left > 0);
        let left = left.collect();
        let pieces = files.iter_mut().flat_map(|(_, file)| file.finished());
        self.lock().give_back(left, pieces);
    }

    fn pause(&self) {
        let idle = |waiting: &mut Waiting| waiting.is_empty() && !waiting.stop;
        let waited = self.wake.wait_timeout_while(self.lock(), AGAIN, idle);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

fn file_of<'a>(files: &'a mut Vec<(Record, Appended)>, record: Record, logs: &Path) -> &'a mut Appended {
    let at = files.iter().position(|(of, _)| *of == record).unwrap_or_else(|| {
        files.push((record, Appended::new(logs.join(record.file_name()), record.form())));
        files.len() - 1
    });
    &mut files[at].1
}

#[cfg(test)]
mod tests;

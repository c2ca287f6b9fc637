//! The one writer of the kernel's records. Whoever has a line puts it into memory and goes on; a thread brings what is
//! there to the disk.
//!
//! What is accepted is written in order: it is lost only with the process, and then it is at most [`FLUSH`] old. The memory
//! is bounded. A line that has no room is refused, counted, and told by a gap in its record where the next one goes.
//! Files are opened by their names for each write (`host::jsonl`), so that rotation and deletion under its feet lose
//! nothing; a disk that is full is tried again until it is not.

mod file;

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::civil::Date;
use serde::Serialize;

use self::file::{Appended, Form};
use super::entry::{Gap, GapLine};
use super::names::{ACTIVITY, AUDIT, INTERACTIONS};
use crate::chain::chain;
use crate::clock;

/// The longest that an accepted line waits for a disk that takes it.
pub const FLUSH: Duration = Duration::from_millis(50);
/// So much is written at once, without waiting for [`FLUSH`].
const ENOUGH: usize = 256 << 10;
/// What is accepted and not written yet has at most this many bytes.
pub const MOST_BYTES: usize = 16 << 20;
/// So many pieces of memory are kept for lines to come.
const SPARES: usize = 4;
/// A disk that refused is asked again after this.
const AGAIN: Duration = Duration::from_millis(500);
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

/// Lines of one record that are accepted and not written yet.
#[derive(Default)]
struct Queue {
    lines: Vec<u8>,
    lost: u64,
    since: Option<Timestamp>,
}

#[derive(Default)]
struct Waiting {
    /// Few: they are looked through.
    queues: Vec<(Record, Queue)>,
    bytes: usize,
    /// What the thread has taken and not written yet; of which record, where the disk refused it.
    taken: usize,
    refused: Vec<(Record, usize)>,
    /// Memory of lines that are written, for those to come.
    spare: Vec<Vec<u8>>,
    stop: bool,
    /// The thread has ended: nobody writes any more.
    ended: bool,
    flushes_asked: u64,
    flushes_done: u64,
}

struct Shared {
    logs: PathBuf,
    waiting: Mutex<Waiting>,
    wake: Condvar,
    flushed: Condvar,
    /// The disk refuses.
    is_stuck: AtomicBool,
}

/// What the thread takes at once.
struct Taken {
    lines: Vec<(Record, Vec<u8>)>,
    /// A flush that is waited for.
    asked: Option<u64>,
    stop: bool,
}

/// A handle to append by; cheap to clone.
#[derive(Clone)]
pub struct Records(Arc<Shared>);

/// The thread. Dropped, it ends after the last line is written, or given up.
pub struct Writer {
    records: Records,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread; files are in `logs`.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn start(logs: PathBuf) -> std::io::Result<Self> {
        let shared = Shared {
            logs,
            waiting: Mutex::default(),
            wake: Condvar::new(),
            flushed: Condvar::new(),
            is_stuck: AtomicBool::new(false),
        };
        let records = Records(Arc::new(shared));
        let work = records.clone();
        let thread = std::thread::Builder::new().name("records".to_owned()).spawn(move || work.0.write())?;
        Ok(Self { records, thread: Some(thread) })
    }

    pub fn records(&self) -> Records {
        self.records.clone()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.records.0.lock().stop = true;
        self.records.0.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it has been told by its own message.
            let _ = thread.join();
        }
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
        let mut waiting = self.0.lock();
        let was_empty = waiting.bytes == 0;
        let refused = waiting.refused.iter().find(|(of, _)| *of == record).map_or(0, |(_, bytes)| *bytes);
        let has_room = !waiting.stop && waiting.bytes + waiting.taken + line.len() <= MOST_BYTES;
        let at = waiting.queues.iter().position(|(of, _)| *of == record).unwrap_or_else(|| {
            let lines = waiting.spare.pop().unwrap_or_default();
            waiting.queues.push((record, Queue { lines, ..Queue::default() }));
            waiting.queues.len() - 1
        });
        let queue = &mut waiting.queues[at].1;
        if !has_room || queue.lines.len() + refused + line.len() > record.share() {
            queue.lost += 1;
            queue.since.get_or_insert_with(clock::now_ms);
            return Err(NoRoom);
        }
        let before = queue.lines.len();
        if let Some(gap) = queue.gap(record) {
            queue.lines.extend_from_slice(&gap);
        }
        queue.lines.extend_from_slice(line);
        let grown = queue.lines.len() - before;
        waiting.bytes += grown;
        let is_enough = waiting.bytes >= ENOUGH && waiting.bytes - grown < ENOUGH;
        drop(waiting);
        if was_empty || is_enough {
            self.0.wake.notify_one();
        }
        Ok(())
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
            if left.is_zero() || waiting.ended {
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
        let waiting = self.0.lock();
        waiting.bytes + waiting.taken
    }
}

impl Queue {
    /// The line that tells of what had no room.
    fn gap(&mut self, record: Record) -> Option<Vec<u8>> {
        let since = self.since.take()?;
        let lost = std::mem::take(&mut self.lost);
        let timestamp = clock::now_ms();
        let mut line = match record {
            Record::Activity => {
                let (now, since) = (clock::rfc3339_ms(timestamp), clock::rfc3339_ms(since));
                format!("{now} {lost} lines had no room since {since}").into_bytes()
            }
            _ => serde_json::to_vec(&GapLine { version: 1, timestamp, gap: Gap { lost, since, why: None } })
                .expect("plain fields are JSON"),
        };
        line.push(b'\n');
        Some(line)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's work.
    fn write(&self) {
        let mut files: Vec<(Record, Appended)> = Vec::new();
        let mut synced = Instant::now();
        loop {
            let Taken { lines, asked, stop } = self.take(files.iter().any(|(_, file)| !file.is_synced()));
            for (record, lines) in lines {
                file_of(&mut files, record, &self.logs).take(lines);
            }
            files.sort_by_key(|(record, _)| *record);
            let written = self.bring(&mut files, stop);
            self.give_back(&mut files);
            let mut is_durable = true;
            if stop || asked.is_some() || synced.elapsed() >= SYNC {
                for (_, file) in &mut files {
                    file.sync();
                    is_durable &= file.is_synced();
                }
                synced = Instant::now();
            }
            files.retain(|(_, file)| file.left() > 0 || !file.is_synced());
            if let Some(asked) = asked.filter(|_| written && is_durable) {
                self.lock().flushes_done = asked;
                self.flushed.notify_all();
            }
            if stop {
                self.lock().ended = true;
                self.flushed.notify_all();
                return;
            }
            if !(written && is_durable) {
                self.pause();
            }
        }
    }

    /// Waits for lines, lets them gather, and takes them.
    fn take(&self, unsynced: bool) -> Taken {
        let mut waiting = self.lock();
        let asks = |waiting: &Waiting| waiting.stop || waiting.flushes_asked > waiting.flushes_done;
        let has_gap = |waiting: &Waiting| waiting.queues.iter().any(|(_, queue)| queue.since.is_some());
        while waiting.bytes == 0 && waiting.taken == 0 && !asks(&waiting) && !has_gap(&waiting) {
            if unsynced {
                let (next, timeout) =
                    self.wake.wait_timeout(waiting, SYNC).unwrap_or_else(PoisonError::into_inner);
                waiting = next;
                if timeout.timed_out() {
                    break;
                }
            } else {
                waiting = self.wake.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
        }
        let end = Instant::now() + FLUSH;
        while waiting.bytes > 0 && waiting.bytes < ENOUGH && !asks(&waiting) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            waiting = self.wake.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if waiting.taken == 0 {
            // The disk takes what there is: what had no room is told, whether more comes or not.
            let gaps = waiting.queues.iter_mut().filter_map(|(record, queue)| {
                let gap = queue.gap(*record)?;
                queue.lines.extend_from_slice(&gap);
                Some(gap.len())
            });
            let told: usize = gaps.sum();
            waiting.bytes += told;
        }
        waiting.taken += waiting.bytes;
        waiting.bytes = 0;
        let lines = waiting
            .queues
            .iter_mut()
            .filter(|(_, queue)| !queue.lines.is_empty())
            .map(|(record, queue)| (*record, std::mem::take(&mut queue.lines)))
            .collect();
        // A record gets its next memory with its next line; of days that are over nothing is kept.
        waiting.queues.retain(|(_, queue)| queue.since.is_some());
        let asked = (waiting.flushes_asked > waiting.flushes_done).then_some(waiting.flushes_asked);
        Taken { lines, asked, stop: waiting.stop }
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

    /// The memory of what is written, and how much is not.
    fn give_back(&self, files: &mut [(Record, Appended)]) {
        let mut waiting = self.lock();
        waiting.taken = files.iter().map(|(_, file)| file.left()).sum();
        waiting.refused.clear();
        let left = files.iter().filter(|(_, file)| file.left() > 0);
        waiting.refused.extend(left.map(|(record, file)| (*record, file.left())));
        for (_, file) in files {
            for mut lines in file.finished() {
                if waiting.spare.len() < SPARES && lines.capacity() <= 4 * ENOUGH {
                    lines.clear();
                    waiting.spare.push(lines);
                }
            }
        }
    }

    fn pause(&self) {
        let idle = |waiting: &mut Waiting| waiting.bytes == 0 && !waiting.stop;
        let waited = self.wake.wait_timeout_while(self.lock(), AGAIN, idle);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

fn file_of<'a>(
    files: &'a mut Vec<(Record, Appended)>,
    record: Record,
    logs: &std::path::Path,
) -> &'a mut Appended {
    let at = files.iter().position(|(of, _)| *of == record).unwrap_or_else(|| {
        files.push((record, Appended::new(logs.join(record.file_name()), record.form())));
        files.len() - 1
    });
    &mut files[at].1
}

#[cfg(test)]
mod tests;

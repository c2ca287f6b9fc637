//! Record writer for the gateway and the audit watcher. Callers append lines to in-memory queues; one thread writes
//! them to disk and another syncs the files.
//!
//! Accepted lines are written in order per log file, at most [`WRITE_INTERVAL`] later unless the disk fails. A process
//! crash only loses unwritten lines; a machine crash also loses lines that weren't synced or whose sync failed. The
//! queues are bounded: lines that don't fit are rejected and counted, and a gap line in the log file reports how many
//! were lost. Files are opened by name for each write, so renaming or deleting a file beforehand loses no lines. Failed
//! writes are retried until they succeed or the writer is dropped; failed syncs are not retried.

mod file;
mod log_file;
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
use serde::Serialize;

use self::file::AppendFile;
pub use self::file::FileStamp;
pub use self::log_file::{LineDropped, LogFile, MAX_QUEUED_BYTES};
use self::queue::{LineQueues, Replacement, ThreadState};
use self::sync::{SyncFn, Syncer, UnsyncedFile};
use svc_base::clock;
use svc_base::error_chain::format_chain;

/// Maximum delay before an accepted line is written, unless the disk fails.
pub const WRITE_INTERVAL: Duration = Duration::from_millis(50);
/// Number of idle intervals before the writer thread sleeps until woken. Waking it takes longer than accepting a line,
/// so it doesn't sleep any earlier.
const MAX_IDLE_INTERVALS: u32 = 20;
/// Delay before retrying failed writes, unless new lines are queued.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Timeout for replacing a log file.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between syncs of written files.
const SYNC_INTERVAL: Duration = Duration::from_secs(5);

/// State shared by the handles and the threads.
struct Shared {
    logs: PathBuf,
    queues: Mutex<LineQueues>,
    wake: Condvar,
    flushed: Condvar,
    /// Whether the last write failed.
    is_write_failing: AtomicBool,
    syncer: Syncer,
}

/// One iteration's work for the writer thread.
struct WriteBatch {
    lines: Vec<(LogFile, Vec<Vec<u8>>)>,
    /// The latest requested flush, unless its lines have already been written.
    flush: Option<u64>,
    replacement: Option<Replacement>,
    is_stopping: bool,
}

/// A handle for appending; cheap to clone.
#[derive(Clone)]
pub struct Records(Arc<Shared>);

/// Owns the writer's threads. Drop stops them after a final attempt to write and sync all lines.
pub struct Writer {
    records: Records,
    write_thread: Option<JoinHandle<()>>,
    sync_thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the threads, which write to files in `logs`.
    ///
    /// # Errors
    /// If a thread cannot be spawned.
    pub fn start(logs: PathBuf) -> std::io::Result<Self> {
        Self::start_with_sync(logs, Box::new(File::sync_data))
    }

    pub(super) fn start_with_sync(logs: PathBuf, sync: SyncFn) -> std::io::Result<Self> {
        let shared = Shared {
            logs,
            queues: Mutex::default(),
            wake: Condvar::new(),
            flushed: Condvar::new(),
            is_write_failing: AtomicBool::new(false),
            syncer: Syncer::default(),
        };
        let records = Records(Arc::new(shared));
        let mut writer = Self { records: records.clone(), write_thread: None, sync_thread: None };
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let sync_records = records.clone();
        writer.sync_thread = Some(thread("records-sync").spawn(move || {
            let shared = &sync_records.0;
            shared.syncer.run(&sync, |flush, has_failed| shared.finish_sync(flush, has_failed));
        })?);
        writer.write_thread = Some(thread("records").spawn(move || records.0.run_writer())?);
        Ok(writer)
    }

    pub fn records(&self) -> Records {
        self.records.clone()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let shared = &self.records.0;
        shared.lock().is_stopping = true;
        shared.wake.notify_all();
        // If a thread panicked, the panic hook has already logged it.
        if let Some(thread) = self.write_thread.take() {
            let _ = thread.join();
        }
        shared.syncer.stop();
        if let Some(thread) = self.sync_thread.take() {
            let _ = thread.join();
        }
        shared.lock().thread = ThreadState::Ended;
        shared.flushed.notify_all();
    }
}

impl Records {
    /// Queues a JSON line. Never blocks on the disk.
    ///
    /// # Errors
    /// [`LineDropped`] if the queue is full, or the writer is being dropped.
    pub fn append(&self, log: LogFile, entry: &impl Serialize) -> Result<(), LineDropped> {
        thread_local! {
            static LINE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        // Serialize before taking the lock.
        LINE.with_borrow_mut(|line| {
            line.clear();
            serde_json::to_writer(&mut *line, entry).expect("records are JSON");
            line.push(b'\n');
            self.accept(log, line)
        })
    }

    /// Queues a timestamped line for `activity.log`, replacing control characters with spaces.
    ///
    /// # Errors
    /// Same as [`Records::append`].
    pub fn note(&self, text: &str) -> Result<(), LineDropped> {
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.accept(LogFile::Activity, format!("{} {text}\n", clock::rfc3339_ms(Timestamp::now())).as_bytes())
    }

    fn accept(&self, log: LogFile, line: &[u8]) -> Result<(), LineDropped> {
        let should_wake = self.0.lock().accept(log, line)?;
        if should_wake {
            self.0.wake.notify_one();
        }
        Ok(())
    }

    /// Replaces a log file with `new`, which must be durable, if the file still has the `expected` stamp. The caller
    /// must prevent concurrent appends. Returns `false` if the file has changed or has queued lines, if another
    /// replacement is in progress or the writer is being dropped, or after `REPLACE_TIMEOUT`, in which case the file
    /// may still be replaced later.
    ///
    /// # Errors
    /// If the current file cannot be read or the rename fails. The log file is then unchanged.
    pub fn replace(&self, log: LogFile, new: PathBuf, expected: FileStamp) -> std::io::Result<bool> {
        let (reply, replied) = mpsc::sync_channel(1);
        {
            let mut queues = self.0.lock();
            if queues.is_stopping || queues.replacement.is_some() {
                return Ok(false);
            }
            queues.replacement = Some(Replacement { log, new, expected, reply });
        }
        self.0.wake.notify_one();
        // After a timeout on a slow disk, the writer thread may still replace the file if it hasn't changed by then.
        replied.recv_timeout(REPLACE_TIMEOUT).unwrap_or(Ok(false))
    }

    /// Waits until all lines accepted so far are durable. Returns `false` if that takes longer than `timeout`, a sync
    /// fails meanwhile, or the writer has stopped. `true` doesn't cover lines accepted before an earlier failed sync;
    /// see [`Records::failed_syncs`].
    pub fn flush(&self, timeout: Duration) -> bool {
        let mut queues = self.0.lock();
        queues.flushes_requested += 1;
        let (flush, failed_syncs) = (queues.flushes_requested, queues.failed_syncs);
        self.0.wake.notify_one();
        let deadline = Instant::now() + timeout;
        while queues.flushes_done < flush {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() || queues.thread == ThreadState::Ended {
                return false;
            }
            queues = self.0.flushed.wait_timeout(queues, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
        queues.failed_syncs == failed_syncs
    }

    /// Returns the number of failed syncs. Lines accepted before a failed sync may be lost in a power failure, even if
    /// they are readable now and later flushes succeed.
    pub fn failed_syncs(&self) -> u64 {
        self.0.lock().failed_syncs
    }

    /// Returns whether the last write failed.
    pub fn is_write_failing(&self) -> bool {
        self.0.is_write_failing.load(Ordering::Relaxed)
    }

    /// Returns the number of accepted but unwritten bytes.
    pub fn unwritten_bytes(&self) -> usize {
        self.0.lock().pending_bytes()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, LineQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the writer thread's loop.
    fn run_writer(&self) {
        let mut files: Vec<(LogFile, AppendFile)> = Vec::new();
        let mut sync_requested_at = Instant::now();
        loop {
            let is_dirty = files.iter().any(|(_, file)| file.is_dirty());
            let WriteBatch { lines, flush, replacement, is_stopping } =
                self.take_batch(is_dirty.then(|| sync_requested_at + SYNC_INTERVAL));
            for (log, buffers) in lines {
                let file = file_for(&mut files, log, &self.logs);
                buffers.into_iter().for_each(|buffer| file.push(buffer));
            }
            files.sort_by_key(|(log, _)| *log);
            let is_all_written = self.write_files(&mut files, is_stopping);
            self.return_buffers(&mut files);
            let directory = replacement.and_then(|replacement| self.replace_file(replacement, &mut files));
            let flush = flush.filter(|_| is_all_written);
            if is_stopping || flush.is_some() || sync_requested_at.elapsed() >= SYNC_INTERVAL {
                let mut unsynced: Vec<UnsyncedFile> =
                    files.iter_mut().flat_map(|(_, file)| file.take_unsynced()).collect();
                unsynced.extend(directory);
                self.syncer.enqueue(unsynced, flush);
                sync_requested_at = Instant::now();
            } else if let Some(directory) = directory {
                self.syncer.enqueue(vec![directory], None);
            }
            if let Some(flush) = flush {
                self.lock().flushes_written = flush;
            }
            files.retain(|(_, file)| file.unwritten_bytes() > 0 || file.is_dirty());
            if is_stopping {
                return;
            }
            if !is_all_written {
                self.wait_before_retry();
            }
        }
    }

    /// Counts a failed sync and completes the flush waiting for it, if any.
    fn finish_sync(&self, flush: Option<u64>, has_failed: bool) {
        let mut queues = self.lock();
        queues.failed_syncs += u64::from(has_failed);
        queues.flushes_done = queues.flushes_done.max(flush.unwrap_or_default());
        self.flushed.notify_all();
    }

    /// Waits for lines or a request, then takes all lines. Returns no later than `WRITE_INTERVAL` after `sync_at`, if
    /// set.
    fn take_batch(&self, sync_at: Option<Instant>) -> WriteBatch {
        let mut queues = self.wait_for_work(self.lock(), sync_at);
        queues.thread = ThreadState::Writing;
        let lines = queues.take_lines();
        let flush = (queues.flushes_requested > queues.flushes_written).then_some(queues.flushes_requested);
        WriteBatch { lines, flush, replacement: queues.replacement.take(), is_stopping: queues.is_stopping }
    }

    fn wait_for_work<'a>(
        &self,
        mut queues: MutexGuard<'a, LineQueues>,
        sync_at: Option<Instant>,
    ) -> MutexGuard<'a, LineQueues> {
        let is_due = || sync_at.is_some_and(|at| Instant::now() >= at);
        let mut idle_intervals = 0;
        loop {
            queues.thread = ThreadState::Polling;
            // Bounds the age of lines accepted since the last interval.
            let end = Instant::now() + WRITE_INTERVAL;
            while !queues.has_full_batch() && !queues.has_request() {
                let remaining = end.saturating_duration_since(Instant::now());
                if remaining.is_zero() {
                    break;
                }
                queues = self.wake.wait_timeout(queues, remaining).unwrap_or_else(PoisonError::into_inner).0;
            }
            if queues.has_work() || is_due() {
                return queues;
            }
            idle_intervals += 1;
            if idle_intervals < MAX_IDLE_INTERVALS {
                continue;
            }
            queues.thread = ThreadState::Asleep;
            while queues.thread == ThreadState::Asleep && !queues.has_work() && !is_due() {
                queues = match sync_at {
                    Some(at) => {
                        let remaining = at.saturating_duration_since(Instant::now());
                        self.wake.wait_timeout(queues, remaining).unwrap_or_else(PoisonError::into_inner).0
                    }
                    None => self.wake.wait(queues).unwrap_or_else(PoisonError::into_inner),
                };
            }
            idle_intervals = 0;
        }
    }

    /// Replaces a log file. Returns the directory if it must be synced.
    fn replace_file(
        &self,
        replacement: Replacement,
        files: &mut [(LogFile, AppendFile)],
    ) -> Option<UnsyncedFile> {
        let Replacement { log, new, expected, reply } = replacement;
        let has_unwritten_lines =
            files.iter().any(|(other, file)| *other == log && file.unwritten_bytes() > 0);
        let path = self.logs.join(log.file_name());
        let replaced =
            if has_unwritten_lines { Ok(false) } else { file::replace_if_unchanged(&path, &new, expected) };
        let is_replaced = matches!(replaced, Ok(true));
        // The caller may have timed out.
        let _ = reply.send(replaced);
        let directory = File::open(&self.logs).ok().filter(|_| is_replaced)?;
        let inode = directory.metadata().ok()?.ino();
        Some(UnsyncedFile::new(self.logs.clone(), inode, Arc::new(directory)))
    }

    /// Writes all files, logging when writes start and stop failing. Returns whether every line was written.
    fn write_files(&self, files: &mut [(LogFile, AppendFile)], is_stopping: bool) -> bool {
        let (mut failed, mut has_unwritten_interactions) = (None, false);
        for (log, file) in files.iter_mut() {
            // Interactions must be written before the usage that counts them.
            if *log == LogFile::Usage && has_unwritten_interactions {
                continue;
            }
            if let Err(error) = file.write() {
                has_unwritten_interactions |= matches!(log, LogFile::Interactions(_));
                failed = Some(error);
            }
        }
        let Some(error) = failed else {
            if self.is_write_failing.swap(false, Ordering::Relaxed) {
                tracing::info!("records can be written again");
            }
            return true;
        };
        if !self.is_write_failing.swap(true, Ordering::Relaxed) {
            tracing::error!(error = %format_chain(&error), "cannot write records; queueing them in memory");
        }
        if is_stopping {
            let bytes: usize = files.iter().map(|(_, file)| file.unwritten_bytes()).sum();
            tracing::error!(bytes, "records lost at shutdown: write failed");
        }
        false
    }

    /// Returns written buffers to the queues for reuse, and reports the unwritten bytes.
    fn return_buffers(&self, files: &mut [(LogFile, AppendFile)]) {
        let unwritten =
            files.iter().map(|(log, file)| (*log, file.unwritten_bytes())).filter(|(_, bytes)| *bytes > 0);
        let unwritten = unwritten.collect();
        let buffers = files.iter_mut().flat_map(|(_, file)| file.take_written_buffers());
        self.lock().finish_batch(unwritten, buffers);
    }

    /// Waits before retrying failed writes, unless new lines are queued.
    fn wait_before_retry(&self) {
        let is_idle = |queues: &mut LineQueues| queues.is_empty() && !queues.is_stopping;
        let waited = self.wake.wait_timeout_while(self.lock(), RETRY_INTERVAL, is_idle);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

fn file_for<'a>(files: &'a mut Vec<(LogFile, AppendFile)>, log: LogFile, logs: &Path) -> &'a mut AppendFile {
    let index = files.iter().position(|(other, _)| *other == log).unwrap_or_else(|| {
        files.push((log, AppendFile::new(logs.join(log.file_name()), log.line_format())));
        files.len() - 1
    });
    &mut files[index].1
}

#[cfg(test)]
mod tests;

//! Queues for accepted but unwritten lines, one per log file. They are bounded, preserve line order and reuse their
//! buffers.

use std::path::PathBuf;
use std::sync::mpsc::SyncSender;

use jiff::Timestamp;

use super::file::FileStamp;
use super::log_file::{BATCH_BYTES, LineDropped, LogFile, MAX_QUEUED_BYTES};
use crate::records::entry::{Gap, GapLine};
use svc_base::clock;
use svc_base::quantity::pluralize;

/// Buffer size. A line is copied into a buffer once and written from there.
const BUFFER_BYTES: usize = BATCH_BYTES;
/// Maximum number of free buffers kept for reuse.
const MAX_SPARE_BUFFERS: usize = 8;

/// Queued lines for one log file.
#[derive(Default)]
struct LineQueue {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
    /// Number of lines rejected since the last gap line.
    lost: u64,
    /// When the first lost line was rejected.
    lost_since: Option<Timestamp>,
}

/// State of the writer thread.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum ThreadState {
    /// Asleep until woken.
    #[default]
    Asleep,
    /// Checks the queue at the next interval. Only woken earlier if [`BATCH_BYTES`] are queued or a caller is waiting.
    Polling,
    Writing,
    /// The thread has exited; nothing more is written.
    Ended,
}

/// A request to replace a log file.
pub struct Replacement {
    pub log: LogFile,
    /// Path of the new file.
    pub new: PathBuf,
    /// Expected stamp of the current file.
    pub expected: FileStamp,
    pub reply: SyncSender<std::io::Result<bool>>,
}

/// Line queues for all log files, and the progress of the writer thread and of flushes.
#[derive(Default)]
pub struct LineQueues {
    /// There are only a few log files, so a linear search is enough.
    queues: Vec<(LogFile, LineQueue)>,
    bytes: usize,
    /// Bytes taken by the thread but not yet written.
    taken_bytes: usize,
    /// Bytes the thread failed to write, by log file.
    unwritten_bytes: Vec<(LogFile, usize)>,
    spare_buffers: Vec<Vec<u8>>,
    pub replacement: Option<Replacement>,
    pub thread: ThreadState,
    pub is_stopping: bool,
    /// Sequence number of the latest requested flush.
    pub flushes_requested: u64,
    /// The latest flush whose lines were written; the sync may be pending.
    pub flushes_written: u64,
    /// The latest flush whose lines were synced or failed to sync.
    pub flushes_done: u64,
    pub failed_syncs: u64,
}

impl LineQueues {
    /// Queues a line. Returns whether the thread must be woken.
    ///
    /// # Errors
    /// [`LineDropped`] if the line doesn't fit or the writer is stopping.
    pub fn accept(&mut self, log: LogFile, line: &[u8]) -> Result<bool, LineDropped> {
        let unwritten = self.unwritten_bytes.iter().find(|(other, _)| *other == log);
        let unwritten = unwritten.map_or(0, |(_, bytes)| *bytes);
        let has_room = !self.is_stopping && self.bytes + self.taken_bytes + line.len() <= MAX_QUEUED_BYTES;
        let index = self.queues.iter().position(|(other, _)| *other == log).unwrap_or_else(|| {
            self.queues.push((log, LineQueue::default()));
            self.queues.len() - 1
        });
        let queue = &mut self.queues[index].1;
        if !has_room || queue.bytes + unwritten + line.len() > log.max_queued_bytes() {
            queue.lost += 1;
            queue.lost_since.get_or_insert_with(clock::now_ms);
            return Err(LineDropped);
        }
        let before = queue.bytes;
        if let Some(gap) = queue.take_gap_line(log) {
            queue.push(&gap, &mut self.spare_buffers);
        }
        queue.push(line, &mut self.spare_buffers);
        let grown = queue.bytes - before;
        self.bytes += grown;
        Ok(match self.thread {
            ThreadState::Asleep => {
                // Wake the thread only once.
                self.thread = ThreadState::Polling;
                true
            }
            ThreadState::Polling => self.bytes >= BATCH_BYTES && self.bytes - grown < BATCH_BYTES,
            ThreadState::Writing | ThreadState::Ended => false,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn has_full_batch(&self) -> bool {
        self.bytes >= BATCH_BYTES
    }

    /// Returns whether a caller is waiting for the thread.
    pub fn has_request(&self) -> bool {
        self.is_stopping || self.replacement.is_some() || self.flushes_requested > self.flushes_written
    }

    pub fn has_work(&self) -> bool {
        let has_gap = || self.queues.iter().any(|(_, queue)| queue.lost_since.is_some());
        self.bytes > 0 || self.taken_bytes > 0 || self.has_request() || has_gap()
    }

    /// Takes all lines, by log file.
    pub fn take_lines(&mut self) -> Vec<(LogFile, Vec<Vec<u8>>)> {
        if self.taken_bytes == 0 {
            // All earlier lines are written, so there is room again. Report gaps even if no further lines arrive.
            for (log, queue) in &mut self.queues {
                if let Some(gap) = queue.take_gap_line(*log) {
                    queue.push(&gap, &mut self.spare_buffers);
                    self.bytes += gap.len();
                }
            }
        }
        self.taken_bytes += self.bytes;
        self.bytes = 0;
        let queues = self.queues.iter_mut().filter(|(_, queue)| queue.bytes > 0);
        let taken = queues.map(|(log, queue)| (*log, queue.take_buffers())).collect();
        // Drop empty queues: those for past days are never needed again.
        self.queues.retain(|(_, queue)| queue.lost_since.is_some());
        taken
    }

    /// Finishes a batch: records the unwritten bytes by log file and recycles written buffers.
    pub fn finish_batch(&mut self, unwritten: Vec<(LogFile, usize)>, buffers: impl Iterator<Item = Vec<u8>>) {
        self.taken_bytes = unwritten.iter().map(|(_, bytes)| bytes).sum();
        self.unwritten_bytes = unwritten;
        for mut buffer in buffers {
            if self.spare_buffers.len() < MAX_SPARE_BUFFERS && buffer.capacity() <= 2 * BUFFER_BYTES {
                buffer.clear();
                self.spare_buffers.push(buffer);
            }
        }
    }

    /// Returns the number of accepted but unwritten bytes.
    pub fn pending_bytes(&self) -> usize {
        self.bytes + self.taken_bytes
    }
}

impl LineQueue {
    fn push(&mut self, line: &[u8], spare_buffers: &mut Vec<Vec<u8>>) {
        self.bytes += line.len();
        match self.buffers.last_mut() {
            Some(buffer) if buffer.len() + line.len() <= BUFFER_BYTES => buffer.extend_from_slice(line),
            _ => {
                let mut buffer =
                    spare_buffers.pop().unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES.max(line.len())));
                buffer.extend_from_slice(line);
                self.buffers.push(buffer);
            }
        }
    }

    fn take_buffers(&mut self) -> Vec<Vec<u8>> {
        self.bytes = 0;
        std::mem::take(&mut self.buffers)
    }

    /// Takes the gap line reporting rejected lines, if any.
    fn take_gap_line(&mut self, log: LogFile) -> Option<Vec<u8>> {
        let since = self.lost_since.take()?;
        let lost = std::mem::take(&mut self.lost);
        let timestamp = clock::now_ms();
        let mut line = match log {
            LogFile::Activity => {
                let (now, since) = (clock::rfc3339_ms(timestamp), clock::rfc3339_ms(since));
                let lines = pluralize(lost, "line");
                format!("{now} {lines} dropped since {since} because the queue was full").into_bytes()
            }
            _ => serde_json::to_vec(&GapLine { version: 1, timestamp, gap: Gap { lost, since, why: None } })
                .expect("plain fields serialize to JSON"),
        };
        line.push(b'\n');
        Some(line)
    }
}

//! Accepted lines that are not yet written: bounded, in order per record, in reusable pieces of memory.

use std::path::PathBuf;
use std::sync::mpsc::SyncSender;

use jiff::Timestamp;

use super::file::Extent;
use super::record::{BATCH_BYTES, MAX_QUEUED_BYTES, QueueFull, Record};
use crate::records::entry::{Gap, GapLine};
use svc_base::clock;

/// Size of a piece; lines are never copied again.
const PIECE_BYTES: usize = BATCH_BYTES;
/// Maximum free pieces kept for reuse.
const MAX_SPARE_PIECES: usize = 8;

/// Lines of one record.
#[derive(Default)]
struct Queue {
    pieces: Vec<Vec<u8>>,
    bytes: usize,
    lost: u64,
    /// When the first lost line was refused.
    since: Option<Timestamp>,
}

/// The state of the writing thread.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// Sleeps until it is woken.
    #[default]
    Asleep,
    /// Checks again soon; must only be woken for [`BATCH_BYTES`].
    Polling,
    Writing,
    /// Has ended: nothing is written.
    Ended,
}

/// A replacement of a record's file.
pub struct Replacement {
    pub record: Record,
    pub by: PathBuf,
    /// The expected extent of the current file.
    pub was: Extent,
    pub reply: SyncSender<std::io::Result<bool>>,
}

#[derive(Default)]
pub struct RecordQueue {
    /// Few, so that a linear search suffices.
    queues: Vec<(Record, Queue)>,
    bytes: usize,
    /// Bytes taken by the thread and not yet written, and those that the disk refused, by record.
    taken: usize,
    refused: Vec<(Record, usize)>,
    spare: Vec<Vec<u8>>,
    pub replacement: Option<Replacement>,
    pub thread: Thread,
    pub stop: bool,
    pub flushes_requested: u64,
    /// All lines before this flush are written; the sync is pending.
    pub flushes_written: u64,
    pub flushes_done: u64,
}

impl RecordQueue {
    /// Queues a line; `true` if the thread must be woken.
    pub fn accept(&mut self, record: Record, line: &[u8]) -> Result<bool, QueueFull> {
        let refused = self.refused.iter().find(|(of, _)| *of == record).map_or(0, |(_, bytes)| *bytes);
        let has_room = !self.stop && self.bytes + self.taken + line.len() <= MAX_QUEUED_BYTES;
        let at = self.queues.iter().position(|(of, _)| *of == record).unwrap_or_else(|| {
            self.queues.push((record, Queue::default()));
            self.queues.len() - 1
        });
        let queue = &mut self.queues[at].1;
        if !has_room || queue.bytes + refused + line.len() > record.max_queued_bytes() {
            queue.lost += 1;
            queue.since.get_or_insert_with(clock::now_ms);
            return Err(QueueFull);
        }
        let before = queue.bytes;
        if let Some(gap) = queue.gap(record) {
            queue.push(&gap, &mut self.spare);
        }
        queue.push(line, &mut self.spare);
        let grown = queue.bytes - before;
        self.bytes += grown;
        Ok(match self.thread {
            Thread::Asleep => {
                // Wake it only once.
                self.thread = Thread::Polling;
                true
            }
            Thread::Polling => self.bytes >= BATCH_BYTES && self.bytes - grown < BATCH_BYTES,
            Thread::Writing | Thread::Ended => false,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn is_enough(&self) -> bool {
        self.bytes >= BATCH_BYTES
    }

    /// Whether a caller waits for the thread.
    pub fn has_request(&self) -> bool {
        self.stop || self.replacement.is_some() || self.flushes_requested > self.flushes_written
    }

    /// Whether the thread has work.
    pub fn has_work(&self) -> bool {
        let has_gap = || self.queues.iter().any(|(_, queue)| queue.since.is_some());
        self.bytes > 0 || self.taken > 0 || self.has_request() || has_gap()
    }

    /// Takes all lines, by record.
    pub fn take(&mut self) -> Vec<(Record, Vec<Vec<u8>>)> {
        if self.taken == 0 {
            // The disk accepts writes again: report gaps even without further lines.
            for (record, queue) in &mut self.queues {
                if let Some(gap) = queue.gap(*record) {
                    queue.push(&gap, &mut self.spare);
                    self.bytes += gap.len();
                }
            }
        }
        self.taken += self.bytes;
        self.bytes = 0;
        let queues = self.queues.iter_mut().filter(|(_, queue)| queue.bytes > 0);
        let taken = queues.map(|(record, queue)| (*record, queue.take())).collect();
        // Drop empty queues: days that are over never need theirs again.
        self.queues.retain(|(_, queue)| queue.since.is_some());
        taken
    }

    /// Returns the unwritten bytes by record, and free pieces for reuse.
    pub fn give_back(&mut self, left: Vec<(Record, usize)>, pieces: impl Iterator<Item = Vec<u8>>) {
        self.taken = left.iter().map(|(_, bytes)| bytes).sum();
        self.refused = left;
        for mut piece in pieces {
            if self.spare.len() < MAX_SPARE_PIECES && piece.capacity() <= 2 * PIECE_BYTES {
                piece.clear();
                self.spare.push(piece);
            }
        }
    }

    /// Bytes that are accepted and not yet written.
    pub fn bytes(&self) -> usize {
        self.bytes + self.taken
    }
}

impl Queue {
    fn push(&mut self, line: &[u8], spare: &mut Vec<Vec<u8>>) {
        self.bytes += line.len();
        match self.pieces.last_mut() {
            Some(piece) if piece.len() + line.len() <= PIECE_BYTES => piece.extend_from_slice(line),
            _ => {
                let mut piece =
                    spare.pop().unwrap_or_else(|| Vec::with_capacity(PIECE_BYTES.max(line.len())));
                piece.extend_from_slice(line);
                self.pieces.push(piece);
            }
        }
    }

    fn take(&mut self) -> Vec<Vec<u8>> {
        self.bytes = 0;
        std::mem::take(&mut self.pieces)
    }

    /// The line that reports refused lines.
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

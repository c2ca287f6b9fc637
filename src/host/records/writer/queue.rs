//! What is accepted and not written yet: bounded, each record's lines in their order, in pieces that are used again.

use std::path::PathBuf;
use std::sync::mpsc::SyncSender;

use jiff::Timestamp;

use super::file::Extent;
use super::{ENOUGH, MOST_BYTES, NoRoom, Record};
use crate::clock;
use crate::host::records::entry::{Gap, GapLine};

/// Lines lie in pieces of this size, so that no line is copied because others came after it.
const PIECE: usize = ENOUGH;
/// So many pieces of memory are kept for lines to come.
const SPARES: usize = 8;

/// Lines of one record.
#[derive(Default)]
struct Queue {
    pieces: Vec<Vec<u8>>,
    bytes: usize,
    lost: u64,
    /// When the first of those that are lost had no room.
    since: Option<Timestamp>,
}

/// What the thread does, as far as somebody with a line must know.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// It sleeps until it is woken.
    #[default]
    Asleep,
    /// It looks by itself before long; it is woken for [`ENOUGH`].
    Looking,
    Writing,
    /// It has ended: nobody writes any more.
    Ended,
}

/// A file to be put in a record's place.
pub struct Replacement {
    pub record: Record,
    pub by: PathBuf,
    /// What the record must still be.
    pub was: Extent,
    pub answer: SyncSender<std::io::Result<bool>>,
}

#[derive(Default)]
pub struct Waiting {
    /// Few: they are looked through.
    queues: Vec<(Record, Queue)>,
    bytes: usize,
    /// What the thread has taken and not written yet; of which record, where the disk refused it.
    taken: usize,
    refused: Vec<(Record, usize)>,
    spare: Vec<Vec<u8>>,
    pub replacement: Option<Replacement>,
    pub thread: Thread,
    pub stop: bool,
    pub flushes_asked: u64,
    /// Up to this one all is written; the disk is asked to keep it.
    pub flushes_written: u64,
    pub flushes_done: u64,
}

impl Waiting {
    /// Accepts a line; `true` where the thread is to be woken for it.
    pub fn accept(&mut self, record: Record, line: &[u8]) -> Result<bool, NoRoom> {
        let refused = self.refused.iter().find(|(of, _)| *of == record).map_or(0, |(_, bytes)| *bytes);
        let has_room = !self.stop && self.bytes + self.taken + line.len() <= MOST_BYTES;
        let at = self.queues.iter().position(|(of, _)| *of == record).unwrap_or_else(|| {
            self.queues.push((record, Queue::default()));
            self.queues.len() - 1
        });
        let queue = &mut self.queues[at].1;
        if !has_room || queue.bytes + refused + line.len() > record.share() {
            queue.lost += 1;
            queue.since.get_or_insert_with(clock::now_ms);
            return Err(NoRoom);
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
                // Once is enough.
                self.thread = Thread::Looking;
                true
            }
            Thread::Looking => self.bytes >= ENOUGH && self.bytes - grown < ENOUGH,
            Thread::Writing | Thread::Ended => false,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn is_enough(&self) -> bool {
        self.bytes >= ENOUGH
    }

    /// Somebody waits for what the thread does next.
    pub fn asks(&self) -> bool {
        self.stop || self.replacement.is_some() || self.flushes_asked > self.flushes_written
    }

    /// The thread has something to do.
    pub fn has_work(&self) -> bool {
        let has_gap = || self.queues.iter().any(|(_, queue)| queue.since.is_some());
        self.bytes > 0 || self.taken > 0 || self.asks() || has_gap()
    }

    /// All that is there, by records.
    pub fn take(&mut self) -> Vec<(Record, Vec<Vec<u8>>)> {
        if self.taken == 0 {
            // The disk takes what there is: what had no room is told, whether more comes or not.
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
        // A record gets its next memory with its next line; of days that are over nothing is kept.
        self.queues.retain(|(_, queue)| queue.since.is_some());
        taken
    }

    /// The memory of what is written, and what is not written.
    pub fn give_back(&mut self, left: Vec<(Record, usize)>, pieces: impl Iterator<Item = Vec<u8>>) {
        self.taken = left.iter().map(|(_, bytes)| bytes).sum();
        self.refused = left;
        for mut piece in pieces {
            if self.spare.len() < SPARES && piece.capacity() <= 2 * PIECE {
                piece.clear();
                self.spare.push(piece);
            }
        }
    }

    /// Bytes that are accepted and not written yet.
    pub fn bytes(&self) -> usize {
        self.bytes + self.taken
    }
}

impl Queue {
    fn push(&mut self, line: &[u8], spare: &mut Vec<Vec<u8>>) {
        self.bytes += line.len();
        match self.pieces.last_mut() {
            Some(piece) if piece.len() + line.len() <= PIECE => piece.extend_from_slice(line),
            _ => {
                let mut piece = spare.pop().unwrap_or_else(|| Vec::with_capacity(PIECE.max(line.len())));
                piece.extend_from_slice(line);
                self.pieces.push(piece);
            }
        }
    }

    fn take(&mut self) -> Vec<Vec<u8>> {
        self.bytes = 0;
        std::mem::take(&mut self.pieces)
    }

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

//! The events of a dispatch or a batch, in order and bounded in size, for current and later listeners.

use std::collections::VecDeque;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::watch;

/// Maximum total size of the events kept; the oldest are dropped first, but the newest event is always kept.
const MAX_LOG_BYTES: usize = 1 << 20;

/// The first event number in this process: the time, in microseconds, at which the first log was created. It therefore
/// exceeds all numbers from earlier processes.
static FIRST_NUMBER: LazyLock<u64> =
    LazyLock::new(|| u64::try_from(Timestamp::now().as_millisecond()).unwrap_or_default() * 1000);
/// The first event number of a log restored from records. A restored log differs from the original, so its numbers
/// must not overlap the original's. They start at a fixed value, so that a listener that reconnects after the last
/// event does not receive all events again.
const FIRST_RESTORED_NUMBER: u64 = 1;

/// The events of a dispatch or a batch.
pub struct EventLog {
    /// The number of the first event, even if that has been dropped.
    first_number: u64,
    buffer: Mutex<Buffer>,
    next_number: watch::Sender<u64>,
}

struct Buffer {
    /// The number of the first event kept.
    first: u64,
    events: VecDeque<Bytes>,
    bytes: usize,
    is_closed: bool,
}

/// Events read from a log.
pub struct EventBatch {
    pub events: Vec<Bytes>,
    /// Number of earlier events that were dropped.
    pub missed: u64,
    /// The number of the next event.
    pub next: u64,
    /// Whether no more events follow.
    pub is_closed: bool,
}

impl Default for EventLog {
    fn default() -> Self {
        Self::starting_at(*FIRST_NUMBER)
    }
}

impl EventLog {
    /// Creates the log of a dispatch or batch that is restored from records.
    pub fn restored() -> Self {
        Self::starting_at(FIRST_RESTORED_NUMBER)
    }

    fn starting_at(first_number: u64) -> Self {
        let buffer = Buffer { first: first_number, events: VecDeque::new(), bytes: 0, is_closed: false };
        Self { first_number, buffer: Mutex::new(buffer), next_number: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an event; `is_last` closes the log, and later events are ignored.
    pub fn push(&self, kind: &str, data: &Value, is_last: bool) {
        let mut buffer = self.lock();
        if buffer.is_closed {
            return;
        }
        let number = buffer.first + buffer.events.len() as u64;
        let event = Bytes::from(format!("id: {number}\nevent: {kind}\ndata: {data}\n\n"));
        buffer.bytes += event.len();
        buffer.events.push_back(event);
        while buffer.bytes > MAX_LOG_BYTES && buffer.events.len() > 1 {
            let dropped = buffer.events.pop_front().map_or(0, |event| event.len());
            buffer.bytes -= dropped;
            buffer.first += 1;
        }
        buffer.is_closed = is_last;
        drop(buffer);
        self.next_number.send_replace(number + 1);
    }

    /// Reads the events starting with number `from`. A number outside the log's range is from an earlier process, or
    /// from the original of a restored log; in that case, all events are read.
    pub fn read(&self, from: u64) -> EventBatch {
        let buffer = self.lock();
        let next = buffer.first + buffer.events.len() as u64;
        let from = if (self.first_number..=next).contains(&from) { from } else { self.first_number };
        let start = from.max(buffer.first);
        let skipped = usize::try_from(start - buffer.first).unwrap_or(usize::MAX);
        EventBatch {
            events: buffer.events.iter().skip(skipped).cloned().collect(),
            missed: start - from,
            next,
            is_closed: buffer.is_closed,
        }
    }

    /// Subscribes to the number of the next event, which changes with each event; zero before the first.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.next_number.subscribe()
    }

    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn late_listener_reads_all_kept_events() {
        let log = EventLog::default();
        log.push("text", &json!({"text": "a"}), false);
        log.push("result", &json!({}), true);
        log.push("text", &json!({"text": "after the end"}), false);
        let read = log.read(0);
        assert_eq!(
            (read.events.len(), read.missed, read.next, read.is_closed),
            (2, 0, *FIRST_NUMBER + 2, true)
        );
        assert_eq!(
            read.events[0],
            format!("id: {}\nevent: text\ndata: {{\"text\":\"a\"}}\n\n", *FIRST_NUMBER)
        );
        assert_eq!(log.read(*FIRST_NUMBER + 1).events.len(), 1);
        for other_process in [1, *FIRST_NUMBER - 1, *FIRST_NUMBER + 57] {
            assert_eq!(log.read(other_process).events.len(), 2);
        }
    }

    #[test]
    fn dropped_events_are_counted_as_missed() {
        let log = EventLog::default();
        let text = "x".repeat(MAX_LOG_BYTES / 4);
        for _ in 0..10 {
            log.push("text", &json!({"text": text}), false);
        }
        let read = log.read(*FIRST_NUMBER + 2);
        assert!(log.bytes() <= MAX_LOG_BYTES);
        assert_eq!((read.missed + read.events.len() as u64, read.next), (8, *FIRST_NUMBER + 10));
    }
}

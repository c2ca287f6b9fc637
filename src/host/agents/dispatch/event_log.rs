//! Bounded, ordered event log of a dispatch or batch, for current and late subscribers.

use std::collections::VecDeque;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::watch;

/// Maximum total size of retained events. The oldest are dropped first; the newest is always retained.
const MAX_LOG_BYTES: usize = 1 << 20;

/// First sequence number in this process: the creation time of the first log in microseconds, which exceeds all
/// sequence numbers from earlier processes.
static FIRST_SEQ_NUM: LazyLock<u64> =
    LazyLock::new(|| u64::try_from(Timestamp::now().as_millisecond()).unwrap_or_default() * 1000);
/// First sequence number of a log restored from records. A restored log differs from the original, so their sequence
/// numbers must not overlap. The value is fixed so that a subscriber reconnecting after the last event doesn't receive
/// everything again.
const FIRST_RESTORED_SEQ_NUM: u64 = 1;

/// Event log of a dispatch or batch.
pub struct EventLog {
    /// Sequence number of the first event, even if it has been dropped.
    first_seq_num: u64,
    buffer: Mutex<Buffer>,
    next_seq_num: watch::Sender<u64>,
}

struct Buffer {
    /// Sequence number of the oldest retained event.
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
    /// Sequence number of the next event.
    pub next: u64,
    /// Whether the log is closed, with no more events to come.
    pub is_closed: bool,
}

impl Default for EventLog {
    fn default() -> Self {
        Self::starting_at(*FIRST_SEQ_NUM)
    }
}

impl EventLog {
    /// Creates the log of a dispatch or batch restored from records.
    pub fn restored() -> Self {
        Self::starting_at(FIRST_RESTORED_SEQ_NUM)
    }

    fn starting_at(first_seq_num: u64) -> Self {
        let buffer = Buffer { first: first_seq_num, events: VecDeque::new(), bytes: 0, is_closed: false };
        Self { first_seq_num, buffer: Mutex::new(buffer), next_seq_num: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an event. `is_last` closes the log, after which further events are ignored.
    pub fn push(&self, kind: &str, data: &Value, is_last: bool) {
        let mut buffer = self.lock();
        if buffer.is_closed {
            return;
        }
        let seq_num = buffer.first + buffer.events.len() as u64;
        let event = Bytes::from(format!("id: {seq_num}\nevent: {kind}\ndata: {data}\n\n"));
        buffer.bytes += event.len();
        buffer.events.push_back(event);
        while buffer.bytes > MAX_LOG_BYTES && buffer.events.len() > 1 {
            let dropped = buffer.events.pop_front().map_or(0, |event| event.len());
            buffer.bytes -= dropped;
            buffer.first += 1;
        }
        buffer.is_closed = is_last;
        drop(buffer);
        self.next_seq_num.send_replace(seq_num + 1);
    }

    /// Reads events starting at sequence number `from`. A number outside the log's range comes from an earlier process
    /// or from the original of a restored log, so all events are read.
    pub fn read(&self, from: u64) -> EventBatch {
        let buffer = self.lock();
        let next = buffer.first + buffer.events.len() as u64;
        let from = if (self.first_seq_num..=next).contains(&from) { from } else { self.first_seq_num };
        let start = from.max(buffer.first);
        let skipped = usize::try_from(start - buffer.first).unwrap_or(usize::MAX);
        EventBatch {
            events: buffer.events.iter().skip(skipped).cloned().collect(),
            missed: start - from,
            next,
            is_closed: buffer.is_closed,
        }
    }

    /// Subscribes to the next sequence number. It changes with every event and is zero before the first.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.next_seq_num.subscribe()
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
    fn late_subscriber_reads_all_retained_events() {
        let log = EventLog::default();
        log.push("text", &json!({"text": "a"}), false);
        log.push("result", &json!({}), true);
        log.push("text", &json!({"text": "after the end"}), false);
        let read = log.read(0);
        assert_eq!(
            (read.events.len(), read.missed, read.next, read.is_closed),
            (2, 0, *FIRST_SEQ_NUM + 2, true)
        );
        assert_eq!(
            read.events[0],
            format!("id: {}\nevent: text\ndata: {{\"text\":\"a\"}}\n\n", *FIRST_SEQ_NUM)
        );
        assert_eq!(log.read(*FIRST_SEQ_NUM + 1).events.len(), 1);
        for other_process in [1, *FIRST_SEQ_NUM - 1, *FIRST_SEQ_NUM + 57] {
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
        let read = log.read(*FIRST_SEQ_NUM + 2);
        assert!(log.bytes() <= MAX_LOG_BYTES);
        assert_eq!((read.missed + read.events.len() as u64, read.next), (8, *FIRST_SEQ_NUM + 10));
    }
}

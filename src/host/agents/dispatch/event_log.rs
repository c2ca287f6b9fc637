//! What happened in a dispatch, for whoever looks on, now or later: events in their order, within bounds.

use std::collections::VecDeque;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::watch;

/// So much of one is kept; earlier events go first.
const MOST_BYTES: usize = 1 << 20;

/// Where this process begins to number events: above all that an earlier one has given out.
static BASE: LazyLock<u64> =
    LazyLock::new(|| u64::try_from(Timestamp::now().as_millisecond()).unwrap_or_default() * 1000);

/// The events of a dispatch, or of a batch.
pub struct Log {
    kept: Mutex<Kept>,
    grown: watch::Sender<u64>,
}

struct Kept {
    /// The number of the first that is kept.
    first: u64,
    events: VecDeque<Bytes>,
    bytes: usize,
    is_over: bool,
}

/// What is read of it at once.
pub struct Read {
    pub events: Vec<Bytes>,
    /// Events that are not kept any more, before these.
    pub missed: u64,
    /// The number of the next.
    pub next: u64,
    /// Nothing comes after these.
    pub is_over: bool,
}

impl Default for Log {
    fn default() -> Self {
        let kept = Kept { first: *BASE, events: VecDeque::new(), bytes: 0, is_over: false };
        Self { kept: Mutex::new(kept), grown: watch::Sender::new(0) }
    }
}

impl Log {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event of a kind; the last one says so.
    pub fn push(&self, kind: &str, data: &Value, is_last: bool) {
        let mut kept = self.lock();
        if kept.is_over {
            return;
        }
        let number = kept.first + kept.events.len() as u64;
        let event = Bytes::from(format!("id: {number}\nevent: {kind}\ndata: {data}\n\n"));
        kept.bytes += event.len();
        kept.events.push_back(event);
        while kept.bytes > MOST_BYTES && kept.events.len() > 1 {
            let gone = kept.events.pop_front().map_or(0, |event| event.len());
            kept.bytes -= gone;
            kept.first += 1;
        }
        kept.is_over = is_last;
        drop(kept);
        self.grown.send_replace(number + 1);
    }

    /// Events from this number on. One below all of this process is of an earlier one, and one above is nobody's: then all
    /// is told again.
    pub fn read(&self, from: u64) -> Read {
        let kept = self.lock();
        let next = kept.first + kept.events.len() as u64;
        let from = if (*BASE..=next).contains(&from) { from } else { *BASE };
        let start = from.max(kept.first);
        let skipped = usize::try_from(start - kept.first).unwrap_or(usize::MAX);
        Read {
            events: kept.events.iter().skip(skipped).cloned().collect(),
            missed: start - from,
            next,
            is_over: kept.is_over,
        }
    }

    /// Told of each event.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.grown.subscribe()
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
    fn a_late_listener_hears_all_that_is_kept() {
        let log = Log::default();
        log.push("text", &json!({"text": "a"}), false);
        log.push("result", &json!({}), true);
        log.push("text", &json!({"text": "after the end"}), false);
        let read = log.read(0);
        assert_eq!((read.events.len(), read.missed, read.next, read.is_over), (2, 0, *BASE + 2, true));
        assert_eq!(read.events[0], format!("id: {}\nevent: text\ndata: {{\"text\":\"a\"}}\n\n", *BASE));
        assert_eq!(log.read(*BASE + 1).events.len(), 1);
        for another_life in [1, *BASE - 1, *BASE + 57] {
            assert_eq!(log.read(another_life).events.len(), 2);
        }
    }

    #[test]
    fn what_is_too_much_is_told_as_missed() {
        let log = Log::default();
        let text = "x".repeat(MOST_BYTES / 4);
        for _ in 0..10 {
            log.push("text", &json!({"text": text}), false);
        }
        let read = log.read(*BASE + 2);
        assert!(log.bytes() <= MOST_BYTES);
        assert_eq!((read.missed + read.events.len() as u64, read.next), (8, *BASE + 10));
    }
}

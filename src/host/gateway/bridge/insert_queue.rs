//! The queue of single-row inserts that use the same statement, without I/O.
//!
//! Up to [`MAX_SEPARATE`] concurrent inserts run as separate statements. Beyond that, inserts wait until half of the
//! outstanding ones can share a statement: one half runs while the other half collects. The wait is short, because it's
//! a batch of the traffic just seen, and [`MAX_LINGER`] bounds it if the traffic stops.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Inserts that run at the same time before batching starts.
const MAX_SEPARATE: usize = 8;
/// Statements that run at the same time while inserts are batched.
const MAX_BATCHES: usize = 2;
/// Rows per statement. Larger batches save little more, and hold their locks longer.
const MAX_BATCH_ROWS: usize = 64;
/// Time after which a waiting insert no longer waits for others to join.
pub const MAX_LINGER: Duration = Duration::from_millis(1);
/// How long inserts run separately after a slow statement, and after a batch was rejected. The time doubles with each
/// further rejection, because some tables reject or delay every batch.
const MIN_SUSPENSION: Duration = Duration::from_secs(2);
const MAX_SUSPENSION: Duration = Duration::from_secs(64);

/// Identifies a waiting insert.
pub type Ticket = u64;

#[derive(Debug, PartialEq, Eq)]
pub enum Admission<T> {
    /// Execute the insert now, and call [`InsertQueue::finish`] afterwards.
    Execute,
    /// The insert waits. Its arrival may have completed a batch, which must be started now.
    Wait(Ticket, Vec<T>),
}

#[derive(Debug)]
pub struct InsertQueue<T> {
    statements_in_flight: usize,
    rows_in_flight: usize,
    waiting: VecDeque<(Ticket, T)>,
    next_ticket: Ticket,
    /// Number of waiting inserts that start a batch.
    batch_target: usize,
    /// The latest insert that has waited for [`MAX_LINGER`]. Earlier ones have, too.
    lingered: Option<Ticket>,
    last_finished: Option<Instant>,
    suspended_until: Option<Instant>,
    next_suspension: Duration,
}

impl<T> Default for InsertQueue<T> {
    fn default() -> Self {
        Self {
            statements_in_flight: 0,
            rows_in_flight: 0,
            waiting: VecDeque::new(),
            next_ticket: 0,
            batch_target: 0,
            lingered: None,
            last_finished: None,
            suspended_until: None,
            next_suspension: MIN_SUSPENSION,
        }
    }
}

impl<T> InsertQueue<T> {
    /// Admits an insert. `entry` is only called if the insert has to wait. `can_share` tells whether an insert can join
    /// the batch of an earlier one.
    pub fn admit(
        &mut self,
        now: Instant,
        entry: impl FnOnce() -> T,
        can_share: impl Fn(&T, &T) -> bool,
    ) -> Admission<T> {
        let is_suspended = self.suspended_until.is_some_and(|until| now < until);
        let is_batching = self.outstanding() >= MAX_SEPARATE || self.batch_target > 1;
        if is_suspended || !is_batching {
            self.statements_in_flight += 1;
            self.rows_in_flight += 1;
            return Admission::Execute;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.push_back((ticket, entry()));
        Admission::Wait(ticket, self.start_batch(can_share))
    }

    /// Ends a statement that inserted `rows` rows, and returns the inserts to execute next as one statement.
    pub fn finish(&mut self, now: Instant, rows: usize, can_share: impl Fn(&T, &T) -> bool) -> Vec<T> {
        self.statements_in_flight = self.statements_in_flight.saturating_sub(1);
        self.rows_in_flight = self.rows_in_flight.saturating_sub(rows);
        self.last_finished = Some(now);
        self.forget_past_load();
        self.start_batch(can_share)
    }

    /// Called when an insert has waited for [`MAX_LINGER`]: returns the batch to start, if it may start.
    pub fn flush(&mut self, ticket: Ticket, can_share: impl Fn(&T, &T) -> bool) -> Vec<T> {
        self.lingered = self.lingered.max(Some(ticket));
        self.start_batch(can_share)
    }

    /// Removes an insert that has waited for `waited`; false if it's already part of a batch. If no statement has
    /// finished in that time, the ones in flight are slow, and batching is suspended.
    pub fn withdraw(&mut self, ticket: Ticket, now: Instant, waited: Duration) -> bool {
        if !self.remove(ticket) {
            return false;
        }
        if self.last_finished.is_none_or(|finished| now.duration_since(finished) >= waited) {
            self.suspended_until = Some(now + MIN_SUSPENSION);
        }
        true
    }

    /// Removes an insert whose client has disconnected; false if it's no longer waiting.
    pub fn remove(&mut self, ticket: Ticket) -> bool {
        let position = self.waiting.binary_search_by_key(&ticket, |(ticket, _)| *ticket);
        let is_removed = position.is_ok_and(|position| self.waiting.remove(position).is_some());
        self.forget_past_load();
        is_removed
    }

    /// Records that PostgreSQL has accepted a batch.
    pub fn accept_batch(&mut self) {
        self.next_suspension = MIN_SUSPENSION;
    }

    /// Stops batching for a while after PostgreSQL has rejected a batch, and returns all waiting inserts. Each of them,
    /// and each of the `rejected` inserts of the batch, counts as a statement in flight.
    pub fn reject_batch(&mut self, now: Instant, rejected: usize) -> Vec<T> {
        self.suspended_until = Some(now + self.next_suspension);
        self.next_suspension = (self.next_suspension * 2).min(MAX_SUSPENSION);
        self.batch_target = 0;
        self.statements_in_flight += self.waiting.len() + rejected;
        self.rows_in_flight += self.waiting.len() + rejected;
        self.waiting.drain(..).map(|(_, entry)| entry).collect()
    }

    /// Whether the queue can be dropped without changing how the next insert is admitted.
    pub fn is_idle(&self, now: Instant) -> bool {
        self.outstanding() == 0 && self.suspended_until.is_none_or(|until| now >= until)
    }

    fn outstanding(&self) -> usize {
        self.rows_in_flight + self.waiting.len()
    }

    /// Without outstanding inserts, the next ones run separately again.
    fn forget_past_load(&mut self) {
        if self.outstanding() == 0 {
            self.batch_target = 0;
        }
    }

    fn start_batch(&mut self, can_share: impl Fn(&T, &T) -> bool) -> Vec<T> {
        let Some((ticket, first)) = self.waiting.front() else { return Vec::new() };
        let has_lingered = self.lingered.is_some_and(|lingered| *ticket <= lingered);
        let is_complete = has_lingered || self.waiting.len() >= self.batch_target.min(MAX_BATCH_ROWS);
        // Otherwise, later inserts would overtake a lingering one while a few separate statements keep running.
        let has_room =
            self.statements_in_flight < MAX_BATCHES || (has_lingered && self.rows_in_flight < MAX_SEPARATE);
        if !is_complete || !has_room {
            return Vec::new();
        }
        let entries = self.waiting.iter().take(MAX_BATCH_ROWS);
        let rows = entries.take_while(|(_, entry)| can_share(first, entry)).count();
        self.statements_in_flight += 1;
        self.rows_in_flight += rows;
        let batch = self.waiting.drain(..rows).map(|(_, entry)| entry).collect();
        let outstanding = self.outstanding();
        self.batch_target = if outstanding > MAX_SEPARATE { outstanding / 2 } else { 0 };
        batch
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Drives a queue as `insert_batch` does. Inserts are numbered in order of arrival.
    #[derive(Default)]
    struct Driver {
        queue: InsertQueue<usize>,
        arrived: usize,
        /// The inserts that had to wait, and how many of their timers have fired.
        tickets: Vec<Ticket>,
        flushed: usize,
        /// The inserts of each statement in flight.
        in_flight: Vec<Vec<usize>>,
        executed: Vec<usize>,
        largest_batch: usize,
    }

    impl Driver {
        fn arrive(&mut self, now: Instant) {
            let insert = self.arrived;
            self.arrived += 1;
            match self.queue.admit(now, || insert, |_, _| true) {
                Admission::Execute => self.in_flight.push(vec![insert]),
                Admission::Wait(ticket, batch) => {
                    self.tickets.push(ticket);
                    self.start(batch);
                }
            }
        }

        fn start(&mut self, batch: Vec<usize>) {
            self.largest_batch = self.largest_batch.max(batch.len());
            if !batch.is_empty() {
                self.in_flight.push(batch);
            }
        }

        fn finish(&mut self, now: Instant, statement: usize) {
            if self.in_flight.is_empty() {
                return;
            }
            let rows = self.in_flight.remove(statement % self.in_flight.len());
            let next = self.queue.finish(now, rows.len(), |_, _| true);
            self.executed.extend(rows);
            self.start(next);
        }

        /// The database rejects a batch: its rows and the waiting ones are executed separately.
        fn reject(&mut self, now: Instant, statement: usize) {
            if self.in_flight.is_empty() {
                return;
            }
            let rows = self.in_flight.remove(statement % self.in_flight.len());
            let waiting = self.queue.reject_batch(now, rows.len());
            self.in_flight.extend(rows.iter().chain(&waiting).map(|insert| vec![*insert]));
            let next = self.queue.finish(now, rows.len(), |_, _| true);
            self.start(next);
        }

        /// The timers fire once, in order of arrival.
        fn flush_next(&mut self) {
            if let Some(ticket) = self.tickets.get(self.flushed) {
                self.flushed += 1;
                let batch = self.queue.flush(*ticket, |_, _| true);
                self.start(batch);
            }
        }
    }

    proptest! {
        #[test]
        fn each_insert_is_executed_once(events in prop::collection::vec((0..12_u8, 0..64_usize), 1..400)) {
            let (mut driver, start) = (Driver::default(), Instant::now());
            for (step, (event, index)) in events.into_iter().enumerate() {
                let now = start + Duration::from_millis(u64::try_from(step).unwrap_or_default() * 50);
                match event {
                    0..=7 => driver.arrive(now),
                    8..=9 => driver.finish(now, index),
                    10 => driver.flush_next(),
                    _ => driver.reject(now, index),
                }
                prop_assert!(driver.largest_batch <= MAX_BATCH_ROWS);
            }
            while driver.flushed < driver.tickets.len() {
                driver.flush_next();
            }
            while !driver.in_flight.is_empty() {
                driver.finish(start, 0);
            }
            driver.executed.sort_unstable();
            prop_assert_eq!(driver.executed, (0..driver.arrived).collect::<Vec<_>>());
            prop_assert!(driver.queue.outstanding() == 0 && driver.queue.batch_target == 0);
        }
    }

    #[test]
    fn few_concurrent_inserts_never_wait() {
        let (mut driver, now) = (Driver::default(), Instant::now());
        for _ in 0..100 {
            for _ in 0..MAX_SEPARATE {
                driver.arrive(now);
            }
            for _ in 0..MAX_SEPARATE {
                driver.finish(now, 0);
            }
        }
        assert_eq!((driver.tickets.len(), driver.executed.len()), (0, 100 * MAX_SEPARATE));
    }

    #[test]
    fn steady_load_runs_in_two_batches() {
        let (mut driver, now) = (Driver::default(), Instant::now());
        for _ in 0..32 {
            driver.arrive(now);
        }
        // Each finished insert is followed by the same client's next one.
        for _ in 0..200 {
            let before = driver.executed.len();
            driver.finish(now, 0);
            for _ in before..driver.executed.len() {
                driver.arrive(now);
            }
        }
        let batches: Vec<_> = driver.in_flight.iter().map(Vec::len).collect();
        assert!(matches!(batches[..], [8..=16, 8..=16]), "{batches:?}");
    }

    #[test]
    fn burst_needs_few_statements() {
        let (mut driver, now) = (Driver::default(), Instant::now());
        for _ in 0..100 {
            driver.arrive(now);
        }
        while driver.flushed < driver.tickets.len() {
            driver.flush_next();
        }
        let mut statements = 0;
        while !driver.in_flight.is_empty() {
            statements += 1;
            driver.finish(now, 0);
        }
        assert_eq!(driver.executed.len(), 100);
        assert!(statements <= MAX_SEPARATE + 5, "{statements} statements");
    }

    #[test]
    fn lingering_insert_is_not_overtaken() {
        let (mut driver, now) = (Driver::default(), Instant::now());
        for _ in 0..=MAX_SEPARATE {
            driver.arrive(now);
        }
        driver.flush_next();
        // Seven statements keep running: for each that finishes, a new insert arrives.
        driver.finish(now, 0);
        assert!(driver.in_flight.contains(&vec![MAX_SEPARATE]), "{:?}", driver.in_flight);
    }

    #[test]
    fn repeated_rejections_suspend_batching_for_longer() {
        let (mut queue, now) = (InsertQueue::<u8>::default(), Instant::now());
        for expected in [2, 4, 8, 16, 32, 64, 64] {
            queue.reject_batch(now, 0);
            assert_eq!(queue.suspended_until, Some(now + Duration::from_secs(expected)));
        }
        queue.accept_batch();
        queue.reject_batch(now, 0);
        assert_eq!(queue.suspended_until, Some(now + MIN_SUSPENSION));
    }

    #[test]
    fn slow_statement_suspends_batching() {
        let (mut driver, start) = (Driver::default(), Instant::now());
        for _ in 0..=MAX_SEPARATE {
            driver.arrive(start);
        }
        let waited = Duration::from_millis(50);
        assert!(driver.queue.withdraw(driver.tickets[0], start + waited, waited));
        assert!(!driver.queue.withdraw(driver.tickets[0], start + waited, waited), "already withdrawn");
        driver.arrive(start + waited);
        assert_eq!(driver.tickets.len(), 1, "inserts wait although batching is suspended");
        driver.arrive(start + waited + MIN_SUSPENSION);
        assert_eq!(driver.tickets.len(), 2, "batching was not resumed");
    }

    #[test]
    fn inserts_of_another_schema_version_start_a_new_batch() {
        let (mut queue, now) = (InsertQueue::default(), Instant::now());
        for version in [1; MAX_SEPARATE].into_iter().chain([1, 1, 2]) {
            queue.admit(now, || version, |first, next| first == next);
        }
        let mut next = Vec::new();
        while next.is_empty() {
            next = queue.finish(now, 1, |first, next| first == next);
        }
        assert_eq!(next, [1, 1]);
    }
}

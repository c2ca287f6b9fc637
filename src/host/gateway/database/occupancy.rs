//! The occupancy of a connection: the number of requests in flight, and whether a transaction has reserved it.
//!
//! Both are stored in one atomic integer, so that no request can enter a reserved connection.

#[cfg(not(test))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(test)]
use loom::sync::atomic::{AtomicU32, Ordering};

const RESERVED_BIT: u32 = 1 << 31;

#[derive(Debug)]
pub struct Occupancy(AtomicU32);

impl Occupancy {
    /// The occupancy of a new connection: the opener's request is in flight.
    pub fn used_by_opener() -> Self {
        Self(AtomicU32::new(1))
    }

    /// Counts one more request as in flight and returns the previous number; `None`, without a change, if the
    /// connection is reserved.
    pub fn enter(&self) -> Option<u32> {
        let increment = |state| (state & RESERVED_BIT == 0).then_some(state + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, increment).ok()
    }

    /// Counts a request as ended and returns the number of those still in flight.
    pub fn leave(&self) -> u32 {
        (self.0.fetch_sub(1, Ordering::AcqRel) & !RESERVED_BIT) - 1
    }

    /// Keeps further requests out; `false` if the connection is already reserved.
    pub fn reserve(&self) -> bool {
        self.0.fetch_or(RESERVED_BIT, Ordering::AcqRel) & RESERVED_BIT == 0
    }

    /// Ends a reservation.
    pub fn release(&self) {
        self.0.fetch_and(!RESERVED_BIT, Ordering::AcqRel);
    }

    pub fn is_reserved(&self) -> bool {
        self.0.load(Ordering::Acquire) & RESERVED_BIT != 0
    }

    /// The number of requests in flight.
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Acquire) & !RESERVED_BIT
    }

    /// Whether the connection is reserved and only the transaction that reserved it is in flight.
    pub fn is_exclusive(&self) -> bool {
        self.0.load(Ordering::Acquire) == RESERVED_BIT | 1
    }
}

#[cfg(test)]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    use super::*;

    /// Checks every interleaving of a transaction with a concurrent statement.
    #[test]
    fn statement_never_enters_transaction() {
        loom::model(|| {
            let occupancy = Arc::new(Occupancy::used_by_opener());
            let is_in_transaction = Arc::new(AtomicBool::new(false));
            let statement = {
                let (occupancy, is_in_transaction) = (occupancy.clone(), is_in_transaction.clone());
                thread::spawn(move || {
                    if occupancy.enter().is_some() {
                        assert!(!is_in_transaction.load(Ordering::SeqCst));
                        occupancy.leave();
                    }
                })
            };
            assert!(occupancy.reserve());
            if occupancy.is_exclusive() {
                is_in_transaction.store(true, Ordering::SeqCst);
                assert!(occupancy.enter().is_none());
                is_in_transaction.store(false, Ordering::SeqCst);
            }
            occupancy.leave();
            occupancy.release();
            statement.join().unwrap();
            assert_eq!((occupancy.count(), occupancy.is_reserved()), (0, false));
        });
    }

    #[test]
    fn reserve_succeeds_for_only_one_of_two_requests() {
        loom::model(|| {
            let occupancy = Arc::new(Occupancy::used_by_opener());
            let other = {
                let occupancy = occupancy.clone();
                thread::spawn(move || occupancy.reserve())
            };
            let has_reserved = occupancy.reserve();
            assert!(has_reserved != other.join().unwrap());
        });
    }
}

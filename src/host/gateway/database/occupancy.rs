//! The use of a connection: the number of statements in flight, and whether a transaction has reserved it.
//!
//! Both are stored in one atomic integer, so that no statement can enter a reserved connection.

#[cfg(not(test))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(test)]
use loom::sync::atomic::{AtomicU32, Ordering};

const RESERVED: u32 = 1 << 31;

#[derive(Debug)]
pub struct Occupancy(AtomicU32);

impl Occupancy {
    /// A connection in use by its opener.
    pub fn used_by_opener() -> Self {
        Self(AtomicU32::new(1))
    }

    /// Adds a user and returns the previous number; `None`, without a change, if the connection is reserved.
    pub fn enter(&self) -> Option<u32> {
        let more = |state| (state & RESERVED == 0).then_some(state + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()
    }

    /// Removes a user and returns the number of remaining ones.
    pub fn leave(&self) -> u32 {
        (self.0.fetch_sub(1, Ordering::AcqRel) & !RESERVED) - 1
    }

    /// Keeps further statements out; `false` if the connection is already reserved.
    pub fn reserve(&self) -> bool {
        self.0.fetch_or(RESERVED, Ordering::AcqRel) & RESERVED == 0
    }

    /// Ends a reservation.
    pub fn release(&self) {
        self.0.fetch_and(!RESERVED, Ordering::AcqRel);
    }

    pub fn is_reserved(&self) -> bool {
        self.0.load(Ordering::Acquire) & RESERVED != 0
    }

    /// The number of users.
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Acquire) & !RESERVED
    }

    /// Whether the transaction that reserved it is its only user.
    pub fn is_exclusive(&self) -> bool {
        self.0.load(Ordering::Acquire) == RESERVED | 1
    }
}

#[cfg(test)]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    use super::*;

    /// Checks every interleaving of a transaction and concurrent statements: none runs within the transaction.
    #[test]
    fn no_statement_enters_a_transaction() {
        loom::model(|| {
            let occupancy = Arc::new(Occupancy::used_by_opener());
            let is_in_transaction = Arc::new(AtomicBool::new(false));
            let statements: Vec<_> = (0..1)
                .map(|_| {
                    let (occupancy, is_in_transaction) = (occupancy.clone(), is_in_transaction.clone());
                    thread::spawn(move || {
                        if occupancy.enter().is_some() {
                            assert!(!is_in_transaction.load(Ordering::SeqCst));
                            occupancy.leave();
                        }
                    })
                })
                .collect();
            assert!(occupancy.reserve());
            if occupancy.is_exclusive() {
                is_in_transaction.store(true, Ordering::SeqCst);
                assert!(occupancy.enter().is_none());
                is_in_transaction.store(false, Ordering::SeqCst);
            }
            occupancy.leave();
            occupancy.release();
            statements.into_iter().for_each(|statement| statement.join().unwrap());
            assert_eq!((occupancy.count(), occupancy.is_reserved()), (0, false));
        });
    }

    #[test]
    fn only_one_of_two_reserves() {
        loom::model(|| {
            let occupancy = Arc::new(Occupancy::used_by_opener());
            let other = {
                let occupancy = occupancy.clone();
                thread::spawn(move || occupancy.reserve())
            };
            let here = occupancy.reserve();
            assert!(here != other.join().unwrap());
        });
    }
}

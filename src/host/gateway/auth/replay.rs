//! Ids of proofs that may be used once, remembered until they expire.
//!
//! Memory is bounded: when the memory is full of ids that still hold, a new one is refused, never forgotten early.

use std::collections::HashMap;

/// How many unexpired ids are remembered.
const CAPACITY: usize = 8192;
/// An id longer than this is no id of ours.
const LONGEST: usize = 128;

#[derive(Debug, Default)]
pub struct UsedIds {
    until: HashMap<String, i64>,
}

/// Whether an id was new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    First,
    Again,
    Full,
}

impl UsedIds {
    /// Takes `id`, which can be shown until `until`, at `now`; all in Unix seconds.
    pub fn take(&mut self, id: &str, until: i64, now: i64) -> Use {
        if id.is_empty() || id.len() > LONGEST || self.until.contains_key(id) {
            return Use::Again;
        }
        if self.until.len() >= CAPACITY {
            self.until.retain(|_, until| *until >= now);
            if self.until.len() >= CAPACITY {
                return Use::Full;
            }
        }
        self.until.insert(id.to_owned(), until);
        Use::First
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_counts_once() {
        let mut used = UsedIds::default();
        assert_eq!(used.take("a", 10, 0), Use::First);
        assert_eq!(used.take("a", 10, 0), Use::Again);
        assert_eq!(used.take("", 10, 0), Use::Again);
        assert_eq!(used.take(&"x".repeat(129), 10, 0), Use::Again);
    }

    #[test]
    fn memory_is_bounded_and_what_still_holds_is_never_forgotten() {
        let mut used = UsedIds::default();
        for n in 0..CAPACITY {
            assert_eq!(used.take(&n.to_string(), 10, 0), Use::First);
        }
        assert_eq!(used.take("more", 10, 5), Use::Full);
        assert_eq!(used.take("0", 10, 5), Use::Again);
        assert_eq!(used.take("more", 30, 11), Use::First, "the expired ones make room");
    }
}

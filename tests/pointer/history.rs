//! What became of one pointer, write by write, and what must never be among it.

use std::collections::{HashMap, HashSet};

use svc::store::pointer::Pointer;

/// A rule of the pointer that a write broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Violation {
    /// A write undid one that it had not seen.
    WentBack,
    /// The fence was lowered.
    FenceLowered,
    /// It names a snapshot of a machine that had been fenced off, or an older one than before.
    FencedOff,
    /// It names a snapshot whose object or side record is not there as it says.
    Unverified,
    /// It named a snapshot, and then none.
    Forgotten,
    /// A host was told of success, and the pointer had never named its snapshot.
    FalseSuccess,
    /// A snapshot was named, and a reader found none that is usable.
    SeenDamaged,
    /// `latest` holds what no entry of the log says.
    Unclaimed,
    /// A read began after a claim, and did not see it.
    SeenThePast,
}

#[derive(Debug, Default)]
pub struct History {
    now: Option<Pointer>,
    named: HashSet<String>,
    claimed: HashMap<u64, Pointer>,
    pub violations: Vec<Violation>,
    pub writes: u32,
}

impl History {
    /// The `seq` that was claimed last.
    pub fn seq(&self) -> u64 {
        self.now.as_ref().map_or(0, |now| now.seq)
    }

    pub fn names_snapshot(&self) -> bool {
        self.now.as_ref().is_some_and(|now| now.snapshot.is_some())
    }

    /// Takes note of a write of `latest`.
    pub fn published(&mut self, new: &Pointer) {
        if self.claimed.get(&new.seq) != Some(new) {
            self.violations.push(Violation::Unclaimed);
        }
    }

    /// Takes note of a claim that happened; `whole`: the snapshot that it names has its object and side record.
    pub fn claimed(&mut self, new: Pointer, whole: bool) {
        self.writes += 1;
        let old_fence = self.now.as_ref().map(|old| old.fence_epoch);
        let old_seq = self.now.as_ref().map_or(0, |old| old.seq);
        if new.seq != old_seq + 1 {
            self.violations.push(Violation::WentBack);
        }
        if old_fence.is_some_and(|fence| new.fence_epoch < fence) {
            self.violations.push(Violation::FenceLowered);
        }
        let before = self.now.as_ref().and_then(|old| old.snapshot.as_ref());
        match (before, &new.snapshot) {
            (Some(_), None) => self.violations.push(Violation::Forgotten),
            (before, Some(named)) if before.is_none_or(|before| before.key != named.key) => {
                let older = before
                    .is_some_and(|before| (named.epoch, named.taken_at) < (before.epoch, before.taken_at));
                if old_fence.is_some_and(|fence| named.epoch < fence) || older {
                    self.violations.push(Violation::FencedOff);
                }
                if !whole {
                    self.violations.push(Violation::Unverified);
                }
                self.named.insert(named.key.clone());
            }
            _ => {}
        }
        self.claimed.insert(new.seq, new.clone());
        self.now = Some(new);
    }

    pub fn told_of_success(&mut self, key: &str) {
        if !self.named.contains(key) {
            self.violations.push(Violation::FalseSuccess);
        }
    }

    pub fn saw_the_past(&mut self) {
        self.violations.push(Violation::SeenThePast);
    }

    pub fn saw_damage(&mut self) {
        self.violations.push(Violation::SeenDamaged);
    }
}

//! The write history of one pointer, and the violations that it must not contain.

use std::collections::{HashMap, HashSet};

use svc::store::pointer::Pointer;

/// A violation of the pointer's invariants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Violation {
    /// A write overwrote another write that its writer had not read.
    LostUpdate,
    /// The fence was lowered.
    FenceLowered,
    /// The pointer was moved to a snapshot from a fenced machine, or to an older snapshot than before.
    StaleSnapshot,
    /// The pointer names a snapshot whose object or sidecar is missing or does not match.
    IncompleteSnapshot,
    /// The pointer named a snapshot, but no longer names one.
    SnapshotDropped,
    /// A host reported success, but the pointer never named its snapshot.
    FalseSuccess,
    /// The pointer named a snapshot, but a reader found no usable one.
    DamagedRead,
    /// `latest` contains a value that no log entry claims.
    UnclaimedLatest,
    /// A read that started after a claim did not see it.
    StaleRead,
}

#[derive(Debug, Default)]
pub struct History {
    current: Option<Pointer>,
    /// The keys of all snapshots that the pointer has named.
    named_keys: HashSet<String>,
    claimed: HashMap<u64, Pointer>,
    pub violations: Vec<Violation>,
    pub writes: u32,
}

impl History {
    /// Returns the last claimed `seq`.
    pub fn seq(&self) -> u64 {
        self.current.as_ref().map_or(0, |pointer| pointer.seq)
    }

    pub fn names_snapshot(&self) -> bool {
        self.current.as_ref().is_some_and(|pointer| pointer.snapshot.is_some())
    }

    /// Records a write to `latest`.
    pub fn record_publication(&mut self, new: &Pointer) {
        if self.claimed.get(&new.seq) != Some(new) {
            self.violations.push(Violation::UnclaimedLatest);
        }
    }

    /// Records a successful claim; `is_complete` states whether its snapshot's object and sidecar exist and match.
    pub fn record_claim(&mut self, new: Pointer, is_complete: bool) {
        self.writes += 1;
        let old_fence = self.current.as_ref().map(|old| old.fence_epoch);
        let old_seq = self.current.as_ref().map_or(0, |old| old.seq);
        if new.seq != old_seq + 1 {
            self.violations.push(Violation::LostUpdate);
        }
        if old_fence.is_some_and(|fence| new.fence_epoch < fence) {
            self.violations.push(Violation::FenceLowered);
        }
        let before = self.current.as_ref().and_then(|old| old.snapshot.as_ref());
        match (before, &new.snapshot) {
            (Some(_), None) => self.violations.push(Violation::SnapshotDropped),
            (before, Some(named)) if before.is_none_or(|before| before.key != named.key) => {
                let is_older = before
                    .is_some_and(|before| (named.epoch, named.taken_at) < (before.epoch, before.taken_at));
                if old_fence.is_some_and(|fence| named.epoch < fence) || is_older {
                    self.violations.push(Violation::StaleSnapshot);
                }
                if !is_complete {
                    self.violations.push(Violation::IncompleteSnapshot);
                }
                self.named_keys.insert(named.key.clone());
            }
            _ => {}
        }
        self.claimed.insert(new.seq, new.clone());
        self.current = Some(new);
    }

    pub fn record_success(&mut self, key: &str) {
        if !self.named_keys.contains(key) {
            self.violations.push(Violation::FalseSuccess);
        }
    }

    pub fn record_stale_read(&mut self) {
        self.violations.push(Violation::StaleRead);
    }

    pub fn record_damaged_read(&mut self) {
        self.violations.push(Violation::DamagedRead);
    }
}

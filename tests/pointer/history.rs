//! What became of one pointer, write by write, and what must never be among it.

use std::collections::HashSet;

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
    /// Somebody who looked for the latest snapshot was told that it is damaged.
    SeenDamaged,
}

#[derive(Debug, Default)]
pub struct History {
    now: Option<Pointer>,
    named: HashSet<String>,
    pub violations: Vec<Violation>,
    pub writes: u32,
}

impl History {
    /// Takes note of a write that happened; `whole`: the snapshot that it names has its object and side record.
    pub fn wrote(&mut self, new: Pointer, whole: bool) {
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
        self.now = Some(new);
    }

    pub fn told_of_success(&mut self, key: &str) {
        if !self.named.contains(key) {
            self.violations.push(Violation::FalseSuccess);
        }
    }

    pub fn saw_damage(&mut self) {
        self.violations.push(Violation::SeenDamaged);
    }
}

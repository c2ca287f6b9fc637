//! The proof that a snapshot is complete, without which no pointer moves to it.

use super::pointer::SnapshotRef;

/// A snapshot with a complete object and a side record: only such a snapshot may be in the pointer.
#[derive(Debug, Clone)]
pub struct Recorded(SnapshotRef);

impl Recorded {
    pub(super) fn new(named: SnapshotRef) -> Self {
        Self(named)
    }

    pub fn named(&self) -> &SnapshotRef {
        &self.0
    }
}

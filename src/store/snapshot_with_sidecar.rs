//! A type whose values exist only for complete snapshots. The pointer can be moved only to such a snapshot.

use super::pointer::SnapshotRef;

/// A snapshot with a complete object and a sidecar.
#[derive(Debug, Clone)]
pub struct SnapshotWithSidecar(SnapshotRef);

impl SnapshotWithSidecar {
    pub(super) fn new(snapshot: SnapshotRef) -> Self {
        Self(snapshot)
    }

    pub fn snapshot_ref(&self) -> &SnapshotRef {
        &self.0
    }
}

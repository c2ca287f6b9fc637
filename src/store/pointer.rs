//! The pointers `system/db/latest` and `files/latest`, and how a fence or a new snapshot changes them. All functions
//! are pure; `pointer_io` reads and writes the pointers.
//!
//! Invariants: `seq` and `fenceEpoch` only increase, except that the platform replaces an implausible fence and, in
//! `files/latest`, any fence; a machine below the fence, or another machine with the fence's epoch, never moves the
//! pointer; and none of this depends on the hosts' clocks. Only [`merge`] compares times, of two concurrent snapshots
//! with the same epoch.

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use svc_base::clock;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;

/// An object with another version counts as corrupt, and this release replaces a corrupt `files/latest`. A later format
/// of that pointer therefore needs other object names.
pub const FORMAT_VERSION: u32 = 1;
/// Exclusive upper bound on `seq`: every JSON parser represents smaller integers exactly.
pub const MAX_SEQ: u64 = 1 << 53;
/// Maximum distance between a log entry and `latest`. The protocol leaves at most one entry ahead, but a `latest` that
/// was restored from an old version must still be repaired.
pub const MAX_SEQ_AHEAD: u64 = 1_000_000;

/// The pointer to a slot's latest verified snapshot. `snapshot: null` is a tombstone: a fence without a snapshot, or,
/// with `emptiedAt`, an operator's decision to restore no earlier snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pointer<S = SnapshotRef> {
    pub version: u32,
    pub fence_epoch: Epoch,
    /// The machine that the fence admits. Older releases omit it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence_machine_id: Option<MachineId>,
    /// The platform's signature on its fence. Older releases omit it, and it is absent if a host raised the fence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence_proof: Option<String>,
    pub seq: u64,
    pub snapshot: Option<S>,
    /// When an operator decided that the slot starts empty even though it has snapshots.
    #[serde(default, with = "clock::wire_option", skip_serializing_if = "Option::is_none")]
    pub emptied_at: Option<Timestamp>,
}

/// A reference to a verified snapshot, as in the pointer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotRef {
    /// Relative to the slot: `system/db/snapshots/….dump`.
    pub key: String,
    pub size_bytes: u64,
    /// In hexadecimal.
    pub sha256: String,
    pub etag: Option<String>,
    pub machine_id: MachineId,
    pub epoch: Epoch,
    #[serde(with = "clock::wire")]
    pub taken_at: Timestamp,
    #[serde(with = "clock::wire")]
    pub verified_at: Timestamp,
}

/// A snapshot that a pointer can name: of the database, or of the owner's files.
pub trait PointedSnapshot: Clone + PartialEq + Serialize + DeserializeOwned {
    /// Whether corrupt log entries are skipped, and a corrupt `latest` is replaced with the newest valid entry. If
    /// not, an operator must rebuild the pointer.
    const REPAIRS_CORRUPT_LATEST: bool;
    /// Whether old log entries are deleted, so that the log can begin at any `seq`.
    const HAS_TRIMMED_LOG: bool;

    /// Identifies the snapshot in its slot.
    fn key(&self) -> &str;
    /// The machine that took it.
    fn machine_id(&self) -> MachineId;
    fn epoch(&self) -> Epoch;
    fn taken_at(&self) -> Timestamp;
}

impl PointedSnapshot for SnapshotRef {
    const REPAIRS_CORRUPT_LATEST: bool = false;
    const HAS_TRIMMED_LOG: bool = false;

    fn key(&self) -> &str {
        &self.key
    }

    fn machine_id(&self) -> MachineId {
        self.machine_id
    }

    fn epoch(&self) -> Epoch {
        self.epoch
    }

    fn taken_at(&self) -> Timestamp {
        self.taken_at
    }
}

/// Whether an error message says that a snapshot pointer is not sound. Hosts report errors only as text.
pub fn is_unsound(error: &str) -> bool {
    error.contains(UNSOUND_MESSAGE)
}

const UNSOUND_MESSAGE: &str = "the snapshot pointer is not sound";

/// The lowest epoch that may move the pointer, and the machine with that epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fence {
    pub epoch: Epoch,
    pub machine: MachineId,
    /// The platform's signature: a MAC over slot, epoch and machine.
    pub proof: Option<String>,
}

impl Fence {
    /// Creates a fence without the platform's signature.
    pub fn unsigned(epoch: Epoch, machine: MachineId) -> Self {
        Self { epoch, machine, proof: None }
    }
}

/// The writer has been replaced: the fence is above its epoch, or at its epoch for another machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.message())]
pub struct FencedError {
    pub fence_epoch: Epoch,
    /// The fence's machine, if the epochs are equal.
    pub holder: Option<MachineId>,
    pub writer_epoch: Epoch,
}

impl FencedError {
    /// Whether no machine in the slot can have had the fence's epoch.
    pub fn is_implausible(&self) -> bool {
        self.fence_epoch > self.writer_epoch.max_plausible()
    }

    fn message(&self) -> String {
        let Self { fence_epoch, holder, writer_epoch } = self;
        if self.is_implausible() {
            return format!(
                "{UNSOUND_MESSAGE}: no machine in the slot can have had its fence's epoch {fence_epoch}"
            );
        }
        let by = holder.map(|machine| format!(" by machine {machine}")).unwrap_or_default();
        format!(
            "the slot is fenced at epoch {fence_epoch}{by}; this machine, with epoch {writer_epoch}, may no \
             longer move the pointer"
        )
    }
}

impl<S: PointedSnapshot> Pointer<S> {
    /// Returns the machine with the fence's epoch: the fence's machine, or the machine that took the latest snapshot,
    /// if that snapshot has the same epoch.
    pub fn fence_holder(&self) -> Option<MachineId> {
        let snapshot_at_fence = || self.snapshot.as_ref().filter(|latest| latest.epoch() == self.fence_epoch);
        self.fence_machine_id.or_else(|| snapshot_at_fence().map(PointedSnapshot::machine_id))
    }

    /// Returns the fence's proof, if the fence is for this machine and epoch.
    fn proof_of(&self, epoch: Epoch, machine: MachineId) -> Option<String> {
        let is_same = self.fence_epoch == epoch && self.fence_holder() == Some(machine);
        self.fence_proof.clone().filter(|_| is_same)
    }

    /// Checks that this machine may move the pointer.
    ///
    /// # Errors
    /// [`FencedError`] if the fence is above `epoch`, or at `epoch` for another machine.
    pub fn admit(&self, epoch: Epoch, machine: MachineId) -> Result<(), FencedError> {
        let fence_epoch = self.fence_epoch;
        if fence_epoch > epoch {
            return Err(FencedError { fence_epoch, holder: None, writer_epoch: epoch });
        }
        match self.fence_holder().filter(|holder| fence_epoch == epoch && *holder != machine) {
            Some(holder) => Err(FencedError { fence_epoch, holder: Some(holder), writer_epoch: epoch }),
            None => Ok(()),
        }
    }
}

/// Returns the pointer with this fence; `None` if the pointer already has it. The platform's signed fence also replaces
/// a fence that is far above it: no machine ever had such an epoch, so a host must have written that fence.
///
/// # Errors
/// [`FencedError`] if there is already a fence for a higher epoch, or for another machine with the same epoch.
pub fn fence<S: PointedSnapshot>(
    current: Option<&Pointer<S>>,
    fence: &Fence,
) -> Result<Option<Pointer<S>>, FencedError> {
    let Fence { epoch, machine, proof } = fence;
    let mut known_proof = None;
    let is_implausible =
        |pointer: &Pointer<S>| proof.is_some() && pointer.fence_epoch > epoch.max_plausible();
    if let Some(pointer) = current.filter(|pointer| !is_implausible(pointer)) {
        pointer.admit(*epoch, *machine)?;
        known_proof = pointer.proof_of(*epoch, *machine);
        let is_same_fence = pointer.fence_epoch == *epoch && pointer.fence_machine_id == Some(*machine);
        if is_same_fence && (proof.is_none() || *proof == known_proof) {
            return Ok(None);
        }
    }
    Ok(set_fence(current, &Fence { proof: proof.clone().or(known_proof), ..fence.clone() }))
}

/// Returns the pointer with this fence in place of any other; `None` if the pointer already has this fence.
pub fn set_fence<S: PointedSnapshot>(current: Option<&Pointer<S>>, fence: &Fence) -> Option<Pointer<S>> {
    let Fence { epoch, machine, proof } = fence;
    let is_same = |pointer: &&Pointer<S>| {
        pointer.fence_epoch == *epoch
            && pointer.fence_machine_id == Some(*machine)
            && pointer.fence_proof == *proof
    };
    if current.filter(is_same).is_some() {
        return None;
    }
    Some(Pointer {
        version: FORMAT_VERSION,
        fence_epoch: *epoch,
        fence_machine_id: Some(*machine),
        fence_proof: proof.clone(),
        seq: current.map_or(0, |pointer| pointer.seq) + 1,
        snapshot: current.and_then(|pointer| pointer.snapshot.clone()),
        emptied_at: current.and_then(|pointer| pointer.emptied_at),
    })
}

/// Returns the pointer moved to `snapshot` by the machine that took it; `None` if the pointer already names that
/// snapshot, even if the machine has been fenced since: the response to its write may have been lost. Moving the
/// pointer fences all earlier machines.
///
/// # Errors
/// [`FencedError`] if the fence is above the snapshot's epoch, or at that epoch for another machine.
pub fn advance<S: PointedSnapshot>(
    current: Option<&Pointer<S>>,
    snapshot: &S,
) -> Result<Option<Pointer<S>>, FencedError> {
    if let Some(pointer) = current {
        if pointer.snapshot.as_ref().is_some_and(|latest| latest.key() == snapshot.key()) {
            return Ok(None);
        }
        pointer.admit(snapshot.epoch(), snapshot.machine_id())?;
    }
    Ok(Some(Pointer {
        version: FORMAT_VERSION,
        fence_epoch: snapshot.epoch(),
        fence_machine_id: Some(snapshot.machine_id()),
        fence_proof: current.and_then(|pointer| pointer.proof_of(snapshot.epoch(), snapshot.machine_id())),
        seq: current.map_or(0, |pointer| pointer.seq) + 1,
        snapshot: Some(snapshot.clone()),
        emptied_at: None,
    }))
}

/// Merges different values with the same `seq` in the log and in `latest`: an older release wrote `latest` without
/// claiming that `seq`. The writes were concurrent, so the higher fence is kept, and the snapshot with the higher
/// epoch or, if the epochs are equal, the later one.
pub fn merge<S: PointedSnapshot>(claimed: &Pointer<S>, latest: &Pointer<S>) -> Pointer<S> {
    let snapshot_order =
        |pointer: &Pointer<S>| pointer.snapshot.as_ref().map(|target| (target.epoch(), target.taken_at()));
    let snapshot =
        if snapshot_order(latest) > snapshot_order(claimed) { &latest.snapshot } else { &claimed.snapshot };
    let fence = if latest.fence_epoch > claimed.fence_epoch { latest } else { claimed };
    let holder = fence.fence_holder();
    let proof_of =
        |pointer: &Pointer<S>| holder.and_then(|holder| pointer.proof_of(fence.fence_epoch, holder));
    Pointer {
        version: FORMAT_VERSION,
        fence_epoch: fence.fence_epoch,
        fence_machine_id: holder,
        fence_proof: proof_of(claimed).or_else(|| proof_of(latest)),
        seq: claimed.seq.max(latest.seq),
        emptied_at: claimed.emptied_at.max(latest.emptied_at).filter(|_| snapshot.is_none()),
        snapshot: snapshot.clone(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn snapshot(n: u32, epoch: Epoch) -> SnapshotRef {
        let at: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        SnapshotRef {
            key: format!("system/db/snapshots/{n}-{epoch}.dump"),
            size_bytes: 1,
            sha256: "00".repeat(32),
            etag: None,
            machine_id: MachineId(uuid::Uuid::nil()),
            epoch,
            taken_at: at,
            verified_at: at,
        }
    }

    pub(crate) fn sidecar(snapshot: &SnapshotRef) -> crate::snapshot::Sidecar {
        crate::snapshot::Sidecar {
            version: crate::snapshot::FORMAT_VERSION,
            key: snapshot.key.clone(),
            size_bytes: snapshot.size_bytes,
            sha256: snapshot.sha256.clone(),
            pg_version: "16.14".to_owned(),
            machine_id: snapshot.machine_id,
            epoch: snapshot.epoch,
            taken_at: snapshot.taken_at,
            verified_at: snapshot.verified_at,
            roles: Vec::new(),
            tables: Vec::new(),
            database: None,
            database_identity: None,
        }
    }

    fn machine(n: u8) -> MachineId {
        MachineId(uuid::Uuid::from_u128(u128::from(n)))
    }

    fn snapshot_by(n: u32, epoch: Epoch, by: MachineId) -> SnapshotRef {
        SnapshotRef {
            machine_id: by,
            key: format!("system/db/snapshots/{n}-{by}-{epoch}.dump"),
            ..snapshot(n, epoch)
        }
    }

    #[test]
    fn fence_without_pointer_is_a_tombstone() {
        let first = fence::<SnapshotRef>(None, &Fence::unsigned(Epoch(1), machine(1))).unwrap().unwrap();
        assert_eq!(first.snapshot, None);
        let second = fence(Some(&first), &Fence::unsigned(Epoch(2), machine(2))).unwrap().unwrap();
        let error = advance(Some(&second), &snapshot_by(1, Epoch(1), machine(1))).unwrap_err();
        assert_eq!(error, FencedError { fence_epoch: Epoch(2), holder: None, writer_epoch: Epoch(1) });
    }

    #[test]
    fn advance_after_a_lost_response_changes_nothing() {
        let first = snapshot_by(1, Epoch(1), machine(1));
        let written = advance(None, &first).unwrap().unwrap();
        let fenced = fence(Some(&written), &Fence::unsigned(Epoch(2), machine(2))).unwrap().unwrap();
        assert_eq!(advance(Some(&fenced), &first), Ok(None), "refused to repeat a completed move");
        assert!(advance(Some(&fenced), &snapshot_by(2, Epoch(1), machine(1))).is_err());
    }

    #[test]
    fn equal_epoch_of_another_machine_is_fenced() {
        let fenced = fence::<SnapshotRef>(None, &Fence::unsigned(Epoch(2), machine(1))).unwrap().unwrap();
        let refusal = FencedError { fence_epoch: Epoch(2), holder: Some(machine(1)), writer_epoch: Epoch(2) };
        assert_eq!(fence(Some(&fenced), &Fence::unsigned(Epoch(2), machine(2))), Err(refusal));
        assert_eq!(advance(Some(&fenced), &snapshot_by(1, Epoch(2), machine(2))), Err(refusal));
        assert!(refusal.to_string().contains(&machine(1).to_string()), "{refusal}");
        assert_eq!(fence(Some(&fenced), &Fence::unsigned(Epoch(2), machine(1))), Ok(None));
        assert!(advance(Some(&fenced), &snapshot_by(1, Epoch(2), machine(1))).unwrap().is_some());
    }

    #[test]
    fn proof_is_kept_only_with_its_machine_and_epoch() {
        let signed = |epoch, by, proof: &str| Fence { epoch, machine: by, proof: Some(proof.to_owned()) };
        let first = fence::<SnapshotRef>(None, &signed(Epoch(1), machine(1), "a")).unwrap().unwrap();
        assert_eq!(fence(Some(&first), &signed(Epoch(1), machine(1), "a")), Ok(None));
        let backed_up = advance(Some(&first), &snapshot_by(1, Epoch(1), machine(1))).unwrap().unwrap();
        assert_eq!(backed_up.fence_proof.as_deref(), Some("a"));
        let raised = advance(Some(&backed_up), &snapshot_by(2, Epoch(9), machine(1))).unwrap().unwrap();
        assert_eq!(raised.fence_proof, None, "kept the proof of a lower epoch");
        let second = fence(Some(&raised), &signed(Epoch(10), machine(2), "b")).unwrap().unwrap();
        assert_eq!(second.fence_proof.as_deref(), Some("b"));

        let unsigned = fence::<SnapshotRef>(None, &Fence::unsigned(Epoch(1), machine(1))).unwrap().unwrap();
        let signed = fence(Some(&unsigned), &signed(Epoch(1), machine(1), "a")).unwrap().unwrap();
        assert_eq!((signed.fence_proof.as_deref(), signed.seq), (Some("a"), 2));
    }

    #[test]
    fn pointer_from_an_older_release_is_compatible() {
        let text = r#"{"version":1,"fenceEpoch":3,"seq":7,"snapshot":null}"#;
        let old: Pointer = serde_json::from_str(text).unwrap();
        assert_eq!(old.fence_machine_id, None);
        assert_eq!(serde_json::to_string(&old).unwrap(), text, "absent fields were written");
        let adopted = fence(Some(&old), &Fence::unsigned(Epoch(3), machine(1))).unwrap().unwrap();
        assert_eq!((adopted.fence_machine_id, adopted.seq), (Some(machine(1)), 8));

        let named = Pointer { snapshot: Some(snapshot_by(1, Epoch(3), machine(1))), ..old };
        assert!(named.admit(Epoch(3), machine(1)).is_ok());
        assert!(named.admit(Epoch(3), machine(2)).is_err(), "admitted another machine with the same epoch");
    }

    #[test]
    fn merge_keeps_the_higher_fence_and_the_later_snapshot() {
        let base = fence::<SnapshotRef>(None, &Fence::unsigned(Epoch(1), machine(1))).unwrap().unwrap();
        let claimed = fence(Some(&base), &Fence::unsigned(Epoch(2), machine(2))).unwrap().unwrap();
        let latest = advance(Some(&base), &snapshot_by(9, Epoch(1), machine(1))).unwrap().unwrap();
        for merged in [merge(&claimed, &latest), merge(&latest, &claimed)] {
            assert_eq!((merged.fence_epoch, merged.fence_machine_id), (Epoch(2), Some(machine(2))));
            assert_eq!(merged.snapshot, latest.snapshot);
            assert_eq!(merged.seq, 2);
        }
    }

    #[test]
    fn merge_of_equal_fences_keeps_the_only_proof() {
        let unsigned = fence::<SnapshotRef>(None, &Fence::unsigned(Epoch(2), machine(1))).unwrap().unwrap();
        let signed = Pointer { fence_proof: Some("a".into()), ..unsigned.clone() };
        for merged in [merge(&unsigned, &signed), merge(&signed, &unsigned)] {
            assert_eq!(merged.fence_proof.as_deref(), Some("a"));
        }
        let other_pointer =
            Pointer { fence_machine_id: Some(machine(2)), fence_proof: Some("b".into()), ..unsigned.clone() };
        assert_eq!(merge(&unsigned, &other_pointer).fence_proof, None, "kept another machine's proof");
    }

    #[test]
    fn implausible_fence_is_replaced_only_by_a_signed_one() {
        let implausible =
            fence::<SnapshotRef>(None, &Fence::unsigned(Epoch(5000), machine(1))).unwrap().unwrap();
        assert!(fence(Some(&implausible), &Fence::unsigned(Epoch(3), machine(2))).is_err());
        let signed = Fence { epoch: Epoch(3), machine: machine(2), proof: Some("a".into()) };
        let fenced = fence(Some(&implausible), &signed).unwrap().unwrap();
        assert_eq!((fenced.fence_epoch, fenced.fence_machine_id), (Epoch(3), Some(machine(2))));
        assert_eq!((fenced.seq, fenced.fence_proof.as_deref()), (2, Some("a")));
        let max_plausible =
            fence::<SnapshotRef>(None, &Fence::unsigned(Epoch(1003), machine(1))).unwrap().unwrap();
        assert!(fence(Some(&max_plausible), &signed).is_err());
    }

    proptest! {
        /// For any order of fences and snapshots, neither `seq` nor the fence decreases, no two machines have the same
        /// epoch, and the snapshot is only ever replaced by another snapshot.
        #[test]
        fn pointer_never_moves_backward(
            steps in prop::collection::vec((any::<bool>(), 1u32..6, 1u8..4, 0u32..1000), 0..60),
        ) {
            let mut current: Option<Pointer> = None;
            for (is_fence, epoch, by, n) in steps {
                let (epoch, by) = (Epoch(epoch), machine(by));
                let next = match is_fence {
                    true => fence(current.as_ref(), &Fence::unsigned(epoch, by)),
                    false => advance(current.as_ref(), &snapshot_by(n, epoch, by)),
                };
                let Ok(Some(next)) = next else { continue };
                prop_assert_eq!(next.fence_holder(), Some(by));
                if let Some(old) = &current {
                    prop_assert!(next.seq == old.seq + 1);
                    prop_assert!(next.fence_epoch >= old.fence_epoch);
                    prop_assert!(old.snapshot.is_none() || next.snapshot.is_some());
                    prop_assert!(epoch >= old.fence_epoch);
                    if epoch == old.fence_epoch {
                        prop_assert_eq!(old.fence_holder(), Some(by), "two machines have the same epoch");
                    }
                    if let (Some(old), Some(next)) = (&old.snapshot, &next.snapshot) {
                        prop_assert!(next.epoch >= old.epoch, "an earlier machine's snapshot replaced a later one");
                    }
                }
                current = Some(next);
            }
        }
    }
}

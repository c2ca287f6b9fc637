//! Snapshots: the state of the home directory at a point in time.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;

use crate::id::Id;

const MACHINE_TAG: &str = "machine=";
/// Machine ids are UUIDs.
const MAX_MACHINE_TAG_BYTES: usize = MACHINE_TAG.len() + 36;

/// A snapshot in `restic`'s format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// When the save started reading the directory: the snapshot contains everything written before this time.
    pub time: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Id>,
    pub tree: Id,
    pub paths: Vec<String>,
    #[serde(default)]
    pub hostname: String,
    #[serde(default)]
    pub username: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
}

impl Snapshot {
    /// Returns the tag of the machine that took the snapshot, or `None` if another program took it.
    pub fn machine_tag(&self) -> Option<&str> {
        let is_machine = |tag: &&str| tag.starts_with(MACHINE_TAG) && tag.len() <= MAX_MACHINE_TAG_BYTES;
        self.tags.iter().map(String::as_str).find(is_machine)
    }
}

/// The machine that took a snapshot. Stored in tags because `restic` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotOrigin {
    pub machine: MachineId,
    pub epoch: Epoch,
}

impl SnapshotOrigin {
    pub(crate) fn to_tags(self) -> Vec<String> {
        vec![format!("{MACHINE_TAG}{}", self.machine), format!("epoch={}", self.epoch)]
    }
}

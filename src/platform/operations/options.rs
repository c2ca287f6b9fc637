//! What an operator decided for an operation, when it was filed or since.

use serde::{Deserialize, Serialize};

/// Stored in `operations.options`. Fields that a newer binary wrote are ignored.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OperationOptions {
    /// What no snapshot holds may be lost, if a last backup cannot be made.
    pub accept_loss: bool,
    /// An operator accepted the loss while the last backup was being taken: it is not waited for any more.
    pub give_up_backup: bool,
    /// A fence that no platform key in force verifies holds nothing back: an operator decided that a host made it up.
    pub disregard_fence: bool,
    /// The predecessor's server is deleted before the new one is created.
    pub replace_first: bool,
    /// The server of a deleted machine is not kept.
    pub now: bool,
}

//! An operator's decisions for an operation, made when it was filed or later.

use serde::{Deserialize, Serialize};

/// Stored in `operations.options`. Fields from a newer binary are ignored.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OperationOptions {
    /// If no final backup can be made, data that no snapshot holds may be lost.
    pub accept_loss: bool,
    /// An operator accepted the loss during the final backup: the step stops waiting for it.
    pub give_up_backup: bool,
    /// An unverified fence no longer blocks the operation: an operator decided that a host forged it.
    pub disregard_fence: bool,
    /// The predecessor's server is deleted before the new one is created.
    pub replace_first: bool,
    /// The server of a deleted machine is not kept.
    pub now: bool,
}

//! This machine's registration, once the platform has accepted it, as `svc-register` noted it.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::fsx;
use crate::host::system::layout::Layout;
use crate::machine::id::MachineId;

/// What is read of the note.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Note {
    machine_id: MachineId,
    /// The exact text of the request.
    sent: String,
    registered_at: Option<String>,
}

/// The request that the platform accepted. A note that cannot be read says nothing.
pub fn accepted(layout: &Layout, machine: MachineId) -> Option<Box<RawValue>> {
    let text = fsx::read_if_there(&layout.registration()).ok().flatten()?;
    let note: Note = serde_json::from_slice(&text).ok()?;
    let is_accepted = note.machine_id == machine && note.registered_at.is_some();
    RawValue::from_string(note.sent).ok().filter(|_| is_accepted)
}

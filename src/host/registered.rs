//! Whether the platform has accepted this machine's registration, as `svc-register` noted it.

use serde::Deserialize;

use super::layout::Layout;
use crate::fsx;
use crate::machine::id::MachineId;

/// What is read of the note.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Note {
    machine_id: MachineId,
    registered_at: Option<String>,
}

/// A note that cannot be read says nothing.
pub fn is_done(layout: &Layout, machine: MachineId) -> bool {
    let text = fsx::read_if_there(&layout.registration()).ok().flatten();
    let note = text.and_then(|text| serde_json::from_slice::<Note>(&text).ok());
    note.is_some_and(|note| note.machine_id == machine && note.registered_at.is_some())
}

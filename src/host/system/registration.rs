//! This machine's registration, as accepted by the platform and recorded by `svc-register`.

use serde::Deserialize;

use crate::system::layout::Layout;
use svc_base::fsx;
use svc_machine::id::MachineId;
use svc_wire::registration::Registration;

/// Subset of `register.json`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RegistrationRecord {
    machine_id: MachineId,
    /// Request body, verbatim.
    sent: String,
    registered_at: Option<String>,
}

/// Reads the request the platform accepted. Returns `None` if it hasn't accepted one for this machine or the file is
/// unreadable.
pub fn read_accepted(layout: &Layout, machine: MachineId) -> Option<Registration> {
    let text = fsx::read_if_exists(&layout.registration()).ok().flatten()?;
    let record: RegistrationRecord = serde_json::from_slice(&text).ok()?;
    let is_accepted = record.machine_id == machine && record.registered_at.is_some();
    serde_json::from_str(&record.sent).ok().filter(|_| is_accepted)
}

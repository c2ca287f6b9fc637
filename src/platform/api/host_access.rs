//! Checks shared by the routes for hosts: that the token belongs to the machine in the path, and that the machine may
//! use its slot's store.

use super::access::unauthorized;
use super::call::{ApiCall, path_id};
use super::heartbeat;
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use svc_http::problem::{Code, Problem};
use svc_machine::id::MachineId;

/// Why a machine may use its slot's store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotAccess {
    /// It is the slot's current machine.
    Current,
    /// It has left its slot, and an operation is waiting for its final backup.
    FinalBackup,
}

/// Authenticates a host for the machine in the path.
///
/// # Errors
/// `unauthorized` if the token is missing, unknown or expired; `rate_limited` if the client or the host sends too many
/// requests; `forbidden` for another machine's token; `invalid_request` for an invalid id; `database_unavailable` if
/// the database is unreachable.
pub async fn authenticate_machine(
    call: &ApiCall,
    platform: &Platform,
    id: &str,
) -> Result<MachineRow, Problem> {
    let machine = call.authenticate_host(platform).await?;
    let id: MachineId = path_id("machineId", id)?;
    if id != machine.id {
        return Err(Problem::new(Code::Forbidden, "This token belongs to another machine."));
    }
    Ok(machine)
}

/// Returns why the machine may use its slot's store.
///
/// # Errors
/// Unless the final backup is pending: `unauthorized` for a deleted machine, `superseded` for a replaced one.
/// `database_unavailable` if the database is unreachable.
pub async fn check_slot_access(platform: &Platform, machine: &MachineRow) -> Result<SlotAccess, Problem> {
    if machine.is_active() {
        Ok(SlotAccess::Current)
    } else if heartbeat::is_final_backup_pending(platform, machine).await? {
        Ok(SlotAccess::FinalBackup)
    } else if machine.deleted_at.is_some() {
        Err(unauthorized())
    } else {
        Err(Problem::new(Code::Superseded, "Another machine has replaced this one."))
    }
}

//! Deletes the server of a machine that has left its slot.
//!
//! Invariant: a machine is recorded as having no server only if the provider has accepted the server's deletion, or
//! reports no server, while no process can still be creating one.

use std::time::Duration;

use super::leased::LeasedOperation;
use super::step::{StepError, StepOutcome};
use super::{create, later_holder};
use crate::db;
use crate::db::machine_row::MachineRow;
use svc_provider::ServerId;

const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Deletes the server of this operation's machine.
pub async fn delete_own_server(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = leased.machine().await?;
    if !is_discard_confirmed(leased, &machine).await? {
        let should_keep = later_holder::should_keep_server(leased.platform, &machine).await;
        if should_keep.map_err(|error| StepError::transient("cannot read the slot's fence", error))? {
            leased.mark_kept(machine.id).await?;
            let note = "according to the store, the machine got its slot back or has served traffic, which this database does not \
                        record: its server is kept until an operator discards it";
            return Ok(StepOutcome::Fail { code: later_holder::BEHIND_STORE, note });
        }
    }
    // A later machine that could not restore the files may have set `unsaved_since` after the removal began.
    if machine.unsaved_since.is_some() && machine.discard_requested_at.is_none() {
        let note = "the server may hold the only copy of some data: it is kept until an operator discards it";
        return Ok(StepOutcome::Fail { code: "unsaved_changes", note });
    }
    // No final backup contains the data, and no operator has accepted its loss.
    let is_unsaved = machine.registered_at.is_some()
        && machine.final_backup_at.is_none()
        && machine.discard_requested_at.is_none();
    if is_unsaved && leased.detect_returned_server(&machine).await? {
        leased.mark_unsaved(machine.id).await?;
        let note = "the provider has the machine's server after all, and no final backup exists: the server is kept until an \
                    operator discards it";
        return Ok(StepOutcome::Fail { code: "server_found", note });
    }
    Ok(if delete_server(leased, &machine).await? {
        StepOutcome::done()
    } else {
        StepOutcome::wait(POLL_INTERVAL)
    })
}

/// Returns whether an operator discarded the server after it was kept because of the store's fence. An earlier discard
/// may be outdated, like the database.
async fn is_discard_confirmed(leased: &LeasedOperation<'_>, machine: &MachineRow) -> Result<bool, StepError> {
    let Some(requested_at) = machine.discard_requested_at else { return Ok(false) };
    let session = leased.platform.db.session().await?;
    let kept_at =
        db::operations::find_last_failure_time(&session, machine.id, later_holder::BEHIND_STORE).await?;
    Ok(kept_at.is_some_and(|kept_at| kept_at < requested_at))
}

/// Deletes a machine's server. Returns `false` while a server may still appear.
pub async fn delete_server(leased: &LeasedOperation<'_>, machine: &MachineRow) -> Result<bool, StepError> {
    let platform = leased.platform;
    let session = platform.db.session().await?;
    if db::leases::has_other_lease_on_machine(&session, machine.id, leased.operation.id).await? {
        return Ok(false);
    }
    // Read again: the previous lease holder may have recorded a server.
    let Some(machine) = db::machines::get(&session, machine.id).await? else { return Ok(true) };
    let request_age = db::machines::load_create_request_age(&session, machine.id).await?;
    drop(session);
    if let Some(id) = machine.provider_server_id {
        platform.provider.delete(ServerId(id)).await?;
    } else if machine.create_requested_at.is_some() {
        match create::find_server(platform, &machine).await? {
            Some(server) => {
                platform.provider.delete(server.id).await?;
            }
            None if request_age < platform.config.provider.unconfirmed_create_timeout => return Ok(false),
            None => {}
        }
    }
    let session = platform.db.session().await?;
    db::machine_changes::record_server_deleted(&session, machine.id).await?;
    Ok(true)
}

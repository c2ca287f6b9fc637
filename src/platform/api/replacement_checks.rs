//! Checks the preconditions for creating, replacing, resizing or reinstating a slot's machine before any change, so
//! that a request that cannot succeed changes nothing.

use deadpool_postgres::GenericClient;
use serde_json::json;

use super::problems;
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::{self, DbError};
use crate::operations::later_holder::{self, FenceClaim, LaterHolder, LookupError};
use svc_base::clock::rfc3339_ms;
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::epoch::Epoch;
use svc_machine::name::{IdpUserId, ServerType, Slot};
use svc_machine::operation::OperationKind;
use svc_store::key::SlotPrefix;
use svc_store::snapshot::{Sidecar, SnapshotUnusable};
use svc_store::{StoreError, epoch_floor, pointer_io};

/// Whether a slot without any snapshot may start with an empty database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmptyStart {
    Allowed,
    Refused,
}

impl EmptyStart {
    pub fn read(fields: &mut Fields) -> Self {
        if fields.boolean("allowEmpty") == Some(true) { Self::Allowed } else { Self::Refused }
    }
}

/// Disk space for the system and the release, with a reserve.
const RESERVED_BYTES: u64 = 6 << 30;
/// Disk space to reserve for each byte of the dumped database. The restored database is smaller, but building its
/// indexes needs extra space.
const BYTES_PER_DATABASE_BYTE: f64 = 1.25;

/// Rejects a snapshot whose database does not fit on the disk of a server type. If the sidecar records no size, or the
/// provider is unreachable, the check passes: the host checks its disk before the restore.
///
/// # Errors
/// `disk_too_small` if the database does not fit; `invalid_request` if the provider does not have the server type.
pub async fn ensure_fits_disk(
    platform: &Platform,
    sidecar: &Sidecar,
    server_type: &ServerType,
) -> Result<(), Problem> {
    let Some(database) = &sidecar.database else { return Ok(()) };
    let info = match platform.provider.get_server_type(server_type).await {
        Ok(Some(info)) => info,
        Ok(None) => {
            let detail = format!("{server_type} is not a server type that the provider offers");
            return Err(Problem::field("/serverType", detail));
        }
        Err(error) => {
            tracing::warn!(error = %format_chain(&error), "cannot determine the disk size of the server type");
            return Ok(());
        }
    };
    let required_bytes = required_disk_bytes(database.size_bytes);
    let disk_bytes = u64::from(info.disk_gb) << 30;
    if required_bytes <= disk_bytes {
        return Ok(());
    }
    let detail = format!(
        "The snapshot's database of {} GB needs a disk of {} GB; {server_type} has {} GB. Choose a type \
         with a larger disk.",
        database.size_bytes >> 30,
        required_bytes.div_ceil(1 << 30),
        info.disk_gb
    );
    Err(Problem::new(Code::DiskTooSmall, detail))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
fn required_disk_bytes(database_bytes: u64) -> u64 {
    RESERVED_BYTES.saturating_add((database_bytes as f64 * BYTES_PER_DATABASE_BYTE) as u64)
}

/// Finds the slot's highest epoch in the store. An unreadable pointer is an error, because no fence could be written to
/// it.
///
/// # Errors
/// `snapshot_unusable` if the pointer is unreadable or its snapshot's epoch is implausible; `store_unavailable` if a
/// request to the store fails; `database_unavailable` if the database is unreachable.
pub async fn find_epoch_floor(platform: &Platform, user: &IdpUserId, slot: &Slot) -> Result<Epoch, Problem> {
    let recorded = db::machines::find_highest_epoch(&platform.db.session().await?, user, slot).await?;
    match epoch_floor::read_floor(&platform.bucket, &SlotPrefix::new(user, slot), recorded).await {
        Ok(floor) => Ok(floor),
        Err(StoreError::Corrupt { key, reason }) => {
            Err(problems::snapshot_unusable(SnapshotUnusable::Damaged { key, reason }))
        }
        Err(error) => Err(error.into()),
    }
}

/// Rejects a slot that another machine holds, according to the store, under an epoch that this database does not
/// record: the database was restored from an older copy, and that machine may be serving. Also rejects a slot whose
/// fence no active platform key verifies. Accepts both if an operator accepts the loss. The slot's current machine
/// itself may hold the slot under a later epoch.
///
/// # Errors
/// `invalid_state` for such a slot; `snapshot_unusable` if the pointer is unreadable; `store_unavailable` if a request
/// to the store fails; `database_unavailable` if the database is unreachable.
pub async fn ensure_no_unknown_holder(
    platform: &Platform,
    (user, slot): (&IdpUserId, &Slot),
    current: Option<&MachineRow>,
    accepts_loss: bool,
) -> Result<(), Problem> {
    let claim = match later_holder::find_claim(platform, &platform.db, user, slot).await {
        Ok(claim) => claim,
        Err(LookupError::Store(StoreError::Corrupt { key, reason })) => {
            return Err(problems::snapshot_unusable(SnapshotUnusable::Damaged { key, reason }));
        }
        Err(error) => return Err(error.into()),
    };
    let holder = match claim {
        FenceClaim::Unverified(named) if !accepts_loss => {
            let detail = format!(
                "{} If the keys are correct, the slot's host forged the signature: repeat the command with `--accept-loss`.",
                later_holder::describe_unverified(named)
            );
            return Err(slot_held_problem(detail, current));
        }
        claim => claim.holder().filter(|holder| !accepts_loss && is_other_machine(holder, current)),
    };
    let Some(holder) = holder else { return Ok(()) };
    let detail = format!(
        "According to the store, machine {} holds the slot under epoch {}, which this database does not record, because it was \
         restored from an older copy. Data that machine {0} wrote after the newest snapshot is only on its server, which \
         is kept. `svcctl pointer show {user} --slot {slot}` shows that snapshot. To start the slot from it anyway, repeat \
         the command with `--accept-loss` and, if there is no snapshot, `--allow-empty`.",
        holder.machine, holder.epoch
    );
    Err(slot_held_problem(detail, current))
}

/// Rejects a change to a machine's server if, according to the store, another machine holds its slot under an epoch
/// that this database does not record, or if no active platform key verifies a fence that names another machine. If the
/// pointer is unreadable, the check passes.
///
/// # Errors
/// `invalid_state` for such a change; `store_unavailable` if a request to the store fails; `database_unavailable` if
/// the database is unreachable.
pub async fn ensure_holds_slot(platform: &Platform, machine: &MachineRow) -> Result<(), Problem> {
    let claim = match later_holder::find_claim(platform, &platform.db, &machine.user, &machine.slot).await {
        Ok(claim) => claim,
        Err(LookupError::Store(StoreError::Corrupt { .. })) => FenceClaim::Nothing,
        Err(error) => return Err(error.into()),
    };
    let command = if machine.is_active() { "recover" } else { "provision" };
    let holder = match claim {
        FenceClaim::Unverified(named) if is_other_machine(&named, Some(machine)) => {
            let detail = format!(
                "{} Nothing was changed. If the keys are correct, the slot's host forged the signature: to create a new \
                 machine from the newest snapshot, run `svcctl {command}` with `--accept-loss`.",
                later_holder::describe_unverified(named)
            );
            return Err(slot_held_problem(detail, Some(machine)));
        }
        claim => claim.holder().filter(|holder| is_other_machine(holder, Some(machine))),
    };
    let Some(holder) = holder else { return Ok(()) };
    let detail = format!(
        "According to the store, machine {} holds the slot under epoch {}, which this database does not record, because it was \
         restored from an older copy. Nothing was changed. To create a new machine from the newest snapshot, run `svcctl \
         {command}` with `--accept-loss`. Data that the other machine wrote after that snapshot is only on its server.",
        holder.machine, holder.epoch
    );
    Err(slot_held_problem(detail, Some(machine)))
}

/// Rejects replacing a machine that is powered off, or is being powered off, unless the loss is accepted: its host can
/// take a final backup only after the machine has been powered on again.
///
/// # Errors
/// `invalid_state` for such a machine.
pub fn ensure_not_powered_off(machine: &MachineRow, accepts_loss: bool) -> Result<(), Problem> {
    let risks_loss = has_server_with_data(machine) && !accepts_loss;
    let Some(since) = machine.powered_off_at.filter(|_| risks_loss) else { return Ok(()) };
    let (id, since) = (machine.id, rfc3339_ms(since));
    let detail = format!(
        "Machine {id} has been powered off since {since}, so its host cannot take a final backup: data that it wrote after \
         the newest snapshot is only on its server. Power it on first (`svcctl power on {id} --wait`), or accept the \
         loss of that data (`--accept-loss`)."
    );
    Err(Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(machine.status))
        .with("allowed", json!([]))
        .with("poweredOffAt", json!(since)))
}

/// Rejects replacing a machine that is being resized or restarted, unless the loss is accepted: its server may already
/// be shutting down, so its host may be unable to take a final backup.
///
/// # Errors
/// `invalid_state` for such a machine; `database_unavailable` if the database is unreachable.
pub async fn ensure_not_restarting(
    client: &impl GenericClient,
    machine: &MachineRow,
    accepts_loss: bool,
) -> Result<(), Problem> {
    if accepts_loss || !has_server_with_data(machine) {
        return Ok(());
    }
    let restarts = [OperationKind::Resize, OperationKind::Reboot].map(OperationKind::as_str);
    let running = db::operations::find_running(client, machine.id).await?;
    let Some(operation) = running.filter(|operation| restarts.contains(&operation.kind.as_str())) else {
        return Ok(());
    };
    let detail = format!(
        "The {} {} of machine {} is running, so its host may not be able to take a final backup: data that it wrote after \
         the newest snapshot is only on its server. Wait until the operation has ended (`svcctl operation show {1}`), or \
         accept the loss of that data (`--accept-loss`).",
        operation.noun(),
        operation.id,
        machine.id
    );
    Err(Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(machine.status))
        .with("allowed", json!([])))
}

/// Returns whether the machine has a server that may hold data.
fn has_server_with_data(machine: &MachineRow) -> bool {
    machine.registered_at.is_some() && machine.has_server() && machine.server_missing_since.is_none()
}

fn is_other_machine(holder: &LaterHolder, current: Option<&MachineRow>) -> bool {
    current.is_none_or(|current| current.id != holder.machine)
}

fn slot_held_problem(detail: String, current: Option<&MachineRow>) -> Problem {
    let problem = Problem::new(Code::InvalidState, detail).with("allowed", json!([]));
    match current {
        Some(current) => problem.with("machineStatus", json!(current.status)),
        None => problem,
    }
}

/// Rejects an empty start if the store has no snapshot but the database records one: that snapshot is lost, unless an
/// operator emptied the pointer after it was taken.
///
/// # Errors
/// `snapshot_unusable` for such a slot; `store_unavailable` if the pointer cannot be read; `database_unavailable` if
/// the database is unreachable.
pub async fn ensure_may_start_empty(
    platform: &Platform,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<(), Problem> {
    let newest = db::machines::load_newest_backup_time(&platform.db.session().await?, user, slot).await?;
    let Some(taken_at) = newest else { return Ok(()) };
    let pointer = pointer_io::read(&platform.bucket, &SlotPrefix::new(user, slot)).await?;
    if pointer.and_then(|pointer| pointer.value.emptied_at).is_some_and(|emptied_at| emptied_at > taken_at) {
        return Ok(());
    }
    let detail = format!(
        "The store's pointer names no snapshot, but a host reported a snapshot taken at {}. `svcctl pointer show {user} --slot \
         {slot}` shows which snapshot a rebuild would choose; `svcctl pointer rebuild {user} --slot {slot}` rebuilds the \
         pointer.",
        rfc3339_ms(taken_at)
    );
    Err(Problem::new(Code::SnapshotUnusable, detail))
}

/// Rejects an empty start of a slot without a snapshot if a machine that has served traffic may have the only copy of
/// the data.
///
/// # Errors
/// `snapshot_unusable` for such a slot; `database_unavailable` if the database is unreachable.
pub async fn ensure_no_unsaved_data(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<(), Problem> {
    let machines = db::machines::list_newest_in_slot(client, user, slot).await?;
    let mut served = machines.iter().filter(|machine| machine.registered_at.is_some());
    if let Some(last) = served.next()
        && may_hold_data(client, last).await?
    {
        return Err(unsaved_problem(last));
    }
    let unsaved = served.find(|machine| machine.unsaved_since.is_some() && machine.has_server());
    unsaved.map_or(Ok(()), |machine| Err(unsaved_problem(machine)))
}

/// Returns whether the last machine that served may have data. A deleted machine may have data only while its server
/// exists, and only if no operator accepted the loss.
async fn may_hold_data(client: &impl GenericClient, last: &MachineRow) -> Result<bool, DbError> {
    if last.deleted_at.is_none() {
        return Ok(true);
    }
    Ok(last.has_server() && !db::slot_operations::is_loss_accepted(client, last.id).await?)
}

fn unsaved_problem(machine: &MachineRow) -> Problem {
    let id = machine.id;
    let next_step = if !machine.has_server() {
        "Its server no longer exists.".to_owned()
    } else if machine.is_active() {
        format!(
            "If its server is running and its host is healthy, return it to service with `svcctl resume {id}`."
        )
    } else if machine.deleted_at.is_some() {
        format!("Return it to its slot with `svcctl undelete {id}`.")
    } else {
        format!("`svcctl status {id}` shows its state.")
    };
    let detail = format!(
        "Machine {id} has served traffic in the slot, and no snapshot of its data exists: a new machine would start \
         empty. {next_step} To start empty anyway, run `svcctl provision --allow-empty`."
    );
    Problem::new(Code::SnapshotUnusable, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn required_disk_bytes_adds_reserve_and_saturates() {
        assert_eq!(required_disk_bytes(0), RESERVED_BYTES);
        assert_eq!(required_disk_bytes(40 << 30), RESERVED_BYTES + (50 << 30));
        assert_eq!(required_disk_bytes(u64::MAX), u64::MAX);
    }
}

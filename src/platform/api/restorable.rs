//! What must hold of a slot's snapshots before any machine of it is replaced: everything that a new machine will need is
//! checked here, while the old one still serves.

use deadpool_postgres::GenericClient;
use serde_json::json;

use super::fault;
use crate::clock::rfc3339_ms;
use crate::http::fields::Fields;
use crate::http::problem::{Code, Problem, chain};
use crate::machine::epoch::Epoch;
use crate::machine::name::{IdpUserId, ServerType, Slot};
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self, DbError};
use crate::platform::operations::later_holder::{self, Beyond, LaterHolder, LookupError};
use crate::store::key::SlotPrefix;
use crate::store::snapshot::{SideRecord, SnapshotUnusable};
use crate::store::{StoreError, epochs, pointer_io};

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

/// What system and release take of a server's disk, with room to work.
const RESERVED_BYTES: u64 = 6 << 30;
/// A restored database is smaller than the one that was dumped, but its indexes are built beside it.
const BYTES_PER_DATABASE_BYTE: f64 = 1.25;

/// Refuses a snapshot whose database cannot fit the disk of a server type. A provider that does not answer now decides
/// nothing: the host checks again before it touches anything.
///
/// # Errors
/// `disk_too_small`.
pub async fn fits(platform: &Platform, side: &SideRecord, server_type: &ServerType) -> Result<(), Problem> {
    let Some(database) = &side.database else { return Ok(()) };
    let info = match platform.provider.server_type(server_type).await {
        Ok(Some(info)) => info,
        Ok(None) => {
            let detail = format!("{server_type} is no server type of the provider");
            return Err(Problem::field("/serverType", detail));
        }
        Err(error) => {
            tracing::warn!(error = %chain(&error), "the size of a server's disk is not known");
            return Ok(());
        }
    };
    let needed = needed_bytes(database.size_bytes);
    let disk = u64::from(info.disk_gb) << 30;
    if needed <= disk {
        return Ok(());
    }
    let detail = format!(
        "The snapshot's database of {} GB needs a disk of {} GB; {server_type} has {} GB. Choose a type \
         with a larger disk.",
        database.size_bytes >> 30,
        needed.div_ceil(1 << 30),
        info.disk_gb
    );
    Err(Problem::new(Code::DiskTooSmall, detail))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
fn needed_bytes(database: u64) -> u64 {
    RESERVED_BYTES.saturating_add((database as f64 * BYTES_PER_DATABASE_BYTE) as u64)
}

/// The highest epoch that the store knows of the slot. An unreadable pointer is refused: no fence could be written into it.
///
/// # Errors
/// `snapshot_unusable`, `store_unavailable`.
pub async fn epoch_floor(platform: &Platform, user: &IdpUserId, slot: &Slot) -> Result<Epoch, Problem> {
    let known = db::machines::highest_epoch(&platform.db.session().await?, user, slot).await?;
    match epochs::floor(&platform.bucket, &SlotPrefix::new(user, slot), known).await {
        Ok(floor) => Ok(floor),
        Err(StoreError::Corrupt { key, why }) => Err(fault::unusable(SnapshotUnusable::Damaged { key, why })),
        Err(error) => Err(error.into()),
    }
}

/// Refuses a slot that the store says is held by a machine which this database does not know, unless an operator accepts what
/// that costs: the database was restored from an older copy, and that machine may serve. The slot's own machine under a later
/// epoch is none of these.
///
/// # Errors
/// `invalid_state`, `snapshot_unusable`, `store_unavailable`.
pub async fn ensure_no_forgotten_holder(
    platform: &Platform,
    (user, slot): (&IdpUserId, &Slot),
    current: Option<&MachineRow>,
    accepted: bool,
) -> Result<(), Problem> {
    let found = match later_holder::find(platform, &platform.db, user, slot).await {
        Ok(found) => found,
        Err(LookupError::Store(StoreError::Corrupt { key, why })) => {
            return Err(fault::unusable(SnapshotUnusable::Damaged { key, why }));
        }
        Err(error) => return Err(error.into()),
    };
    let holder = match found {
        Beyond::Unverified(named) if !accepted => {
            let detail = format!(
                "{} Where the keys are right, the slot's host made the signature up: repeat with `--accept-loss`.",
                later_holder::unverified(named)
            );
            return Err(held_by_another(detail, current));
        }
        found => found.holder().filter(|holder| !accepted && is_other(holder, current)),
    };
    let Some(holder) = holder else { return Ok(()) };
    let detail = format!(
        "The store says that machine {} holds the slot under epoch {}, which this database does not know: it was restored \
         from an older copy. What that machine wrote since the newest snapshot is on its server alone, which stays. `svcctl \
         pointer show {user} --slot {slot}` shows that snapshot. To start the slot from it all the same, repeat with \
         `--accept-loss`; where there is none, also with `--allow-empty`.",
        holder.machine, holder.epoch
    );
    Err(held_by_another(detail, current))
}

/// Refuses a change of a machine's server where the store says that another machine holds its slot, which this database does
/// not know. A pointer that is not readable says nothing of it.
///
/// # Errors
/// `invalid_state`, `store_unavailable`.
pub async fn ensure_holds_slot(platform: &Platform, machine: &MachineRow) -> Result<(), Problem> {
    let found = match later_holder::find(platform, &platform.db, &machine.user, &machine.slot).await {
        Ok(found) => found,
        Err(LookupError::Store(StoreError::Corrupt { .. })) => Beyond::Nothing,
        Err(error) => return Err(error.into()),
    };
    let command = if machine.is_active() { "recover" } else { "provision" };
    let holder = match found {
        Beyond::Unverified(named) if is_other(&named, Some(machine)) => {
            let detail = format!(
                "{} Nothing was changed. Where the keys are right, the slot's host made the signature up: `svcctl {command}` \
                 with `--accept-loss` makes a new machine from the newest snapshot.",
                later_holder::unverified(named)
            );
            return Err(held_by_another(detail, Some(machine)));
        }
        found => found.holder().filter(|holder| is_other(holder, Some(machine))),
    };
    let Some(holder) = holder else { return Ok(()) };
    let detail = format!(
        "The store says that machine {} holds the slot under epoch {}, which this database does not know: it was restored \
         from an older copy. Nothing was changed; `svcctl {command}` with `--accept-loss` makes a new machine from the newest \
         snapshot, and what that one wrote since stays on its server alone.",
        holder.machine, holder.epoch
    );
    Err(held_by_another(detail, Some(machine)))
}

/// Refuses to replace a machine that an operator has switched off, or is switching off, unless the loss is accepted: its host
/// cannot take a last backup, and does so once it is on again.
///
/// # Errors
/// `invalid_state`.
pub fn ensure_not_switched_off(machine: &MachineRow, accepted: bool) -> Result<(), Problem> {
    let is_there = machine.server_exists() && machine.server_missing_since.is_none();
    let holds_data = machine.registered_at.is_some() && is_there;
    let Some(since) = machine.powered_off_at.filter(|_| holds_data && !accepted) else { return Ok(()) };
    let (id, since) = (machine.id, rfc3339_ms(since));
    let detail = format!(
        "Machine {id} has been switched off since {since}, so that its host cannot take a last backup: what it wrote after \
         the newest snapshot is on its server alone. Switch it on first (`svcctl power on {id} --wait`), or accept that \
         loss (`--accept-loss`)."
    );
    Err(Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(machine.status))
        .with("allowed", json!([]))
        .with("poweredOffAt", json!(since)))
}

fn is_other(holder: &LaterHolder, current: Option<&MachineRow>) -> bool {
    current.is_none_or(|current| current.id != holder.machine)
}

fn held_by_another(detail: String, current: Option<&MachineRow>) -> Problem {
    let problem = Problem::new(Code::InvalidState, detail).with("allowed", json!([]));
    match current {
        Some(current) => problem.with("machineStatus", json!(current.status)),
        None => problem,
    }
}

/// Refuses a slot without a snapshot in the store where the database knows of one: it is lost, not absent, unless an
/// operator has decided since that the slot starts empty.
///
/// # Errors
/// `snapshot_unusable`, `store_unavailable`.
pub async fn may_start_empty(platform: &Platform, user: &IdpUserId, slot: &Slot) -> Result<(), Problem> {
    let newest = db::machines::newest_backup(&platform.db.session().await?, user, slot).await?;
    let Some(taken_at) = newest else { return Ok(()) };
    let pointer = pointer_io::read(&platform.bucket, &SlotPrefix::new(user, slot)).await?;
    if pointer.and_then(|read| read.value.emptied_at).is_some_and(|emptied_at| emptied_at > taken_at) {
        return Ok(());
    }
    let detail = format!(
        "The store's pointer names no snapshot, and a host reported one of {}: `svcctl pointer show` says what the \
         slot has, `svcctl pointer rebuild` names a snapshot again.",
        rfc3339_ms(taken_at)
    );
    Err(Problem::new(Code::SnapshotUnusable, detail))
}

/// Refuses to begin a slot without a snapshot empty where one of its machines has served: its server may hold the only
/// copy of the data.
///
/// # Errors
/// `snapshot_unusable`.
pub async fn has_no_unsaved_data(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<(), Problem> {
    let machines = db::machines::newest_of_slot(client, user, slot).await?;
    let mut served = machines.iter().filter(|machine| machine.registered_at.is_some());
    if let Some(last) = served.next()
        && may_hold_data(client, last).await?
    {
        return Err(unsaved(last));
    }
    let kept = served.find(|machine| machine.unsaved_since.is_some() && machine.server_exists());
    kept.map_or(Ok(()), |kept| Err(unsaved(kept)))
}

/// Whether the last machine that served may hold data: one that was deleted does so while its server exists, unless an
/// operator accepted the loss.
async fn may_hold_data(client: &impl GenericClient, last: &MachineRow) -> Result<bool, DbError> {
    if last.deleted_at.is_none() {
        return Ok(true);
    }
    Ok(last.server_exists() && !db::slot_operations::is_loss_accepted(client, last.id).await?)
}

fn unsaved(machine: &MachineRow) -> Problem {
    let id = machine.id;
    let back = if !machine.server_exists() {
        "Its server is gone.".to_owned()
    } else if machine.is_active() {
        format!("`svcctl resume {id}` brings it back where its server runs and its host is well.")
    } else if machine.deleted_at.is_some() {
        format!("`svcctl undelete {id}` brings it back.")
    } else {
        format!("`svcctl status {id}` says what became of it.")
    };
    let detail = format!(
        "Machine {id} has served the slot, and no snapshot of its data exists: a new machine would start empty. {back} `svcctl \
         provision --allow-empty` starts empty all the same."
    );
    Problem::new(Code::SnapshotUnusable, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_bytes_grow_with_the_database_and_never_overflow() {
        assert_eq!(needed_bytes(0), RESERVED_BYTES);
        assert_eq!(needed_bytes(40 << 30), RESERVED_BYTES + (50 << 30));
        assert_eq!(needed_bytes(u64::MAX), u64::MAX);
    }
}

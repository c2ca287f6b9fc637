//! Reads from `user_machines`: by id, by slot, in lists, and by pending work.

use std::time::Duration;

use deadpool_postgres::{GenericClient, Transaction};
use jiff::Timestamp;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::machine_row::{ACTIVE, COLUMNS, MachineRow, sql_epoch};
use super::{DbError, Params, query, query_opt};
use svc_machine::epoch::Epoch;
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{Handle, IdpUserId, Slot};
use svc_machine::state::Status;

async fn find_one(
    client: &impl GenericClient,
    sql_after_where: &str,
    params: Params<'_>,
) -> Result<Option<MachineRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM user_machines WHERE {sql_after_where}");
    query_opt(client, &sql, params).await?.as_ref().map(MachineRow::parse).transpose()
}

async fn find_many(
    client: &impl GenericClient,
    sql_after_where: &str,
    params: Params<'_>,
) -> Result<Vec<MachineRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM user_machines WHERE {sql_after_where}");
    query(client, &sql, params).await?.iter().map(MachineRow::parse).collect()
}

pub async fn get(client: &impl GenericClient, id: MachineId) -> Result<Option<MachineRow>, DbError> {
    find_one(client, "machine_id = $1", &[&id.0]).await
}

/// Reads and locks the row until the transaction ends.
pub async fn lock(tx: &Transaction<'_>, id: MachineId) -> Result<Option<MachineRow>, DbError> {
    find_one(tx, "machine_id = $1 FOR UPDATE", &[&id.0]).await
}

/// Finds the machine that holds a slot.
pub async fn find_in_slot(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Option<MachineRow>, DbError> {
    let condition = format!("idp_user_id = $1 AND slot = $2 AND {ACTIVE}");
    find_one(client, &condition, &[&user.as_str(), &slot.as_str()]).await
}

/// Like [`find_in_slot`], but also locks the row.
pub async fn lock_in_slot(
    tx: &Transaction<'_>,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Option<MachineRow>, DbError> {
    let condition = format!("idp_user_id = $1 AND slot = $2 AND {ACTIVE} FOR UPDATE");
    find_one(tx, &condition, &[&user.as_str(), &slot.as_str()]).await
}

/// Returns whether an earlier machine in the slot has reported that it saved the owner's files.
pub async fn has_earlier_saved_files(
    client: &impl GenericClient,
    machine: &MachineRow,
) -> Result<bool, DbError> {
    let sql = "SELECT EXISTS (SELECT FROM user_machines WHERE idp_user_id = $1 AND slot = $2 AND epoch < $3 \
               AND files->>'savedUntil' IS NOT NULL)";
    let epoch = sql_epoch(machine.epoch);
    let params: Params<'_> = &[&machine.user.as_str(), &machine.slot.as_str(), &epoch];
    Ok(query_opt(client, sql, params).await?.is_some_and(|row| row.get(0)))
}

/// Reads and locks the newest earlier machine in the slot whose host has registered: no other machine's data can be
/// newer than every snapshot. The row stays locked until the transaction ends.
pub async fn lock_last_registered(
    tx: &Transaction<'_>,
    before: &MachineRow,
) -> Result<Option<MachineRow>, DbError> {
    match find_last_registered(tx, before).await? {
        Some(machine) => lock(tx, machine.id).await,
        None => Ok(None),
    }
}

/// Like [`lock_last_registered`], but without the lock.
pub async fn find_last_registered(
    client: &impl GenericClient,
    before: &MachineRow,
) -> Result<Option<MachineRow>, DbError> {
    Ok(list_registered_before(client, before, 1).await?.into_iter().next())
}

/// Lists earlier machines in the slot whose hosts have registered, newest first.
pub async fn list_registered_before(
    client: &impl GenericClient,
    before: &MachineRow,
    limit: i64,
) -> Result<Vec<MachineRow>, DbError> {
    let condition = "idp_user_id = $1 AND slot = $2 AND epoch < $3 AND registered_at IS NOT NULL \
                     ORDER BY epoch DESC LIMIT $4";
    let epoch = sql_epoch(before.epoch);
    find_many(client, condition, &[&before.user.as_str(), &before.slot.as_str(), &epoch, &limit]).await
}

/// Finds the machine that this one replaced.
pub async fn find_predecessor(
    client: &impl GenericClient,
    id: MachineId,
) -> Result<Option<MachineRow>, DbError> {
    find_one(client, "replaced_by = $1", &[&id.0]).await
}

/// Finds the highest epoch that the database records for the slot.
pub async fn find_highest_epoch(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Epoch, DbError> {
    let sql = "SELECT coalesce(max(epoch), 0) FROM user_machines WHERE idp_user_id = $1 AND slot = $2";
    let rows = query(client, sql, &[&user.as_str(), &slot.as_str()]).await?;
    let highest: i32 = rows.first().map_or(0, |row| row.get(0));
    Ok(Epoch(u32::try_from(highest).unwrap_or(0)))
}

/// Loads the time at which the newest verified snapshot of any of the slot's hosts was taken. A final backup counts
/// even if the host sent no heartbeat after it.
pub async fn load_newest_backup_time(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Option<Timestamp>, DbError> {
    let sql = "SELECT max(greatest(backup_taken_at, final_backup_at)) FROM user_machines \
               WHERE idp_user_id = $1 AND slot = $2";
    Ok(query_opt(client, sql, &[&user.as_str(), &slot.as_str()]).await?.and_then(|row| row.get(0)))
}

/// Lists a slot's 50 newest machines, newest first.
pub async fn list_newest_in_slot(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Vec<MachineRow>, DbError> {
    let condition = "idp_user_id = $1 AND slot = $2 ORDER BY epoch DESC LIMIT 50";
    find_many(client, condition, &[&user.as_str(), &slot.as_str()]).await
}

/// Finds the active machine with this handle.
pub async fn find_by_handle(
    client: &impl GenericClient,
    handle: &Handle,
) -> Result<Option<MachineRow>, DbError> {
    let condition = HANDLE_CONDITION.replace('$', "$1");
    let sql_after_where = format!("{condition} AND {ACTIVE} ORDER BY machine_id LIMIT 1");
    Ok(find_many(client, &sql_after_where, &[&handle.as_str()]).await?.pop())
}

/// Finds an active machine that has one of these handles and is not in `except`.
pub async fn find_other_with_handle(
    client: &impl GenericClient,
    handles: &[Handle],
    except: &[MachineId],
) -> Result<Option<MachineRow>, DbError> {
    let handles: Vec<&str> = handles.iter().map(Handle::as_str).collect();
    let except: Vec<Uuid> = except.iter().map(|id| id.0).collect();
    let sql_after_where =
        format!("handle = ANY ($1) AND machine_id <> ALL ($2) AND {ACTIVE} ORDER BY machine_id LIMIT 1");
    Ok(find_many(client, &sql_after_where, &[&handles, &except]).await?.pop())
}

/// Returns whether a later machine in the slot has registered.
pub async fn has_registered_successor(
    client: &impl GenericClient,
    machine: &MachineRow,
) -> Result<bool, DbError> {
    has_later_machine(client, machine, "registered_at IS NOT NULL").await
}

/// Returns whether the machine has registered, has been replaced, and has no proven successor yet.
pub async fn is_successor_unproven(
    client: &impl GenericClient,
    machine: &MachineRow,
) -> Result<bool, DbError> {
    Ok(machine.retired_at.is_some()
        && machine.registered_at.is_some()
        && !has_later_machine(client, machine, "proven_at IS NOT NULL").await?)
}

async fn has_later_machine(
    client: &impl GenericClient,
    machine: &MachineRow,
    condition: &str,
) -> Result<bool, DbError> {
    let sql = format!(
        "SELECT 1 FROM user_machines WHERE idp_user_id = $1 AND slot = $2 AND epoch > $3 AND {condition} LIMIT 1"
    );
    let epoch = sql_epoch(machine.epoch);
    Ok(query_opt(client, &sql, &[&machine.user.as_str(), &machine.slot.as_str(), &epoch]).await?.is_some())
}

/// Counts a user's active previews.
pub async fn count_active_previews(client: &impl GenericClient, user: &IdpUserId) -> Result<i64, DbError> {
    let sql = format!(
        "SELECT count(*) FROM user_machines WHERE idp_user_id = $1 AND kind = 'preview' AND {ACTIVE}"
    );
    let rows = query(client, &sql, &[&user.as_str()]).await?;
    Ok(rows.first().map_or(0, |row| row.get(0)))
}

/// Lists booting machines whose registration period has expired. Unlike `clock_timestamp()`, `now()` is stable within a
/// statement, so the index can be used.
pub async fn list_expired_registrations(client: &impl GenericClient) -> Result<Vec<MachineId>, DbError> {
    let sql = format!(
        "SELECT machine_id FROM user_machines WHERE status IN ('provisioning', 'recovering') AND {ACTIVE} \
         AND registration_expires_at <= now()"
    );
    Ok(query(client, &sql, &[]).await?.iter().map(|row| MachineId(row.get(0))).collect())
}

pub async fn list_expired_previews(client: &impl GenericClient) -> Result<Vec<MachineId>, DbError> {
    let sql = format!(
        "SELECT machine_id FROM user_machines WHERE kind = 'preview' AND {ACTIVE} AND preview_expires_at <= now()"
    );
    Ok(query(client, &sql, &[]).await?.iter().map(|row| MachineId(row.get(0))).collect())
}

/// Finds the operation that keeps a former machine stopped. `None` if the machine cannot be reinstated: it has no
/// server or never registered, a later machine has registered, or its server is being or has been removed.
pub async fn find_stopping_operation(
    client: &impl GenericClient,
    machine: &MachineRow,
) -> Result<Option<OperationId>, DbError> {
    if machine.is_active() || !machine.has_server() || machine.registered_at.is_none() {
        return Ok(None);
    }
    let sql = "SELECT 1 FROM user_machines later WHERE later.idp_user_id = $1 AND later.slot = $2 \
               AND later.epoch > $3 AND later.registered_at IS NOT NULL \
               UNION ALL SELECT 1 FROM operations WHERE machine_id = $4 AND kind = 'remove_server' \
               AND state IN ('running', 'succeeded') LIMIT 1";
    let epoch = sql_epoch(machine.epoch);
    let params: Params<'_> = &[&machine.user.as_str(), &machine.slot.as_str(), &epoch, &machine.id.0];
    if query_opt(client, sql, params).await?.is_some() {
        return Ok(None);
    }
    super::slot_operations::find_retiring_operation(client, machine.id).await
}

/// Loads a booting host's remaining registration time, by the database's clock; zero if the time has expired or has not
/// started.
pub async fn load_remaining_registration_time(
    client: &impl GenericClient,
    id: MachineId,
) -> Result<Duration, DbError> {
    let sql = "SELECT coalesce(extract(epoch FROM registration_expires_at - clock_timestamp()), 0)::float8 \
               FROM user_machines WHERE machine_id = $1";
    Ok(duration_from_secs(query_opt(client, sql, &[&id.0]).await?.map(|row| row.get(0))))
}

/// Loads the age of the request to create the machine's server if the request's outcome is unknown; `Duration::MAX` if
/// there is no such request.
pub async fn load_create_request_age(
    client: &impl GenericClient,
    id: MachineId,
) -> Result<Duration, DbError> {
    let sql = "SELECT extract(epoch FROM clock_timestamp() - create_ordered_at)::float8 \
               FROM user_machines WHERE machine_id = $1 AND create_ordered_at IS NOT NULL";
    let row = query_opt(client, sql, &[&id.0]).await?;
    Ok(row.map_or(Duration::MAX, |row| duration_from_secs(Some(row.get(0)))))
}

fn duration_from_secs(seconds: Option<f64>) -> Duration {
    Duration::try_from_secs_f64(seconds.unwrap_or(0.0).max(0.0)).unwrap_or(Duration::MAX)
}

/// Selects machines; a field that is `None` matches every machine.
#[derive(Debug, Default)]
pub struct MachineFilter {
    pub status: Option<Status>,
    pub user: Option<IdpUserId>,
    pub slot: Option<Slot>,
    pub handle: Option<Handle>,
    pub scope: MachineScope,
    /// Only machines created before this one.
    pub before: Option<MachineId>,
}

/// Machines that hold their slots, or machines that no longer do.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum MachineScope {
    #[default]
    Active,
    Former,
}

/// SQL condition for machines with a handle; `$` is a placeholder for the numbered parameter. The condition on the user
/// lets the query use the index on the user: a handle belongs to one user.
const HANDLE_CONDITION: &str =
    "idp_user_id = (SELECT idp_user_id FROM handles WHERE handle = $) AND handle = $";

/// Lists a page of machines, newest first; ids are ordered by creation time.
pub async fn list(
    client: &impl GenericClient,
    filter: &MachineFilter,
    limit: i64,
) -> Result<Vec<MachineRow>, DbError> {
    let scope = match filter.scope {
        MachineScope::Active => ACTIVE,
        MachineScope::Former => "(deleted_at IS NOT NULL OR retired_at IS NOT NULL)",
    };
    let status = filter.status.map(Status::as_str);
    let before = filter.before.map(|id| id.0);
    let user = filter.user.as_ref().map(IdpUserId::as_str);
    let slot = filter.slot.as_ref().map(Slot::as_str);
    let handle = filter.handle.as_ref().map(Handle::as_str);
    // Unset filters are omitted from the SQL: the planner cannot use an index for an optional condition.
    let mut sql_after_where = scope.to_owned();
    let mut params: Vec<&(dyn ToSql + Sync)> = Vec::new();
    let filters: [(&str, Option<&(dyn ToSql + Sync)>); 5] = [
        ("status = $", status.as_ref().map(|value| value as _)),
        ("idp_user_id = $", user.as_ref().map(|value| value as _)),
        ("slot = $", slot.as_ref().map(|value| value as _)),
        (HANDLE_CONDITION, handle.as_ref().map(|value| value as _)),
        ("machine_id < $", before.as_ref().map(|value| value as _)),
    ];
    for (condition, value) in filters {
        if let Some(value) = value {
            params.push(value);
            sql_after_where += &format!(" AND {}", condition.replace('$', &format!("${}", params.len())));
        }
    }
    params.push(&limit);
    sql_after_where += &format!(" ORDER BY machine_id DESC LIMIT ${}", params.len());
    find_many(client, &sql_after_where, &params).await
}

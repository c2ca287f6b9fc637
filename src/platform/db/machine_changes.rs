//! Writes to `user_machines`. State changes go through [`crate::lifecycle`], the only caller of [`compare_and_set`].

use std::net::Ipv4Addr;
use std::time::Duration;

use deadpool_postgres::{GenericClient, Transaction};
use jiff::Timestamp;
use serde_json::Value;

use super::machine_row::{Failure, MachineRow, sql_epoch};
use super::{DbError, execute, query_opt};
use svc_http::tls::SpkiPin;
use svc_machine::epoch::Epoch;
use svc_machine::event::RestoreMode;
use svc_machine::id::MachineId;
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::state::Status;
use svc_wire::heartbeat::TrustedKeyIds;
use svc_wire::machine::MachineKind;

/// A machine to insert.
pub struct NewMachine {
    pub id: MachineId,
    pub user: IdpUserId,
    pub slot: Slot,
    pub handle: Handle,
    pub kind: MachineKind,
    pub status: Status,
    pub epoch: Epoch,
    pub restore: RestoreMode,
    /// The key of the snapshot to restore; `None` means the snapshot that the pointer names.
    pub restore_snapshot: Option<String>,
    /// Whether the machine restores the owner's files at its first boot.
    pub should_restore_files: bool,
    pub server_type: ServerType,
    pub location: Location,
    pub fallback_locations: Vec<Location>,
    pub image_version: ImageVersion,
    pub bundle_sha256: String,
    pub https_port: u16,
    pub registration_token_hash: Vec<u8>,
    pub upgrade_token_hash: Vec<u8>,
    /// A preview's lifetime; `None` for other machines.
    pub preview_ttl: Option<Duration>,
}

/// Inserts a machine's row.
///
/// # Errors
/// [`DbError`]; `Violated` with the constraint `user_machines_active` if the slot already has an active machine.
pub async fn insert(tx: &Transaction<'_>, new: &NewMachine) -> Result<(), DbError> {
    let sql = "INSERT INTO user_machines (machine_id, idp_user_id, slot, handle, kind, status, epoch, \
               restore_mode, server_type, location, image_version, bundle_sha256, https_port, \
               registration_token_hash, upgrade_token_hash, preview_expires_at, restore_snapshot, fallback_locations, \
               restore_files) \
               VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, \
               now() + make_interval(secs => $16), $17, $18, $19)";
    let epoch = to_stored_epoch(new.epoch)?;
    let fallback_locations: Vec<&str> = new.fallback_locations.iter().map(Location::as_str).collect();
    let preview_ttl = new.preview_ttl.map(|time| time.as_secs_f64());
    execute(
        tx,
        sql,
        &[
            &new.id.0,
            &new.user.as_str(),
            &new.slot.as_str(),
            &new.handle.as_str(),
            &new.kind.as_str(),
            &new.status.as_str(),
            &epoch,
            &new.restore.as_str(),
            &new.server_type.as_str(),
            &new.location.as_str(),
            &new.image_version.as_str(),
            &new.bundle_sha256,
            &i32::from(new.https_port),
            &new.registration_token_hash,
            &new.upgrade_token_hash,
            &preview_ttl,
            &new.restore_snapshot,
            &fallback_locations,
            &new.should_restore_files,
        ],
    )
    .await
    .map(drop)
}

fn to_stored_epoch(epoch: Epoch) -> Result<i32, DbError> {
    i32::try_from(epoch.0).map_err(|_| DbError::OutOfRange { what: "epoch", value: epoch.0 })
}

/// The columns that a state change writes.
pub struct NextState<'a> {
    pub status: Status,
    pub failure: Option<&'a Failure>,
    pub server_type: &'a ServerType,
    pub resize_to: Option<&'a ServerType>,
    pub slot_transition: SlotTransition,
}

/// How a state change affects which machine holds the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotTransition {
    Unchanged,
    Retired {
        by: MachineId,
    },
    Deleted,
    /// The machine holds its slot again, under this epoch.
    Reinstated {
        epoch: Epoch,
    },
}

/// Writes the next state if the machine's status, its epoch, and whether it holds its slot have not changed since the
/// row was read.
///
/// # Errors
/// [`DbError`]; `Contended` if the machine has changed.
pub async fn compare_and_set(
    tx: &Transaction<'_>,
    before: &MachineRow,
    next: &NextState<'_>,
) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET status = $5, failure_cause = $6, failure_stage = $7, \
               failure_message = $8, server_type = $9, resize_to = $10, \
               replaced_by = CASE WHEN $13::int4 IS NULL THEN coalesce($11, replaced_by) END, \
               retired_at = CASE WHEN $13 IS NOT NULL THEN NULL WHEN $11::uuid IS NULL THEN retired_at ELSE now() END, \
               deleted_at = CASE WHEN $13 IS NOT NULL THEN NULL WHEN $12 THEN now() ELSE deleted_at END, \
               discard_ordered_at = CASE WHEN $13 IS NULL THEN discard_ordered_at END, \
               removal_abandoned_at = CASE WHEN $13 IS NULL THEN removal_abandoned_at END, \
               epoch = coalesce($13, epoch) WHERE machine_id = $1 AND status = $2 AND epoch = $3 \
               AND (deleted_at IS NULL AND retired_at IS NULL) = $4";
    let epoch = sql_epoch(before.epoch);
    let replaced_by = match next.slot_transition {
        SlotTransition::Retired { by } => Some(by.0),
        SlotTransition::Unchanged | SlotTransition::Deleted | SlotTransition::Reinstated { .. } => None,
    };
    let raised_epoch = match next.slot_transition {
        SlotTransition::Reinstated { epoch } => Some(to_stored_epoch(epoch)?),
        SlotTransition::Unchanged | SlotTransition::Deleted | SlotTransition::Retired { .. } => None,
    };
    let changed = execute(
        tx,
        sql,
        &[
            &before.id.0,
            &before.status.as_str(),
            &epoch,
            &before.is_active(),
            &next.status.as_str(),
            &next.failure.map(|failure| failure.cause.as_str()),
            &next.failure.and_then(|failure| failure.stage.as_deref()),
            &next.failure.and_then(|failure| failure.message.as_deref()),
            &next.server_type.as_str(),
            &next.resize_to.map(ServerType::as_str),
            &replaced_by,
            &(next.slot_transition == SlotTransition::Deleted),
            &raised_epoch,
        ],
    )
    .await?;
    if changed == 1 { Ok(()) } else { Err(DbError::Contended) }
}

/// Records that a request to create the machine's server is about to be sent.
pub async fn record_create_request(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET create_ordered_at = clock_timestamp() WHERE machine_id = $1";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Records that the last request to create the machine's server definitely had no effect.
pub async fn clear_create_request(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET create_ordered_at = NULL WHERE machine_id = $1";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Removes from its slot a machine that has never served traffic, in favor of `reinstated`, an earlier machine that is
/// being reinstated.
pub async fn leave_slot(tx: &Transaction<'_>, id: MachineId, reinstated: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET retired_at = now(), replaced_by = $2 WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &reinstated.0]).await.map(drop)
}

/// Raises a machine's epoch to at least `epoch`.
pub async fn raise_epoch(tx: &Transaction<'_>, id: MachineId, epoch: Epoch) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET epoch = greatest(epoch, $2) WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &to_stored_epoch(epoch)?]).await.map(drop)
}

/// Records the key of a snapshot that is newer than the one from which the machine is restored.
pub async fn record_unrestored_snapshot(
    tx: &Transaction<'_>,
    id: MachineId,
    key: &str,
) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET unrestored_snapshot = $2 WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &key]).await.map(drop)
}

/// Sets the snapshot from which a new machine is restored.
pub async fn set_restore_snapshot(tx: &Transaction<'_>, id: MachineId, key: &str) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET restore_snapshot = $2 WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &key]).await.map(drop)
}

/// Records the final snapshot, which was taken after the writers had stopped.
pub async fn record_final_backup(
    tx: &Transaction<'_>,
    id: MachineId,
    taken_at: Timestamp,
) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET final_backup_at = $2, unsaved_since = NULL, unsaved_files = false WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &taken_at]).await.map(drop)
}

/// Records that changes made after `since` are not in any snapshot; `None` means that an operator has accepted their
/// loss.
pub async fn record_unsaved(
    tx: &Transaction<'_>,
    id: MachineId,
    since: Option<Timestamp>,
) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET unsaved_since = $2, unsaved_files = false WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &since]).await.map(drop)
}

/// Records that an operator has ordered the deletion of the kept server, including any unsaved data, even if its
/// removal was abandoned.
pub async fn record_discard(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET discard_ordered_at = clock_timestamp(), unsaved_since = NULL, unsaved_files = false, \
               removal_abandoned_at = NULL WHERE machine_id = $1";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Ends the retention period of a deleted machine's server, unless the server holds unsaved data.
pub async fn release_server(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET discard_ordered_at = clock_timestamp() \
               WHERE machine_id = $1 AND deleted_at IS NOT NULL AND unsaved_since IS NULL";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Records that an operator abandoned a server's removal.
pub async fn record_removal_abandoned(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET removal_abandoned_at = clock_timestamp() WHERE machine_id = $1";
    execute(tx, sql, &[&id.0]).await.map(drop)
}

/// Records the first healthy heartbeat after the registration.
pub async fn record_proven(client: &impl GenericClient, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET proven_at = clock_timestamp() \
               WHERE machine_id = $1 AND proven_at IS NULL AND registered_at IS NOT NULL";
    execute(client, sql, &[&id.0]).await.map(drop)
}

/// Records a booting host's restore progress, and extends its registration period to `ttl` from now, but at most to
/// `limit` after the period's start. If the server has not been recorded yet, the period has not started, and is not
/// extended.
pub async fn record_boot_progress(
    tx: &Transaction<'_>,
    id: MachineId,
    progress: &Value,
    ttl: Duration,
    limit: Duration,
) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET boot_progress = $2, \
               registration_expires_at = CASE WHEN registration_expires_at IS NOT NULL THEN greatest(\
               registration_expires_at, least(clock_timestamp() + make_interval(secs => $3), \
               coalesce(registration_started_at, created_at) + make_interval(secs => $4))) END WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &progress, &ttl.as_secs_f64(), &limit.as_secs_f64()]).await.map(drop)
}

/// Records the boot stages that a host has reported.
pub async fn record_boot_stages(tx: &Transaction<'_>, id: MachineId, stages: &Value) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET boot_stages = $2 WHERE machine_id = $1";
    execute(tx, sql, &[&id.0, &stages]).await.map(drop)
}

/// Records the server and starts its host's registration period.
pub async fn record_server(
    tx: &Transaction<'_>,
    id: MachineId,
    server: i64,
    address: Option<Ipv4Addr>,
    registration_ttl: Duration,
) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET provider_server_id = $2, public_ipv4 = $3, create_ordered_at = NULL, \
               registration_started_at = clock_timestamp(), \
               registration_expires_at = clock_timestamp() + make_interval(secs => $4) WHERE machine_id = $1";
    let address = address.map(|address| address.to_string());
    execute(tx, sql, &[&id.0, &server, &address, &registration_ttl.as_secs_f64()]).await.map(drop)
}

/// Records that the provider no longer has a server for this machine.
pub async fn record_server_deleted(client: &impl GenericClient, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET server_deleted_at = clock_timestamp() WHERE machine_id = $1";
    execute(client, sql, &[&id.0]).await.map(drop)
}

/// A host's registration data.
pub struct Registration<'a> {
    pub image_version: &'a ImageVersion,
    pub bundle_sha256: &'a str,
    pub tls_pin: SpkiPin,
    pub body_hash: &'a [u8],
}

pub async fn record_registration(
    tx: &Transaction<'_>,
    id: MachineId,
    registration: &Registration<'_>,
) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET image_version = $2, bundle_sha256 = $3, tls_spki_sha256 = $4, \
               registration_body_hash = $5, registered_at = now(), unsaved_since = NULL, unsaved_files = false WHERE machine_id = $1";
    let pin = registration.tls_pin.to_string();
    let version = registration.image_version.as_str();
    execute(tx, sql, &[&id.0, &version, &registration.bundle_sha256, &pin, &registration.body_hash])
        .await
        .map(drop)
}

/// Records, in the log of its running operation, what a new machine has restored.
pub async fn log_restored(tx: &Transaction<'_>, id: MachineId, detail: &str) -> Result<(), DbError> {
    let sql = "INSERT INTO operation_log (operation_id, step, outcome, detail) \
               SELECT operation_id, step, 'done', $2 FROM operations WHERE machine_id = $1 AND state = 'running'";
    execute(tx, sql, &[&id.0, &detail]).await.map(drop)
}

/// Records that a machine's server may hold changes made since the newest backup that its host reported. Applies to a
/// machine that left its slot or never registered, but turned out to have a server or to be serving; has no effect on
/// others.
pub async fn mark_unsaved(client: &impl GenericClient, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET unsaved_since = coalesce(CASE WHEN NOT unsaved_files THEN unsaved_since END, \
               backup_taken_at, registered_at, now()), \
               unsaved_files = false WHERE machine_id = $1 AND server_deleted_at IS NULL \
               AND (registered_at IS NULL OR retired_at IS NOT NULL OR deleted_at IS NOT NULL)";
    execute(client, sql, &[&id.0]).await.map(drop)
}

/// Records that the kept servers of machines that served in the slot before this one may hold the only copy of the
/// owner's files, because this machine could not restore them. All of those machines are marked, because the newest of
/// them may also have failed to restore the files. Has no effect on servers whose deletion was ordered, unless an
/// operator abandoned it.
pub async fn mark_predecessors_unsaved(client: &impl GenericClient, id: MachineId) -> Result<(), DbError> {
    let sql = "UPDATE user_machines SET unsaved_since = registered_at, unsaved_files = true WHERE machine_id IN (\
                   SELECT earlier.machine_id FROM user_machines earlier JOIN user_machines mine \
                   ON mine.idp_user_id = earlier.idp_user_id AND mine.slot = earlier.slot \
                   AND mine.epoch > earlier.epoch \
                   WHERE mine.machine_id = $1 AND earlier.registered_at IS NOT NULL) \
               AND unsaved_since IS NULL AND server_deleted_at IS NULL \
               AND (discard_ordered_at IS NULL OR removal_abandoned_at IS NOT NULL) \
               AND (retired_at IS NOT NULL OR deleted_at IS NOT NULL)";
    execute(client, sql, &[&id.0]).await.map(drop)
}

/// Like [`mark_unsaved`], but for a server that was about to be deleted. Also cancels an operator's request to discard
/// the server.
pub async fn mark_kept(tx: &Transaction<'_>, id: MachineId) -> Result<(), DbError> {
    mark_unsaved(tx, id).await?;
    execute(tx, "UPDATE user_machines SET discard_ordered_at = NULL WHERE machine_id = $1", &[&id.0])
        .await
        .map(drop)
}

/// The columns that a heartbeat writes. For `last_backup`, `last_update`, `checks`, `backup_taken_at` and
/// `trusted_keys`, `None` keeps the last reported value.
pub struct Heartbeat<'a> {
    pub image_version: &'a ImageVersion,
    pub health: Value,
    pub last_backup: Option<Value>,
    pub last_update: Option<Value>,
    pub checks: Option<Value>,
    /// Whether the host is updating.
    pub is_updating: bool,
    /// Problems that the host reports for an operator: `[{code, detail}]`.
    pub attention: Value,
    /// When the reported verified snapshot was taken.
    pub backup_taken_at: Option<Timestamp>,
    pub proof_kids: &'a [String],
    pub trusted_keys: Option<&'a TrustedKeyIds>,
    /// `None` before the first start of the host's gateway, or if the host's release does not report certificates.
    pub certificate: Option<Value>,
    /// `None` until the host's file backup has started, or if the host's release does not save files.
    pub files: Option<Value>,
}

/// Writes a heartbeat. The time of a snapshot that is dated more than five minutes in the future is ignored: until that
/// time, it would hide that the slot's backups are overdue.
pub async fn record_heartbeat(
    client: &impl GenericClient,
    id: MachineId,
    heartbeat: &Heartbeat<'_>,
) -> Result<(), DbError> {
    let sql = "WITH bound AS (SELECT clock_timestamp() + interval '5 minutes' AS latest) \
               UPDATE user_machines SET heartbeat_at = clock_timestamp(), image_version = $2, health = $3, \
               last_backup = coalesce($4, last_backup), backup_taken_at = coalesce(greatest(\
                 CASE WHEN backup_taken_at <= latest THEN backup_taken_at END, \
                 CASE WHEN $5::timestamptz <= latest THEN $5 END), backup_taken_at), \
               last_update = coalesce($6, last_update), updating = $7, checks = coalesce($8, checks), attention = $9, \
               bundle_keys_sequence = coalesce($10, bundle_keys_sequence), bundle_key_ids = coalesce($11, bundle_key_ids), \
               certificate = $12, files = $13 \
               FROM bound WHERE machine_id = $1 RETURNING coalesce($5 > latest, false)";
    let version = heartbeat.image_version.as_str();
    let params: super::Params<'_> = &[
        &id.0,
        &version,
        &heartbeat.health,
        &heartbeat.last_backup,
        &heartbeat.backup_taken_at,
        &heartbeat.last_update,
        &heartbeat.is_updating,
        &heartbeat.checks,
        &heartbeat.attention,
        &heartbeat.trusted_keys.map(|keys| i64::from(keys.sequence)),
        &heartbeat.trusted_keys.map(|keys| &keys.ids),
        &heartbeat.certificate,
        &heartbeat.files,
    ];
    if query_opt(client, sql, params).await?.is_some_and(|row| row.get(0)) {
        tracing::warn!(machine = %id, taken_at = ?heartbeat.backup_taken_at,
            "ignored the time of the reported snapshot, which is in the future: check the host's clock");
    }
    // A separate statement, which usually changes no row: an update of this column makes every router reload the
    // machine's keys.
    let sql = "UPDATE user_machines SET proof_kids = $2 WHERE machine_id = $1 AND proof_kids <> $2";
    execute(client, sql, &[&id.0, &heartbeat.proof_kids]).await.map(drop)
}

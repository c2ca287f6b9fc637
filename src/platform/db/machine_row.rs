//! A row of `user_machines`.

use std::fmt::Display;
use std::net::Ipv4Addr;
use std::str::FromStr;

use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::Row;

use super::{DbError, upgrade_token};
use crate::token_rotation::UpgradeToken;
use svc_http::tls::SpkiPin;
use svc_machine::epoch::Epoch;
use svc_machine::event::{RestoreMode, ServerPower};
use svc_machine::id::MachineId;
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::state::{self, FailureCause, State, Status};
use svc_wire::machine::MachineKind;

/// The columns that [`MachineRow::parse`] reads.
pub const COLUMNS: &str = "machine_id, idp_user_id, slot, handle, kind, status, failure_cause, failure_stage, \
    failure_message, epoch, restore_mode, restore_snapshot, restore_files, unrestored_snapshot, server_type, resize_to, location, image_version, bundle_sha256, \
    provider_server_id, public_ipv4, https_port, tls_spki_sha256, registration_token_hash, \
    registration_expires_at, registration_body_hash, registered_at, upgrade_token_hash, heartbeat_at, health, \
    last_backup, backup_taken_at, last_update, checks, proof_kids, certificate, files, replaced_by, retired_at, deleted_at, create_ordered_at, server_deleted_at, \
    power_ordered_at, power_off_ordered_at, proven_at, final_backup_at, unsaved_since, unsaved_files, discard_ordered_at, \
    removal_abandoned_at, server_missing_since, boot_stages, boot_progress, preview_expires_at, powered_off_at, attention, fallback_locations, created_at, updated_at, \
    upgrade_token_generation, upgrade_token_rotated_at, upgrade_token_requested_at, previous_token_hash, previous_token_until";

/// SQL condition for machines that hold their slots.
pub const ACTIVE: &str = "deleted_at IS NULL AND retired_at IS NULL";

/// Converts an epoch for comparison with the column. Saturates, because no row has an epoch above `i32::MAX`.
pub fn sql_epoch(epoch: Epoch) -> i32 {
    i32::try_from(epoch.0).unwrap_or(i32::MAX)
}

/// The reason a machine has failed.
#[derive(Debug, Clone)]
pub struct Failure {
    pub cause: FailureCause,
    pub stage: Option<String>,
    pub message: Option<String>,
}

#[derive(Debug, Clone)]
pub struct MachineRow {
    pub id: MachineId,
    pub user: IdpUserId,
    pub slot: Slot,
    pub handle: Handle,
    pub kind: MachineKind,
    pub status: Status,
    pub failure: Option<Failure>,
    pub epoch: Epoch,
    pub restore: RestoreMode,
    /// The key of the snapshot to restore; `None` means the snapshot that the pointer names.
    pub restore_snapshot: Option<String>,
    /// Whether the machine restores the owner's files at its first boot.
    pub should_restore_files: bool,
    /// An earlier machine's snapshot that is newer than the restored one.
    pub unrestored_snapshot: Option<String>,
    pub server_type: ServerType,
    pub resize_to: Option<ServerType>,
    pub location: Location,
    pub image_version: ImageVersion,
    pub bundle_sha256: String,
    pub provider_server_id: Option<i64>,
    pub public_ipv4: Option<Ipv4Addr>,
    pub https_port: u16,
    pub tls_pin: Option<SpkiPin>,
    pub registration_token_hash: Vec<u8>,
    pub registration_expires_at: Option<Timestamp>,
    pub registration_body_hash: Option<Vec<u8>>,
    pub registered_at: Option<Timestamp>,
    pub upgrade_token: UpgradeToken,
    pub heartbeat_at: Option<Timestamp>,
    pub health: Option<Value>,
    pub last_backup: Option<Value>,
    /// When the newest verified snapshot that the host reported was taken.
    pub backup_taken_at: Option<Timestamp>,
    pub last_update: Option<Value>,
    /// Results of the host's last snapshot checks, by kind.
    pub checks: Option<Value>,
    pub proof_kids: Vec<String>,
    /// The certificate that the host last reported.
    pub certificate: Option<Value>,
    /// The state of the file backup that the host last reported.
    pub files: Option<Value>,
    pub replaced_by: Option<MachineId>,
    pub retired_at: Option<Timestamp>,
    pub deleted_at: Option<Timestamp>,
    /// When the last request to create the server was sent, while its outcome is unknown.
    pub create_requested_at: Option<Timestamp>,
    pub server_deleted_at: Option<Timestamp>,
    /// When powering on the server was last requested.
    pub power_on_requested_at: Option<Timestamp>,
    /// When the power-off of a replaced or deleted machine's server was requested.
    pub power_off_requested_at: Option<Timestamp>,
    /// When the first healthy heartbeat after the registration arrived.
    pub proven_at: Option<Timestamp>,
    /// When the final backup was taken, after the writers had stopped.
    pub final_backup_at: Option<Timestamp>,
    /// If set, data written after this time may exist only on the machine's server.
    pub unsaved_since: Option<Timestamp>,
    /// Whether `unsaved_since` is set only because a later machine started without the owner's files.
    pub has_unsaved_files_only: bool,
    /// When the server's retention period was ended early, so that the server is deleted.
    pub discard_requested_at: Option<Timestamp>,
    /// When an operator abandoned the server's removal.
    pub removal_abandoned_at: Option<Timestamp>,
    /// The time since which the provider has reported the server missing.
    pub server_missing_since: Option<Timestamp>,
    /// `[{stage, at}]`, oldest first.
    pub boot_stages: Value,
    /// `{stage, bytes, totalBytes, rows, totalRows}`.
    pub boot_progress: Option<Value>,
    pub preview_expires_at: Option<Timestamp>,
    /// When an operator requested that the server be powered off.
    pub powered_off_at: Option<Timestamp>,
    /// Problems that the host last reported for an operator: `[{code, detail}]`.
    pub attention: Value,
    /// The locations to try, in this order, when the provider has no capacity in `location`.
    pub fallback_locations: Vec<Location>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

fn parse_column<T: FromStr<Err: Display>>(row: &Row, column: &'static str) -> Result<T, DbError> {
    let text: &str = row.get(column);
    text.parse().map_err(|error: T::Err| DbError::Unreadable { what: column, reason: error.to_string() })
}

fn parse_optional_column<T: FromStr<Err: Display>>(
    row: &Row,
    column: &'static str,
) -> Result<Option<T>, DbError> {
    let text: Option<&str> = row.get(column);
    text.map(str::parse)
        .transpose()
        .map_err(|error: T::Err| DbError::Unreadable { what: column, reason: error.to_string() })
}

fn parse_list_column<T: FromStr<Err: Display>>(row: &Row, column: &'static str) -> Result<Vec<T>, DbError> {
    let texts: Vec<&str> = row.get(column);
    let unreadable = |error: T::Err| DbError::Unreadable { what: column, reason: error.to_string() };
    texts.into_iter().map(|text| text.parse().map_err(unreadable)).collect()
}

fn parse_number_column<T: TryFrom<i32>>(row: &Row, column: &'static str) -> Result<T, DbError> {
    let value: i32 = row.get(column);
    T::try_from(value).map_err(|_| DbError::Unreadable { what: column, reason: value.to_string() })
}

impl MachineRow {
    /// Returns the status, or `replaced` after the machine has been replaced.
    pub fn status_or_replaced(&self) -> &'static str {
        if self.retired_at.is_some() { "replaced" } else { self.status.as_str() }
    }

    /// Parses a row with the columns [`COLUMNS`].
    ///
    /// # Errors
    /// `Unreadable` if a stored value is invalid.
    pub fn parse(row: &Row) -> Result<Self, DbError> {
        let failure = parse_optional_column(row, "failure_cause")?.map(|cause| Failure {
            cause,
            stage: row.get("failure_stage"),
            message: row.get("failure_message"),
        });
        Ok(Self {
            id: MachineId(row.get("machine_id")),
            user: parse_column(row, "idp_user_id")?,
            slot: parse_column(row, "slot")?,
            handle: parse_column(row, "handle")?,
            kind: parse_column(row, "kind")?,
            status: parse_column(row, "status")?,
            failure,
            epoch: Epoch(parse_number_column(row, "epoch")?),
            restore: parse_column(row, "restore_mode")?,
            restore_snapshot: row.get("restore_snapshot"),
            should_restore_files: row.get("restore_files"),
            unrestored_snapshot: row.get("unrestored_snapshot"),
            server_type: parse_column(row, "server_type")?,
            resize_to: parse_optional_column(row, "resize_to")?,
            location: parse_column(row, "location")?,
            image_version: parse_column(row, "image_version")?,
            bundle_sha256: row.get("bundle_sha256"),
            provider_server_id: row.get("provider_server_id"),
            public_ipv4: parse_optional_column(row, "public_ipv4")?,
            https_port: parse_number_column(row, "https_port")?,
            tls_pin: parse_optional_column(row, "tls_spki_sha256")?,
            registration_token_hash: row.get("registration_token_hash"),
            registration_expires_at: row.get("registration_expires_at"),
            registration_body_hash: row.get("registration_body_hash"),
            registered_at: row.get("registered_at"),
            upgrade_token: upgrade_token::parse(row)?,
            heartbeat_at: row.get("heartbeat_at"),
            health: row.get("health"),
            last_backup: row.get("last_backup"),
            backup_taken_at: row.get("backup_taken_at"),
            last_update: row.get("last_update"),
            checks: row.get("checks"),
            proof_kids: row.get("proof_kids"),
            certificate: row.get("certificate"),
            files: row.get("files"),
            replaced_by: row.get::<_, Option<_>>("replaced_by").map(MachineId),
            retired_at: row.get("retired_at"),
            deleted_at: row.get("deleted_at"),
            create_requested_at: row.get("create_ordered_at"),
            server_deleted_at: row.get("server_deleted_at"),
            power_on_requested_at: row.get("power_ordered_at"),
            power_off_requested_at: row.get("power_off_ordered_at"),
            proven_at: row.get("proven_at"),
            final_backup_at: row.get("final_backup_at"),
            unsaved_since: row.get("unsaved_since"),
            has_unsaved_files_only: row.get("unsaved_files"),
            discard_requested_at: row.get("discard_ordered_at"),
            removal_abandoned_at: row.get("removal_abandoned_at"),
            server_missing_since: row.get("server_missing_since"),
            boot_stages: row.get("boot_stages"),
            boot_progress: row.get("boot_progress"),
            preview_expires_at: row.get("preview_expires_at"),
            powered_off_at: row.get("powered_off_at"),
            attention: row.get("attention"),
            fallback_locations: parse_list_column(row, "fallback_locations")?,
            created_at: row.get("created_at"),
            updated_at: row.get("updated_at"),
        })
    }

    /// Returns the machine in the form that the lifecycle rules use.
    pub fn to_lifecycle_machine(&self) -> state::Machine {
        state::Machine { state: self.state(), epoch: self.epoch }
    }

    fn state(&self) -> State {
        let state_in_slot = self.state_in_slot();
        if self.deleted_at.is_some() {
            State::Deleted { previous: Box::new(state_in_slot) }
        } else if self.retired_at.is_some() {
            State::Retired { previous: Box::new(state_in_slot) }
        } else {
            state_in_slot
        }
    }

    /// Returns the machine's state in its slot or, for a former machine, its state when it left the slot.
    fn state_in_slot(&self) -> State {
        match self.status {
            Status::Provisioning => State::Provisioning,
            Status::Recovering => State::Recovering,
            Status::Running => State::Running { server_type: self.server_type.clone() },
            Status::Resizing => State::Resizing {
                from: self.server_type.clone(),
                to: self.resize_to.clone().unwrap_or_else(|| self.server_type.clone()),
            },
            Status::Failed => State::Failed {
                // A failed row should always have a cause; if it has none, the strictest cause is assumed.
                cause: self.failure.as_ref().map_or(FailureCause::Operator, |failure| failure.cause),
            },
        }
    }

    /// Returns whether the machine has a server at the provider, according to the database.
    pub fn has_server(&self) -> bool {
        self.may_have_server() && !self.has_lost_server()
    }

    /// Returns whether the machine was given a server whose deletion is not confirmed. The provider may still have a
    /// server that it reported missing.
    pub fn may_have_server(&self) -> bool {
        self.provider_server_id.is_some() && self.server_deleted_at.is_none()
    }

    /// Returns whether the machine failed because the provider reported its server missing.
    pub fn has_lost_server(&self) -> bool {
        self.failure.as_ref().is_some_and(|failure| failure.cause == FailureCause::ServerGone)
    }

    /// Returns whether the machine has a server that is not about to be discarded.
    pub fn is_server_kept(&self) -> bool {
        self.has_server() && self.discard_requested_at.is_none()
    }

    /// Infers the server's power state from recorded requests to power it off.
    pub fn server_power(&self) -> ServerPower {
        let may_be_off = self.power_off_requested_at.is_some() || self.powered_off_at.is_some();
        if may_be_off { ServerPower::MaybeOff } else { ServerPower::On }
    }

    /// Returns whether the machine holds its slot.
    pub fn is_active(&self) -> bool {
        self.deleted_at.is_none() && self.retired_at.is_none()
    }

    /// Returns whether the host's last heartbeat reported the gateway and the database as healthy.
    pub fn is_healthy(&self) -> bool {
        let ok = |part: &str| self.health.as_ref().is_some_and(|health| health[part] == "ok");
        ok("gateway") && ok("database")
    }

    /// Returns the server's name at the provider.
    pub fn server_name(&self) -> String {
        format!("svc-{}", self.id)
    }
}

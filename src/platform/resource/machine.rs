//! Converts machine rows to machines in the API.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::copies;
use crate::db::machine_row::MachineRow;
use crate::token_rotation::UpgradeToken;
use svc_wire::machine::{self as wire, Boot, BootStage, Failure, Machine};

impl MachineRow {
    /// Returns the machine in the form that the audit log records.
    pub fn audit_record(&self) -> Value {
        json!(Machine::from(self))
    }
}

impl From<&MachineRow> for Machine {
    fn from(row: &MachineRow) -> Self {
        let failure = row.failure.as_ref().map(|failure| Failure {
            cause: failure.cause.into(),
            stage: failure.stage.clone(),
            message: failure.message.clone(),
        });
        Self {
            machine_id: row.id.into(),
            idp_user_id: (&row.user).into(),
            slot: (&row.slot).into(),
            handle: (&row.handle).into(),
            kind: row.kind.into(),
            status: row.status.into(),
            failure,
            epoch: row.epoch.0.into(),
            restore_mode: row.restore.into(),
            restore_files: row.should_restore_files,
            server_type: (&row.server_type).into(),
            location: (&row.location).into(),
            image_version: (&row.image_version).into(),
            provider_server_id: row.provider_server_id.map(|id| id.to_string()),
            public_ipv4: row.public_ipv4,
            https_port: row.https_port.into(),
            tls_spki_sha256: row.tls_pin.map(|pin| pin.to_string()),
            certificate: parse_report(row.certificate.as_ref()),
            registered_at: row.registered_at.map(Into::into),
            heartbeat_at: row.heartbeat_at.map(Into::into),
            health: parse_report(row.health.as_ref()),
            last_backup: parse_report(row.last_backup.as_ref()),
            files: parse_report(row.files.as_ref()),
            last_update: parse_report(row.last_update.as_ref()),
            checks: parse_report(row.checks.as_ref()),
            boot: to_boot(&row.boot_stages),
            boot_progress: parse_report(row.boot_progress.as_ref()),
            proven_at: row.proven_at.map(Into::into),
            final_backup_at: row.final_backup_at.map(Into::into),
            unsaved_since: row.unsaved_since.map(Into::into),
            unsaved_data: copies::to_unsaved_data(row.unsaved_since, row.has_unsaved_files_only),
            powered_off_at: row.powered_off_at.map(Into::into),
            attention: parse_report(Some(&row.attention)).unwrap_or_default(),
            fallback_locations: row.fallback_locations.iter().map(Into::into).collect(),
            upgrade_token: Some((&row.upgrade_token).into()),
            replaced_by: row.replaced_by.map(Into::into),
            retired_at: row.retired_at.map(Into::into),
            deleted_at: row.deleted_at.map(Into::into),
            created_at: row.created_at.into(),
            updated_at: row.updated_at.into(),
        }
    }
}

impl From<&UpgradeToken> for wire::UpgradeToken {
    fn from(token: &UpgradeToken) -> Self {
        Self {
            generation: token.generation.0.into(),
            rotated_at: token.rotated_at.into(),
            requested_at: token.requested_at.map(Into::into),
        }
    }
}

/// Parses a host's stored report; also `None` if this release cannot read the report.
fn parse_report<T: DeserializeOwned>(stored: Option<&Value>) -> Option<T> {
    stored.and_then(|stored| T::deserialize(stored).ok())
}

fn to_boot(stages: &Value) -> Option<Boot> {
    let stages: Vec<BootStage> = parse_report(Some(stages))?;
    let last = stages.last()?;
    Some(Boot { stage: last.stage.clone(), at: last.at.clone(), stages })
}

//! Converts audit rows to entries in the API.

use crate::db::audit::AuditRow;
use svc_wire::audit::AuditEntry;

impl From<AuditRow> for AuditEntry {
    fn from(row: AuditRow) -> Self {
        Self {
            audit_id: row.id.into(),
            at: row.at.into(),
            actor: row.actor,
            action: row.action,
            target: row.target,
            before: row.before,
            after: row.after,
            request_id: row.request_id,
        }
    }
}

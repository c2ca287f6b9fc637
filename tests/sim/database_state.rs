//! Reads the database state at one instant.

use anyhow::Result;
use serde::Deserialize;
use tokio_postgres::Client;

#[derive(Debug, Clone, Deserialize)]
pub struct MachineRow {
    pub machine_id: String,
    pub idp_user_id: String,
    pub slot: String,
    pub status: String,
    pub failure_cause: Option<String>,
    pub epoch: u32,
    pub registered_at: Option<String>,
    pub proven_at: Option<String>,
    pub retired_at: Option<String>,
    pub deleted_at: Option<String>,
    pub unsaved_since: Option<String>,
    pub discard_ordered_at: Option<String>,
    pub server_deleted_at: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct OperationRow {
    pub operation_id: String,
    pub machine_id: String,
    pub kind: String,
    pub state: String,
    pub step: String,
    /// The operation's question to an operator.
    pub question: Option<serde_json::Value>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct AuditRow {
    pub action: String,
    pub target: String,
    pub after: Option<serde_json::Value>,
    pub request_id: String,
}

#[derive(Debug, Clone, Default)]
pub struct DatabaseState {
    pub machines: Vec<MachineRow>,
    pub operations: Vec<OperationRow>,
}

/// One statement, so that all rows are read at one instant. Machines are ordered oldest first.
const STATE_QUERY: &str = "SELECT \
    (SELECT coalesce(json_agg(m ORDER BY machine_id), '[]') FROM (SELECT machine_id, idp_user_id, slot, \
        status, failure_cause, epoch, registered_at, proven_at, retired_at, deleted_at, \
        unsaved_since, discard_ordered_at, server_deleted_at FROM user_machines) m), \
    (SELECT coalesce(json_agg(o ORDER BY operation_id), '[]') FROM (SELECT operation_id, machine_id, \
        kind, state, step, question FROM operations) o)";

impl DatabaseState {
    pub async fn read(client: &Client) -> Result<Self> {
        let row = client.query_one(STATE_QUERY, &[]).await?;
        Ok(Self {
            machines: serde_json::from_value(row.get(0))?,
            operations: serde_json::from_value(row.get(1))?,
        })
    }

    pub fn machine(&self, id: &str) -> Option<&MachineRow> {
        self.machines.iter().find(|machine| machine.machine_id == id)
    }

    /// Returns whether the server of a machine that has left its slot must be kept, because it has unsaved data or no
    /// successor yet.
    pub fn must_keep_server(&self, machine: &MachineRow) -> bool {
        if machine.is_active() || machine.discard_ordered_at.is_some() {
            return false;
        }
        if machine.registered_at.is_none() {
            return machine.unsaved_since.is_some();
        }
        let is_successor = |row: &&MachineRow| {
            row.prefix() == machine.prefix() && row.epoch > machine.epoch && row.registered_at.is_some()
        };
        let mut successors = self.machines.iter().filter(is_successor);
        let is_replaced = successors.any(|successor| match successor.server_deleted_at {
            Some(_) => successor.deleted_at.is_some(),
            None if successor.failure_cause.as_deref() == Some("server_gone") => {
                successor.deleted_at.is_some()
            }
            None => successor.proven_at.is_some(),
        });
        machine.unsaved_since.is_some() || (machine.deleted_at.is_none() && !is_replaced)
    }

    pub fn has_running_operation(&self, machine_id: &str) -> bool {
        let mut operations = self.operations.iter();
        operations.any(|operation| operation.machine_id == machine_id && operation.state == "running")
    }
}

impl MachineRow {
    pub fn is_active(&self) -> bool {
        self.retired_at.is_none() && self.deleted_at.is_none()
    }

    pub fn is_booting(&self) -> bool {
        self.is_active() && matches!(self.status.as_str(), "provisioning" | "recovering")
    }

    pub fn is_running(&self) -> bool {
        self.is_active() && self.status == "running"
    }

    pub fn prefix(&self) -> String {
        format!("{}/{}", self.idp_user_id, self.slot)
    }
}

pub async fn read_audit(client: &Client) -> Result<Vec<AuditRow>> {
    let sql = "SELECT coalesce(json_agg(a), '[]') FROM (SELECT action, target, after, request_id FROM operator_audit) a";
    Ok(serde_json::from_value(client.query_one(sql, &[]).await?.get(0))?)
}

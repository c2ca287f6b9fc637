//! What the API answers, as far as it is shown or waited for, in plain text.

use serde::Deserialize;
use serde_json::Value;

use super::table;

/// A machine's record; fields beyond those shown are left alone.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    pub machine_id: String,
    pub idp_user_id: String,
    pub slot: String,
    pub handle: String,
    pub kind: Option<String>,
    pub status: String,
    pub failure: Option<Value>,
    pub epoch: u64,
    pub server_type: Option<String>,
    pub location: Option<String>,
    pub image_version: Option<String>,
    pub public_ipv4: Option<String>,
    pub registered_at: Option<String>,
    pub heartbeat_at: Option<String>,
    pub last_backup: Option<Value>,
    pub replaced_by: Option<String>,
    pub deleted_at: Option<String>,
    pub created_at: Option<String>,
    #[serde(default)]
    pub operations: Vec<Operation>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Machines {
    pub machines: Vec<Machine>,
    pub next_cursor: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    pub operation_id: String,
    pub machine_id: String,
    pub kind: String,
    pub state: String,
    pub step: Option<String>,
    pub attempts: Option<u64>,
    pub error_code: Option<String>,
    pub created_at: Option<String>,
    pub ended_at: Option<String>,
    #[serde(default)]
    pub log: Vec<LogEntry>,
}

#[derive(Debug, Deserialize)]
pub struct LogEntry {
    pub at: String,
    pub step: String,
    pub outcome: Option<String>,
    pub detail: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub struct Slots {
    pub slots: Vec<SlotRow>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlotRow {
    pub idp_user_id: String,
    pub slot: String,
    pub plan: String,
    pub status: String,
    pub current_period_end: Option<String>,
}

/// What a call that starts an operation answers.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Accepted {
    pub machine_id: String,
    pub status: Option<String>,
    pub operation_id: Option<String>,
    pub old_machine_id: Option<String>,
}

pub fn machines(page: &Machines) -> String {
    let row = |m: &Machine| {
        let shown = [
            m.machine_id.clone(),
            m.handle.clone(),
            m.idp_user_id.clone(),
            m.slot.clone(),
            m.state_word().to_owned(),
            m.epoch.to_string(),
            text(m.server_type.as_ref()),
            text(m.image_version.as_ref()),
            text(m.heartbeat_at.as_ref()),
        ];
        shown.to_vec()
    };
    let rows: Vec<_> = page.machines.iter().map(row).collect();
    let heading = ["MACHINE", "HANDLE", "USER", "SLOT", "STATUS", "EPOCH", "TYPE", "IMAGE", "HEARTBEAT"];
    let mut shown = table::render(&heading, &rows);
    if let Some(cursor) = &page.next_cursor {
        shown.push_str(&format!("more: --cursor {cursor}\n"));
    }
    shown
}

pub fn machine(m: &Machine) -> String {
    let mut shown = table::pairs(&[
        ("machine", m.machine_id.clone()),
        ("handle", m.handle.clone()),
        ("user", m.idp_user_id.clone()),
        ("slot", m.slot.clone()),
        ("kind", text(m.kind.as_ref())),
        ("status", m.state_word().to_owned()),
        ("failure", compact(m.failure.as_ref())),
        ("epoch", m.epoch.to_string()),
        ("type", text(m.server_type.as_ref())),
        ("location", text(m.location.as_ref())),
        ("image", text(m.image_version.as_ref())),
        ("address", text(m.public_ipv4.as_ref())),
        ("created", text(m.created_at.as_ref())),
        ("registered", text(m.registered_at.as_ref())),
        ("heartbeat", text(m.heartbeat_at.as_ref())),
        ("backup", compact(m.last_backup.as_ref())),
        ("replaced by", text(m.replaced_by.as_ref())),
        ("deleted", text(m.deleted_at.as_ref())),
    ]);
    for operation in &m.operations {
        shown.push('\n');
        shown.push_str(&self::operation(operation));
    }
    shown
}

pub fn operation(o: &Operation) -> String {
    let mut shown = table::pairs(&[
        ("operation", o.operation_id.clone()),
        ("machine", o.machine_id.clone()),
        ("kind", o.kind.clone()),
        ("state", o.state.clone()),
        ("step", text(o.step.as_ref())),
        ("attempts", o.attempts.map(|n| n.to_string()).unwrap_or_default()),
        ("error", text(o.error_code.as_ref())),
        ("created", text(o.created_at.as_ref())),
        ("ended", text(o.ended_at.as_ref())),
    ]);
    for entry in &o.log {
        shown.push_str(&format!("  {}\n", entry.line()));
    }
    shown
}

pub fn slots(slots: &Slots) -> String {
    let row = |s: &SlotRow| {
        let end = text(s.current_period_end.as_ref());
        vec![s.idp_user_id.clone(), s.slot.clone(), s.plan.clone(), s.status.clone(), end]
    };
    let rows: Vec<_> = slots.slots.iter().map(row).collect();
    table::render(&["USER", "SLOT", "PLAN", "STATUS", "PERIOD END"], &rows)
}

pub fn accepted(a: &Accepted) -> String {
    table::pairs(&[
        ("machine", a.machine_id.clone()),
        ("replaces", text(a.old_machine_id.as_ref())),
        ("status", text(a.status.as_ref())),
        ("operation", text(a.operation_id.as_ref())),
    ])
}

impl Machine {
    /// The status; a machine that has left its slot shows that instead.
    pub fn state_word(&self) -> &str {
        if self.deleted_at.is_some() {
            "deleted"
        } else if self.replaced_by.is_some() {
            "replaced"
        } else {
            &self.status
        }
    }
}

impl LogEntry {
    pub fn line(&self) -> String {
        let said = compact(self.detail.as_ref());
        let parts = [self.at.as_str(), &self.step, self.outcome.as_deref().unwrap_or_default(), &said];
        parts.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join("  ")
    }
}

fn text(value: Option<&String>) -> String {
    value.cloned().unwrap_or_default()
}

/// One line: a text as it is, an object as `name=value …` without its nulls.
pub fn compact(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Object(members)) => {
            let shown = members.iter().filter(|(_, value)| !value.is_null());
            shown
                .map(|(name, value)| format!("{name}={}", compact(Some(value))))
                .collect::<Vec<_>>()
                .join(" ")
        }
        Some(other) => other.to_string(),
    }
}

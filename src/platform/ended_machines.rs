//! Machines out of service in the fleet view, pure: those that need a person join the attention list.

use serde_json::{Value, json};

use super::db::ended_machines::EndedMachineRow;
use super::fleet::MAX_LISTED;

/// Puts them before the active machines of a fleet's summary, since data or a decision depends on each.
pub fn add_to(summary: &mut Value, ended: &[EndedMachineRow]) {
    let total = summary["attentionTotal"].as_u64().unwrap_or_default();
    summary["attentionTotal"] = (total + ended.len() as u64).into();
    if let Some(attention) = summary["attention"].as_array_mut() {
        attention.splice(0..0, ended.iter().map(entry));
        attention.truncate(MAX_LISTED);
    }
}

fn entry(row: &EndedMachineRow) -> Value {
    let reasons: Vec<_> = [
        (row.waiting_operation.is_some(), "operation_waiting"),
        (row.has_unsaved_changes, "unsaved_changes"),
        (row.is_removal_abandoned, "removal_abandoned"),
    ]
    .into_iter()
    .filter_map(|(holds, reason)| holds.then_some(reason))
    .collect();
    json!({
        "machineId": row.machine, "idpUserId": row.user, "slot": row.slot, "handle": row.handle, "status": row.status,
        "reasons": reasons, "ended": if row.is_deleted { "deleted" } else { "replaced" },
        "operationId": row.waiting_operation,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_machine::id::{MachineId, OperationId};

    fn row() -> EndedMachineRow {
        EndedMachineRow {
            machine: MachineId::new(),
            user: "user_1".to_owned(),
            slot: "primary".to_owned(),
            handle: "ada".to_owned(),
            status: "running".to_owned(),
            is_deleted: false,
            has_unsaved_changes: true,
            is_removal_abandoned: false,
            waiting_operation: None,
        }
    }

    #[test]
    fn ended_machines_come_first_and_are_counted() {
        let mut summary = json!({"attention": [{"machineId": "active"}], "attentionTotal": 7});
        let waiting = EndedMachineRow {
            is_deleted: true,
            has_unsaved_changes: false,
            is_removal_abandoned: true,
            waiting_operation: Some(OperationId::new()),
            ..row()
        };
        add_to(&mut summary, &[row(), waiting]);
        assert_eq!(summary["attentionTotal"], 9);
        let shown = summary["attention"].as_array().unwrap();
        assert_eq!(
            (&shown[0]["reasons"], &shown[0]["ended"]),
            (&json!(["unsaved_changes"]), &json!("replaced"))
        );
        assert_eq!(shown[1]["reasons"], json!(["operation_waiting", "removal_abandoned"]));
        assert_eq!(shown[1]["ended"], "deleted");
        assert!(shown[1]["operationId"].is_string());
        assert_eq!(shown[2]["machineId"], "active");
    }

    #[test]
    fn list_stays_bounded_while_total_counts_all() {
        let mut summary = json!({"attention": [{"machineId": "active"}], "attentionTotal": 1});
        add_to(&mut summary, &vec![row(); MAX_LISTED]);
        assert_eq!(summary["attention"].as_array().map(Vec::len), Some(MAX_LISTED));
        assert_eq!(summary["attentionTotal"], MAX_LISTED + 1);
    }
}

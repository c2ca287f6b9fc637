//! Adds former machines that need an operator to the fleet view's attention list.

use super::db::former_machines::FormerMachineRow;
use super::fleet::{FleetSummary, MAX_LISTED_MACHINES};
use svc_wire::fleet::{EndReason, MachineNeedingAttention};
use svc_wire::text::WireString;

/// Puts the former machines before the active ones in the attention list, because each of them holds unsaved data, is
/// waiting for a decision, or has an abandoned removal.
pub fn add_to_attention(summary: &mut FleetSummary, former: &[FormerMachineRow]) {
    summary.attention_total += former.len() as u64;
    summary.attention.splice(0..0, former.iter().map(attention_entry));
    summary.attention.truncate(MAX_LISTED_MACHINES);
}

fn attention_entry(row: &FormerMachineRow) -> MachineNeedingAttention {
    let reasons: Vec<_> = [
        (row.waiting_operation.is_some(), "operation_waiting"),
        (row.has_unsaved_changes, "unsaved_changes"),
        (row.is_removal_abandoned, "removal_abandoned"),
    ]
    .into_iter()
    .filter(|(applies, _)| *applies)
    .map(|(_, reason)| reason.to_owned())
    .collect();
    let ended = if row.is_deleted { EndReason::Deleted } else { EndReason::Replaced };
    MachineNeedingAttention {
        machine_id: row.machine.into(),
        idp_user_id: WireString::from_stored(&row.user),
        slot: WireString::from_stored(&row.slot),
        handle: WireString::from_stored(&row.handle),
        status: WireString::from_stored(&row.status),
        reasons,
        ended: Some(ended.into()),
        operation_id: row.waiting_operation.map(Into::into),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::db::fleet::FleetRow;
    use crate::fleet::{summarize, tests::healthy_row};
    use svc_machine::id::{MachineId, OperationId};
    use svc_router::host_trust::HostTrust;

    fn row() -> FormerMachineRow {
        FormerMachineRow {
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

    /// Returns the summary of a fleet whose only active machine needs attention.
    fn summary() -> FleetSummary {
        let failing = FleetRow { database: Some("failing".to_owned()), ..healthy_row() };
        summarize(&[failing], Duration::MAX, &HostTrust::pin_only())
    }

    #[test]
    fn former_machines_are_listed_first_and_counted() {
        let mut summary = summary();
        let active = summary.attention[0].machine_id.clone();
        let waiting = FormerMachineRow {
            is_deleted: true,
            has_unsaved_changes: false,
            is_removal_abandoned: true,
            waiting_operation: Some(OperationId::new()),
            ..row()
        };
        add_to_attention(&mut summary, &[row(), waiting]);
        assert_eq!(summary.attention_total, 3);
        let [replaced, deleted, last] = &summary.attention[..] else { panic!("{}", summary.attention.len()) };
        assert_eq!(replaced.reasons, ["unsaved_changes"]);
        assert!(replaced.ended.as_ref().is_some_and(|ended| ended.is(EndReason::Replaced)));
        assert_eq!(deleted.reasons, ["operation_waiting", "removal_abandoned"]);
        assert!(deleted.ended.as_ref().is_some_and(|ended| ended.is(EndReason::Deleted)));
        assert!(deleted.operation_id.is_some());
        assert_eq!(last.machine_id, active);
    }

    #[test]
    fn attention_list_is_bounded_but_total_counts_all() {
        let mut summary = summary();
        add_to_attention(&mut summary, &vec![row(); MAX_LISTED_MACHINES]);
        assert_eq!(
            (summary.attention.len(), summary.attention_total),
            (MAX_LISTED_MACHINES, MAX_LISTED_MACHINES as u64 + 1)
        );
    }
}

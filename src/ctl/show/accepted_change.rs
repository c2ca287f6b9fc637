//! Text view of accepted machine changes.

use super::human::format_time;
use super::table::{self, Cell};
use super::{View, or_empty};
use crate::args;
use svc_wire::change::{
    AlsoDeletedMachine, DeletedMachine, PowerAction, PowerChange, ProvisionedMachine, RecoveredMachine,
    Resize, UndeletedMachine,
};
use svc_wire::copies::{NewerSnapshot, SnapshotSource};
use svc_wire::text::WireString;

/// The displayed fields of the platform's response to a change request.
#[derive(Debug, Default)]
pub struct AcceptedChange {
    pub machine_id: String,
    pub operation_id: Option<String>,
    pub also_deleted: Option<AlsoDeletedMachine>,
    /// Deletions only: whether the provider no longer had the machine's server.
    pub was_server_gone: bool,
    status: String,
    server_type: Option<String>,
    old_machine_id: Option<String>,
    newer_snapshot: Option<NewerSnapshot>,
    deletion: Option<DeletedMachine>,
    /// Undeletes only: whether the deletion had already been undone.
    already_undone: Option<bool>,
    power: Option<WireString<PowerAction>>,
}

impl From<ProvisionedMachine> for AcceptedChange {
    fn from(machine: ProvisionedMachine) -> Self {
        Self {
            machine_id: machine.machine_id.into(),
            operation_id: machine.operation_id.map(Into::into),
            status: machine.status.into(),
            ..Self::default()
        }
    }
}

impl From<RecoveredMachine> for AcceptedChange {
    fn from(machine: RecoveredMachine) -> Self {
        Self {
            machine_id: machine.machine_id.into(),
            operation_id: Some(machine.operation_id.into()),
            status: machine.status.into(),
            old_machine_id: Some(machine.old_machine_id.into()),
            newer_snapshot: machine.newer_snapshot,
            ..Self::default()
        }
    }
}

impl From<DeletedMachine> for AcceptedChange {
    fn from(machine: DeletedMachine) -> Self {
        Self {
            machine_id: machine.machine_id.to_string(),
            operation_id: machine.operation_id.as_deref().map(str::to_owned),
            status: machine.status.to_string(),
            also_deleted: machine.also_deleted.clone(),
            deletion: Some(machine),
            ..Self::default()
        }
    }
}

impl From<UndeletedMachine> for AcceptedChange {
    fn from(machine: UndeletedMachine) -> Self {
        Self {
            machine_id: machine.machine_id.into(),
            operation_id: Some(machine.operation_id.into()),
            status: machine.status.into(),
            already_undone: Some(machine.already_undone),
            ..Self::default()
        }
    }
}

impl From<PowerChange> for AcceptedChange {
    fn from(change: PowerChange) -> Self {
        Self {
            machine_id: change.machine_id.into(),
            operation_id: change.operation_id.map(Into::into),
            status: change.status.into(),
            power: Some(change.action),
            ..Self::default()
        }
    }
}

impl From<Resize> for AcceptedChange {
    fn from(resize: Resize) -> Self {
        Self {
            machine_id: resize.machine_id.into(),
            operation_id: resize.operation_id.map(Into::into),
            status: resize.status.into(),
            server_type: Some(resize.server_type.into()),
            ..Self::default()
        }
    }
}

impl AcceptedChange {
    /// Returns a note if the command was a no-op, or if a recovery isn't restoring the newest snapshot.
    pub fn note(&self) -> Option<String> {
        if self.already_undone == Some(true) {
            return Some("the deletion had already been undone; nothing was changed".to_owned());
        }
        if let Some(newer) = &self.newer_snapshot {
            return Some(format!(
                "{} from {} is newer than the snapshot to restore: if the host cannot take a final backup and no snapshot was \
                 named, the recovery waits for a decision on which one to restore",
                newer.key, newer.taken_at
            ));
        }
        self.was_already_off()
            .then(|| "the machine had already been powered off; nothing was changed".to_owned())
    }

    /// Whether the server was already off when the power-off was requested.
    pub fn was_already_off(&self) -> bool {
        self.power.as_ref().is_some_and(|action| action.is(PowerAction::Off)) && self.operation_id.is_none()
    }

    fn status_label(&self) -> &str {
        if self.deletion.is_some() {
            return "deleted";
        }
        match (self.power.as_deref(), self.already_undone) {
            (Some("off"), _) if self.was_already_off() => "off",
            (Some("off"), _) => "being powered off",
            (Some("on"), _) => "being powered on",
            (Some("reboot"), _) => "being restarted",
            (_, Some(false)) if self.status == "failed" => {
                "being reinstated: it serves again after its next healthy heartbeat"
            }
            _ => &self.status,
        }
    }
}

pub fn show(view: &View, accepted: &AcceptedChange) -> String {
    let deletion = accepted.deletion.as_ref();
    table::render_pairs(
        view,
        &[
            ("slot", deletion.map(format_slot).unwrap_or_default().into()),
            ("machine", accepted.machine_id.clone().into()),
            (
                "also deleted",
                accepted.also_deleted.as_ref().map(describe_also_deleted).unwrap_or_default().into(),
            ),
            ("replaces", or_empty(accepted.old_machine_id.as_ref()).into()),
            ("type", or_empty(accepted.server_type.as_ref()).into()),
            ("status", Cell::state(accepted.status_label())),
            ("operation", or_empty(accepted.operation_id.as_ref()).into()),
            (
                "snapshot",
                deletion.map(|deletion| format_newest_snapshot(view, deletion)).unwrap_or_default().into(),
            ),
            ("undo", describe_undo(view, accepted).into()),
            ("note", accepted.note().unwrap_or_default().into()),
        ],
    )
}

fn format_newest_snapshot(view: &View, deletion: &DeletedMachine) -> String {
    let is_reported =
        deletion.newest_snapshot_source.as_ref().is_some_and(|source| source.is(SnapshotSource::Reported));
    let source = if is_reported { ", as reported by its host" } else { "" };
    let newest = deletion.newest_snapshot_at.as_deref();
    let newest =
        newest.map_or_else(|| "none known".to_owned(), |at| format!("{}{source}", format_time(view.now, at)));
    let problem =
        deletion.snapshot_problem.as_ref().map(|problem| format!("; {problem}")).unwrap_or_default();
    newest + &problem
}

/// Formats the slot as `ada, slot primary of user_1`. Empty for older platforms, which omit it.
fn format_slot(deletion: &DeletedMachine) -> String {
    let DeletedMachine { handle, slot, idp_user_id, .. } = deletion;
    if handle.is_present() { format!("{handle}, slot {slot} of {idp_user_id}") } else { String::new() }
}

/// Describes the machine that was deleted along with its intended replacement.
fn describe_also_deleted(also: &AlsoDeletedMachine) -> String {
    format!(
        "machine {}, which was to be replaced: operation {} takes its final backup, then its server is powered off and \
         kept",
        also.machine_id, also.operation_id
    )
}

/// Describes how to undo the change: the command and its deadline, or why a deletion can't be undone. Empty for changes
/// without an undo command.
fn describe_undo(view: &View, accepted: &AcceptedChange) -> String {
    if let Some(also) = &accepted.also_deleted {
        let until = also.undelete_until.as_deref().or(also.undeletable_until.as_deref());
        let until = until.map(|until| format!(" until {}", format_time(view.now, until))).unwrap_or_default();
        return format!("`svcctl undelete {}`{until}: that machine serves again", also.machine_id);
    }
    match (&accepted.deletion, &accepted.old_machine_id, &accepted.operation_id) {
        (Some(deletion), ..) => describe_deletion_undo(view, accepted, deletion),
        (None, Some(_), Some(operation)) => {
            format!("`svcctl operation abandon {operation}` until the new machine has registered")
        }
        _ => String::new(),
    }
}

fn describe_deletion_undo(view: &View, accepted: &AcceptedChange, deletion: &DeletedMachine) -> String {
    // Older platforms only use the deadline's former name.
    if let Some(until) = deletion.undelete_until.as_ref().or(deletion.undeletable_until.as_ref()) {
        return format!("`svcctl undelete {}` until {}", deletion.machine_id, format_time(view.now, until));
    }
    let DeletedMachine { handle, slot, idp_user_id, .. } = deletion;
    let reason = match deletion.registered_at {
        None => Some("it never served traffic"),
        Some(_) => accepted.was_server_gone.then_some("the provider no longer has its server"),
    };
    // Older platforms don't report the handle or the registration time.
    if let Some(reason) = reason.filter(|_| handle.is_present()) {
        return format!(
            "none: {reason}; `svcctl provision {} --handle {handle}` creates a new machine",
            args::slot_arguments(idp_user_id, slot),
        );
    }
    let abandon = |operation| {
        format!(
            "`svcctl operation abandon {operation}` until its server is off; then the server is deleted permanently"
        )
    };
    accepted.operation_id.as_ref().map(abandon).unwrap_or_default()
}

//! Risk descriptions for prompts: which copies of the data exist during and after each command.

use crate::args::{Delete, Discard, Fail, MachineTarget, Provision, Recover};
use crate::show::operation::kind_noun;
use svc_wire::machine::MachineDetail;

const LOSS_ACCEPTED: &str = "--accept-loss: if the host cannot take the final backup, changes that are in no snapshot are lost with its server.";
const LOSS_NEEDS_DECISION: &str =
    "If the host responds but cannot take the final backup, the operation waits for your decision.";

/// Describes the risk of replacing a slot's machine.
pub fn recovery_risk(args: &Recover) -> String {
    let mut lines = vec![format!(
        "This replaces the machine of {} (slot {}). Its host takes a final backup first.",
        args.user, args.slot
    )];
    lines.extend(args.snapshot.as_ref().map(|key| {
        format!("The new machine starts from {key}: it does not have the changes after that snapshot.")
    }));
    lines.push(if args.accept_loss { LOSS_ACCEPTED } else { LOSS_NEEDS_DECISION }.to_owned());
    lines.push(if args.replace_first {
        "--replace-first deletes the old server before creating the new one: if the new machine does not start, there is \
         no server, and snapshots are the only copy."
            .to_owned()
    } else {
        "The old server is powered off and kept until the new machine is healthy; if the recovery fails before \
         that, the old machine serves again."
            .to_owned()
    });
    lines.extend(args.without_files.then(|| {
        "--without-files: the new machine starts without the owner's files and cost limits, and saves no files until `svc-sync-agent \
         restore-home --retry` (or `--give-up`) has been run on it."
            .to_owned()
    }));
    lines.join("\n")
}

/// Describes the risk of creating a machine with `--accept-loss` or `--allow-empty`. `None` without them, since no data
/// can be lost.
pub fn provision_risk(args: &Provision) -> Option<String> {
    let mut lines = Vec::new();
    lines.extend(args.accept_loss.then_some(LOSS_ACCEPTED));
    lines.extend(args.allow_empty.then_some(
        "--allow-empty: if no snapshot exists, the new machine starts empty, even if an earlier machine in the slot has served traffic.",
    ));
    if lines.is_empty() {
        return None;
    }
    let summary = format!("This creates a machine for {} (slot {}).", args.user, args.slot);
    Some(std::iter::once(summary.as_str()).chain(lines).collect::<Vec<_>>().join("\n"))
}

/// Describes the risk of deleting a machine. `machine` is `None` if its record hasn't been fetched.
pub fn deletion_risk(args: &Delete, machine: Option<&MachineDetail>) -> String {
    if machine.is_some_and(|machine| machine.powered_off_at.is_some()) {
        let server = if args.accept_loss {
            "--accept-loss: changes that are in no snapshot are lost with its server.".to_owned()
        } else {
            format!(
                "Its server is kept, even with --now, until you run `svcctl discard {} --accept-loss`.",
                args.machine
            )
        };
        return format!(
            "This deletes machine {}. It is off, so its host cannot take a final backup; its snapshots stay.\n{server}",
            args.machine
        );
    }
    let server = if args.now {
        "--now deletes its server once that backup is taken and the server is off: this cannot be undone, and a new \
         machine starts from the snapshot."
            .to_owned()
    } else {
        format!(
            "Its server is powered off and kept for the platform's DELETE_GRACE_SECONDS; during that time, `svcctl \
             undelete {}` restores it.",
            args.machine
        )
    };
    let summary = format!(
        "This deletes machine {}. Its host takes a final backup first; its snapshots stay.",
        args.machine
    );
    let loss = if args.accept_loss { LOSS_ACCEPTED } else { LOSS_NEEDS_DECISION };
    [summary.as_str(), loss, server.as_str()].join("\n")
}

/// Describes the risk of deleting a machine that's replacing another one, which cancels the recovery and deletes both
/// machines. `None` for other machines.
pub fn successor_deletion_risk(machine: &MachineDetail, accept_loss: bool) -> Option<String> {
    let mut servers = machine.copies.iter().flat_map(|copies| &copies.kept);
    let replaced = servers.find(|server| machine.registered_at.is_none() && server.reason == "replaced")?;
    let operation = machine.operations.iter().find(|operation| operation.is_in_progress());
    let (new, old) = (&machine.machine_id, &replaced.machine_id);
    let noun = operation.map_or("recovery", |operation| kind_noun(&operation.kind));
    let mut lines = vec![
        format!(
            "A {noun} of {} (slot {}) is in progress. This cancels it and deletes both of its machines:",
            machine.idp_user_id, machine.slot
        ),
        format!("- {new}, the new one, which has never served traffic: its server is deleted."),
        format!(
            "- {old}, the old one: its host takes a final backup, unless its server is already off; the server is \
             then kept, powered off, for the platform's DELETE_GRACE_SECONDS; during that time, `svcctl undelete \
             {old}` restores it."
        ),
        if accept_loss { LOSS_ACCEPTED } else { LOSS_NEEDS_DECISION }.to_owned(),
        "Snapshots stay.".to_owned(),
    ];
    lines.extend(operation.map(|operation| {
        format!(
            "To cancel only the {noun}, so that machine {old} serves again: `svcctl operation abandon {}`.",
            operation.operation_id
        )
    }));
    Some(lines.join("\n"))
}

/// Describes the risk of taking a machine out of service.
pub fn failure_risk(args: &Fail) -> String {
    format!(
        "This takes machine {0} out of service: its user is not served. The machine keeps its slot. Its server stays on \
         with all data and is billed. `svcctl resume {0}` puts the machine back into service if its host is healthy; a \
         recovery replaces it.\nA machine that has never served traffic is abandoned, and its predecessor gets the slot \
         back.",
        args.machine
    )
}

/// Describes the risk of powering off a machine.
pub fn power_off_risk(machine: &MachineTarget) -> String {
    format!(
        "This shuts machine {machine} down. Until you run `svcctl power on {machine}`, its user is not served and no \
         backup is taken; its server keeps all data, and the provider keeps billing it."
    )
}

/// Describes the risk of deleting a machine's kept server.
pub fn discard_risk(args: &Discard) -> String {
    let mut message =
        format!("This deletes the kept server of machine {}: this cannot be undone.", args.machine);
    if args.accept_loss {
        message.push_str("\n--accept-loss: its changes that are in no snapshot are lost permanently.");
    }
    message
}

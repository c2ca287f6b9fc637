//! What a command risks, as its prompt says it: which copies of the data there are while it runs, and after it.

use crate::ctl::args::{Delete, Discard, Fail, Provision, Recover, Target};
use crate::ctl::show::machine::Machine;
use crate::ctl::show::operation::Operation;

const LOSS_ACCEPTED: &str =
    "--accept-loss: if the host cannot make the last backup, what no snapshot holds is lost with its server.";
const LOSS_ASKED: &str =
    "If the host answers and cannot make the last backup, the operation waits for your decision.";

/// Before the machine of a slot is replaced.
pub fn of_recovery(args: &Recover) -> String {
    let mut lines = vec![format!(
        "This replaces the machine of {} (slot {}). Its host is asked for a last backup first.",
        args.user, args.slot
    )];
    lines.extend(args.snapshot.as_ref().map(|key| {
        format!("The new machine begins with {key}: what was written after that snapshot is not on it.")
    }));
    lines.push(if args.accept_loss { LOSS_ACCEPTED } else { LOSS_ASKED }.to_owned());
    lines.push(if args.replace_first {
        "--replace-first deletes the old server before the new one is created: if the new machine does not start, no \
         server is left, and snapshots are the only copy."
            .to_owned()
    } else {
        "The old server is switched off and kept until the new machine has proven itself; if the recovery fails before \
         that, it serves again."
            .to_owned()
    });
    lines.join("\n")
}

/// Before a machine is made with less than its slot may have; `None` where nothing is given up.
pub fn of_provision(args: &Provision) -> Option<String> {
    let mut lines = Vec::new();
    lines.extend(args.accept_loss.then_some(LOSS_ACCEPTED));
    lines.extend(args.allow_empty.then_some(
        "--allow-empty: where no snapshot exists, the new machine starts empty, also if another machine has served.",
    ));
    if lines.is_empty() {
        return None;
    }
    let what = format!("This makes a machine for {} (slot {}).", args.user, args.slot);
    Some(std::iter::once(what.as_str()).chain(lines).collect::<Vec<_>>().join("\n"))
}

/// Before a machine is deleted; `None` where it was not looked at.
pub fn of_deletion(args: &Delete, machine: Option<&Machine>) -> String {
    if machine.is_some_and(|machine| machine.powered_off_at.is_some()) {
        let kept = if args.accept_loss {
            "--accept-loss: what no snapshot holds is lost with its server."
        } else {
            "Its server is kept, also with --now, until `svcctl discard` with --accept-loss."
        };
        return format!(
            "This deletes machine {}. It is switched off, so that its host cannot take a last backup; its snapshots stay.\n{kept}",
            args.machine
        );
    }
    let kept = if args.now {
        "--now deletes its server once that backup is taken and the server is off: then this cannot be undone, and a new \
         machine starts from the snapshot."
            .to_owned()
    } else {
        format!(
            "Its server is switched off and kept for the platform's DELETE_GRACE_SECONDS; until then `svcctl undelete \
             {}` brings it back.",
            args.machine
        )
    };
    let what = format!(
        "This deletes machine {}. Its host is asked for a last backup first; its snapshots stay.",
        args.machine
    );
    let loss = if args.accept_loss { LOSS_ACCEPTED } else { LOSS_ASKED };
    [what.as_str(), loss, kept.as_str()].join("\n")
}

/// Before a machine is deleted that is to replace another one: the recovery ends, and both machines with it. `None` for
/// other machines.
pub fn of_deletion_of_successor(machine: &Machine, accept_loss: bool) -> Option<String> {
    let mut kept = machine.copies.iter().flat_map(|copies| &copies.kept);
    let replaced = kept.find(|kept| machine.registered_at.is_none() && kept.reason == "replaced")?;
    let operation = machine.operations.iter().find(|operation| operation.is_under_way());
    let (new, old) = (&machine.machine_id, &replaced.machine_id);
    let noun = operation.map_or("recovery", Operation::noun);
    let mut lines = vec![
        format!(
            "A {noun} of {} (slot {}) is under way. This cancels it and deletes both of its machines:",
            machine.idp_user_id, machine.slot
        ),
        format!("- {new}, the new one, which has not served yet: its server is deleted."),
        format!(
            "- {old}, the old one: its host is asked for a last backup, then its server is switched off and kept for the \
             platform's DELETE_GRACE_SECONDS; until then `svcctl undelete {old}` brings it back."
        ),
        if accept_loss { LOSS_ACCEPTED } else { LOSS_ASKED }.to_owned(),
        "Snapshots stay.".to_owned(),
    ];
    lines.extend(operation.map(|operation| {
        format!(
            "To cancel the {noun} alone, so that machine {old} serves again: `svcctl operation abandon {}`.",
            operation.operation_id
        )
    }));
    Some(lines.join("\n"))
}

/// Before a machine is taken out of service.
pub fn of_failure(args: &Fail) -> String {
    format!(
        "This takes machine {0} out of service: its user is not served. It keeps its slot. Its server stays on and is \
         billed; what no snapshot holds stays on it. `svcctl resume {0}` puts it back while its host is well; a recovery \
         replaces it.\nA machine that has not served yet is given up: the machine that it was to replace gets the slot back.",
        args.machine
    )
}

/// Before the server of a machine is switched off.
pub fn of_power_off(machine: &Target) -> String {
    format!(
        "This shuts machine {machine} down. Until `svcctl power on {machine}` its user is not served and no backup is \
         taken; what no snapshot holds stays on its server, which the provider keeps billing."
    )
}

/// Before the kept server of a machine is deleted.
pub fn of_discard(args: &Discard) -> String {
    let mut what =
        format!("This deletes the kept server of machine {}: this cannot be undone.", args.machine);
    if args.accept_loss {
        what.push_str("\n--accept-loss: what no snapshot holds of it is lost for good.");
    }
    what
}

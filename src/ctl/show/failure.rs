//! Text view of machine failures, with the operator's next step.

use crate::args;
use svc_base::untrusted_text::one_line;
use svc_machine::state::FailureCause;
use svc_wire::machine::{Failure, MachineDetail};
use svc_wire::registration::RestoreFailureCode;

/// Formats the cause, stage and message as `boot_reported at restore: …`.
pub fn summary_line(failure: &Failure) -> String {
    let mut line = failure.cause.to_string();
    if let Some(stage) = &failure.stage {
        line.push_str(&format!(" at {stage}"));
    }
    if let Some(message) = &failure.message {
        line.push_str(&format!(": {}", one_line(message)));
    }
    line
}

/// Whether the machine runs again after its next healthy heartbeat, because it regained its slot or its missing server
/// was found.
pub fn is_reinstating(failure: &Failure) -> bool {
    failure.cause.is(FailureCause::Reinstating)
}

/// Whether the provider no longer has the machine's server.
pub fn is_server_gone(failure: &Failure) -> bool {
    failure.cause.is(FailureCause::ServerGone)
}

/// Returns the operator's next step.
pub fn next_step(failure: &Failure, machine: &MachineDetail) -> String {
    if let Some(advice) = restore_next_step(failure, machine) {
        return advice;
    }
    let recover = format!("`svcctl recover {}`", slot_arguments(machine));
    match failure.cause.as_str() {
        "provider_refused" => {
            format!("check the quota, location and server type at the provider, then run {recover}")
        }
        "provider_unavailable" => {
            format!(
                "run `svcctl doctor platform` on the platform's machine to see whether the provider responds; once it \
                 does, run {recover}"
            )
        }
        "store_failed" => {
            format!(
                "run `svcctl doctor` to see what is wrong with the object store; once the store works, run {recover}"
            )
        }
        "fenced" => {
            format!(
                "a machine with a higher epoch has fenced the slot, for example after a database restore: check for the \
                 alarm database_behind_store with `svcctl fleet`; once nothing on the other machine is needed, run \
                 {recover} with --accept-loss"
            )
        }
        "internal" => {
            format!("look for the operation's id in the platform's log to find the cause; then run {recover}")
        }
        "reinstating" if is_slot_held_by_another(machine) => format!(
            "the store says that another machine holds the slot, but the platform's database has no record of it (alarm \
             database_behind_store): run {recover} with --accept-loss to create a new machine from the newest snapshot"
        ),
        "resize" | "reinstating" => {
            format!("wait: it runs again after its next healthy heartbeat; if there is none, run {recover}")
        }
        "server_gone" => format!(
            "run {recover} to replace it and restore the latest snapshot; if the provider shows its server again, run \
             `svcctl power on {0}` instead, or `svcctl resume {0}` if its host is healthy",
            machine.machine_id
        ),
        "operator" | "operation_hung" if machine.registered_at.is_some() => {
            format!(
                "if its server is running and its host is healthy, run `svcctl resume {}`; otherwise run {recover} to \
                 replace it and restore the latest snapshot",
                machine.machine_id
            )
        }
        _ => format!(
            "run {recover} to replace it and restore the latest snapshot (if it never ran, run `svcctl \
             provision` again)"
        ),
    }
}

/// Returns the advice for a replacement that never ran, if the machine it was meant to replace holds the slot again.
pub fn advice_after_reinstatement(failure: &Failure, machine: &MachineDetail) -> Option<String> {
    let live = machine.copies.as_ref().and_then(|copies| copies.live.as_ref())?;
    let is_reinstated = machine.replaced_by.as_ref() == Some(&live.machine_id);
    restore_next_step(failure, machine).filter(|_| is_reinstated)
}

/// Returns the advice for a new machine that failed to restore its snapshot or files. Rerunning the same command might
/// fail again, so the advice depends on the failure code.
pub fn restore_next_step(failure: &Failure, machine: &MachineDetail) -> Option<String> {
    if !failure.cause.is(FailureCause::BootReported) || failure.stage.as_deref() != Some("restore") {
        return None;
    }
    let slot = slot_arguments(machine);
    let another = format!(
        "list the snapshots with `svcctl backup list {}`, and restore another one with `svcctl recover {slot} \
         --snapshot KEY`",
        machine.machine_id
    );
    let larger = format!("run `svcctl recover {slot} --server-type TYPE` with a type that has a larger disk");
    let without_files = format!(
        "start the machine without the owner's files, which stay in the file backup, with `svcctl recover {slot} \
         --without-files`"
    );
    Some(match failure.message.as_deref().and_then(RestoreFailureCode::find) {
        Some(RestoreFailureCode::NoSpace) => format!("{larger}; or {another}"),
        Some(RestoreFailureCode::NewerPostgres) => format!(
            "run `svcctl recover {slot} --image-version VERSION` with a release that has that PostgreSQL version; \
             or {another}"
        ),
        Some(RestoreFailureCode::StoreUnavailable) => format!(
            "run `svcctl doctor` to see what is wrong with the object store; once the store works, run `svcctl recover \
             {slot}`"
        ),
        Some(RestoreFailureCode::FilesNoSpace) => format!("{larger}; or {without_files}"),
        Some(RestoreFailureCode::Files) => format!(
            "run `svcctl doctor` to see what is wrong with the object store; once the cause is fixed, run `svcctl recover \
             {slot}`; or {without_files}"
        ),
        None => format!(
            "the same snapshot may fail again: run `svcctl pointer show {slot}` to see whether the latest is complete; \
             {another}; if the disk was too small, {larger}"
        ),
    })
}

/// Whether reinstatement failed because the store lists another machine as the slot's holder.
pub fn is_slot_held_by_another(machine: &MachineDetail) -> bool {
    let newest = machine.operations.iter().find(|operation| operation.kind == "reinstate");
    newest.is_some_and(|newest| newest.error_code.as_deref() == Some("database_behind_store"))
}

/// Formats the user and, unless it's the primary one, the slot as command-line arguments.
fn slot_arguments(machine: &MachineDetail) -> String {
    args::slot_arguments(&machine.idp_user_id, &machine.slot)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use svc_wire::registration::RestoreFailureCode;

    use crate::show::machine;
    use crate::show::test_data::{failed_machine, from_json, plain_view};

    #[test]
    fn failed_file_restore_does_not_suggest_other_snapshots() {
        for (code, needs_larger_disk) in
            [(RestoreFailureCode::FilesNoSpace, true), (RestoreFailureCode::Files, false)]
        {
            let mut machine = failed_machine();
            let message = format!(
                "svc-files-restore.service: svc-sync-agent: ({}) no room (code no_space)",
                code.marker()
            );
            machine["failure"] = json!({"cause": "boot_reported", "stage": "restore", "message": message});
            let text = machine::details(&plain_view(), &from_json(machine));
            assert!(text.contains("--without-files`") && !text.contains("--snapshot"), "{text}");
            assert_eq!(text.contains("--server-type TYPE"), needs_larger_disk, "{text}");
        }
    }

    #[test]
    fn failed_reinstatement_advises_recovery() {
        let mut machine = failed_machine();
        machine["failure"]["cause"] = "reinstating".into();
        machine["operations"][0]["kind"] = "reinstate".into();
        machine["operations"][0]["errorCode"] = "database_behind_store".into();
        let text = machine::details(&plain_view(), &from_json(machine));
        assert!(!text.contains("it runs again") && text.contains("--accept-loss"), "{text}");
    }
}

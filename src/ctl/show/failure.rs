//! Why a machine failed, and what can be done about it.

use serde::Deserialize;

use super::machine::Machine;
use super::text;
use crate::ctl::args;
use crate::untrusted_text::one_line;

#[derive(Debug, Deserialize)]
pub struct Failure {
    pub cause: Option<String>,
    pub stage: Option<String>,
    pub message: Option<String>,
}

impl Failure {
    /// `boot_reported at restore: …`.
    pub fn line(&self) -> String {
        let mut line = text(self.cause.as_ref());
        if let Some(stage) = &self.stage {
            line.push_str(&format!(" at {stage}"));
        }
        if let Some(message) = &self.message {
            line.push_str(&format!(": {}", one_line(message)));
        }
        line
    }

    /// Whether its server is being switched on because it has its slot back.
    pub fn is_reinstating(&self) -> bool {
        self.cause.as_deref() == Some("reinstating")
    }

    /// Whether the provider no longer has its server.
    pub fn is_server_gone(&self) -> bool {
        self.cause.as_deref() == Some("server_gone")
    }

    /// What there is to do about it.
    pub fn advice(&self, machine: &Machine) -> String {
        if let Some(advice) = self.restore_advice(machine) {
            return advice;
        }
        let recover = format!("`svcctl recover {}`", slot_arguments(machine));
        match self.cause.as_deref() {
            Some("provider_refused") => {
                format!("check quota, location and server type at the provider, then {recover}")
            }
            Some("provider_unavailable") => {
                format!("`svcctl doctor` says whether the provider answers; once it does, {recover}")
            }
            Some("store_failed") => {
                format!("`svcctl doctor` says what is wrong with the object store; once it works, {recover}")
            }
            Some("fenced") => {
                format!(
                    "a machine with a higher epoch has fenced the slot, as after a restored database: `svcctl fleet` shows the \
                     alarm database_behind_store; once nothing on the other machine is needed, {recover} with --accept-loss"
                )
            }
            Some("internal") => {
                format!("the platform's log has the cause, under the id of its operation; then {recover}")
            }
            Some("resize") => {
                format!("its next healthy heartbeat makes it run again; if none comes, {recover}")
            }
            Some("reinstating") if is_held_by_another(machine) => format!(
                "the store says that another machine holds the slot, which the platform's database does not know (alarm \
                 database_behind_store): {recover} with --accept-loss makes a new machine from the newest snapshot"
            ),
            Some("reinstating") => format!(
                "its server is being switched on: its next healthy heartbeat makes it run; if none comes, {recover}"
            ),
            Some("server_gone") => format!(
                "{recover} replaces it and restores the latest snapshot; where the provider shows its server again, \
                 `svcctl power on {0}` switches it on, or `svcctl resume {0}` while its host is well",
                machine.machine_id
            ),
            Some("operator" | "operation_hung") if machine.registered_at.is_some() => {
                format!(
                    "`svcctl resume {}` where its server runs and its host is well; else {recover} replaces it and \
                 restores the latest snapshot",
                    machine.machine_id
                )
            }
            _ => format!(
                "{recover} replaces it and restores the latest snapshot (one that never ran: `svcctl provision` again)"
            ),
        }
    }

    /// The advice where it never ran, and the machine that it was to replace has the slot again.
    pub fn advice_after_return(&self, machine: &Machine) -> Option<String> {
        let live = machine.copies.as_ref().and_then(|copies| copies.live.as_ref())?;
        let has_returned = machine.replaced_by.as_ref() == Some(&live.machine_id);
        self.restore_advice(machine).filter(|_| has_returned)
    }

    /// What can work where a new machine could not restore the snapshot: the same command again would meet the same one.
    pub fn restore_advice(&self, machine: &Machine) -> Option<String> {
        if self.cause.as_deref() != Some("boot_reported") || self.stage.as_deref() != Some("restore") {
            return None;
        }
        let slot = slot_arguments(machine);
        let another = format!(
            "`svcctl backup list {}` lists the snapshots, `svcctl recover {slot} --snapshot KEY` begins with another one",
            machine.machine_id
        );
        let larger = format!("`svcctl recover {slot} --server-type TYPE` with a larger disk");
        let said = self.message.as_deref().unwrap_or_default();
        Some(if said.contains("bytes are free") {
            format!("{larger}; or {another}")
        } else if said.contains("read into an older one") {
            format!(
                "`svcctl recover {slot} --image-version VERSION` with a release that has that PostgreSQL; or {another}"
            )
        } else if said.contains("the object store") {
            format!(
                "`svcctl doctor` says what is wrong with the object store; once it works, `svcctl recover {slot}`"
            )
        } else {
            format!(
                "the same snapshot may fail again: `svcctl pointer show {slot}` says whether the latest is whole, {another}; \
                 where the disk was too small, {larger}"
            )
        })
    }
}

/// Whether its return was ended because the store names another machine as the slot's.
pub fn is_held_by_another(machine: &Machine) -> bool {
    let newest = machine.operations.iter().find(|operation| operation.kind == "reinstate");
    newest.is_some_and(|newest| newest.error_code.as_deref() == Some("database_behind_store"))
}

/// The user, and the slot where it is not the primary one, as commands take them.
fn slot_arguments(machine: &Machine) -> String {
    args::slot_arguments(&machine.idp_user_id, &machine.slot)
}

#[cfg(test)]
mod tests {
    use crate::ctl::show::machine;
    use crate::ctl::show::tests::{failed, plain, read};

    #[test]
    fn machine_whose_slot_the_store_gives_to_another_is_not_shown_as_coming_back() {
        let mut machine = failed();
        machine["failure"]["cause"] = "reinstating".into();
        machine["operations"][0]["kind"] = "reinstate".into();
        machine["operations"][0]["errorCode"] = "database_behind_store".into();
        let shown = machine::one(&plain(), &read(machine));
        assert!(!shown.contains("being switched on") && shown.contains("--accept-loss"), "{shown}");
    }
}

//! Checks the invariants from the outside: in the database, the provider's state, the store, and the responses to
//! callers. `live` lists the ids of the machines that have a server.

use std::collections::{BTreeMap, BTreeSet};

use super::database_state::{AuditRow, DatabaseState, MachineRow};
use super::ledger::Ledger;
use super::violation::Violation;

/// Earlier observations, for invariants that span several states.
#[derive(Debug, Default)]
pub struct Observations {
    /// Ended machines, with their status when they ended and whether they were retired and deleted.
    ended: BTreeMap<String, (String, bool, bool)>,
    /// The first and the last observed epoch of each machine.
    epochs: BTreeMap<String, (u32, u32)>,
    /// The highest epoch observed in each slot.
    highest: BTreeMap<String, u32>,
}

/// The operations and ended machines that callers knew of before an observation.
pub struct CallerView {
    pub operations: BTreeSet<String>,
    pub ended: BTreeSet<String>,
}

impl CallerView {
    pub fn from_ledger(ledger: &Ledger) -> Self {
        Self { operations: ledger.operations(), ended: ledger.ended_machines() }
    }
}

/// Checks the invariants that hold at every instant.
pub fn check_always(
    database_state: &DatabaseState,
    observations: &mut Observations,
    ledger: &Ledger,
    caller_view: &CallerView,
) -> BTreeSet<Violation> {
    let mut violations = ledger.violations();
    let mut require = |holds: bool, violation| {
        if !holds {
            violations.insert(violation);
        }
    };
    let registrations = ledger.registration_attempts();
    let mut active = BTreeMap::<String, u32>::new();
    for machine in &database_state.machines {
        if machine.is_active() {
            *active.entry(machine.prefix()).or_default() += 1;
        }
        let is_running = machine.is_running();
        require(!is_running || registrations.contains(&machine.machine_id), Violation::RunningUnregistered);
        let needs_operation = machine.is_booting() || (machine.is_active() && machine.status == "resizing");
        require(
            !needs_operation || database_state.has_running_operation(&machine.machine_id),
            Violation::MissingOperation,
        );
        let is_ended = caller_view.ended.contains(&machine.machine_id)
            && !observations.is_reinstated(machine, database_state);
        require(
            observations.record_and_check_ended(machine, database_state)
                && !(is_ended && machine.is_active()),
            Violation::BecameActiveAgain,
        );
    }
    require(active.values().all(|count| *count == 1), Violation::DuplicateActiveMachine);
    require(observations.record_and_check_epochs(database_state), Violation::EpochDidNotIncrease);
    let present: BTreeSet<&str> =
        database_state.operations.iter().map(|operation| operation.operation_id.as_str()).collect();
    require(
        caller_view.operations.iter().all(|id| present.contains(id.as_str())),
        Violation::AcceptedOperationLost,
    );
    violations
}

impl Observations {
    fn record_and_check_ended(&mut self, machine: &MachineRow, database_state: &DatabaseState) -> bool {
        let current = (machine.status.clone(), machine.retired_at.is_some(), machine.deleted_at.is_some());
        // Only a reinstatement, under a higher epoch, makes an ended machine active again. A replaced machine may also
        // be deleted.
        if let Some(ended) = self.ended.get(&machine.machine_id) {
            let is_deleted_too = !machine.is_active() && machine.deleted_at.is_some();
            if *ended == current || is_deleted_too {
                return true;
            }
            // A reinstated machine may already have ended again.
            let is_reinstated = self.is_reinstated(machine, database_state);
            self.ended.remove(&machine.machine_id);
            return is_reinstated;
        }
        if !machine.is_active() {
            self.ended.insert(machine.machine_id.clone(), current);
        }
        true
    }

    /// Returns whether the machine got its slot back: its epoch is higher than when first observed, or than the epoch
    /// of a later machine.
    fn is_reinstated(&self, machine: &MachineRow, database_state: &DatabaseState) -> bool {
        let is_later =
            |other: &&MachineRow| other.prefix() == machine.prefix() && other.machine_id > machine.machine_id;
        self.epochs.get(&machine.machine_id).is_some_and(|(first, _)| machine.epoch > *first)
            || database_state.machines.iter().filter(is_later).any(|other| other.epoch < machine.epoch)
    }

    fn record_and_check_epochs(&mut self, database_state: &DatabaseState) -> bool {
        let mut have_increased = true;
        let mut by_epoch: Vec<&MachineRow> = database_state.machines.iter().collect();
        by_epoch.sort_by_key(|machine| machine.epoch);
        for machine in by_epoch {
            let first = self.epochs.get(&machine.machine_id).map(|(first, _)| *first);
            let is_new = self.epochs.get(&machine.machine_id).is_none_or(|(_, last)| *last != machine.epoch);
            let epochs = (first.unwrap_or(machine.epoch), machine.epoch);
            self.epochs.insert(machine.machine_id.clone(), epochs);
            if !is_new {
                continue;
            }
            let highest = self.highest.entry(machine.prefix()).or_default();
            have_increased &= machine.epoch > *highest;
            *highest = machine.epoch.max(*highest);
        }
        have_increased
    }
}

/// Checks that no server of a new machine exists before its slot's fence. A reinstated machine is exempt: it gets its
/// new epoch first, and writes nothing under it before the fence.
pub fn check_fences(
    database_state: &DatabaseState,
    live: &[String],
    fences: &BTreeMap<String, u32>,
) -> BTreeSet<Violation> {
    let mut violations = BTreeSet::new();
    let new_machines = live
        .iter()
        .filter_map(|id| database_state.machine(id))
        .filter(|machine| machine.registered_at.is_none());
    for machine in new_machines {
        if fences.get(&machine.prefix()).copied().unwrap_or(0) < machine.epoch {
            violations.insert(Violation::ServerCreatedBeforeFence);
        }
    }
    violations
}

/// Checks the additional invariants that hold once the run has settled and no fault remains.
pub fn check_settled(
    database_state: &DatabaseState,
    live: &[String],
    audit: &[AuditRow],
    ledger: &Ledger,
) -> BTreeSet<Violation> {
    let mut violations = BTreeSet::new();
    if database_state.operations.iter().any(|operation| operation.state == "running") {
        violations.insert(Violation::UnfinishedOperation);
    }
    if live.iter().any(|id| is_orphaned(database_state, live, ledger, id)) {
        violations.insert(Violation::OrphanedServer);
    }
    let has_lost_server = |machine: &MachineRow| machine.is_running() && !live.contains(&machine.machine_id);
    if database_state.machines.iter().any(has_lost_server) {
        violations.insert(Violation::RunningWithoutServer);
    }
    if !is_audit_complete(database_state, audit, ledger) {
        violations.insert(Violation::AuditIncomplete);
    }
    violations
}

/// Returns whether deletions are suspended: the restored database lacks a server, so an operator must decide.
pub fn are_deletions_suspended(database_state: &DatabaseState, live: &[String], ledger: &Ledger) -> bool {
    ledger.was_restored() && live.iter().any(|id| database_state.machine(id).is_none())
}

/// Returns whether a machine's server must be deleted.
pub fn is_orphaned(database_state: &DatabaseState, live: &[String], ledger: &Ledger, machine: &str) -> bool {
    if are_deletions_suspended(database_state, live, ledger) {
        return false;
    }
    database_state
        .machine(machine)
        .is_none_or(|machine| !machine.is_active() && !database_state.must_keep_server(machine))
}

/// Returns whether a server that must be deleted still exists, or a deletion is pending.
pub fn has_leftovers(database_state: &DatabaseState, live: &[String], ledger: &Ledger) -> bool {
    let orphans = live.iter().filter(|id| is_orphaned(database_state, live, ledger, id));
    let pending = database_state.machines.iter().filter(|machine| {
        machine.server_deleted_at.is_none() && is_orphaned(database_state, live, ledger, &machine.machine_id)
    });
    orphans.count() + pending.count() > 0
}

/// Returns whether the audit log has a row for each change, and none for a replayed response.
fn is_audit_complete(database_state: &DatabaseState, audit: &[AuditRow], ledger: &Ledger) -> bool {
    let count_rows = |actions: &[&str], matches: &dyn Fn(&AuditRow) -> bool| {
        audit.iter().filter(|row| actions.contains(&row.action.as_str()) && matches(row)).count()
    };
    let has_machine_rows = database_state.machines.iter().all(|machine| {
        let id = &machine.machine_id;
        let is_creation = |row: &AuditRow| {
            row.after.as_ref().is_some_and(|after| after["machineId"].as_str() == Some(id.as_str()))
        };
        let is_target = |row: &AuditRow| row.target == *id;
        let deleted = usize::from(machine.deleted_at.is_some());
        let deletions = count_rows(&["delete", "preview.expired", "delete.predecessor"], &is_target);
        // A deletion may have been undone, either directly or by abandoning its operation.
        let undone = count_rows(&["undelete"], &is_target) + count_rows(&["operation.abandon"], &|_| true);
        count_rows(&["provision", "recover"], &is_creation) == 1
            && (deleted..=deleted + undone).contains(&deletions)
            && count_rows(&["register"], &is_target) == usize::from(machine.registered_at.is_some())
    });
    let resizes = database_state.operations.iter().filter(|operation| operation.kind == "resize");
    let has_resize_rows = count_rows(&["resize"], &|_| true) == resizes.count();
    let is_failed = |machine: &&MachineRow| machine.failure_cause.as_deref() == Some("operator");
    let mut failed = database_state.machines.iter().filter(is_failed);
    let has_failure_rows =
        failed.all(|machine| count_rows(&["fail"], &|row| row.target == machine.machine_id) > 0);
    has_machine_rows && has_resize_rows && has_failure_rows && has_one_row_per_request(audit, ledger)
}

/// Returns whether each request has at most one row, and each accepted subscription exactly one. Requests with the same
/// key count as one.
fn has_one_row_per_request(audit: &[AuditRow], ledger: &Ledger) -> bool {
    let mut groups = BTreeMap::<String, (bool, Vec<String>)>::new();
    for record in ledger.records() {
        let group = record.key.unwrap_or_else(|| record.request_id.clone());
        let (is_accepted, requests) = groups.entry(group).or_default();
        *is_accepted |= record.operation == "subscribe" && record.status == 200;
        requests.push(record.request_id);
    }
    groups.values().all(|(is_accepted, requests)| {
        // A change to another machine in the slot, or to its data, has a separate row.
        let is_separate = |row: &&AuditRow| {
            matches!(row.action.as_str(), "delete.predecessor" | "reinstate" | "last_backup.loss_accepted")
        };
        let request_rows = audit.iter().filter(|row| requests.contains(&row.request_id));
        let rows = request_rows.filter(|row| !is_separate(row)).count();
        if *is_accepted { rows == 1 } else { rows <= 1 }
    })
}

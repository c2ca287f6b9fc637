//! Checks the lifecycle's invariants, and returns the violations.

use std::collections::BTreeSet;

use super::{LifecycleModel, MachineRow};
use crate::state::State;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Violation {
    /// A machine has two servers.
    DuplicateServer,
    /// A slot has two active machines.
    DuplicateActiveMachine,
    /// A connection is open to a machine that is not running.
    RoutedWhileNotRunning,
    /// A machine whose host has never registered is running.
    RunningUnregistered,
    /// A machine is running while its server is off.
    RunningWhileOff,
    /// A machine holds its slot while its server is off, although no power-off was requested and no operator abandoned
    /// the power-on.
    LeftOff,
    /// A running machine's server type differs from the one in its row.
    WrongType,
    EpochDidNotIncrease,
    /// A machine became active again without a reinstatement event, or while a later registered machine has a server.
    InvalidReinstatement,
    /// An acknowledged row is on no server and in no snapshot, and no operator accepted the loss.
    LostRows,
    /// A replaced machine's server was deleted, although no later registered machine has a server, and no later machine
    /// was deleted.
    LastServerRemoved,
    /// A machine that has never served traffic holds the slot, although the machine with the newest data still has its
    /// server.
    NotReinstated,
    /// A machine that has never registered has a server, but the slot's fence is below its epoch.
    ServerBeforeFence,
    /// A host moved the pointer after a later machine's host had moved it.
    PointerMovedByReplacedMachine,
    /// A machine's state requires an operation, but none is open.
    MissingOperation,
    /// An operation is still open after the model has settled.
    UnfinishedOperation,
    /// A server that no longer needs to be kept still exists after reconciliation.
    Orphan,
}

/// Checks the invariants that hold after every action.
pub fn check_always(model: &LifecycleModel) -> BTreeSet<Violation> {
    let mut violations = model.transition_violations.clone();
    for (id, row) in model.machines.iter().enumerate() {
        let servers = model.cloud.servers.iter().filter(|server| server.machine == id).count();
        let state = &row.machine.state;
        let is_running = matches!(state, State::Running { .. });
        let needs_operation =
            matches!(state, State::Provisioning | State::Recovering | State::Resizing { .. });
        let has_open_operation =
            model.operations.iter().any(|operation| operation.machine == id && operation.outcome.is_none());
        let mut require = |holds: bool, violation| {
            if !holds {
                violations.insert(violation);
            }
        };
        require(servers <= 1, Violation::DuplicateServer);
        require(
            servers == 0 || row.has_registered || model.pointers[row.slot].fence_epoch >= row.machine.epoch.0,
            Violation::ServerBeforeFence,
        );
        require(is_running || row.connections == 0, Violation::RoutedWhileNotRunning);
        require(!is_running || row.has_registered, Violation::RunningUnregistered);
        require(!needs_operation || has_open_operation, Violation::MissingOperation);
        if let State::Running { server_type } = state
            && let Some(actual_type) = model.server_type(id)
        {
            require(model.is_on(id), Violation::RunningWhileOff);
            require(actual_type == *server_type, Violation::WrongType);
        }
    }
    for slot in 0..model.pointers.len() {
        if !model.missing_rows(slot).is_empty() {
            violations.insert(Violation::LostRows);
        }
        let active =
            model.machines.iter().filter(|row| row.slot == slot && row.machine.state.is_active()).count();
        if active > 1 {
            violations.insert(Violation::DuplicateActiveMachine);
        }
    }
    violations
}

/// Checks the invariants in [`check_always`], and those that hold only after all operations have ended and the
/// reconciler has run.
pub fn check_settled(model: &LifecycleModel) -> BTreeSet<Violation> {
    let mut violations = check_always(model);
    if model.operations.iter().any(|operation| operation.outcome.is_none()) {
        violations.insert(Violation::UnfinishedOperation);
    }
    if model.cloud.servers.iter().any(|server| model.is_removable(server.machine)) {
        violations.insert(Violation::Orphan);
    }
    let has_server = |id: usize| !model.machines[id].is_server_known_gone();
    for (id, row) in model.machines.iter().enumerate() {
        let is_off = row.machine.state.is_active() && model.server_type(id).is_some() && !model.is_on(id);
        if is_off && !row.is_power_off_requested && !row.may_stay_off {
            violations.insert(Violation::LeftOff);
        }
        let has_never_served = matches!(row.machine.state, State::Failed { .. }) && !row.has_registered;
        let is_retired = |row: &MachineRow| matches!(row.machine.state, State::Retired { .. });
        // A retired machine without a server and without a backup does not count.
        let is_candidate = |id: &usize| {
            !is_retired(&model.machines[*id]) || model.machines[*id].has_backed_up || has_server(*id)
        };
        let newest = model.list_registered_before(id).into_iter().find(is_candidate);
        if has_never_served
            && newest.is_some_and(|newest| has_server(newest) && is_retired(&model.machines[newest]))
        {
            violations.insert(Violation::NotReinstated);
        }
    }
    violations
}

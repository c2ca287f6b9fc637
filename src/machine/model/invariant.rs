//! Checks the invariants of the lifecycle in a world, and returns the violations.

use std::collections::BTreeSet;

use super::{Row, World};
use crate::state::State;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Violation {
    TwoServersOfOneMachine,
    TwoActiveMachinesOfOneSlot,
    /// A connection is open to a machine that is not running.
    RoutedWhileNotRunning,
    /// A machine whose host never registered is running.
    RunningUnregistered,
    /// A machine is running while its server is off.
    RunsSwitchedOff,
    /// A machine holds its slot without an open operation while its server is off.
    LeftSwitchedOff,
    /// A running machine's server has another type than its row.
    WrongType,
    EpochDidNotGrow,
    /// A machine that left its slot holds it again, without a reinstatement or although a later registered machine has
    /// a server.
    InvalidReturn,
    /// An acknowledged row is on no server and in no snapshot, and no operator accepted the loss.
    LostRows,
    /// A replaced machine's server was deleted, and no later machine that has served has a server.
    LastServerRemoved,
    /// A machine that never served holds the slot, although the one with the newest data still has its server.
    NotReinstated,
    /// A machine that never registered has a server, but the slot's fence is below its epoch.
    ServerBeforeFence,
    /// A replaced machine moved the pointer.
    PointerWentBack,
    /// A state waits for an operation, but none is open.
    Stuck,
    OperationNeverEnds,
    /// A server that is no longer kept still exists after reconciliation.
    Orphan,
}

/// Checks the invariants that hold after every action.
pub fn check_always(world: &World) -> BTreeSet<Violation> {
    let mut found = world.transition_violations.clone();
    for (id, row) in world.rows.iter().enumerate() {
        let servers = world.cloud.servers.iter().filter(|server| server.machine == id).count();
        let state = &row.machine.state;
        let running = matches!(state, State::Running { .. });
        let waits = matches!(state, State::Provisioning | State::Recovering | State::Resizing { .. });
        let in_progress =
            world.operations.iter().any(|operation| operation.machine == id && operation.ending.is_none());
        let mut require = |holds: bool, violation| {
            if !holds {
                found.insert(violation);
            }
        };
        require(servers <= 1, Violation::TwoServersOfOneMachine);
        require(
            servers == 0 || row.registered || world.pointers[row.slot].fence >= row.machine.epoch.0,
            Violation::ServerBeforeFence,
        );
        require(running || row.connections == 0, Violation::RoutedWhileNotRunning);
        require(!running || row.registered, Violation::RunningUnregistered);
        require(!waits || in_progress, Violation::Stuck);
        if let State::Running { server_type } = state
            && let Some(actual_type) = world.server_type(id)
        {
            require(world.is_on(id), Violation::RunsSwitchedOff);
            require(actual_type == *server_type, Violation::WrongType);
        }
    }
    for slot in 0..world.pointers.len() {
        if !world.missing_rows(slot).is_empty() {
            found.insert(Violation::LostRows);
        }
        let active =
            world.rows.iter().filter(|row| row.slot == slot && row.machine.state.is_active()).count();
        if active > 1 {
            found.insert(Violation::TwoActiveMachinesOfOneSlot);
        }
    }
    found
}

/// Checks these, and the invariants that hold only after all operations have ended and the reconciler has run.
pub fn check_settled(world: &World) -> BTreeSet<Violation> {
    let mut found = check_always(world);
    if world.operations.iter().any(|operation| operation.ending.is_none()) {
        found.insert(Violation::OperationNeverEnds);
    }
    if world.cloud.servers.iter().any(|server| world.is_removable(server.machine)) {
        found.insert(Violation::Orphan);
    }
    let has_server = |id: usize| !world.rows[id].is_server_known_gone();
    for (id, row) in world.rows.iter().enumerate() {
        let is_off = row.machine.state.is_active() && world.server_type(id).is_some() && !world.is_on(id);
        if is_off && !row.power_off_ordered && !row.may_stay_off {
            found.insert(Violation::LeftSwitchedOff);
        }
        let never_served = matches!(row.machine.state, State::Failed { .. }) && !row.registered;
        let is_retired = |row: &Row| matches!(row.machine.state, State::Retired { .. });
        // A retired machine without a server and without a backup does not count.
        let counts =
            |one: &usize| !is_retired(&world.rows[*one]) || world.rows[*one].backed_up || has_server(*one);
        let newest = world.registered_before(id).into_iter().find(counts);
        if never_served && newest.is_some_and(|one| has_server(one) && is_retired(&world.rows[one])) {
            found.insert(Violation::NotReinstated);
        }
    }
    found
}

//! The invariants of the lifecycle, as a checker that looks at a world and says which are broken.

use std::collections::BTreeSet;

use super::{Row, World};
use crate::machine::state::State;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Violation {
    TwoServersOfOneMachine,
    TwoActiveMachinesOfOneSlot,
    /// A connection is open to a machine that is not running.
    RoutedWhileNotRunning,
    /// A machine runs whose host never registered.
    RunningUnregistered,
    /// A machine runs, and its server is switched off.
    RunsSwitchedOff,
    /// A machine holds its slot, nothing is under way, and its server is switched off.
    LeftSwitchedOff,
    /// A machine runs, and its server has another type than its row says.
    WrongType,
    EpochDidNotGrow,
    /// A machine that left its slot holds it again, and was not reinstated, or a later one has served.
    CameBack,
    /// An acknowledged row is on no server and in no snapshot, and no operator accepted that.
    LostRows,
    /// The server of a replaced machine was deleted, and no later machine of the slot that served has one.
    LastServerRemoved,
    /// A machine that never served holds the slot, and one whose data is the newest still has its server.
    NotReinstated,
    /// A machine has a server, and the slot's fence is below its epoch.
    ServerBeforeFence,
    /// A replaced machine moved the pointer.
    PointerWentBack,
    /// A state that waits for an operation, and none is under way.
    Stuck,
    OperationNeverEnds,
    /// Nothing is under way any more, and there is a server of a machine that was to go.
    Orphan,
}

/// What must hold after every action.
pub fn always(world: &World) -> BTreeSet<Violation> {
    let mut found = world.seen.clone();
    for (id, row) in world.rows.iter().enumerate() {
        let servers = world.cloud.servers.iter().filter(|server| server.machine == id).count();
        let state = &row.machine.state;
        let running = matches!(state, State::Running { .. });
        let waits = matches!(state, State::Provisioning | State::Recovering | State::Resizing { .. });
        let under_way =
            world.operations.iter().any(|operation| operation.machine == id && operation.ending.is_none());
        let mut hold = |holds: bool, violation| {
            if !holds {
                found.insert(violation);
            }
        };
        hold(servers <= 1, Violation::TwoServersOfOneMachine);
        hold(
            servers == 0 || row.registered || world.pointers[row.slot].fence >= row.machine.epoch.0,
            Violation::ServerBeforeFence,
        );
        hold(running || row.connections == 0, Violation::RoutedWhileNotRunning);
        hold(!running || row.registered, Violation::RunningUnregistered);
        hold(!waits || under_way, Violation::Stuck);
        if let State::Running { server_type } = state
            && let Some(there) = world.server_type(id)
        {
            hold(world.is_on(id), Violation::RunsSwitchedOff);
            hold(there == *server_type, Violation::WrongType);
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

/// What must hold besides, once the operations were given all the time they need and the provider was reconciled.
pub fn settled(world: &World) -> BTreeSet<Violation> {
    let mut found = always(world);
    if world.operations.iter().any(|operation| operation.ending.is_none()) {
        found.insert(Violation::OperationNeverEnds);
    }
    if world.cloud.servers.iter().any(|server| world.is_removable(server.machine)) {
        found.insert(Violation::Orphan);
    }
    let has_server = |id: usize| !world.rows[id].is_server_known_gone();
    for (id, row) in world.rows.iter().enumerate() {
        let left_off = row.machine.state.is_active() && world.server_type(id).is_some() && !world.is_on(id);
        if left_off && !row.power_off_ordered && !row.may_stay_off {
            found.insert(Violation::LeftSwitchedOff);
        }
        let gave_up = matches!(row.machine.state, State::Failed { .. }) && !row.registered;
        let is_retired = |row: &Row| matches!(row.machine.state, State::Retired { .. });
        // A machine that left nothing behind is as if it had never been.
        let left_something =
            |one: &usize| !is_retired(&world.rows[*one]) || world.rows[*one].backed_up || has_server(*one);
        let newest = world.registered_before(id).into_iter().find(left_something);
        if gave_up && newest.is_some_and(|one| has_server(one) && is_retired(&world.rows[one])) {
            found.insert(Violation::NotReinstated);
        }
    }
    found
}

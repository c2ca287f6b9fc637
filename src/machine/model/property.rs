//! The invariants hold in every random history, and a broken rule is detected.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::action::{Action, SLOTS, actions};
use super::invariant::{Violation, check_always, check_settled};
use super::{Rules, World};
use crate::event::{Effect, Event};
use crate::state::{Machine, State, Status};
use crate::transition::{Outcome, Refusal, transition};

const SOUND_RULES: Rules = Rules {
    transition,
    unique_names: true,
    marks_unsaved: true,
    keeps_predecessors: true,
    stops_writers: true,
    reinstates_older: true,
    respects_snapshots: true,
    distrusts_lost_successors: true,
    searches_lost_servers: true,
};

/// Enough attempts for the longest operation, which has five steps, after a deletion.
const MAX_ATTEMPTS: usize = 10;

/// Runs a history on a new world. The error contains the step and the violations.
fn run_history(rules: Rules, history: &[Action]) -> Result<(), (usize, BTreeSet<Violation>)> {
    let mut world = World::new(rules, SLOTS);
    for (step, action) in history.iter().enumerate() {
        world.apply_action(action);
        expect_none(step, check_always(&world))?;
    }
    world.settle(MAX_ATTEMPTS);
    expect_none(history.len(), check_settled(&world))
}

fn expect_none(step: usize, found: BTreeSet<Violation>) -> Result<(), (usize, BTreeSet<Violation>)> {
    if found.is_empty() { Ok(()) } else { Err((step, found)) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_history_keeps_the_invariants(history in actions()) {
        prop_assert_eq!(run_history(SOUND_RULES, &history), Ok(()));
    }
}

#[test]
#[ignore = "long: a million histories"]
fn long_million_histories_keep_the_invariants() {
    let config = ProptestConfig { cases: 1_000_000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    let result = runner.run(&actions(), |history| {
        prop_assert_eq!(run_history(SOUND_RULES, &history), Ok(()));
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Violations that random histories find under these rules. Stops at `violation`, or after 2000 histories.
fn violations_under(rules: Rules, violation: Violation) -> BTreeSet<Violation> {
    let mut runner = TestRunner::deterministic();
    let mut found = BTreeSet::new();
    for _ in 0..2000 {
        let history = actions().new_tree(&mut runner).expect("no action is filtered out").current();
        found.extend(run_history(rules, &history).err().map(|(_, found)| found).unwrap_or_default());
        if found.contains(&violation) {
            break;
        }
    }
    found
}

fn assert_detects(violation: Violation, broken: fn(&Machine, &Event) -> Result<Outcome, Refusal>) {
    let found = violations_under(Rules { transition: broken, ..SOUND_RULES }, violation);
    assert!(found.contains(&violation), "{violation:?} was not detected, only {found:?}");
}

/// The result of the sound transition, with changed effects.
fn change_effects(
    machine: &Machine,
    event: &Event,
    change: impl Fn(Effect) -> Option<Effect>,
) -> Result<Outcome, Refusal> {
    Ok(match transition(machine, event)? {
        Outcome::Moved { next, effects } => {
            Outcome::Moved { next, effects: effects.into_iter().filter_map(change).collect() }
        }
        Outcome::Unchanged => Outcome::Unchanged,
    })
}

#[test]
fn detects_second_server_of_machine() {
    let violation = Violation::TwoServersOfOneMachine;
    let found = violations_under(Rules { unique_names: false, ..SOUND_RULES }, violation);
    assert!(found.contains(&violation), "{found:?}");
}

#[test]
fn detects_replaced_machine_that_keeps_slot() {
    assert_detects(Violation::TwoActiveMachinesOfOneSlot, |machine, event| {
        match transition(machine, event)? {
            Outcome::Moved { next: State::Retired { .. }, effects } => {
                Ok(Outcome::Moved { next: machine.state.clone(), effects })
            }
            other => Ok(other),
        }
    });
}

#[test]
fn detects_connection_to_stopped_machine() {
    assert_detects(Violation::RoutedWhileNotRunning, |machine, event| {
        change_effects(machine, event, |effect| (effect != Effect::CloseConnections).then_some(effect))
    });
}

#[test]
fn detects_running_without_registration() {
    assert_detects(Violation::RunningUnregistered, |machine, event| match (event, &machine.state) {
        (Event::HealthyHeartbeat { server_type, .. }, State::Provisioning) => {
            Ok(Outcome::Moved { next: State::Running { server_type: server_type.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn detects_replacement_with_same_epoch() {
    assert_detects(Violation::EpochDidNotGrow, |machine, event| {
        change_effects(machine, event, |effect| match effect {
            Effect::Replace { status, restore, .. } => {
                Some(Effect::Replace { status, restore, epoch: machine.epoch })
            }
            other => Some(other),
        })
    });
}

#[test]
fn detects_return_of_replaced_machine() {
    assert_detects(Violation::InvalidReturn, |machine, event| match (event, &machine.state) {
        (Event::HealthyHeartbeat { server_type, .. }, State::Retired { .. }) => {
            Ok(Outcome::Moved { next: State::Running { server_type: server_type.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn detects_wait_without_operation() {
    assert_detects(Violation::Stuck, |machine, event| {
        change_effects(machine, event, |effect| {
            (!matches!(effect, Effect::ChangeType { .. })).then_some(effect)
        })
    });
}

#[test]
fn detects_reverted_resize_with_new_type() {
    assert_detects(Violation::WrongType, |machine, event| match (event, &machine.state) {
        (Event::ResizeReverted, State::Resizing { to, .. }) => {
            Ok(Outcome::Moved { next: State::Running { server_type: to.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn detects_failed_resize_that_claims_to_run() {
    assert_detects(Violation::RunsSwitchedOff, |machine, event| match (event, &machine.state) {
        (Event::ResizeFailed, State::Resizing { from, .. }) => {
            Ok(Outcome::Moved { next: State::Running { server_type: from.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn detects_cancelled_resize_that_leaves_server_off() {
    assert_detects(Violation::LeftSwitchedOff, |machine, event| {
        change_effects(machine, event, |effect| (effect != Effect::SwitchOn).then_some(effect))
    });
}

#[test]
fn detects_operation_that_never_ends() {
    assert_detects(Violation::OperationNeverEnds, |machine, event| match event {
        Event::RegistrationExpired => Ok(Outcome::Unchanged),
        _ => transition(machine, event),
    });
}

/// The machine left its slot without an operation that removes its server.
#[test]
fn detects_server_that_outlives_machine() {
    let mut world = World::new(SOUND_RULES, 1);
    world.provision(0);
    world.cloud.create(0);
    world.pointers[0].fence = 1;
    world.rows[0].machine.state = State::Deleted { was: Box::new(State::Provisioning) };
    world.operations.clear();
    assert!(check_settled(&world).contains(&Violation::Orphan));
}

#[test]
fn detects_loss_of_unsaved_rows() {
    let found = violations_under(Rules { marks_unsaved: false, ..SOUND_RULES }, Violation::LostRows);
    assert!(found.contains(&Violation::LostRows), "{found:?}");
}

#[test]
fn detects_early_deletion_of_predecessor() {
    let found = violations_under(Rules { keeps_predecessors: false, ..SOUND_RULES }, Violation::LostRows);
    assert!(found.contains(&Violation::LostRows), "{found:?}");
}

#[test]
fn detects_deletion_of_predecessor_of_lost_successor() {
    let violation = Violation::LastServerRemoved;
    let found = violations_under(Rules { distrusts_lost_successors: false, ..SOUND_RULES }, violation);
    assert!(found.contains(&violation), "{found:?}");
}

#[test]
fn detects_deletion_of_server_reported_missing() {
    let found = violations_under(Rules { searches_lost_servers: false, ..SOUND_RULES }, Violation::LostRows);
    assert!(found.contains(&Violation::LostRows), "{found:?}");
}

#[test]
fn detects_writes_after_final_backup() {
    let found = violations_under(Rules { stops_writers: false, ..SOUND_RULES }, Violation::LostRows);
    assert!(found.contains(&Violation::LostRows), "{found:?}");
}

#[test]
fn detects_slot_not_returned() {
    assert_detects(Violation::NotReinstated, |machine, event| {
        change_effects(machine, event, |effect| (effect != Effect::ReinstatePredecessor).then_some(effect))
    });
}

#[test]
fn detects_slot_not_returned_to_older_machine() {
    let found = violations_under(Rules { reinstates_older: false, ..SOUND_RULES }, Violation::NotReinstated);
    assert!(found.contains(&Violation::NotReinstated), "{found:?}");
}

#[test]
fn detects_older_machine_over_newer_snapshot() {
    // Random histories rarely get this far: the second machine is lost after a backup, and the third does not start.
    let loses_rows = |rules: Rules| {
        let mut world = World::new(rules, 1);
        let (recover, serve) = (Action::Recover { slot: 0 }, Action::Serve { slot: 0 });
        for action in [&Action::Provision { slot: 0 }, &serve, &recover, &serve] {
            world.apply_action(action);
        }
        world.back_up(1);
        world.lose_server(1);
        world.apply(1, &Event::ServerGone);
        world.apply_action(&recover);
        world.apply(2, &Event::OperationAbandoned);
        world.apply_action(&serve);
        world.back_up(0);
        check_always(&world).contains(&Violation::LostRows)
    };
    assert!(loses_rows(Rules { respects_snapshots: false, ..SOUND_RULES }));
    assert!(!loses_rows(SOUND_RULES));
}

/// The model's own operations cannot violate these two invariants, so the world is built by hand.
#[test]
fn detects_server_before_fence_and_pointer_rollback() {
    let mut world = World::new(SOUND_RULES, 1);
    world.provision(0);
    world.cloud.create(0);
    assert!(check_always(&world).contains(&Violation::ServerBeforeFence));

    let mut world = World::new(SOUND_RULES, 1);
    world.provision(0);
    world.rows[0].booted = true;
    world.rows[0].registered = true;
    world.pointers[0] = super::Pointer { fence: 1, writer: 2, ..super::Pointer::default() };
    world.back_up(0);
    assert!(check_always(&world).contains(&Violation::PointerWentBack));
}

/// The property would be vacuous if the histories stayed shallow.
#[test]
fn histories_reach_every_state() {
    let mut runner = TestRunner::deterministic();
    let mut reached = BTreeSet::new();
    for _ in 0..300 {
        let mut world = World::new(SOUND_RULES, SLOTS);
        for action in actions().new_tree(&mut runner).expect("no action is filtered out").current() {
            world.apply_action(&action);
            for row in &world.rows {
                let name = row.machine.state.status().map_or("ended", Status::as_str);
                reached.insert((name, row.machine.epoch.0.min(2)));
            }
        }
    }
    for &status in Status::ALL {
        assert!(reached.contains(&(status.as_str(), 2)), "no replacement was {status}: {reached:?}");
    }
    assert!(reached.contains(&("ended", 2)), "{reached:?}");
}

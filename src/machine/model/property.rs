//! The invariants hold in every random history; and each is noticed when a rule is broken on purpose.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::action::{Action, SLOTS, actions};
use super::invariant::{Violation, always, settled};
use super::{Rules, World};
use crate::machine::event::{Effect, Event};
use crate::machine::state::{Machine, State, Status};
use crate::machine::transition::{Outcome, Refusal, transition};

const SOUND: Rules = Rules {
    transition,
    unique_names: true,
    marks_unsaved: true,
    keeps_predecessors: true,
    stops_writers: true,
    reinstates_older: true,
    respects_snapshots: true,
    distrusts_lost_successors: true,
    looks_for_lost_servers: true,
};

/// Enough tries for the longest operation, which has five steps, behind a deletion.
const TRIES: usize = 10;

/// Runs a history on a new world and says what was broken, and where.
fn run(rules: Rules, history: &[Action]) -> Result<(), (usize, BTreeSet<Violation>)> {
    let mut world = World::new(rules, SLOTS);
    for (step, action) in history.iter().enumerate() {
        world.act(action);
        none(step, always(&world))?;
    }
    world.settle(TRIES);
    none(history.len(), settled(&world))
}

fn none(step: usize, found: BTreeSet<Violation>) -> Result<(), (usize, BTreeSet<Violation>)> {
    if found.is_empty() { Ok(()) } else { Err((step, found)) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_history_keeps_the_invariants(history in actions()) {
        prop_assert_eq!(run(SOUND, &history), Ok(()));
    }
}

#[test]
#[ignore = "long: a million histories"]
fn long_million_histories_keep_the_invariants() {
    let config = ProptestConfig { cases: 1_000_000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    let held = runner.run(&actions(), |history| {
        prop_assert_eq!(run(SOUND, &history), Ok(()));
        Ok(())
    });
    if let Err(broken) = held {
        panic!("{broken}");
    }
}

/// What random histories find broken under these rules, until `violation` is among it; at most two thousand.
fn found_under(rules: Rules, violation: Violation) -> BTreeSet<Violation> {
    let mut runner = TestRunner::deterministic();
    let mut found = BTreeSet::new();
    for _ in 0..2000 {
        let history = actions().new_tree(&mut runner).expect("no filter rejects").current();
        found.extend(run(rules, &history).err().map(|(_, found)| found).unwrap_or_default());
        if found.contains(&violation) {
            break;
        }
    }
    found
}

fn assert_notices(violation: Violation, broken: fn(&Machine, &Event) -> Result<Outcome, Refusal>) {
    let found = found_under(Rules { transition: broken, ..SOUND }, violation);
    assert!(found.contains(&violation), "{violation:?} was not noticed, only {found:?}");
}

/// The sound answer with its effects changed.
fn with_effects(
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
fn a_second_server_of_a_machine_is_noticed() {
    let violation = Violation::TwoServersOfOneMachine;
    let found = found_under(Rules { unique_names: false, ..SOUND }, violation);
    assert!(found.contains(&violation), "{found:?}");
}

#[test]
fn a_replaced_machine_that_keeps_its_slot_is_noticed() {
    assert_notices(Violation::TwoActiveMachinesOfOneSlot, |machine, event| {
        match transition(machine, event)? {
            Outcome::Moved { next: State::Retired { .. }, effects } => {
                Ok(Outcome::Moved { next: machine.state.clone(), effects })
            }
            other => Ok(other),
        }
    });
}

#[test]
fn a_connection_that_outlives_running_is_noticed() {
    assert_notices(Violation::RoutedWhileNotRunning, |machine, event| {
        with_effects(machine, event, |effect| (effect != Effect::CloseConnections).then_some(effect))
    });
}

#[test]
fn running_without_a_registration_is_noticed() {
    assert_notices(Violation::RunningUnregistered, |machine, event| match (event, &machine.state) {
        (Event::HealthyHeartbeat { server_type, .. }, State::Provisioning) => {
            Ok(Outcome::Moved { next: State::Running { server_type: server_type.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn a_replacement_with_the_same_epoch_is_noticed() {
    assert_notices(Violation::EpochDidNotGrow, |machine, event| {
        with_effects(machine, event, |effect| match effect {
            Effect::Replace { status, restore, .. } => {
                Some(Effect::Replace { status, restore, epoch: machine.epoch })
            }
            other => Some(other),
        })
    });
}

#[test]
fn a_replaced_machine_that_comes_back_is_noticed() {
    assert_notices(Violation::CameBack, |machine, event| match (event, &machine.state) {
        (Event::HealthyHeartbeat { server_type, .. }, State::Retired { .. }) => {
            Ok(Outcome::Moved { next: State::Running { server_type: server_type.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn a_machine_that_waits_for_nothing_is_noticed() {
    assert_notices(Violation::Stuck, |machine, event| {
        with_effects(machine, event, |effect| {
            (!matches!(effect, Effect::ChangeType { .. })).then_some(effect)
        })
    });
}

#[test]
fn a_reverted_resize_that_says_the_new_type_is_noticed() {
    assert_notices(Violation::WrongType, |machine, event| match (event, &machine.state) {
        (Event::ResizeReverted, State::Resizing { to, .. }) => {
            Ok(Outcome::Moved { next: State::Running { server_type: to.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn a_failed_resize_that_says_it_runs_is_noticed() {
    assert_notices(Violation::RunsSwitchedOff, |machine, event| match (event, &machine.state) {
        (Event::ResizeFailed, State::Resizing { from, .. }) => {
            Ok(Outcome::Moved { next: State::Running { server_type: from.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn cancelled_resize_that_leaves_server_off_is_noticed() {
    assert_notices(Violation::LeftSwitchedOff, |machine, event| {
        with_effects(machine, event, |effect| (effect != Effect::SwitchOn).then_some(effect))
    });
}

#[test]
fn an_operation_that_never_ends_is_noticed() {
    assert_notices(Violation::OperationNeverEnds, |machine, event| match event {
        Event::RegistrationExpired => Ok(Outcome::Unchanged),
        _ => transition(machine, event),
    });
}

/// A server whose machine left its slot without a deletion to wait for is removed by nobody.
#[test]
fn a_server_that_outlives_its_machine_is_noticed() {
    let mut world = World::new(SOUND, 1);
    world.begin(0);
    world.cloud.create(0);
    world.pointers[0].fence = 1;
    world.rows[0].machine.state = State::Deleted { was: Box::new(State::Provisioning) };
    world.operations.clear();
    assert!(settled(&world).contains(&Violation::Orphan));
}

#[test]
fn loss_of_unsaved_rows_is_noticed() {
    let found = found_under(Rules { marks_unsaved: false, ..SOUND }, Violation::LostRows);
    assert!(found.contains(&Violation::LostRows), "{found:?}");
}

#[test]
fn deletion_of_predecessor_before_successor_serves_is_noticed() {
    let found = found_under(Rules { keeps_predecessors: false, ..SOUND }, Violation::LostRows);
    assert!(found.contains(&Violation::LostRows), "{found:?}");
}

#[test]
fn deletion_of_predecessor_of_lost_successor_is_noticed() {
    let violation = Violation::LastServerRemoved;
    let found = found_under(Rules { distrusts_lost_successors: false, ..SOUND }, violation);
    assert!(found.contains(&violation), "{found:?}");
}

#[test]
fn deletion_of_server_that_was_believed_gone_is_noticed() {
    let found = found_under(Rules { looks_for_lost_servers: false, ..SOUND }, Violation::LostRows);
    assert!(found.contains(&Violation::LostRows), "{found:?}");
}

#[test]
fn writes_after_the_last_backup_are_noticed() {
    let found = found_under(Rules { stops_writers: false, ..SOUND }, Violation::LostRows);
    assert!(found.contains(&Violation::LostRows), "{found:?}");
}

#[test]
fn slot_that_is_not_given_back_is_noticed() {
    assert_notices(Violation::NotReinstated, |machine, event| {
        with_effects(machine, event, |effect| (effect != Effect::ReinstatePredecessor).then_some(effect))
    });
}

#[test]
fn slot_that_is_not_given_back_to_an_older_machine_is_noticed() {
    let found = found_under(Rules { reinstates_older: false, ..SOUND }, Violation::NotReinstated);
    assert!(found.contains(&Violation::NotReinstated), "{found:?}");
}

#[test]
fn older_machine_in_the_place_of_a_newer_snapshot_is_noticed() {
    // Random histories seldom get this far: the second machine is lost after a backup, and the third does not start.
    let loses_rows = |rules: Rules| {
        let mut world = World::new(rules, 1);
        let (recover, serve) = (Action::Recover { slot: 0 }, Action::Serve { slot: 0 });
        for action in [&Action::Provision { slot: 0 }, &serve, &recover, &serve] {
            world.act(action);
        }
        world.back_up(1);
        world.lose(1);
        world.apply(1, &Event::ServerGone);
        world.act(&recover);
        world.apply(2, &Event::OperationAbandoned);
        world.act(&serve);
        world.back_up(0);
        always(&world).contains(&Violation::LostRows)
    };
    assert!(loses_rows(Rules { respects_snapshots: false, ..SOUND }));
    assert!(!loses_rows(SOUND));
}

/// These two are the executor's to keep, so the world is built wrong by hand.
#[test]
fn a_server_before_the_fence_and_a_pointer_that_goes_back_are_noticed() {
    let mut world = World::new(SOUND, 1);
    world.begin(0);
    world.cloud.create(0);
    assert!(always(&world).contains(&Violation::ServerBeforeFence));

    let mut world = World::new(SOUND, 1);
    world.begin(0);
    world.rows[0].booted = true;
    world.rows[0].registered = true;
    world.pointers[0] = super::Pointer { fence: 1, writer: 2, ..super::Pointer::default() };
    world.back_up(0);
    assert!(always(&world).contains(&Violation::PointerWentBack));
}

/// The property would hold of nothing if the histories stayed shallow.
#[test]
fn the_histories_reach_every_state() {
    let mut runner = TestRunner::deterministic();
    let mut reached = BTreeSet::new();
    for _ in 0..300 {
        let mut world = World::new(SOUND, SLOTS);
        for action in actions().new_tree(&mut runner).expect("no filter rejects").current() {
            world.act(&action);
            for row in &world.rows {
                let name = row.machine.state.status().map_or("ended", Status::as_str);
                reached.insert((name, row.machine.epoch.0.min(2)));
            }
        }
    }
    for status in Status::ALL {
        assert!(reached.contains(&(status.as_str(), 2)), "no replacement was {status}: {reached:?}");
    }
    assert!(reached.contains(&("ended", 2)), "{reached:?}");
}

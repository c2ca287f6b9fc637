//! Checks that the invariants hold in every random history, and that they detect each broken rule.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::action::{Action, SLOT_COUNT, actions};
use super::invariant::{Violation, check_always, check_settled};
use super::{LifecycleModel, Rules};
use crate::event::{Effect, Event};
use crate::state::{Machine, State, Status};
use crate::transition::{Outcome, Refusal, transition};

const SOUND_RULES: Rules = Rules {
    transition,
    has_unique_names: true,
    marks_unsaved: true,
    keeps_predecessors: true,
    stops_writers: true,
    reinstates_older: true,
    respects_snapshots: true,
    keeps_if_successor_lost: true,
    rechecks_missing_servers: true,
};

/// Maximum number of steps of each operation. It must suffice for the longest operation, which has five steps, and for
/// the deletion that it may wait for, which has two.
const MAX_STEPS: usize = 10;

/// Runs a history on a new model. The error contains the violations and the index of the action that caused them, or
/// the history's length if settling the model caused them.
fn run_history(rules: Rules, history: &[Action]) -> Result<(), (usize, BTreeSet<Violation>)> {
    let mut model = LifecycleModel::new(rules, SLOT_COUNT);
    for (action_index, action) in history.iter().enumerate() {
        model.apply_action(action);
        ensure_no_violations(action_index, check_always(&model))?;
    }
    model.settle(MAX_STEPS);
    ensure_no_violations(history.len(), check_settled(&model))
}

fn ensure_no_violations(
    action_index: usize,
    violations: BTreeSet<Violation>,
) -> Result<(), (usize, BTreeSet<Violation>)> {
    if violations.is_empty() { Ok(()) } else { Err((action_index, violations)) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_history_preserves_invariants(history in actions()) {
        prop_assert_eq!(run_history(SOUND_RULES, &history), Ok(()));
    }
}

#[test]
#[ignore = "long: a million histories"]
fn long_million_histories_preserve_invariants() {
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

/// Returns the violations that random histories cause under these rules. Stops when `violation` occurs, or after 2000
/// histories.
fn find_violations(rules: Rules, violation: Violation) -> BTreeSet<Violation> {
    let mut runner = TestRunner::deterministic();
    let mut violations = BTreeSet::new();
    for _ in 0..2000 {
        let history = actions().new_tree(&mut runner).expect("no action is filtered out").current();
        violations
            .extend(run_history(rules, &history).err().map(|(_, violations)| violations).unwrap_or_default());
        if violations.contains(&violation) {
            break;
        }
    }
    violations
}

fn assert_detects(violation: Violation, broken: fn(&Machine, &Event) -> Result<Outcome, Refusal>) {
    let violations = find_violations(Rules { transition: broken, ..SOUND_RULES }, violation);
    assert!(violations.contains(&violation), "{violation:?} was not detected, only {violations:?}");
}

/// Returns the result of the sound transition, with changed effects.
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
fn detects_second_server_for_machine() {
    let violation = Violation::DuplicateServer;
    let violations = find_violations(Rules { has_unique_names: false, ..SOUND_RULES }, violation);
    assert!(violations.contains(&violation), "{violations:?}");
}

#[test]
fn detects_replaced_machine_that_keeps_slot() {
    assert_detects(Violation::DuplicateActiveMachine, |machine, event| match transition(machine, event)? {
        Outcome::Moved { next: State::Retired { .. }, effects } => {
            Ok(Outcome::Moved { next: machine.state.clone(), effects })
        }
        other => Ok(other),
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
    assert_detects(Violation::EpochDidNotIncrease, |machine, event| {
        change_effects(machine, event, |effect| match effect {
            Effect::Replace { status, restore, .. } => {
                Some(Effect::Replace { status, restore, epoch: machine.epoch })
            }
            other => Some(other),
        })
    });
}

#[test]
fn detects_reactivation_of_replaced_machine() {
    assert_detects(Violation::InvalidReinstatement, |machine, event| match (event, &machine.state) {
        (Event::HealthyHeartbeat { server_type, .. }, State::Retired { .. }) => {
            Ok(Outcome::Moved { next: State::Running { server_type: server_type.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn detects_state_without_required_operation() {
    assert_detects(Violation::MissingOperation, |machine, event| {
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
fn detects_failed_resize_reported_as_running() {
    assert_detects(Violation::RunningWhileOff, |machine, event| match (event, &machine.state) {
        (Event::ResizeFailed, State::Resizing { from, .. }) => {
            Ok(Outcome::Moved { next: State::Running { server_type: from.clone() }, effects: vec![] })
        }
        _ => transition(machine, event),
    });
}

#[test]
fn detects_cancelled_resize_that_leaves_server_off() {
    assert_detects(Violation::LeftOff, |machine, event| {
        change_effects(machine, event, |effect| (effect != Effect::PowerOn).then_some(effect))
    });
}

#[test]
fn detects_operation_that_never_ends() {
    assert_detects(Violation::UnfinishedOperation, |machine, event| match event {
        Event::RegistrationExpired => Ok(Outcome::Unchanged),
        _ => transition(machine, event),
    });
}

/// The model's reconciler always deletes such a server, so the test constructs the state directly.
#[test]
fn detects_server_that_outlives_machine() {
    let mut model = LifecycleModel::new(SOUND_RULES, 1);
    model.provision(0);
    model.cloud.create(0);
    model.pointers[0].fence_epoch = 1;
    model.machines[0].machine.state = State::Deleted { previous: Box::new(State::Provisioning) };
    model.operations.clear();
    assert!(check_settled(&model).contains(&Violation::Orphan));
}

#[test]
fn detects_loss_of_unsaved_rows() {
    let violations = find_violations(Rules { marks_unsaved: false, ..SOUND_RULES }, Violation::LostRows);
    assert!(violations.contains(&Violation::LostRows), "{violations:?}");
}

#[test]
fn detects_early_deletion_of_predecessor() {
    let violations = find_violations(Rules { keeps_predecessors: false, ..SOUND_RULES }, Violation::LostRows);
    assert!(violations.contains(&Violation::LostRows), "{violations:?}");
}

#[test]
fn detects_deletion_of_predecessor_of_lost_successor() {
    let violation = Violation::LastServerRemoved;
    let violations = find_violations(Rules { keeps_if_successor_lost: false, ..SOUND_RULES }, violation);
    assert!(violations.contains(&violation), "{violations:?}");
}

#[test]
fn detects_deletion_of_server_reported_missing() {
    let violations =
        find_violations(Rules { rechecks_missing_servers: false, ..SOUND_RULES }, Violation::LostRows);
    assert!(violations.contains(&Violation::LostRows), "{violations:?}");
}

#[test]
fn detects_writes_after_final_backup() {
    let violations = find_violations(Rules { stops_writers: false, ..SOUND_RULES }, Violation::LostRows);
    assert!(violations.contains(&Violation::LostRows), "{violations:?}");
}

#[test]
fn detects_slot_not_returned() {
    assert_detects(Violation::NotReinstated, |machine, event| {
        change_effects(machine, event, |effect| (effect != Effect::ReinstatePredecessor).then_some(effect))
    });
}

#[test]
fn detects_slot_not_returned_to_older_machine() {
    let violations =
        find_violations(Rules { reinstates_older: false, ..SOUND_RULES }, Violation::NotReinstated);
    assert!(violations.contains(&Violation::NotReinstated), "{violations:?}");
}

#[test]
fn detects_reinstatement_that_ignores_newer_snapshot() {
    // Random histories rarely reach this state, in which the second machine is lost after a backup and the third does
    // not start.
    let loses_rows = |rules: Rules| {
        let mut model = LifecycleModel::new(rules, 1);
        let (recover, serve) = (Action::Recover { slot: 0 }, Action::Serve { slot: 0 });
        for action in [&Action::Provision { slot: 0 }, &serve, &recover, &serve] {
            model.apply_action(action);
        }
        model.back_up(1);
        model.lose_server(1);
        model.apply(1, &Event::ServerGone);
        model.apply_action(&recover);
        model.apply(2, &Event::OperationAbandoned);
        model.apply_action(&serve);
        model.back_up(0);
        check_always(&model).contains(&Violation::LostRows)
    };
    assert!(loses_rows(Rules { respects_snapshots: false, ..SOUND_RULES }));
    assert!(!loses_rows(SOUND_RULES));
}

/// The model's own operations cannot violate these two invariants, so the test constructs the states directly.
#[test]
fn detects_server_before_fence_and_late_pointer_move() {
    let mut model = LifecycleModel::new(SOUND_RULES, 1);
    model.provision(0);
    model.cloud.create(0);
    assert!(check_always(&model).contains(&Violation::ServerBeforeFence));

    let mut model = LifecycleModel::new(SOUND_RULES, 1);
    model.provision(0);
    model.machines[0].has_booted = true;
    model.machines[0].has_registered = true;
    model.pointers[0] = super::Pointer { fence_epoch: 1, writer_epoch: 2, ..super::Pointer::default() };
    model.back_up(0);
    assert!(check_always(&model).contains(&Violation::PointerMovedByReplacedMachine));
}

/// Ensures that the generated histories are long enough for the property tests to be meaningful.
#[test]
fn histories_reach_every_state() {
    let mut runner = TestRunner::deterministic();
    let mut reached = BTreeSet::new();
    for _ in 0..300 {
        let mut model = LifecycleModel::new(SOUND_RULES, SLOT_COUNT);
        for action in actions().new_tree(&mut runner).expect("no action is filtered out").current() {
            model.apply_action(&action);
            for row in &model.machines {
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

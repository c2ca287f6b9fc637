//! Tests the lifecycle event by event, and the result for every pair of state and event.
//!
//! Provisioning a slot without a machine has no transition to test; the model covers it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::epoch::Epoch;
use super::event::{CreationFailure, Effect, Event, RestoreMode, ServerPower};
use super::name::ServerType;
use super::state::{FailureCause, Machine, State, Status};
use super::transition::{Outcome, Refusal, transition};

type TransitionFn = fn(&Machine, &Event) -> Result<Outcome, Refusal>;

const EPOCH: Epoch = Epoch(7);

fn small() -> ServerType {
    "cpx22".parse().expect("valid server type")
}

fn large() -> ServerType {
    "cpx32".parse().expect("valid server type")
}

fn running() -> State {
    State::Running { server_type: small() }
}

fn resizing() -> State {
    State::Resizing { from: small(), to: large() }
}

fn failed(cause: FailureCause) -> State {
    State::Failed { cause }
}

fn retired(previous: State) -> State {
    State::Retired { previous: Box::new(previous) }
}

fn deleted(previous: State) -> State {
    State::Deleted { previous: Box::new(previous) }
}

/// Returns at least one state of each kind. The `match` in [`state_index`] does not compile if a kind is missing.
fn every_state() -> Vec<State> {
    let mut states = vec![
        State::Provisioning,
        State::Recovering,
        running(),
        State::Running { server_type: large() },
        resizing(),
        State::Resizing { from: large(), to: small() },
    ];
    states.extend(FailureCause::ALL.iter().copied().map(failed));
    let inactive: Vec<State> =
        states.iter().flat_map(|state| [retired(state.clone()), deleted(state.clone())]).collect();
    states.extend(inactive);
    let mut kinds = [false; 7];
    for state in &states {
        kinds[state_index(state)] = true;
    }
    assert_eq!(kinds, [true; 7], "a state kind is missing");
    states
}

fn state_index(state: &State) -> usize {
    match state {
        State::Provisioning => 0,
        State::Recovering => 1,
        State::Running { .. } => 2,
        State::Resizing { .. } => 3,
        State::Failed { .. } => 4,
        State::Retired { .. } => 5,
        State::Deleted { .. } => 6,
    }
}

/// Returns at least one event of each kind. The `match` in [`event_index`] does not compile if a kind is missing.
fn every_event() -> Vec<Event> {
    let mut events = vec![
        Event::Registered { server_type: small() },
        Event::BootFailureReported,
        Event::RegistrationExpired,
        Event::ServerGone,
        Event::ServerFound,
        Event::ProvisionRequested { restore: RestoreMode::Empty },
        Event::ProvisionRequested { restore: RestoreMode::Required },
        Event::RecoverRequested { restore: RestoreMode::Empty },
        Event::RecoverRequested { restore: RestoreMode::Required },
        Event::ResizeRequested { to: small() },
        Event::ResizeRequested { to: large() },
        Event::ResizeSucceeded,
        Event::ResizeReverted,
        Event::ResizeFailed,
        Event::OperationHung,
        Event::HealthyHeartbeat { epoch: EPOCH, server_type: small() },
        Event::HealthyHeartbeat { epoch: Epoch(6), server_type: small() },
        Event::HealthyHeartbeat { epoch: Epoch(8), server_type: small() },
        Event::FailRequested,
        Event::DeleteRequested,
        Event::OperationAbandoned,
        Event::Reinstated { epoch: Epoch(9), power: ServerPower::On },
        Event::Reinstated { epoch: Epoch(9), power: ServerPower::MaybeOff },
        Event::SuccessorDeleted,
        Event::ResumeRequested { server_type: large() },
    ];
    events.extend(CreationFailure::ALL.iter().map(|&failure| Event::CreationFailed { failure }));
    let mut kinds = [false; 20];
    for event in &events {
        kinds[event_index(event)] = true;
    }
    assert_eq!(kinds, [true; 20], "an event kind is missing");
    events
}

fn event_index(event: &Event) -> usize {
    match event {
        Event::Registered { .. } => 0,
        Event::BootFailureReported => 1,
        Event::RegistrationExpired => 2,
        Event::CreationFailed { .. } => 3,
        Event::ServerGone => 4,
        Event::ProvisionRequested { .. } => 5,
        Event::RecoverRequested { .. } => 6,
        Event::ResizeRequested { .. } => 7,
        Event::ResizeSucceeded => 8,
        Event::ResizeReverted => 9,
        Event::ResizeFailed => 10,
        Event::HealthyHeartbeat { .. } => 11,
        Event::FailRequested => 12,
        Event::DeleteRequested => 13,
        Event::OperationHung => 14,
        Event::OperationAbandoned => 15,
        Event::Reinstated { .. } => 16,
        Event::SuccessorDeleted => 17,
        Event::ResumeRequested { .. } => 18,
        Event::ServerFound => 19,
    }
}

fn apply(state: &State, event: &Event) -> Result<Outcome, Refusal> {
    transition(&Machine { state: state.clone(), epoch: EPOCH }, event)
}

fn assert_moves(from: &State, event: &Event, to: &State, expected: &[Effect]) {
    match apply(from, event) {
        Ok(Outcome::Moved { next, effects }) => {
            assert_eq!((&next, effects.as_slice()), (to, expected), "{from:?} on {event:?}");
        }
        other => panic!("{from:?} on {event:?} returned {other:?}"),
    }
}

fn assert_unchanged(from: &State, event: &Event) {
    assert_eq!(apply(from, event), Ok(Outcome::Unchanged), "{from:?} on {event:?}");
}

fn assert_refused(from: &State, event: &Event, status: Status, allowed: &'static [Status]) {
    let refusal = Refusal::InvalidState { status, allowed };
    assert_eq!(apply(from, event), Err(refusal), "{from:?} on {event:?}");
}

fn failure_effects(cause: FailureCause) -> Vec<Effect> {
    vec![Effect::FailOperation { cause }, Effect::CloseConnections]
}

fn failed_resize_effects() -> Vec<Effect> {
    let mut effects = failure_effects(FailureCause::Resize);
    effects.push(Effect::PowerOn);
    effects
}

fn failed_boot_effects(cause: FailureCause) -> Vec<Effect> {
    vec![Effect::FailOperation { cause }, Effect::CloseConnections, Effect::ReinstatePredecessor]
}

fn replacement_effects(status: Status, restore: RestoreMode) -> Vec<Effect> {
    vec![
        Effect::CancelOperation,
        Effect::Replace { status, restore, epoch: Epoch(8) },
        Effect::CloseConnections,
    ]
}

fn every_active_state() -> impl Iterator<Item = State> {
    every_state().into_iter().filter(State::is_active)
}

fn is_booting(state: &State) -> bool {
    matches!(state, State::Provisioning | State::Recovering)
}

/// Returns the pairs of state and event for which the transition function panics.
fn find_panics(transition_fn: TransitionFn) -> Vec<(State, Event)> {
    let mut panics = Vec::new();
    for state in every_state() {
        for event in every_event() {
            let machine = Machine { state: state.clone(), epoch: EPOCH };
            if catch_unwind(AssertUnwindSafe(|| transition_fn(&machine, &event))).is_err() {
                panics.push((state.clone(), event));
            }
        }
    }
    panics
}

#[test]
fn transition_is_total() {
    assert_eq!(find_panics(transition), vec![]);
}

#[test]
fn find_panics_detects_missing_transition() {
    let panics = find_panics(|machine, event| match (&machine.state, event) {
        (State::Retired { previous }, Event::ServerGone) if **previous == running() => panic!("unhandled"),
        _ => transition(machine, event),
    });
    assert_eq!(panics, vec![(retired(running()), Event::ServerGone)]);
}

#[test]
fn machine_becomes_running_only_on_allowed_events() {
    let event = Event::Registered { server_type: small() };
    assert_moves(&State::Provisioning, &event, &running(), &[]);
    assert_moves(&State::Recovering, &event, &running(), &[]);
    for state in every_active_state().filter(|state| !is_booting(state)) {
        let status = state.status().expect("active states have a status");
        assert_refused(&state, &event, status, &[Status::Provisioning, Status::Recovering]);
    }
    for state in every_state() {
        for event in every_event() {
            let Ok(Outcome::Moved { next: State::Running { .. }, .. }) = apply(&state, &event) else {
                continue;
            };
            let is_allowed = matches!(
                (&state, &event),
                (State::Provisioning | State::Recovering, Event::Registered { .. })
                    | (State::Resizing { .. }, Event::ResizeSucceeded | Event::ResizeReverted)
                    | (
                        State::Failed { cause: FailureCause::Resize | FailureCause::Reinstating },
                        Event::HealthyHeartbeat { .. }
                    )
                    | (State::Failed { .. }, Event::ResumeRequested { .. })
                    | (
                        State::Retired { .. } | State::Deleted { .. },
                        Event::Reinstated { power: ServerPower::On, .. }
                    )
            );
            assert!(is_allowed, "{state:?} is running after {event:?}");
        }
    }
}

#[test]
fn boot_without_registration_fails() {
    let creation_failures =
        CreationFailure::ALL.iter().map(|&failure| (Event::CreationFailed { failure }, failure.cause()));
    for (event, cause) in creation_failures.into_iter().chain([
        (Event::BootFailureReported, FailureCause::BootReported),
        (Event::RegistrationExpired, FailureCause::RegistrationExpired),
        (Event::OperationAbandoned, FailureCause::Abandoned),
    ]) {
        assert_moves(&State::Provisioning, &event, &failed(cause), &failed_boot_effects(cause));
        assert_moves(&State::Recovering, &event, &failed(cause), &failed_boot_effects(cause));
        for state in every_active_state().filter(|state| !is_booting(state)) {
            if event == Event::BootFailureReported {
                let status = state.status().expect("active states have a status");
                assert_refused(&state, &event, status, &[Status::Provisioning, Status::Recovering]);
            } else {
                assert_unchanged(&state, &event);
            }
        }
    }
}

#[test]
fn recover_replaces_any_active_machine_and_is_idempotent() {
    for restore in [RestoreMode::Required, RestoreMode::Empty] {
        let event = Event::RecoverRequested { restore };
        for state in every_active_state().filter(|state| *state != State::Recovering) {
            let next = retired(state.clone());
            assert_moves(&state, &event, &next, &replacement_effects(Status::Recovering, restore));
        }
        assert_unchanged(&State::Recovering, &event);
    }
}

#[test]
fn resize_needs_running_machine() {
    let to_large = Event::ResizeRequested { to: large() };
    let effects = [Effect::ChangeType { to: large() }, Effect::CloseConnections];
    assert_moves(&running(), &to_large, &resizing(), &effects);
    assert_unchanged(&running(), &Event::ResizeRequested { to: small() });
    for state in every_active_state().filter(|state| !matches!(state, State::Running { .. })) {
        let status = state.status().expect("active states have a status");
        assert_refused(&state, &to_large, status, &[Status::Running]);
    }
}

#[test]
fn resize_ends_with_new_type_old_type_or_failure() {
    assert_moves(&resizing(), &Event::ResizeSucceeded, &State::Running { server_type: large() }, &[]);
    let cause = FailureCause::Resize;
    assert_moves(&resizing(), &Event::ResizeReverted, &running(), &[Effect::FailOperation { cause }]);
    assert_moves(&resizing(), &Event::ResizeFailed, &failed(cause), &failed_resize_effects());
    for event in [Event::ResizeSucceeded, Event::ResizeReverted, Event::ResizeFailed] {
        for state in every_state().into_iter().filter(|state| !matches!(state, State::Resizing { .. })) {
            assert_unchanged(&state, &event);
        }
    }
}

#[test]
fn hung_operation_fails_booting_or_resizing_machine() {
    let event = Event::OperationHung;
    let cause = FailureCause::OperationHung;
    for state in [State::Provisioning, State::Recovering] {
        assert_moves(&state, &event, &failed(cause), &failed_boot_effects(cause));
    }
    assert_moves(&resizing(), &event, &failed(FailureCause::Resize), &failed_resize_effects());
    let has_operation = |state: &State| is_booting(state) || matches!(state, State::Resizing { .. });
    for state in every_state().into_iter().filter(|state| !has_operation(state)) {
        assert_unchanged(&state, &event);
    }
}

#[test]
fn missing_server_fails_machine_without_replacement() {
    let cause = FailureCause::ServerGone;
    assert_moves(&running(), &Event::ServerGone, &failed(cause), &failure_effects(cause));
    // The server may still exist and may be off.
    let effects = [failure_effects(cause), vec![Effect::PowerOn]].concat();
    for state in [resizing(), failed(FailureCause::Resize), failed(FailureCause::Reinstating)] {
        assert_moves(&state, &Event::ServerGone, &failed(cause), &effects);
    }
    for state in [State::Provisioning, State::Recovering, failed(cause), failed(FailureCause::Operator)] {
        assert_unchanged(&state, &Event::ServerGone);
    }
    let is_replacement_request =
        |event: &Event| matches!(event, Event::ProvisionRequested { .. } | Event::RecoverRequested { .. });
    for state in every_state() {
        for event in every_event().into_iter().filter(|event| !is_replacement_request(event)) {
            if let Ok(Outcome::Moved { effects, .. }) = apply(&state, &event) {
                let replaces = effects.iter().any(|effect| matches!(effect, Effect::Replace { .. }));
                assert!(!replaces, "{event:?} replaces the machine in {state:?}");
            }
        }
    }
}

#[test]
fn machine_with_found_server_waits_for_heartbeat() {
    let (missing, reinstating) = (failed(FailureCause::ServerGone), failed(FailureCause::Reinstating));
    assert_moves(&missing, &Event::ServerFound, &reinstating, &[]);
    let retired = |previous: &State| State::Retired { previous: Box::new(previous.clone()) };
    let deleted = |previous: &State| State::Deleted { previous: Box::new(previous.clone()) };
    assert_moves(&retired(&missing), &Event::ServerFound, &retired(&reinstating), &[]);
    assert_moves(&deleted(&missing), &Event::ServerFound, &deleted(&reinstating), &[]);
    for state in every_state().into_iter().filter(|state| *state != missing) {
        let inner = match &state {
            State::Retired { previous } | State::Deleted { previous } => previous,
            other => other,
        };
        if *inner != missing {
            assert_unchanged(&state, &Event::ServerFound);
        }
    }
}

#[test]
fn fail_request_stops_operation_and_routing() {
    let by_operator = failed(FailureCause::Operator);
    for state in every_active_state().filter(|state| *state != by_operator) {
        // A failed machine's operation powers its server on, so it continues.
        let mut effects = match state {
            State::Failed { .. } => vec![Effect::CloseConnections],
            _ => vec![Effect::CancelOperation, Effect::CloseConnections],
        };
        if is_booting(&state) {
            effects.push(Effect::ReinstatePredecessor);
        }
        if matches!(state, State::Resizing { .. }) {
            effects.push(Effect::PowerOn);
        }
        assert_moves(&state, &Event::FailRequested, &by_operator, &effects);
    }
    assert_unchanged(&by_operator, &Event::FailRequested);
}

#[test]
fn provision_replaces_only_failed_machine() {
    for restore in [RestoreMode::Required, RestoreMode::Empty] {
        let event = Event::ProvisionRequested { restore };
        for &cause in FailureCause::ALL {
            assert_moves(
                &failed(cause),
                &event,
                &retired(failed(cause)),
                &replacement_effects(Status::Provisioning, restore),
            );
        }
        for state in [State::Provisioning, State::Recovering, running(), resizing()] {
            assert_unchanged(&state, &event);
        }
    }
}

#[test]
fn heartbeat_clears_failure_only_for_current_epoch() {
    let heartbeat = |epoch| Event::HealthyHeartbeat { epoch, server_type: large() };
    let cleared = State::Running { server_type: large() };
    let is_clearable =
        |state: &State| matches!(state, State::Failed { cause } if cause.is_cleared_by_heartbeat());
    for state in every_state().into_iter().filter(is_clearable) {
        assert_moves(&state, &heartbeat(EPOCH), &cleared, &[]);
        assert_unchanged(&state, &heartbeat(Epoch(6)));
        assert_unchanged(&state, &heartbeat(Epoch(8)));
    }
    for state in every_state().into_iter().filter(|state| !is_clearable(state)) {
        assert_unchanged(&state, &heartbeat(EPOCH));
    }
}

#[test]
fn delete_ends_any_active_machine_and_is_idempotent() {
    let effects =
        [Effect::CancelOperation, Effect::DeleteServer, Effect::DeletePredecessor, Effect::CloseConnections];
    for state in every_active_state() {
        assert_moves(&state, &Event::DeleteRequested, &deleted(state.clone()), &effects);
    }
    assert_unchanged(&deleted(running()), &Event::DeleteRequested);
    assert_eq!(apply(&retired(running()), &Event::DeleteRequested), Err(Refusal::Superseded));
}

#[test]
fn resume_returns_failed_machine_to_service() {
    let event = Event::ResumeRequested { server_type: large() };
    for &cause in FailureCause::ALL {
        assert_moves(&failed(cause), &event, &State::Running { server_type: large() }, &[]);
    }
    assert_unchanged(&running(), &event);
    for state in [State::Provisioning, State::Recovering, resizing()] {
        let status = state.status().expect("active states have a status");
        assert_refused(&state, &event, status, &[Status::Failed]);
    }
}

#[test]
fn reinstated_machine_keeps_state_or_waits_for_host() {
    let epoch = Epoch(9);
    let effects = [Effect::CancelOperation, Effect::Reinstate { epoch }];
    let reinstating = failed(FailureCause::Reinstating);
    let cases = [
        (running(), ServerPower::On, running()),
        (running(), ServerPower::MaybeOff, reinstating.clone()),
        (resizing(), ServerPower::On, reinstating.clone()),
        (failed(FailureCause::Resize), ServerPower::On, reinstating.clone()),
        (failed(FailureCause::Operator), ServerPower::On, failed(FailureCause::Operator)),
        (failed(FailureCause::Operator), ServerPower::MaybeOff, failed(FailureCause::Operator)),
    ];
    for (previous, power, next) in cases {
        let event = Event::Reinstated { epoch, power };
        assert_moves(&retired(previous.clone()), &event, &next, &effects);
        assert_moves(&deleted(previous), &event, &next, &effects);
    }
    let event = Event::Reinstated { epoch, power: ServerPower::On };
    for never_served in [State::Provisioning, State::Recovering] {
        assert_eq!(apply(&retired(never_served.clone()), &event), Err(Refusal::Superseded));
        assert_eq!(apply(&deleted(never_served), &event), Err(Refusal::Gone));
    }
    for state in every_active_state() {
        assert_unchanged(&state, &event);
    }
}

#[test]
fn only_reinstatement_returns_machine_to_slot() {
    let is_reinstatement = |event: &Event| matches!(event, Event::Reinstated { .. });
    for state in every_state().into_iter().filter(|state| !state.is_active()) {
        for event in every_event().into_iter().filter(|event| !is_reinstatement(event)) {
            if let Ok(Outcome::Moved { next, .. }) = apply(&state, &event) {
                assert!(!next.is_active(), "{state:?} holds its slot again after {event:?}");
            }
        }
    }
}

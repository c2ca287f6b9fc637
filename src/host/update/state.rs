//! The update state machine: states with their data, and one total function from a state and an event to the next
//! state. This module is pure: it uses no clocks, files or processes.
//!
//! Invariant: once the machine has been changed, the update ends with a release that has passed its health check, or
//! with an outcome that reports that there is none.

use serde::{Deserialize, Serialize};

use super::protocol::UpdateResult;

/// Maximum length of the error from one step. The outcome of an update whose rollback failed contains two such errors.
pub const MAX_ERROR_CHARS: usize = 400;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepFailure {
    pub stage: Stage,
    pub error: String,
}

/// The stages of an update, as outcomes name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Stage {
    Preflight,
    Manifest,
    Download,
    #[serde(rename = "trial")]
    #[strum(serialize = "trial")]
    SmokeTest,
    Snapshot,
    Switch,
    Units,
    Restart,
    Health,
    Rollback,
    Done,
}

impl Stage {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The state of an update. Its step is done once the next state is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum State {
    /// Fetches and checks the release; the machine is unchanged.
    Preparing,
    /// Backs up the database; the machine is unchanged.
    TakingSnapshot,
    /// Points the `current` link at the release.
    Switching,
    /// Installs the release's units, restarts the services and waits until they are healthy.
    Activating,
    /// Quarantines the release and points the `current` link back at the previous one.
    Reverting {
        why: StepFailure,
    },
    /// Installs the previous release's units, restarts the services and waits until they are healthy.
    Restoring {
        why: StepFailure,
    },
    Ended {
        end: UpdateResult,
        stage: Stage,
        error: Option<String>,
    },
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The step succeeded.
    Done,
    /// The step failed because the release is at fault or a policy forbids the update.
    Refused(StepFailure),
    /// The step failed for any other reason.
    Failed(StepFailure),
    /// The step was interrupted too often.
    AttemptsExhausted,
}

impl State {
    /// Describes what the update is doing in this state, for a human reader.
    pub fn describe(&self) -> &'static str {
        match self {
            Self::Preparing => "fetching and checking the release",
            Self::TakingSnapshot => "backing up the database",
            Self::Switching => "switching to the release",
            Self::Activating => "restarting the services",
            Self::Reverting { .. } => "rolling back",
            Self::Restoring { .. } => "restarting the services of the previous release",
            Self::Ended { .. } => "ended",
        }
    }

    pub fn has_ended(&self) -> bool {
        matches!(self, Self::Ended { .. })
    }

    /// Returns the next state.
    #[must_use]
    pub fn apply_event(self, event: Event) -> Self {
        let exhausted =
            |stage| StepFailure { stage, error: "too many interrupted attempts at this step".to_owned() };
        match (self, event) {
            (Self::Preparing, Event::Done) => Self::TakingSnapshot,
            (Self::TakingSnapshot, Event::Done) => Self::Switching,
            (Self::Preparing | Self::TakingSnapshot, Event::Refused(failure)) => {
                ended(UpdateResult::Refused, failure)
            }
            (Self::Preparing | Self::TakingSnapshot, Event::Failed(failure)) => {
                ended(UpdateResult::Failed, failure)
            }
            (Self::Preparing, Event::AttemptsExhausted) => {
                ended(UpdateResult::Failed, exhausted(Stage::Download))
            }
            (Self::TakingSnapshot, Event::AttemptsExhausted) => {
                ended(UpdateResult::Failed, exhausted(Stage::Snapshot))
            }

            (Self::Switching, Event::Done) => Self::Activating,
            (Self::Switching, Event::Failed(failure) | Event::Refused(failure)) => {
                Self::Reverting { why: failure }
            }
            (Self::Switching, Event::AttemptsExhausted) => Self::Reverting { why: exhausted(Stage::Switch) },

            (Self::Activating, Event::Done) => {
                Self::Ended { end: UpdateResult::Updated, stage: Stage::Done, error: None }
            }
            (Self::Activating, Event::Failed(failure) | Event::Refused(failure)) => {
                Self::Reverting { why: failure }
            }
            (Self::Activating, Event::AttemptsExhausted) => {
                Self::Reverting { why: exhausted(Stage::Restart) }
            }

            (Self::Reverting { why: failure }, Event::Done) => Self::Restoring { why: failure },
            (Self::Restoring { why: failure }, Event::Done) => ended(UpdateResult::RolledBack, failure),
            (
                Self::Reverting { why: failure } | Self::Restoring { why: failure },
                Event::Failed(rollback_failure) | Event::Refused(rollback_failure),
            ) => rollback_failed(&failure, &rollback_failure),
            (
                Self::Reverting { why: failure } | Self::Restoring { why: failure },
                Event::AttemptsExhausted,
            ) => rollback_failed(&failure, &exhausted(Stage::Rollback)),

            (end @ Self::Ended { .. }, _) => end,
        }
    }
}

fn ended(end: UpdateResult, failure: StepFailure) -> State {
    State::Ended { end, stage: failure.stage, error: Some(failure.error) }
}

/// Returns the final state after a failed rollback. The error contains the reasons for the rollback and for its
/// failure.
fn rollback_failed(failure: &StepFailure, rollback_failure: &StepFailure) -> State {
    let error = format!(
        "{}; the rollback failed at {}: {}",
        failure.error,
        rollback_failure.stage.as_str(),
        rollback_failure.error
    );
    State::Ended { end: UpdateResult::Failed, stage: Stage::Rollback, error: Some(error) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn step_failure() -> impl Strategy<Value = StepFailure> {
        "[a-z]{1,5}".prop_map(|error| StepFailure { stage: Stage::Health, error })
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => Just(Event::Done),
            1 => step_failure().prop_map(Event::Refused),
            1 => step_failure().prop_map(Event::Failed),
            1 => Just(Event::AttemptsExhausted),
        ]
    }

    /// The machine after a step: which release is current, and whether it passed its health check.
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct MachineModel {
        is_new: bool,
        is_healthy: bool,
    }

    proptest! {
        #[test]
        fn every_event_sequence_ends_with_accurate_outcome(events in proptest::collection::vec(event(), 12)) {
            let mut state = State::Preparing;
            let mut machine = MachineModel { is_new: false, is_healthy: true };
            for event in events {
                let succeeded = event == Event::Done;
                match &state {
                    // A failed switch may have taken effect.
                    State::Switching => machine = MachineModel { is_new: true, is_healthy: false },
                    State::Activating => machine.is_healthy = succeeded,
                    State::Reverting { .. } if succeeded => machine = MachineModel { is_new: false, is_healthy: false },
                    State::Restoring { .. } => machine.is_healthy = succeeded,
                    _ => {}
                }
                let previous = state.clone();
                state = state.apply_event(event);
                if previous.has_ended() {
                    prop_assert_eq!(&state, &previous);
                }
                // The state survives a round trip through JSON.
                let text = serde_json::to_string(&state).unwrap();
                prop_assert_eq!(&serde_json::from_str::<State>(&text).unwrap(), &state);
                let State::Ended { end, error, .. } = &state else { continue };
                match end {
                    UpdateResult::Updated => prop_assert_eq!(machine, MachineModel { is_new: true, is_healthy: true }),
                    UpdateResult::RolledBack | UpdateResult::Refused => prop_assert_eq!(machine, MachineModel { is_new: false, is_healthy: true }),
                    UpdateResult::Failed => {}
                }
                prop_assert_eq!(error.is_none(), *end == UpdateResult::Updated);
            }
            prop_assert!(state.has_ended());
        }
    }
}

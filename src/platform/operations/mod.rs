//! Runs persistent operations, and reconciles machines with the provider's servers.
//!
//! Invariants: a step is stored before it runs, and can run again after the process is killed at any point; one process
//! at a time leases an operation; every accepted operation ends or waits for an operator.

pub mod create;
pub mod delete;
mod drive;
pub mod files_fence;
pub mod final_backup;
pub mod host_call;
pub mod inventory;
pub mod later_holder;
pub mod leased;
pub mod power;
pub mod predecessor;
pub mod reconcile;
pub mod reinstate;
pub mod resize;
pub mod retention;
pub mod runner;
pub mod step;
mod step_failure;

use std::sync::LazyLock;

use crate::db::operations::RunnableSteps;

pub use svc_machine::operation::{Lane, OperationKind, OperationOptions, Step};

/// Returns the kinds that this release can run, and those of its steps that run in this lane.
pub fn runnable_steps_in(lane: Lane) -> RunnableSteps<'static> {
    static STEPS: LazyLock<[Vec<&str>; 2]> = LazyLock::new(|| {
        [Lane::General, Lane::HostCalls].map(|lane| {
            let steps = Step::ALL.into_iter().filter(|step| step.lane() == lane);
            steps.map(Step::as_str).collect()
        })
    });
    RunnableSteps { steps: &STEPS[lane as usize], ..runnable_steps() }
}

/// Returns the kinds and steps that this release can run.
pub fn runnable_steps() -> RunnableSteps<'static> {
    static KINDS: LazyLock<Vec<&str>> =
        LazyLock::new(|| OperationKind::ALL.map(OperationKind::as_str).into());
    static STEPS: LazyLock<Vec<&str>> = LazyLock::new(|| Step::ALL.map(Step::as_str).into());
    RunnableSteps { kinds: &KINDS, steps: &STEPS }
}

/// Fail points within a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepPoint {
    /// The step is stored but has not started.
    Before,
    /// The step has ended, but its outcome has not been stored.
    After,
    /// The step has recorded its request and is about to send it to the provider. For a reboot, which may be requested
    /// more than once, only the time of the first request is recorded.
    RequestRecorded,
    /// The provider's action has ended, but its end has not been recorded.
    ActionEnded,
}

impl StepPoint {
    fn as_str(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::After => "after",
            Self::RequestRecorded => "ordered",
            Self::ActionEnded => "settled",
        }
    }

    fn for_step(step: Step) -> &'static [Self] {
        match step {
            Step::CreateServer | Step::RebootServer => &[Self::Before, Self::RequestRecorded, Self::After],
            Step::PowerOn => &[Self::Before, Self::RequestRecorded, Self::After, Self::ActionEnded],
            Step::PowerOff | Step::ChangeType => &[Self::Before, Self::After, Self::ActionEnded],
            _ => &[Self::Before, Self::After],
        }
    }
}

/// Returns a fail point's name, as used in the `FAILPOINTS` environment variable.
pub fn fail_point_name(kind: OperationKind, step: Step, point: StepPoint) -> String {
    format!("operations.{}.{}.{}", kind.as_str(), step.as_str(), point.as_str())
}

/// Returns the names of an operation's fail points.
pub fn fail_point_names(kind: OperationKind) -> Vec<String> {
    let names =
        |step: Step| StepPoint::for_step(step).iter().map(move |point| fail_point_name(kind, step, *point));
    kind.steps().iter().flat_map(|step| names(*step)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn creation_steps_fence_before_delete_and_create() {
        for kind in [OperationKind::Provision, OperationKind::Recover] {
            let position = |step| kind.steps().iter().position(|other| *other == step).unwrap();
            assert!(position(Step::FinalBackup) < position(Step::Fence));
            assert!(position(Step::Fence) < position(Step::PowerOffServer));
            assert!(position(Step::PowerOffServer) < position(Step::DeletePredecessor));
            assert!(position(Step::DeletePredecessor) < position(Step::CreateServer));
        }
    }

    #[test]
    fn names_round_trip_and_fail_points_cover_every_step() {
        for kind in OperationKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
            for step in kind.steps() {
                assert_eq!(step.as_str().parse(), Ok(*step));
                assert!(fail_point_names(kind).contains(&fail_point_name(kind, *step, StepPoint::Before)));
                assert!(fail_point_names(kind).contains(&fail_point_name(kind, *step, StepPoint::After)));
            }
        }
        assert!(
            fail_point_names(OperationKind::Recover)
                .contains(&"operations.recover.create_server.ordered".to_owned())
        );
    }
}

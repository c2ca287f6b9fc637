//! Problems that several routes return. The causes of database and provider errors are only logged, under the request
//! id.

use crate::db::DbError;
use crate::db::machine_row::MachineRow;
use crate::lifecycle::LifecycleError;
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::id::MachineId;
use svc_machine::state::Status;
use svc_machine::transition::Refusal;
use svc_provider::ProviderError;
use svc_store::snapshot::SnapshotUnusable;

impl From<DbError> for Problem {
    fn from(error: DbError) -> Self {
        if !error.is_transient() {
            return Self::internal(&error);
        }
        tracing::warn!(error = %format_chain(&error), "database error");
        Self::new(Code::DatabaseUnavailable, "The database is unreachable or busy; try again.").retry_after(2)
    }
}

/// Returns the problem for an unusable snapshot or an unavailable store.
pub fn snapshot_unusable(error: SnapshotUnusable) -> Problem {
    match error {
        SnapshotUnusable::Absent => Problem::new(
            Code::SnapshotUnusable,
            "There is no snapshot to recover from; `svcctl recover` with `--allow-empty` starts with an empty database.",
        ),
        SnapshotUnusable::Damaged { key, reason } => {
            Problem::new(Code::SnapshotUnusable, format!("{key} cannot be restored: {reason}."))
        }
        SnapshotUnusable::Store(error) => error.into(),
    }
}

/// Returns the problem for a change to a machine that was refused or failed.
pub fn lifecycle_problem(error: LifecycleError, machine: &MachineRow) -> Problem {
    match error {
        LifecycleError::Db(error) => error.into(),
        LifecycleError::Refused(refusal) => refusal_problem(&refusal, machine),
        error @ LifecycleError::Missing(_) => Problem::internal(&error),
    }
}

fn refusal_problem(refusal: &Refusal, machine: &MachineRow) -> Problem {
    match refusal {
        Refusal::InvalidState { status, allowed } => invalid_state(status.as_str(), allowed),
        Refusal::Superseded => invalid_state("replaced", &[]),
        Refusal::Gone => machine_not_found(&machine.id.to_string()),
    }
}

/// Returns the problem for a machine in the wrong state. A problem's `status` is the HTTP status, so the machine's
/// status is in `machineStatus`.
pub fn invalid_state(status: &str, allowed: &[Status]) -> Problem {
    let allowed: Vec<_> = allowed.iter().map(|status| status.as_str()).collect();
    let detail = if allowed.is_empty() {
        format!("The machine is {status}.")
    } else {
        format!("The machine is {status}, but must be {}.", allowed.join(" or "))
    };
    Problem::new(Code::InvalidState, detail)
        .with("machineStatus", status.into())
        .with("allowed", allowed.into())
}

/// Returns the problem for a failed call to the provider. The error is logged but not returned.
pub fn provider_problem(error: &ProviderError) -> Problem {
    tracing::warn!(error = %format_chain(error), "provider error");
    provisioning_error()
}

pub fn provisioning_error() -> Problem {
    Problem::new(Code::ProvisioningError, "The request to the provider failed; nothing was changed.")
}

pub fn machine_not_found(name: &str) -> Problem {
    Problem::new(Code::MachineNotFound, format!("There is no machine {name}."))
}

/// Describes a host's rejection of the platform's proof.
pub fn describe_proof_rejection(id: MachineId) -> String {
    format!(
        "The host of machine {id} rejected the platform's proof (401): the host's clock is wrong, or the host has not \
         fetched the current keys. `svcctl status {id}` shows the host's last heartbeat."
    )
}

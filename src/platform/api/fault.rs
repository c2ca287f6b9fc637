//! What our errors are to a caller: the code alone; everything else goes to the log under the request id.

use crate::http::problem::{Code, Problem, chain};
use crate::machine::state::Status;
use crate::machine::transition::Refusal;
use crate::platform::db::DbError;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::lifecycle::LifecycleError;
use crate::provider::ProviderError;
use crate::store::StoreError;
use crate::store::snapshot::SnapshotUnusable;

impl From<DbError> for Problem {
    fn from(error: DbError) -> Self {
        if !error.is_transient() {
            return Self::internal(&error);
        }
        tracing::warn!(error = %chain(&error), "database error");
        Self::new(Code::DatabaseUnavailable, "The database cannot be reached; try again.").retry_after(2)
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        tracing::warn!(error = %chain(&error), "object store error");
        store_unavailable()
    }
}

pub fn store_unavailable() -> Problem {
    Problem::new(Code::StoreUnavailable, "The object store cannot be reached; nothing was changed.")
        .retry_after(5)
}

/// A snapshot that cannot be recovered from, or a store that does not say.
pub fn unusable(error: SnapshotUnusable) -> Problem {
    match error {
        SnapshotUnusable::Absent => Problem::new(
            Code::SnapshotUnusable,
            "There is no snapshot to recover from; `svcctl recover` with `--allow-empty` starts with an empty database.",
        ),
        SnapshotUnusable::Damaged { key, why } => {
            Problem::new(Code::SnapshotUnusable, format!("{key} cannot be recovered from: {why}."))
        }
        SnapshotUnusable::Store(error) => error.into(),
    }
}

/// A refused change of a machine, for an operator.
pub fn lifecycle(error: LifecycleError, machine: &MachineRow) -> Problem {
    match error {
        LifecycleError::Db(error) => error.into(),
        LifecycleError::Refused(refusal) => refused(&refusal, machine),
        error @ LifecycleError::Missing(_) => Problem::internal(&error),
    }
}

fn refused(refusal: &Refusal, machine: &MachineRow) -> Problem {
    match refusal {
        Refusal::InvalidState { status, allowed } => invalid_state(status.as_str(), allowed),
        Refusal::Superseded => invalid_state("retired", &[]),
        Refusal::Gone => machine_not_found(&machine.id.to_string()),
    }
}

/// The problem's own `status` is the HTTP status, so the machine's is `machineStatus`.
pub fn invalid_state(status: &str, allowed: &[Status]) -> Problem {
    let allowed: Vec<_> = allowed.iter().map(|status| status.as_str()).collect();
    let detail = if allowed.is_empty() {
        format!("The machine is {status}.")
    } else {
        format!("The machine is {status}; this needs {}.", allowed.join(" or "))
    };
    Problem::new(Code::InvalidState, detail)
        .with("machineStatus", status.into())
        .with("allowed", allowed.into())
}

/// A failed call to the provider; what it said is in the log alone.
pub fn provider(error: &ProviderError) -> Problem {
    tracing::warn!(error = %chain(error), "provider error");
    provisioning_error()
}

pub fn provisioning_error() -> Problem {
    Problem::new(Code::ProvisioningError, "The provider could not do this; nothing was changed.")
}

pub fn machine_not_found(what: &str) -> Problem {
    Problem::new(Code::MachineNotFound, format!("There is no machine {what}."))
}

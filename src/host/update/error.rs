//! Errors that prevent an update from starting or finishing.

use super::history::HistoryError;
use svc_base::applet::{Exit, Failure};
use svc_base::config::ConfigError;
use svc_base::failpoint::InjectedFailure;
use svc_base::fsx::FileError;

/// The reason an update did not start or finish. The journal, if any, is kept, so that the next run resumes the update.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    #[error("no release is installed on this machine; run `svc-update boot` to install the first one")]
    NoRelease,
    #[error("there is no previous release to roll back to")]
    NoPrevious,
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl From<UpdateError> for Failure {
    fn from(error: UpdateError) -> Self {
        let exit = match error {
            UpdateError::NoRelease | UpdateError::NoPrevious => Exit::Refused,
            UpdateError::Config(_) => Exit::Config,
            _ => Exit::Internal,
        };
        Self::new(exit, error)
    }
}

//! Errors from [`super::restore_home`].

use anyhow::anyhow;
use svc_base::applet::{Exit, Failure};
use svc_base::error_chain::format_chain;
use svc_base::failpoint::InjectedFailure;
use svc_base::fsx::FileError;
use svc_base::untrusted_text::{one_line, truncate_printable};
use svc_files::FilesError;
use svc_store::StoreError;
use svc_wire::registration::RestoreFailureCode;

use super::access::AccessError;

/// Error from restoring the home directory.
#[derive(Debug, thiserror::Error)]
pub(super) enum RestoreHomeError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("cannot read the file-backup pointer")]
    Pointer(#[from] StoreError),
    #[error("the file-backup pointer references snapshot {0}, but there is no repository")]
    NoRepository(String),
    #[error("invalid snapshot id in the file-backup pointer")]
    InvalidSnapshot,
    #[error(
        "the pointer of the file backup (`files/latest`) names no snapshot of an earlier machine, although there must be \
         one: restore an earlier version of the pointer with the store's tools, or abandon the files with \
         `svc-sync-agent restore-home --give-up`"
    )]
    NoSnapshot,
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("file move task panicked or was cancelled")]
    Task(#[from] tokio::task::JoinError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl RestoreHomeError {
    /// Whether the pointer, key, repository or snapshot is unusable, so neither another boot nor a larger disk would
    /// help.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            Self::NoRepository(_) | Self::InvalidSnapshot | Self::NoSnapshot => true,
            Self::Access(AccessError::KeyLost(_)) => true,
            Self::Pointer(error) => is_corrupt_or_missing(error),
            Self::Files(error) | Self::Access(AccessError::Files(error)) => match error {
                FilesError::Corrupt { .. } | FilesError::WrongKey | FilesError::UnsupportedVersion(_) => true,
                FilesError::Store(error) => is_corrupt_or_missing(error),
                _ => false,
            },
            Self::Access(_) | Self::File(_) | Self::Task(_) | Self::Injected(_) => false,
        }
    }
}

impl RestoreHomeError {
    /// Returns the exit code. systemd does not restart the unit after [`Exit::Refused`] and [`Exit::Permission`].
    fn exit(&self) -> Exit {
        match self {
            Self::Files(error) if error.is_no_space() => Exit::Refused,
            Self::Access(AccessError::KeyRefused(_)) => Exit::Permission,
            _ => Exit::Unavailable,
        }
    }

    /// Converts the error to a failure with its code in the last line: a failed boot only reports the last log line.
    pub(super) fn into_failure(self) -> Failure {
        let code = match &self {
            Self::Files(error) if error.is_no_space() => RestoreFailureCode::FilesNoSpace,
            _ => RestoreFailureCode::Files,
        };
        // Put the code first and truncate the text, which may contain a path from a forged snapshot.
        let text = format_chain(&self);
        let text = truncate_printable(&one_line(&text));
        Failure::new(self.exit(), anyhow!("({}) {text}", code.marker()))
    }
}

fn is_corrupt_or_missing(error: &StoreError) -> bool {
    matches!(error, StoreError::Corrupt { .. } | StoreError::NotFound { .. })
}

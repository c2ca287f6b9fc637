//! Error from a failed save.

use svc_base::failpoint::InjectedFailure;
use svc_files::FilesError;
use svc_store::StoreError;
use svc_store::pointer_io::PointerError;

use super::access::AccessError;

#[derive(Debug, thiserror::Error)]
pub(super) enum SaveError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error("cannot advance the file-backup pointer to the new snapshot")]
    Pointer(#[from] PointerError),
    #[error("cannot read the file-backup pointer")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl SaveError {
    /// Whether the platform has withdrawn this machine's store credentials because a recovery replaced it. The platform
    /// may issue new ones if the recovery is undone.
    pub(super) fn is_withdrawn(&self) -> bool {
        match self {
            Self::Pointer(PointerError::Store(error)) | Self::Store(error) => is_withdrawn(error),
            Self::Files(FilesError::Store(error))
            | Self::Access(AccessError::Files(FilesError::Store(error))) => is_withdrawn(error),
            _ => false,
        }
    }
}

fn is_withdrawn(error: &StoreError) -> bool {
    matches!(error, StoreError::Withdrawn { .. })
}

//! Errors from making, reading and restoring backups.

use std::path::PathBuf;

use svc_base::failpoint::InjectedFailure;
use svc_store::StoreError;

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An object or blob is malformed, or does not match its name or the index.
    #[error("the repository's {what} is damaged: {reason}")]
    Corrupt { what: String, reason: String },
    #[error(
        "cannot decrypt the repository's configuration: the key is wrong, or the configuration is damaged"
    )]
    WrongKey,
    #[error("the repository has format version {0}; only version 2 is supported")]
    UnsupportedVersion(u32),
    #[error("the repository's index changed during every attempt to read it; try again later")]
    IndexChanging,
    #[error(
        "the save took so long that pruning may have deleted packs that its snapshot needs; the next save writes them \
         again"
    )]
    SaveTooLong,
    #[error("the system provides no random bytes")]
    NoRandomness,
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the restored files need at least {needed} bytes, but only {available} are available")]
    NoSpace { needed: u64, available: u64 },
    #[error(
        "the restore creates at least {needed} files and directories, but the file system has room for only {available}"
    )]
    NoInodes { needed: u64, available: u64 },
    #[error(
        "the backup contains {0} chunks of files and directories, which is the maximum: exclude files with .svcignore, \
         and ask the operator to prune earlier snapshots; pruned chunks count until they are deleted, three days later"
    )]
    TooManyBlobs(usize),
    #[error("the operation was cancelled, or one of its threads panicked")]
    Stopped,
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    #[error("cannot encode the {what}: {reason}")]
    Encode { what: &'static str, reason: String },
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl FilesError {
    pub fn corrupt(what: impl Into<String>, reason: &impl std::fmt::Display) -> Self {
        let reason = svc_base::untrusted_text::truncate_printable(&reason.to_string());
        Self::Corrupt { what: what.into(), reason }
    }

    pub(crate) fn encode(what: &'static str, reason: &impl std::fmt::Display) -> Self {
        Self::Encode { what, reason: reason.to_string() }
    }

    /// Returns a function that adds the action and the path to an I/O error.
    pub(crate) fn io<E: Into<std::io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { action, path: path.into(), source: source.into() }
    }

    /// Whether an object is missing or damaged, in which case another copy may be intact.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::Store(StoreError::NotFound { .. }))
    }

    /// Whether the file system has too little free space or too few free inodes.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::NoSpace { .. } | Self::NoInodes { .. })
    }

    /// Converts an I/O error to `NoSpace` if the disk is full: other programs may have filled it since the free space
    /// was checked.
    pub(crate) fn or_no_space(self, needed: u64) -> Self {
        match self {
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                Self::NoSpace { needed, available: 0 }
            }
            error => error,
        }
    }

    /// Whether a retry may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Store(error) => error.is_transient(),
            Self::IndexChanging | Self::SaveTooLong => true,
            _ => false,
        }
    }
}

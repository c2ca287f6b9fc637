//! Errors from creating, reading and restoring backups.

use std::path::PathBuf;

use svc_base::failpoint::InjectedFailure;
use svc_store::StoreError;

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An object or blob is malformed, or doesn't match its name or the index.
    #[error("the repository's {what} is damaged: {reason}")]
    Corrupt { what: String, reason: String },
    #[error("cannot decrypt the repository configuration: wrong key, or the configuration is damaged")]
    WrongKey,
    #[error("unsupported repository format version {0}: expected version 2")]
    UnsupportedVersion(u32),
    #[error("the repository index kept changing while it was being read; try again later")]
    IndexChanging,
    #[error(
        "the save took so long that a prune may have deleted packs that its snapshot needs; the next save writes them \
         again"
    )]
    SaveTooLong,
    #[error("the system's random number generator failed")]
    NoRandomness,
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the restore needs at least {needed} bytes, but only {available} are available")]
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
    #[error("operation cancelled, or a worker thread panicked")]
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

    /// Returns a closure for `map_err` that adds the action and path to an I/O error.
    pub(crate) fn io<E: Into<std::io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { action, path: path.into(), source: source.into() }
    }

    /// Whether an object is missing or corrupt, in which case another copy may be intact.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::Store(StoreError::NotFound { .. }))
    }

    /// Whether the file system is out of space or inodes.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::NoSpace { .. } | Self::NoInodes { .. })
    }

    /// Converts a disk-full I/O error to `NoSpace`: other programs may have filled the disk since free space was
    /// checked.
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

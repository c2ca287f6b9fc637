//! Why a snapshot could not be loaded.

use std::process::ExitStatus;

use super::download::DownloadError;
use crate::system::postgres;
use crate::system::postgres::ConnectError;
use svc_base::applet::Exit;
use svc_base::failpoint::Injected;

/// Why the snapshot could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(
        "{key} is of PostgreSQL {of}, and this machine has {here}: it cannot be read into an older one\n  next: recover with \
         an image that has PostgreSQL {of}, or `svcctl recover --snapshot` with an earlier snapshot"
    )]
    Newer { key: String, of: u32, here: i32 },
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{action}")]
    Query {
        action: String,
        #[source]
        source: tokio_postgres::Error,
    },
    #[error("start pg_restore")]
    Start(#[source] std::io::Error),
    #[error("pg_restore exited with {status}: {stderr_tail}")]
    Restore { status: ExitStatus, stderr_tail: String },
    #[error("pg_restore did not exit in time")]
    Stuck,
    #[error("the restored database is not what the record says: {0}")]
    Differs(String),
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl LoadError {
    /// `Refused` if the snapshot itself cannot become a database here.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Connect(_) => Exit::Unavailable,
            Self::Download(error) => error.exit(),
            Self::Query { source, .. } => postgres::exit(source),
            Self::Newer { .. } | Self::Restore { .. } | Self::Differs(_) => Exit::Refused,
            Self::Start(_) | Self::Stuck | Self::Injected(_) => Exit::Internal,
        }
    }
}

pub(super) fn query(action: impl Into<String>) -> impl FnOnce(tokio_postgres::Error) -> LoadError {
    let action = action.into();
    move |source| LoadError::Query { action, source }
}

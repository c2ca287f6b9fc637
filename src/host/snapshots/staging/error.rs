//! Snapshot load errors and their exit codes.

use std::process::ExitStatus;

use super::download::DownloadError;
use crate::system::postgres;
use crate::system::postgres::ConnectError;
use svc_base::applet::Exit;
use svc_base::failpoint::InjectedFailure;

/// Errors from loading a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(
        "{key} was taken with PostgreSQL {snapshot}, but this machine has PostgreSQL {server}, which \
         cannot load it\n  next: recover with an image that has PostgreSQL {snapshot}, or restore an earlier \
         snapshot with `svcctl recover USER --snapshot KEY`"
    )]
    NewerPostgres { key: String, snapshot: u32, server: i32 },
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot {action}")]
    Query {
        action: String,
        #[source]
        source: tokio_postgres::Error,
    },
    #[error("cannot run pg_restore")]
    Tool(#[source] std::io::Error),
    #[error("pg_restore exited with {status}: {stderr}")]
    Restore { status: ExitStatus, stderr: String },
    #[error("pg_restore did not exit within {seconds} s")]
    TimedOut { seconds: u64 },
    #[error("the restored database differs from the snapshot's sidecar: {0}")]
    Mismatch(String),
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl LoadError {
    /// Returns `Refused` if the snapshot itself cannot be loaded on this machine.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Connect(_) => Exit::Unavailable,
            Self::Download(error) => error.exit(),
            Self::Query { source, .. } => postgres::to_exit(source),
            Self::NewerPostgres { .. } | Self::Restore { .. } | Self::Mismatch(_) => Exit::Refused,
            Self::Tool(_) | Self::TimedOut { .. } | Self::Injected(_) => Exit::Internal,
        }
    }
}

pub(super) fn query_error(action: impl Into<String>) -> impl FnOnce(tokio_postgres::Error) -> LoadError {
    let action = action.into();
    move |source| LoadError::Query { action, source }
}

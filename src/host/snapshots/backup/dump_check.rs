//! `pg_restore` that reads a dump in full and makes nothing of it: the one check that finds every damage.

use std::process::ExitStatus;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::dump;
use crate::host::system::postgres_tools;
use crate::host::system::postgres_tools::PgTools;

/// Chunks that the reader of the dump may be behind its writer.
const QUEUE: usize = 8;
/// How long a tool may take to end after the last byte.
pub const ENDING: Duration = Duration::from_secs(600);
/// What is kept of a tool's complaints.
const COMPLAINT: usize = 4096;

/// Why a dump was not read in full.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("start {tool}")]
    Start {
        tool: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("the dump is damaged, pg_restore ended with {status}: {complaint}")]
    Damaged { status: ExitStatus, complaint: String },
    #[error("{tool} did not end for {seconds} s")]
    Stuck { tool: &'static str, seconds: u64 },
    #[error("the reader of the dump ended early")]
    Gone,
}

/// The tool at work. It ends with this.
pub struct ReadThrough {
    child: Child,
    chunks: mpsc::Sender<Bytes>,
    fed: JoinHandle<bool>,
    complaint: JoinHandle<String>,
}

impl ReadThrough {
    /// # Errors
    /// [`ReadError::Start`].
    pub fn start(tools: &PgTools) -> Result<Self, ReadError> {
        let start = |source| ReadError::Start { tool: "pg_restore", source };
        let mut child = tools.check_dump().spawn().map_err(start)?;
        if let Some(stdin) = &child.stdin {
            dump::widen(stdin);
        }
        let complaint = tokio::spawn(tail(child.stderr.take()));
        let (chunks, queue) = mpsc::channel(QUEUE);
        let fed = tokio::spawn(feed(child.stdin.take(), queue));
        Ok(Self { child, chunks, fed, complaint })
    }

    /// The next bytes.
    ///
    /// # Errors
    /// [`ReadError::Gone`] where it reads no more: [`end`](Self::end) says why.
    pub async fn take(&self, chunk: Bytes) -> Result<(), ReadError> {
        self.chunks.send(chunk).await.map_err(|_| ReadError::Gone)
    }

    /// After the last byte: whether all of it was a dump.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn end(self) -> Result<(), ReadError> {
        let Self { mut child, chunks, fed, complaint } = self;
        drop(chunks);
        let read_in_full = fed.await.unwrap_or(false);
        let status = ended(&mut child, "pg_restore").await?;
        if !status.success() {
            return Err(ReadError::Damaged { status, complaint: complaint.await.unwrap_or_default() });
        }
        if read_in_full { Ok(()) } else { Err(ReadError::Gone) }
    }
}

/// Whether every chunk went into the reader.
async fn feed(stdin: Option<ChildStdin>, mut chunks: mpsc::Receiver<Bytes>) -> bool {
    let Some(mut stdin) = stdin else { return false };
    while let Some(chunk) = chunks.recv().await {
        if stdin.write_all(&chunk).await.is_err() {
            return false;
        }
    }
    stdin.shutdown().await.is_ok()
}

/// # Errors
/// [`ReadError::Stuck`] after [`ENDING`].
pub async fn ended(child: &mut Child, tool: &'static str) -> Result<ExitStatus, ReadError> {
    let ended = tokio::time::timeout(ENDING, child.wait()).await;
    ended
        .map_err(|_| ReadError::Stuck { tool, seconds: ENDING.as_secs() })?
        .map_err(|source| ReadError::Start { tool, source })
}

/// The last of what a tool said, in one line.
pub async fn tail(stderr: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let mut kept = Vec::new();
    let mut piece = [0; 1024];
    while let Ok(read @ 1..) = stderr.read(&mut piece).await {
        kept.extend_from_slice(&piece[..read]);
        kept.drain(..kept.len().saturating_sub(COMPLAINT));
    }
    postgres_tools::summarize_stderr(&String::from_utf8_lossy(&kept))
}

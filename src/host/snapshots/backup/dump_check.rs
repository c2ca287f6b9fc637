//! Reads a dump in full with `pg_restore` and discards the output: the only check that finds every kind of damage.

use std::process::ExitStatus;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::system::postgres_tools;
use crate::system::postgres_tools::PgTools;

/// Chunks by which the reader may lag behind the writer.
const QUEUE_CAPACITY: usize = 8;
/// Maximum time for a tool to exit after the last byte.
pub const EXIT_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum length of a reported error of a tool.
const MAX_COMPLAINT_BYTES: usize = 4096;

/// Why a dump was not read in full.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("start {tool}")]
    Start {
        tool: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("the dump is damaged: pg_restore exited with {status}: {complaint}")]
    Damaged { status: ExitStatus, complaint: String },
    /// The state of the dump is unknown.
    #[error("pg_restore was killed: {status}")]
    Killed { status: ExitStatus },
    #[error("wait for {tool}")]
    Wait {
        tool: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("{tool} did not exit within {seconds} s")]
    Stuck { tool: &'static str, seconds: u64 },
    #[error("the reader of the dump exited early")]
    ReaderExited,
}

/// A running `pg_restore`, killed on drop.
pub struct ReadThrough {
    child: Child,
    chunks: mpsc::Sender<Bytes>,
    feeder: JoinHandle<bool>,
    complaint: JoinHandle<String>,
}

impl ReadThrough {
    /// # Errors
    /// [`ReadError::Start`].
    pub fn start(tools: &PgTools) -> Result<Self, ReadError> {
        let start = |source| ReadError::Start { tool: "pg_restore", source };
        let mut child = tools.check_dump().spawn().map_err(start)?;
        if let Some(stdin) = &child.stdin {
            postgres_tools::widen_pipe(stdin);
        }
        let complaint = tokio::spawn(tail(child.stderr.take()));
        let (chunks, queue) = mpsc::channel(QUEUE_CAPACITY);
        let feeder = tokio::spawn(feed(child.stdin.take(), queue));
        Ok(Self { child, chunks, feeder, complaint })
    }

    /// Feeds the next bytes.
    ///
    /// # Errors
    /// [`ReadError::ReaderExited`] if the tool no longer reads: [`finish`](Self::finish) returns the reason.
    pub async fn push(&self, chunk: Bytes) -> Result<(), ReadError> {
        self.chunks.send(chunk).await.map_err(|_| ReadError::ReaderExited)
    }

    /// After the last byte: checks that everything was a valid dump.
    pub async fn finish(self) -> Result<(), ReadError> {
        let Self { mut child, chunks, feeder, complaint } = self;
        drop(chunks);
        let read_in_full = feeder.await.unwrap_or(false);
        let status = wait_for_exit(&mut child, "pg_restore").await?;
        if status.code().is_none() {
            return Err(ReadError::Killed { status });
        }
        if !status.success() {
            return Err(ReadError::Damaged { status, complaint: complaint.await.unwrap_or_default() });
        }
        if read_in_full { Ok(()) } else { Err(ReadError::ReaderExited) }
    }
}

/// Feeds the tool; returns whether every chunk was written.
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
/// [`ReadError::Stuck`] after [`EXIT_TIMEOUT`]; [`ReadError::Wait`].
pub async fn wait_for_exit(child: &mut Child, tool: &'static str) -> Result<ExitStatus, ReadError> {
    let ended = tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await;
    ended
        .map_err(|_| ReadError::Stuck { tool, seconds: EXIT_TIMEOUT.as_secs() })?
        .map_err(|source| ReadError::Wait { tool, source })
}

/// The end of a tool's error output, on one line.
pub async fn tail(stderr: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let mut output = Vec::new();
    let mut buffer = [0; 1024];
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        output.extend_from_slice(&buffer[..read]);
        output.drain(..output.len().saturating_sub(MAX_COMPLAINT_BYTES));
    }
    postgres_tools::summarize_stderr(&String::from_utf8_lossy(&output))
}

//! Reads a dump in full with `pg_restore`, discarding the output. Just listing the dump's entries wouldn't detect
//! corruption in the rows.

use std::process::ExitStatus;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::system::postgres_tools;
use crate::system::postgres_tools::PgTools;

/// Number of chunks the reader may lag behind the writer.
const QUEUE_CAPACITY: usize = 8;
/// Maximum time from a dump's last byte to the exit of a tool that only reads or writes the dump.
pub const EXIT_TIMEOUT: Duration = Duration::from_secs(600);

/// Errors from reading a dump in full.
#[derive(Debug, thiserror::Error)]
pub enum DumpCheckError {
    #[error("cannot start {tool}")]
    Start {
        tool: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("corrupt dump: pg_restore exited with {status}: {stderr_tail}")]
    Damaged { status: ExitStatus, stderr_tail: String },
    /// The dump may or may not be corrupt.
    #[error("pg_restore was killed: {status}")]
    Killed { status: ExitStatus },
    /// The dump may or may not be corrupt.
    #[error("pg_restore did not run to completion: {status}: {stderr_tail}")]
    Interrupted { status: ExitStatus, stderr_tail: String },
    #[error("cannot wait for {tool}")]
    Wait {
        tool: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("{tool} did not exit within {seconds} s")]
    TimedOut { tool: &'static str, seconds: u64 },
    #[error("pg_restore stopped reading before the end of the dump")]
    ReaderExited,
}

/// A running `pg_restore`, killed on drop.
pub struct DumpCheck {
    child: Child,
    chunks: mpsc::Sender<Bytes>,
    feeder: JoinHandle<bool>,
    stderr_tail: JoinHandle<String>,
}

impl DumpCheck {
    /// Starts `pg_restore`.
    ///
    /// # Errors
    /// [`DumpCheckError::Start`] if it cannot be started.
    pub fn start(tools: &PgTools) -> Result<Self, DumpCheckError> {
        let start_error = |source| DumpCheckError::Start { tool: "pg_restore", source };
        let mut child = tools.check_dump_command().spawn().map_err(start_error)?;
        if let Some(stdin) = &child.stdin {
            postgres_tools::enlarge_pipe(stdin);
        }
        let stderr_tail = tokio::spawn(postgres_tools::read_stderr_tail(child.stderr.take()));
        let (chunks, queue) = mpsc::channel(QUEUE_CAPACITY);
        let feeder = tokio::spawn(feed(child.stdin.take(), queue));
        Ok(Self { child, chunks, feeder, stderr_tail })
    }

    /// Feeds the next chunk, waiting while the queue is full.
    ///
    /// # Errors
    /// [`DumpCheckError::ReaderExited`] if `pg_restore` stopped reading; [`finish`](Self::finish) returns the reason.
    pub async fn push(&self, chunk: Bytes) -> Result<(), DumpCheckError> {
        self.chunks.send(chunk).await.map_err(|_| DumpCheckError::ReaderExited)
    }

    /// Closes the input and checks that it was a complete, valid dump.
    pub async fn finish(self) -> Result<(), DumpCheckError> {
        let Self { mut child, chunks, feeder, stderr_tail } = self;
        drop(chunks);
        let was_read_in_full = feeder.await.unwrap_or(false);
        let status = wait_for_exit(&mut child, "pg_restore", EXIT_TIMEOUT).await?;
        if status.code().is_none() {
            return Err(DumpCheckError::Killed { status });
        }
        if !status.success() {
            let stderr_tail = stderr_tail.await.unwrap_or_default();
            return Err(if is_tool_failure(status) {
                DumpCheckError::Interrupted { status, stderr_tail }
            } else {
                DumpCheckError::Damaged { status, stderr_tail }
            });
        }
        if was_read_in_full { Ok(()) } else { Err(DumpCheckError::ReaderExited) }
    }
}

/// Returns whether `pg_restore` failed to start or was killed in the container. `podman exec` reports its own failures
/// as 125 to 127 or 255, and a signal as 128 plus its number. `pg_restore` itself exits with 0 or 1.
fn is_tool_failure(status: ExitStatus) -> bool {
    status.code().is_some_and(|code| code >= 125)
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

/// Waits for a tool to exit.
///
/// # Errors
/// [`DumpCheckError::TimedOut`] after `timeout`; [`DumpCheckError::Wait`] if the system call fails.
pub async fn wait_for_exit(
    child: &mut Child,
    tool: &'static str,
    timeout: Duration,
) -> Result<ExitStatus, DumpCheckError> {
    let exited = tokio::time::timeout(timeout, child.wait()).await;
    exited
        .map_err(|_| DumpCheckError::TimedOut { tool, seconds: timeout.as_secs() })?
        .map_err(|source| DumpCheckError::Wait { tool, source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn is_tool_failure_excludes_exit_codes_of_pg_restore() {
        let has_failed = |exit_code: i32| is_tool_failure(ExitStatus::from_raw(exit_code << 8));
        assert!(!has_failed(0) && !has_failed(1));
        // podman failure, command not found, SIGKILL, container not running
        assert!([125, 127, 137, 255].into_iter().all(has_failed));
    }
}

//! The stream: `pg_dump` → SHA-256 → the upload's parts, while `pg_restore` reads the same bytes in full.
//!
//! A [`VerifiedDump`] exists only when both tools ended well, every byte is at the store and the dump has a table of
//! contents; without one nobody completes an upload. Memory is bounded by the parts and two short queues.

use std::os::fd::AsFd;
use std::process::ExitStatus;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin};
use tokio::sync::mpsc;

use super::toc;
use crate::failpoint;
use crate::host::pgconn::Server;
use crate::host::pgtools::{self, PgTools};
use crate::store::upload::{Upload, UploadError};

const CHUNK: usize = 256 * 1024;
const PIPE: i32 = 1 << 20;
/// Chunks that the reader of the dump may be behind its writer.
const QUEUE: usize = 8;
/// The longest silence of `pg_dump`; it may wait a minute for a lock.
const SILENCE: Duration = Duration::from_secs(600);
/// How long the tools may take to end after the last byte.
const ENDING: Duration = Duration::from_secs(600);
/// What is kept of a tool's complaints.
const COMPLAINT: usize = 4096;

/// A dump that was read through in full and lies, still invisible, at the store.
#[derive(Debug, PartialEq, Eq)]
pub struct VerifiedDump {
    pub size_bytes: u64,
    pub sha256: String,
}

/// Why there is no verified dump.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    #[error("start {tool}")]
    Start {
        tool: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("pg_dump ended with {status}: {complaint}")]
    Dump { status: ExitStatus, complaint: String },
    #[error("the dump is damaged, pg_restore ended with {status}: {complaint}")]
    Damaged { status: ExitStatus, complaint: String },
    #[error("the dump has no table of contents")]
    NoContents,
    #[error("{tool} did not move for {seconds} s")]
    Stuck { tool: &'static str, seconds: u64 },
    #[error("read from pg_dump")]
    Read(#[source] std::io::Error),
    #[error("the reader of the dump ended early")]
    ReaderGone,
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error(transparent)]
    Injected(#[from] failpoint::Injected),
}

/// Dumps the exported snapshot into the upload.
///
/// # Errors
/// [`DumpError`]; the upload is then good for nothing but to be aborted.
pub async fn stream(
    tools: &PgTools,
    server: &Server,
    snapshot: &str,
    upload: &mut Upload,
) -> Result<VerifiedDump, DumpError> {
    let mut dump = tools
        .dump(server, snapshot)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .map_err(|source| DumpError::Start { tool: "pg_dump", source })?;
    let mut reader =
        tools.read_through().spawn().map_err(|source| DumpError::Start { tool: "pg_restore", source })?;
    if let (Some(from), Some(to)) = (&dump.stdout, &reader.stdin) {
        widen(from);
        widen(to);
    }
    let complaints = (tokio::spawn(tail(dump.stderr.take())), tokio::spawn(tail(reader.stderr.take())));
    let (to_reader, chunks) = mpsc::channel(QUEUE);
    let fed = tokio::spawn(feed(reader.stdin.take(), chunks));

    let pumped = pump(dump.stdout.take(), to_reader, upload).await;
    if !matches!(pumped, Ok(_) | Err(DumpError::ReaderGone)) {
        return Err(pumped.err().unwrap_or(DumpError::ReaderGone));
    }
    let dump_status = end(&mut dump, "pg_dump").await?;
    let read_in_full = fed.await.unwrap_or(false);
    let reader_status = end(&mut reader, "pg_restore").await?;
    let complaint = |text: Result<String, _>| text.unwrap_or_default();
    // A reader that gives up breaks the pipe of a healthy pg_dump: then its word comes first.
    let reader_gave_up = pumped.is_err();
    if !dump_status.success() && !reader_gave_up {
        return Err(DumpError::Dump { status: dump_status, complaint: complaint(complaints.0.await) });
    }
    if !reader_status.success() {
        return Err(DumpError::Damaged { status: reader_status, complaint: complaint(complaints.1.await) });
    }
    let (verified, entries) = pumped?;
    if !read_in_full {
        return Err(DumpError::ReaderGone);
    }
    match entries {
        Some(1..) => Ok(verified),
        _ => Err(DumpError::NoContents),
    }
}

/// Fewer wake-ups per byte. A kernel that refuses leaves the pipe as it is.
fn widen(pipe: impl AsFd) {
    let _ = nix::fcntl::fcntl(pipe, nix::fcntl::FcntlArg::F_SETPIPE_SZ(PIPE));
}

/// Moves every byte of the dump; the answer counts for nothing until both tools ended well.
async fn pump(
    stdout: Option<impl AsyncRead + Unpin>,
    to_reader: mpsc::Sender<Bytes>,
    upload: &mut Upload,
) -> Result<(VerifiedDump, Option<u32>), DumpError> {
    let mut stdout = stdout.ok_or(DumpError::ReaderGone)?;
    let mut digest = Sha256::new();
    let mut size_bytes = 0;
    let mut head = Vec::new();
    loop {
        let chunk = next_chunk(&mut stdout, upload.room().min(CHUNK)).await?;
        if chunk.is_empty() {
            break;
        }
        digest.update(&chunk);
        size_bytes += chunk.len() as u64;
        head.extend_from_slice(&chunk[..chunk.len().min(toc::HEAD - head.len())]);
        to_reader.send(chunk.clone()).await.map_err(|_| DumpError::ReaderGone)?;
        upload.push(chunk).await?;
        failpoint::pass("backup.streaming")?;
    }
    drop(to_reader);
    upload.flush().await?;
    Ok((VerifiedDump { size_bytes, sha256: hex::encode(digest.finalize()) }, toc::entries(&head)))
}

/// A full chunk, or what is left; empty at the end.
async fn next_chunk(stdout: &mut (impl AsyncRead + Unpin), size: usize) -> Result<Bytes, DumpError> {
    let mut chunk = BytesMut::with_capacity(size);
    while chunk.len() < size {
        let mut room = (&mut *stdout).take((size - chunk.len()) as u64);
        let read = tokio::time::timeout(SILENCE, room.read_buf(&mut chunk)).await;
        let stuck = |_| DumpError::Stuck { tool: "pg_dump", seconds: SILENCE.as_secs() };
        if read.map_err(stuck)?.map_err(DumpError::Read)? == 0 {
            break;
        }
    }
    Ok(chunk.freeze())
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

async fn end(child: &mut Child, tool: &'static str) -> Result<ExitStatus, DumpError> {
    let ended = tokio::time::timeout(ENDING, child.wait()).await;
    ended
        .map_err(|_| DumpError::Stuck { tool, seconds: ENDING.as_secs() })?
        .map_err(|source| DumpError::Start { tool, source })
}

/// The last of what a tool said, in one line.
async fn tail(stderr: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let mut kept = Vec::new();
    let mut piece = [0; 1024];
    while let Ok(read @ 1..) = stderr.read(&mut piece).await {
        kept.extend_from_slice(&piece[..read]);
        kept.drain(..kept.len().saturating_sub(COMPLAINT));
    }
    pgtools::complaint(&String::from_utf8_lossy(&kept))
}

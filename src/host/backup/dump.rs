//! The stream: `pg_dump` → SHA-256 → the upload's parts, while `pg_restore` reads the same bytes in full.
//!
//! A [`VerifiedDump`] exists only when both tools ended well, every byte is at the store and the dump has a table of
//! contents; without one nobody completes an upload. Memory is bounded by the parts and two short queues.

use std::os::fd::AsFd;
use std::process::ExitStatus;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::read_through::{self, ReadError, ReadThrough};
use super::toc;
use crate::failpoint;
use crate::host::pgconn::Server;
use crate::host::pgtools::PgTools;
use crate::store::upload::{Upload, UploadError};

const CHUNK: usize = 256 * 1024;
const PIPE: i32 = 1 << 20;
/// The longest silence of `pg_dump`; it may wait a minute for a lock.
const SILENCE: Duration = Duration::from_secs(600);

/// A dump that was read through in full and lies, still invisible, at the store.
#[derive(Debug, PartialEq, Eq)]
pub struct VerifiedDump {
    pub size_bytes: u64,
    pub sha256: String,
}

/// Why there is no verified dump.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    #[error("pg_dump ended with {status}: {complaint}")]
    Dump { status: ExitStatus, complaint: String },
    #[error(transparent)]
    Reader(#[from] ReadError),
    #[error("the dump has no table of contents")]
    NoContents,
    #[error("{tool} did not move for {seconds} s")]
    Stuck { tool: &'static str, seconds: u64 },
    #[error("read from pg_dump")]
    Read(#[source] std::io::Error),
    #[error("pg_dump has no output")]
    NoOutput,
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
    let start = |source| ReadError::Start { tool: "pg_dump", source };
    let mut dump =
        tools.dump(server, snapshot).stdout(std::process::Stdio::piped()).spawn().map_err(start)?;
    let reader = ReadThrough::start(tools)?;
    let stdout = dump.stdout.take().ok_or(DumpError::NoOutput)?;
    widen(&stdout);
    let complaint = tokio::spawn(read_through::tail(dump.stderr.take()));

    let pumped = pump(stdout, &reader, upload).await;
    let reader_gave_up = matches!(pumped, Err(DumpError::Reader(ReadError::Gone)));
    if pumped.is_err() && !reader_gave_up {
        return Err(pumped.err().unwrap_or(DumpError::NoOutput));
    }
    let status = read_through::ended(&mut dump, "pg_dump").await?;
    let read = reader.end().await;
    // A reader that gives up breaks the pipe of a healthy pg_dump: then its word comes first.
    if !status.success() && !reader_gave_up {
        return Err(DumpError::Dump { status, complaint: complaint.await.unwrap_or_default() });
    }
    read?;
    let (verified, entries) = pumped?;
    match entries {
        Some(1..) => Ok(verified),
        _ => Err(DumpError::NoContents),
    }
}

/// Fewer wake-ups per byte. A kernel that refuses leaves the pipe as it is.
pub fn widen(pipe: impl AsFd) {
    let _ = nix::fcntl::fcntl(pipe, nix::fcntl::FcntlArg::F_SETPIPE_SZ(PIPE));
}

/// Moves every byte of the dump; the answer counts for nothing until both tools ended well.
async fn pump(
    mut stdout: impl AsyncRead + Unpin,
    reader: &ReadThrough,
    upload: &mut Upload,
) -> Result<(VerifiedDump, Option<u32>), DumpError> {
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
        reader.take(chunk.clone()).await?;
        upload.push(chunk).await?;
        failpoint::pass("backup.streaming")?;
    }
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

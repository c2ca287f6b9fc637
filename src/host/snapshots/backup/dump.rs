//! The dump pipeline: `pg_dump` → SHA-256 → sink, with `pg_restore` reading the same bytes in full.
//!
//! [`dump_snapshot`] only returns a [`VerifiedDump`] if both tools succeeded, every byte was delivered and the dump has
//! a table of contents. Uploads are never completed without a [`VerifiedDump`]. Memory use is bounded by the upload's
//! parts and a short queue.

use std::process::ExitStatus;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::dump_check;
use super::dump_check::{DumpCheck, DumpCheckError};
use super::settings::BackupSettings;
use super::snapshot::Snapshot;
use super::toc;
use crate::system::config::Identity;
use crate::system::postgres;
use crate::system::postgres_tools;
use crate::system::store;
use svc_base::applet::Exit;
use svc_base::clock;
use svc_base::failpoint;
use svc_store::snapshot::{self as stored, DatabaseFacts, Sidecar, TableCount};
use svc_store::upload::{Upload, UploadError};

const CHUNK_BYTES: usize = 256 * 1024;
/// Maximum time without output from `pg_dump`, which can wait up to a minute for a lock.
const STALL_TIMEOUT: Duration = Duration::from_secs(600);

/// A dump destination.
pub trait Sink {
    /// Returns the maximum length of the next chunk, in bytes.
    fn max_chunk_bytes(&self) -> usize;

    /// Accepts the next chunk.
    ///
    /// # Errors
    /// [`DumpError`] if the chunk cannot be delivered.
    async fn push(&mut self, chunk: Bytes) -> Result<(), DumpError>;

    /// Waits until every byte has been delivered.
    ///
    /// # Errors
    /// [`DumpError`] if any byte cannot be delivered.
    async fn flush(&mut self) -> Result<(), DumpError>;
}

impl Sink for Upload {
    fn max_chunk_bytes(&self) -> usize {
        Self::part_space(self)
    }

    async fn push(&mut self, chunk: Bytes) -> Result<(), DumpError> {
        Ok(Self::push(self, chunk).await?)
    }

    async fn flush(&mut self) -> Result<(), DumpError> {
        Ok(Self::flush(self).await?)
    }
}

/// A dump that was read in full and delivered to its sink. If the sink is an upload, it is not completed yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedDump {
    pub size_bytes: u64,
    pub sha256: String,
}

/// Errors from creating a verified dump.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    #[error("pg_dump exited with {status}: {stderr_tail}")]
    Dump { status: ExitStatus, stderr_tail: String },
    #[error(transparent)]
    Reader(#[from] DumpCheckError),
    #[error("the dump has no table of contents")]
    NoTableOfContents,
    #[error("{tool} made no progress for {seconds} s")]
    Stalled { tool: &'static str, seconds: u64 },
    #[error("cannot read from pg_dump")]
    Read(#[source] std::io::Error),
    #[error("pg_dump has no standard output")]
    NoOutput,
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error("cannot write the dump")]
    Write(#[source] std::io::Error),
    #[error("cannot count rows or read the database catalog")]
    Query(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Injected(#[from] failpoint::InjectedFailure),
}

impl DumpError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Upload(UploadError::Store(error)) => store::to_exit(error),
            Self::Query(error) => postgres::to_exit(error),
            _ => Exit::Internal,
        }
    }
}

/// A verified dump and its sidecar facts, taken from the same snapshot.
pub struct DumpedSnapshot {
    pub dump: VerifiedDump,
    pub tables: Vec<TableCount>,
    pub roles: Vec<String>,
    pub facts: DatabaseFacts,
}

impl DumpedSnapshot {
    /// Builds the sidecar for the dump stored as `key`, which has just been verified.
    pub fn into_sidecar(self, key: &str, identity: &Identity, snapshot: &Snapshot) -> Sidecar {
        Sidecar {
            version: stored::FORMAT_VERSION,
            key: key.to_owned(),
            size_bytes: self.dump.size_bytes,
            sha256: self.dump.sha256,
            pg_version: snapshot.pg_version.clone(),
            machine_id: identity.machine,
            epoch: identity.epoch,
            taken_at: snapshot.taken_at,
            verified_at: clock::now_ms(),
            roles: self.roles,
            tables: self.tables,
            database: Some(self.facts),
            database_identity: None,
        }
    }
}

/// Dumps the snapshot while concurrently reading row counts, roles and database facts.
pub async fn dump_snapshot(
    settings: &BackupSettings,
    snapshot: &Snapshot,
    sink: &mut impl Sink,
) -> Result<DumpedSnapshot, DumpError> {
    let reading_facts = async {
        let facts = (
            snapshot.count_rows().await?,
            snapshot.read_referenced_roles().await?,
            snapshot.read_facts().await?,
        );
        Ok::<_, DumpError>(facts)
    };
    let dumping = dump_to_sink(settings, &snapshot.id, sink);
    let (dump, (tables, roles, facts)) = tokio::try_join!(dumping, reading_facts)?;
    Ok(DumpedSnapshot { dump, tables, roles, facts })
}

/// Dumps the exported snapshot.
///
/// # Errors
/// [`DumpError`] if a tool or the sink fails. The sink's content must then be discarded.
async fn dump_to_sink(
    settings: &BackupSettings,
    snapshot_id: &str,
    sink: &mut impl Sink,
) -> Result<VerifiedDump, DumpError> {
    let start_error = |source| DumpCheckError::Start { tool: "pg_dump", source };
    let BackupSettings { tools, server, .. } = settings;
    let compression = tools.choose_compression(settings.compression).await;
    if compression != settings.compression {
        tracing::warn!(
            configured = %settings.compression, used = %compression,
            "configured compression not supported by the installed PostgreSQL tools"
        );
    }
    let mut dump = tools.dump_command(server, snapshot_id, compression);
    let mut dump = dump.stdout(std::process::Stdio::piped()).spawn().map_err(start_error)?;
    let reader = DumpCheck::start(tools)?;
    let stdout = dump.stdout.take().ok_or(DumpError::NoOutput)?;
    postgres_tools::enlarge_pipe(&stdout);
    let stderr_tail = tokio::spawn(postgres_tools::read_stderr_tail(dump.stderr.take()));

    let pumped = match pump(stdout, &reader, sink).await {
        Err(error) if !matches!(error, DumpError::Reader(DumpCheckError::ReaderExited)) => return Err(error),
        pumped => pumped,
    };
    let has_reader_exited = pumped.is_err();
    let status = dump_check::wait_for_exit(&mut dump, "pg_dump", dump_check::EXIT_TIMEOUT).await?;
    let read = reader.finish().await;
    // A failing reader breaks the pipe of a healthy pg_dump, so the reader's error takes precedence.
    if !status.success() && !has_reader_exited {
        return Err(DumpError::Dump { status, stderr_tail: stderr_tail.await.unwrap_or_default() });
    }
    read?;
    let (verified, entries) = pumped?;
    match entries {
        Some(1..) => Ok(verified),
        _ => Err(DumpError::NoTableOfContents),
    }
}

/// Copies the dump to the reader and the sink. Returns its size and digest, and its TOC entry count if the head is
/// valid. The result is only valid if both tools succeed.
async fn pump(
    mut stdout: impl AsyncRead + Unpin,
    reader: &DumpCheck,
    sink: &mut impl Sink,
) -> Result<(VerifiedDump, Option<u32>), DumpError> {
    let mut digest = Sha256::new();
    let mut size_bytes = 0;
    let mut head = Vec::new();
    loop {
        let chunk = read_chunk(&mut stdout, sink.max_chunk_bytes().min(CHUNK_BYTES)).await?;
        if chunk.is_empty() {
            break;
        }
        digest.update(&chunk);
        size_bytes += chunk.len() as u64;
        head.extend_from_slice(&chunk[..chunk.len().min(toc::HEAD_BYTES - head.len())]);
        reader.push(chunk.clone()).await?;
        sink.push(chunk).await?;
        failpoint::trigger("backup.streaming")?;
    }
    sink.flush().await?;
    Ok((VerifiedDump { size_bytes, sha256: hex::encode(digest.finalize()) }, toc::count_entries(&head)))
}

/// Reads `size` bytes, or fewer at the end of the dump. Returns an empty chunk at EOF.
async fn read_chunk(stdout: &mut (impl AsyncRead + Unpin), size: usize) -> Result<Bytes, DumpError> {
    let mut chunk = BytesMut::with_capacity(size);
    while chunk.len() < size {
        let mut limited = (&mut *stdout).take((size - chunk.len()) as u64);
        let read = tokio::time::timeout(STALL_TIMEOUT, limited.read_buf(&mut chunk)).await;
        let stalled = |_| DumpError::Stalled { tool: "pg_dump", seconds: STALL_TIMEOUT.as_secs() };
        if read.map_err(stalled)?.map_err(DumpError::Read)? == 0 {
            break;
        }
    }
    Ok(chunk.freeze())
}

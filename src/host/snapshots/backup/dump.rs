//! The stream: `pg_dump` → SHA-256 → where it goes, while `pg_restore` reads the same bytes in full.
//!
//! A [`VerifiedDump`] exists only when both tools ended well, every byte has arrived and the dump has a table of contents;
//! without one nobody completes an upload. Memory is bounded by the upload's parts and two short queues.

use std::os::fd::AsFd;
use std::process::ExitStatus;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::Settings;
use super::dump_check;
use super::dump_check::{ReadError, ReadThrough};
use super::snapshot::Snapshot;
use super::toc;
use crate::applet::Exit;
use crate::clock;
use crate::failpoint;
use crate::host::system::config::Identity;
use crate::host::system::postgres;
use crate::host::system::store;
use crate::store::snapshot::{self as stored, DatabaseFacts, SideRecord, TableCount};
use crate::store::upload::{Upload, UploadError};

const CHUNK: usize = 256 * 1024;
const PIPE: i32 = 1 << 20;
/// The longest silence of `pg_dump`; it may wait a minute for a lock.
const SILENCE: Duration = Duration::from_secs(600);

/// Where a dump goes.
pub trait Sink {
    /// How many bytes it takes at once.
    fn room(&self) -> usize;

    /// # Errors
    /// [`DumpError`], as all of these.
    async fn push(&mut self, chunk: Bytes) -> Result<(), DumpError>;

    /// After the last byte: all have arrived.
    async fn flush(&mut self) -> Result<(), DumpError>;
}

impl Sink for Upload {
    fn room(&self) -> usize {
        Self::room(self)
    }

    async fn push(&mut self, chunk: Bytes) -> Result<(), DumpError> {
        Ok(Self::push(self, chunk).await?)
    }

    async fn flush(&mut self) -> Result<(), DumpError> {
        Ok(Self::flush(self).await?)
    }
}

/// A dump that was read through in full, and is where it goes to, which nobody takes for whole yet.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    #[error("write the dump")]
    Write(#[source] std::io::Error),
    #[error("read the database's catalogue")]
    Query(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Injected(#[from] failpoint::Injected),
}

impl DumpError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Upload(UploadError::Store(error)) => store::exit(error),
            Self::Query(error) => postgres::exit(error),
            _ => Exit::Internal,
        }
    }
}

/// A verified dump with what its side record says of that moment.
pub struct Told {
    pub dump: VerifiedDump,
    pub tables: Vec<TableCount>,
    pub roles: Vec<String>,
    pub facts: DatabaseFacts,
}

impl Told {
    /// The side record of the dump, verified now, under this key.
    pub fn side_record(self, key: &str, identity: &Identity, snapshot: &Snapshot) -> SideRecord {
        SideRecord {
            version: stored::FORMAT,
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

/// Dumps the snapshot, and counts and notes what the dump does not say, at once.
///
/// # Errors
/// [`DumpError`].
pub async fn take(settings: &Settings, snapshot: &Snapshot, sink: &mut impl Sink) -> Result<Told, DumpError> {
    let telling = async {
        let told = (snapshot.counts().await?, snapshot.roles().await?, snapshot.facts().await?);
        Ok::<_, DumpError>(told)
    };
    let dumping = stream(settings, &snapshot.id, sink);
    let (dump, (tables, roles, facts)) = tokio::try_join!(dumping, telling)?;
    Ok(Told { dump, tables, roles, facts })
}

/// Dumps the exported snapshot.
///
/// # Errors
/// [`DumpError`]; what has arrived is then good for nothing.
async fn stream(
    settings: &Settings,
    snapshot: &str,
    sink: &mut impl Sink,
) -> Result<VerifiedDump, DumpError> {
    let start = |source| ReadError::Start { tool: "pg_dump", source };
    let Settings { tools, server, .. } = settings;
    let compression = tools.choose_compression(settings.compression).await;
    if compression != settings.compression {
        tracing::warn!(asked = %settings.compression, taken = %compression, "the tools of this machine cannot compress so");
    }
    let mut dump = tools.dump(server, snapshot, compression);
    let mut dump = dump.stdout(std::process::Stdio::piped()).spawn().map_err(start)?;
    let reader = ReadThrough::start(tools)?;
    let stdout = dump.stdout.take().ok_or(DumpError::NoOutput)?;
    widen(&stdout);
    let complaint = tokio::spawn(dump_check::tail(dump.stderr.take()));

    let pumped = pump(stdout, &reader, sink).await;
    let reader_gave_up = matches!(pumped, Err(DumpError::Reader(ReadError::Gone)));
    if pumped.is_err() && !reader_gave_up {
        return Err(pumped.err().unwrap_or(DumpError::NoOutput));
    }
    let status = dump_check::ended(&mut dump, "pg_dump").await?;
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
    sink: &mut impl Sink,
) -> Result<(VerifiedDump, Option<u32>), DumpError> {
    let mut digest = Sha256::new();
    let mut size_bytes = 0;
    let mut head = Vec::new();
    loop {
        let chunk = next_chunk(&mut stdout, sink.room().min(CHUNK)).await?;
        if chunk.is_empty() {
            break;
        }
        digest.update(&chunk);
        size_bytes += chunk.len() as u64;
        head.extend_from_slice(&chunk[..chunk.len().min(toc::HEAD - head.len())]);
        reader.take(chunk.clone()).await?;
        sink.push(chunk).await?;
        failpoint::pass("backup.streaming")?;
    }
    sink.flush().await?;
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

//! `svc-db-backup export-archive`: writes the archive to standard output, as the gateway's user. The entries of the
//! home directory arrive on standard input from the process that reads them.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use tar::{Builder, EntryType, EntryWriter, Header};

use super::files::{HomeEntry, OmittedEntry};
use super::stream::Frame;
use crate::snapshots::archive;
use crate::snapshots::archive::{
    ARCHIVE_INFO, ArchiveEntry, ArchiveInfo, DUMP, HOME, MANIFEST, Manifest, SIDECAR,
};
use crate::snapshots::backup::dump;
use crate::snapshots::backup::dump::{DumpError, Sink};
use crate::snapshots::backup::settings::BackupSettings;
use crate::snapshots::backup::snapshot::{Snapshot, SnapshotError};
use crate::system::tar_reader::EntryKind;
use crate::system::user;
use svc_base::applet::{self, Exit, Failure};
use svc_base::clock;
use svc_base::failpoint::{self, InjectedFailure};

const CHUNK_BYTES: usize = 256 * 1024;
/// Maximum time without data from the process that reads the home directory.
const HOME_TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error("the restore gate is closed: until it opens, the database does not hold the owner's data")]
    GateClosed,
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Dump(#[from] DumpError),
    #[error("cannot write the archive")]
    Write(#[source] std::io::Error),
    #[error("cannot copy the home directory into the archive")]
    Home(#[source] std::io::Error),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl WriteError {
    fn exit(&self) -> Exit {
        match self {
            Self::Snapshot(error) => error.exit(),
            Self::Dump(error) => error.exit(),
            Self::GateClosed => Exit::TryAgain,
            Self::Write(_) | Self::Home(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Writes the archive.
///
/// # Errors
/// `TryAgain` if the restore gate is closed, or a table stays locked; `Unavailable` if the database is unavailable;
/// otherwise `Internal`. After an error, the output is not a valid archive.
pub async fn write(settings: &BackupSettings) -> Result<(), Failure> {
    write_archive(settings).await.map_err(|error| Failure::new(error.exit(), error))
}

async fn write_archive(settings: &BackupSettings) -> Result<(), WriteError> {
    user::end_with_parent();
    failpoint::trigger("export.begin")?;
    if !settings.layout.restore_complete().exists() {
        return Err(WriteError::GateClosed);
    }
    let write = WriteError::Write;
    let output = File::from(std::io::stdout().as_fd().try_clone_to_owned().map_err(write)?);
    let mut archive =
        Archive { tar: Builder::new(BufWriter::with_capacity(CHUNK_BYTES, output)), entries: Vec::new() };
    let info = ArchiveInfo {
        version: archive::VERSION,
        created_at: clock::now_ms(),
        idp_user_id: settings.identity.user.clone(),
        slot: settings.identity.slot.clone(),
        machine_id: settings.identity.machine,
        epoch: settings.identity.epoch,
        made_by: format!("svc {}", applet::version()),
    };
    archive.write_json(ARCHIVE_INFO, &info).map_err(write)?;

    let snapshot = Snapshot::open(&settings.server).await?;
    let dumped = {
        let mut header = header(EntryType::Regular, 0o600, 0);
        let writer = archive.tar.append_writer(&mut header, DUMP);
        let mut sink = DumpEntry { writer: writer.map_err(write)? };
        let dumped = dump::dump_snapshot(settings, &snapshot, &mut sink).await?;
        sink.writer.finish().map_err(write)?;
        dumped
    };
    archive.add_entry(DUMP, EntryKind::File, dumped.dump.size_bytes, Some(dumped.dump.sha256.clone()));
    let sidecar = dumped.sidecar(DUMP, &settings.identity, &snapshot);
    drop(snapshot);
    archive.write_json(SIDECAR, &sidecar).map_err(write)?;
    failpoint::trigger("export.dumped")?;

    let omitted = tokio::task::block_in_place(|| {
        let mut home = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
        home.set_read_timeout(Some(HOME_TIMEOUT))?;
        // The other process lists the home directory only once it has received a byte.
        home.write_all(b"g")?;
        archive.copy_home(&mut BufReader::with_capacity(CHUNK_BYTES, home))
    });
    let omitted = omitted.map_err(WriteError::Home)?;
    failpoint::trigger("export.listed")?;
    let manifest = Manifest {
        version: archive::VERSION,
        entries: std::mem::take(&mut archive.entries),
        left_out: omitted.iter().map(|entry| archive::encode_path(&entry.path)).collect(),
    };
    archive.write_json(MANIFEST, &manifest).map_err(write)?;
    let mut file = archive.tar.into_inner().map_err(write)?;
    file.flush().map_err(write)?;
    file.get_ref().sync_all().map_err(write)?;
    failpoint::trigger("export.written")?;
    print_summary(&manifest, &omitted);
    Ok(())
}

/// Prints a summary to standard error, because standard output is the archive.
fn print_summary(manifest: &Manifest, omitted: &[OmittedEntry]) {
    let files = manifest.entries.iter().filter(|entry| entry.path.starts_with(HOME)).count();
    let bytes: u64 = manifest.entries.iter().map(|entry| entry.size_bytes).sum();
    eprintln!("exported the database and {files} entries of the home directory, {bytes} bytes");
    for entry in omitted {
        eprintln!("  left out: {}: {}", archive::encode_path(&entry.path), entry.reason);
    }
}

/// The archive's entry for the dump. The size in its header is set at the end, because it is not known until then.
struct DumpEntry<'a> {
    writer: EntryWriter<'a>,
}

impl Sink for DumpEntry<'_> {
    fn max_chunk_bytes(&self) -> usize {
        CHUNK_BYTES
    }

    async fn push(&mut self, chunk: Bytes) -> Result<(), DumpError> {
        tokio::task::block_in_place(|| self.writer.write_all(&chunk)).map_err(DumpError::Write)
    }

    async fn flush(&mut self) -> Result<(), DumpError> {
        self.writer.flush().map_err(DumpError::Write)
    }
}

struct Archive<W: Write + Seek + 'static> {
    tar: Builder<W>,
    entries: Vec<ArchiveEntry>,
}

impl<W: Write + Seek + 'static> Archive<W> {
    fn add_entry(&mut self, path: &str, kind: EntryKind, size_bytes: u64, sha256: Option<String>) {
        self.entries.push(ArchiveEntry { path: path.to_owned(), kind, size_bytes, sha256 });
    }

    fn write_json(&mut self, name: &str, value: &impl Serialize) -> std::io::Result<()> {
        let text = serde_json::to_vec_pretty(value)?;
        let mut header = header(EntryType::Regular, 0o600, 0);
        header.set_size(text.len() as u64);
        self.tar.append_data(&mut header, name, text.as_slice())?;
        self.add_entry(name, EntryKind::File, text.len() as u64, Some(archive::sha256(&text)));
        Ok(())
    }

    /// Copies the entries from the process that reads the home directory. Returns the entries that it omitted.
    fn copy_home(&mut self, frames: &mut impl Read) -> std::io::Result<Vec<OmittedEntry>> {
        let mut omitted = Vec::new();
        loop {
            match Frame::read(frames)? {
                Frame::Entry { entry, link_target } => self.write_entry(&entry, link_target, frames)?,
                Frame::OmittedEntry(entry) => omitted.push(entry),
                Frame::End => return Ok(omitted),
                Frame::Data(_) | Frame::FileEnd => return Err(out_of_order()),
            }
        }
    }

    fn write_entry(
        &mut self,
        entry: &HomeEntry,
        link_target: Option<PathBuf>,
        frames: &mut impl Read,
    ) -> std::io::Result<()> {
        let path = Path::new(HOME).join(&entry.path);
        let encoded = archive::encode_path(&path);
        let mut header = header(entry.kind.into(), entry.mode, entry.modified);
        match entry.kind {
            EntryKind::Directory => {
                header.set_size(0);
                self.tar.append_data(&mut header, &path, std::io::empty())?;
                self.add_entry(&encoded, EntryKind::Directory, 0, None);
            }
            EntryKind::Symlink => {
                let target = link_target.ok_or_else(out_of_order)?;
                let target = target.as_os_str().as_bytes();
                header.set_size(0);
                // `Builder::append_link` would normalize the target, which would then differ from the manifest.
                if header.set_link_name_literal(target).is_err() {
                    self.write_long_target(target)?;
                }
                self.tar.append_data(&mut header, &path, std::io::empty())?;
                let digest = archive::sha256(target);
                self.add_entry(&encoded, EntryKind::Symlink, 0, Some(digest));
            }
            EntryKind::File => {
                // The file may grow while it is read, so the size is the number of bytes that were read.
                let mut writer = self.tar.append_writer(&mut header, &path)?;
                let (size, digest) = archive::copy_hashed(FileContent::new(frames), &mut writer)?;
                writer.finish()?;
                self.add_entry(&encoded, EntryKind::File, size, Some(digest));
            }
        }
        Ok(())
    }

    /// Writes a GNU record with the next entry's link target, which is too long for the entry's header.
    fn write_long_target(&mut self, target: &[u8]) -> std::io::Result<()> {
        let mut header = header(EntryType::GNULongLink, 0o644, 0);
        // GNU tar also ends the target with a NUL byte.
        header.set_size(target.len() as u64 + 1);
        self.tar.append_data(&mut header, "@LongLink", target.chain(&b"\0"[..]))
    }
}

/// Reads the frames of one file.
struct FileContent<'a, R> {
    frames: &'a mut R,
    chunk: Vec<u8>,
    position: usize,
    has_ended: bool,
}

impl<'a, R: Read> FileContent<'a, R> {
    fn new(frames: &'a mut R) -> Self {
        Self { frames, chunk: Vec::new(), position: 0, has_ended: false }
    }
}

impl<R: Read> Read for FileContent<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        while self.position == self.chunk.len() && !self.has_ended {
            match Frame::read(self.frames)? {
                Frame::Data(chunk) => (self.chunk, self.position) = (chunk, 0),
                Frame::FileEnd => self.has_ended = true,
                _ => return Err(out_of_order()),
            }
        }
        let size = buffer.len().min(self.chunk.len() - self.position);
        buffer[..size].copy_from_slice(&self.chunk[self.position..self.position + size]);
        self.position += size;
        Ok(size)
    }
}

fn out_of_order() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, "the entries of the home directory are out of order")
}

fn header(kind: EntryType, mode: u32, modified: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_mtime(modified);
    header
}

impl From<EntryKind> for EntryType {
    fn from(kind: EntryKind) -> Self {
        match kind {
            EntryKind::File => Self::Regular,
            EntryKind::Directory => Self::Directory,
            EntryKind::Symlink => Self::Symlink,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::system::tar_reader::{TarLimits, TarReader};

    #[test]
    fn write_entry_keeps_every_byte_of_link_targets() {
        let long = format!("a//{}/./b", "x".repeat(200));
        let targets = ["a//b", "a/./b", "//x", "/", "../a/", long.as_str()];
        let mut archive = Archive { tar: Builder::new(Cursor::new(Vec::new())), entries: Vec::new() };
        for (number, target) in targets.iter().enumerate() {
            let path = PathBuf::from(format!("link-{number}"));
            let entry = HomeEntry { path, kind: EntryKind::Symlink, mode: 0o777, modified: 0 };
            archive.write_entry(&entry, Some(PathBuf::from(target)), &mut std::io::empty()).unwrap();
        }
        let bytes = archive.tar.into_inner().unwrap().into_inner();
        let mut tar = tar::Archive::new(bytes.as_slice());
        let limits = TarLimits {
            max_entries: 20,
            max_name_bytes: 1024,
            max_total_name_bytes: 4096,
            max_file_bytes: 0,
            max_total_file_bytes: 0,
        };
        let mut entries = TarReader::new(&mut tar, limits).unwrap();
        for (target, listed) in targets.into_iter().zip(&archive.entries) {
            let entry = entries.next_entry().unwrap().unwrap();
            assert_eq!(entry.link.as_os_str(), target);
            assert_eq!(listed.sha256, Some(archive::sha256(target.as_bytes())));
        }
    }
}

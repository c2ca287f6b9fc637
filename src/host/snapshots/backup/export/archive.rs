//! `svc-db-backup export-archive`: writes the archive to standard output, as the gateway's user. The entries of the
//! home directory arrive on standard input from the process that reads them.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use tar::{Builder, EntryType, EntryWriter, Header};

use super::files::{HomeEntry, OmittedEntry};
use super::limits::{LimitCounter, LimitExceeded};
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
const HOME_STALL_TIMEOUT: Duration = Duration::from_secs(600);

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
    Limit(#[from] LimitExceeded),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl WriteError {
    fn exit(&self) -> Exit {
        match self {
            Self::Snapshot(error) => error.exit(),
            Self::Dump(error) => error.exit(),
            Self::GateClosed => Exit::TryAgain,
            Self::Limit(_) => Exit::Refused,
            Self::Write(_) | Self::Home(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Writes the archive.
///
/// # Errors
/// `TryAgain` if the restore gate is closed, or a table stays locked; `Unavailable` if the database is unavailable;
/// `Refused` if no import would accept an archive of this size; otherwise `Internal`. After an error, the output is not
/// a valid archive.
pub async fn write(settings: &BackupSettings) -> Result<(), Failure> {
    write_archive(settings).await.map_err(|error| Failure::new(error.exit(), error))
}

async fn write_archive(settings: &BackupSettings) -> Result<(), WriteError> {
    user::set_parent_death_signal();
    failpoint::trigger("export.begin")?;
    if !settings.layout.restore_complete().exists() {
        return Err(WriteError::GateClosed);
    }
    let write_error = WriteError::Write;
    let output = File::from(std::io::stdout().as_fd().try_clone_to_owned().map_err(write_error)?);
    let mut archive = Archive::new(BufWriter::with_capacity(CHUNK_BYTES, output));
    let info = ArchiveInfo {
        version: archive::FORMAT_VERSION,
        created_at: clock::now_ms(),
        idp_user_id: settings.identity.user.clone(),
        slot: settings.identity.slot.clone(),
        machine_id: settings.identity.machine,
        epoch: settings.identity.epoch,
        made_by: format!("svc {}", applet::version()),
    };
    archive.write_json(ARCHIVE_INFO, &info)?;

    let snapshot = Snapshot::open(&settings.server).await?;
    let dumped = {
        let mut header = new_header(EntryType::Regular, 0o600, 0);
        let writer = archive.tar.append_writer(&mut header, DUMP);
        let mut sink = DumpEntry { writer: writer.map_err(write_error)? };
        let dumped = dump::dump_snapshot(settings, &snapshot, &mut sink).await?;
        sink.writer.finish().map_err(write_error)?;
        dumped
    };
    archive.add_file(DUMP, dumped.dump.size_bytes, dumped.dump.sha256.clone())?;
    let sidecar = dumped.into_sidecar(DUMP, &settings.identity, &snapshot);
    drop(snapshot);
    archive.write_json(SIDECAR, &sidecar)?;
    failpoint::trigger("export.dumped")?;

    let omitted = tokio::task::block_in_place(|| {
        let home = start_home_reader().map_err(WriteError::Home)?;
        archive.copy_home(&mut BufReader::with_capacity(CHUNK_BYTES, home))
    })?;
    failpoint::trigger("export.listed")?;
    let manifest = tokio::task::block_in_place(|| archive.write_manifest(&omitted)).map_err(write_error)?;
    let mut file = archive.tar.into_inner().map_err(write_error)?;
    file.flush().map_err(write_error)?;
    file.get_ref().sync_all().map_err(write_error)?;
    failpoint::trigger("export.written")?;
    print_summary(&manifest, &omitted);
    Ok(())
}

/// Sends the start byte to the process that reads the home directory, and returns the connection to that process.
fn start_home_reader() -> std::io::Result<UnixStream> {
    let mut home = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    home.set_read_timeout(Some(HOME_STALL_TIMEOUT))?;
    home.write_all(b"g")?;
    Ok(home)
}

/// Prints a summary to standard error, because standard output is the archive.
fn print_summary(manifest: &Manifest, omitted: &[OmittedEntry]) {
    let home_entries = manifest.entries.iter().filter(|entry| entry.path.starts_with(HOME)).count();
    let bytes: u64 = manifest.entries.iter().map(|entry| entry.size_bytes).sum();
    eprintln!("exported the database and {home_entries} entries of the home directory, {bytes} bytes");
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
    counter: LimitCounter,
}

impl<W: Write + Seek + 'static> Archive<W> {
    fn new(to: W) -> Self {
        Self { tar: Builder::new(to), entries: Vec::new(), counter: LimitCounter::default() }
    }

    /// Adds an entry to the manifest. `target_bytes` is the length of a symbolic link's target.
    fn add_entry(&mut self, entry: ArchiveEntry, target_bytes: usize) -> Result<(), WriteError> {
        self.counter.count_entry(&entry.path, target_bytes, json_length(&entry)?)?;
        self.entries.push(entry);
        Ok(())
    }

    fn add_file(&mut self, name: &str, size_bytes: u64, sha256: String) -> Result<(), WriteError> {
        let (path, kind) = (name.to_owned(), EntryKind::File);
        self.add_entry(ArchiveEntry { path, kind, size_bytes, sha256: Some(sha256) }, 0)
    }

    fn write_json(&mut self, name: &str, value: &impl Serialize) -> Result<(), WriteError> {
        let text = serde_json::to_vec_pretty(value).map_err(|error| WriteError::Write(error.into()))?;
        let mut header = new_header(EntryType::Regular, 0o600, 0);
        header.set_size(text.len() as u64);
        self.tar.append_data(&mut header, name, text.as_slice()).map_err(WriteError::Write)?;
        self.add_file(name, text.len() as u64, archive::sha256(&text))
    }

    /// Writes the manifest of all entries so far. It can be large, so its JSON is compact, and is streamed instead of
    /// being built in memory.
    fn write_manifest(&mut self, omitted: &[OmittedEntry]) -> std::io::Result<Manifest> {
        let manifest = Manifest {
            version: archive::FORMAT_VERSION,
            entries: std::mem::take(&mut self.entries),
            left_out: omitted.iter().map(|entry| archive::encode_path(&entry.path)).collect(),
        };
        let mut header = new_header(EntryType::Regular, 0o600, 0);
        let mut writer = self.tar.append_writer(&mut header, MANIFEST)?;
        serde_json::to_writer(&mut writer, &manifest)?;
        writer.finish()?;
        Ok(manifest)
    }

    /// Copies the entries from the process that reads the home directory. Returns the entries that it omitted.
    fn copy_home(&mut self, frames: &mut impl Read) -> Result<Vec<OmittedEntry>, WriteError> {
        let mut omitted = Vec::new();
        loop {
            match Frame::read(frames).map_err(WriteError::Home)? {
                Frame::Entry { entry, link_target } => {
                    let target_bytes = link_target.as_ref().map_or(0, |target| target.as_os_str().len());
                    let manifest_entry = self.write_entry(&entry, link_target.as_deref(), frames);
                    self.add_entry(manifest_entry.map_err(WriteError::Home)?, target_bytes)?;
                }
                Frame::OmittedEntry(entry) => {
                    self.counter.count_manifest_element(json_length(&archive::encode_path(&entry.path))?)?;
                    omitted.push(entry);
                }
                Frame::End => return Ok(omitted),
                Frame::Data(_) | Frame::FileEnd => return Err(WriteError::Home(out_of_order_error())),
            }
        }
    }

    /// Writes an entry of the home directory. Returns the entry for the manifest.
    fn write_entry(
        &mut self,
        entry: &HomeEntry,
        link_target: Option<&Path>,
        frames: &mut impl Read,
    ) -> std::io::Result<ArchiveEntry> {
        let path = Path::new(HOME).join(&entry.path);
        let mut header = new_header(entry.kind.into(), entry.mode, entry.modified);
        let (size_bytes, sha256) = match entry.kind {
            EntryKind::Directory => {
                header.set_size(0);
                self.tar.append_data(&mut header, &path, std::io::empty())?;
                (0, None)
            }
            EntryKind::Symlink => {
                let target = link_target.ok_or_else(out_of_order_error)?.as_os_str().as_bytes();
                header.set_size(0);
                // `Builder::append_link` would normalize the target, which would then differ from the manifest.
                if header.set_link_name_literal(target).is_err() {
                    self.write_long_target(target)?;
                }
                self.tar.append_data(&mut header, &path, std::io::empty())?;
                (0, Some(archive::sha256(target)))
            }
            EntryKind::File => {
                // The file may grow while it is read, so the size is the number of bytes that were read.
                let mut writer = self.tar.append_writer(&mut header, &path)?;
                let (size, digest) = archive::copy_hashed(FileContent::new(frames), &mut writer)?;
                writer.finish()?;
                (size, Some(digest))
            }
        };
        Ok(ArchiveEntry { path: archive::encode_path(&path), kind: entry.kind, size_bytes, sha256 })
    }

    /// Writes a GNU record with the next entry's link target, which is too long for the entry's header.
    fn write_long_target(&mut self, target: &[u8]) -> std::io::Result<()> {
        let mut header = new_header(EntryType::GNULongLink, 0o644, 0);
        // GNU tar also ends the target with a NUL byte.
        header.set_size(target.len() as u64 + 1);
        self.tar.append_data(&mut header, "@LongLink", target.chain(&b"\0"[..]))
    }
}

fn json_length(value: &impl Serialize) -> Result<usize, WriteError> {
    let text = serde_json::to_vec(value).map_err(|error| WriteError::Write(error.into()))?;
    Ok(text.len())
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
                _ => return Err(out_of_order_error()),
            }
        }
        let size = buffer.len().min(self.chunk.len() - self.position);
        buffer[..size].copy_from_slice(&self.chunk[self.position..self.position + size]);
        self.position += size;
        Ok(size)
    }
}

fn out_of_order_error() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, "the entries of the home directory are out of order")
}

fn new_header(kind: EntryType, mode: u32, modified: u64) -> Header {
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
    use std::path::PathBuf;

    use super::*;
    use crate::system::tar_reader::{TarError, TarLimits, TarReader};

    #[test]
    fn write_entry_keeps_every_byte_of_link_targets() {
        let long = format!("a//{}/./b", "x".repeat(200));
        let targets = ["a//b", "a/./b", "//x", "/", "../a/", long.as_str()];
        let mut archive = Archive::new(Cursor::new(Vec::new()));
        let mut manifest_entries = Vec::new();
        for (number, target) in targets.iter().enumerate() {
            let path = PathBuf::from(format!("link-{number}"));
            let entry = HomeEntry { path, kind: EntryKind::Symlink, mode: 0o777, modified: 0 };
            let written = archive.write_entry(&entry, Some(Path::new(target)), &mut std::io::empty());
            manifest_entries.push(written.unwrap());
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
        for (target, manifest_entry) in targets.into_iter().zip(&manifest_entries) {
            let entry = entries.next_entry().unwrap().unwrap();
            assert_eq!(entry.link.as_os_str(), target);
            assert_eq!(manifest_entry.sha256, Some(archive::sha256(target.as_bytes())));
        }
    }

    /// The reader counts exactly the same entries and names, and the manifest is no larger than the counter's estimate.
    #[test]
    fn counter_matches_limits_of_tar_reader() {
        let at_limit = "x".repeat(100);
        let above_limit = "x".repeat(101);
        let frame = |path: &str, kind, target: Option<&str>| Frame::Entry {
            entry: HomeEntry { path: PathBuf::from(path), kind, mode: 0o700, modified: 0 },
            link_target: target.map(PathBuf::from),
        };
        let mut frames = Vec::new();
        for frame in [
            Frame::OmittedEntry(OmittedEntry { path: "a \" b".into(), reason: "a socket".to_owned() }),
            frame("d", EntryKind::Directory, None),
            // With the prefix `home/`, the first path has 100 bytes.
            frame(&at_limit[5..], EntryKind::Directory, None),
            frame(&at_limit[4..], EntryKind::Directory, None),
            frame("d/\n", EntryKind::File, None),
            Frame::Data(b"abc".to_vec()),
            Frame::FileEnd,
            frame("d/short", EntryKind::Symlink, Some(at_limit.as_str())),
            frame("d/long", EntryKind::Symlink, Some(above_limit.as_str())),
            Frame::End,
        ] {
            frame.write(&mut frames).unwrap();
        }
        let mut archive = Archive::new(Cursor::new(Vec::new()));
        let omitted = archive.copy_home(&mut frames.as_slice()).unwrap();
        archive.write_manifest(&omitted).unwrap();
        let Archive { tar: builder, counter, .. } = archive;
        let bytes = builder.into_inner().unwrap().into_inner();
        // Returns the size of the last entry.
        let read_all = |max_entries, max_total_name_bytes| -> Result<u64, TarError> {
            let limits = TarLimits {
                max_entries,
                max_name_bytes: 1024,
                max_total_name_bytes,
                max_file_bytes: 4096,
                max_total_file_bytes: 4096,
            };
            let mut tar = tar::Archive::new(bytes.as_slice());
            let mut entries = TarReader::new(&mut tar, limits)?;
            let mut last = 0;
            while let Some(entry) = entries.next_entry()? {
                last = entry.size;
            }
            Ok(last)
        };
        let manifest_bytes = read_all(counter.entries, counter.name_bytes).unwrap();
        assert!((manifest_bytes..manifest_bytes + 64).contains(&counter.manifest_bytes), "{manifest_bytes}");
        read_all(counter.entries - 1, counter.name_bytes).unwrap_err();
        read_all(counter.entries, counter.name_bytes - 1).unwrap_err();
    }
}

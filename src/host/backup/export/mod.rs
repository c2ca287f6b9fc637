//! `svc-db-backup export`: everything that is the owner's in one archive (`host::archive`): a verified dump of this moment,
//! the home with its records, and a manifest with checksums.

mod files;

use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::Serialize;
use tar::{Builder, EntryType, EntryWriter, Header};

use super::Settings;
use super::dump::{self, DumpError, Sink};
use super::snapshot::{Snapshot, SnapshotError};
use crate::applet::{self, Exit, Failure};
use crate::clock;
use crate::failpoint::{self, Injected};
use crate::fsx::{self, FileError};
use crate::host::archive::{self, ABOUT, About, DUMP, HOME, Kind, Listed, MANIFEST, Manifest, SIDE};
use files::Found;

/// The places of a run where a test can stop it.
pub const POINTS: &[&str] = &["export.begin", "export.dumped", "export.listed", "export.written"];

const CHUNK: usize = 256 * 1024;

#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("{} is there already; it is not written over", .path.display())]
    Exists { path: PathBuf },
    #[error("the restore gate is shut: what is in the database before it opens is not the owner's")]
    GateShut,
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Dump(#[from] DumpError),
    #[error("write {}", .path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    File(#[from] FileError),
    #[error("stopped by a signal")]
    Stopped,
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl ExportError {
    fn exit(&self) -> Exit {
        match self {
            Self::Exists { .. } => Exit::Refused,
            Self::Snapshot(error) => error.exit(),
            Self::Dump(error) => error.exit(),
            Self::GateShut | Self::Stopped => Exit::TryAgain,
            Self::Write { .. } | Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Writes the archive to `output`, which appears when it is whole.
///
/// # Errors
/// [`Failure`]; there is then nothing under that name.
pub async fn run(settings: &Settings, output: &Path, stop: impl Future<Output = ()>) -> Result<(), Failure> {
    let partial = partial(output);
    let end = tokio::select! {
        end = export(settings, output, &partial) => end,
        () = stop => Err(ExportError::Stopped),
    };
    match end {
        Ok(manifest) => {
            let files = manifest.entries.iter().filter(|entry| entry.path.starts_with(HOME)).count();
            let bytes: u64 = manifest.entries.iter().map(|entry| entry.size_bytes).sum();
            println!("{}: the database and {files} entries of the home, {bytes} bytes", output.display());
            for path in &manifest.left_out {
                println!("  left out, being no file or gone: {path}");
            }
            Ok(())
        }
        Err(error) => {
            if !matches!(error, ExportError::Exists { .. }) {
                // Half of it is of no use.
                let _ = std::fs::remove_file(&partial);
            }
            Err(Failure::new(error.exit(), error))
        }
    }
}

fn partial(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

async fn export(settings: &Settings, output: &Path, partial: &Path) -> Result<Manifest, ExportError> {
    failpoint::pass("export.begin")?;
    if output.exists() {
        return Err(ExportError::Exists { path: output.to_owned() });
    }
    if !settings.layout.restore_complete().exists() {
        return Err(ExportError::GateShut);
    }
    let write = |source| ExportError::Write { path: partial.to_owned(), source };
    let mut options = File::options();
    let file = options.create(true).truncate(true).write(true).mode(0o600).open(partial);
    let file = file.map_err(FileError::at("create", partial))?;
    let mut archive =
        Archive { tar: Builder::new(BufWriter::with_capacity(CHUNK, file)), entries: Vec::new() };
    let about = About {
        version: archive::VERSION,
        created_at: clock::now_ms(),
        idp_user_id: settings.identity.user.clone(),
        slot: settings.identity.slot.clone(),
        machine_id: settings.identity.machine,
        epoch: settings.identity.epoch,
        made_by: format!("svc {}", applet::VERSION),
    };
    archive.json(ABOUT, &about).map_err(write)?;

    let snapshot = Snapshot::open(&settings.server).await?;
    let told = {
        let mut header = header(EntryType::Regular, 0o600, 0);
        let writer = archive.tar.append_writer(&mut header, DUMP);
        let mut sink = Entry { writer: writer.map_err(write)? };
        let told = dump::take(settings, &snapshot, &mut sink).await?;
        sink.writer.finish().map_err(write)?;
        told
    };
    archive.note(DUMP, Kind::File, told.dump.size_bytes, Some(told.dump.sha256.clone()));
    let side = told.side_record(DUMP, &settings.identity, &snapshot);
    drop(snapshot);
    archive.json(SIDE, &side).map_err(write)?;
    failpoint::pass("export.dumped")?;

    let home = settings.layout.home();
    let (found, mut left_out) = files::below(&home, &[output, partial])?;
    failpoint::pass("export.listed")?;
    for one in found {
        if !tokio::task::block_in_place(|| archive.add(&home, &one)).map_err(write)? {
            left_out.push(archive::written(&one.path));
        }
    }
    let manifest =
        Manifest { version: archive::VERSION, entries: std::mem::take(&mut archive.entries), left_out };
    archive.json(MANIFEST, &manifest).map_err(write)?;
    let mut file = archive.tar.into_inner().map_err(write)?;
    file.flush().map_err(write)?;
    file.get_ref().sync_all().map_err(write)?;
    failpoint::pass("export.written")?;
    std::fs::rename(partial, output).map_err(FileError::at("rename", partial))?;
    fsx::sync_dir(output.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new(".")))?;
    Ok(manifest)
}

/// The dump's entry, whose size is written when it is known.
struct Entry<'a> {
    writer: EntryWriter<'a>,
}

impl Sink for Entry<'_> {
    fn room(&self) -> usize {
        CHUNK
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
    entries: Vec<Listed>,
}

impl<W: Write + Seek + 'static> Archive<W> {
    fn note(&mut self, path: &str, kind: Kind, size_bytes: u64, sha256: Option<String>) {
        self.entries.push(Listed { path: path.to_owned(), kind, size_bytes, sha256 });
    }

    fn json(&mut self, name: &str, value: &impl Serialize) -> std::io::Result<()> {
        let text = serde_json::to_vec_pretty(value)?;
        let mut header = header(EntryType::Regular, 0o600, 0);
        header.set_size(text.len() as u64);
        self.tar.append_data(&mut header, name, text.as_slice())?;
        self.note(name, Kind::File, text.len() as u64, Some(archive::sha256(&text)));
        Ok(())
    }

    /// Whether it was still there.
    fn add(&mut self, home: &Path, found: &Found) -> std::io::Result<bool> {
        let path = Path::new(HOME).join(&found.path);
        let written = archive::written(&path);
        let mut header = header(found.kind.into(), found.mode, found.modified);
        match found.kind {
            Kind::Directory => {
                header.set_size(0);
                self.tar.append_data(&mut header, &path, std::io::empty())?;
                self.note(&written, Kind::Directory, 0, None);
            }
            Kind::Link => {
                use std::os::unix::ffi::OsStrExt;
                let Ok(target) = std::fs::read_link(home.join(&found.path)) else { return Ok(false) };
                header.set_size(0);
                self.tar.append_link(&mut header, &path, &target)?;
                let digest = archive::sha256(target.as_os_str().as_bytes());
                self.note(&written, Kind::Link, 0, Some(digest));
            }
            Kind::File => {
                let no_link = nix::fcntl::OFlag::O_NOFOLLOW.bits();
                let opened = File::options().read(true).custom_flags(no_link).open(home.join(&found.path));
                let Ok(file) = opened else { return Ok(false) };
                // It may grow meanwhile: its size is what was read.
                let mut writer = self.tar.append_writer(&mut header, &path)?;
                let (size, digest) = archive::copy_hashed(file, &mut writer)?;
                writer.finish()?;
                self.note(&written, Kind::File, size, Some(digest));
            }
        }
        Ok(true)
    }
}

fn header(kind: EntryType, mode: u32, modified: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_mtime(modified);
    header
}

impl From<Kind> for EntryType {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::File => Self::Regular,
            Kind::Directory => Self::Directory,
            Kind::Link => Self::Symlink,
        }
    }
}

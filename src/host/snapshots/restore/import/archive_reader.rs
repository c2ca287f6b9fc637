//! Reads an archive in a single pass, verifying every entry against the trailing manifest and optionally extracting
//! some into a staging directory.
//!
//! A pass holds only a digest per entry, a hash per directory and the paths of extracted directories in memory. The
//! manifest can be as large as all names combined, so it's streamed too (`manifest.rs`).

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::manifest::{self, EntryDigest, entry_digest};
use crate::snapshots::archive;
use crate::snapshots::archive::{
    ARCHIVE_INFO, ArchiveEntry, ArchiveInfo, DUMP, HOME, MANIFEST, MAX_ENTRIES, MAX_MANIFEST_BYTES,
    MAX_TOTAL_NAME_BYTES, SIDECAR, SYSTEM,
};
use crate::system::tar_reader::EntryKind;
use crate::system::tar_reader::{TarEntry, TarError, TarLimits, TarReader, hash_path, quote_path};
use svc_base::applet::Exit;
use svc_base::fsx::FileError;
use svc_store::snapshot::Sidecar;

/// Maximum size of `export.json` and `database.json`. The latter has an entry per table.
const MAX_JSON_BYTES: u64 = 8 << 20;
const BUFFER_BYTES: usize = 1 << 18;
/// File system block size of machines. Files occupy whole blocks.
const BLOCK_BYTES: u64 = 4096;

/// Returns the limits for an archive of this size: no entry can be larger than the file.
fn tar_limits(archive_bytes: u64) -> TarLimits {
    TarLimits {
        max_entries: MAX_ENTRIES,
        max_name_bytes: 16 * 1024,
        max_total_name_bytes: MAX_TOTAL_NAME_BYTES,
        max_file_bytes: archive_bytes,
        max_total_file_bytes: archive_bytes,
    }
}

/// Errors from reading an archive.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("cannot read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a valid archive: {reason}; nothing was imported", .path.display())]
    Invalid { path: PathBuf, reason: String },
    #[error("{} was written by a later version of svc ({made_by:?})", .path.display())]
    NewerVersion { path: PathBuf, made_by: String },
    #[error("{} is not a valid archive; nothing was imported", .path.display())]
    Tar {
        path: PathBuf,
        #[source]
        source: TarError,
    },
    #[error(transparent)]
    File(#[from] FileError),
}

impl ArchiveError {
    /// Returns `Internal` if the disk is full or read-only, and otherwise `Refused`, since an archive can itself cause
    /// other file errors, for example with an overlong name.
    pub fn exit(&self) -> Exit {
        use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        match self {
            Self::File(error)
                if [QuotaExceeded, ReadOnlyFilesystem, StorageFull].contains(&error.source.kind()) =>
            {
                Exit::Internal
            }
            _ => Exit::Refused,
        }
    }
}

/// Entries to extract. All others are only read.
pub enum ExtractTarget<'a> {
    Nothing,
    /// The owner's files, into this directory.
    Home(&'a Path),
    /// The gateway user's entries: the dump, to a file, and [`SYSTEM`] from the home directory, to a directory.
    Gateway {
        dump: &'a Path,
        system: &'a Path,
    },
}

impl ExtractTarget<'_> {
    /// Returns an entry's destination, or `None` if it isn't extracted.
    fn destination(&self, name: &Path) -> Option<PathBuf> {
        let below_home = name.strip_prefix(HOME).ok();
        let below_home = below_home.filter(|path| !path.as_os_str().is_empty());
        let below_system = below_home.and_then(|path| path.strip_prefix(SYSTEM).ok());
        match self {
            Self::Nothing => None,
            Self::Home(into) => below_home.filter(|_| below_system.is_none()).map(|path| into.join(path)),
            Self::Gateway { dump, .. } if name == Path::new(DUMP) => Some(dump.to_path_buf()),
            Self::Gateway { system, .. } => {
                below_system.filter(|path| !path.as_os_str().is_empty()).map(|path| system.join(path))
            }
        }
    }
}

/// Metadata of an archive that was read in full and matches its manifest.
#[derive(Debug)]
pub struct VerifiedArchive {
    pub info: ArchiveInfo,
    pub sidecar: Sidecar,
    /// Number of entries in the home directory.
    pub home_entries: usize,
}

impl VerifiedArchive {
    /// Reads the whole archive, extracting the selected entries into existing, empty directories.
    ///
    /// # Errors
    /// [`ArchiveError`] if the archive cannot be read, is invalid or was written by a later version, or if a file
    /// cannot be extracted. The caller must remove any extracted files.
    pub fn read(file: &File, path: &Path, extract: &ExtractTarget<'_>) -> Result<Self, ArchiveError> {
        Pass::new(path, extract).run(file)
    }

    /// Returns the disk space required by the extracted entries, according to their unverified headers.
    ///
    /// # Errors
    /// [`ArchiveError`] if the archive cannot be read or is malformed.
    pub fn compute_required_disk_space(
        mut file: &File,
        path: &Path,
        extract: &ExtractTarget<'_>,
    ) -> Result<u64, ArchiveError> {
        let read_error = |source| ArchiveError::Read { path: path.to_owned(), source };
        let tar_error = |source| ArchiveError::Tar { path: path.to_owned(), source };
        file.rewind().map_err(read_error)?;
        let limits = tar_limits(file.metadata().map_err(read_error)?.len());
        let mut tar = tar::Archive::new(BufReader::new(file));
        let mut entries = TarReader::with_seek(&mut tar, limits).map_err(tar_error)?;
        let mut bytes = 0_u64;
        while let Some(entry) = entries.next_entry().map_err(tar_error)? {
            if extract.destination(&entry.path).is_some() {
                bytes = bytes.saturating_add(match entry.kind {
                    EntryKind::File => entry.size.next_multiple_of(BLOCK_BYTES),
                    EntryKind::Directory => BLOCK_BYTES,
                    EntryKind::Symlink => 0,
                });
            }
        }
        Ok(bytes)
    }
}

/// The fields of [`ArchiveInfo`] that identify an archive of any version.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ArchiveVersion {
    version: u32,
    #[serde(default)]
    made_by: String,
}

/// One pass over an archive.
struct Pass<'a> {
    path: &'a Path,
    extract: &'a ExtractTarget<'a>,
    info: Option<ArchiveInfo>,
    sidecar: Option<Sidecar>,
    /// Size and SHA-256 of the dump.
    dump: Option<(u64, String)>,
    is_complete: bool,
    digests: Vec<EntryDigest>,
    home_entries: usize,
    /// Hashes ([`hash_path`]) of [`HOME`] and the directories read so far, the only valid parents.
    directories: HashSet<u128>,
    /// Modes of extracted directories, applied last because they might deny access.
    modes: Vec<(PathBuf, u32)>,
}

impl<'a> Pass<'a> {
    fn new(path: &'a Path, extract: &'a ExtractTarget<'a>) -> Self {
        Self {
            path,
            extract,
            info: None,
            sidecar: None,
            dump: None,
            is_complete: false,
            digests: Vec::new(),
            home_entries: 0,
            directories: [hash_path(Path::new(HOME))].into(),
            modes: Vec::new(),
        }
    }

    fn invalid(&self, reason: impl Into<String>) -> ArchiveError {
        ArchiveError::Invalid { path: self.path.to_owned(), reason: reason.into() }
    }

    fn run(mut self, mut file: &File) -> Result<VerifiedArchive, ArchiveError> {
        let path = self.path;
        let read_error = |source| ArchiveError::Read { path: path.to_owned(), source };
        let tar_error = |source| ArchiveError::Tar { path: path.to_owned(), source };
        file.rewind().map_err(read_error)?;
        let limits = tar_limits(file.metadata().map_err(read_error)?.len());
        let mut tar = tar::Archive::new(BufReader::with_capacity(BUFFER_BYTES, file));
        let mut entries = TarReader::new(&mut tar, limits).map_err(tar_error)?;
        while let Some(entry) = entries.next_entry().map_err(tar_error)? {
            self.read_entry(entry)?;
        }
        for (path, mode) in self.modes.iter().rev() {
            let permissions = fs::Permissions::from_mode(*mode);
            fs::set_permissions(path, permissions).map_err(FileError::wrap("set the mode of", path))?;
        }
        self.finish()
    }

    fn read_entry(&mut self, mut entry: TarEntry<'_, impl Read>) -> Result<(), ArchiveError> {
        self.check_entry(&entry)?;
        if self.is_complete {
            return Err(self.invalid(format!("{} comes after the manifest", quote_path(&entry.path))));
        }
        let manifest_entry = match entry.path.to_str() {
            Some(ARCHIVE_INFO) => {
                let (text, manifest_entry) = self.read_json(&mut entry)?;
                self.check_version(&text)?;
                self.info = Some(self.parse_json(&entry.path, &text)?);
                manifest_entry
            }
            Some(SIDECAR) => {
                let (text, manifest_entry) = self.read_json(&mut entry)?;
                self.sidecar = Some(self.parse_json(&entry.path, &text)?);
                manifest_entry
            }
            Some(MANIFEST) => return self.compare_manifest(entry),
            _ => match self.extract.destination(&entry.path) {
                Some(destination) => self.extract_entry(&mut entry, &destination)?,
                None => copy_entry(&mut entry, io::sink())
                    .map_err(|error| self.invalid_entry(&entry.path, &error))?,
            },
        };
        if manifest_entry.path == DUMP {
            self.dump = Some((manifest_entry.size_bytes, manifest_entry.sha256.clone().unwrap_or_default()));
        }
        self.home_entries += usize::from(entry.path.starts_with(HOME));
        self.digests.push(entry_digest(&manifest_entry));
        Ok(())
    }

    /// Accepts an entry only if its path is relative and contains no `..`, its parent has been read, and its kind is
    /// allowed at this path. Records directories as parents for later entries.
    fn check_entry(&mut self, entry: &TarEntry<'_, impl Read>) -> Result<(), ArchiveError> {
        let path = entry.path.as_path();
        let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
        let is_top_level = [ARCHIVE_INFO, DUMP, SIDECAR, MANIFEST].iter().any(|name| path == Path::new(name));
        let has_known_parent =
            path.parent().is_some_and(|parent| self.directories.contains(&hash_path(parent)));
        if !is_plain || !(is_top_level || has_known_parent) {
            return Err(self.invalid(format!("{} is not a valid path in an archive", quote_path(path))));
        }
        let is_system = path.strip_prefix(HOME).is_ok_and(|below_home| below_home == Path::new(SYSTEM));
        let is_allowed = match entry.kind {
            EntryKind::Directory => !is_top_level,
            EntryKind::Symlink => !is_top_level && !is_system,
            EntryKind::File => !is_system,
        };
        if !is_allowed {
            return Err(self.invalid(format!("{} has unexpected type {:?}", quote_path(path), entry.kind)));
        }
        if entry.kind == EntryKind::Directory {
            self.directories.insert(hash_path(path));
        }
        Ok(())
    }

    /// Rejects archives from a later version before parsing anything else, since we may not know their format.
    fn check_version(&self, info: &[u8]) -> Result<(), ArchiveError> {
        match serde_json::from_slice(info) {
            Ok(ArchiveVersion { version, made_by }) if version > archive::FORMAT_VERSION => {
                Err(ArchiveError::NewerVersion { path: self.path.to_owned(), made_by })
            }
            // Invalid JSON is reported by the full parse.
            _ => Ok(()),
        }
    }

    /// Returns the text of a JSON entry and the manifest entry to expect for it.
    fn read_json(
        &self,
        entry: &mut TarEntry<'_, impl Read>,
    ) -> Result<(Vec<u8>, ArchiveEntry), ArchiveError> {
        if entry.size > MAX_JSON_BYTES {
            return Err(self.invalid(format!("{} is too large", quote_path(&entry.path))));
        }
        let mut text = Vec::new();
        let manifest_entry =
            copy_entry(entry, &mut text).map_err(|error| self.invalid_entry(&entry.path, &error))?;
        Ok((text, manifest_entry))
    }

    fn parse_json<T: DeserializeOwned>(&self, path: &Path, text: &[u8]) -> Result<T, ArchiveError> {
        serde_json::from_slice(text)
            .map_err(|error| self.invalid(format!("cannot parse {}: {error}", quote_path(path))))
    }

    fn compare_manifest(&mut self, entry: TarEntry<'_, impl Read>) -> Result<(), ArchiveError> {
        if entry.size > MAX_MANIFEST_BYTES {
            return Err(self.invalid(format!("{MANIFEST} is too large")));
        }
        manifest::compare(entry, &self.digests).map_err(|reason| self.invalid(reason))?;
        self.is_complete = true;
        Ok(())
    }

    fn invalid_entry(&self, path: &Path, error: &io::Error) -> ArchiveError {
        self.invalid(format!("{}: {error}", quote_path(path)))
    }

    fn extract_entry(
        &mut self,
        entry: &mut TarEntry<'_, impl Read>,
        to: &Path,
    ) -> Result<ArchiveEntry, ArchiveError> {
        let file_error = |action| FileError::wrap(action, to);
        // Drop the setuid and sticky bits.
        let mode = entry.mode & 0o2777;
        match entry.kind {
            EntryKind::Directory => {
                fs::DirBuilder::new().mode(0o700).create(to).map_err(file_error("create directory"))?;
                self.modes.push((to.to_owned(), mode));
            }
            EntryKind::Symlink => {
                std::os::unix::fs::symlink(&entry.link, to).map_err(file_error("create symbolic link"))?;
            }
            EntryKind::File => {
                // `create_new` never writes through a symlink, even with duplicate names, which `TarReader` rejects
                // anyway.
                let mut options = File::options();
                let file = options.write(true).mode(0o600).create_new(true).open(to);
                let file = file.map_err(file_error("create"))?;
                let manifest_entry = copy_entry(entry, &file).map_err(file_error("write"))?;
                let modified = std::time::UNIX_EPOCH
                    .checked_add(std::time::Duration::from_secs(entry.modified))
                    .ok_or_else(|| {
                        self.invalid(format!("{} has an invalid modification time", quote_path(&entry.path)))
                    })?;
                file.set_modified(modified).map_err(file_error("set the modification time of"))?;
                let permissions = fs::Permissions::from_mode(mode);
                file.set_permissions(permissions).map_err(file_error("set the mode of"))?;
                return Ok(manifest_entry);
            }
        }
        copy_entry(entry, io::sink()).map_err(|error| self.invalid_entry(&entry.path, &error))
    }

    fn finish(self) -> Result<VerifiedArchive, ArchiveError> {
        let invalid = |reason: String| ArchiveError::Invalid { path: self.path.to_owned(), reason };
        let info = self.info.ok_or_else(|| invalid(format!("{ARCHIVE_INFO} is missing")))?;
        if !self.is_complete {
            return Err(invalid("it is truncated".to_owned()));
        }
        let sidecar = self.sidecar.ok_or_else(|| invalid(format!("{SIDECAR} is missing")))?;
        if self.dump != Some((sidecar.size_bytes, sidecar.sha256.clone())) {
            return Err(invalid(format!("{SIDECAR} does not match {DUMP}")));
        }
        Ok(VerifiedArchive { info, sidecar, home_entries: self.home_entries })
    }
}

/// Copies an entry's content and returns the manifest entry to expect for it.
fn copy_entry(entry: &mut TarEntry<'_, impl Read>, to: impl Write) -> io::Result<ArchiveEntry> {
    let (path, kind) = (archive::encode_path(&entry.path), entry.kind);
    match kind {
        EntryKind::Directory => Ok(ArchiveEntry { path, kind, size_bytes: 0, sha256: None }),
        EntryKind::Symlink => {
            let sha256 = Some(archive::sha256(entry.link.as_os_str().as_bytes()));
            Ok(ArchiveEntry { path, kind, size_bytes: 0, sha256 })
        }
        EntryKind::File => {
            let (size_bytes, digest) = archive::copy_hashed(entry, to)?;
            Ok(ArchiveEntry { path, kind, size_bytes, sha256: Some(digest) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_distinguishes_full_disk_from_bad_archive() {
        let exit = |kind: io::ErrorKind| {
            ArchiveError::from(FileError::wrap("write", Path::new("/x"))(kind.into())).exit()
        };
        assert_eq!(exit(io::ErrorKind::StorageFull), Exit::Internal);
        assert_eq!(exit(io::ErrorKind::AlreadyExists), Exit::Refused);
    }

    #[test]
    fn compute_required_disk_space_counts_extracted_blocks() {
        use tar::EntryType::{Directory, Regular};
        let mut tar = tar::Builder::new(tempfile::tempfile().unwrap());
        for (path, kind, bytes) in [
            ("database.dump", Regular, 5000),
            ("home/a", Regular, 9000),
            ("home/b", Directory, 0),
            ("home/system/c", Regular, 1),
        ] {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(bytes);
            header.set_mode(0o600);
            header.set_mtime(0);
            tar.append_data(&mut header, path, io::repeat(1).take(bytes)).unwrap();
        }
        let file = tar.into_inner().unwrap();
        let path = Path::new("/x");
        for (extract, blocks) in [
            (ExtractTarget::Nothing, 0),
            (ExtractTarget::Home(path), 3 + 1),
            (ExtractTarget::Gateway { dump: path, system: path }, 2 + 1),
        ] {
            let bytes = VerifiedArchive::compute_required_disk_space(&file, path, &extract).unwrap();
            assert_eq!(bytes, blocks * BLOCK_BYTES);
        }
    }

    /// The `slot` member and the `keys.json` entry are both invalid in this version, but for a newer archive only the
    /// version must be reported.
    #[test]
    fn read_reports_newer_version_before_format_errors() {
        let read = |version: u32| {
            let info = format!("{{\"version\":{version},\"madeBy\":\"svc 9\",\"slot\":[]}}");
            let mut tar = tar::Builder::new(tempfile::tempfile().unwrap());
            for (path, body) in [(ARCHIVE_INFO, info.as_str()), ("keys.json", "{}")] {
                let mut header = tar::Header::new_gnu();
                header.set_size(body.len() as u64);
                header.set_mode(0o600);
                header.set_mtime(0);
                tar.append_data(&mut header, path, body.as_bytes()).unwrap();
            }
            let file = tar.into_inner().unwrap();
            VerifiedArchive::read(&file, Path::new("ada.tar"), &ExtractTarget::Nothing).unwrap_err()
        };
        let newer = read(archive::FORMAT_VERSION + 1);
        let is_named = matches!(&newer, ArchiveError::NewerVersion { made_by, .. } if made_by == "svc 9");
        assert!(is_named, "{newer}");
        let current = read(archive::FORMAT_VERSION);
        assert!(matches!(current, ArchiveError::Invalid { .. }), "{current}");
    }
}

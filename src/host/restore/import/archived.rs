//! An archive as it is read: once in full to compare it with its manifest, and once more to unpack it, compared again.

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use serde::de::DeserializeOwned;
use tar::{Archive, Entry, EntryType};

use crate::fsx::{self, FileError};
use crate::host::archive::{self, ABOUT, About, DUMP, HOME, Kind, Listed, MANIFEST, Manifest, SIDE, STAGED};
use crate::store::snapshot::SideRecord;

/// No description of ours is larger.
const LARGEST_JSON: u64 = 1 << 30;
const BUFFER: usize = 1 << 18;

/// Why an archive is not taken.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is no whole archive: {why}; nothing of it is taken", .path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("{} was written by a later version of svc ({made_by})", .path.display())]
    Later { path: PathBuf, made_by: String },
    #[error(transparent)]
    File(#[from] FileError),
}

/// An archive that is whole.
pub struct Archived {
    path: PathBuf,
    pub about: About,
    pub side: SideRecord,
    entries: Vec<Listed>,
}

/// What was unpacked, and is in nobody's place yet.
pub struct Staged {
    pub dump: PathBuf,
    /// What is to come into the home.
    pub home: PathBuf,
    pub number: i64,
}

impl Archived {
    /// Reads all of it.
    ///
    /// # Errors
    /// [`ArchiveError`].
    pub fn read(path: &Path) -> Result<Self, ArchiveError> {
        let damaged = |why: String| ArchiveError::Damaged { path: path.to_owned(), why };
        let (mut about, mut side, mut manifest) = (None, None, None);
        let mut seen = Vec::new();
        each(path, |name, entry| {
            if manifest.is_some() {
                return Err(damaged(format!("{name} comes after the manifest")));
            }
            let listed = match name {
                ABOUT | SIDE | MANIFEST => {
                    let (listed, text) = text(name, entry).map_err(|error| damaged(error.to_string()))?;
                    match name {
                        ABOUT => about = Some(parsed::<About>(name, &text).map_err(damaged)?),
                        SIDE => side = Some(parsed::<SideRecord>(name, &text).map_err(damaged)?),
                        _ => manifest = Some(parsed::<Manifest>(name, &text).map_err(damaged)?),
                    }
                    listed
                }
                _ => look(name, entry, io::sink()).map_err(|error| damaged(format!("{name}: {error}")))?,
            };
            if name != MANIFEST {
                seen.push(listed);
            }
            Ok(())
        })?;
        let about: About = about.ok_or_else(|| damaged(format!("it has no {ABOUT}")))?;
        if about.version > archive::VERSION {
            return Err(ArchiveError::Later { path: path.to_owned(), made_by: about.made_by });
        }
        let manifest = manifest.ok_or_else(|| damaged("its end is missing".to_owned()))?;
        if let Some((expected, found)) =
            manifest.entries.iter().zip(&seen).find(|(expected, found)| expected != found)
        {
            let why = format!("{} is not what the manifest says of {}", found.path, expected.path);
            return Err(damaged(why));
        }
        if manifest.entries.len() != seen.len() {
            let why = format!("it has {} entries instead of {}", seen.len(), manifest.entries.len());
            return Err(damaged(why));
        }
        let side: SideRecord = side.ok_or_else(|| damaged(format!("it has no {SIDE}")))?;
        let dump = seen.iter().find(|entry| entry.path == DUMP);
        let fits = dump.is_some_and(|dump| {
            dump.size_bytes == side.size_bytes && dump.sha256.as_ref() == Some(&side.sha256)
        });
        if !fits {
            return Err(damaged(format!("{SIDE} is not of its {DUMP}")));
        }
        Ok(Self { path: path.to_owned(), about, side, entries: seen })
    }

    /// How many entries below the home there are.
    pub fn of_home(&self) -> usize {
        self.entries.iter().filter(|entry| entry.path.starts_with(HOME)).count()
    }

    /// Unpacks the dump into `state` and the home's entries into a directory of their own beside those that are there,
    /// comparing each with what was read before.
    ///
    /// # Errors
    /// [`ArchiveError`]; nothing of it is left in the home then.
    pub fn unpack(&self, state: &Path, home: &Path) -> Result<Staged, ArchiveError> {
        let number = crate::clock::now_ms().as_millisecond();
        let staged = Staged {
            dump: state.join(format!("{}.dump", self.side.sha256)),
            home: home.join(format!("{STAGED}{number}")),
            number,
        };
        for dir in [state, home] {
            fs::create_dir_all(dir).map_err(FileError::at("create directory", dir))?;
        }
        let mut private = fs::DirBuilder::new();
        private.mode(0o700).create(&staged.home).map_err(FileError::at("create directory", &staged.home))?;
        let unpacked = self.unpack_into(&staged);
        if unpacked.is_err() {
            // The error says more; what stays is removed by the next run.
            let _ = fs::remove_dir_all(&staged.home);
        }
        unpacked.map(|()| staged)
    }

    fn unpack_into(&self, staged: &Staged) -> Result<(), ArchiveError> {
        let damaged = |why: String| ArchiveError::Damaged { path: self.path.clone(), why };
        let mut expected = self.entries.iter();
        // A directory's own mode might keep us out of it.
        let mut modes = Vec::new();
        each(&self.path, |name, entry| {
            if name == MANIFEST {
                return Ok(());
            }
            let changed = || damaged(format!("{name} has changed since it was read"));
            let listed = expected.next().ok_or_else(changed)?;
            let found = if name == DUMP {
                // An earlier run may have left it.
                fsx::remove_if_there(&staged.dump)?;
                let file = created(&staged.dump, 0o600)?;
                look(name, entry, file).map_err(FileError::at("write", &staged.dump))?
            } else if let Some(inside) = inside(&entry.path().map_err(|_| changed())?) {
                let to = staged.home.join(&inside);
                let mode = entry.header().mode().unwrap_or(0o600) & 0o2777;
                if entry.header().entry_type() == EntryType::Directory {
                    modes.push((to.clone(), mode));
                }
                unpack_one(name, entry, &to, mode)?
            } else {
                look(name, entry, io::sink()).map_err(|_| changed())?
            };
            if found == *listed { Ok(()) } else { Err(changed()) }
        })?;
        for (path, mode) in modes.iter().rev() {
            let permissions = fs::Permissions::from_mode(*mode);
            fs::set_permissions(path, permissions).map_err(FileError::at("set the mode of", path))?;
        }
        Ok(())
    }
}

/// Below the home, relative to it. Checked by [`each`].
fn inside(path: &Path) -> Option<PathBuf> {
    path.strip_prefix(HOME).ok().map(Path::to_owned).filter(|path| !path.as_os_str().is_empty())
}

fn unpack_one(
    name: &str,
    entry: &mut Entry<'_, impl Read>,
    to: &Path,
    mode: u32,
) -> Result<Listed, ArchiveError> {
    let write = |action| FileError::at(action, to);
    let modified = entry.header().mtime().unwrap_or(0);
    match entry.header().entry_type() {
        EntryType::Directory => {
            fs::DirBuilder::new().mode(0o700).create(to).map_err(write("create directory"))?;
        }
        EntryType::Symlink => {
            let target = entry.link_name().ok().flatten().unwrap_or_default().into_owned();
            std::os::unix::fs::symlink(target, to).map_err(write("link"))?;
        }
        _ => {
            let file = created(to, mode)?;
            let listed = look(name, entry, &file).map_err(write("write"))?;
            let modified = std::time::UNIX_EPOCH + std::time::Duration::from_secs(modified);
            file.set_modified(modified).map_err(write("set the time of"))?;
            let permissions = fs::Permissions::from_mode(mode);
            file.set_permissions(permissions).map_err(write("set the mode of"))?;
            return Ok(listed);
        }
    }
    look(name, entry, io::sink()).map_err(|error| write("look at")(error).into())
}

/// New, and never through a link that an earlier entry made.
fn created(path: &Path, mode: u32) -> Result<File, FileError> {
    let mut options = File::options();
    options.write(true).mode(mode).create_new(true).open(path).map_err(FileError::at("create", path))
}

/// Each entry, by its name as the manifest writes it. Only what an archive of ours may hold passes: plain relative paths,
/// nothing below what is no directory, no name twice.
fn each(
    path: &Path,
    mut of: impl FnMut(&str, &mut Entry<'_, BufReader<File>>) -> Result<(), ArchiveError>,
) -> Result<(), ArchiveError> {
    let read = |source| ArchiveError::Read { path: path.to_owned(), source };
    let damaged = |why: String| ArchiveError::Damaged { path: path.to_owned(), why };
    let file = File::open(path).map_err(read)?;
    let mut tar = Archive::new(BufReader::with_capacity(BUFFER, file));
    let mut directories = std::collections::HashSet::from([PathBuf::from(HOME)]);
    let mut names = std::collections::HashSet::new();
    for entry in tar.entries().map_err(read)? {
        let mut entry = entry.map_err(|error| damaged(error.to_string()))?;
        let name = entry.path().map_err(|error| damaged(error.to_string()))?.into_owned();
        let written = archive::written(&name);
        let is_plain = name.components().all(|part| matches!(part, Component::Normal(_)));
        let ours = [ABOUT, DUMP, SIDE, MANIFEST].contains(&&*written);
        let is_in_place = name.parent().is_some_and(|parent| directories.contains(parent));
        if !is_plain || !(ours || is_in_place) {
            return Err(damaged(format!("{written:?} is no path of an archive")));
        }
        match entry.header().entry_type() {
            EntryType::Directory if !ours => {
                directories.insert(name.clone());
            }
            EntryType::Symlink if !ours => {}
            EntryType::Regular => {}
            other => return Err(damaged(format!("{written} is of the kind {other:?}"))),
        }
        if !names.insert(name) {
            return Err(damaged(format!("{written} is there twice")));
        }
        of(&written, &mut entry)?;
    }
    Ok(())
}

/// Passes an entry's bytes on, and says what it is.
fn look(name: &str, entry: &mut Entry<'_, impl Read>, to: impl io::Write) -> io::Result<Listed> {
    let path = name.to_owned();
    match entry.header().entry_type() {
        EntryType::Directory => Ok(Listed { path, kind: Kind::Directory, size_bytes: 0, sha256: None }),
        EntryType::Symlink => {
            let target = entry.link_name()?.unwrap_or_default();
            let sha256 = Some(archive::sha256(target.as_os_str().as_bytes()));
            Ok(Listed { path, kind: Kind::Link, size_bytes: 0, sha256 })
        }
        _ => {
            let size = entry.header().size()?;
            let (size_bytes, digest) = archive::copy_hashed(entry, to)?;
            if size_bytes != size {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is cut off"));
            }
            Ok(Listed { path, kind: Kind::File, size_bytes, sha256: Some(digest) })
        }
    }
}

fn text(name: &str, entry: &mut Entry<'_, impl Read>) -> io::Result<(Listed, Vec<u8>)> {
    if entry.header().size()? > LARGEST_JSON {
        return Err(io::Error::other(format!("{name} is too large")));
    }
    let mut text = Vec::new();
    let listed = look(name, entry, &mut text)?;
    Ok((listed, text))
}

fn parsed<T: DeserializeOwned>(name: &str, text: &[u8]) -> Result<T, String> {
    serde_json::from_slice(text).map_err(|error| format!("{name}: {error}"))
}

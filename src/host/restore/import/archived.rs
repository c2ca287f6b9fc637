//! An archive as it is read: in one pass, in which every entry is compared with the manifest at the end, and which may write
//! some of the entries where nobody looks for them yet.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use serde::de::DeserializeOwned;
use tar::{Archive, EntryType};

use crate::fsx::FileError;
use crate::host::archive::{self, ABOUT, About, DUMP, HOME, Kind, Listed, MANIFEST, Manifest, SIDE, SYSTEM};
use crate::host::tar_names::Names;
use crate::store::snapshot::SideRecord;

/// Of a description of ours: a manifest of two million entries has less.
const MAX_JSON_BYTES: u64 = 512 << 20;
const MAX_ENTRIES: usize = 2_000_000;
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

/// What a pass writes; all other entries are only read.
pub enum Part<'a> {
    Nothing,
    /// The owner's files, into a directory.
    Home(&'a Path),
    /// What belongs to the gateway's user: the dump into a file, its part of the home into a directory.
    Gateway {
        dump: &'a Path,
        system: &'a Path,
    },
}

impl Part<'_> {
    /// Where an entry of this part goes.
    fn place(&self, name: &Path) -> Option<PathBuf> {
        let inside = name.strip_prefix(HOME).ok();
        let inside = inside.filter(|inside| !inside.as_os_str().is_empty());
        let in_system = inside.and_then(|inside| inside.strip_prefix(SYSTEM).ok());
        match self {
            Self::Nothing => None,
            Self::Home(into) => inside.filter(|_| in_system.is_none()).map(|inside| into.join(inside)),
            Self::Gateway { dump, .. } if name == Path::new(DUMP) => Some(dump.to_path_buf()),
            Self::Gateway { system, .. } => {
                in_system.filter(|rest| !rest.as_os_str().is_empty()).map(|rest| system.join(rest))
            }
        }
    }
}

/// An archive that is whole.
pub struct Archived {
    pub about: About,
    pub side: SideRecord,
    entries: Vec<Listed>,
}

impl Archived {
    /// Reads all of it, and writes a part of it into directories that are there and empty.
    ///
    /// # Errors
    /// [`ArchiveError`]; what was written until then is the caller's to remove.
    pub fn read(file: &File, path: &Path, part: &Part<'_>) -> Result<Self, ArchiveError> {
        Pass::new(path, part).run(file)
    }

    /// How large the dump of an archive that has not been compared yet says that it is.
    pub fn dump_bytes(mut file: &File) -> io::Result<u64> {
        file.rewind()?;
        let mut tar = Archive::new(BufReader::new(file));
        for entry in tar.entries()?.raw(true) {
            let entry = entry?;
            if entry.path()? == Path::new(DUMP) {
                return Ok(entry.size());
            }
        }
        Ok(0)
    }

    /// How many entries below the home there are.
    pub fn of_home(&self) -> usize {
        self.entries.iter().filter(|entry| entry.path.starts_with(HOME)).count()
    }
}

/// One pass over an archive.
struct Pass<'a> {
    path: &'a Path,
    part: &'a Part<'a>,
    about: Option<About>,
    side: Option<SideRecord>,
    manifest: Option<Manifest>,
    seen: Vec<Listed>,
    /// What an entry may be below.
    directories: std::collections::HashSet<PathBuf>,
    names: std::collections::HashSet<PathBuf>,
    /// Of directories that were written: their own mode might keep us out of them.
    modes: Vec<(PathBuf, u32)>,
}

impl<'a> Pass<'a> {
    fn new(path: &'a Path, part: &'a Part<'a>) -> Self {
        Self {
            path,
            part,
            about: None,
            side: None,
            manifest: None,
            seen: Vec::new(),
            directories: [PathBuf::from(HOME)].into(),
            names: std::collections::HashSet::new(),
            modes: Vec::new(),
        }
    }

    fn damaged(&self, why: impl Into<String>) -> ArchiveError {
        ArchiveError::Damaged { path: self.path.to_owned(), why: why.into() }
    }

    fn run(mut self, mut file: &File) -> Result<Archived, ArchiveError> {
        let path = self.path;
        let read = |source| ArchiveError::Read { path: path.to_owned(), source };
        file.rewind().map_err(read)?;
        let mut tar = Archive::new(BufReader::with_capacity(BUFFER, file));
        let mut names = Names::default();
        for entry in tar.entries().map_err(read)?.raw(true) {
            let mut entry = entry.map_err(|error| self.damaged(error.to_string()))?;
            let is_name = names.take_from(&mut entry).map_err(|error| self.damaged(error.to_string()))?;
            if !is_name {
                self.entry(entry, std::mem::take(&mut names))?;
            }
        }
        for (path, mode) in self.modes.iter().rev() {
            let permissions = fs::Permissions::from_mode(*mode);
            fs::set_permissions(path, permissions).map_err(FileError::at("set the mode of", path))?;
        }
        self.compare()
    }

    fn entry(&mut self, mut entry: tar::Entry<'_, impl Read>, names: Names) -> Result<(), ArchiveError> {
        let name = match names.path {
            Some(name) => name,
            None => entry.path().map_err(|error| self.damaged(error.to_string()))?.into_owned(),
        };
        let written = archive::written(&name);
        let kind = self.check(&name, &written, &entry)?;
        if self.manifest.is_some() {
            return Err(self.damaged(format!("{written} comes after the manifest")));
        }
        let link = match names.link {
            Some(link) => link,
            None => {
                let link = entry.link_name().map_err(|error| self.damaged(error.to_string()))?;
                link.unwrap_or_default().into_owned()
            }
        };
        let head = Head {
            written,
            kind,
            link,
            mode: entry.header().mode().unwrap_or(0o600),
            modified: entry.header().mtime().unwrap_or(0),
            size: entry.size(),
        };
        match head.written.as_str() {
            ABOUT | SIDE | MANIFEST => self.description(&head, &mut entry),
            _ => {
                let listed = match self.part.place(&name) {
                    Some(place) => self.write(&head, &mut entry, &place)?,
                    None => {
                        head.listed(&mut entry, io::sink()).map_err(|error| self.broken(&head, &error))?
                    }
                };
                self.seen.push(listed);
                Ok(())
            }
        }
    }

    /// Only what an archive of ours may hold passes: plain relative paths, nothing below what is no directory, no name twice.
    fn check(
        &mut self,
        name: &Path,
        written: &str,
        entry: &tar::Entry<'_, impl Read>,
    ) -> Result<Kind, ArchiveError> {
        let is_plain = name.components().all(|part| matches!(part, Component::Normal(_)));
        let ours = [ABOUT, DUMP, SIDE, MANIFEST].contains(&written);
        let is_in_place = name.parent().is_some_and(|parent| self.directories.contains(parent));
        if !is_plain || !(ours || is_in_place) {
            return Err(self.damaged(format!("{written:?} is no path of an archive")));
        }
        let is_system = name.strip_prefix(HOME).is_ok_and(|inside| inside == Path::new(SYSTEM));
        let kind = match entry.header().entry_type() {
            EntryType::Directory if !ours => Kind::Directory,
            EntryType::Symlink if !ours && !is_system => Kind::Link,
            EntryType::Regular if !is_system => Kind::File,
            other => return Err(self.damaged(format!("{written} is of the kind {other:?}"))),
        };
        if kind == Kind::Directory {
            self.directories.insert(name.to_owned());
        }
        if self.names.len() == MAX_ENTRIES {
            return Err(self.damaged(format!("it has more than {MAX_ENTRIES} entries")));
        }
        if !self.names.insert(name.to_owned()) {
            return Err(self.damaged(format!("{written} is there twice")));
        }
        Ok(kind)
    }

    fn description(&mut self, head: &Head, entry: &mut impl Read) -> Result<(), ArchiveError> {
        if head.size > MAX_JSON_BYTES {
            return Err(self.damaged(format!("{} is too large", head.written)));
        }
        let mut text = Vec::new();
        let listed = head.listed(entry, &mut text).map_err(|error| self.broken(head, &error))?;
        match head.written.as_str() {
            ABOUT => self.about = Some(self.parsed(head, &text)?),
            SIDE => self.side = Some(self.parsed(head, &text)?),
            _ => {
                self.manifest = Some(self.parsed(head, &text)?);
                return Ok(());
            }
        }
        self.seen.push(listed);
        Ok(())
    }

    fn parsed<T: DeserializeOwned>(&self, head: &Head, text: &[u8]) -> Result<T, ArchiveError> {
        serde_json::from_slice(text).map_err(|error| self.damaged(format!("{}: {error}", head.written)))
    }

    fn broken(&self, head: &Head, error: &io::Error) -> ArchiveError {
        self.damaged(format!("{}: {error}", head.written))
    }

    fn write(&mut self, head: &Head, entry: &mut impl Read, to: &Path) -> Result<Listed, ArchiveError> {
        let failed = |action| FileError::at(action, to);
        let mode = head.mode & 0o2777;
        match head.kind {
            Kind::Directory => {
                fs::DirBuilder::new().mode(0o700).create(to).map_err(failed("create directory"))?;
                self.modes.push((to.to_owned(), mode));
            }
            Kind::Link => std::os::unix::fs::symlink(&head.link, to).map_err(failed("link"))?,
            Kind::File => {
                // New, and never through a link that an earlier entry made.
                let mut options = File::options();
                let file = options.write(true).mode(0o600).create_new(true).open(to);
                let file = file.map_err(failed("create"))?;
                let listed = head.listed(entry, &file).map_err(failed("write"))?;
                let modified = std::time::UNIX_EPOCH + std::time::Duration::from_secs(head.modified);
                file.set_modified(modified).map_err(failed("set the time of"))?;
                let permissions = fs::Permissions::from_mode(mode);
                file.set_permissions(permissions).map_err(failed("set the mode of"))?;
                return Ok(listed);
            }
        }
        head.listed(entry, io::sink()).map_err(|error| self.broken(head, &error))
    }

    fn compare(self) -> Result<Archived, ArchiveError> {
        let damaged = |why: String| ArchiveError::Damaged { path: self.path.to_owned(), why };
        let about = self.about.ok_or_else(|| damaged(format!("it has no {ABOUT}")))?;
        if about.version > archive::VERSION {
            return Err(ArchiveError::Later { path: self.path.to_owned(), made_by: about.made_by });
        }
        let manifest = self.manifest.ok_or_else(|| damaged("its end is missing".to_owned()))?;
        if let Some((expected, found)) =
            manifest.entries.iter().zip(&self.seen).find(|(expected, found)| expected != found)
        {
            let why = format!("{} is not what the manifest says of {}", found.path, expected.path);
            return Err(damaged(why));
        }
        if manifest.entries.len() != self.seen.len() {
            let why = format!("it has {} entries instead of {}", self.seen.len(), manifest.entries.len());
            return Err(damaged(why));
        }
        let side = self.side.ok_or_else(|| damaged(format!("it has no {SIDE}")))?;
        let dump = self.seen.iter().find(|entry| entry.path == DUMP);
        let fits = dump.is_some_and(|dump| {
            dump.size_bytes == side.size_bytes && dump.sha256.as_ref() == Some(&side.sha256)
        });
        if !fits {
            return Err(damaged(format!("{SIDE} is not of its {DUMP}")));
        }
        Ok(Archived { about, side, entries: self.seen })
    }
}

/// What an entry says of itself.
struct Head {
    /// Its path, as the manifest writes it.
    written: String,
    kind: Kind,
    link: PathBuf,
    mode: u32,
    modified: u64,
    size: u64,
}

impl Head {
    /// Passes the entry's bytes on, and says what it is.
    fn listed(&self, entry: &mut impl Read, to: impl Write) -> io::Result<Listed> {
        let path = self.written.clone();
        let kind = self.kind;
        match kind {
            Kind::Directory => Ok(Listed { path, kind, size_bytes: 0, sha256: None }),
            Kind::Link => {
                let sha256 = Some(archive::sha256(self.link.as_os_str().as_bytes()));
                Ok(Listed { path, kind, size_bytes: 0, sha256 })
            }
            Kind::File => {
                let (size_bytes, digest) = archive::copy_hashed(entry, to)?;
                if size_bytes != self.size {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is cut off"));
                }
                Ok(Listed { path, kind, size_bytes, sha256: Some(digest) })
            }
        }
    }
}

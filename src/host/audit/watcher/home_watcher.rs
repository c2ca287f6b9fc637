//! The eye on the home: its folders as they are opened, and what the kernel tells of them by inotify(7).
//!
//! The kernel queues what it tells before the call that changed something returns. So all that happened before a moment
//! has been heard of when the queue was read to its end after it: no more is needed to know where one tool call ends and
//! the next begins. `notify` is not used here: it asks to be told of each file that is opened, too, by which a search
//! through the home fills the queue, and it knows folders by their paths, which rename(2) changes.
//!
//! Folders are opened below the home with no link followed on the way, and never across a mount.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};

use super::diff::{Dirt, Marks, Sight};
use super::tree::{Inode, Kind, Name, Seen};
use crate::fsx::FileError;

/// The folder of records and settings, whose writers note what they do themselves.
const OWN: &[u8] = b"system";
/// So much is read of the queue at once, at most: who writes without end keeps nobody waiting.
const MOST_EVENTS: usize = 200_000;

const TOLD: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MODIFY)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_CLOSE_WRITE)
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_ONLYDIR);

pub struct Eye {
    home: OwnedFd,
    root: Inode,
    inotify: Inotify,
    folders: HashMap<WatchDescriptor, Inode>,
    watches: HashMap<Inode, WatchDescriptor>,
    /// The system gives no more watches.
    is_short: bool,
}

impl Eye {
    /// # Errors
    /// When there is no home, or the system watches nothing.
    pub fn open(home: &Path) -> Result<Self, FileError> {
        let at = |action: &'static str| move |errno: Errno| FileError::at(action, home)(errno.into());
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let folder = nix::fcntl::open(home, flags, Mode::empty()).map_err(at("open"))?;
        let root = fstat(&folder).map_err(at("look at"))?.st_ino;
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(at("watch"))?;
        let (folders, watches) = (HashMap::new(), HashMap::new());
        let eye = Self { home: folder, root, inotify, folders, watches, is_short: false };
        // A filter of system calls may refuse what all looks are made with, and an audit of nothing looks like peace.
        eye.opened(b".").map_err(at("look into"))?;
        Ok(eye)
    }

    pub fn root(&self) -> Inode {
        self.root
    }

    pub fn is_short(&self) -> bool {
        self.is_short
    }

    /// Before everything is listed anew: the system may have watches again.
    pub fn hope(&mut self) {
        self.is_short = false;
    }

    pub fn watches(&self) -> usize {
        self.watches.len()
    }

    /// Reads all that was told so far.
    pub fn drain(&mut self, dirt: &mut Dirt) {
        let mut read = 0;
        while read < MOST_EVENTS {
            let events = match self.inotify.read_events() {
                Ok(events) if events.is_empty() => return,
                Ok(events) => events,
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return,
                Err(error) => {
                    tracing::error!(%error, "inotify cannot be read");
                    return dirt.mark_all();
                }
            };
            read += events.len();
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    dirt.mark_all();
                } else if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    self.ended(event.wd);
                } else if let (Some(folder), Some(name)) = (self.folders.get(&event.wd), event.name) {
                    let name = name.as_encoded_bytes();
                    if !(*folder == self.root && name == OWN) {
                        dirt.mark(*folder, name, marks(event.mask));
                    }
                }
            }
        }
    }

    fn ended(&mut self, watch: WatchDescriptor) {
        if let Some(folder) = self.folders.remove(&watch)
            && self.watches.get(&folder) == Some(&watch)
        {
            self.watches.remove(&folder);
        }
    }

    /// Folders that are not in the home any more.
    pub fn forget(&mut self, folders: &[Inode]) {
        for folder in folders {
            if let Some(watch) = self.watches.remove(folder) {
                self.folders.remove(&watch);
                // Of a folder that was deleted the kernel has let go by itself.
                let _ = self.inotify.rm_watch(watch);
            }
        }
    }

    fn open_folder(&self, path: &[u8], folder: Inode) -> Option<OwnedFd> {
        match self.opened(if path.is_empty() { b"." } else { path }) {
            Ok(opened) => fstat(&opened).is_ok_and(|stat| stat.st_ino == folder).then_some(opened),
            // It went, or something else has come in its place, or is mounted on it.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV | Errno::EAGAIN) => None,
            Err(error) => {
                let path = String::from_utf8_lossy(path);
                tracing::error!(%error, %path, "a folder cannot be looked into: its changes are not audited");
                None
            }
        }
    }

    fn opened(&self, path: &[u8]) -> nix::Result<OwnedFd> {
        let how = OpenHow::new()
            .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
            .resolve(
                ResolveFlag::RESOLVE_BENEATH
                    | ResolveFlag::RESOLVE_NO_SYMLINKS
                    | ResolveFlag::RESOLVE_NO_XDEV,
            );
        openat2(&self.home, path, how)
    }

    fn watch(&mut self, folder: Inode, opened: &OwnedFd) {
        let path = format!("/proc/self/fd/{}", opened.as_raw_fd());
        match self.inotify.add_watch(path.as_str(), TOLD) {
            Ok(watch) => {
                self.folders.insert(watch, folder);
                self.watches.insert(folder, watch);
            }
            Err(error) => {
                if !self.is_short {
                    tracing::error!(%error, watches = self.watches.len(), "no more folders can be watched");
                }
                self.is_short = true;
            }
        }
    }
}

impl AsFd for Eye {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

impl Sight for Eye {
    fn look(&mut self, path: &[u8], folder: Inode, names: &[Name]) -> Vec<Option<Seen>> {
        let Some(opened) = self.open_folder(path, folder) else { return vec![None; names.len()] };
        names.iter().map(|name| seen(&opened, name)).collect()
    }

    fn list(&mut self, path: &[u8], folder: Inode) -> Vec<(Name, Seen)> {
        let Some(opened) = self.open_folder(path, folder) else { return Vec::new() };
        self.watch(folder, &opened);
        let Ok(mut dir) = Dir::from_fd(opened) else { return Vec::new() };
        let names: Vec<Name> =
            dir.iter().flatten().map(|entry| entry.file_name().to_bytes().into()).collect();
        let is_own = |name: &Name| folder == self.root && &name[..] == OWN;
        let is_listed = |name: &Name| !matches!(&name[..], b"." | b"..") && !is_own(name);
        let names = names.into_iter().filter(is_listed);
        names.filter_map(|name| seen(&dir, &name).map(|seen| (name, seen))).collect()
    }
}

fn marks(mask: AddWatchFlags) -> Marks {
    let names = AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_MOVED_TO;
    Marks {
        named: mask.intersects(names),
        made: mask.contains(AddWatchFlags::IN_CREATE),
        written: mask.contains(AddWatchFlags::IN_MODIFY),
        touched: mask.contains(AddWatchFlags::IN_ATTRIB),
        ..Marks::default()
    }
}

fn seen(folder: &impl AsFd, name: &[u8]) -> Option<Seen> {
    let stat = fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW).ok()?;
    let kind = match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => Kind::File,
        SFlag::S_IFDIR => Kind::Folder,
        SFlag::S_IFLNK => Kind::Link,
        _ => Kind::Other,
    };
    Some(Seen {
        inode: stat.st_ino,
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        mtime: mtime(&stat),
        kind,
        is_shared: kind == Kind::File && stat.st_nlink > 1,
    })
}

fn mtime(stat: &FileStat) -> i64 {
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec)
}

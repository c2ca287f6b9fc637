//! Home directory watcher, based on inotify(7).
//!
//! The kernel queues an event before the causing system call returns, so draining the queue yields all changes so far.
//! This separates one tool call from the next. The `notify` crate is unsuitable: it also subscribes to open events, so
//! a search through the home directory fills the queue, and it identifies directories by path, which rename(2) changes.
//!
//! Directories are opened beneath the home directory, without following symlinks or crossing mounts.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::sys::stat::{Mode, fstat};
use rustix::fs::{AtFlags, FileType, StatxFlags, StatxTimestamp};

use super::diff::{DirtySet, FsProbe, Marks};
use super::tree::{FileState, Inode, Name, NodeKind};
use svc_base::fsx::FileError;

/// Holds records and settings. Not watched, since the owner's programs can't change it.
const SYSTEM_DIR: &[u8] = b"system";
/// Maximum number of events read per drain, so that a program writing nonstop can't block the watcher.
const MAX_EVENTS_PER_DRAIN: usize = 200_000;

const WATCHED_EVENTS: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MODIFY)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_CLOSE_WRITE)
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_ONLYDIR);

pub struct HomeWatcher {
    home: OwnedFd,
    root: Inode,
    inotify: Inotify,
    dirs: HashMap<WatchDescriptor, Inode>,
    watches: HashMap<Inode, WatchDescriptor>,
    /// Set if a directory couldn't be watched, probably because of the system's watch limit.
    is_at_watch_limit: bool,
    /// Number of events read so far.
    event_count: u64,
}

impl HomeWatcher {
    /// Opens the home directory.
    ///
    /// # Errors
    /// The home directory cannot be opened or watched, or openat2(2) is not permitted.
    pub fn open(home: &Path) -> Result<Self, FileError> {
        let wrap = |action: &'static str| move |errno: Errno| FileError::wrap(action, home)(errno.into());
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let dir = nix::fcntl::open(home, flags, Mode::empty()).map_err(wrap("open"))?;
        let root = fstat(&dir).map_err(wrap("stat"))?.st_ino;
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(wrap("watch"))?;
        let (dirs, watches) = (HashMap::new(), HashMap::new());
        let watcher =
            Self { home: dir, root, inotify, dirs, watches, is_at_watch_limit: false, event_count: 0 };
        // Check `openat2` up front: if a seccomp filter denied it, no directory could be opened, and the audit would
        // miss all changes.
        watcher.open_below(b".").map_err(wrap("open directories of"))?;
        Ok(watcher)
    }

    pub fn root(&self) -> Inode {
        self.root
    }

    pub fn is_at_watch_limit(&self) -> bool {
        self.is_at_watch_limit
    }

    /// Clears [`Self::is_at_watch_limit`]. Called before a full check, which retries all watches.
    pub fn retry_watches(&mut self) {
        self.is_at_watch_limit = false;
    }

    pub fn event_count(&self) -> u64 {
        self.event_count
    }

    pub fn watch_count(&self) -> usize {
        self.watches.len()
    }

    /// Reads queued events, up to about `MAX_EVENTS_PER_DRAIN`.
    pub fn drain(&mut self, dirty: &mut DirtySet) {
        let mut read = 0;
        while read < MAX_EVENTS_PER_DRAIN {
            let events = match self.inotify.read_events() {
                Ok(events) if events.is_empty() => return,
                Ok(events) => events,
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return,
                Err(error) => {
                    tracing::error!(%error, "cannot read inotify events");
                    return dirty.mark_all();
                }
            };
            read += events.len();
            self.event_count += events.len() as u64;
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    dirty.mark_all();
                } else if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                    self.remove_watch(event.wd);
                } else if let (Some(dir), Some(name)) = (self.dirs.get(&event.wd), event.name) {
                    let name = name.as_encoded_bytes();
                    if !(*dir == self.root && name == SYSTEM_DIR) {
                        dirty.mark(*dir, name, to_marks(event.mask));
                    }
                }
            }
        }
    }

    fn remove_watch(&mut self, watch: WatchDescriptor) {
        if let Some(dir) = self.dirs.remove(&watch)
            && self.watches.get(&dir) == Some(&watch)
        {
            self.watches.remove(&dir);
        }
    }

    /// Stops watching directories that are no longer in the home directory.
    pub fn unwatch(&mut self, dirs: &[Inode]) {
        for dir in dirs {
            if let Some(watch) = self.watches.remove(dir) {
                self.dirs.remove(&watch);
                // The kernel has already removed the watches of deleted directories.
                let _ = self.inotify.rm_watch(watch);
            }
        }
    }

    fn open_dir(&self, path: &[u8], dir: Inode) -> Option<OwnedFd> {
        match self.open_below(if path.is_empty() { b"." } else { path }) {
            Ok(opened) => fstat(&opened).is_ok_and(|stat| stat.st_ino == dir).then_some(opened),
            // The directory was deleted, replaced or mounted over.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV | Errno::EAGAIN) => None,
            Err(error) => {
                let path = String::from_utf8_lossy(path);
                tracing::error!(%error, %path, "cannot open directory; its changes are not audited");
                None
            }
        }
    }

    fn open_below(&self, path: &[u8]) -> nix::Result<OwnedFd> {
        let how = OpenHow::new()
            .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
            .resolve(
                ResolveFlag::RESOLVE_BENEATH
                    | ResolveFlag::RESOLVE_NO_SYMLINKS
                    | ResolveFlag::RESOLVE_NO_XDEV,
            );
        openat2(&self.home, path, how)
    }

    fn add_watch(&mut self, dir: Inode, opened: &OwnedFd) {
        let path = format!("/proc/self/fd/{}", opened.as_raw_fd());
        match self.inotify.add_watch(path.as_str(), WATCHED_EVENTS) {
            Ok(watch) => {
                self.dirs.insert(watch, dir);
                self.watches.insert(dir, watch);
            }
            Err(error) => {
                if !self.is_at_watch_limit {
                    tracing::error!(
                        %error,
                        watches = self.watches.len(),
                        "cannot watch more directories: raise fs.inotify.max_user_watches"
                    );
                }
                self.is_at_watch_limit = true;
            }
        }
    }
}

impl AsFd for HomeWatcher {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

impl FsProbe for HomeWatcher {
    fn probe(&mut self, path: &[u8], dir: Inode, names: &[Name]) -> Vec<Option<FileState>> {
        let Some(opened) = self.open_dir(path, dir) else { return vec![None; names.len()] };
        names.iter().map(|name| read_state(&opened, name)).collect()
    }

    fn list(&mut self, path: &[u8], dir: Inode) -> Vec<(Name, FileState)> {
        let Some(opened) = self.open_dir(path, dir) else { return Vec::new() };
        self.add_watch(dir, &opened);
        let Ok(mut listing) = Dir::from_fd(opened) else { return Vec::new() };
        let names: Vec<Name> =
            listing.iter().flatten().map(|entry| entry.file_name().to_bytes().into()).collect();
        let is_system = |name: &Name| dir == self.root && &name[..] == SYSTEM_DIR;
        let is_listed = |name: &Name| !matches!(&name[..], b"." | b"..") && !is_system(name);
        let names = names.into_iter().filter(is_listed);
        names.filter_map(|name| read_state(&listing, &name).map(|state| (name, state))).collect()
    }
}

fn to_marks(mask: AddWatchFlags) -> Marks {
    let name_events = AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_MOVED_TO;
    Marks {
        has_name_change: mask.intersects(name_events),
        is_created: mask.contains(AddWatchFlags::IN_CREATE),
        is_written: mask.contains(AddWatchFlags::IN_MODIFY),
        is_touched: mask.contains(AddWatchFlags::IN_ATTRIB),
        ..Marks::default()
    }
}

fn read_state(dir: &impl AsFd, name: &[u8]) -> Option<FileState> {
    let fields = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(dir, name, AtFlags::SYMLINK_NOFOLLOW, fields).ok()?;
    let kind = match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::RegularFile => NodeKind::File,
        FileType::Directory => NodeKind::Directory,
        FileType::Symlink => NodeKind::Symlink,
        _ => NodeKind::Other,
    };
    let has_birth_time = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    Some(FileState {
        inode: stat.stx_ino,
        size: stat.stx_size,
        mtime: to_nanoseconds(stat.stx_mtime),
        birth_time: if has_birth_time { to_nanoseconds(stat.stx_btime) } else { 0 },
        kind,
        has_other_names: kind == NodeKind::File && stat.stx_nlink > 1,
    })
}

fn to_nanoseconds(time: StatxTimestamp) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec.into())
}

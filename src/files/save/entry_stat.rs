//! Opens and stats directory entries without following symlinks.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags, StatxTimestamp};
use rustix::io::Errno;

use crate::tree::Node;

/// Coarsest timestamp granularity of supported file systems. Two changes within it may leave identical timestamps.
pub(super) const TIME_GRANULARITY: Duration = Duration::from_millis(20);
/// Signature of a CACHEDIR.TAG file (<https://bford.info/cachedir/>).
const CACHE_TAG_START: &[u8] = b"Signature: 8a477f597d28d172789f06886806bc55";
pub(super) const CACHE_TAG: &str = "CACHEDIR.TAG";

/// The `stat` fields used for change detection. Any change to a file changes at least one of them, except in the cases
/// detected by [`stat_settled`] and prevented by [`WriteBack`](super::write_back::WriteBack).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct StatFingerprint {
    mtime: Timestamp,
    ctime: Timestamp,
    size: u64,
    inode: u64,
}

impl StatFingerprint {
    pub(super) fn from_stat(stat: &Statx) -> Self {
        Self {
            mtime: to_timestamp(stat.stx_mtime),
            ctime: to_timestamp(stat.stx_ctime),
            size: stat.stx_size,
            inode: stat.stx_ino,
        }
    }

    pub(super) fn from_node(node: &Node) -> Self {
        Self { mtime: node.mtime, ctime: node.ctime, size: node.size, inode: node.inode }
    }
}

pub(super) fn open_in(directory: &OwnedFd, name: &OsStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty())
}

pub(super) fn stat_in(directory: &OwnedFd, name: &OsStr) -> Result<Statx, Errno> {
    rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)
}

pub(super) fn stat_open(file: &impl AsFd) -> Result<Statx, Errno> {
    rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

/// Stats a file, and returns whether any later change is certain to change its timestamps. Waits first if the file
/// changed less than [`TIME_GRANULARITY`] ago.
pub(super) fn stat_settled(file: &File) -> Result<(Statx, bool), Errno> {
    let is_settled = |stat: &Statx| {
        let changed = SystemTime::from(to_timestamp(stat.stx_ctime));
        SystemTime::now().duration_since(changed).is_ok_and(|age| age > TIME_GRANULARITY)
    };
    let stat = stat_open(file)?;
    if is_settled(&stat) {
        return Ok((stat, true));
    }
    std::thread::sleep(TIME_GRANULARITY * 2);
    let stat = stat_open(file)?;
    Ok((stat, is_settled(&stat)))
}

/// Whether the directory has a CACHEDIR.TAG with a valid signature.
pub(super) fn has_cache_tag(directory: &OwnedFd) -> bool {
    let mut start = [0; CACHE_TAG_START.len()];
    open_in(directory, OsStr::new(CACHE_TAG), OFlags::NONBLOCK | OFlags::NOCTTY)
        .is_ok_and(|tag| File::from(tag).read_exact(&mut start).is_ok() && start == CACHE_TAG_START)
}

/// Converts a timestamp, clamping it to the range RFC 3339 can represent.
pub(super) fn to_timestamp(time: StatxTimestamp) -> Timestamp {
    /// 0000-01-01T00:00:00Z.
    const MIN_SECONDS: i64 = -62_167_219_200;
    let seconds = time.tv_sec.max(MIN_SECONDS);
    Timestamp::new(seconds, time.tv_nsec.cast_signed()).unwrap_or(Timestamp::MAX)
}

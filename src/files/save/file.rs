//! Saves regular files.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags, Statx};
use rustix::io::Errno;

use super::database::{ReadLock, is_database, lock_as_reader};
use super::entry_stat::{StatFingerprint, open_in, stat_open, stat_settled};
use super::walk::{EntryError, MAX_READ_ATTEMPTS, Walker, check_same};
use crate::chunker::MAX_CHUNK_BYTES;
use crate::error::FilesError;
use crate::id::Id;
use crate::pack::BlobType;
use crate::tree::{Node, NodeType};
use crate::xattrs::read_xattrs;

/// Larger files aren't saved: their chunk lists wouldn't fit in memory. Only sparse files get this large.
const MAX_FILE_BYTES: u64 = 1 << 40;
/// Smaller holes are read as zeros.
const MIN_HOLE_BYTES: u64 = 1 << 20;
/// Inode number recorded for files that changed during every read. No file has it, so the next save reads them again.
pub(super) const UNSTABLE_INODE: u64 = 0;
/// Note for files that changed during every read.
pub(super) const UNSTABLE_NOTE: &str = "changed while it was read";
/// Unit of `stx_blocks`.
pub(super) const BLOCK_BYTES: u64 = 512;

/// Content of a hard-linked file.
pub(super) struct HardLinkedContent {
    fingerprint: StatFingerprint,
    content: Vec<Id>,
    size: u64,
    /// Number of links not visited yet.
    remaining_names: u32,
}

impl Walker<'_> {
    pub(super) fn save_file(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        stat: &Statx,
        earlier: Option<&Node>,
    ) -> Result<Option<Node>, EntryError> {
        let node = match earlier.filter(|earlier| self.is_saved(earlier, stat)) {
            Some(earlier) => {
                let mut node = earlier.clone();
                // Earlier releases didn't record the allocated space.
                node.allocated_bytes = node.allocated_bytes.or_else(|| sparse_allocation(stat));
                node
            }
            None => self.read_file(directory, name, stat)?,
        };
        self.counts.files += 1;
        self.counts.bytes += node.size;
        Ok(Some(node))
    }

    /// Whether the file is unchanged since the parent snapshot and the repository still has its content.
    fn is_saved(&self, earlier: &Node, stat: &Statx) -> bool {
        let has_content = |chunks: &Vec<Id>| chunks.iter().all(|id| self.known.contains(BlobType::Data, *id));
        earlier.node_type == NodeType::File
            && StatFingerprint::from_node(earlier) == StatFingerprint::from_stat(stat)
            && earlier.content.as_ref().is_none_or(has_content)
    }

    fn read_file(&mut self, directory: &OwnedFd, name: &OsStr, expected: &Statx) -> Result<Node, EntryError> {
        let mut file = File::from(open_in(directory, name, OFlags::NONBLOCK | OFlags::NOCTTY)?);
        check_same(expected, &stat_open(&file)?)?;
        let (mut reads, mut read_duration) = (0, Duration::MAX);
        loop {
            let is_last = reads + 1 >= MAX_READ_ATTEMPTS;
            let _lock = if is_last { self.lock_database(&file, read_duration)? } else { None };
            let (stat, is_settled) = stat_settled(&file)?;
            wait_for_writes(&file);
            // Must follow `stat_settled`: a page redirtied during the write-back changes the timestamps once, but
            // further writes to it don't. The comparison after the read must catch that one change.
            self.write_back.clean(&file)?;
            if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::RegularFile {
                return Err(EntryError::Replaced);
            }
            if stat.stx_size > MAX_FILE_BYTES {
                let reason = format!("larger than {MAX_FILE_BYTES} bytes");
                return Err(EntryError::Unreadable(io::Error::new(io::ErrorKind::FileTooLarge, reason)));
            }
            let mut node = self.new_node(name, NodeType::File, &stat);
            node.extended_attributes = read_xattrs(&file)?;
            node.allocated_bytes = sparse_allocation(&stat);
            let fingerprint = StatFingerprint::from_stat(&stat);
            if let Some((content, size)) = self.take_linked(stat.stx_ino, fingerprint) {
                (node.content, node.size) = (Some(content), size);
                return Ok(node);
            }
            self.has_read_database |= is_database(&file, stat.stx_size);
            let began = Instant::now();
            let (content, size) = self.read_content(&mut file, &stat)?;
            (reads, read_duration) = (reads + 1, began.elapsed());
            let is_stable = is_settled && StatFingerprint::from_stat(&stat_open(&file)?) == fingerprint;
            if !is_stable && reads < MAX_READ_ATTEMPTS {
                continue;
            }
            if !is_stable {
                (node.inode, node.links) = (UNSTABLE_INODE, 1);
                self.counts.unstable += 1;
                self.mark_for_retry();
                self.note(UNSTABLE_NOTE);
            } else if stat.stx_nlink > 1 {
                let (content, remaining_names) = (content.clone(), stat.stx_nlink - 1);
                let linked = HardLinkedContent { fingerprint, content, size, remaining_names };
                self.linked.insert(stat.stx_ino, linked);
            }
            self.counts.files_read += 1;
            (node.content, node.size) = (Some(content), size);
            return Ok(node);
        }
    }

    /// Marks the current entry for the next save. That save also lists the entry's directory, since a database must be
    /// saved together with any WAL or journal created by then.
    pub(super) fn mark_for_retry(&mut self) {
        self.retry.mark_directory(self.path.parent().unwrap_or(Path::new("")));
        self.retry.mark_subtree(&self.path);
    }

    /// Takes a reader's lock on a database; see [`lock_as_reader`]. Writes its pages back first so that writers don't
    /// have to wait for that as well.
    pub(super) fn lock_database(
        &mut self,
        file: &File,
        read_duration: Duration,
    ) -> io::Result<Option<ReadLock>> {
        self.write_back.clean(file)?;
        Ok(lock_as_reader(file, file.metadata()?.len(), read_duration))
    }

    /// Returns the content of a file already read through another link, if it hasn't changed since.
    fn take_linked(&mut self, inode: u64, fingerprint: StatFingerprint) -> Option<(Vec<Id>, u64)> {
        let linked = self.linked.get_mut(&inode).filter(|linked| linked.fingerprint == fingerprint)?;
        linked.remaining_names = linked.remaining_names.saturating_sub(1);
        let content = (linked.content.clone(), linked.size);
        if linked.remaining_names == 0 {
            self.linked.remove(&inode);
        }
        Some(content)
    }

    /// Saves the file's chunks up to the size in `stat`; a file that grows concurrently is read again. Returns the
    /// chunks and the number of bytes read.
    fn read_content(&mut self, file: &mut File, stat: &Statx) -> Result<(Vec<Id>, u64), EntryError> {
        let (mut content, mut size) = (Vec::new(), 0);
        let is_sparse = stat.stx_blocks.saturating_mul(BLOCK_BYTES) < stat.stx_size;
        while size < stat.stx_size {
            let (start, end) =
                if is_sparse { find_data(file, size, stat.stx_size)? } else { (size, stat.stx_size) };
            self.add_zeros(start - size, &mut content)?;
            size = start;
            file.seek(SeekFrom::Start(start))?;
            let mut data = Read::by_ref(file).take(end - start);
            self.chunker.reset();
            while let Some(chunk) = self.chunker.next_chunk(&mut data)? {
                size += chunk.len() as u64;
                self.add_chunk(chunk, &mut content)?;
            }
            if size < end {
                // Truncated concurrently.
                break;
            }
        }
        Ok((content, size))
    }

    fn add_chunk(&mut self, chunk: Vec<u8>, content: &mut Vec<Id>) -> Result<(), FilesError> {
        if self.is_stopped.load(Ordering::Relaxed) {
            return Err(FilesError::Stopped);
        }
        let id = Id::of(&chunk);
        content.push(id);
        if self.known.insert_new(BlobType::Data, id)? { self.workers.add(id, chunk) } else { Ok(()) }
    }

    fn add_zeros(&mut self, length: u64, content: &mut Vec<Id>) -> Result<(), FilesError> {
        let (whole, rest) = (length / MAX_CHUNK_BYTES as u64, length % MAX_CHUNK_BYTES as u64);
        if whole > 0 {
            self.add_chunk(vec![0; MAX_CHUNK_BYTES], content)?;
            let id = content[content.len() - 1];
            content.extend((1..whole).map(|_| id));
        }
        if rest > 0 {
            // A remainder modulo 8 MiB fits in `usize`.
            self.add_chunk(vec![0; usize::try_from(rest).unwrap_or(0)], content)?;
        }
        Ok(())
    }
}

/// Waits for in-flight writes. ext4 updates a file's timestamps before copying the data, so a large write that started
/// before we read them wouldn't change them again.
fn wait_for_writes(file: &File) {
    // The seek takes the lock held by writers; on XFS, every read takes it. The seek fails if the file has no data.
    let _ = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0));
}

/// Returns the allocated size of a sparse file, or `None` if it isn't much smaller than the file size.
fn sparse_allocation(stat: &Statx) -> Option<u64> {
    let allocated = stat.stx_blocks.saturating_mul(BLOCK_BYTES);
    (stat.stx_size.saturating_sub(allocated) >= MIN_HOLE_BYTES).then_some(allocated)
}

/// Returns the next data range at or after `from`, including holes shorter than `MIN_HOLE_BYTES`.
fn find_data(file: &File, from: u64, size: u64) -> io::Result<(u64, u64)> {
    use rustix::fs::SeekFrom::{Data, Hole};
    let seek = |to, otherwise| match rustix::fs::seek(file, to) {
        Ok(offset) => Ok(offset.min(size)),
        // No data up to the end of the file.
        Err(Errno::NXIO) => Ok(otherwise),
        Err(error) => Err(io::Error::from(error)),
    };
    let start = seek(Data(from), size)?;
    let start = if start - from < MIN_HOLE_BYTES { from } else { start };
    let mut end = seek(Data(start), size)?;
    while end < size {
        let hole = seek(Hole(end), size)?;
        let data = seek(Data(hole), size)?;
        if data - hole >= MIN_HOLE_BYTES || hole == size {
            return Ok((start, hole));
        }
        end = data;
    }
    Ok((start, end))
}

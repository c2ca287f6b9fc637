//! The free space of the file system to which files are restored.

use std::path::Path;

use crate::error::FilesError;

/// A restore leaves `1 / RESERVE_DIVISOR` of the file system free, but at most `MAX_RESERVE_BYTES`: the database is on
/// it, too.
const RESERVE_DIVISOR: u64 = 20;
const MAX_RESERVE_BYTES: u64 = 1 << 30;
/// An inode with its directory entry takes more than this.
const MIN_INODE_BYTES: u64 = 256;

#[derive(Debug, Clone, Copy)]
pub(super) struct FreeSpace {
    /// The free space minus the reserve.
    pub(super) available_bytes: u64,
    /// An upper bound if the file system creates inodes as needed.
    pub(super) available_inodes: u64,
    /// Files take whole blocks of this size.
    pub(super) block_bytes: u64,
}

impl FreeSpace {
    /// Reads the free space of the file system that contains `directory`.
    ///
    /// # Errors
    /// [`FilesError::Io`] if it cannot be read.
    pub(super) fn read(directory: &Path) -> Result<Self, FilesError> {
        let stat =
            rustix::fs::statvfs(directory).map_err(FilesError::io("read the free space of", directory))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        let reserve = (bytes(stat.f_blocks) / RESERVE_DIVISOR).min(MAX_RESERVE_BYTES);
        let available_bytes = bytes(stat.f_bavail).saturating_sub(reserve);
        // btrfs reports no inodes. It stores small files in its metadata, without a block of their own.
        let has_inodes = stat.f_files > 0;
        Ok(Self {
            available_bytes,
            available_inodes: if has_inodes { stat.f_favail } else { available_bytes / MIN_INODE_BYTES },
            block_bytes: if has_inodes { stat.f_frsize.max(1) } else { 1 },
        })
    }
}

/// Returns the space that a restore may take in a directory, in bytes: the free space minus a reserve.
///
/// # Errors
/// [`FilesError::Io`] if the free space cannot be read.
pub fn available_bytes(directory: &Path) -> Result<u64, FilesError> {
    Ok(FreeSpace::read(directory)?.available_bytes)
}

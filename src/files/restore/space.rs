//! Free space on the target file system.

use std::path::Path;

use crate::error::FilesError;

/// Restores leave `1 / RESERVE_DIVISOR` of the file system free, up to `MAX_RESERVE_BYTES`, because the database lives
/// on it, too.
const RESERVE_DIVISOR: u64 = 20;
const MAX_RESERVE_BYTES: u64 = 1 << 30;
/// Lower bound on the size of an inode with its directory entry.
const MIN_INODE_BYTES: u64 = 256;

#[derive(Debug, Clone, Copy)]
pub(super) struct FreeSpace {
    /// Free space minus the reserve.
    pub(super) available_bytes: u64,
    /// An upper bound on file systems that allocate inodes dynamically.
    pub(super) available_inodes: u64,
    /// Allocation unit: files take up whole blocks.
    pub(super) block_bytes: u64,
}

impl FreeSpace {
    /// Reads the free space of the file system containing `directory`.
    ///
    /// # Errors
    /// [`FilesError::Io`] if it can't be read.
    pub(super) fn read(directory: &Path) -> Result<Self, FilesError> {
        let stat =
            rustix::fs::statvfs(directory).map_err(FilesError::io("read the free space of", directory))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        let reserve = (bytes(stat.f_blocks) / RESERVE_DIVISOR).min(MAX_RESERVE_BYTES);
        let available_bytes = bytes(stat.f_bavail).saturating_sub(reserve);
        // btrfs reports zero inodes, and inlines small files into its metadata instead of allocating a block.
        let has_inodes = stat.f_files > 0;
        Ok(Self {
            available_bytes,
            available_inodes: if has_inodes { stat.f_favail } else { available_bytes / MIN_INODE_BYTES },
            block_bytes: if has_inodes { stat.f_frsize.max(1) } else { 1 },
        })
    }
}

/// Returns how many bytes a restore may use in a directory: the free space minus a reserve.
///
/// # Errors
/// [`FilesError::Io`] if the free space can't be read.
pub fn available_bytes(directory: &Path) -> Result<u64, FilesError> {
    Ok(FreeSpace::read(directory)?.available_bytes)
}

//! Measures a restore before anything is created.

use super::hard_links::LinkedFiles;
use super::space::FreeSpace;
use super::walk::Walk;
use crate::error::FilesError;
use crate::index::{BlobLocation, BlobLocations};
use crate::pack::{BlobType, MAX_BLOB_BYTES};
use crate::tree::{Node, NodeType};

/// Chunks with a higher compression ratio are treated as holes. All but the shortest all-zero chunks compress this
/// well.
const MIN_HOLE_RATIO: u64 = 500;

/// Totals for a restore. Hard-linked files count once.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) files: u64,
    pub(super) bytes: u64,
    /// Disk space for files and directories, in bytes. Holes take none, and neither do chunks that compress as well as
    /// zeros.
    pub(super) needed_bytes: u64,
    /// Number of files, directories and symlinks.
    inodes: u64,
}

impl Survey {
    /// Reads all trees, locates each chunk, and checks that everything fits.
    ///
    /// # Errors
    /// Errors from [`Walk::next`]; [`FilesError::Corrupt`] if a chunk isn't in the index or its length is implausible,
    /// and corruption isn't skipped; [`FilesError::NoSpace`] or [`FilesError::NoInodes`] if the target's file system is
    /// too small.
    pub(super) async fn create(
        walk: &mut Walk<'_>,
        locations: &BlobLocations,
        space: FreeSpace,
    ) -> Result<Self, FilesError> {
        let mut survey = Self::default();
        let mut linked = LinkedFiles::default();
        while let Some(directory) = walk.next().await? {
            for node in &directory.nodes {
                match node.node_type {
                    NodeType::File if !linked.record_visit(node) => {
                        match survey.add_file(node, locations, space) {
                            Err(error) if walk.should_skip_damaged && error.is_damage() => {}
                            added => added?,
                        }
                    }
                    NodeType::Dir => {
                        survey.inodes += 1;
                        survey.needed_bytes += space.block_bytes;
                    }
                    NodeType::Symlink => survey.inodes += 1,
                    NodeType::File | NodeType::Special => {}
                }
            }
            // Checked after each directory: a malicious snapshot may contain any number of entries.
            let (needed, available) = (survey.inodes, space.available_inodes);
            if needed > available {
                return Err(FilesError::NoInodes { needed, available });
            }
        }
        // Checked at the end so that the error reports the total space needed.
        let (needed, available) = (survey.needed_bytes, space.available_bytes);
        if needed > available { Err(FilesError::NoSpace { needed, available }) } else { Ok(survey) }
    }

    fn add_file(
        &mut self,
        node: &Node,
        locations: &BlobLocations,
        space: FreeSpace,
    ) -> Result<(), FilesError> {
        let (mut bytes, mut data_bytes) = (0, 0);
        for id in node.content.as_deref().unwrap_or_default() {
            let location = locations.find(BlobType::Data, *id)?;
            if location.content_length() > MAX_BLOB_BYTES as u64 {
                return Err(FilesError::corrupt(format!("chunk {id}"), &"implausible length in the index"));
            }
            bytes += location.content_length();
            if !is_hole(location) {
                data_bytes += location.content_length();
            }
        }
        self.files += 1;
        self.bytes += bytes;
        self.inodes += 1;
        let data_bytes = data_bytes.min(node.allocated_bytes.unwrap_or(u64::MAX));
        self.needed_bytes += data_bytes.next_multiple_of(space.block_bytes);
        Ok(())
    }
}

fn is_hole(location: BlobLocation) -> bool {
    location.content_length() > u64::from(location.length).saturating_mul(MIN_HOLE_RATIO)
}

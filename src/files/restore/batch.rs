//! Restore batches: entries and their file chunks, sized to fit in memory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::target::Target;
use crate::error::FilesError;
use crate::hard_link_paths::HardLinkPaths;
use crate::id::Id;
use crate::index::{BlobLocation, BlobLocations};
use crate::pack::BlobType;
use crate::tree::{Node, NodeType};

/// Memory limit for a batch, or about 30,000 typical entries. A pack is read again for each batch that needs it. Tests
/// use small batches so that restores have several.
const MAX_BATCH_BYTES: usize = if cfg!(test) { 4 << 10 } else { 20 << 20 };

/// An entry to restore. The node has no chunk list, and a file's size is the sum of its chunk sizes.
#[derive(Debug)]
pub(super) struct PlannedEntry {
    /// Relative to the target.
    pub(super) path: PathBuf,
    pub(super) node: Node,
}

/// An occurrence of a chunk in a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkPlacement {
    pub(super) location: BlobLocation,
    pub(super) id: Id,
    /// Index into [`Batch::files`].
    pub(super) file: u32,
    /// Byte offset of the chunk in the file.
    pub(super) file_offset: u64,
}

#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Parents precede their subdirectories.
    pub(super) directories: Vec<PlannedEntry>,
    pub(super) files: Vec<PlannedEntry>,
    pub(super) symlinks: Vec<PlannedEntry>,
    /// Additional paths of files, each with the file's first path, which may be in an earlier batch.
    pub(super) hard_links: Vec<(PathBuf, PathBuf)>,
    pub(super) placements: Vec<ChunkPlacement>,
    /// Indexes into [`Self::files`] for files with a corrupt or missing chunk.
    pub(super) damaged: BTreeSet<u32>,
    /// Estimated size in memory.
    bytes: usize,
}

impl Batch {
    pub(super) fn is_full(&self) -> bool {
        self.bytes >= MAX_BATCH_BYTES
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if a chunk isn't in the index, unless `should_skip_damaged`.
    pub(super) fn add(
        &mut self,
        path: PathBuf,
        mut node: Node,
        hard_link_paths: &mut HardLinkPaths,
        locations: &BlobLocations,
        should_skip_damaged: bool,
    ) -> Result<(), FilesError> {
        self.bytes += size_of::<PlannedEntry>() + path.as_os_str().len() + node.heap_bytes();
        match node.node_type {
            NodeType::Dir => self.directories.push(PlannedEntry { path, node }),
            NodeType::Symlink => self.symlinks.push(PlannedEntry { path, node }),
            NodeType::File => {
                let key = node.hard_link_key();
                if let Some(first) = key.and_then(|key| hard_link_paths.find_or_insert(&path, key)) {
                    self.bytes += first.as_os_str().len();
                    self.hard_links.push((path, first));
                } else {
                    let content = node.content.take().unwrap_or_default();
                    // Each placement is copied once, to the read that serves it.
                    self.bytes += 2 * content.len() * size_of::<ChunkPlacement>();
                    let (file, earlier_placements) = (self.next_file_position(), self.placements.len());
                    node.size = match self.add_placements(content, locations) {
                        Err(error) if should_skip_damaged && error.is_damage() => {
                            tracing::warn!(path = %path.display(), %error, "skipping damaged file");
                            self.placements.truncate(earlier_placements);
                            self.damaged.insert(file);
                            0
                        }
                        size => size?,
                    };
                    self.files.push(PlannedEntry { path, node });
                }
            }
            NodeType::Special => {}
        }
        Ok(())
    }

    /// Adds the next file's chunks to [`Self::placements`] and returns the file size in bytes.
    fn add_placements(&mut self, content: Vec<Id>, locations: &BlobLocations) -> Result<u64, FilesError> {
        let file = self.next_file_position();
        let mut size = 0;
        for id in content {
            let location = locations.find(BlobType::Data, id)?;
            self.placements.push(ChunkPlacement { location, id, file, file_offset: size });
            size += location.content_length();
        }
        Ok(size)
    }

    /// Returns the index of the next file in [`Self::files`].
    fn next_file_position(&self) -> u32 {
        // A batch is full long before it has 2^32 files.
        u32::try_from(self.files.len()).unwrap_or(u32::MAX)
    }

    /// Creates the directories, the symbolic links, and each file at full size but without content. None of them may
    /// exist yet.
    pub(super) fn create_entries(&self, target: &Path) -> Result<(), FilesError> {
        let mut target = Target::open(target).map_err(FilesError::io("open", target))?;
        for PlannedEntry { path, .. } in &self.directories {
            target.create_directory(path).map_err(FilesError::io("create", path))?;
        }
        for PlannedEntry { path, node } in &self.symlinks {
            let link_target = node.link_target().unwrap_or_default();
            target.create_symlink(path, &link_target).map_err(FilesError::io("create", path))?;
        }
        for PlannedEntry { path, node } in &self.files {
            let file = target.create_file(path).map_err(FilesError::io("create", path))?;
            file.set_len(node.size).map_err(FilesError::io("extend", path))?;
        }
        Ok(())
    }

    /// Removes and returns the files with a corrupt or missing chunk.
    pub(super) fn take_damaged(&mut self) -> Vec<PlannedEntry> {
        let damaged = std::mem::take(&mut self.damaged);
        let mut left_out = Vec::new();
        if !damaged.is_empty() {
            for (position, file) in (0_u32..).zip(std::mem::take(&mut self.files)) {
                let files = if damaged.contains(&position) { &mut left_out } else { &mut self.files };
                files.push(file);
            }
        }
        left_out
    }

    /// Deletes the files in `left_out` from the target and creates the hard links.
    pub(super) fn complete_entries(
        &self,
        target: &Path,
        left_out: &[PlannedEntry],
    ) -> Result<(), FilesError> {
        let mut target = Target::open(target).map_err(FilesError::io("open", target))?;
        for PlannedEntry { path, .. } in left_out {
            target.remove_file(path).map_err(FilesError::io("remove", path))?;
        }
        for (path, first) in &self.hard_links {
            let linked = target.create_hard_link(path, first);
            linked.map_err(FilesError::io("create the hard link", path))?;
        }
        Ok(())
    }
}

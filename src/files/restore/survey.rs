//! Determines what a restore will write, before anything is created.

use std::path::Path;

use super::available_bytes;
use super::hard_links::FirstNames;
use super::walk::Walk;
use crate::error::FilesError;
use crate::index::{BlobLocation, BlobLocations};
use crate::pack::BlobType;
use crate::tree::NodeType;

/// A chunk of zeros is this many times as long as its compressed form, or more.
const HOLE_RATIO: u64 = 500;

/// What a restore will write. A file with several names counts once.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) files: u64,
    pub(super) bytes: u64,
    /// The space that the files take, in bytes: holes take none. What compresses as well as zeros counts as a hole.
    pub(super) needed_bytes: u64,
}

impl Survey {
    /// Reads all trees, and finds the location of each chunk.
    ///
    /// # Errors
    /// Those of [`Walk::next`]; [`FilesError::Corrupt`] if a chunk is not in the index.
    pub(super) async fn create(mut walk: Walk<'_>, locations: &BlobLocations) -> Result<Self, FilesError> {
        let mut survey = Self::default();
        let mut first_names = FirstNames::default();
        while let Some(entries) = walk.next().await? {
            for (path, node) in entries {
                if node.node_type != NodeType::File || first_names.find_or_insert(&path, &node).is_some() {
                    continue;
                }
                survey.files += 1;
                for id in node.content.unwrap_or_default() {
                    survey.add_chunk(locations.find(BlobType::Data, id)?);
                }
            }
        }
        Ok(survey)
    }

    fn add_chunk(&mut self, location: BlobLocation) {
        let length = location.content_length();
        self.bytes += length;
        if length <= u64::from(location.length).saturating_mul(HOLE_RATIO) {
            self.needed_bytes += length;
        }
    }

    /// Checks that the files fit.
    ///
    /// # Errors
    /// [`FilesError::NoSpace`].
    pub(super) fn check_space(&self, target: &Path) -> Result<(), FilesError> {
        let (needed, available) = (self.needed_bytes, available_bytes(target)?);
        if needed > available { Err(FilesError::NoSpace { needed, available }) } else { Ok(()) }
    }
}

//! The parsers of an owner's archive, exposed to `tests/fuzz`. Absent from release builds.

use super::manifest::{compare, entry_digest};
use super::toc::select_entries;
use crate::snapshots::archive::ArchiveEntry;

/// Returns the entries that would be loaded from a dump with this listing, one per line, and the extensions.
///
/// # Errors
/// The reason for the refusal.
pub fn read_listing(listing: &str) -> Result<(String, Vec<String>), String> {
    let selection = select_entries(listing).map_err(|error| error.to_string())?;
    Ok((selection.list, selection.extensions.into_iter().collect()))
}

/// Compares a manifest with these entries.
///
/// # Errors
/// A description of the difference.
pub fn compare_manifest(manifest: &[u8], entries: &[ArchiveEntry]) -> Result<(), String> {
    let digests: Vec<_> = entries.iter().map(entry_digest).collect();
    compare(manifest, &digests)
}

//! Archive parsers exposed to `tests/fuzz`. Not compiled into release builds.

use super::manifest::{compare, entry_digest};
use super::toc::select_entries;
use crate::snapshots::archive::ArchiveEntry;

/// Returns what would be loaded from a dump with this listing: the entries, one per line, and the extensions.
///
/// # Errors
/// The reason for refusing the listing.
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

//! The parsers of an owner's archive as `tests/fuzz` reaches them. Absent from what is shipped.

use super::manifest::{compare, entry_digest};
use super::toc::select;
use crate::host::snapshots::archive::Listed;

/// What would be loaded of a dump with this listing: a line for each entry, and the extensions.
///
/// # Errors
/// Why it is not loaded.
pub fn read_listing(listing: &str) -> Result<(String, Vec<String>), String> {
    let selection = select(listing).map_err(|error| error.to_string())?;
    Ok((selection.list, selection.extensions.into_iter().collect()))
}

/// Whether a manifest lists exactly these entries.
///
/// # Errors
/// What differs.
pub fn compare_manifest(manifest: &[u8], seen: &[Listed]) -> Result<(), String> {
    let digests: Vec<_> = seen.iter().map(entry_digest).collect();
    compare(manifest, &digests)
}

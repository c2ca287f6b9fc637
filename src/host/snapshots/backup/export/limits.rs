//! Counts the quantities that an import limits, so that an export does not write an archive that no import accepts.

use crate::snapshots::archive::{MANIFEST, MAX_ENTRIES, MAX_MANIFEST_BYTES, MAX_TOTAL_NAME_BYTES};

/// Maximum length of a name in a tar header. A longer name takes an additional record.
const MAX_HEADER_NAME_BYTES: usize = 100;
/// Size of a manifest with empty lists, rounded up.
const EMPTY_MANIFEST_BYTES: u64 = 64;

/// The archive would exceed a limit.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "the archive would have more than {limit} {quantity}, so no machine could import it\n  next: move files that \
     need not be exported out of the home directory, or pack directories with many files with `tar`, and export again"
)]
pub struct LimitExceeded {
    limit: u64,
    quantity: &'static str,
}

/// The size of an archive so far, including its manifest.
#[derive(Debug)]
pub struct LimitCounter {
    /// Number of entries and of records with long names.
    pub entries: usize,
    pub name_bytes: u64,
    pub manifest_bytes: u64,
}

impl Default for LimitCounter {
    fn default() -> Self {
        Self { entries: 1, name_bytes: MANIFEST.len() as u64, manifest_bytes: EMPTY_MANIFEST_BYTES }
    }
}

impl LimitCounter {
    /// Counts an entry. `path` is as in the manifest, `target_bytes` is the length of a symbolic link's target, and
    /// `manifest_entry_bytes` is the length of the entry in the manifest.
    ///
    /// # Errors
    /// [`LimitExceeded`] if an import would refuse the archive.
    pub fn count_entry(
        &mut self,
        path: &str,
        target_bytes: usize,
        manifest_entry_bytes: usize,
    ) -> Result<(), LimitExceeded> {
        // The path in the tar file may be shorter, because it is not encoded.
        let names = [path.len(), target_bytes];
        self.entries += 1 + names.iter().filter(|bytes| **bytes > MAX_HEADER_NAME_BYTES).count();
        self.name_bytes += names.iter().sum::<usize>() as u64;
        self.count_manifest_element(manifest_entry_bytes)
    }

    /// Counts an element of one of the manifest's lists.
    ///
    /// # Errors
    /// [`LimitExceeded`] if an import would refuse the archive.
    pub fn count_manifest_element(&mut self, bytes: usize) -> Result<(), LimitExceeded> {
        // A comma follows the element.
        self.manifest_bytes += bytes as u64 + 1;
        let exceeded = [
            (self.entries as u64, MAX_ENTRIES as u64, "entries"),
            (self.name_bytes, MAX_TOTAL_NAME_BYTES, "bytes in names"),
            (self.manifest_bytes, MAX_MANIFEST_BYTES, "bytes in its manifest"),
        ]
        .into_iter()
        .find(|(count, limit, _)| count > limit);
        match exceeded {
            Some((_, limit, quantity)) => Err(LimitExceeded { limit, quantity }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_entry_refuses_entry_above_limit() {
        let empty = LimitCounter::default();
        for (mut counter, quantity) in [
            (LimitCounter { entries: MAX_ENTRIES - 1, ..empty }, "entries"),
            (LimitCounter { name_bytes: MAX_TOTAL_NAME_BYTES - 1, ..empty }, "bytes in names"),
            (LimitCounter { manifest_bytes: MAX_MANIFEST_BYTES - 9, ..empty }, "bytes in its manifest"),
        ] {
            counter.count_entry("a", 0, 8).unwrap();
            assert_eq!(counter.count_entry("a", 0, 8).unwrap_err().quantity, quantity);
        }
    }
}

//! Finds interactions by ID, to detect dispatches that are already recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::entry::Interaction;
use super::files::RecordKind;
use super::page::{self, PageError, Verdict};

/// Maximum pages searched, newest first: a day or two on a busy machine.
const MAX_PAGES: usize = 8;
/// Maximum lines per page.
const MAX_LINES: usize = 1000;

/// The newest interactions with these IDs or batch IDs, by ID.
///
/// # Errors
/// [`PageError::File`].
pub fn interactions(logs: &Path, ids: &BTreeSet<String>) -> Result<BTreeMap<String, Interaction>, PageError> {
    let mut found = BTreeMap::new();
    let mut cursor = None;
    for _ in 0..MAX_PAGES {
        // IDs have no characters that JSON escapes.
        let may_match = |line: &str| ids.iter().any(|id| line.contains(&**id));
        let judge = |line: &str| if may_match(line) { Verdict::Take } else { Verdict::Skip };
        let page = match page::newest(RecordKind::Interactions, logs, cursor, MAX_LINES, judge) {
            // Rotated away in the meantime, as is everything older.
            Err(PageError::Gone) => break,
            page => page?,
        };
        for line in &page.lines {
            if let Ok(one) = serde_json::from_str::<Interaction>(line)
                && (ids.contains(&one.id) || one.batch_id.as_ref().is_some_and(|batch| ids.contains(batch)))
            {
                found.entry(one.id.clone()).or_insert(one);
            }
        }
        cursor = page.next;
        if cursor.is_none() || ids.iter().all(|id| found.contains_key(id)) {
            break;
        }
    }
    Ok(found)
}

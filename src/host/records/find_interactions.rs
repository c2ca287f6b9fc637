//! Finds the interactions of recorded dispatches by ID.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::entry::Interaction;
use super::files::RecordKind;
use super::page::{self, PageError, Verdict};

/// Maximum number of pages searched, newest first. A page reads about 16 MiB, so the pages cover a day or two on a busy
/// machine.
const MAX_PAGES: usize = 8;
/// Maximum number of matching lines per page.
const MAX_LINES: usize = 1000;

/// Finds the interactions with these IDs or batch IDs, within the newest pages. Returns them by ID.
///
/// # Errors
/// [`PageError::File`] if a file cannot be read.
pub fn find_interactions(
    logs: &Path,
    ids: &BTreeSet<String>,
) -> Result<BTreeMap<String, Interaction>, PageError> {
    let mut found = BTreeMap::new();
    let mut cursor = None;
    for _ in 0..MAX_PAGES {
        // JSON escapes none of the characters in an ID.
        let may_match = |line: &str| ids.iter().any(|id| line.contains(&**id));
        let judge = |line: &str| if may_match(line) { Verdict::Take } else { Verdict::Skip };
        let page = match page::read_newest(RecordKind::Interactions, logs, cursor, MAX_LINES, judge) {
            // The cursor's file has been deleted, and so have all older ones.
            Err(PageError::Gone) => break,
            page => page?,
        };
        for line in &page.lines {
            let Ok(interaction) = serde_json::from_str::<Interaction>(line) else { continue };
            let is_in_batch = interaction.batch_id.as_ref().is_some_and(|batch| ids.contains(batch));
            if is_in_batch || ids.contains(&interaction.id) {
                found.entry(interaction.id.clone()).or_insert(interaction);
            }
        }
        cursor = page.next;
        if cursor.is_none() || ids.iter().all(|id| found.contains_key(id)) {
            break;
        }
    }
    Ok(found)
}

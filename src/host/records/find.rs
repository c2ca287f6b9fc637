//! Interactions by their ids: whether a dispatch has been recorded already.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::entry::Interaction;
use super::files::Kind;
use super::page::{self, PageError, Verdict};

/// So many pages are looked through, the newest first: a day or two of a busy machine.
const MOST_PAGES: usize = 8;
/// Lines of a page.
const LINES: usize = 1000;

/// Those of these ids that are among the newest interactions, by id. One of a batch is found by the batch's id, too.
///
/// # Errors
/// [`PageError::File`].
pub fn interactions(logs: &Path, ids: &BTreeSet<String>) -> Result<BTreeMap<String, Interaction>, PageError> {
    let mut found = BTreeMap::new();
    let mut cursor = None;
    for _ in 0..MOST_PAGES {
        // An id stands in its line as it is: it has no character that JSON writes in another way.
        let may_be = |line: &str| ids.iter().any(|id| line.contains(&**id));
        let judge = |line: &str| if may_be(line) { Verdict::Take } else { Verdict::Leave };
        let page = match page::newest(Kind::Interactions, logs, cursor, LINES, judge) {
            // Rotated away meanwhile, and with it all that is older.
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

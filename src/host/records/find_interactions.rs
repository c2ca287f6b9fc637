//! Finds recorded interactions by dispatch or batch id.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use jiff::Timestamp;
use serde::Deserialize;

use super::entry::Interaction;
use super::files::LogKind;
use super::page::{self, PageError, Verdict};
use svc_base::clock;

/// Minimum number of pages to search, newest first, unless everything is found sooner. At about 16 MiB per page, this
/// covers a day or two on a busy machine.
const MIN_PAGES: usize = 8;
/// Maximum number of matching lines per page.
const MAX_LINES_PER_PAGE: usize = 1000;

/// Timestamp of a log line.
#[derive(Deserialize)]
struct LineTime {
    #[serde(with = "clock::wire")]
    timestamp: Timestamp,
}

/// Finds the interactions with any of the given ids or batch ids, keyed by id. After `MIN_PAGES` pages, the search only
/// continues while pages contain lines from `since` or later.
///
/// # Errors
/// [`PageError::File`] if a file can't be read.
pub fn find_interactions(
    logs: &Path,
    ids: &BTreeSet<String>,
    since: Option<Timestamp>,
) -> Result<BTreeMap<String, Interaction>, PageError> {
    let mut found = BTreeMap::new();
    let mut cursor = None;
    let is_recent = |line: &str| {
        let time = since.and_then(|since| Some((since, serde_json::from_str::<LineTime>(line).ok()?)));
        time.is_some_and(|(since, line)| line.timestamp >= since)
    };
    for page_number in 1.. {
        // A single older line doesn't end the search: dispatches recorded after a restart have earlier timestamps than
        // the lines around them.
        let mut has_recent_line = false;
        // Ids don't contain any characters that JSON escapes.
        let may_match = |line: &str| ids.iter().any(|id| line.contains(&**id));
        let visit = |line: &str| {
            has_recent_line = has_recent_line || is_recent(line);
            if may_match(line) { Verdict::Take } else { Verdict::Skip }
        };
        let page = match page::read_newest(LogKind::Interactions, logs, cursor, MAX_LINES_PER_PAGE, visit) {
            // The cursor's file and all older ones have been deleted.
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
        let is_range_covered = page_number >= MIN_PAGES && !has_recent_line;
        if is_range_covered || cursor.is_none() || ids.iter().all(|id| found.contains_key(id)) {
            break;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn search_continues_back_to_since() {
        let dir = tempfile::tempdir().unwrap();
        let line = |id: &str, timestamp: &str| {
            let interaction = json!({
                "version": 1, "id": id, "timestamp": timestamp, "senderId": "u", "conversationId": "wanted",
                "model": "m", "agentName": "a", "tokensIn": 0, "tokensOut": 0, "cost": 0.01, "durationMs": 0,
                "tools": [], "status": "success", "batch": false,
            });
            format!("{interaction}\n")
        };
        // Fill the newest pages with other dispatches that contain the id in a different field.
        let newer = (0..MIN_PAGES * MAX_LINES_PER_PAGE)
            .map(|number| line(&format!("other-{number}"), "2026-11-22T10:00:00.000Z"));
        let oldest = line("wanted", "2026-11-20T10:00:00.000Z");
        let text: String = std::iter::once(oldest).chain(newer).collect();
        std::fs::write(dir.path().join("interactions-2026-11-20.jsonl"), text).unwrap();
        let ids = BTreeSet::from(["wanted".to_owned()]);
        for (since, is_found) in
            [(None, false), (Some("2026-11-20T09:00:00Z"), true), (Some("2026-11-23T00:00:00Z"), false)]
        {
            let from = since.map(|at| at.parse::<Timestamp>().unwrap());
            let found = find_interactions(dir.path(), &ids, from).unwrap();
            assert_eq!(found.contains_key("wanted"), is_found, "{since:?}");
        }
    }
}

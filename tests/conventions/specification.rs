//! Checks `docs/specification.md`: each specification item has a row that names existing code and tests.
//!
//! The specification is not part of the repository, so its items are listed here.

use std::collections::BTreeMap;

use super::{ProjectFile, documentation, format_violation};

const PAGE: &str = "docs/specification.md";

/// The items whose rows name code and tests; each is a sentence, a part of a sentence, or a table row.
const ITEMS: [&str; 199] = [
    "1.1",
    "1.2 slots",
    "1.2 plans",
    "1.3 authentication",
    "1.3 routing",
    "1.3 provisioning",
    "1.3 publication",
    "1.3 upgrades",
    "1.3 recovery",
    "1.4 provision",
    "1.4 register",
    "1.4 routing",
    "1.4 code host",
    "1.4 restore gate",
    "1.4 hourly backups",
    "1.4 pointers",
    "1.4 recover",
    "1.4 resize",
    "1.4 updates",
    "1.4 database",
    "1.5 replacement",
    "1.5 objects",
    "1.6",
    "1.7 subscription",
    "1.7 previews",
    "1.7 batches",
    "1.8",
    "1.9",
    "Routing 1",
    "Routing 2",
    "Routing 3",
    "Routing 4",
    "Routing 5",
    "Routing 6 certificate",
    "Routing 6 verification",
    "Layout host.env",
    "Layout r2.env",
    "Layout app",
    "Layout runtime",
    "Layout bin",
    "Layout home",
    "Layout database",
    "Layout rule 1",
    "Layout rule 2",
    "Layout rule 3",
    "Identity 1",
    "Identity 2",
    "Identity 3",
    "Identity 4",
    "Apps 1",
    "Apps 2",
    "Apps 3",
    "Apps 4 environment",
    "Apps 4 bridge",
    "Machine record / machine id",
    "Machine record / user",
    "Machine record / handle",
    "Machine record / status",
    "Machine record / provider server id",
    "Machine record / provider server id, for a resize",
    "Machine record / server type",
    "Machine record / deleted marker",
    "Object / vps-meta.json",
    "Object / latest",
    "Object / snapshot",
    "Object / bundle",
    "Object / bundle digest",
    "Interaction / file",
    "Interaction / timestamp",
    "Interaction / senderId",
    "Interaction / conversationId",
    "Interaction / model",
    "Interaction / agentName",
    "Interaction / tokensIn",
    "Interaction / tokensOut",
    "Interaction / cost",
    "Interaction / durationMs",
    "Interaction / tools",
    "Interaction / status",
    "Interaction / error",
    "Interaction / batch",
    "Interaction / batchId",
    "Tool entry / name",
    "Tool entry / durationMs",
    "Tool entry / inputPreview",
    "Tool entry / status",
    "Tool entry / errors",
    "Tool entry / outputs",
    "Error object / name",
    "Error object / message",
    "Error object / stack",
    "Error object / tool",
    "Error object / turn",
    "Usage entry / date",
    "Usage entry / cost",
    "Usage entry / tokensIn",
    "Usage entry / tokensOut",
    "Usage entry / dispatches",
    "Usage / aggregation",
    "Cost limits / daily",
    "Cost limits / monthly",
    "Audit entry / timestamp",
    "Audit entry / op",
    "Audit entry / path",
    "Audit entry / sizeBytes",
    "Audit entry / actor",
    "Audit entry / agentName",
    "Log file / interactions",
    "Log file / activity.log",
    "Log file / audit.jsonl",
    "Log file / usage.jsonl",
    "Log file / storage.jsonl",
    "Log file / backup.jsonl",
    "States / names",
    "States / row 1",
    "States / row 2",
    "States / row 3",
    "States / row 4",
    "States / row 5",
    "States / rule 1",
    "States / rule 2",
    "States / rule 3",
    "States / rule 4",
    "Gate 1",
    "Gate 2",
    "Gate 3",
    "Endpoint / bearer",
    "Endpoint / path parameters",
    "Endpoint / POST /vps/provision",
    "Endpoint / POST /vps/register",
    "Endpoint / POST /vps/recover",
    "Endpoint / POST /vps/:machineId/resize",
    "Endpoint / DELETE /vps/:machineId",
    "Endpoint / GET /system-bundles",
    "Endpoint / POST /api/bridge/query",
    "Endpoint / GET /api/usage",
    "Endpoint / GET /api/usage, response",
    "Resize 1",
    "Resize 2",
    "Resize 3",
    "Resize 4",
    "Recovery 1",
    "Recovery 2",
    "Backup 1",
    "Backup 2",
    "Backup 3",
    "Authentication / operator",
    "Authentication / host",
    "Authentication / code host",
    "Authentication / usage session",
    "Authentication / usage admin token",
    "Authentication / gateway owner",
    "5.1",
    "Events / dispatch",
    "Events / file changes",
    "Events / hooks",
    "Events / reads",
    "Events / writer",
    "Errors / row 1",
    "Errors / row 2",
    "Errors / row 3",
    "Errors / row 4",
    "Errors / row 5",
    "Errors / row 6",
    "Limits / row 1",
    "Limits / row 2",
    "Limits / row 3",
    "Limits / row 4",
    "Limits / row 5",
    "Limits / row 6",
    "Limits / daily check",
    "9.1",
    "9.3",
    "9.4 placeholder host",
    "9.4 health",
    "9.4 schemas",
    "9.4 canvas route",
    "9.4 icons",
    "9.4 gestures",
    "Env CUSTOMER_VPS_ENABLED",
    "Env CUSTOMER_VPS_IMAGE_VERSION",
    "Env SVC_HOST_BUNDLE_URL",
    "Env SVC_HOST_BUNDLE_BASE_URL",
    "Env CUSTOMER_VPS_TLS_VERIFY",
    "Env PROVIDER_API_TOKEN",
    "Env PROVIDER_SERVER_TYPE",
    "Env OBJECT_STORE_BUCKET",
    "Env S3_BUCKET",
    "Env SVC_USER_ID",
    "Env NEXT_PUBLIC_IDP_PUBLISHABLE_KEY",
    "Env PLATFORM_INTERNAL_URL",
    "Env UPGRADE_TOKEN",
    "Env DATABASE_URL",
    "Env PLATFORM_PUBLIC_URL",
    "Env PLATFORM_SECRET",
    "Restored / database",
    "Restored / metadata",
    "Not restored / never uploaded",
    "Not restored / failed backup",
];

/// The items that no test can cover. Their rows state the reason instead of code and a test.
const UNTESTABLE: [&str; 4] =
    ["1.5 other exclusions", "9.2", "Not restored / process state", "1.3 integrations"];

/// Returns rows without code or a test, rows of `UNTESTABLE` items without a reason, items without exactly one row, and
/// rows for unknown items.
pub fn untraced_items(files: &[ProjectFile], exists: impl Fn(&str) -> bool) -> Vec<String> {
    let page = files.iter().find(|file| file.path == PAGE).map_or("", |file| &file.text);
    let mut violations = Vec::new();
    let mut rows = BTreeMap::new();
    for (number, line) in page.lines().enumerate() {
        let Some((item, row)) = line.strip_prefix("| **").and_then(|line| line.split_once("**")) else {
            continue;
        };
        *rows.entry(item).or_insert(0) += 1;
        let cells: Vec<&str> = row.trim_end().trim_end_matches('|').split(" | ").collect();
        if UNTESTABLE.contains(&item) {
            if !matches!(cells.as_slice(), [_, reason] if !reason.trim().is_empty()) {
                violations.push(format_violation(
                    PAGE,
                    number + 1,
                    format!("{item} needs a sentence and a reason"),
                ));
            }
            continue;
        }
        let [_, code, tests] = cells.as_slice() else {
            violations.push(format_violation(
                PAGE,
                number + 1,
                format!("{item} needs a sentence, code and a test"),
            ));
            continue;
        };
        if !quoted(code).any(|text| text.contains('/') && exists(text)) {
            violations.push(format_violation(
                PAGE,
                number + 1,
                format!("{item} names no code file that exists"),
            ));
        }
        let is_test = |text: &str| {
            documentation::test_exists(files, text) || (text.ends_with(".test.mjs") && exists(text))
        };
        let (existing, missing): (Vec<_>, Vec<_>) = quoted(tests).partition(|text| is_test(text));
        if existing.is_empty() || !missing.is_empty() {
            violations.push(format_violation(
                PAGE,
                number + 1,
                format!("{item} needs tests that exist, not {missing:?}"),
            ));
        }
    }
    for item in ITEMS.into_iter().chain(UNTESTABLE) {
        let count = rows.remove(item).unwrap_or(0);
        if count != 1 {
            violations.push(format!("{PAGE} has {count} rows for {item}"));
        }
    }
    for item in rows.keys() {
        violations.push(format!("{PAGE} has a row for {item}: no such item"));
    }
    violations
}

fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: &str = "`a::b::c_d`";

    /// Returns the violations on a complete page in which `replacement` replaces the first item's row.
    fn violations(replacement: &str) -> Vec<String> {
        violations_with_untestable_row(replacement, &format!("| **{}** Words | Reason |", UNTESTABLE[0]))
    }

    /// Like [`violations`], but also replaces the first untestable item's row.
    fn violations_with_untestable_row(replacement: &str, untestable: &str) -> Vec<String> {
        let row = |item: &str| format!("| **{item}** Words | `src/a.rs` (`f`) | {TEST} |\n");
        let reason = |item: &str| format!("| **{item}** Words | Reason |\n");
        let rest = ITEMS[1..].iter().map(|item| row(item));
        let rest: String = rest.chain(UNTESTABLE[1..].iter().map(|item| reason(item))).collect();
        let page = ProjectFile::sample(
            PAGE,
            &format!("| sentence | code | test |\n|---|---|---|\n{replacement}\n{untestable}\n{rest}"),
        );
        let test = ProjectFile::sample("tests/a/b.rs", "fn c_d() {}");
        untraced_items(&[page, test], |path| path == "src/a.rs" || path == "tests/browser/x.test.mjs")
    }

    #[test]
    fn complete_page_passes() {
        let first = ITEMS[0];
        for tests in [TEST, "`tests/browser/x.test.mjs`", "`a::b::c_d`, `tests/browser/x.test.mjs`"] {
            let violations = violations(&format!("| **{first}** Words | `src/a.rs` | {tests} |"));
            assert!(violations.is_empty(), "{violations:?}");
        }
    }

    #[test]
    fn incomplete_row_is_detected() {
        let first = ITEMS[0];
        for (row, part) in [
            (format!("| **{first}** Words | `src/b.rs` | {TEST} |"), "names no code file"),
            (format!("| **{first}** Words | `f` | {TEST} |"), "names no code file"),
            (format!("| **{first}** Words | `src/a.rs` | `a::b::e` |"), "a::b::e"),
            (format!("| **{first}** Words | `src/a.rs` | {TEST}, `a::b::e` |"), "a::b::e"),
            (format!("| **{first}** Words | `src/a.rs` | none |"), "needs tests that exist"),
            (format!("| **{first}** Words | {TEST} |"), "a sentence, code and a test"),
        ] {
            let violations = violations(&row);
            assert!(violations.len() == 1 && violations[0].contains(part), "{row}: {violations:?}");
        }
    }

    #[test]
    fn item_without_a_test_needs_a_reason() {
        let first = format!("| **{}** Words | `src/a.rs` | {TEST} |", ITEMS[0]);
        let item = UNTESTABLE[0];
        for (row, part) in [
            (format!("| **{item}** Words |  |"), "a sentence and a reason"),
            (format!("| **{item}** Words |"), "a sentence and a reason"),
            (format!("| **{item}** Words | `src/a.rs` | {TEST} |"), "a sentence and a reason"),
            (String::new(), "has 0 rows for"),
        ] {
            let violations = violations_with_untestable_row(&first, &row);
            assert!(violations.len() == 1 && violations[0].contains(part), "{row}: {violations:?}");
        }
    }

    #[test]
    fn missing_duplicate_and_unknown_items_are_detected() {
        let row = |item: &str| format!("| **{item}** Words | `src/a.rs` | {TEST} |");
        let first = ITEMS[0];
        for (rows, part) in [
            (String::new(), "has 0 rows for"),
            (format!("{}\n{}", row(first), row(first)), "has 2 rows for"),
            (format!("{}\n{}", row(first), row("99.9")), "no such item"),
        ] {
            let violations = violations(&rows);
            assert!(violations.len() == 1 && violations[0].contains(part), "{rows}: {violations:?}");
        }
    }

    #[test]
    fn lists_name_each_item_once() {
        let mut all = [ITEMS.as_slice(), &UNTESTABLE].concat();
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "{all:?}");
    }
}

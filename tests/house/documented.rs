//! Every variable and metric of the product is in the reference pages.

use std::collections::BTreeMap;

use super::{File, at};

const CONFIGURATION: &str = "docs/reference/configuration.md";
const METRICS: &str = "docs/reference/metrics.md";

/// systemd sets these for its services.
const SET_BY_SYSTEMD: [&str; 2] = ["JOURNAL_STREAM", "NOTIFY_SOCKET"];

const READERS: [&str; 12] = [
    "flag",
    "is_set",
    "optional",
    "or",
    "path",
    "required",
    "required_secret",
    "secret",
    "text",
    "var",
    "var_os",
    "vars",
];

/// The variables that a line reads: capitals in quotes, as the first argument of a reader or after `env`.
fn read_in(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = 0;
    while let Some(open) = line[rest..].find('"').map(|at| rest + at) {
        let Some(close) = line[open + 1..].find('"').map(|at| open + 1 + at) else { break };
        let name = &line[open + 1..close];
        if is_name(name) && is_argument(line[..open].trim_end()) {
            found.push(name);
        }
        rest = close + 1;
    }
    found
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_uppercase())
        && text.contains('_')
        && text.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
}

fn is_argument(before: &str) -> bool {
    if before.ends_with("(env,") || before.ends_with("(&mut env,") {
        return true;
    }
    let Some(call) = before.strip_suffix('(') else { return false };
    let call = call.split_once("::<").map_or(call, |(name, _)| name);
    let word = call.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default();
    READERS.contains(&word)
}

pub fn undocumented(files: &[File]) -> Vec<String> {
    let page = files.iter().find(|file| file.path == CONFIGURATION).map_or("", |file| &file.text);
    let mut found = Vec::new();
    for file in files.iter().filter(|file| file.path.starts_with("src/") && file.path.ends_with(".rs")) {
        for (number, line) in file.text.lines().enumerate() {
            for name in read_in(line) {
                if !SET_BY_SYSTEMD.contains(&name) && !page.contains(&format!("`{name}`")) {
                    found.push(at(&file.path, number + 1, format!("{name} is not in {CONFIGURATION}")));
                }
            }
        }
    }
    found
}

/// Host settings that root reads only from its own process and `update.env`, or that only services of other users
/// read.
const NOT_FROM_OTHERS: [&str; 22] = [
    "BRIDGE_CHANGES_KEEP_SECONDS",
    "BRIDGE_STATEMENT_TIMEOUT_MS",
    "GATEWAY_AUTH",
    "HEARTBEAT_SECONDS",
    "IDP_AUDIENCE",
    "IDP_ISSUER",
    "IDP_JWKS_URL",
    "REGISTER_GATEWAY_DEADLINE_SECONDS",
    "REGISTER_PLATFORM_DEADLINE_SECONDS",
    "SVC_BUNDLE_KEYS_SEQUENCE",
    "SVC_BUNDLE_PUBLIC_KEYS",
    "SVC_BUNDLE_SHA256",
    "SVC_ENVIRONMENT",
    "SVC_HOST_BUNDLE_URL",
    "SVC_PG_BIN_DIR",
    "SVC_PRODUCTION",
    "SVC_ROOT",
    "SVC_SYSTEMCTL",
    "SVC_UPDATE_HEALTH_SECONDS",
    "SVC_UPDATE_SNAPSHOT_SECONDS",
    "VPS_META_AT_LEAST_SECONDS",
    "VPS_META_SECONDS",
];

/// The names in the list `ALLOWED_FROM_OTHERS`, one tuple per line.
fn allowed_from_others(files: &[File]) -> Vec<&str> {
    let list = files.iter().find(|file| file.path == "src/host/system/root_settings.rs");
    let list = list.and_then(|file| file.text.split_once("const ALLOWED_FROM_OTHERS")?.1.split_once("];"));
    let lines = list.map_or("", |(list, _)| list).lines();
    lines.filter_map(|line| line.trim().strip_prefix("(\"")?.split_once('"')).map(|(name, _)| name).collect()
}

/// Every setting that a host's code reads is in exactly one of two lists: those that root accepts from files of other
/// users, and those that it does not.
pub fn unlisted_for_root(files: &[File]) -> Vec<String> {
    let is_host = |path: &str| ["src/host/", "src/store/"].iter().any(|folder| path.starts_with(folder));
    let mut read = BTreeMap::new();
    for file in files.iter().filter(|file| is_host(&file.path) && file.path.ends_with(".rs")) {
        let product = file.text.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in product.lines().enumerate() {
            for name in read_in(line) {
                read.entry(name).or_insert_with(|| at(&file.path, number + 1, name));
            }
        }
    }
    let taken = allowed_from_others(files);
    let mut found: Vec<_> = read
        .iter()
        .filter(|(name, _)| !taken.contains(name) && !NOT_FROM_OTHERS.contains(name))
        .map(|(_, place)| {
            format!(
                "{place} is neither in ALLOWED_FROM_OTHERS of root_settings.rs nor in NOT_FROM_OTHERS here"
            )
        })
        .collect();
    let listed = taken.iter().chain(&NOT_FROM_OTHERS);
    found.extend(
        listed.filter(|name| !read.contains_key(*name)).map(|name| format!("{name}: no host reads it")),
    );
    found
}

/// Every crate that a workspace member depends on has one row in `docs/dependencies.md`, and every row belongs to
/// such a crate.
pub fn unexplained_dependencies(files: &[File]) -> Vec<String> {
    let mut named = BTreeMap::new();
    for file in files.iter().filter(|file| file.path.ends_with("Cargo.toml")) {
        let mut is_list = false;
        for (number, line) in file.text.lines().enumerate() {
            if line.starts_with('[') {
                is_list = matches!(line, "[dependencies]" | "[dev-dependencies]");
            }
            let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if is_list && name.starts_with(|c: char| c.is_ascii_lowercase()) {
                named.entry(name).or_insert_with(|| at(&file.path, number + 1, name));
            }
        }
    }
    let page = files.iter().find(|file| file.path == "docs/dependencies.md").map_or("", |file| &file.text);
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let rows: Vec<_> = rows.map(|(name, _)| name).collect();
    let mut found: Vec<_> = named
        .iter()
        .filter(|(name, _)| rows.iter().filter(|row| row == name).count() != 1)
        .map(|(_, place)| format!("{place} needs exactly one row in docs/dependencies.md"))
        .collect();
    found.extend(
        rows.iter()
            .filter(|row| !named.contains_key(*row))
            .map(|row| format!("not a dependency of any member: {row}")),
    );
    found
}

/// Every metric has a row in the reference.
pub fn undocumented_metrics(files: &[File]) -> Vec<String> {
    let page = files.iter().find(|file| file.path == METRICS).map_or("", |file| &file.text);
    let mut found = Vec::new();
    for file in files.iter().filter(|file| file.path == "src/base/metrics.rs") {
        for (number, line) in file.text.lines().enumerate() {
            let names =
                line.split('"').filter(|part| part.starts_with("svc_") || part.starts_with("process_"));
            for name in names.filter(|name| !page.contains(&format!("| `{name}` |"))) {
                found.push(at(&file.path, number + 1, format!("{name} is not in {METRICS}")));
            }
        }
    }
    found
}

/// Every test that a page in `docs` names, as `` `area::file::name` ``, exists.
pub fn unknown_tests(files: &[File]) -> Vec<String> {
    let is_name = |text: &str| {
        text.contains("::")
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c))
    };
    let is_there = |name: &str| {
        let (place, name) = name.rsplit_once("::").unwrap_or_default();
        let path = format!("tests/{}.rs", place.replace("::", "/"));
        files.iter().any(|file| file.path == path && file.text.contains(&format!("fn {name}(")))
    };
    let mut found = Vec::new();
    for file in files.iter().filter(|file| file.path.starts_with("docs/")) {
        for (number, line) in file.text.lines().enumerate() {
            let names = line.split('`').skip(1).step_by(2).filter(|text| is_name(text));
            for name in names.filter(|name| !is_there(name)) {
                found.push(at(&file.path, number + 1, format!("no such test: {name}")));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_test_named_by_a_page_is_detected() {
        let page = File::sample("docs/a.md", "kept by `a::b::c_d`, `a::b::e` and `a/b.rs`");
        let test = File::sample("tests/a/b.rs", "#[test]\nfn c_d() {}");
        let found = unknown_tests(&[page, test]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("a::b::e"), "{found:?}");
    }

    #[test]
    fn variable_is_found_in_every_form_of_reading() {
        for line in [
            "let a = env.required(\"SVC_A\");",
            "env.or::<u64>(\"SVC_A\", 72)",
            "let a = seconds(env, \"SVC_A\", 1800);",
            "named(&mut env, \"SVC_A\")",
            "std::env::var_os(\"SVC_A\")",
        ] {
            assert_eq!(read_in(line), ["SVC_A"], "{line}");
        }
        assert!(read_in("command.env(\"SVC_A\", x); (\"SVC_A\", \"v\"); \"must be SVC_A\"").is_empty());
    }

    #[test]
    fn undocumented_variable_is_detected() {
        let readme = File::sample(CONFIGURATION, "| `SVC_A` | – | an a |");
        let source = File::sample("src/a.rs", "env.text(\"SVC_A\"); env.text(\"SVC_AB\")");
        let found = undocumented(&[readme, source]);
        assert!(found.len() == 1 && found[0].contains("SVC_AB"), "{found:?}");
    }

    #[test]
    fn undocumented_metric_is_detected() {
        let readme = File::sample(METRICS, "| `svc_a_total` | – |");
        let source = File::sample("src/base/metrics.rs", "Counters::new(\"svc_a_total\", \"svc_b\")");
        let found = undocumented_metrics(&[readme, source]);
        assert!(found.len() == 1 && found[0].contains("svc_b"), "{found:?}");
    }
}

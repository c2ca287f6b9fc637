//! Dependencies that a page must explain, and tests that pages name.

use std::collections::BTreeMap;

use super::{File, at};

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
}

//! Rules of the repository, checked against the source: allowed imports, forbidden content, required content.
//!
//! Each rule is a pure function of paths and texts, and a test shows that it detects a violation.

#[path = "house/documented.rs"]
mod documented;
#[path = "house/edges.rs"]
mod edges;
#[path = "house/links.rs"]
mod links;
#[path = "house/quoted.rs"]
mod quoted;
#[path = "house/reference/mod.rs"]
mod reference;
#[path = "house/rules.rs"]
mod rules;
#[path = "house/source.rs"]
mod source;

use std::fs;
use std::path::{Path, PathBuf};

/// A file of the project: its path from the root, with `/`, and its text.
pub struct File {
    pub path: String,
    pub text: String,
}

impl File {
    #[cfg(test)]
    fn sample(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }
}

/// The position of a violation: `src/store/key.rs:12: why`.
pub fn at(path: &str, line: usize, why: impl std::fmt::Display) -> String {
    format!("{path}:{line}: {why}")
}

/// Generated or downloaded folders.
const SKIPPED: [&str; 4] = [".git", "target", "node_modules", "dist"];
const TEXTS: [&str; 19] = [
    "rs", "toml", "md", "sql", "sh", "py", "js", "mjs", "ts", "json", "html", "css", "yaml", "yml",
    "service", "timer", "path", "conf", "txt",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn files() -> Vec<File> {
    let mut found = Vec::new();
    walk(&root(), "", &mut found);
    assert!(found.iter().any(|file| file.path == "src/main.rs"), "no source files found");
    found
}

fn walk(folder: &Path, prefix: &str, found: &mut Vec<File>) {
    for entry in fs::read_dir(folder).expect("read a project folder") {
        let entry = entry.expect("read a folder entry");
        let name = entry.file_name().into_string().expect("names are UTF-8");
        let path = format!("{prefix}{name}");
        let kind = entry.file_type().expect("read the file type");
        if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
            walk(&entry.path(), &format!("{path}/"), found);
        } else if kind.is_file() && is_text(&path) {
            let text = fs::read_to_string(entry.path()).unwrap_or_else(|error| panic!("{path}: {error}"));
            found.push(File { path, text });
        }
    }
}

fn is_text(path: &str) -> bool {
    path == ".ci/run" || Path::new(path).extension().is_some_and(|end| TEXTS.iter().any(|text| end == *text))
}

fn assert_none(broken: &[String]) {
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

#[test]
fn imports_respect_the_architecture() {
    assert_none(&edges::broken(&files()));
}

#[test]
fn packages_depend_only_on_those_below_them() {
    assert_none(&edges::forbidden_dependencies(&files()));
}

#[test]
fn no_unwrap_outside_tests() {
    assert_none(&rules::unwraps(&files()));
}

#[test]
fn no_promise_of_later_work_remains() {
    assert_none(&files().iter().flat_map(rules::left_to_do).collect::<Vec<_>>());
}

#[test]
fn every_source_file_has_a_header() {
    assert_none(&files().iter().filter_map(rules::unopened).collect::<Vec<_>>());
}

#[test]
fn no_source_file_is_long() {
    assert_none(&files().iter().filter_map(rules::too_long).collect::<Vec<_>>());
}

#[test]
fn no_file_names_a_build_machine_path() {
    assert_none(&files().iter().flat_map(rules::build_machine_paths).collect::<Vec<_>>());
}

#[test]
fn tools_do_not_depend_on_the_product() {
    assert_none(&files().iter().flat_map(rules::links_to_the_product).collect::<Vec<_>>());
}

#[test]
fn every_dependency_has_its_reason() {
    assert_none(&documented::unexplained_dependencies(&files()));
}

#[test]
fn every_link_between_pages_resolves() {
    assert_none(&links::broken(&files()));
}

#[test]
fn every_path_that_a_page_names_exists() {
    assert_none(&links::unknown_paths(&files(), |path| root().join(path).exists()));
}

#[test]
fn every_test_that_a_page_names_exists() {
    assert_none(&documented::unknown_tests(&files()));
}

#[test]
fn folders_match_the_plan() {
    assert_none(&rules::unplanned_folders(&files()));
}

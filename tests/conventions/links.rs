//! Links between pages: each relative link must name an existing file or directory, and its anchor, if any, a heading
//! in that file. Repository paths that a page mentions in backticks must exist, too.

use std::path::{Component, Path, PathBuf};

use super::{ProjectFile, format_violation};

/// Returns broken links, and pages of the book that its summary does not list.
pub fn broken_links(files: &[ProjectFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for page in files.iter().filter(|file| is_page(&file.path)) {
        for (number, target) in links(&page.text) {
            if let Some(reason) = find_target_error(files, page, &target) {
                violations.push(format_violation(&page.path, number, format!("{target}: {reason}")));
            }
        }
    }
    violations.extend(unlisted_pages(files));
    violations
}

fn is_page(path: &str) -> bool {
    path.ends_with(".md")
}

/// Top-level directories: a path in backticks that starts with one of them must exist.
const TOP_DIRECTORIES: [&str; 10] = [
    "apps/",
    "cloud-init/",
    "docs/",
    "migrations/",
    "packaging/",
    "scripts/",
    "src/",
    "systemd/",
    "tests/",
    "xtask/",
];

/// Returns paths in backticks that do not exist. Patterns, `{a,b}` and placeholders are skipped, and so is the
/// changelog, which names former paths.
pub fn unknown_paths(files: &[ProjectFile], exists: impl Fn(&str) -> bool) -> Vec<String> {
    let is_path = |text: &&str| {
        TOP_DIRECTORIES.iter().any(|dir| text.starts_with(dir))
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
            // A placeholder, as in `tests/corpus/TARGET`.
            && !text.contains("TARGET")
    };
    let mut violations = Vec::new();
    for page in files.iter().filter(|file| is_page(&file.path) && file.path != "CHANGELOG.md") {
        for (number, line) in page.text.lines().enumerate() {
            for path in line.split('`').skip(1).step_by(2).filter(is_path).filter(|path| !exists(path)) {
                violations.push(format_violation(&page.path, number + 1, format!("no such path: {path}")));
            }
        }
    }
    violations
}

/// Returns the targets of `[label](target)` outside code, with their line numbers.
fn links(text: &str) -> Vec<(usize, String)> {
    let (mut targets, mut is_code) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        if is_code {
            continue;
        }
        let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
        for rest in plain.split("](").skip(1) {
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            if !target.contains("://") && !target.starts_with("mailto:") {
                targets.push((number + 1, target.to_owned()));
            }
        }
    }
    targets
}

fn find_target_error(files: &[ProjectFile], page: &ProjectFile, target: &str) -> Option<&'static str> {
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if path.is_empty() { page.path.clone() } else { resolve(&page.path, path) };
    let file = files.iter().find(|file| file.path == path);
    let is_dir = || files.iter().any(|file| file.path.starts_with(&format!("{path}/")));
    match file {
        None if is_dir() && anchor.is_empty() => None,
        None => Some("no such file"),
        Some(file) if anchor.is_empty() || anchors(&file.text).contains(&anchor.to_owned()) => None,
        Some(_) => Some("no such heading"),
    }
}

/// Resolves `target`, relative to the directory of `page`, to a path from the root.
fn resolve(page: &str, target: &str) -> String {
    let mut path = PathBuf::new();
    let dir = Path::new(page).parent().unwrap_or(Path::new(""));
    for part in dir.join(target.trim_end_matches('/')).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    path.to_string_lossy().into_owned()
}

/// Returns the heading anchors, as GitHub and mdBook generate them.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let heading = line.trim_start_matches('#').trim().to_lowercase();
            let characters = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            characters.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// Returns pages in `docs` that `docs/SUMMARY.md` does not link to.
fn unlisted_pages(files: &[ProjectFile]) -> Vec<String> {
    const SUMMARY: &str = "docs/SUMMARY.md";
    let Some(summary) = files.iter().find(|file| file.path == SUMMARY) else { return Vec::new() };
    let listed: Vec<_> = links(&summary.text).iter().map(|(_, target)| resolve(SUMMARY, target)).collect();
    let pages = files.iter().map(|file| &file.path).filter(|path| path.starts_with("docs/") && is_page(path));
    let missing = pages.filter(|path| *path != SUMMARY && !listed.contains(path));
    missing.map(|path| format!("{path} is not in {SUMMARY}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_broken_links(text: &str) -> usize {
        let other = ProjectFile::sample("docs/b/other.md", "# Other\n\n## Rotate `KEY_A`: how\n");
        let summary = ProjectFile::sample("docs/SUMMARY.md", "[a](a.md) [b](b/other.md)");
        broken_links(&[ProjectFile::sample("docs/a.md", text), other, summary]).len()
    }

    #[test]
    fn broken_link_is_detected() {
        assert_eq!(count_broken_links("[x](b/missing.md)"), 1);
        assert_eq!(count_broken_links("[x](../b/other.md)"), 1);
        assert_eq!(count_broken_links("[x](b/other.md#missing)"), 1);
        assert_eq!(count_broken_links("# A\n\n[x](#b)"), 1);
    }

    #[test]
    fn valid_link_and_code_pass() {
        assert_eq!(count_broken_links("[x](b/other.md#rotate-key_a-how) and [y](https://example.com/z)"), 0);
        assert_eq!(count_broken_links("# A\n\n[x](#a), [directory](b)"), 0);
        assert_eq!(count_broken_links("`[x](missing.md)`\n```\n[x](missing.md)\n```"), 0);
    }

    #[test]
    fn unknown_path_is_detected() {
        let page = ProjectFile::sample(
            "docs/a.md",
            "`src/a.rs` and `src/b.rs`, `src/{c,d}.rs`, `tests/corpus/TARGET`",
        );
        assert_eq!(unknown_paths(&[page], |path| path == "src/a.rs").len(), 1);
    }

    #[test]
    fn unlisted_page_is_detected() {
        let page = ProjectFile::sample("docs/c.md", "# C");
        let summary = ProjectFile::sample("docs/SUMMARY.md", "# Summary");
        assert_eq!(broken_links(&[page, summary]).len(), 1);
    }
}

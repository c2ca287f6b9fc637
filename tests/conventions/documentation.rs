//! Checks pages against the code: each dependency is explained, and the tests and names that pages mention exist.

use std::collections::BTreeMap;

use super::{ProjectFile, format_violation};

/// Returns the dependencies of workspace members that do not have exactly one row in `docs/dependencies.md`, and rows
/// for other crates.
pub fn unexplained_dependencies(files: &[ProjectFile]) -> Vec<String> {
    let mut dependencies = BTreeMap::new();
    for file in files.iter().filter(|file| file.path.ends_with("Cargo.toml")) {
        let mut is_dependency_table = false;
        for (number, line) in file.text.lines().enumerate() {
            if line.starts_with('[') {
                is_dependency_table = matches!(line, "[dependencies]" | "[dev-dependencies]");
            }
            let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if is_dependency_table && name.starts_with(|c: char| c.is_ascii_lowercase()) {
                dependencies.entry(name).or_insert_with(|| format_violation(&file.path, number + 1, name));
            }
        }
    }
    let page = files.iter().find(|file| file.path == "docs/dependencies.md").map_or("", |file| &file.text);
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let rows: Vec<_> = rows.map(|(name, _)| name).collect();
    let mut violations: Vec<_> = dependencies
        .iter()
        .filter(|(name, _)| rows.iter().filter(|row| row == name).count() != 1)
        .map(|(_, position)| format!("{position} needs exactly one row in docs/dependencies.md"))
        .collect();
    violations.extend(
        rows.iter()
            .filter(|row| !dependencies.contains_key(*row))
            .map(|row| format!("not a dependency of any member: {row}")),
    );
    violations
}

/// Whether a test exists: `area::file::name` in `tests`, in the kit as `kit::file::name`, or a unit test under `src`.
pub fn test_exists(files: &[ProjectFile], name: &str) -> bool {
    let (module, name) = name.rsplit_once("::").unwrap_or_default();
    let module = module.replace("::", "/");
    let paths = match module.strip_prefix("kit/") {
        Some(module) => [format!("tests/kit/src/{module}.rs"), format!("tests/kit/src/{module}/mod.rs")],
        None => [format!("tests/{module}.rs"), format!("src/{module}.rs")],
    };
    files.iter().any(|file| paths.contains(&file.path) && file.text.contains(&format!("fn {name}(")))
}

/// Returns tests that a page in `docs` names but that do not exist.
pub fn unknown_tests(files: &[ProjectFile]) -> Vec<String> {
    let is_name = |text: &str| {
        text.contains("::")
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c))
    };
    let mut violations = Vec::new();
    for file in files.iter().filter(|file| file.path.starts_with("docs/")) {
        for (number, line) in file.text.lines().enumerate() {
            let names = line.split('`').skip(1).step_by(2).filter(|text| is_name(text));
            for name in names.filter(|name| !test_exists(files, name)) {
                violations.push(format_violation(&file.path, number + 1, format!("no such test: {name}")));
            }
        }
    }
    violations
}

/// Returns names that a page in `docs` gives in parentheses after a source file, as in `a.rs` (`f`, `g`), but that are
/// not in that file.
pub fn unknown_names(files: &[ProjectFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for page in files.iter().filter(|file| file.path.starts_with("docs/")) {
        for (number, line) in page.text.lines().enumerate() {
            let (mut source, mut is_in_parentheses) = (None, false);
            // Alternating text outside and inside backticks.
            let parts: Vec<&str> = line.split('`').collect();
            for pair in parts.chunks_exact(2) {
                let (before, quoted) = (pair[0], pair[1]);
                is_in_parentheses = before == " (" || is_in_parentheses && matches!(before, ", " | " and ");
                if let Some(file) = files.iter().find(|file| file.path == quoted) {
                    source = Some(file);
                } else if !is_in_parentheses {
                    source = None;
                } else if let Some(file) = source.filter(|file| !has_word(&file.text, quoted)) {
                    violations.push(format_violation(
                        &page.path,
                        number + 1,
                        format!("{} has no {quoted}", file.path),
                    ));
                }
            }
        }
    }
    violations
}

fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(start, _)| {
        !text[..start].ends_with(is_part) && !text[start + word.len()..].starts_with(is_part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependency_without_exactly_one_row_is_detected() {
        let manifest = "[dependencies]\na.workspace = true\nb = \"1\"\n\n[lints]\nworkspace = true\n";
        let check = |page: &str| {
            unexplained_dependencies(&[
                ProjectFile::sample("src/x/Cargo.toml", manifest),
                ProjectFile::sample("docs/dependencies.md", page),
            ])
        };
        assert!(check("| `a` | reason |\n| `b` | reason |\n").is_empty());
        for (page, part) in [
            ("| `a` | reason |\n", "b needs exactly one row"),
            ("| `a` | reason |\n| `b` | reason |\n| `b` | reason |\n", "b needs exactly one row"),
            ("| `a` | reason |\n| `b` | reason |\n| `c` | reason |\n", "not a dependency of any member: c"),
        ] {
            let violations = check(page);
            assert!(violations.len() == 1 && violations[0].contains(part), "{page}: {violations:?}");
        }
    }

    #[test]
    fn missing_name_after_a_file_is_detected() {
        let page = ProjectFile::sample(
            "docs/a.md",
            "`src/a.rs` (`f`, `of_g`), `src/b.rs` (`g`), `h` in `src/a.rs`, `i`",
        );
        let files = [
            page,
            ProjectFile::sample("src/a.rs", "fn f() {} fn of_gh() {}"),
            ProjectFile::sample("src/b.rs", "fn g() {}"),
        ];
        let violations = unknown_names(&files);
        assert_eq!(violations.len(), 1, "{violations:?}");
        assert!(violations[0].contains("src/a.rs has no of_g"), "{violations:?}");
    }

    #[test]
    fn missing_test_named_by_a_page_is_detected() {
        let page = ProjectFile::sample(
            "docs/a.md",
            "tested by `a::b::c_d`, `a::b::e`, `g::h`, `kit::i::j` and `a/b.rs`",
        );
        let test = |path: &str, name: &str| ProjectFile::sample(path, &format!("#[test]\nfn {name}() {{}}"));
        let tests = [test("tests/a/b.rs", "c_d"), test("src/g.rs", "h"), test("tests/kit/src/i.rs", "j")];
        let violations = unknown_tests(&tests.into_iter().chain([page]).collect::<Vec<_>>());
        assert_eq!(violations.len(), 1, "{violations:?}");
        assert!(violations[0].contains("a::b::e"), "{violations:?}");
    }
}

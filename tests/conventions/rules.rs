//! Rules for single files and manifests: forbidden content, required headers, sizes, numbering and directories.

use super::{ProjectFile, format_violation, source};

const MAX_LINES: usize = 500;

fn is_rust(path: &str) -> bool {
    path.ends_with(".rs")
}

fn is_project_source(path: &str) -> bool {
    is_rust(path) && ["src/", "xtask/", "tests/"].iter().any(|dir| path.starts_with(dir))
}

pub fn find_unwraps(files: &[ProjectFile]) -> Vec<String> {
    let tests = source::test_modules(files);
    let mut violations = Vec::new();
    for file in files {
        let Some(module) = source::module_path(&file.path) else { continue };
        if tests.iter().any(|test| module.starts_with(test)) {
            continue;
        }
        let (tokens, _) =
            source::without_tests(&source::tokenize(&source::blank_comments_and_literals(&file.text)));
        for call in tokens.windows(4) {
            if call.iter().map(|token| token.text.as_str()).eq([".", "unwrap", "(", ")"]) {
                violations.push(format_violation(&file.path, call[0].line, "unwrap() outside tests"));
            }
        }
    }
    violations
}

/// Returns markers for unfinished work. They are concatenated here so that this file does not contain them.
pub fn todo_markers(file: &ProjectFile) -> Vec<String> {
    let words = [concat!("TO", "DO"), concat!("FIX", "ME")];
    let calls = [concat!("to", "do!"), concat!("unimplemen", "ted!")];
    let mut violations = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        let has_marker = line.split(|c: char| !c.is_alphanumeric()).any(|word| words.contains(&word));
        if has_marker || (is_rust(&file.path) && calls.iter().any(|call| line.contains(call))) {
            violations.push(format_violation(&file.path, number + 1, "has a marker for unfinished work"));
        }
    }
    violations
}

/// Returns extractors in the gateway that read what only axum's router sets: with the gateway's own route table, they
/// would reject every request.
pub fn router_extractors(file: &ProjectFile) -> Vec<String> {
    if !file.path.starts_with("src/host/gateway/") || !is_rust(&file.path) {
        return Vec::new();
    }
    let tokens = source::tokenize(&source::blank_comments_and_literals(&file.text));
    let extractors = ["Extension", "MatchedPath", "OriginalUri", "PathParams"];
    let found = tokens.iter().filter(|token| extractors.contains(&token.text.as_str()));
    found
        .map(|token| {
            format_violation(
                &file.path,
                token.line,
                "reads what axum's router sets; use `Caller` or `PathParameter`",
            )
        })
        .collect()
}

pub fn missing_header(file: &ProjectFile) -> Option<String> {
    let has_header = file.text.starts_with("//! ") || file.text.lines().count() <= 1;
    (is_project_source(&file.path) && !has_header).then(|| {
        format_violation(
            &file.path,
            1,
            "does not begin with `//!`: describe what the file owns and which invariant it maintains",
        )
    })
}

pub fn oversized_file(file: &ProjectFile) -> Option<String> {
    let lines = file.text.lines().count();
    (is_rust(&file.path) && lines > MAX_LINES)
        .then(|| format_violation(&file.path, lines, format!("{lines} lines, more than {MAX_LINES}")))
}

/// Returns migrations `V<number>__name.sql` whose numbers are not 1, 2, 3 and so on, for example because two branches
/// used the same number.
pub fn misnumbered_migrations(files: &[ProjectFile]) -> Vec<String> {
    let number = |file: &ProjectFile| -> Option<u32> {
        file.path.strip_prefix("migrations/V")?.split_once("__")?.0.parse().ok()
    };
    let mut numbered: Vec<_> = files.iter().filter_map(|file| Some((number(file)?, &file.path))).collect();
    numbered.sort_unstable();
    let expected = numbered.iter().zip(1..);
    let wrong = expected.filter(|((number, _), expected)| number != expected);
    wrong
        .map(|((_, path), expected)| {
            format_violation(path, 1, format!("the migration's number must be {expected}"))
        })
        .collect()
}

/// Returns absolute paths under a build directory, or under a home directory other than the product's.
pub fn build_machine_paths(file: &ProjectFile) -> Vec<String> {
    let prefixes = [concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/wo", "rk/")];
    let mut violations = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        for prefix in prefixes {
            for (start, _) in line.match_indices(prefix) {
                let is_absolute =
                    !line[..start].ends_with(|c: char| c.is_alphanumeric() || "._-}~".contains(c));
                let has_name = line[start + prefix.len()..].starts_with(|c: char| c.is_ascii_alphanumeric());
                let is_product_path = line[start..].starts_with("/home/svc");
                if is_absolute && has_name && !is_product_path {
                    violations.push(format_violation(
                        &file.path,
                        number + 1,
                        "names a path on the build machine",
                    ));
                }
            }
        }
    }
    violations
}

/// xtask, the kit and its programs drive the product through its public CLI, HTTP and signals, so their manifests must
/// not depend on the product's packages.
pub fn product_dependencies(file: &ProjectFile) -> Vec<String> {
    const MANIFESTS: [&str; 5] = [
        "xtask/Cargo.toml",
        "tests/bench/Cargo.toml",
        "tests/conventions/Cargo.toml",
        "tests/kit/Cargo.toml",
        "tests/lab/Cargo.toml",
    ];
    if !MANIFESTS.contains(&file.path.as_str()) {
        return Vec::new();
    }
    let is_product = |key: &str| key == "svc" || key.starts_with("svc-");
    let names_product = |line: &str| {
        let key = line.split(['=', '.']).next().unwrap_or_default().trim().trim_matches('"');
        is_product(key) || line.contains("package = \"svc")
    };
    let is_product_table = |line: &str| {
        let has_product_key = line.contains("dependencies.svc]") || line.contains("dependencies.svc-");
        line.trim_start().starts_with('[') && has_product_key
    };
    let lines = file.text.lines().enumerate();
    lines
        .filter(|(_, line)| names_product(line) || is_product_table(line))
        .map(|(number, _)| {
            format_violation(
                &file.path,
                number + 1,
                "depends on the product, but may use only its public interfaces",
            )
        })
        .collect()
}

const TOP_DIRECTORIES: [&str; 14] = [
    ".cargo",
    ".ci",
    ".config",
    ".github",
    "apps",
    "cloud-init",
    "docs",
    "migrations",
    "packaging",
    "scripts",
    "src",
    "systemd",
    "tests",
    "xtask",
];
const SOURCE_DIRECTORIES: [&str; 11] =
    ["base", "ctl", "files", "host", "http", "machine", "platform", "provider", "store", "verify", "wire"];

pub fn unlisted_directories(files: &[ProjectFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files {
        let mut parts: Vec<&str> = file.path.split('/').collect();
        parts.pop();
        let is_listed = match parts.as_slice() {
            [] | ["src"] => true,
            ["src", dir, ..] => SOURCE_DIRECTORIES.contains(dir),
            [dir, ..] => TOP_DIRECTORIES.contains(dir),
        };
        if !is_listed {
            violations.push(format_violation(
                &file.path,
                1,
                "is in a directory that neither TOP_DIRECTORIES nor SOURCE_DIRECTORIES lists",
            ));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unwrap_is_detected_only_outside_tests() {
        let bad = "fn a() { b().unwrap(); }";
        let count = |files: &[ProjectFile]| find_unwraps(files).len();
        assert_eq!(count(&[ProjectFile::sample("src/a.rs", bad)]), 1);
        assert_eq!(count(&[ProjectFile::sample("src/a.rs", "fn a() {\n b()\n  .unwrap\n ( ) }")]), 1);
        assert_eq!(
            count(&[ProjectFile::sample("src/a.rs", "#[cfg(test)]\nmod tests { fn a() { b().unwrap() } }")]),
            0
        );
        assert_eq!(
            count(&[ProjectFile::sample("src/a.rs", "// b().unwrap()\nb().unwrap_or(1); \".unwrap()\";")]),
            0
        );
        let parent = ProjectFile::sample("src/a/mod.rs", "#[cfg(test)]\nmod model;");
        assert_eq!(count(&[parent, ProjectFile::sample("src/a/model/deep.rs", bad)]), 0);
        let parent = ProjectFile::sample("src/a/b.rs", "#[cfg(test)]\n#[path = \"b_tests.rs\"]\nmod tests;");
        assert_eq!(count(&[parent, ProjectFile::sample("src/a/b_tests.rs", bad)]), 0);
        let parent = ProjectFile::sample("src/a/mod.rs", "mod model;");
        assert_eq!(count(&[parent, ProjectFile::sample("src/a/model.rs", bad)]), 1);
    }

    #[test]
    fn repeated_and_skipped_migration_numbers_are_detected() {
        let count = |names: &[&str]| {
            let files: Vec<_> =
                names.iter().map(|name| ProjectFile::sample(&format!("migrations/{name}.sql"), "")).collect();
            misnumbered_migrations(&files).len()
        };
        assert_eq!(count(&["V1__a", "V2__b", "V10__c"]), 1);
        assert_eq!(count(&["V1__a", "V2__b", "V2__c"]), 1);
        assert_eq!(count(&["V2__b", "V1__a", "V3__c"]), 0);
    }

    #[test]
    fn todo_marker_is_detected() {
        for bad in [concat!("// TO", "DO: x"), concat!("# FIX", "ME"), concat!("fn a() { to", "do!() }")] {
            assert_eq!(todo_markers(&ProjectFile::sample("src/a.rs", bad)).len(), 1, "{bad}");
        }
        assert!(
            todo_markers(&ProjectFile::sample("src/a.rs", "// methodology\nfn mastodon() {}")).is_empty()
        );
    }

    #[test]
    fn router_extractor_is_detected_in_gateway() {
        let count = |path: &str, text: &str| router_extractors(&ProjectFile::sample(path, text)).len();
        assert_eq!(count("src/host/gateway/a.rs", "fn a(Extension(b): Extension<B>) {}"), 2);
        assert_eq!(count("src/host/gateway/a.rs", "fn a(PathParams(id): PathParams<String>) {}"), 2);
        assert_eq!(count("src/host/gateway/a.rs", "// Extension\nfn a(caller: Caller) {}"), 0);
        assert_eq!(count("src/platform/api/a.rs", "use svc_http::path_params::PathParams;"), 0);
    }

    #[test]
    fn file_without_header_is_detected() {
        assert!(missing_header(&ProjectFile::sample("src/a.rs", "use b;\n//! late")).is_some());
        assert!(missing_header(&ProjectFile::sample("xtask/src/main.rs", "fn main() {\n}")).is_some());
        assert!(missing_header(&ProjectFile::sample("src/a.rs", "//! Owns a.\n")).is_none());
        assert!(missing_header(&ProjectFile::sample("README.md", "svc")).is_none());
    }

    #[test]
    fn long_file_is_detected() {
        assert!(oversized_file(&ProjectFile::sample("src/a.rs", &"\n".repeat(MAX_LINES + 1))).is_some());
        assert!(oversized_file(&ProjectFile::sample("src/a.rs", &"\n".repeat(MAX_LINES))).is_none());
    }

    #[test]
    fn build_machine_path_is_detected() {
        for bad in [concat!("\"/ho", "me/ada/x\""), concat!("cd /wo", "rk/a"), concat!("//! see /ro", "ot/x")]
        {
            assert_eq!(build_machine_paths(&ProjectFile::sample("src/a.rs", bad)).len(), 1, "{bad}");
        }
        for good in [
            concat!("\"/ho", "me/svc/home/apps\""),
            concat!("target/wo", "rk/x"),
            "{svc_root}/home/x",
            "~/root/x",
            "/home/<user>/",
        ] {
            assert!(build_machine_paths(&ProjectFile::sample("src/a.rs", good)).is_empty(), "{good}");
        }
    }

    #[test]
    fn dependency_on_the_product_is_detected() {
        for bad in [
            "svc = { path = \"..\" }",
            "svc.workspace = true",
            "svc-host.workspace = true",
            "[dependencies.svc]",
            "[dependencies.svc-host]",
            "[dev-dependencies.svc]",
            "product = { path = \"..\", package = \"svc\" }",
        ] {
            assert_eq!(product_dependencies(&ProjectFile::sample("xtask/Cargo.toml", bad)).len(), 1, "{bad}");
        }
        assert!(product_dependencies(&ProjectFile::sample("Cargo.toml", "name = \"svc\"")).is_empty());
        let good = "kit = { path = \"../tests/kit\" }\nbench = \"1\"";
        assert!(product_dependencies(&ProjectFile::sample("xtask/Cargo.toml", good)).is_empty());
    }

    #[test]
    fn unlisted_directory_is_detected() {
        let count = |path: &str| unlisted_directories(&[ProjectFile::sample(path, "")]).len();
        assert_eq!((count("lib/a.rs"), count("src/utils/a.rs")), (1, 1));
        assert_eq!((count("src/host/a.rs"), count("README.md"), count("src/main.rs")), (0, 0, 0));
    }
}

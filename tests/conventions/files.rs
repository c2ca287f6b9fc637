//! The project's text files, and positions in them.

use std::fs;
use std::path::{Path, PathBuf};

/// A project file: its path relative to the repository root, separated by `/`, and its text.
pub struct ProjectFile {
    pub path: String,
    pub text: String,
}

impl ProjectFile {
    #[cfg(test)]
    pub fn sample(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }
}

/// Formats a violation with its position: `src/store/key.rs:12: reason`.
pub fn format_violation(path: &str, line: usize, reason: impl std::fmt::Display) -> String {
    format!("{path}:{line}: {reason}")
}

/// Directories with generated or downloaded content, and Git's own directory.
const SKIPPED_DIRECTORIES: [&str; 4] = [".git", "target", "node_modules", "dist"];
const TEXT_EXTENSIONS: [&str; 19] = [
    "rs", "toml", "md", "sql", "sh", "py", "js", "mjs", "ts", "json", "html", "css", "yaml", "yml",
    "service", "timer", "path", "conf", "txt",
];

/// Returns the repository root.
pub fn root() -> PathBuf {
    let is_root = |dir: &&Path| dir.join("src/main.rs").exists();
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .find(is_root)
        .expect("the repository has src/main.rs")
        .to_owned()
}

/// Reads all text files in the project.
pub fn load_files() -> Vec<ProjectFile> {
    let mut files = Vec::new();
    walk(&root(), "", &mut files);
    assert!(files.iter().any(|file| file.path == "src/main.rs"), "no source files found");
    files
}

fn walk(dir: &Path, prefix: &str, files: &mut Vec<ProjectFile>) {
    for entry in fs::read_dir(dir).expect("the project directory is readable") {
        let entry = entry.expect("the directory entry is readable");
        let name = entry.file_name().into_string().expect("names are UTF-8");
        let path = format!("{prefix}{name}");
        let kind = entry.file_type().expect("the file type is known");
        if kind.is_dir() && !SKIPPED_DIRECTORIES.contains(&name.as_str()) {
            walk(&entry.path(), &format!("{path}/"), files);
        } else if kind.is_file() && is_text(&path) {
            let text = fs::read_to_string(entry.path()).unwrap_or_else(|error| panic!("{path}: {error}"));
            files.push(ProjectFile { path, text });
        }
    }
}

fn is_text(path: &str) -> bool {
    path == ".ci/run"
        || Path::new(path)
            .extension()
            .is_some_and(|extension| TEXT_EXTENSIONS.iter().any(|text| extension == *text))
}

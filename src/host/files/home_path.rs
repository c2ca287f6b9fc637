//! Paths in the user's home directory, as given in requests.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use svc_base::untrusted_text::{one_line, truncate_printable};
use svc_wire::files::MAX_PATH_CHARS;

use super::staging::STAGING_NAMES;

/// Home directory path shown in snapshots and responses, even in tests, where the real one differs.
pub const DISPLAY_HOME: &str = "/home/svc";
/// Directory holding the owner's files, relative to the user's home directory.
const FILES: &str = "home";
/// Machine records and `config.json`. Readable by the owner's programs, but writable only by the machine.
const SYSTEM: &str = "home/system";

/// The user's home directory or a path below it, never containing `..`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HomePath(PathBuf);

/// Error from parsing a [`HomePath`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HomePathError {
    #[error("must be a path below {DISPLAY_HOME}; a relative path is below {DISPLAY_HOME}/{FILES}")]
    Outside,
    #[error("must have at most {MAX_PATH_CHARS} characters")]
    TooLong,
    #[error("must not be empty")]
    Empty,
}

impl HomePath {
    /// ECMA-262 pattern for the API schema: rejects `..` components and absolute paths outside [`DISPLAY_HOME`].
    /// Doesn't enforce [`MAX_PATH_CHARS`].
    pub const PATTERN: &str = r"^(/home/svc(/(\.|[^./\u0000][^/\u0000]*|\.[^./\u0000][^/\u0000]*|\.\.[^/\u0000]+)?)*|(\.|[^./\u0000][^/\u0000]*|\.[^./\u0000][^/\u0000]*|\.\.[^/\u0000]+)(/(\.|[^./\u0000][^/\u0000]*|\.[^./\u0000][^/\u0000]*|\.\.[^/\u0000]+)?)*)$";

    /// Returns the owner's files directory.
    pub fn files() -> Self {
        Self(PathBuf::from(FILES))
    }

    /// Wraps `path`, which is relative to the user's home directory and must not contain `..`.
    pub fn from_relative(path: PathBuf) -> Self {
        Self(path)
    }

    /// Formats the path for messages: a single line, truncated, without control characters.
    pub fn to_line(&self) -> String {
        one_line(&truncate_printable(&self.to_string())).into_owned()
    }

    /// Returns the path relative to the user's home directory (the snapshot root). Empty for the root itself.
    pub fn as_path(&self) -> &Path {
        &self.0
    }

    /// Splits the path into its parent, relative to the user's home directory, and file name. `None` for the home
    /// directory itself.
    pub fn split(&self) -> Option<(&Path, &OsStr)> {
        self.0.parent().zip(self.0.file_name())
    }

    /// Whether restores must not write to this path: the machine's `system` directory, its contents and ancestors, and
    /// the restore staging directories.
    pub fn is_reserved(&self) -> bool {
        let system = Path::new(SYSTEM);
        self.0.starts_with(system)
            || system.starts_with(&self.0)
            || STAGING_NAMES.iter().any(|staging| self.0.starts_with(staging))
    }
}

impl FromStr for HomePath {
    type Err = HomePathError;

    fn from_str(text: &str) -> Result<Self, HomePathError> {
        if text.is_empty() {
            return Err(HomePathError::Empty);
        }
        if text.chars().count() > MAX_PATH_CHARS {
            return Err(HomePathError::TooLong);
        }
        let input = Path::new(text);
        let relative = if input.is_absolute() {
            input.strip_prefix(DISPLAY_HOME).map_err(|_| HomePathError::Outside)?.to_owned()
        } else {
            Path::new(FILES).join(input)
        };
        let mut path = PathBuf::new();
        for component in relative.components() {
            match component {
                Component::Normal(name) => path.push(name),
                Component::CurDir => {}
                _ => return Err(HomePathError::Outside),
            }
        }
        Ok(Self(path))
    }
}

impl fmt::Display for HomePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Path::new(DISPLAY_HOME).join(&self.0).display().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_only_paths_below_user_home() {
        for (text, expected) in [
            ("notes.txt", "/home/svc/home/notes.txt"),
            ("a//b/./c/", "/home/svc/home/a/b/c"),
            (".", "/home/svc/home"),
            ("/home/svc/.bashrc", "/home/svc/.bashrc"),
            ("/home/svc", "/home/svc"),
        ] {
            let path: HomePath = text.parse().unwrap();
            assert_eq!(path.to_string().trim_end_matches('/'), expected, "{text:?}");
        }
        for text in ["/", "/etc/passwd", "../.bashrc", "a/../../b", "/home/svc2/a", "/home/svc/../x"] {
            assert_eq!(text.parse::<HomePath>(), Err(HomePathError::Outside), "{text:?}");
        }
        assert_eq!("".parse::<HomePath>(), Err(HomePathError::Empty));
        assert_eq!("x".repeat(5000).parse::<HomePath>(), Err(HomePathError::TooLong));
    }

    #[test]
    fn pattern_matches_valid_paths_only() {
        let pattern = regex_lite::Regex::new(&HomePath::PATTERN.replace("\\u0000", "\\x00")).unwrap();
        for text in [
            "a",
            "a//b/./c/",
            ".",
            ".bashrc",
            "..a",
            "a/...",
            "/home/svc",
            "/home/svc/.x/..y",
            "",
            "..",
            "../a",
            "a/..",
            "a/../b",
            "/",
            "/etc",
            "/home/svc2",
            "/home/svc/../x",
            "ü/b c",
        ] {
            assert_eq!(pattern.is_match(text), text.parse::<HomePath>().is_ok(), "{text:?}");
        }
    }

    #[test]
    fn paths_overlapping_machine_paths_are_reserved() {
        for (text, expected) in [
            ("system", true),
            ("system/logs/usage.jsonl", true),
            (".", true),
            ("/home/svc", true),
            ("system-notes", false),
            ("apps/system", false),
            ("/home/svc/.svc-restore-entry/x", true),
            ("/home/svc/.svc-restore-mine", false),
        ] {
            assert_eq!(text.parse::<HomePath>().unwrap().is_reserved(), expected, "{text:?}");
        }
    }
}

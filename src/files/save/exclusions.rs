//! Save exclusions: explicit paths, and rules in `.gitignore` syntax.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};

/// Entries to exclude from a save.
#[derive(Debug, Clone, Default)]
pub struct Exclusions {
    /// Paths relative to the saved directory.
    pub paths: Vec<PathBuf>,
    rules: Option<Arc<Rules>>,
}

/// Rules in `.gitignore` syntax.
#[derive(Debug)]
struct Rules {
    /// Applies outside `owner_root`.
    defaults: Gitignore,
    /// The defaults followed by the owner's rules. Applies below `owner_root`.
    owner: Gitignore,
    owner_root: PathBuf,
    /// These paths and everything below them are exempt from all rules.
    never_excluded: Vec<PathBuf>,
}

impl Exclusions {
    /// Sets the rules, in `.gitignore` syntax. `defaults` apply everywhere. The owner's rules apply below `owner_root`
    /// and take precedence there: `!name/` re-includes a default exclusion. Paths in `never_excluded` and everything
    /// below them are exempt from all rules.
    ///
    /// Returns the owner's invalid lines, which are ignored. If the combined rules are too large, all of the owner's
    /// rules are ignored, and the first element is the error message.
    pub fn set_rules(
        &mut self,
        defaults: &[&str],
        owner_lines: &str,
        owner_root: &Path,
        never_excluded: Vec<PathBuf>,
    ) -> Vec<String> {
        let mut builder = GitignoreBuilder::new("");
        for line in defaults {
            builder.add_line(None, line).expect("default rules are valid");
        }
        let defaults = builder.build().expect("default rules are valid");
        let mut invalid = Vec::new();
        // Like git, strip a byte order mark.
        for line in owner_lines.strip_prefix('\u{feff}').unwrap_or(owner_lines).lines() {
            if builder.add_line(None, line).is_err() {
                invalid.push(line.to_owned());
            }
        }
        // Each line is valid by itself, but the combined rules may be too large.
        let owner = builder.build().unwrap_or_else(|error| {
            invalid.insert(0, format!("all of the owner's rules are ignored: {error}"));
            defaults.clone()
        });
        let owner_root = owner_root.to_owned();
        self.rules = Some(Arc::new(Rules { defaults, owner, owner_root, never_excluded }));
        invalid
    }

    pub(super) fn excludes(&self, path: &Path, name: &OsStr, is_directory: bool) -> bool {
        if self.paths.iter().any(|excluded| excluded == path) {
            return true;
        }
        let Some(rules) = &self.rules else { return false };
        if rules.never_excluded.iter().any(|included| path.starts_with(included)) {
            return false;
        }
        let matched = match path.strip_prefix(&rules.owner_root) {
            Ok(below) if below != Path::new("") => rules.owner.matched(below, is_directory),
            Ok(_) => Match::None,
            Err(_) => rules.defaults.matched(name, is_directory),
        };
        matched.is_ignore()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exclusions(owner: &str) -> (Exclusions, Vec<String>) {
        let mut exclusions = Exclusions::default();
        exclusions.paths.push("staging".into());
        let never_excluded = vec![PathBuf::from("home/system")];
        let defaults = ["node_modules/", ".cache/"];
        let invalid = exclusions.set_rules(&defaults, owner, Path::new("home"), never_excluded);
        (exclusions, invalid)
    }

    fn excludes(exclusions: &Exclusions, path: &str, is_directory: bool) -> bool {
        let path = Path::new(path);
        exclusions.excludes(path, path.file_name().unwrap(), is_directory)
    }

    #[test]
    fn owner_rules_follow_gitignore_and_take_precedence() {
        let (rules, invalid) =
            exclusions("# comment\n*.iso\n/videos/\n!keep.iso\n!tools/node_modules/\na{b\n");
        assert_eq!(invalid, ["a{b"]);
        for (path, is_directory, expected) in [
            ("home/a/node_modules", true, true),
            ("home/a/node_modules", false, false),
            ("home/tools/node_modules", true, false),
            ("home/a/disk.iso", false, true),
            ("home/a/keep.iso", false, false),
            ("home/videos", true, true),
            ("home/a/videos", true, false),
            ("home", true, false),
            (".cache", true, true),
            ("disk.iso", false, false),
            ("staging", true, true),
            ("home/system/logs/x.iso", false, false),
        ] {
            assert_eq!(excludes(&rules, path, is_directory), expected, "{path}");
        }
    }

    #[test]
    fn byte_order_mark_is_stripped() {
        let (rules, invalid) = exclusions("\u{feff}*.iso\n");
        assert!(invalid.is_empty());
        assert!(excludes(&rules, "home/disk.iso", false));
    }

    #[test]
    fn combined_rules_error_precedes_invalid_lines() {
        let large = format!("?{}", "a".repeat(500_000));
        let (rules, invalid) = exclusions(&format!("a{{b\n*.iso\n{large}\n"));
        assert_eq!(invalid.len(), 2);
        assert!(invalid[0].starts_with("all of the owner's rules are ignored: "), "{}", invalid[0]);
        assert_eq!(invalid[1], "a{b");
        assert!(!excludes(&rules, "home/disk.iso", false));
        assert!(excludes(&rules, "home/node_modules", true), "the defaults still apply");
    }

    #[test]
    fn owner_rules_cannot_exclude_system_directory() {
        let (rules, invalid) = exclusions("*\n");
        assert!(invalid.is_empty());
        assert!(excludes(&rules, "home/projects", true));
        assert!(
            !excludes(&rules, "home/system", true) && !excludes(&rules, "home/system/config.json", false)
        );
        assert!(!excludes(&rules, ".bashrc", false));
    }
}

//! File-backup exclusions: re-creatable directories and the owner's rules.

use std::path::{Path, PathBuf};

use svc_base::untrusted_text::truncate_printable;
use svc_files::save::Exclusions;

use super::owner::open_home;
use super::staging::STAGING_NAMES;
use crate::system::layout::Layout;

/// Re-creatable directories, excluded at any depth.
const DEFAULT_RULES: &[&str] = &["node_modules/", ".cache/", "__pycache__/"];
/// Rules file in the owner's `home` directory, in `.gitignore` syntax.
const RULES_FILE: &str = ".svcignore";
const MAX_RULES_BYTES: u64 = 64 << 10;
/// Maximum number of rule errors in the status.
const MAX_INVALID_RULES: usize = 5;

/// The owner's rules, or the error from reading them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct OwnerRules {
    text: String,
    error: Option<String>,
}

/// Reads the owner's rules, which are empty if the file is missing or unreadable.
pub(super) fn read_rules(layout: &Layout) -> OwnerRules {
    let read = || open_home(layout, &layout.home())?.read(Path::new(RULES_FILE), MAX_RULES_BYTES);
    match read() {
        Ok(text) => OwnerRules { text: String::from_utf8_lossy(&text).into_owned(), error: None },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => OwnerRules::default(),
        Err(error) => {
            OwnerRules { error: Some(format!("cannot read the file: {error}")), ..OwnerRules::default() }
        }
    }
}

/// Sets the excluded paths and rules. Returns the error if the owner's rules couldn't be read or used, followed by the
/// first invalid rules.
pub(super) fn set_rules(exclusions: &mut Exclusions, rules: &OwnerRules) -> Vec<String> {
    exclusions.paths = STAGING_NAMES.map(PathBuf::from).to_vec();
    let never_excluded = vec![PathBuf::from("home/system")];
    let mut invalid: Vec<String> = rules.error.iter().cloned().collect();
    invalid.extend(exclusions.set_rules(DEFAULT_RULES, &rules.text, Path::new("home"), never_excluded));
    invalid.truncate(MAX_INVALID_RULES);
    invalid.iter().map(|line| truncate_printable(line)).collect()
}

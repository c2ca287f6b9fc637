//! The exclusions of the file backup: directories that programs can re-create, and the owner's rules.

use std::path::{Path, PathBuf};

use svc_base::untrusted_text::truncate_printable;
use svc_files::save::Exclusions;

use super::owner::open_home;
use super::staging::STAGING_NAMES;
use crate::system::layout::Layout;

/// Directories that programs can re-create, excluded at any depth.
const DEFAULT_RULES: &[&str] = &["node_modules/", ".cache/", "__pycache__/"];
/// The file in the owner's `home` directory that contains the rules, in the syntax of `.gitignore`.
const RULES_FILE: &str = ".svcignore";
const MAX_RULES_BYTES: u64 = 64 << 10;
/// Maximum number of messages about the rules in the status.
const MAX_INVALID_RULES: usize = 5;

/// The text of the owner's rules, or the error if it could not be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct OwnerRules {
    text: String,
    error: Option<String>,
}

/// Reads the owner's rules. They are empty if the file does not exist or cannot be read.
pub(super) fn read_rules(layout: &Layout) -> OwnerRules {
    let read = || open_home(layout, &layout.home())?.read(Path::new(RULES_FILE), MAX_RULES_BYTES);
    match read() {
        Ok(text) => OwnerRules { text: String::from_utf8_lossy(&text).into_owned(), error: None },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => OwnerRules::default(),
        Err(error) => {
            OwnerRules { error: Some(format!("the file cannot be read: {error}")), ..OwnerRules::default() }
        }
    }
}

/// Sets the excluded paths and rules. Returns the error if none of the owner's rules could be read or used, and the
/// first invalid rules.
pub(super) fn set_rules(exclusions: &mut Exclusions, rules: &OwnerRules) -> Vec<String> {
    exclusions.paths = STAGING_NAMES.map(PathBuf::from).to_vec();
    let never_excluded = vec![PathBuf::from("home/system")];
    let mut invalid: Vec<String> = rules.error.iter().cloned().collect();
    invalid.extend(exclusions.set_rules(DEFAULT_RULES, &rules.text, Path::new("home"), never_excluded));
    invalid.truncate(MAX_INVALID_RULES);
    invalid.iter().map(|line| truncate_printable(line)).collect()
}

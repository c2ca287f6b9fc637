//! Checks that every applet command line quoted in a page or message exists, with its options.

use kit::quoted_commands::{self, Language};
use svc::applets::APPLETS;

use crate::assert_no_problems;
use crate::files::{ProjectFile, load_files};

/// Returns the number of checked command lines, and the quoted ones that do not exist. The changelog describes earlier
/// releases, so it is skipped.
fn check_commands(files: &[ProjectFile]) -> (usize, Vec<String>) {
    let is_quoting = |file: &&ProjectFile| {
        let is_page = file.path.ends_with(".md") && file.path != "CHANGELOG.md";
        is_page || file.path.starts_with("src/") && !file.path.ends_with("quoted_command_tests.rs")
    };
    let (mut checked, mut errors) = (0, Vec::new());
    for applet in APPLETS {
        let mut command = (applet.command)();
        command.build();
        for file in files.iter().filter(is_quoting) {
            let Some(language) = Language::of_file(&file.path) else { continue };
            let quoted = quoted_commands::check(&command, &file.text, language);
            checked += quoted.checked;
            errors.extend(quoted.errors.iter().map(|error| format!("{}: {error}", file.path)));
        }
    }
    (checked, errors)
}

#[test]
fn every_quoted_command_exists() {
    let (checked, errors) = check_commands(&load_files());
    assert_no_problems(&errors);
    assert!(checked > 250, "only {checked} commands were checked");
}

#[test]
fn unknown_option_of_applet_is_detected() {
    let page = ProjectFile::sample("docs/a.md", "`svc-update boot --fast`, `svc-update boot`");
    assert_eq!(check_commands(&[page]).1.len(), 1);
}

//! Checks the source against the repository's rules: allowed imports, forbidden content, required content.
//!
//! Each rule is a pure function of paths and texts, and a test shows that it detects a violation.

#[path = "conventions/dependencies.rs"]
mod dependencies;
#[path = "conventions/documentation.rs"]
mod documentation;
#[path = "conventions/files.rs"]
mod files;
#[path = "conventions/links.rs"]
mod links;
#[path = "conventions/rules.rs"]
mod rules;
#[path = "conventions/source.rs"]
mod source;
#[path = "conventions/specification.rs"]
mod specification;

use files::{ProjectFile, format_violation, load_files, root};

fn assert_no_violations(violations: &[String]) {
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

#[test]
fn imports_respect_the_architecture() {
    assert_no_violations(&dependencies::forbidden_imports(&load_files()));
}

#[test]
fn packages_depend_only_on_lower_layers() {
    assert_no_violations(&dependencies::forbidden_dependencies(&load_files()));
}

#[test]
fn packages_inherit_the_workspace_lints() {
    assert_no_violations(&dependencies::packages_without_lints(&load_files()));
}

#[test]
fn modules_in_a_package_have_no_cycle() {
    assert_no_violations(&dependencies::import_cycles(&load_files()));
}

#[test]
fn gateway_uses_no_extractors_of_axums_router() {
    assert_no_violations(&load_files().iter().flat_map(rules::router_extractors).collect::<Vec<_>>());
}

#[test]
fn no_unwrap_outside_tests() {
    assert_no_violations(&rules::find_unwraps(&load_files()));
}

#[test]
fn no_todo_marker_remains() {
    assert_no_violations(&load_files().iter().flat_map(rules::todo_markers).collect::<Vec<_>>());
}

#[test]
fn every_source_file_has_a_header() {
    assert_no_violations(&load_files().iter().filter_map(rules::missing_header).collect::<Vec<_>>());
}

#[test]
fn no_source_file_exceeds_line_limit() {
    assert_no_violations(&load_files().iter().filter_map(rules::oversized_file).collect::<Vec<_>>());
}

#[test]
fn migrations_are_numbered_without_gaps() {
    assert_no_violations(&rules::misnumbered_migrations(&load_files()));
}

#[test]
fn no_file_names_a_build_machine_path() {
    assert_no_violations(&load_files().iter().flat_map(rules::build_machine_paths).collect::<Vec<_>>());
}

#[test]
fn tools_do_not_depend_on_the_product() {
    assert_no_violations(&load_files().iter().flat_map(rules::product_dependencies).collect::<Vec<_>>());
}

#[test]
fn every_dependency_has_a_reason() {
    assert_no_violations(&documentation::unexplained_dependencies(&load_files()));
}

#[test]
fn every_link_between_pages_resolves() {
    assert_no_violations(&links::broken_links(&load_files()));
}

#[test]
fn every_path_that_a_page_names_exists() {
    assert_no_violations(&links::unknown_paths(&load_files(), |path| root().join(path).exists()));
}

#[test]
fn every_test_that_a_page_names_exists() {
    assert_no_violations(&documentation::unknown_tests(&load_files()));
}

#[test]
fn every_name_that_a_page_gives_for_a_file_exists() {
    assert_no_violations(&documentation::unknown_names(&load_files()));
}

#[test]
fn every_specification_item_has_a_row() {
    assert_no_violations(&specification::untraced_items(&load_files(), |path| root().join(path).exists()));
}

#[test]
fn every_directory_is_listed() {
    assert_no_violations(&rules::unlisted_directories(&load_files()));
}

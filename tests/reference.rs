//! Checks the generated sections of the documentation: tables built from declarations in the code, and the table of
//! stores, which is built by probing them.
//!
//! A generated section is between `<!-- generated: NAME -->` and `<!-- end -->` on a page in `docs`; the text around it
//! is written by hand. With [`REWRITE_VAR`], the test rewrites the pages; otherwise, it compares them.

#[path = "reference/api.rs"]
mod api;
#[path = "reference/code_tables.rs"]
mod code_tables;
#[path = "reference/commands.rs"]
mod commands;
#[path = "conventions/files.rs"]
mod files;
#[path = "reference/quoted_commands.rs"]
mod quoted_commands;
#[expect(dead_code, reason = "the convention checks use the rest")]
#[path = "conventions/source.rs"]
mod source;
#[path = "reference/stores.rs"]
mod stores;
#[path = "reference/variables.rs"]
mod variables;

use std::fs;

use files::{ProjectFile, format_violation, load_files, root};

/// Variable set by `cargo xtask docs`.
const REWRITE_VAR: &str = "SVC_WRITE_DOCS";

const BEGIN_PREFIX: &str = "<!-- generated: ";
const BEGIN_SUFFIX: &str = " -->";
const END_MARKER: &str = "<!-- end -->";

/// Generated text, and the name in its marker.
pub struct GeneratedSection {
    pub name: String,
    pub text: String,
}

impl GeneratedSection {
    pub fn new(name: impl Into<String>, text: String) -> Self {
        Self { name: name.into(), text }
    }
}

fn assert_no_problems(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

fn generated_sections() -> Vec<GeneratedSection> {
    let mut sections = variables::generated_sections();
    sections.extend([code_tables::errors(), code_tables::exit_codes(), code_tables::metrics()]);
    sections.extend(api::generated_sections());
    sections.extend(commands::generated_sections());
    sections
}

/// Renders a Markdown table.
pub fn table<R: AsRef<[String]>>(head: &[&str], rows: impl IntoIterator<Item = R>) -> String {
    let mut text = format!("| {} |\n{}|\n", head.join(" | "), "|---".repeat(head.len()));
    for row in rows {
        let cells: Vec<_> = row.as_ref().iter().map(|cell| cell.replace('|', "\\|")).collect();
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    }
    text
}

/// Returns the page with its generated sections replaced, and their names.
///
/// # Errors
/// Returns a message with the line of a marker that has no end or an unknown name.
fn fill_page(page: &ProjectFile, sections: &[GeneratedSection]) -> Result<(String, Vec<String>), String> {
    let (mut text, mut names) = (String::new(), Vec::new());
    let mut lines = page.text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        text.push_str(line);
        text.push('\n');
        let Some(name) = line.strip_prefix(BEGIN_PREFIX).and_then(|rest| rest.strip_suffix(BEGIN_SUFFIX))
        else {
            continue;
        };
        let Some(section) = sections.iter().find(|section| section.name == name) else {
            return Err(format_violation(&page.path, number + 1, format!("nothing generates {name}")));
        };
        if !lines.any(|(_, line)| line == END_MARKER) {
            return Err(format_violation(&page.path, number + 1, format!("no {END_MARKER} after this line")));
        }
        text.push_str(&format!("\n{}\n\n{END_MARKER}\n", section.text.trim()));
        names.push(name.to_owned());
    }
    Ok((text, names))
}

/// Passes pages whose generated sections differ from the code to `rewrite`, which returns whether it rewrote the page.
/// Finds the pages that it did not rewrite, invalid markers, and generated sections that are not on exactly one page.
fn rewrite_or_find_problems(
    pages: &[ProjectFile],
    sections: &[GeneratedSection],
    mut rewrite: impl FnMut(&ProjectFile, &str) -> bool,
) -> Vec<String> {
    let (mut problems, mut placed) = (Vec::new(), Vec::new());
    for page in pages.iter().filter(|page| page.path.starts_with("docs/") && page.path.ends_with(".md")) {
        match fill_page(page, sections) {
            Ok((text, names)) => {
                placed.extend(names);
                if text != page.text && !rewrite(page, &text) {
                    problems.push(format!("{} is out of date: run `cargo xtask docs`", page.path));
                }
            }
            Err(message) => problems.push(message),
        }
    }
    for section in sections {
        let count = placed.iter().filter(|name| **name == section.name).count();
        if count != 1 {
            problems.push(format!(
                "`{BEGIN_PREFIX}{}{BEGIN_SUFFIX}` must be on exactly one page, not on {count}",
                section.name
            ));
        }
    }
    problems
}

/// Asserts that the generated sections of the pages are current, or rewrites them if [`REWRITE_VAR`] is set.
fn check_or_rewrite(pages: &[ProjectFile], sections: &[GeneratedSection]) {
    let is_rewriting = std::env::var_os(REWRITE_VAR).is_some();
    let rewrite = |page: &ProjectFile, text: &str| {
        if is_rewriting {
            fs::write(root().join(&page.path), text).expect("the page must be writable");
            println!("wrote {}", page.path);
        }
        is_rewriting
    };
    assert_no_problems(&rewrite_or_find_problems(pages, sections, rewrite));
}

#[test]
fn generated_sections_of_pages_are_current() {
    let pages = load_files();
    let mut sections = generated_sections();
    sections.push(stores::read_current_table(&pages));
    check_or_rewrite(&pages, &sections);
}

/// A separate test, because it starts and probes the stores.
#[test]
fn stores_table_is_current() {
    let Some(table) = stores::probe_all() else { return };
    let pages = load_files();
    let page =
        pages.iter().find(|page| page.path == "docs/operating/stores.md").expect("the page must exist");
    check_or_rewrite(std::slice::from_ref(page), &[table]);
}

#[test]
fn outdated_page_is_detected() {
    let section = || GeneratedSection::new("a", "new\n".to_owned());
    let problems = |text: &str, sections: &[GeneratedSection]| {
        rewrite_or_find_problems(&[ProjectFile::sample("docs/p.md", text)], sections, |_, _| false).concat()
    };
    let current = "# P\n<!-- generated: a -->\n\nnew\n\n<!-- end -->\nafter\n";
    assert_eq!(problems(current, &[section()]), "");
    assert!(problems(&current.replace("new", "old"), &[section()]).contains("docs/p.md is out of date"));
    assert!(problems(current, &[]).contains("docs/p.md:2: nothing generates a"));
    assert!(
        problems(&current.replace(END_MARKER, ""), &[section()]).contains("docs/p.md:2: no <!-- end -->")
    );
    assert!(problems("# P\n", &[section()]).contains("must be on exactly one page, not on 0"));
}

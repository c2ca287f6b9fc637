//! The table of codes in docs/reference/errors.md: each code with its status, its title and a remedy.

use std::collections::BTreeMap;

use svc::http::problem::Code;

const HEAD: &str = "| `code` | status | meaning | what to do |";

/// Errors in the table.
fn wrong(page: &str) -> Vec<String> {
    let rows = page.lines().skip_while(|line| *line != HEAD).skip(2).take_while(|line| line.starts_with('|'));
    let mut documented: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut wrong = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        if documented.insert(cells[0].trim_matches('`'), cells[1..].to_vec()).is_some() {
            wrong.push(format!("twice: {row}"));
        }
    }
    for code in Code::ALL {
        let status = code.status().as_u16().to_string();
        match documented.remove(code.as_str()).as_deref() {
            Some([number, title, todo])
                if *number == status && *title == code.title() && !todo.is_empty() => {}
            other => wrong.push(format!("{}: {status} {:?}, not {other:?}", code.as_str(), code.title())),
        }
    }
    wrong.extend(documented.keys().map(|code| format!("{code} is not a code")));
    wrong
}

fn errors_page() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/errors.md")).unwrap()
}

#[test]
fn errors_page_lists_every_code() {
    let wrong = wrong(&errors_page());
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn wrong_table_is_detected() {
    let page = errors_page();
    let row = page.lines().find(|line| line.starts_with("| `gone`")).unwrap();
    for other in [
        String::new(),
        row.replace("410", "404"),
        row.replace("No longer", "Always"),
        row.replace("`gone`", "`goner`"),
        format!("{row}\n{row}"),
    ] {
        assert!(!wrong(&page.replace(row, &other)).is_empty(), "{other}");
    }
}

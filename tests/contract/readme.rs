//! The table of codes in docs/reference/errors.md: each with its status, its title and what to do about it.

use std::collections::BTreeMap;

use svc::http::problem::Code;

const HEAD: &str = "| `code` | status | meaning | what to do |";

/// What of the table is not so.
fn wrong(readme: &str) -> Vec<String> {
    let rows =
        readme.lines().skip_while(|line| *line != HEAD).skip(2).take_while(|line| line.starts_with('|'));
    let mut told: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut wrong = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        if told.insert(cells[0].trim_matches('`'), cells[1..].to_vec()).is_some() {
            wrong.push(format!("twice: {row}"));
        }
    }
    for code in Code::ALL {
        let status = code.status().as_u16().to_string();
        match told.remove(code.as_str()).as_deref() {
            Some([number, title, todo])
                if *number == status && *title == code.title() && !todo.is_empty() => {}
            other => wrong.push(format!("{}: {status} {:?}, not {other:?}", code.as_str(), code.title())),
        }
    }
    wrong.extend(told.keys().map(|code| format!("{code} is no code")));
    wrong
}

fn readme() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/errors.md")).unwrap()
}

#[test]
fn the_readme_tells_every_code() {
    let wrong = wrong(&readme());
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_table_that_is_not_so_is_noticed() {
    let readme = readme();
    let row = readme.lines().find(|line| line.starts_with("| `gone`")).unwrap();
    for other in [
        String::new(),
        row.replace("410", "404"),
        row.replace("not known", "known"),
        row.replace("`gone`", "`goner`"),
        format!("{row}\n{row}"),
    ] {
        assert!(!wrong(&readme.replace(row, &other)).is_empty(), "{other}");
    }
}

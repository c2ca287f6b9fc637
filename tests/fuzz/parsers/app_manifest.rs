//! An app's `svc.json`, which an owner's agents write: a registered app has only permitted names.

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use svc::gateway::bridge_fuzzing::read_manifest;

use super::Target;

pub fn target() -> Target {
    Target { name: "app-manifest", valid: manifests().boxed(), check_any, check_valid, cases: 1000 }
}

const TYPES: [&str; 6] = ["text", "integer", "numeric", "timestamptz", "jsonb", "uuid"];

fn manifests() -> impl Strategy<Value = Vec<u8>> {
    let column = ("c_[a-z0-9]{1,8}", prop::sample::select(&TYPES[..]));
    let table = ("t_[a-z0-9]{1,8}", prop::collection::vec(column, 1..5), any::<bool>());
    let tables = prop::collection::vec(table, 0..4).prop_map(|tables| -> Map<String, Value> {
        let table_entries = tables.into_iter().map(|(name, columns, is_indexed)| {
            let first_column = columns[0].0.clone();
            let indexes = if is_indexed { json!([[first_column]]) } else { json!([]) };
            let columns: Map<String, Value> =
                columns.into_iter().map(|(name, kind)| (name, kind.into())).collect();
            (name, json!({ "columns": columns, "indexes": indexes }))
        });
        table_entries.collect()
    });
    ("\\PC{1,20}", "[a-z][a-z0-9-]{0,20}", tables).prop_map(|(name, slug, tables)| {
        let manifest = json!({ "name": name, "slug": slug, "version": "1.0", "runtime": "vite",
            "build": { "output": "dist/web" }, "icon": "icon.svg", "storage": { "tables": tables } });
        manifest.to_string().into_bytes()
    })
}

/// Checks that a stored manifest parses back to the same value and has no path outside the app, and that each SQL text
/// generated from it is a single statement with only permitted names.
fn check_any(bytes: &[u8]) -> Result<(), String> {
    let (stored, statements) = match read_manifest(bytes) {
        Ok(read) => read,
        Err(errors) if errors.is_empty() => return Err("rejected without a reason".to_owned()),
        Err(_) => return Ok(()),
    };
    match read_manifest(stored.to_string().as_bytes()) {
        Ok(reparsed) if reparsed == (stored.clone(), statements.clone()) => {}
        other => return Err(format!("{stored} is reparsed as {other:?}")),
    }
    for path in [&stored["build"]["output"], &stored["icon"]] {
        let is_outside = |path: &str| path.starts_with('/') || path.split('/').any(|part| part == "..");
        if path.as_str().is_some_and(is_outside) {
            return Err(format!("{path} is outside the app's directory"));
        }
    }
    for statement in &statements {
        // Every second part is a name: no statement contains other double quotes.
        let names = statement.split('"').skip(1).step_by(2);
        let is_name = |name: &str| {
            (1..=63).contains(&name.len()) && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        if let Some(name) = names.into_iter().find(|name| !is_name(name)) {
            return Err(format!("{name:?} is not a valid name, in {statement}"));
        }
        if statement.contains([';', '\\', '\0']) || statement.contains("--") {
            return Err(format!("more than one statement: {statement}"));
        }
    }
    Ok(())
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let expected: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let (stored, statements) = read_manifest(bytes).map_err(|errors| errors.join("; "))?;
    let table_count = expected["storage"]["tables"].as_object().map_or(0, Map::len);
    let is_same =
        ["name", "slug", "version", "runtime", "icon"].iter().all(|field| stored[field] == expected[field]);
    let created_count = statements.iter().filter(|sql| sql.starts_with("CREATE TABLE ")).count();
    if is_same && created_count == table_count { Ok(()) } else { Err(format!("parsed as {stored}")) }
}

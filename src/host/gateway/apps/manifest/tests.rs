//! Tests for valid manifests, and for the errors that invalid ones report.

use super::*;

fn notes() -> Value {
    json!({
        "name": "Notes", "slug": "my-notes", "version": "1.0.0", "runtime": "vite",
        "build": { "command": "vite build", "output": "dist" }, "icon": "icon.svg",
        "storage": { "tables": { "notes": {
            "columns": { "title": "text", "size": "bigint", "meta": "jsonb" },
            "indexes": ["title", ["size", "title"], ["meta"]], "unique": [["title"]],
        } } },
    })
}

fn errors_of(change: impl FnOnce(&mut Value)) -> String {
    let mut value = notes();
    change(&mut value);
    Manifest::from_value(&value).expect_err("the manifest should be rejected").to_string()
}

#[test]
fn to_value_round_trips() {
    let manifest = Manifest::from_value(&notes()).unwrap();
    assert_eq!(Manifest::from_value(&manifest.to_value()).unwrap(), manifest);
    let names: Vec<_> = manifest.tables[0].columns.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["id", "title", "size", "meta", "created_at", "updated_at"]);
}

#[test]
fn equals_ignoring_order_detects_other_changes() {
    let declared = Manifest::from_value(&notes()).unwrap();
    let mut value = notes();
    value["storage"]["tables"]["notes"]["columns"] =
        json!({ "meta": "jsonb", "size": "bigint", "title": "text" });
    let reordered = Manifest::from_value(&value).unwrap();
    assert_ne!(reordered, declared);
    assert!(reordered.equals_ignoring_order(&declared));
    value["storage"]["tables"]["notes"]["columns"]["size"] = json!("integer");
    assert!(!Manifest::from_value(&value).unwrap().equals_ignoring_order(&declared));
}

#[test]
fn connect_is_optional_and_validated() {
    assert_eq!(Manifest::from_value(&notes()).unwrap().connect, []);
    let mut value = notes();
    value["connect"] = json!(["https://api.example.com/", "wss://b.example"]);
    let manifest = Manifest::from_value(&value).unwrap();
    assert_eq!(manifest.to_value()["connect"], json!(["https://api.example.com", "wss://b.example"]));
    assert_eq!(Manifest::from_value(&manifest.to_value()).unwrap(), manifest);
    for bad in [json!("https://a.example"), json!(["*"]), json!([1]), json!(vec!["https://a.example"; 21])] {
        let text = errors_of(|m| m["connect"] = bad.clone());
        assert!(text.contains("connect"), "{text}");
    }
}

#[test]
fn unknown_type_is_reported() {
    let text = errors_of(|m| m["storage"]["tables"]["notes"]["columns"]["title"] = json!("txt"));
    assert!(text.contains("columns.title") && text.contains("\"txt\""), "{text}");
}

#[test]
fn all_errors_are_reported_at_once() {
    let text = errors_of(|m| {
        m["slug"] = json!("My_Notes");
        m["runtime"] = json!("php");
        m["build"]["output"] = json!("../..");
        m["icon"] = json!("/etc/passwd");
        m["storage"]["tables"]["notes"]["indexes"] = json!(["nope"]);
        m["storage"]["tables"]["a\"b"] = json!({ "columns": {} });
        m["storage"]["tables"]["notes"]["colums"] = json!({});
    });
    for part in ["slug", "php", "build.output", "icon", "nope", "a\"b", "colums"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn wrong_type_for_built_in_column_is_rejected() {
    let text = errors_of(|m| m["storage"]["tables"]["notes"]["columns"]["id"] = json!("text"));
    assert!(text.contains("built in"), "{text}");
    let mut same = notes();
    same["storage"]["tables"]["notes"]["columns"]["created_at"] = json!("timestamptz");
    assert_eq!(Manifest::from_value(&same).unwrap().tables[0].columns.len(), 6);
}

#[test]
fn invalid_column_list_is_rejected() {
    for list in [json!(["title", 5]), json!([5]), json!([]), json!(vec!["title"; 33]), json!(5)] {
        let text = errors_of(|m| m["storage"]["tables"]["notes"]["indexes"] = json!([list]));
        assert!(text.contains("notes.indexes: each entry must be"), "{text}");
    }
}

#[test]
fn duplicate_column_lists_are_dropped() {
    let mut value = notes();
    value["storage"]["tables"]["notes"]["indexes"] = json!(["title", ["title"], ["size", "title"], "title"]);
    let manifest = Manifest::from_value(&value).unwrap();
    let indexes = &manifest.to_value()["storage"]["tables"]["notes"]["indexes"];
    assert_eq!(*indexes, json!([["title"], ["size", "title"]]));
}

#[test]
fn manifest_without_storage_is_valid() {
    let mut bare = notes();
    bare.as_object_mut().unwrap().remove("storage");
    assert!(Manifest::from_value(&bare).unwrap().tables.is_empty());
}

#[test]
fn parse_rejects_invalid_json() {
    assert!(Manifest::parse(b"{").is_err());
}

//! The untrusted parts of an owner's archive that describe its content: the dump's listing and the manifest.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use svc::host::snapshots::archive::ArchiveEntry;
use svc::host::snapshots::restore::import_fuzzing::{compare_manifest, read_listing};
use svc::host::system::tar_reader::EntryKind;

use super::Target;

pub fn listing() -> Target {
    Target {
        name: "import-listing",
        valid: listings().boxed(),
        check_any: check_any_listing,
        check_valid: check_valid_listing,
        cases: 1500,
    }
}

/// The kinds of entries that may be loaded, each followed by a space.
const LOADABLE_KINDS: [&str; 13] = [
    "CHECK CONSTRAINT ",
    "FK CONSTRAINT ",
    "CONSTRAINT ",
    "DEFAULT ",
    "DOMAIN ",
    "INDEX ",
    "SCHEMA ",
    "SEQUENCE ",
    "STATISTICS ",
    "TABLE ",
    "TYPE ",
    "COMMENT ",
    "TABLE DATA ",
];

fn listings() -> impl Strategy<Value = Vec<u8>> {
    let kind =
        prop::sample::select(&["TABLE", "TABLE DATA", "SEQUENCE", "INDEX", "FK CONSTRAINT", "ACL"][..]);
    let entries = prop::collection::vec((kind, "[a-z ]{1,12}"), 0..6);
    (entries, any::<bool>(), any::<bool>()).prop_map(|(entries, has_extension, has_outbox)| {
        let mut lines = vec![";".to_owned(), "; Archive created at 2026-11-23".to_owned()];
        if has_extension {
            lines.push("2; 3079 16390 EXTENSION - citext ".to_owned());
            lines.push("3; 0 0 COMMENT - EXTENSION citext ".to_owned());
        }
        if has_outbox {
            lines.push("4; 1255 16400 FUNCTION svc note_change() postgres".to_owned());
            lines.push("5; 2620 16401 TRIGGER app_notes notes svc_changes_insert postgres".to_owned());
        }
        let entry = |(index, (kind, name)): (usize, &(&str, String))| {
            format!("{}; 1259 {} {kind} app_notes {name} app_notes", 10 + index, 16_386 + index)
        };
        lines.extend(entries.iter().enumerate().map(entry));
        (lines.join("\n") + "\n").into_bytes()
    })
}

/// Checks that every number passed to `pg_restore` identifies only entries that may be loaded.
fn check_any_listing(bytes: &[u8]) -> Result<(), String> {
    let Ok(listing) = std::str::from_utf8(bytes) else { return Ok(()) };
    let (list, extensions) = match read_listing(listing) {
        Ok(read) => read,
        Err(reason) => return check_error_text(&reason),
    };
    for line in list.lines() {
        let id = line.strip_suffix(';').filter(|id| id.parse::<u32>().is_ok());
        let id = id.ok_or_else(|| format!("pg_restore would receive {line:?}"))?;
        let has_this_number = |line: &&str| {
            let number = line.split_once("; ").and_then(|(number, _)| number.parse::<u32>().ok());
            number.is_some() && number == id.parse().ok()
        };
        for entry in listing.lines().filter(has_this_number) {
            let kind_and_name = entry.splitn(4, ' ').nth(3).unwrap_or_default();
            if !LOADABLE_KINDS.iter().any(|kind| kind_and_name.starts_with(kind))
                || kind_and_name.starts_with("DEFAULT ACL ")
            {
                return Err(format!("{entry:?} would be loaded"));
            }
        }
    }
    let allowed_extensions = ["citext", "hstore", "pg_trgm", "pgcrypto", "uuid-ossp"];
    match extensions.iter().find(|name| !allowed_extensions.contains(&name.as_str())) {
        Some(name) => Err(format!("the extension {name} would be created")),
        None => Ok(()),
    }
}

fn check_error_text(text: &str) -> Result<(), String> {
    let is_unsafe = |c: char| c.is_control() && c != '\n';
    if text.contains(is_unsafe) || text.len() > 16_384 {
        return Err(format!(
            "the error is too long ({} bytes) or contains control characters: {text:?}",
            text.len()
        ));
    }
    Ok(())
}

fn check_valid_listing(bytes: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let (list, extensions) = read_listing(text)?;
    let expected = text.lines().filter(|line| line.contains(" app_notes ") && !line.contains(" ACL "));
    let expected = expected.filter(|line| !line.contains(" TRIGGER ")).count();
    let has_extension = text.contains("EXTENSION - citext");
    if list.lines().count() == expected && has_extension != extensions.is_empty() {
        Ok(())
    } else {
        Err(format!("{list:?} with {extensions:?} would be loaded"))
    }
}

pub fn manifest() -> Target {
    Target {
        name: "import-manifest",
        valid: manifests().boxed(),
        check_any: check_any_manifest,
        check_valid: check_valid_manifest,
        cases: 1500,
    }
}

/// The archive's entries before its manifest.
static ARCHIVE_ENTRIES: LazyLock<Vec<ArchiveEntry>> = LazyLock::new(|| {
    let entry = |path: &str, kind, size_bytes, sha256: Option<String>| ArchiveEntry {
        path: path.to_owned(),
        kind,
        size_bytes,
        sha256,
    };
    vec![
        entry("export.json", EntryKind::File, 3, Some("ab".repeat(32))),
        entry("home", EntryKind::Directory, 0, None),
        entry("home/a%25\"b", EntryKind::Symlink, 7, Some("cd".repeat(32))),
    ]
});

fn manifests() -> impl Strategy<Value = Vec<u8>> {
    (prop::collection::vec("\\PC{0,20}", 0..3), any::<bool>()).prop_map(|(omitted, is_pretty)| {
        let manifest =
            json!({ "version": 1, "entries": *ARCHIVE_ENTRIES, "leftOut": omitted, "later": { "entries": 1 } });
        if is_pretty { format!("{manifest:#}").into_bytes() } else { manifest.to_string().into_bytes() }
    })
}

/// Checks that a manifest is accepted only if it lists exactly the archive's entries.
fn check_any_manifest(bytes: &[u8]) -> Result<(), String> {
    match compare_manifest(bytes, &ARCHIVE_ENTRIES) {
        Err(reason) => check_error_text(&reason),
        Ok(()) => {
            // Ignored members may be JSON that this test's parser rejects, such as an unpaired surrogate.
            let Ok(manifest) = serde_json::from_slice::<Value>(bytes) else { return Ok(()) };
            let listed = serde_json::from_value::<Vec<ArchiveEntry>>(manifest["entries"].clone());
            match listed {
                Ok(listed) if listed == *ARCHIVE_ENTRIES => Ok(()),
                other => Err(format!("{other:?} was accepted as the archive's entries")),
            }
        }
    }
}

fn check_valid_manifest(bytes: &[u8]) -> Result<(), String> {
    compare_manifest(bytes, &ARCHIVE_ENTRIES)?;
    match compare_manifest(bytes, &ARCHIVE_ENTRIES[..2]) {
        Err(_) => Ok(()),
        Ok(()) => Err("a manifest with an additional entry was accepted".to_owned()),
    }
}

//! Selects which entries of an archive's dump to load, based on `pg_restore -l` output.
//!
//! An archive may contain tables and their dependents, but no code that a later session, in particular a superuser
//! session, would run unknowingly. The listing isn't trusted: this check only rejects bad dumps early, with a clear
//! message. `catalog.rs` inspects the objects actually created afterwards.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use crate::system::tar_reader::quote_path;

/// Extensions that only add types, operators and functions, with no access to files, programs or other servers. The
/// superuser creates those required by an archive.
const ALLOWED_EXTENSIONS: [&str; 5] = ["citext", "hstore", "pg_trgm", "pgcrypto", "uuid-ossp"];

/// Entry kinds to load.
const LOADED_KINDS: [&str; 16] = [
    "CHECK CONSTRAINT",
    "FK CONSTRAINT",
    "CONSTRAINT",
    "DEFAULT",
    "DOMAIN",
    "INDEX ATTACH",
    "INDEX",
    "SCHEMA",
    "SEQUENCE OWNED BY",
    "SEQUENCE SET",
    "SEQUENCE",
    "STATISTICS",
    "TABLE ATTACH",
    "TABLE DATA",
    "TABLE",
    "TYPE",
];

/// Entry kinds to skip: ACLs. The gateway grants privileges to installed apps.
const SKIPPED_KINDS: [&str; 2] = ["DEFAULT ACL", "ACL"];

/// Object kinds whose comments are loaded. Comments on others, such as extensions and schemas, are skipped because only
/// an object's owner can set them, and the import role doesn't own all of those objects.
const COMMENT_TARGETS: [&str; 7] = ["COLUMN", "CONSTRAINT", "DOMAIN", "INDEX", "SEQUENCE", "TABLE", "TYPE"];

/// Change outbox functions and triggers, skipped because the gateway recreates them.
const OUTBOX_FUNCTIONS: [&str; 2] = ["svc note_change() ", "svc note_truncate() "];
const OUTBOX_TRIGGER: &str = " svc_changes_";

/// Entries to load.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Input for `pg_restore -L`, one line per entry.
    pub list: String,
    pub extensions: BTreeSet<String>,
}

/// Errors from selecting entries, for which the dump is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TocError {
    #[error(
        "the database contains {entry}, but an archive may contain only tables, sequences, indexes, \
         constraints, types, domains and some extensions\n  next: drop it before the export, and recreate it \
         after the import"
    )]
    NotAllowed { entry: String },
    #[error("the database needs the extension {name}, which an import does not create")]
    UnsupportedExtension { name: String },
    #[error("invalid line in the dump listing: {line}")]
    InvalidLine { line: String },
    #[error("duplicate entry id in the dump: {id}")]
    DuplicateId { id: u32 },
}

/// Selects entries from a listing.
///
/// # Errors
/// [`TocError`] if an entry is neither loaded nor skipped, an extension isn't in [`ALLOWED_EXTENSIONS`], a line is
/// malformed, or an id is duplicated.
pub fn select_entries(listing: &str) -> Result<Selection, TocError> {
    let mut selection = Selection::default();
    let mut ids = HashSet::new();
    for line in listing.lines().filter(|line| !line.is_empty() && !line.starts_with(';')) {
        let (id, entry) = parse_line(line).ok_or_else(|| TocError::InvalidLine { line: quote_text(line) })?;
        // `pg_restore -L` loads one entry per id. With a duplicate, it might load the one we skip.
        if !ids.insert(id) {
            return Err(TocError::DuplicateId { id });
        }
        match classify(entry)? {
            EntryAction::Load => selection.list.push_str(&format!("{id};\n")),
            EntryAction::Skip => {}
            EntryAction::Extension(name) => {
                selection.extensions.insert(name);
            }
        }
    }
    Ok(selection)
}

/// Parses `12; 1259 16385 TABLE app_notes notes postgres` into the id and the text after the two oids.
fn parse_line(line: &str) -> Option<(u32, &str)> {
    let (id, rest) = line.split_once("; ")?;
    let mut parts = rest.splitn(3, ' ');
    let (catalog, object, entry) = (parts.next()?, parts.next()?, parts.next()?);
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    (is_number(catalog) && is_number(object)).then_some((id.parse().ok()?, entry))
}

enum EntryAction {
    Load,
    Skip,
    Extension(String),
}

fn classify(entry: &str) -> Result<EntryAction, TocError> {
    let after_kind = |kind: &str| entry.strip_prefix(kind).and_then(|rest| rest.strip_prefix(' '));
    if let Some(extension) = after_kind("EXTENSION") {
        let name = extension.trim_start_matches("- ").trim();
        return match ALLOWED_EXTENSIONS.contains(&name) {
            true => Ok(EntryAction::Extension(name.to_owned())),
            false => Err(TocError::UnsupportedExtension { name: quote_text(name) }),
        };
    }
    if let Some(target) = after_kind("COMMENT") {
        // For example `COMMENT app_notes TABLE notes postgres`. Comments are lost if the schema name contains a space.
        let mut words = target.split(' ');
        let is_loaded = words.nth(1).is_some_and(|kind| COMMENT_TARGETS.contains(&kind));
        return Ok(if is_loaded { EntryAction::Load } else { EntryAction::Skip });
    }
    let is_public_schema = after_kind("SCHEMA").is_some_and(|schema| schema.starts_with("- public "));
    let is_outbox = after_kind("FUNCTION")
        .is_some_and(|function| OUTBOX_FUNCTIONS.iter().any(|name| function.starts_with(name)))
        || after_kind("TRIGGER").is_some_and(|trigger| trigger.contains(OUTBOX_TRIGGER));
    if is_public_schema || is_outbox || SKIPPED_KINDS.iter().any(|kind| after_kind(kind).is_some()) {
        return Ok(EntryAction::Skip);
    }
    if LOADED_KINDS.iter().any(|kind| after_kind(kind).is_some()) {
        return Ok(EntryAction::Load);
    }
    Err(TocError::NotAllowed { entry: quote_text(entry) })
}

fn quote_text(text: &str) -> String {
    quote_path(Path::new(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn select_entries_includes_tables_and_omits_privileges() {
        let listing = ";\n; Archive created at 2026-11-23\n;     TOC Entries: 12\n;\n\
            6; 2615 16385 SCHEMA - app_notes postgres\n\
            5; 2615 2200 SCHEMA - public pg_database_owner\n\
            2; 3079 16390 EXTENSION - citext \n\
            3400; 0 0 COMMENT - EXTENSION citext \n\
            216; 1259 16386 TABLE app_notes my notes app_notes\n\
            3401; 0 0 COMMENT app_notes TABLE notes postgres\n\
            3402; 0 0 ACL app_notes TABLE notes postgres\n\
            230; 1255 16400 FUNCTION svc note_change() postgres\n\
            3390; 0 16386 TABLE DATA app_notes notes app_notes\n\
            3391; 2620 16401 TRIGGER app_notes notes svc_changes_insert postgres\n\
            3237; 2606 16391 FK CONSTRAINT app_notes notes notes_fkey app_notes\n";
        let selection = select_entries(listing).unwrap();
        assert_eq!(selection.list, "6;\n216;\n3401;\n3390;\n3237;\n");
        assert_eq!(selection.extensions, BTreeSet::from(["citext".to_owned()]));
    }

    #[test]
    fn select_entries_refuses_code_and_invalid_lines() {
        for entry in [
            "1255 16400 FUNCTION app_notes f(integer) app_notes",
            "1255 16400 FUNCTION svc note_other() postgres",
            "2620 16400 TRIGGER app_notes notes mine postgres",
            "3466 16400 EVENT TRIGGER - mine postgres",
            "1259 16400 VIEW app_notes v postgres",
            "1259 16400 MATERIALIZED VIEW app_notes v postgres",
            "2618 16400 RULE app_notes notes r postgres",
            "3256 16400 POLICY app_notes notes p postgres",
            "3079 16400 EXTENSION - file_fdw ",
            "3079 16400 EXTENSION - citext2 ",
            "2613 16400 BLOB - 16400 postgres",
            "6104 16400 PUBLICATION - p postgres",
            "2617 16400 OPERATOR app_notes + postgres",
            "826 16400 TABLESPACE - t postgres",
        ] {
            assert!(select_entries(&format!("7; {entry}\n")).is_err(), "{entry}");
        }
        let duplicate = "7; 1259 16386 TABLE a b c\n7; 1255 16400 FUNCTION svc note_change() postgres\n";
        assert_eq!(select_entries(duplicate), Err(TocError::DuplicateId { id: 7 }));
        for line in ["7; TABLE", "x; 1 2 TABLE a b c", "no entry", "7; 1 x TABLE a b c"] {
            assert!(matches!(select_entries(line), Err(TocError::InvalidLine { .. })), "{line}");
        }
        let message = select_entries("7; 1 2 VIEW a \x1b[2J b\n").unwrap_err().to_string();
        assert!(!message.contains('\x1b'), "{message}");
    }
}

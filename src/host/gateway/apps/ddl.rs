//! What registering a manifest has to do to a schema, worked out from what is there: additions only.
//!
//! Pure: no value enters the SQL, and names come from checked [`Name`]s alone. What a manifest asks and is not done is
//! said in words; nothing is ever dropped or rewritten.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use super::column::{Column, ColumnType, Origin};
use super::manifest::Table;
use super::name::Name;

/// What a schema holds: its tables with their columns' catalog types, and its indexes' names.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Found {
    pub tables: BTreeMap<String, BTreeMap<String, String>>,
    pub indexes: BTreeSet<String>,
}

/// One statement to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Fails the registration when it fails.
    Needed(String),
    /// Rows that are there may forbid it; then it is left, and `otherwise` is said.
    IfRowsAllow { sql: String, otherwise: String },
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Registration {
    pub changes: Vec<Change>,
    pub not_done: Vec<String>,
    /// The tables as they will be: a column that already had another type keeps it.
    pub tables: Vec<Table>,
}

/// Plans the registration of `wanted` in `schema`, whose role is named as the schema is.
pub fn plan(schema: &Name, wanted: &[Table], found: &Found) -> Registration {
    let mut planned = Registration::default();
    for table in wanted {
        planned.table(schema, table, found);
    }
    for (name, columns) in &found.tables {
        match wanted.iter().find(|table| table.name.as_str() == name) {
            None => planned.not_done.push(format!("table {name} is no longer declared; it stays as it is")),
            Some(table) => {
                let undeclared = columns.keys().filter(|column| table.column(column).is_none());
                planned.not_done.extend(
                    undeclared.map(|c| format!("column {name}.{c} is no longer declared; it stays as it is")),
                );
            }
        }
    }
    planned
}

/// The statements that register `wanted` in an empty schema.
#[cfg(feature = "fuzzing")]
pub fn registration_sql(schema: &Name, wanted: &[Table]) -> Vec<String> {
    let text = |change| match change {
        Change::Needed(sql) | Change::IfRowsAllow { sql, .. } => sql,
    };
    plan(schema, wanted, &Found::default()).changes.into_iter().map(text).collect()
}

impl Registration {
    fn table(&mut self, schema: &Name, table: &Table, found: &Found) {
        let place = format!("{}.{}", schema.quoted(), table.name.quoted());
        match found.tables.get(table.name.as_str()) {
            None => {
                let columns: Vec<String> = table.columns.iter().map(definition).collect();
                self.need(format!("CREATE TABLE {place} ({})", columns.join(", ")));
                self.tables.push(table.clone());
            }
            Some(there) => self.existing(&place, table, there),
        }
        self.need(format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {place} TO {}", schema.quoted()));
        for columns in &table.indexes {
            let name = index_name("ix", table, columns);
            let method = if gin(table, columns) { "gin" } else { "btree" };
            if !found.indexes.contains(&name) {
                self.need(format!("CREATE INDEX \"{name}\" ON {place} USING {method} ({})", list(columns)));
            }
        }
        for columns in &table.unique {
            let name = index_name("uq", table, columns);
            if !found.indexes.contains(&name) {
                let sql = format!("CREATE UNIQUE INDEX \"{name}\" ON {place} ({})", list(columns));
                let over = columns.iter().map(Name::as_str).collect::<Vec<_>>().join(", ");
                let otherwise =
                    format!("unique ({over}) of {} is not added: rows that are there conflict", table.name);
                self.changes.push(Change::IfRowsAllow { sql, otherwise });
            }
        }
    }

    fn existing(&mut self, place: &str, table: &Table, there: &BTreeMap<String, String>) {
        let mut kept = table.clone();
        kept.columns.clear();
        for column in &table.columns {
            match there.get(column.name.as_str()) {
                None => {
                    self.need(format!("ALTER TABLE {place} ADD COLUMN {}", definition(column)));
                    kept.columns.push(column.clone());
                }
                Some(typname) => kept.columns.extend(self.as_it_is(table, column, typname)),
            }
        }
        self.tables.push(kept);
    }

    fn as_it_is(&mut self, table: &Table, column: &Column, typname: &str) -> Option<Column> {
        let kind = ColumnType::by_catalog(typname);
        if kind != Some(column.kind) {
            let (table, name) = (&table.name, &column.name);
            let asked = column.kind.name();
            let has = kind.map_or(typname, |kind| kind.name());
            self.not_done.push(format!("column {table}.{name} stays {has}; the manifest asks for {asked}"));
        }
        kind.map(|kind| Column { kind, ..column.clone() })
    }

    fn need(&mut self, sql: String) {
        self.changes.push(Change::Needed(sql));
    }
}

fn definition(column: &Column) -> String {
    let (name, kind) = (column.name.quoted(), column.kind.sql());
    match (column.origin, column.name.as_str()) {
        (Origin::Declared, _) => format!("{name} {kind}"),
        (Origin::BuiltIn, "id") => format!("{name} {kind} PRIMARY KEY DEFAULT gen_random_uuid()"),
        (Origin::BuiltIn, _) => format!("{name} {kind} NOT NULL DEFAULT now()"),
    }
}

fn list(columns: &[Name]) -> String {
    columns.iter().map(|name| name.quoted().to_string()).collect::<Vec<_>>().join(", ")
}

/// A jsonb column is sought by containment, which a B-tree cannot serve.
fn gin(table: &Table, columns: &[Name]) -> bool {
    let kind = |name: &Name| table.column(name.as_str()).map(|column| column.kind);
    columns.len() == 1 && kind(&columns[0]) == Some(ColumnType::Jsonb)
}

/// The same name for the same columns at every registration, within PostgreSQL's 63 bytes.
fn index_name(prefix: &str, table: &Table, columns: &[Name]) -> String {
    let columns = columns.iter().map(Name::as_str).collect::<Vec<_>>();
    let digest = hex::encode(&Sha256::digest(columns.join(",").as_bytes())[..4]);
    let mut readable = format!("{prefix}_{}_{}", table.name, columns.join("_"));
    readable.truncate(54);
    format!("{readable}_{digest}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::gateway::apps::Manifest;
    use serde_json::json;

    fn tables(value: &serde_json::Value) -> Vec<Table> {
        let manifest = json!({ "name": "n", "slug": "n", "version": "1", "runtime": "static",
            "storage": { "tables": value } });
        Manifest::from_value(&manifest).unwrap().tables
    }

    fn schema() -> Name {
        "app_n".parse().unwrap()
    }

    fn found(columns: &[(&str, &str)]) -> Found {
        let built_in = [("id", "uuid"), ("created_at", "timestamptz"), ("updated_at", "timestamptz")];
        let columns = columns.iter().chain(&built_in).map(|(n, t)| ((*n).to_owned(), (*t).to_owned()));
        Found { tables: [("t".to_owned(), columns.collect())].into(), indexes: BTreeSet::new() }
    }

    fn sql(planned: &Registration) -> String {
        let one = |change: &Change| match change {
            Change::Needed(sql) | Change::IfRowsAllow { sql, .. } => sql.clone(),
        };
        planned.changes.iter().map(one).collect::<Vec<_>>().join(";\n")
    }

    #[test]
    fn a_new_table_comes_with_its_indexes_and_grants() {
        let wanted = tables(&json!({ "t": { "columns": { "a": "text", "j": "jsonb" },
            "indexes": ["a", ["j"]], "unique": [["a"]] } }));
        let planned = plan(&schema(), &wanted, &Found::default());
        insta::assert_snapshot!(sql(&planned), @r#"
        CREATE TABLE "app_n"."t" ("id" uuid PRIMARY KEY DEFAULT gen_random_uuid(), "a" text, "j" jsonb, "created_at" timestamptz(3) NOT NULL DEFAULT now(), "updated_at" timestamptz(3) NOT NULL DEFAULT now());
        GRANT SELECT, INSERT, UPDATE, DELETE ON "app_n"."t" TO "app_n";
        CREATE INDEX "ix_t_a_ca978112" ON "app_n"."t" USING btree ("a");
        CREATE INDEX "ix_t_j_189f4003" ON "app_n"."t" USING gin ("j");
        CREATE UNIQUE INDEX "uq_t_a_ca978112" ON "app_n"."t" ("a")
        "#);
        assert_eq!(planned.not_done, Vec::<String>::new());
    }

    #[test]
    fn what_is_there_is_added_to_and_never_taken_away() {
        let wanted = tables(&json!({ "t": { "columns": { "a": "text", "b": "bigint" } } }));
        let planned = plan(&schema(), &wanted, &found(&[("a", "int4"), ("old", "text"), ("odd", "xml")]));
        let text = sql(&planned);
        assert!(text.contains("ADD COLUMN \"b\" bigint"), "{text}");
        for never in ["DROP", "ALTER COLUMN", "CREATE TABLE", "DELETE FROM"] {
            assert!(!text.contains(never), "{text}");
        }
        assert_eq!(planned.not_done.len(), 3, "{:?}", planned.not_done);
        assert!(planned.not_done[0].contains("t.a stays integer"), "{:?}", planned.not_done);
        assert_eq!(planned.tables[0].column("a").unwrap().kind, ColumnType::Integer);
    }

    #[test]
    fn a_second_registration_only_grants() {
        let wanted =
            tables(&json!({ "t": { "columns": { "a": "text" }, "indexes": ["a"], "unique": ["a"] } }));
        let mut there = found(&[("a", "text")]);
        there.indexes =
            [("ix"), ("uq")].map(|prefix| index_name(prefix, &wanted[0], &["a".parse().unwrap()])).into();
        let planned = plan(&schema(), &wanted, &there);
        assert_eq!(planned.changes.len(), 1, "{}", sql(&planned));
        assert!(planned.not_done.is_empty());
    }

    #[test]
    fn index_names_fit_and_differ() {
        let long = "c".repeat(63);
        let wanted = tables(&json!({ "t": { "columns": { long.clone(): "text", "d": "text" } } }));
        let one = index_name("ix", &wanted[0], &[long.parse().unwrap()]);
        let two = index_name("ix", &wanted[0], &[long.parse().unwrap(), "d".parse().unwrap()]);
        assert!(one.len() <= 63 && two.len() <= 63);
        assert_ne!(one, two);
    }
}

//! Plans a manifest's registration in an existing schema. Additive only.
//!
//! Performs no I/O. The SQL contains no values, and only names that are [`SqlIdentifier`]s or derived from them.
//! Differences that additions can't resolve are reported as text; nothing is ever dropped or rewritten.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use super::column::{Column, ColumnOrigin, ColumnType};
use super::manifest::Table;
use crate::name::SqlIdentifier;

/// Maximum length of an index name without its digest.
const MAX_READABLE_BYTES: usize = 54;

/// Existing contents of a schema: catalog types of its columns by table, tables with a primary key, and tables by index
/// name.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ExistingSchema {
    pub tables: BTreeMap<String, BTreeMap<String, String>>,
    pub primary_keys: BTreeSet<String>,
    pub indexes: BTreeMap<String, String>,
}

impl ExistingSchema {
    /// Returns the table that has an index with this name. It may differ from `table`: index names are unique per
    /// schema, and a renamed table keeps its index names. The legacy name matches only an index on `table`, because
    /// tables with the same long prefix share it.
    fn find_indexed_table(&self, table: &Table, name: &IndexName) -> Option<&str> {
        let legacy =
            self.indexes.get(&name.legacy).filter(|indexed_table| *indexed_table == table.name.as_str());
        legacy.or_else(|| self.indexes.get(&name.current)).map(String::as_str)
    }
}

/// A statement to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchemaChange {
    /// If this statement fails, the registration fails.
    Required(String),
    /// Creates an index. If existing rows violate its uniqueness, or PostgreSQL can't index a column, the index is
    /// skipped and the respective message reported. Without a message, the registration fails.
    CreateIndex { sql: String, violation_message: Option<String>, type_message: Option<String> },
}

/// A plan for registering a manifest.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RegistrationPlan {
    pub changes: Vec<SchemaChange>,
    /// Differences between manifest and schema that remain after the registration, as text.
    pub unapplied_changes: Vec<String>,
    /// Resulting tables. Existing columns of a different type keep it, or are omitted if manifests don't support it.
    pub tables: Vec<Table>,
}

/// Plans the registration of `wanted` in `schema`, which is also the role's name.
pub fn plan_registration(
    schema: &SqlIdentifier,
    wanted: &[Table],
    existing: &ExistingSchema,
) -> RegistrationPlan {
    let mut plan = RegistrationPlan::default();
    for table in wanted {
        plan.register_table(schema, table, existing);
    }
    for (name, columns) in &existing.tables {
        match wanted.iter().find(|table| table.name.as_str() == name) {
            None => {
                plan.unapplied_changes
                    .push(format!("table {name} is no longer declared; it is left unchanged"));
            }
            Some(table) => {
                let undeclared = columns.keys().filter(|column| table.column(column).is_none());
                plan.unapplied_changes.extend(
                    undeclared
                        .map(|c| format!("column {name}.{c} is no longer declared; it is left unchanged")),
                );
            }
        }
    }
    plan
}

/// Returns the statements that register `wanted` in an empty schema.
#[cfg(feature = "fuzzing")]
pub fn registration_sql(schema: &SqlIdentifier, wanted: &[Table]) -> Vec<String> {
    let into_sql = |change| match change {
        SchemaChange::Required(sql) | SchemaChange::CreateIndex { sql, .. } => sql,
    };
    plan_registration(schema, wanted, &ExistingSchema::default()).changes.into_iter().map(into_sql).collect()
}

impl RegistrationPlan {
    fn register_table(&mut self, schema: &SqlIdentifier, table: &Table, existing: &ExistingSchema) {
        let qualified_name = format!("{}.{}", schema.quoted(), table.name.quoted());
        let result = match existing.tables.get(table.name.as_str()) {
            None => {
                let columns: Vec<String> =
                    table.columns.iter().map(|column| column_definition(column, false)).collect();
                self.require(format!("CREATE TABLE {qualified_name} ({})", columns.join(", ")));
                table.clone()
            }
            Some(columns) => {
                let has_primary_key = existing.primary_keys.contains(table.name.as_str());
                self.extend_table(&qualified_name, table, columns, has_primary_key)
            }
        };
        self.require(format!(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON {qualified_name} TO {}",
            schema.quoted()
        ));
        for columns in &table.indexes {
            let name = index_name("ix", table, columns);
            let method = if uses_gin(&result, columns) { "gin" } else { "btree" };
            if self.should_create_index(table, &name, existing) {
                let sql = format!(
                    "CREATE INDEX \"{}\" ON {qualified_name} USING {method} ({})",
                    name.current,
                    column_list(columns)
                );
                let type_message = unsupported_type_message(&result, columns, &name);
                self.changes.push(SchemaChange::CreateIndex { sql, violation_message: None, type_message });
            }
        }
        for columns in &table.unique {
            let name = index_name("uq", table, columns);
            if self.should_create_index(table, &name, existing) {
                let sql = format!(
                    "CREATE UNIQUE INDEX \"{}\" ON {qualified_name} ({})",
                    name.current,
                    column_list(columns)
                );
                let names = columns.iter().map(SqlIdentifier::as_str).collect::<Vec<_>>().join(", ");
                let violation_message = Some(format!(
                    "the unique constraint ({names}) on {} is not added: existing rows violate it",
                    table.name
                ));
                let type_message = unsupported_type_message(&result, columns, &name);
                self.changes.push(SchemaChange::CreateIndex { sql, violation_message, type_message });
            }
        }
        self.tables.push(result);
    }

    /// Returns whether the index is missing and its name is free. Reports a name taken by another table's index.
    fn should_create_index(&mut self, table: &Table, name: &IndexName, existing: &ExistingSchema) -> bool {
        let Some(indexed_table) = existing.find_indexed_table(table, name) else { return true };
        if indexed_table != table.name.as_str() {
            self.unapplied_changes.push(format!(
                "the index {} of {} is not created: the table {indexed_table} has an index with this name",
                name.current, table.name
            ));
        }
        false
    }

    /// Adds missing columns. Returns the resulting table, in which existing columns keep their types.
    fn extend_table(
        &mut self,
        qualified_name: &str,
        table: &Table,
        columns: &BTreeMap<String, String>,
        has_primary_key: bool,
    ) -> Table {
        let mut result = table.clone();
        result.columns.clear();
        for column in &table.columns {
            match columns.get(column.name.as_str()) {
                None => {
                    self.require(format!(
                        "ALTER TABLE {qualified_name} ADD COLUMN {}",
                        column_definition(column, has_primary_key)
                    ));
                    result.columns.push(column.clone());
                }
                Some(typname) => result.columns.extend(self.keep_existing_column(table, column, typname)),
            }
        }
        result
    }

    fn keep_existing_column(&mut self, table: &Table, column: &Column, typname: &str) -> Option<Column> {
        let kind = ColumnType::from_catalog_name(typname);
        if kind != Some(column.kind) {
            let (table, name) = (&table.name, &column.name);
            let declared = column.kind.name();
            let actual = kind.map_or(typname, |kind| kind.name());
            self.unapplied_changes.push(format!(
                "column {table}.{name} keeps its type {actual}; the manifest declares {declared}"
            ));
        }
        kind.map(|kind| Column { kind, ..column.clone() })
    }

    fn require(&mut self, sql: String) {
        self.changes.push(SchemaChange::Required(sql));
    }
}

fn column_definition(column: &Column, has_primary_key: bool) -> String {
    let (name, kind) = (column.name.quoted(), column.kind.sql());
    match (column.origin, column.name.as_str()) {
        (ColumnOrigin::Declared, _) => format!("{name} {kind}"),
        (ColumnOrigin::BuiltIn, "id") => {
            // A table can have only one primary key.
            let constraint = if has_primary_key { "NOT NULL UNIQUE" } else { "PRIMARY KEY" };
            format!("{name} {kind} {constraint} DEFAULT gen_random_uuid()")
        }
        (ColumnOrigin::BuiltIn, _) => format!("{name} {kind} NOT NULL DEFAULT now()"),
    }
}

fn column_list(columns: &[SqlIdentifier]) -> String {
    columns.iter().map(|name| name.quoted().to_string()).collect::<Vec<_>>().join(", ")
}

/// jsonb columns are queried by containment, which B-tree indexes don't support.
fn uses_gin(table: &Table, columns: &[SqlIdentifier]) -> bool {
    let kind = |name: &SqlIdentifier| table.column(name.as_str()).map(|column| column.kind);
    columns.len() == 1 && kind(&columns[0]) == Some(ColumnType::Jsonb)
}

/// Message to report if PostgreSQL can't index the columns; `None` if it can index all their types. Of the types that
/// manifests don't support, some can be indexed, such as varchar, and some can't, such as json.
fn unsupported_type_message(table: &Table, columns: &[SqlIdentifier], name: &IndexName) -> Option<String> {
    let unsupported: Vec<&str> =
        columns.iter().map(SqlIdentifier::as_str).filter(|column| table.column(column).is_none()).collect();
    (!unsupported.is_empty()).then(|| {
        format!(
            "the index {} of {} is not created: the type of the column {} is not supported",
            name.current,
            table.name,
            unsupported.join(" or ")
        )
    })
}

/// Deterministic index name, within PostgreSQL's 63-byte limit.
struct IndexName {
    current: String,
    /// Name used by earlier versions. Differs only if the current name is truncated.
    legacy: String,
}

fn index_name(prefix: &str, table: &Table, columns: &[SqlIdentifier]) -> IndexName {
    let columns = columns.iter().map(SqlIdentifier::as_str).collect::<Vec<_>>();
    let readable = format!("{prefix}_{}_{}", table.name, columns.join("_"));
    let with_digest_of = |text: &str| {
        let digest = hex::encode(&Sha256::digest(text.as_bytes())[..4]);
        format!("{}_{digest}", &readable[..readable.len().min(MAX_READABLE_BYTES)])
    };
    let columns = columns.join(",");
    let legacy = with_digest_of(&columns);
    // Tables with a long common prefix truncate to the same name.
    let is_truncated = readable.len() > MAX_READABLE_BYTES;
    let current =
        if is_truncated { with_digest_of(&format!("{}.{columns}", table.name)) } else { legacy.clone() };
    IndexName { current, legacy }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apps::Manifest;
    use serde_json::json;

    fn tables(value: &serde_json::Value) -> Vec<Table> {
        let manifest = json!({ "name": "n", "slug": "n", "version": "1", "runtime": "static",
            "storage": { "tables": value } });
        Manifest::from_value(&manifest).unwrap().tables
    }

    fn schema() -> SqlIdentifier {
        "app_n".parse().unwrap()
    }

    fn existing(columns: &[(&str, &str)]) -> ExistingSchema {
        let built_in = [("id", "uuid"), ("created_at", "timestamptz"), ("updated_at", "timestamptz")];
        let columns = columns.iter().chain(&built_in).map(|(n, t)| ((*n).to_owned(), (*t).to_owned()));
        let tables = [("t".to_owned(), columns.collect())].into();
        ExistingSchema { tables, ..ExistingSchema::default() }
    }

    fn sql(plan: &RegistrationPlan) -> String {
        let to_sql = |change: &SchemaChange| match change {
            SchemaChange::Required(sql) | SchemaChange::CreateIndex { sql, .. } => sql.clone(),
        };
        plan.changes.iter().map(to_sql).collect::<Vec<_>>().join(";\n")
    }

    #[test]
    fn plan_creates_table_with_indexes_and_grants() {
        let wanted = tables(&json!({ "t": { "columns": { "a": "text", "j": "jsonb" },
            "indexes": ["a", ["j"]], "unique": [["a"]] } }));
        let plan = plan_registration(&schema(), &wanted, &ExistingSchema::default());
        insta::assert_snapshot!(sql(&plan), @r#"
        CREATE TABLE "app_n"."t" ("id" uuid PRIMARY KEY DEFAULT gen_random_uuid(), "a" text, "j" jsonb, "created_at" timestamptz(3) NOT NULL DEFAULT now(), "updated_at" timestamptz(3) NOT NULL DEFAULT now());
        GRANT SELECT, INSERT, UPDATE, DELETE ON "app_n"."t" TO "app_n";
        CREATE INDEX "ix_t_a_ca978112" ON "app_n"."t" USING btree ("a");
        CREATE INDEX "ix_t_j_189f4003" ON "app_n"."t" USING gin ("j");
        CREATE UNIQUE INDEX "uq_t_a_ca978112" ON "app_n"."t" ("a")
        "#);
        assert_eq!(plan.unapplied_changes, Vec::<String>::new());
    }

    #[test]
    fn plan_only_adds_to_existing_tables() {
        let wanted = tables(&json!({ "t": { "columns": { "a": "text", "b": "bigint" } } }));
        let plan = plan_registration(
            &schema(),
            &wanted,
            &existing(&[("a", "int4"), ("old", "text"), ("odd", "xml")]),
        );
        let text = sql(&plan);
        assert!(text.contains("ADD COLUMN \"b\" bigint"), "{text}");
        for forbidden in ["DROP", "ALTER COLUMN", "CREATE TABLE", "DELETE FROM"] {
            assert!(!text.contains(forbidden), "{text}");
        }
        assert_eq!(plan.unapplied_changes.len(), 3, "{:?}", plan.unapplied_changes);
        let first = &plan.unapplied_changes[0];
        assert!(first.contains("t.a keeps its type integer"), "{first}");
        assert_eq!(plan.tables[0].column("a").unwrap().kind, ColumnType::Integer);
    }

    #[test]
    fn plan_indexes_column_by_its_existing_type() {
        let wanted = tables(&json!({ "t": { "columns": { "a": "jsonb" }, "indexes": ["a"] } }));
        let plan = plan_registration(&schema(), &wanted, &existing(&[("a", "text")]));
        let text = sql(&plan);
        assert!(text.contains("USING btree (\"a\")"), "{text}");
    }

    #[test]
    fn plan_may_skip_index_on_column_of_unsupported_type() {
        let wanted = tables(&json!({ "t": { "columns": { "a": "text", "b": "text", "c": "text" },
            "indexes": ["b", ["b", "a"]], "unique": [["a", "c"]] } }));
        let columns = [("a", "json"), ("b", "text"), ("c", "varchar")];
        let plan = plan_registration(&schema(), &wanted, &existing(&columns));
        let type_message = |change: &SchemaChange| match change {
            SchemaChange::Required(_) => None,
            SchemaChange::CreateIndex { type_message, .. } => Some(type_message.clone().unwrap_or_default()),
        };
        let messages: Vec<String> = plan.changes.iter().filter_map(type_message).collect();
        let [supported, index, unique] = messages.as_slice() else { panic!("{messages:?}") };
        assert!(supported.is_empty(), "{supported}");
        for (message, prefix, columns) in [(index, "ix_t_b_a_", "a"), (unique, "uq_t_a_c_", "a or c")] {
            assert!(message.starts_with(&format!("the index {prefix}")), "{message}");
            let reason = format!("the type of the column {columns} is not supported");
            assert!(message.ends_with(&reason), "{message}");
        }
    }

    #[test]
    fn plan_adds_id_as_primary_key_only_if_table_has_none() {
        let wanted = tables(&json!({ "t": { "columns": { "a": "text" } } }));
        let mut registered = existing(&[("a", "text")]);
        registered.tables.get_mut("t").unwrap().remove("id");
        let added =
            |constraint: &str| format!("ADD COLUMN \"id\" uuid {constraint} DEFAULT gen_random_uuid()");
        let text = sql(&plan_registration(&schema(), &wanted, &registered));
        assert!(text.contains(&added("PRIMARY KEY")), "{text}");
        registered.primary_keys.insert("t".to_owned());
        let text = sql(&plan_registration(&schema(), &wanted, &registered));
        assert!(text.contains(&added("NOT NULL UNIQUE")), "{text}");
    }

    #[test]
    fn plan_for_registered_manifest_only_grants() {
        let wanted =
            tables(&json!({ "t": { "columns": { "a": "text" }, "indexes": ["a"], "unique": ["a"] } }));
        let mut registered = existing(&[("a", "text")]);
        registered.indexes =
            ["ix_t_a_ca978112", "uq_t_a_ca978112"].map(|name| (name.to_owned(), "t".to_owned())).into();
        let plan = plan_registration(&schema(), &wanted, &registered);
        assert_eq!(plan.changes.len(), 1, "{}", sql(&plan));
        assert!(plan.unapplied_changes.is_empty());
    }

    #[test]
    fn plan_skips_index_name_taken_by_renamed_table() {
        let wanted = tables(&json!({ "t": { "columns": { "a": "text" }, "indexes": ["a"] } }));
        let mut renamed = existing(&[("a", "text")]);
        let table = renamed.tables.remove("t").unwrap();
        renamed.tables.insert("t_old".to_owned(), table);
        renamed.indexes = [("ix_t_a_ca978112".to_owned(), "t_old".to_owned())].into();
        let plan = plan_registration(&schema(), &wanted, &renamed);
        let text = sql(&plan);
        assert!(text.contains("CREATE TABLE") && !text.contains("CREATE INDEX"), "{text}");
        let expected =
            "the index ix_t_a_ca978112 of t is not created: the table t_old has an index with this name";
        assert!(plan.unapplied_changes.iter().any(|c| c == expected), "{:?}", plan.unapplied_changes);
    }

    #[test]
    fn index_names_of_long_columns_fit_limit_and_differ() {
        let long = "c".repeat(63);
        let wanted = tables(&json!({ "t": { "columns": { long.clone(): "text", "d": "text" } } }));
        let short = index_name("ix", &wanted[0], &[long.parse().unwrap()]).current;
        let longer = index_name("ix", &wanted[0], &[long.parse().unwrap(), "d".parse().unwrap()]).current;
        assert!(short.len() <= 63 && longer.len() <= 63);
        assert_ne!(short, longer);
    }

    #[test]
    fn index_names_of_tables_with_long_prefix_differ() {
        let (one, other) = (format!("{}_1", "t".repeat(60)), format!("{}_2", "t".repeat(60)));
        let table = json!({ "columns": { "a": "text" }, "indexes": ["a"] });
        let wanted = tables(&json!({ one.clone(): table, other.clone(): table }));
        let names: Vec<_> = wanted
            .iter()
            .map(|table| index_name("ix", table, &["a".parse().unwrap()]))
            .map(|name| (name.current, name.legacy))
            .collect();
        assert_ne!(names[0].0, names[1].0);
        assert_eq!(names[0].1, names[1].1);
        // One table's index was created by an earlier version.
        let existing =
            ExistingSchema { indexes: [(names[0].1.clone(), one)].into(), ..ExistingSchema::default() };
        let text = sql(&plan_registration(&schema(), &wanted, &existing));
        assert_eq!(text.matches("CREATE INDEX").count(), 1, "{text}");
        assert!(text.contains(&format!("CREATE INDEX \"{}\"", names[1].0)), "{text}");
    }
}

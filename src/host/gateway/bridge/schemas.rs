//! The apps' schemas as JSON: the declared tables, with the types that their columns have in the database.

use serde_json::{Value, json};

use crate::apps::{App, Column, ColumnOrigin, Table};
use crate::name::SqlIdentifier;

pub fn schema_json(app: &App) -> Value {
    let tables: Vec<Value> = app.tables.values().map(table_json).collect();
    json!({
        "app": app.manifest.slug.as_str(),
        "name": app.manifest.name,
        "schema": app.schema.as_str(),
        "tables": tables,
    })
}

fn table_json(table: &Table) -> Value {
    let columns: Vec<Value> = table.columns.iter().map(column_json).collect();
    let name_lists = |lists: &[Vec<SqlIdentifier>]| -> Value {
        lists.iter().map(|list| list.iter().map(SqlIdentifier::as_str).collect::<Vec<_>>()).collect()
    };
    json!({
        "table": table.name.as_str(),
        "columns": columns,
        "indexes": name_lists(&table.indexes),
        "unique": name_lists(&table.unique),
    })
}

fn column_json(column: &Column) -> Value {
    json!({
        "column": column.name.as_str(),
        "type": column.kind.name(),
        "builtIn": column.origin == ColumnOrigin::BuiltIn,
        "nullable": column.is_nullable(),
    })
}

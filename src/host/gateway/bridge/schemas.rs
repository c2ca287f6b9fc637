//! The apps' tables and columns, from their registered manifests: what a client can ask of the bridge.

use serde_json::{Value, json};

use crate::host::gateway::apps::{App, Column, Name, Origin, Table};

/// One app's schema as it is told.
pub fn schema(app: &App) -> Value {
    let tables: Vec<Value> = app.tables.values().map(table).collect();
    json!({
        "app": app.manifest.slug.as_str(),
        "name": app.manifest.name,
        "schema": app.schema.as_str(),
        "tables": tables,
    })
}

fn table(table: &Table) -> Value {
    let columns: Vec<Value> = table.columns.iter().map(column).collect();
    let lists = |lists: &[Vec<Name>]| -> Value {
        lists.iter().map(|list| list.iter().map(Name::as_str).collect::<Vec<_>>()).collect()
    };
    json!({
        "table": table.name.as_str(),
        "columns": columns,
        "indexes": lists(&table.indexes),
        "unique": lists(&table.unique),
    })
}

fn column(column: &Column) -> Value {
    json!({
        "column": column.name.as_str(),
        "type": column.kind.name(),
        "builtIn": column.origin == Origin::BuiltIn,
        "nullable": column.is_nullable(),
    })
}

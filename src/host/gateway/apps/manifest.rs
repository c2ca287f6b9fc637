//! Parses `svc.json`, reporting all errors at once, and serializes it to the normalized form stored in the database.
//!
//! A [`Manifest`] is validated: names are safe, types are known, and indexes refer to existing columns.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::column::{Column, ColumnOrigin, ColumnType};
use super::foreign_origin::ForeignOrigin;
use crate::name::{Slug, SqlIdentifier};

const MAX_TABLES: usize = 100;
const MAX_COLUMNS: usize = 200;
const MAX_ORIGINS: usize = 20;
/// PostgreSQL's limit on columns per index.
const MAX_INDEX_COLUMNS: usize = 32;

/// How an app's pages are built or served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Runtime {
    Vite,
    Static,
    Node,
}

impl Runtime {
    pub fn name(self) -> &'static str {
        self.into()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub name: String,
    pub slug: Slug,
    pub version: String,
    pub runtime: Runtime,
    /// Build output directory, relative to the app's directory.
    pub output: String,
    /// Icon path, relative to the app's directory.
    pub icon: Option<String>,
    /// Origins, besides the app's own host, that the app's pages may load from and send data to.
    pub connect: Vec<ForeignOrigin>,
    pub tables: Vec<Table>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pub name: SqlIdentifier,
    /// `id`, the declared columns, `created_at`, `updated_at`. Declared columns are in `svc.json` order, or in `jsonb`
    /// order if the manifest comes from the database.
    pub columns: Vec<Column>,
    pub indexes: Vec<Vec<SqlIdentifier>>,
    pub unique: Vec<Vec<SqlIdentifier>>,
}

impl Table {
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name.as_str() == name)
    }
}

/// All errors in a manifest, each prefixed with the path of the invalid member.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .errors.join("; "))]
pub struct ManifestError {
    pub errors: Vec<String>,
}

impl Manifest {
    /// Parses and validates the text of an `svc.json`.
    ///
    /// # Errors
    /// [`ManifestError`] with all errors in the manifest.
    pub fn parse(text: &[u8]) -> Result<Self, ManifestError> {
        let value = serde_json::from_slice(text).map_err(|error| ManifestError {
            errors: vec![format!("svc.json: is not valid JSON: {error}")],
        })?;
        Self::from_value(&value)
    }

    /// Validates a manifest.
    ///
    /// # Errors
    /// [`ManifestError`] with all errors in the manifest.
    pub fn from_value(value: &Value) -> Result<Self, ManifestError> {
        let mut reader = ManifestReader::default();
        let manifest = reader.read_manifest(value);
        match manifest {
            Some(manifest) if reader.errors.is_empty() => Ok(manifest),
            _ => Err(ManifestError { errors: reader.errors }),
        }
    }

    /// Returns the normalized form, which [`Self::from_value`] can parse.
    pub fn to_value(&self) -> Value {
        let tables: Map<String, Value> =
            self.tables.iter().map(|table| (table.name.to_string(), table.to_value())).collect();
        json!({
            "name": self.name,
            "slug": self.slug.as_str(),
            "version": self.version,
            "runtime": self.runtime.name(),
            "build": { "output": self.output },
            "icon": self.icon,
            "connect": self.connect.iter().map(ForeignOrigin::as_str).collect::<Vec<_>>(),
            "storage": { "tables": tables },
        })
    }

    /// Whether the manifests are equal apart from the order of tables and columns, which `jsonb` doesn't preserve.
    pub fn equals_ignoring_order(&self, other: &Self) -> bool {
        // JSON object comparison ignores key order.
        self.to_value() == other.to_value()
    }
}

impl Table {
    fn to_value(&self) -> Value {
        let declared = self.columns.iter().filter(|column| column.origin == ColumnOrigin::Declared);
        let columns: Map<String, Value> =
            declared.map(|column| (column.name.to_string(), column.kind.name().into())).collect();
        let lists = |lists: &[Vec<SqlIdentifier>]| -> Value {
            lists.iter().map(|list| list.iter().map(SqlIdentifier::as_str).collect::<Vec<_>>()).collect()
        };
        json!({ "columns": columns, "indexes": lists(&self.indexes), "unique": lists(&self.unique) })
    }
}

#[derive(Default)]
struct ManifestReader {
    errors: Vec<String>,
}

impl ManifestReader {
    /// Records an error; always returns `None`.
    fn reject<T>(&mut self, path: &str, message: impl std::fmt::Display) -> Option<T> {
        self.errors.push(format!("{path}: {message}"));
        None
    }

    fn read_manifest(&mut self, value: &Value) -> Option<Manifest> {
        let Some(root) = value.as_object() else { return self.reject("svc.json", "must be an object") };
        let slug = self
            .read_text(root, "slug")
            .and_then(|slug| slug.parse().map_err(|message| self.reject::<()>("slug", message)).ok());
        let runtime = self.read_text(root, "runtime").and_then(|runtime| match runtime.parse() {
            Ok(runtime) => Some(runtime),
            Err(_) => self.reject("runtime", format!("must be vite, static or node, not {runtime:?}")),
        });
        let name = self.read_text(root, "name");
        let version = self.read_text(root, "version");
        let output = match root.get("build").and_then(|build| build.get("output")) {
            None => Some("dist".to_owned()),
            Some(output) => self.read_path("build.output", output),
        };
        let icon = match root.get("icon") {
            None | Some(Value::Null) => None,
            Some(icon) => self.read_path("icon", icon),
        };
        let connect = self.read_origins(root.get("connect"));
        let tables = self.read_tables(root.get("storage"));
        Some(Manifest {
            name: name?,
            slug: slug?,
            version: version?,
            runtime: runtime?,
            output: output?,
            icon,
            connect,
            tables,
        })
    }

    fn read_text(&mut self, root: &Map<String, Value>, key: &str) -> Option<String> {
        match root.get(key) {
            Some(Value::String(text)) if !text.is_empty() && text.len() <= 200 => Some(text.clone()),
            Some(_) => self.reject(key, "must be a string of 1 to 200 bytes"),
            None => self.reject(key, "is missing"),
        }
    }

    fn read_path(&mut self, path: &str, value: &Value) -> Option<String> {
        let is_below_dir = |path: &str| {
            !path.is_empty()
                && path.split('/').all(|part| !["", ".", ".."].contains(&part))
                && !path.contains('\0')
        };
        match value.as_str().map(|path| path.trim_start_matches("./").trim_end_matches('/')) {
            Some(path) if is_below_dir(path) => Some(path.to_owned()),
            _ => self.reject(path, "must be a path below the app's directory"),
        }
    }

    fn read_origins(&mut self, value: Option<&Value>) -> Vec<ForeignOrigin> {
        let origins = match value {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Array(origins)) => origins,
            Some(_) => return self.reject("connect", "must be an array of origins").unwrap_or_default(),
        };
        if origins.len() > MAX_ORIGINS {
            return self
                .reject("connect", format!("must have at most {MAX_ORIGINS} origins"))
                .unwrap_or_default();
        }
        let mut read_origin = |(index, value): (usize, &Value)| {
            let parsed = value.as_str().unwrap_or_default().parse();
            parsed.map_err(|message| self.reject::<()>(&format!("connect[{index}]"), message)).ok()
        };
        origins.iter().enumerate().filter_map(&mut read_origin).collect()
    }

    fn read_tables(&mut self, storage: Option<&Value>) -> Vec<Table> {
        let tables = match storage {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Object(storage)) => {
                self.reject_unknown_fields(storage, "storage", &["tables"]);
                storage.get("tables")
            }
            Some(_) => return self.reject("storage", "must be an object").unwrap_or_default(),
        };
        let Some(tables) = tables else { return Vec::new() };
        let Some(tables) = tables.as_object() else {
            return self.reject("storage.tables", "must be an object").unwrap_or_default();
        };
        if tables.len() > MAX_TABLES {
            return self
                .reject("storage.tables", format!("must have at most {MAX_TABLES} tables"))
                .unwrap_or_default();
        }
        tables.iter().filter_map(|(name, table)| self.read_table(name, table)).collect()
    }

    fn read_table(&mut self, name: &str, value: &Value) -> Option<Table> {
        let path = format!("storage.tables.{name}");
        let name: Option<SqlIdentifier> =
            name.parse().map_err(|message| self.reject::<()>(&path, message)).ok();
        let Some(table) = value.as_object() else { return self.reject(&path, "must be an object") };
        self.reject_unknown_fields(table, &path, &["columns", "indexes", "unique"]);
        let columns = self.read_columns(&path, table.get("columns"))?;
        let mut table = Table { name: name?, columns, indexes: Vec::new(), unique: Vec::new() };
        let lists = value.as_object()?;
        table.indexes = self.read_column_lists(&table, &format!("{path}.indexes"), lists.get("indexes"));
        table.unique = self.read_column_lists(&table, &format!("{path}.unique"), lists.get("unique"));
        for list in &table.unique {
            if list.iter().any(|name| table.column(name.as_str()).is_some_and(|c| !c.kind.is_ordered())) {
                self.reject::<()>(&format!("{path}.unique"), "a jsonb column cannot be unique");
            }
        }
        Some(table)
    }

    fn read_columns(&mut self, path: &str, value: Option<&Value>) -> Option<Vec<Column>> {
        let path = format!("{path}.columns");
        let declared = match value {
            Some(Value::Object(columns)) => columns,
            Some(_) => return self.reject(&path, "must be an object"),
            None => return self.reject(&path, "is missing"),
        };
        if declared.len() > MAX_COLUMNS {
            return self.reject(&path, format!("must have at most {MAX_COLUMNS} columns"));
        }
        let mut columns = vec![Column::built_in("id")?];
        for (name, kind) in declared {
            let path = format!("{path}.{name}");
            let parsed: Option<SqlIdentifier> =
                name.parse().map_err(|message| self.reject::<()>(&path, message)).ok();
            let Some(kind) = self.read_type(&path, kind) else { continue };
            match Column::built_in(name) {
                Some(built_in) if built_in.kind != kind => {
                    let kind = built_in.kind.name();
                    self.reject::<()>(
                        &path,
                        format!("must have type {kind}, because this column is built in"),
                    );
                }
                Some(_) => {}
                None => columns.extend(parsed.map(|name| Column::declared(name, kind))),
            }
        }
        columns.extend([Column::built_in("created_at")?, Column::built_in("updated_at")?]);
        Some(columns)
    }

    fn read_type(&mut self, path: &str, value: &Value) -> Option<ColumnType> {
        let Some(name) = value.as_str() else { return self.reject(path, "must be a type name") };
        ColumnType::from_name(name).or_else(|| {
            let names = ColumnType::ALL.map(ColumnType::name).join(", ");
            self.reject(path, format!("must be one of the types {names}, not {name:?}"))
        })
    }

    /// Reads a list of column lists, where a bare column name is a one-column list. Drops duplicates.
    fn read_column_lists(
        &mut self,
        table: &Table,
        path: &str,
        value: Option<&Value>,
    ) -> Vec<Vec<SqlIdentifier>> {
        let lists = match value {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Array(lists)) => lists,
            Some(_) => return self.reject(path, "must be an array").unwrap_or_default(),
        };
        let mut seen = BTreeSet::new();
        let lists = lists.iter().filter_map(|list| self.read_column_list(table, path, list));
        lists.filter(|list| seen.insert(list.clone())).collect()
    }

    fn read_column_list(&mut self, table: &Table, path: &str, value: &Value) -> Option<Vec<SqlIdentifier>> {
        let names: Vec<&str> = match value {
            Value::String(name) => vec![name],
            Value::Array(names) => names.iter().map(Value::as_str).collect::<Option<_>>().unwrap_or_default(),
            _ => Vec::new(),
        };
        if names.is_empty() || names.len() > MAX_INDEX_COLUMNS {
            return self.reject(
                path,
                format!("each entry must be a column or a list of 1 to {MAX_INDEX_COLUMNS} columns"),
            );
        }
        let existing: Vec<SqlIdentifier> =
            names.iter().filter_map(|name| table.column(name)).map(|column| column.name.clone()).collect();
        if existing.len() == names.len() {
            return Some(existing);
        }
        let missing = names.iter().find(|name| table.column(name).is_none()).unwrap_or(&"");
        self.reject(path, format!("unknown column {missing:?}"))
    }

    fn reject_unknown_fields(&mut self, object: &Map<String, Value>, path: &str, known: &[&str]) {
        for key in object.keys().filter(|key| !known.contains(&key.as_str())) {
            self.reject::<()>(&format!("{path}.{key}"), "unknown field");
        }
    }
}

#[cfg(test)]
mod tests;

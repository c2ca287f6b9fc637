//! `svc.json`: read from outside, every mistake named at once, and written back in the one form that the database keeps.
//!
//! A [`Manifest`] has been checked: its names are safe, its types known, its indexes name columns that are there.

use serde_json::{Map, Value, json};

use super::column::{Column, ColumnType, Origin};
use super::foreign_origin::ForeignOrigin;
use super::name::{Name, Slug};

const MOST_TABLES: usize = 100;
const MOST_COLUMNS: usize = 200;
const MAX_ORIGINS: usize = 20;
/// PostgreSQL's own limit of columns in an index.
const MOST_INDEXED: usize = 32;

/// How an app's pages come to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runtime {
    Vite,
    Static,
    Node,
}

impl Runtime {
    pub fn name(self) -> &'static str {
        match self {
            Self::Vite => "vite",
            Self::Static => "static",
            Self::Node => "node",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    pub name: String,
    pub slug: Slug,
    pub version: String,
    pub runtime: Runtime,
    /// Where the built pages are, below the app's folder.
    pub output: String,
    /// The icon's path below the app's folder.
    pub icon: Option<String>,
    /// Sites beside its own that the app's pages may load from and send data to.
    pub connect: Vec<ForeignOrigin>,
    pub tables: Vec<Table>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pub name: Name,
    /// `id`, the declared ones in their order, `created_at`, `updated_at`.
    pub columns: Vec<Column>,
    pub indexes: Vec<Vec<Name>>,
    pub unique: Vec<Vec<Name>>,
}

impl Table {
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name.as_str() == name)
    }
}

/// What is wrong with a manifest, one line each.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .mistakes.join("; "))]
pub struct ManifestError {
    pub mistakes: Vec<String>,
}

impl Manifest {
    /// # Errors
    /// Names every mistake.
    pub fn parse(text: &[u8]) -> Result<Self, ManifestError> {
        let value = serde_json::from_slice(text)
            .map_err(|error| ManifestError { mistakes: vec![format!("not JSON: {error}")] })?;
        Self::from_value(&value)
    }

    /// # Errors
    /// As [`Self::parse`].
    pub fn from_value(value: &Value) -> Result<Self, ManifestError> {
        let mut reader = Reader::default();
        let manifest = reader.manifest(value);
        match manifest {
            Some(manifest) if reader.mistakes.is_empty() => Ok(manifest),
            _ => Err(ManifestError { mistakes: reader.mistakes }),
        }
    }

    /// The form that [`Self::from_value`] reads back.
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
}

impl Table {
    fn to_value(&self) -> Value {
        let declared = self.columns.iter().filter(|column| column.origin == Origin::Declared);
        let columns: Map<String, Value> =
            declared.map(|column| (column.name.to_string(), column.kind.name().into())).collect();
        let lists = |lists: &[Vec<Name>]| -> Value {
            lists.iter().map(|list| list.iter().map(Name::as_str).collect::<Vec<_>>()).collect()
        };
        json!({ "columns": columns, "indexes": lists(&self.indexes), "unique": lists(&self.unique) })
    }
}

#[derive(Default)]
struct Reader {
    mistakes: Vec<String>,
}

impl Reader {
    fn wrong<T>(&mut self, place: &str, why: impl std::fmt::Display) -> Option<T> {
        self.mistakes.push(format!("{place}: {why}"));
        None
    }

    fn manifest(&mut self, value: &Value) -> Option<Manifest> {
        let Some(root) = value.as_object() else { return self.wrong("svc.json", "must be an object") };
        let slug = self
            .text(root, "slug")
            .and_then(|slug| slug.parse().map_err(|why| self.wrong::<()>("slug", why)).ok());
        let runtime = self.text(root, "runtime").and_then(|runtime| match runtime.as_str() {
            "vite" => Some(Runtime::Vite),
            "static" => Some(Runtime::Static),
            "node" => Some(Runtime::Node),
            other => self.wrong("runtime", format!("unknown {other:?}; vite, static or node")),
        });
        let name = self.text(root, "name");
        let version = self.text(root, "version");
        let output = match root.get("build").and_then(|build| build.get("output")) {
            None => Some("dist".to_owned()),
            Some(output) => self.path("build.output", output),
        };
        let icon = match root.get("icon") {
            None | Some(Value::Null) => None,
            Some(icon) => self.path("icon", icon),
        };
        let connect = self.origins(root.get("connect"));
        let tables = self.tables(root.get("storage"));
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

    fn text(&mut self, root: &Map<String, Value>, key: &str) -> Option<String> {
        match root.get(key) {
            Some(Value::String(text)) if !text.is_empty() && text.len() <= 200 => Some(text.clone()),
            Some(_) => self.wrong(key, "must be a text of 1 to 200 bytes"),
            None => self.wrong(key, "is missing"),
        }
    }

    fn path(&mut self, place: &str, value: &Value) -> Option<String> {
        let inside = |path: &str| {
            !path.is_empty()
                && path.split('/').all(|part| !["", ".", ".."].contains(&part))
                && !path.contains('\0')
        };
        match value.as_str().map(|path| path.trim_start_matches("./").trim_end_matches('/')) {
            Some(path) if inside(path) => Some(path.to_owned()),
            _ => self.wrong(place, "must be a path below the app's folder"),
        }
    }

    fn origins(&mut self, value: Option<&Value>) -> Vec<ForeignOrigin> {
        let origins = match value {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Array(origins)) => origins,
            Some(_) => return self.wrong("connect", "must be an array of origins").unwrap_or_default(),
        };
        if origins.len() > MAX_ORIGINS {
            return self.wrong("connect", format!("more than {MAX_ORIGINS} origins")).unwrap_or_default();
        }
        let mut origin = |(at, value): (usize, &Value)| {
            let parsed = value.as_str().unwrap_or_default().parse();
            parsed.map_err(|why| self.wrong::<()>(&format!("connect[{at}]"), why)).ok()
        };
        origins.iter().enumerate().filter_map(&mut origin).collect()
    }

    fn tables(&mut self, storage: Option<&Value>) -> Vec<Table> {
        let tables = match storage {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Object(storage)) => {
                self.only(storage, "storage", &["tables"]);
                storage.get("tables")
            }
            Some(_) => return self.wrong("storage", "must be an object").unwrap_or_default(),
        };
        let Some(tables) = tables else { return Vec::new() };
        let Some(tables) = tables.as_object() else {
            return self.wrong("storage.tables", "must be an object").unwrap_or_default();
        };
        if tables.len() > MOST_TABLES {
            return self
                .wrong("storage.tables", format!("more than {MOST_TABLES} tables"))
                .unwrap_or_default();
        }
        tables.iter().filter_map(|(name, table)| self.table(name, table)).collect()
    }

    fn table(&mut self, name: &str, value: &Value) -> Option<Table> {
        let place = format!("storage.tables.{name}");
        let name: Option<Name> = name.parse().map_err(|why| self.wrong::<()>(&place, why)).ok();
        let Some(table) = value.as_object() else { return self.wrong(&place, "must be an object") };
        self.only(table, &place, &["columns", "indexes", "unique"]);
        let columns = self.columns(&place, table.get("columns"))?;
        let mut table = Table { name: name?, columns, indexes: Vec::new(), unique: Vec::new() };
        let lists = value.as_object()?;
        table.indexes = self.lists(&table, &format!("{place}.indexes"), lists.get("indexes"));
        table.unique = self.lists(&table, &format!("{place}.unique"), lists.get("unique"));
        for list in &table.unique {
            if list.iter().any(|name| table.column(name.as_str()).is_some_and(|c| !c.kind.is_ordered())) {
                self.wrong::<()>(&format!("{place}.unique"), "a jsonb column cannot be unique");
            }
        }
        Some(table)
    }

    fn columns(&mut self, place: &str, value: Option<&Value>) -> Option<Vec<Column>> {
        let place = format!("{place}.columns");
        let declared = match value {
            Some(Value::Object(columns)) => columns,
            Some(_) => return self.wrong(&place, "must be an object"),
            None => return self.wrong(&place, "is missing"),
        };
        if declared.len() > MOST_COLUMNS {
            return self.wrong(&place, format!("more than {MOST_COLUMNS} columns"));
        }
        let mut columns = vec![Column::built_in("id")?];
        for (name, kind) in declared {
            let place = format!("{place}.{name}");
            let named: Option<Name> = name.parse().map_err(|why| self.wrong::<()>(&place, why)).ok();
            let Some(kind) = self.kind(&place, kind) else { continue };
            match Column::built_in(name) {
                Some(built_in) if built_in.kind != kind => {
                    self.wrong::<()>(&place, format!("is built in, as {}", built_in.kind.name()));
                }
                Some(_) => {}
                None => columns.extend(named.map(|name| Column::declared(name, kind))),
            }
        }
        columns.extend([Column::built_in("created_at")?, Column::built_in("updated_at")?]);
        Some(columns)
    }

    fn kind(&mut self, place: &str, value: &Value) -> Option<ColumnType> {
        let Some(name) = value.as_str() else { return self.wrong(place, "must be the name of a type") };
        ColumnType::by_name(name).or_else(|| {
            let known = ColumnType::ALL.map(ColumnType::name).join(", ");
            self.wrong(place, format!("unknown type {name:?}; known are {known}"))
        })
    }

    /// A list of column lists; a column alone may stand for a list of one.
    fn lists(&mut self, table: &Table, place: &str, value: Option<&Value>) -> Vec<Vec<Name>> {
        let lists = match value {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Array(lists)) => lists,
            Some(_) => return self.wrong(place, "must be an array").unwrap_or_default(),
        };
        lists.iter().filter_map(|list| self.list(table, place, list)).collect()
    }

    fn list(&mut self, table: &Table, place: &str, value: &Value) -> Option<Vec<Name>> {
        let names: Vec<&str> = match value {
            Value::String(name) => vec![name],
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        if names.is_empty() || names.len() > MOST_INDEXED {
            return self.wrong(place, "each entry must be a column or a list of columns");
        }
        let known: Vec<Name> =
            names.iter().filter_map(|name| table.column(name)).map(|column| column.name.clone()).collect();
        if known.len() == names.len() {
            return Some(known);
        }
        let missing = names.iter().find(|name| table.column(name).is_none()).unwrap_or(&"");
        self.wrong(place, format!("there is no column {missing:?}"))
    }

    fn only(&mut self, object: &Map<String, Value>, place: &str, known: &[&str]) {
        for key in object.keys().filter(|key| !known.contains(&key.as_str())) {
            self.wrong::<()>(&format!("{place}.{key}"), "is not known");
        }
    }
}

#[cfg(test)]
mod tests;

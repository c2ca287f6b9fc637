//! Columns and their types: the eleven manifest type names and the matching PostgreSQL types.

use crate::name::SqlIdentifier;

/// A column type in `svc.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ColumnType {
    Text,
    Boolean,
    Integer,
    Bigint,
    Numeric,
    Double,
    Date,
    /// Stored with millisecond precision, like the wire format, so that filtering by a previously read value matches.
    Timestamptz,
    Jsonb,
    Uuid,
    Bytea,
}

impl ColumnType {
    pub const ALL: [Self; 11] = [
        Self::Text,
        Self::Boolean,
        Self::Integer,
        Self::Bigint,
        Self::Numeric,
        Self::Double,
        Self::Date,
        Self::Timestamptz,
        Self::Jsonb,
        Self::Uuid,
        Self::Bytea,
    ];

    /// Manifest name, SQL type and catalog `typname`.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Text => ("text", "text", "text"),
            Self::Boolean => ("boolean", "boolean", "bool"),
            Self::Integer => ("integer", "integer", "int4"),
            Self::Bigint => ("bigint", "bigint", "int8"),
            Self::Numeric => ("numeric", "numeric", "numeric"),
            Self::Double => ("double", "double precision", "float8"),
            Self::Date => ("date", "date", "date"),
            Self::Timestamptz => ("timestamptz", "timestamptz(3)", "timestamptz"),
            Self::Jsonb => ("jsonb", "jsonb", "jsonb"),
            Self::Uuid => ("uuid", "uuid", "uuid"),
            Self::Bytea => ("bytea", "bytea", "bytea"),
        }
    }

    pub fn name(self) -> &'static str {
        self.names().0
    }

    pub fn sql(self) -> &'static str {
        self.names().1
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Finds a type by `pg_type.typname`.
    pub fn from_catalog_name(typname: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.names().2 == typname)
    }

    /// Whether columns of this type can be sorted by, compared with `gt`, `gte`, `lt` and `lte`, and declared unique.
    pub fn is_ordered(self) -> bool {
        self != Self::Jsonb
    }
}

/// Built into every table, or declared by the app.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnOrigin {
    BuiltIn,
    Declared,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    pub name: SqlIdentifier,
    pub kind: ColumnType,
    pub origin: ColumnOrigin,
}

impl Column {
    pub fn declared(name: SqlIdentifier, kind: ColumnType) -> Self {
        Self { name, kind, origin: ColumnOrigin::Declared }
    }

    /// Returns the built-in column with this name, if any.
    pub fn built_in(name: &str) -> Option<Self> {
        let kind = match name {
            "id" => ColumnType::Uuid,
            "created_at" | "updated_at" => ColumnType::Timestamptz,
            _ => return None,
        };
        Some(Self { name: name.parse().ok()?, kind, origin: ColumnOrigin::BuiltIn })
    }

    /// Whether inserts may set the column. `id` is the only built-in column they can set.
    pub fn is_insertable(&self) -> bool {
        self.origin == ColumnOrigin::Declared || self.name.as_str() == "id"
    }

    /// Built-in columns are NOT NULL.
    pub fn is_nullable(&self) -> bool {
        self.origin == ColumnOrigin::Declared
    }
}

//! Columns and their types: the eleven names a manifest may use, and what each is in PostgreSQL.

use super::name::Name;

/// A column's type, by its name in `svc.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ColumnType {
    Text,
    Boolean,
    Integer,
    Bigint,
    Numeric,
    Double,
    Date,
    /// Kept to the millisecond, as times are on the wire: what is read can be sought.
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

    /// The name in a manifest, the SQL type, and the catalog's `typname`.
    fn row(self) -> (&'static str, &'static str, &'static str) {
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
        self.row().0
    }

    pub fn sql(self) -> &'static str {
        self.row().1
    }

    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// By `pg_type.typname`.
    pub fn by_catalog(typname: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.row().2 == typname)
    }

    /// Whether values have an order that a client may ask for.
    pub fn is_ordered(self) -> bool {
        self != Self::Jsonb
    }
}

/// Whether a column comes with every table or was declared by the app.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    BuiltIn,
    Declared,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    pub name: Name,
    pub kind: ColumnType,
    pub origin: Origin,
}

impl Column {
    pub fn declared(name: Name, kind: ColumnType) -> Self {
        Self { name, kind, origin: Origin::Declared }
    }

    /// The column that comes with every table under this name, if one does.
    pub fn built_in(name: &str) -> Option<Self> {
        let kind = match name {
            "id" => ColumnType::Uuid,
            "created_at" | "updated_at" => ColumnType::Timestamptz,
            _ => return None,
        };
        Some(Self { name: name.parse().ok()?, kind, origin: Origin::BuiltIn })
    }

    /// Whether a client may write it: of the built-in ones, only the id, and only when it makes a row.
    pub fn is_insertable(&self) -> bool {
        self.origin == Origin::Declared || self.name.as_str() == "id"
    }

    /// Only the built-in ones are declared NOT NULL.
    pub fn is_nullable(&self) -> bool {
        self.origin == Origin::Declared
    }
}

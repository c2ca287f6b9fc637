//! A query parameter with the PostgreSQL type of its column.
//!
//! Invariant: `Debug` never shows the value, because the driver logs parameters at debug level.

use std::error::Error;
use std::fmt;

use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

use crate::apps::ColumnType;

#[derive(Clone, PartialEq)]
pub enum Param {
    Null(ColumnType),
    /// Also used for values that are sent as text and cast in SQL: numerics, and a cursor's values of every type.
    Text(String),
    Bool(bool),
    Int4(i32),
    Int8(i64),
    Double(f64),
    Date(jiff::civil::Date),
    Timestamp(jiff::Timestamp),
    /// JSON text as the client sent it.
    Jsonb(String),
    Uuid(uuid::Uuid),
    Bytea(Vec<u8>),
    /// An array of values of one column.
    Array(ColumnType, Vec<Param>),
}

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null(_) => f.write_str("null"),
            Self::Array(_, values) => write!(f, "{} values", values.len()),
            _ => write!(f, "a {}", self.sql_type()),
        }
    }
}

/// The type in which a column's values are sent to PostgreSQL.
fn wire_type(kind: ColumnType) -> Type {
    match kind {
        ColumnType::Text | ColumnType::Numeric => Type::TEXT,
        ColumnType::Boolean => Type::BOOL,
        ColumnType::Integer => Type::INT4,
        ColumnType::Bigint => Type::INT8,
        ColumnType::Double => Type::FLOAT8,
        ColumnType::Date => Type::DATE,
        ColumnType::Timestamptz => Type::TIMESTAMPTZ,
        ColumnType::Jsonb => Type::JSONB,
        ColumnType::Uuid => Type::UUID,
        ColumnType::Bytea => Type::BYTEA,
    }
}

fn array_type(kind: ColumnType) -> Type {
    match kind {
        ColumnType::Text | ColumnType::Numeric => Type::TEXT_ARRAY,
        ColumnType::Boolean => Type::BOOL_ARRAY,
        ColumnType::Integer => Type::INT4_ARRAY,
        ColumnType::Bigint => Type::INT8_ARRAY,
        ColumnType::Double => Type::FLOAT8_ARRAY,
        ColumnType::Date => Type::DATE_ARRAY,
        ColumnType::Timestamptz => Type::TIMESTAMPTZ_ARRAY,
        ColumnType::Jsonb => Type::JSONB_ARRAY,
        ColumnType::Uuid => Type::UUID_ARRAY,
        ColumnType::Bytea => Type::BYTEA_ARRAY,
    }
}

impl Param {
    /// The type of the placeholder. It depends only on the column, never on the value, so that a prepared statement can
    /// be used for every value.
    pub fn sql_type(&self) -> Type {
        match self {
            Self::Null(kind) => wire_type(*kind),
            Self::Text(_) => Type::TEXT,
            Self::Bool(_) => Type::BOOL,
            Self::Int4(_) => Type::INT4,
            Self::Int8(_) => Type::INT8,
            Self::Double(_) => Type::FLOAT8,
            Self::Date(_) => Type::DATE,
            Self::Timestamp(_) => Type::TIMESTAMPTZ,
            Self::Jsonb(_) => Type::JSONB,
            Self::Uuid(_) => Type::UUID,
            Self::Bytea(_) => Type::BYTEA,
            Self::Array(kind, _) => array_type(*kind),
        }
    }
}

impl ToSql for Param {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            Self::Null(_) => Ok(IsNull::Yes),
            Self::Text(value) => value.to_sql(ty, out),
            Self::Bool(value) => value.to_sql(ty, out),
            Self::Int4(value) => value.to_sql(ty, out),
            Self::Int8(value) => value.to_sql(ty, out),
            Self::Double(value) => value.to_sql(ty, out),
            Self::Date(value) => value.to_sql(ty, out),
            Self::Timestamp(value) => value.to_sql(ty, out),
            Self::Jsonb(text) => {
                // The binary format of jsonb is a version byte and the text.
                out.put_u8(1);
                out.put_slice(text.as_bytes());
                Ok(IsNull::No)
            }
            Self::Uuid(value) => value.to_sql(ty, out),
            Self::Bytea(value) => value.to_sql(ty, out),
            Self::Array(_, values) => values.to_sql(ty, out),
        }
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_hides_value() {
        let text = Param::Text("s3cret".to_owned());
        let debug_text = format!("{text:?} {:?}", Param::Array(ColumnType::Text, vec![text.clone()]));
        assert_eq!(debug_text, "a text 1 values");
    }
}

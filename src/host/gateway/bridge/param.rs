//! A value on its way to PostgreSQL, in the type that its column fixes.

use std::error::Error;

use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

use crate::host::gateway::apps::ColumnType;

#[derive(Debug, Clone, PartialEq)]
pub enum Param {
    Null(ColumnType),
    /// Also numbers of type numeric, which travel as text and are cast.
    Text(String),
    Bool(bool),
    Int4(i32),
    Int8(i64),
    Double(f64),
    Date(jiff::civil::Date),
    Timestamp(jiff::Timestamp),
    /// JSON text, as the client wrote it.
    Jsonb(String),
    Uuid(uuid::Uuid),
    Bytea(Vec<u8>),
    Texts(Vec<String>),
}

/// The type in which values of a column travel.
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

impl Param {
    /// The type of the placeholder that takes this; it depends on the column alone, never on the value.
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
            Self::Texts(_) => Type::TEXT_ARRAY,
        }
    }

    /// As PostgreSQL reads it from text; `None` for what has no such single form here.
    pub fn into_text(self) -> Option<String> {
        Some(match self {
            Self::Text(text) => text,
            Self::Bool(value) => value.to_string(),
            Self::Int4(value) => value.to_string(),
            Self::Int8(value) => value.to_string(),
            Self::Double(value) if value.is_infinite() => {
                if value > 0.0 {
                    "Infinity".to_owned()
                } else {
                    "-Infinity".to_owned()
                }
            }
            Self::Double(value) => format!("{value:?}"),
            Self::Date(value) => value.to_string(),
            Self::Timestamp(value) => value.to_string(),
            Self::Uuid(value) => value.to_string(),
            Self::Bytea(value) => format!("\\x{}", hex::encode(value)),
            Self::Null(_) | Self::Jsonb(_) | Self::Texts(_) => return None,
        })
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
                // The binary form of jsonb is a version byte and the text.
                out.put_u8(1);
                out.put_slice(text.as_bytes());
                Ok(IsNull::No)
            }
            Self::Uuid(value) => value.to_sql(ty, out),
            Self::Bytea(value) => value.to_sql(ty, out),
            Self::Texts(value) => value.to_sql(ty, out),
        }
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

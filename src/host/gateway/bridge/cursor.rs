//! The position at the end of a page: the last row's values in the order columns, as text that PostgreSQL parses.
//!
//! A cursor is opaque but not secret: the client that receives it may read the row. A cursor in a request is validated,
//! and its values are bound as parameters, like any others. It is valid only for the order and filter for which it was
//! created.

use std::hash::{DefaultHasher, Hasher};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::BytesMut;
use serde::{Deserialize, Serialize};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, ToSql, Type};
use uuid::Uuid;

use super::filter::Filter;
use super::order::Order;
use super::sql::Sql;

/// Half of the maximum request size, which leaves room for the other fields of the request for the next page.
const MAX_ENCODED_BYTES: usize = 512 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// [`Order::fingerprint`].
    order: String,
    /// [`fingerprint`] of the filter.
    filter: String,
    /// The last row's values in the order columns; `None` for NULL.
    pub keys: Vec<Option<String>>,
}

impl Cursor {
    pub fn new(order: &Order<'_>, filter: &str, keys: Vec<Option<String>>) -> Self {
        Self { order: order.fingerprint(), filter: filter.to_owned(), keys }
    }

    /// Encodes the cursor; `None` if it would be too long for a request.
    pub fn encode(&self) -> Option<String> {
        let text = URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).expect("strings can be serialized"));
        (text.len() <= MAX_ENCODED_BYTES).then_some(text)
    }

    /// Decodes a cursor for this order and this filter's [`fingerprint`].
    ///
    /// # Errors
    /// The text is not a cursor, or belongs to a different order or filter.
    pub fn decode(text: &str, order: &Order<'_>, filter: &str) -> Result<Self, &'static str> {
        let invalid = "is not a cursor from this server";
        let bytes = if text.len() <= MAX_ENCODED_BYTES { URL_SAFE_NO_PAD.decode(text).ok() } else { None };
        let cursor: Self = serde_json::from_slice(&bytes.ok_or(invalid)?).map_err(|_| invalid)?;
        if cursor.order != order.fingerprint() {
            return Err("belongs to a different orderBy");
        }
        if cursor.filter != filter {
            return Err("belongs to a different filter");
        }
        let is_valid = cursor.keys.len() == order.keys.len()
            && cursor.keys.iter().zip(&order.keys).all(|(value, (column, _))| {
                value.as_ref().map_or_else(|| column.is_nullable(), |text| !text.contains('\0'))
            });
        if is_valid { Ok(cursor) } else { Err(invalid) }
    }
}

/// Returns a hash of the filter's SQL and values, which does not depend on how its JSON is written; empty for an empty
/// filter. It only guards against clients' mistakes. Another release may hash differently, which invalidates old
/// cursors.
pub fn fingerprint(filter: &Filter<'_>) -> String {
    if filter.is_empty() {
        return String::new();
    }
    let mut sql = Sql::default();
    filter.write(&mut sql);
    let mut hasher = DefaultHasher::new();
    hasher.write(sql.text.as_bytes());
    let mut bytes = BytesMut::new();
    for param in &sql.params {
        bytes.clear();
        // The lengths separate the values. A parameter that cannot be encoded is skipped: its query fails in any case.
        if param.to_sql(&param.sql_type(), &mut bytes).is_ok() {
            hasher.write_usize(bytes.len());
            hasher.write(&bytes);
        }
    }
    format!("{:016x}", hasher.finish())
}

/// A row's value as text that PostgreSQL parses to exactly that value.
///
/// # Errors
/// The column is missing or has an unexpected type.
pub fn key_text(row: &Row, index: usize) -> Result<Option<String>, tokio_postgres::Error> {
    Ok(match row.columns().get(index).map(tokio_postgres::Column::type_) {
        Some(&Type::INT4) => row.try_get::<_, Option<i32>>(index)?.map(|number| number.to_string()),
        Some(&Type::INT8) => row.try_get::<_, Option<i64>>(index)?.map(|number| number.to_string()),
        Some(&Type::UUID) => row.try_get::<_, Option<Uuid>>(index)?.map(|id| id.to_string()),
        Some(&Type::TIMESTAMPTZ) => row.try_get::<_, Option<PgMicros>>(index)?.map(PgMicros::to_text),
        _ => row.try_get(index)?,
    })
}

/// Microseconds since 2000-01-01, PostgreSQL's time unit.
#[derive(Debug, Clone, Copy)]
struct PgMicros(i64);

impl PgMicros {
    /// Formats the time with a Julian day, which covers PostgreSQL's whole range and needs no calendar.
    fn to_text(self) -> String {
        const MICROS_PER_DAY: i64 = 86_400_000_000;
        /// The Julian day of 2000-01-01.
        const JULIAN_DAY_2000: i64 = 2_451_545;
        match self.0 {
            i64::MAX => "infinity".to_owned(),
            i64::MIN => "-infinity".to_owned(),
            micros => {
                let day = JULIAN_DAY_2000 + micros.div_euclid(MICROS_PER_DAY);
                let micros_of_day = micros.rem_euclid(MICROS_PER_DAY);
                let (seconds, micros) = (micros_of_day / 1_000_000, micros_of_day % 1_000_000);
                let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
                format!("J{day:07} {hour:02}:{minute:02}:{second:02}.{micros:06}+00")
            }
        }
    }
}

impl<'a> FromSql<'a> for PgMicros {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(i64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::TIMESTAMPTZ
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_text_uses_julian_day() {
        for (micros, text) in [
            (0, "J2451545 00:00:00.000000+00"),
            (1, "J2451545 00:00:00.000001+00"),
            (-1, "J2451544 23:59:59.999999+00"),
            (86_400_000_000 + 3_723_000_456, "J2451546 01:02:03.000456+00"),
            (i64::MAX, "infinity"),
            (i64::MIN, "-infinity"),
        ] {
            assert_eq!(PgMicros(micros).to_text(), text, "{micros}");
        }
    }
}

//! Where a page ended: the last row's values of the order's columns, as PostgreSQL prints them.
//!
//! It is opaque to clients but no secret: they have seen the row. What comes back is checked and bound like any value.
//! It goes on only in the order and with the filter that it came from.

use std::hash::{DefaultHasher, Hasher};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::BytesMut;
use serde::{Deserialize, Serialize};
use tokio_postgres::types::ToSql;

use super::filter::Filter;
use super::order::Order;
use super::sql::Sql;

/// Half of what a request may hold.
const LONGEST: usize = 512 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// [`Order::fingerprint`].
    order: String,
    /// [`fingerprint`] of the filter.
    filter: String,
    pub keys: Vec<Option<String>>,
}

impl Cursor {
    pub fn new(order: &Order<'_>, filter: &str, keys: Vec<Option<String>>) -> Self {
        Self { order: order.fingerprint(), filter: filter.to_owned(), keys }
    }

    /// `None` when the values are longer than a request could bring back.
    pub fn encode(&self) -> Option<String> {
        let text = URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).expect("texts are JSON"));
        (text.len() <= LONGEST).then_some(text)
    }

    /// # Errors
    /// When it is none of ours, or of another order or filter.
    pub fn decode(text: &str, order: &Order<'_>, filter: &str) -> Result<Self, &'static str> {
        let why = "is not a cursor that this server gave";
        let bytes = if text.len() <= LONGEST { URL_SAFE_NO_PAD.decode(text).ok() } else { None };
        let cursor: Self = serde_json::from_slice(&bytes.ok_or(why)?).map_err(|_| why)?;
        if cursor.order != order.fingerprint() {
            return Err("belongs to another orderBy");
        }
        if cursor.filter != filter {
            return Err("belongs to another filter");
        }
        let fits = cursor.keys.len() == order.keys.len()
            && cursor.keys.iter().zip(&order.keys).all(|(value, (column, _))| {
                value.as_ref().map_or_else(|| column.is_nullable(), |text| !text.contains('\0'))
            });
        if fits { Ok(cursor) } else { Err(why) }
    }
}

/// The same for the same filter with the same values, however it was written; empty for none. It only catches mistakes,
/// so another version may give another one.
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
        // What PostgreSQL gets is what tells two values apart; a parameter that has no such form never gets there.
        if param.to_sql(&param.sql_type(), &mut bytes).is_ok() {
            hasher.write_usize(bytes.len());
            hasher.write(&bytes);
        }
    }
    format!("{:016x}", hasher.finish())
}

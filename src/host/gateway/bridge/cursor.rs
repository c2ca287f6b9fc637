//! Where a page ended: the last row's values of the order's columns, as PostgreSQL prints them.
//!
//! It is opaque to clients but no secret: they have seen the row. What comes back is checked and bound like any value.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

use super::order::Order;

const LONGEST: usize = 16 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// [`Order::fingerprint`].
    order: String,
    pub keys: Vec<Option<String>>,
}

impl Cursor {
    pub fn new(order: &Order<'_>, keys: Vec<Option<String>>) -> Self {
        Self { order: order.fingerprint(), keys }
    }

    pub fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).expect("texts are JSON"))
    }

    /// # Errors
    /// When it is none of ours, or of another order.
    pub fn decode(text: &str, order: &Order<'_>) -> Result<Self, &'static str> {
        let why = "is not a cursor that this server gave";
        let bytes = if text.len() <= LONGEST { URL_SAFE_NO_PAD.decode(text).ok() } else { None };
        let cursor: Self = serde_json::from_slice(&bytes.ok_or(why)?).map_err(|_| why)?;
        if cursor.order != order.fingerprint() {
            return Err("belongs to another orderBy");
        }
        let fits = cursor.keys.len() == order.keys.len()
            && cursor.keys.iter().zip(&order.keys).all(|(value, (column, _))| {
                value.as_ref().map_or_else(|| column.is_nullable(), |text| !text.contains('\0'))
            });
        if fits { Ok(cursor) } else { Err(why) }
    }
}

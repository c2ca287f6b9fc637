//! The `Idempotency-Key` header: a request that is repeated with the same key is performed only once.

use http::HeaderMap;
use serde_json::Value;

use crate::openapi::text_matching;
use crate::problem::Problem;

pub const HEADER: &str = "Idempotency-Key";

/// Returns the key, if the client sent one.
///
/// # Errors
/// `invalid_request` if it is not 1 to 255 printable ASCII characters.
pub fn read_key(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get(HEADER) else { return Ok(None) };
    match value.to_str() {
        Ok(text) if (1..=255).contains(&text.len()) && !text.contains('\t') => Ok(Some(text)),
        _ => Err(Problem::field(HEADER, "must be 1 to 255 printable ASCII characters")),
    }
}

pub fn key_schema() -> Value {
    text_matching("^[ -~]{1,255}$")
}

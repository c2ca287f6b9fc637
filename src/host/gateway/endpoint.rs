//! Route metadata for the OpenAPI document and request checks.

use svc_http::openapi::Operation;

pub use svc_http::openapi::documented_json;

/// Extractor for the first path parameter, percent-decoded.
pub struct PathParameter(pub String);

/// Default body limit, for routes with a small body or none.
pub const DEFAULT_MAX_BODY_BYTES: usize = 64 * 1024;

/// A single method on a single path, and its body limit.
pub struct Endpoint {
    pub operation: Operation,
    pub max_body_bytes: usize,
}

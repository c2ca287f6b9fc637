//! The description of a route, for the OpenAPI document and for the checks of its requests.

use svc_http::openapi::Operation;

pub use svc_http::openapi::documented_json;

/// Extracts the value of the path's first parameter, decoded.
pub struct PathParameter(pub String);

/// Default maximum body size, for routes without a body or with a small one.
pub const DEFAULT_MAX_BODY_BYTES: usize = 64 * 1024;

/// One method of one path, and its maximum body size.
pub struct Endpoint {
    pub operation: Operation,
    pub max_body_bytes: usize,
}

//! The description of a route, for the OpenAPI document and for the route's guards.

use serde_json::Value;

use svc_http::openapi::{Content, DocumentedResponse, Operation};

/// Default maximum body size, for routes without a body or with a small one.
pub const DEFAULT_MAX_BODY_BYTES: usize = 64 * 1024;

/// One method of one path, and its maximum body size.
pub struct Endpoint {
    pub operation: Operation,
    pub max_body_bytes: usize,
}

/// Describes a JSON response.
pub const fn documented_json(
    status: u16,
    description: &'static str,
    schema: fn() -> Value,
) -> DocumentedResponse {
    DocumentedResponse { status, description, content: Content::Json(schema) }
}

//! The provider's error responses: `{"error": {"code", "message", "details"}}` with a status.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};

/// An error response from the provider.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ErrorResponse {
    pub(super) status: StatusCode,
    pub(super) code: String,
    message: String,
    /// Its members depend on `code`.
    details: Box<Value>,
}

impl ErrorResponse {
    pub(super) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        Self { status, code: code.to_owned(), message: message.into(), details: Box::new(json!({})) }
    }

    /// The error for an invalid field.
    pub(super) fn invalid(field: &'static str, message: &'static str) -> Self {
        let text = format!("invalid input in field '{field}': {message}");
        Self {
            details: Box::new(json!({"fields": [{"name": field, "messages": [message]}]})),
            ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_input", text)
        }
    }

    pub(super) fn malformed_json(error: &serde_json::Error) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "json_error", error.to_string())
    }

    pub(super) fn not_found(kind: &str, id: i64) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("{kind} with ID '{id}' not found"))
    }

    pub(super) fn locked() -> Self {
        let text = "cannot perform operation because resource is locked";
        Self::new(StatusCode::LOCKED, "locked", text)
    }

    pub(super) fn protected() -> Self {
        Self::new(StatusCode::LOCKED, "protected", "server deletion is protected")
    }

    pub(super) fn name_taken() -> Self {
        Self {
            details: Box::new(json!({"fields": [{"name": "name"}]})),
            ..Self::new(StatusCode::CONFLICT, "uniqueness_error", "server name is already used")
        }
    }

    /// The error for functionality that the API no longer has.
    pub(super) fn removed(announcement: &str) -> Self {
        Self {
            details: Box::new(json!({"announcement": announcement})),
            ..Self::new(StatusCode::GONE, "deprecated_api_endpoint", "API functionality was removed")
        }
    }

    pub(super) fn server_limit() -> Self {
        Self {
            details: Box::new(json!({"limits": [{"name": "server_limit"}]})),
            ..Self::new(StatusCode::FORBIDDEN, "resource_limit_exceeded", "server limit exceeded")
        }
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let body = json!({"error": {"code": self.code, "message": self.message, "details": self.details}});
        (self.status, Json(body)).into_response()
    }
}

//! Error responses of the provider: `{"error": {"code", "message", "details"}}` with their status.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};

/// A call that the provider refuses.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) code: String,
    message: String,
    /// The invalid field, with the reason.
    field: Option<(&'static str, &'static str)>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        Self { status, code: code.to_owned(), message: message.into(), field: None }
    }

    /// Error for an invalid field.
    pub(super) fn invalid(field: &'static str, message: &'static str) -> Self {
        let text = format!("invalid input in field '{field}'");
        Self {
            field: Some((field, message)),
            ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_input", text)
        }
    }

    pub(super) fn not_found(what: &str, id: i64) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("{what} with ID '{id}' not found"))
    }

    pub(super) fn locked() -> Self {
        Self::new(StatusCode::LOCKED, "locked", "another action is running on this server")
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let details = self.field.map_or(
            Value::Null,
            |(name, message)| json!({"fields": [{"name": name, "messages": [message]}]}),
        );
        let body = json!({"error": {"code": self.code, "message": self.message, "details": details}});
        (self.status, Json(body)).into_response()
    }
}

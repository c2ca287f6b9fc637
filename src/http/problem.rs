//! Errors as they leave us: RFC 9457 `application/problem+json` with a stable `code`.
//!
//! A problem holds only what the caller may know. Internal detail is logged under the same request id, never sent.

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::{Map, Value};

pub use crate::chain::chain;

/// Declares the codes with all that belongs to each, so that none can be left out of anything.
macro_rules! codes {
    ($($name:ident $status:ident $code:literal $title:literal)*) => {
        /// The stable codes of the contract's part 3 (and the bridge's), each with one status and title.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Code { $($name),* }

        impl Code {
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            fn row(self) -> (StatusCode, &'static str, &'static str) {
                match self { $(Self::$name => (StatusCode::$status, $code, $title)),* }
            }
        }
    };
}

codes! {
    InvalidRequest BAD_REQUEST "invalid_request" "The request is not valid"
    Unauthorized UNAUTHORIZED "unauthorized" "A valid credential is needed"
    Forbidden FORBIDDEN "forbidden" "This credential may not do that"
    RegistrationRejected UNAUTHORIZED "registration_rejected" "The registration is not accepted"
    Superseded FORBIDDEN "superseded" "This machine has been replaced"
    SubscriptionRequired PAYMENT_REQUIRED "subscription_required" "The slot has no active subscription"
    ServerTypeNotAllowed FORBIDDEN "server_type_not_allowed" "The slot's plan does not contain this server type"
    MachineNotFound NOT_FOUND "machine_not_found" "There is no such machine"
    BundleNotFound NOT_FOUND "bundle_not_found" "There is no such bundle"
    NotFound NOT_FOUND "not_found" "There is nothing here"
    Gone GONE "gone" "This is not known any more"
    MethodNotAllowed METHOD_NOT_ALLOWED "method_not_allowed" "The method is not allowed here"
    RequestTooLarge PAYLOAD_TOO_LARGE "request_too_large" "The request is too large"
    UnsupportedMediaType UNSUPPORTED_MEDIA_TYPE "unsupported_media_type" "The body must be application/json"
    RangeNotSatisfiable RANGE_NOT_SATISFIABLE "range_not_satisfiable" "The range is outside the object"
    InvalidState CONFLICT "invalid_state" "The machine's state does not allow this"
    HandleTaken CONFLICT "handle_taken" "The handle belongs to another user"
    DiskWouldShrink CONFLICT "disk_would_shrink" "The disk would shrink"
    DiskTooSmall CONFLICT "disk_too_small" "The snapshot does not fit the server's disk"
    SnapshotUnusable CONFLICT "snapshot_unusable" "There is no usable snapshot"
    Conflict CONFLICT "conflict" "The request conflicts with what is stored"
    IdempotencyMismatch UNPROCESSABLE_ENTITY "idempotency_mismatch" "The idempotency key was used with another request"
    PreviewLimitReached TOO_MANY_REQUESTS "preview_limit_reached" "The preview limit is reached"
    RateLimited TOO_MANY_REQUESTS "rate_limited" "Too many requests"
    CostLimitReached TOO_MANY_REQUESTS "cost_limit_reached" "The cost limit is reached"
    ProvisioningError BAD_GATEWAY "provisioning_error" "The provider could not do this"
    HostUnreachable BAD_GATEWAY "host_unreachable" "The host could not be asked"
    HostRefused BAD_GATEWAY "host_refused" "The host refused the platform's request"
    HostAnswerInvalid BAD_GATEWAY "host_answer_invalid" "The host's answer cannot be used"
    UpstreamUnavailable BAD_GATEWAY "upstream_unavailable" "The machine did not answer"
    Disabled SERVICE_UNAVAILABLE "disabled" "This is switched off"
    StoreUnavailable SERVICE_UNAVAILABLE "store_unavailable" "The object store cannot be reached"
    DatabaseUnavailable SERVICE_UNAVAILABLE "database_unavailable" "The database cannot be reached"
    Unavailable SERVICE_UNAVAILABLE "unavailable" "Not available now"
    StorageQuotaReached INSUFFICIENT_STORAGE "storage_quota_reached" "The app's storage quota is reached"
    DeadlineExceeded GATEWAY_TIMEOUT "deadline_exceeded" "This took too long"
    Internal INTERNAL_SERVER_ERROR "internal" "Something went wrong on our side"
}

impl Code {
    pub fn status(self) -> StatusCode {
        self.row().0
    }

    pub fn as_str(self) -> &'static str {
        self.row().1
    }

    pub fn title(self) -> &'static str {
        self.row().2
    }
}

/// One field of a request that is wrong: a JSON pointer (RFC 6901), or `?name` of a query parameter.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub struct FieldError {
    pub pointer: String,
    pub detail: String,
}

/// The errors of one request that its answer names.
const MAX_ERRORS: usize = 32;
/// Of a pointer, and of its detail; a request can have a field name of its whole size.
const MAX_ERROR_CHARS: usize = 256;

impl FieldError {
    fn shortened(&self) -> Self {
        let short = |text: &str| match text.char_indices().nth(MAX_ERROR_CHARS) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text.to_owned(),
        };
        Self { pointer: short(&self.pointer), detail: short(&self.detail) }
    }
}

/// A refusal or failure on its way to the caller.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}: {detail}", .code.as_str())]
pub struct Problem {
    pub code: Code,
    pub detail: String,
    /// Members beside the standard ones, e.g. `status` and `allowed` of `invalid_state`.
    pub members: Map<String, Value>,
    pub retry_after_seconds: Option<u64>,
}

impl Problem {
    /// `detail` is read by the caller: it says what to do, and holds nothing internal.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), members: Map::new(), retry_after_seconds: None }
    }

    /// Names the first `MAX_ERRORS` of the errors, so that no request gets an answer many times its size.
    pub fn invalid(errors: &[FieldError]) -> Self {
        let shown: Vec<_> = errors.iter().take(MAX_ERRORS).map(FieldError::shortened).collect();
        let mut detail: Vec<_> = shown.iter().map(|e| format!("{}: {}", e.pointer, e.detail)).collect();
        if errors.len() > MAX_ERRORS {
            detail.push(format!("and {} more", errors.len() - MAX_ERRORS));
        }
        Self::new(Code::InvalidRequest, detail.join("; ")).with("errors", serde_json::json!(shown))
    }

    pub fn field(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::invalid(&[FieldError { pointer: pointer.into(), detail: detail.into() }])
    }

    /// Logs the chain of an unforeseen error under the request id, and answers with nothing of it.
    pub fn internal(error: &(dyn std::error::Error + 'static)) -> Self {
        tracing::error!(error = %chain(error), "request failed");
        Self::new(Code::Internal, "The failure is logged under this request id.")
    }

    #[must_use]
    pub fn with(mut self, name: &str, value: Value) -> Self {
        self.members.insert(name.to_owned(), value);
        self
    }

    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after_seconds = Some(seconds);
        self
    }

    /// The body as sent. Extension members never hide a standard one.
    pub fn body(&self) -> Value {
        let mut body = Map::new();
        body.insert("type".into(), format!("urn:svc:problem:{}", self.code.as_str()).into());
        body.insert("title".into(), self.code.title().into());
        body.insert("status".into(), self.code.status().as_u16().into());
        body.insert("detail".into(), self.detail.clone().into());
        body.insert("code".into(), self.code.as_str().into());
        body.insert("requestId".into(), super::request_id::current().into());
        for (name, value) in &self.members {
            body.entry(name.clone()).or_insert_with(|| value.clone());
        }
        Value::Object(body)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.code.status(), self.body().to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(seconds) = self.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.code.status() == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_of_many_errors_is_bounded() {
        let error =
            FieldError { pointer: format!("/{}", "é".repeat(100_000)), detail: "is unknown".to_owned() };
        let problem = Problem::invalid(&vec![error; 1000]);
        assert!(problem.detail.ends_with("; and 968 more"), "{}", problem.detail);
        assert_eq!(problem.members["errors"].as_array().map(Vec::len), Some(MAX_ERRORS));
        assert!(problem.detail.len() < 32 << 10, "{}", problem.detail.len());
    }
}

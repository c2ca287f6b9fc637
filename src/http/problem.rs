//! Error responses: RFC 9457 `application/problem+json` with a stable `code`.
//!
//! A problem contains only what the caller may know. Internal details are logged under the same request id, never sent.

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::{Map, Value};

pub use svc_base::error_chain::format_chain;

/// Declares the codes with their status, title and remedy, so that no list can omit one.
macro_rules! codes {
    ($($name:ident $status:ident $code:literal $title:literal $remedy:literal)*) => {
        /// The stable codes of the platform's and the host's HTTP APIs, each with one status and one title.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Code { $($name),* }

        impl Code {
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            fn row(self) -> (StatusCode, &'static str, &'static str) {
                match self { $(Self::$name => (StatusCode::$status, $code, $title)),* }
            }

            /// Returns the remedy, in Markdown, for `docs/reference/errors.md`.
            pub fn remedy(self) -> &'static str {
                match self { $(Self::$name => $remedy),* }
            }
        }
    };
}

codes! {
    InvalidRequest BAD_REQUEST "invalid_request" "Invalid request"
        "Correct the fields that `errors` lists."
    Unauthorized UNAUTHORIZED "unauthorized" "Authentication required"
        "Check `PLATFORM_SECRET`, or whether the operator's token has expired; a browser or program must \
         sign in again."
    Forbidden FORBIDDEN "forbidden" "Permission denied"
        "Use a credential that has the permission; an operator needs one of the scopes in `missingScopes`."
    RegistrationRejected UNAUTHORIZED "registration_rejected" "Registration rejected"
        "A host's token has expired, has already been used, or belongs to another machine: check `svcctl status \
         MACHINE`, then recover or provision again."
    Superseded FORBIDDEN "superseded" "This machine has been replaced"
        "No action is needed: the machine was replaced and stops automatically."
    SubscriptionRequired PAYMENT_REQUIRED "subscription_required" "The slot has no active subscription"
        "Run `svcctl slot set` for this slot."
    ServerTypeNotAllowed FORBIDDEN "server_type_not_allowed" "The slot's plan does not include this server type"
        "Choose a type that the slot's plan includes, or change the plan."
    MachineNotFound NOT_FOUND "machine_not_found" "Machine not found"
        "Check the name with `svcctl list` and `svcctl list --deleted`."
    BundleNotFound NOT_FOUND "bundle_not_found" "Bundle not found"
        "Publish that version."
    NotFound NOT_FOUND "not_found" "Not found"
        "Check the path and the names in it."
    Gone GONE "gone" "No longer available"
        "For changes from the bridge: read the tables, then subscribe without `Last-Event-ID`. For records: \
         start again without the cursor or id."
    MethodNotAllowed METHOD_NOT_ALLOWED "method_not_allowed" "Method not allowed"
        "Use one of the methods in `Allow`."
    RequestTooLarge PAYLOAD_TOO_LARGE "request_too_large" "Request too large"
        "Send a smaller body: at most 1 MiB to the bridge, 2 MiB to `/api/dispatch`, and 64 KiB to other routes."
    UnsupportedMediaType UNSUPPORTED_MEDIA_TYPE "unsupported_media_type" "The body must be application/json"
        "Send the body as JSON, with `Content-Type: application/json`."
    RangeNotSatisfiable RANGE_NOT_SATISFIABLE "range_not_satisfiable" "Range not satisfiable"
        "Start the download from the beginning."
    InvalidState CONFLICT "invalid_state" "The machine's state does not allow this"
        "`machineStatus` is the machine's state, and `allowed` lists the states that the request requires: \
         wait for the operation, or recover. See also [Members of \
         `invalid_state`](#members-of-invalid_state)."
    HandleTaken CONFLICT "handle_taken" "The handle belongs to another user"
        "Choose another handle."
    DiskWouldShrink CONFLICT "disk_would_shrink" "The disk would shrink"
        "Choose a type whose disk is at least as large as the server's current one."
    DiskTooSmall CONFLICT "disk_too_small" "The snapshot does not fit on the server's disk"
        "Choose a `--server-type` with a larger disk."
    SnapshotUnusable CONFLICT "snapshot_unusable" "There is no usable snapshot"
        "There is no complete, verified snapshot, or none with that key. See [No usable \
         snapshot](#no-usable-snapshot)."
    ServerLimitReached CONFLICT "server_limit_reached" "The provider's project has no room for another server"
        "Raise the project's limit at the provider, and `PROVIDER_SERVER_LIMIT`; or delete unused servers. Nothing was \
         created."
    ConfirmationRequired PRECONDITION_REQUIRED "confirmation_required" "A confirmation is missing"
        "Send the fields that `missing` lists; `svcctl provision` prompts for them."
    PriceChanged CONFLICT "price_changed" "The monthly cost differs from the confirmed one"
        "`monthlyCost` is the current cost: confirm it, then send the request again. Nothing was created."
    Conflict CONFLICT "conflict" "Conflict with the stored state"
        "Check the stored state, then send the request again; if `retryable` is set, send it again \
         without a check."
    IdempotencyMismatch UNPROCESSABLE_ENTITY "idempotency_mismatch" "The idempotency key was used for a different request"
        "Use a new `Idempotency-Key` for a different request."
    PreviewLimitReached TOO_MANY_REQUESTS "preview_limit_reached" "Preview limit reached"
        "Delete a preview machine."
    RateLimited TOO_MANY_REQUESTS "rate_limited" "Too many requests"
        "Retry after the time in `Retry-After`."
    CostLimitReached TOO_MANY_REQUESTS "cost_limit_reached" "Cost limit reached"
        "Retry after the time in `Retry-After`, or raise the limit."
    ProvisioningError BAD_GATEWAY "provisioning_error" "Provider error"
        "The provider failed; its response is only in the log. Check the quota, the location and the server type."
    HostUnreachable BAD_GATEWAY "host_unreachable" "Host unreachable"
        "Check the machine's heartbeat and logs, then recover."
    HostRefused BAD_GATEWAY "host_refused" "The host refused the platform's request"
        "`detail` has the reason: the host's release is too old (update it with `svcctl deploy start`), or its \
         clock is wrong."
    HostResponseInvalid BAD_GATEWAY "host_answer_invalid" "Invalid response from the host"
        "`detail` has the reason: request fewer days, or check the platform's log."
    UpstreamUnavailable BAD_GATEWAY "upstream_unavailable" "The machine did not respond"
        "The machine is running but does not respond: check its own logs, then recover."
    Disabled SERVICE_UNAVAILABLE "disabled" "Feature disabled"
        "For provisioning, set `CUSTOMER_VPS_ENABLED=true`. A host that requests storage credentials needs none, because \
         the store does not use any."
    StoreUnavailable SERVICE_UNAVAILABLE "store_unavailable" "Object store unavailable"
        "Retry when the store is available again; nothing was changed unless `detail` says otherwise."
    DatabaseUnavailable SERVICE_UNAVAILABLE "database_unavailable" "Database unavailable"
        "Retry when the database is available again; the requested change may have been made."
    Unavailable SERVICE_UNAVAILABLE "unavailable" "Service unavailable"
        "`detail` has the reason. If the user has no running machine, see `svcctl list --user IDP_USER_ID`; otherwise, \
         retry after the time in `Retry-After`."
    StorageQuotaReached INSUFFICIENT_STORAGE "storage_quota_reached" "The app's storage quota is reached"
        "Delete rows, or have the owner raise `storage` in `system/config.json`."
    DeadlineExceeded GATEWAY_TIMEOUT "deadline_exceeded" "Deadline exceeded"
        "Retry in a moment, with less work in one request."
    Internal INTERNAL_SERVER_ERROR "internal" "Internal error"
        "This is a bug in svc: find the log lines by `requestId`."
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

/// An invalid field in a request.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub struct FieldError {
    /// A JSON pointer (RFC 6901), or `?name` for a query parameter.
    pub pointer: String,
    pub detail: String,
}

/// Maximum number of field errors in one response.
const MAX_ERRORS: usize = 32;
/// Maximum length of a pointer and of a detail, because a field name can be as long as the request.
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

/// An error response.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}: {detail}", .code.as_str())]
pub struct Problem {
    pub code: Code,
    pub detail: String,
    /// Extension members, such as `machineStatus` and `allowed` for `invalid_state`.
    pub members: Map<String, Value>,
    pub retry_after_seconds: Option<u64>,
}

impl Problem {
    /// Creates a problem. `detail` is sent to the client, so it must say what to do and must not contain internal
    /// details.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), members: Map::new(), retry_after_seconds: None }
    }

    /// Creates an `invalid_request` problem. It lists only the first `MAX_ERRORS` errors, each shortened, so that a
    /// response is never many times the size of its request.
    pub fn invalid(errors: &[FieldError]) -> Self {
        let listed: Vec<_> = errors.iter().take(MAX_ERRORS).map(FieldError::shortened).collect();
        let describe = |error: &FieldError| match error.pointer.as_str() {
            // The whole body or path.
            "" => error.detail.clone(),
            pointer => format!("{pointer}: {}", error.detail),
        };
        let mut detail: Vec<_> = listed.iter().map(describe).collect();
        if errors.len() > MAX_ERRORS {
            detail.push(format!("and {} more", errors.len() - MAX_ERRORS));
        }
        Self::new(Code::InvalidRequest, detail.join("; ")).with("errors", serde_json::json!(listed))
    }

    pub fn field(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::invalid(&[FieldError { pointer: pointer.into(), detail: detail.into() }])
    }

    /// Logs the chain of an unexpected error under the request id; the response contains none of it.
    pub fn internal(error: &(dyn std::error::Error + 'static)) -> Self {
        tracing::error!(error = %format_chain(error), "request failed");
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

    /// Returns the response body. Extension members never replace standard ones.
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
    fn invalid_bounds_the_number_and_length_of_errors() {
        let error =
            FieldError { pointer: format!("/{}", "é".repeat(100_000)), detail: "is unknown".to_owned() };
        let problem = Problem::invalid(&vec![error; 1000]);
        assert!(problem.detail.ends_with("; and 968 more"), "{}", problem.detail);
        assert_eq!(problem.members["errors"].as_array().map(Vec::len), Some(MAX_ERRORS));
        assert!(problem.detail.len() < 32 << 10, "{}", problem.detail.len());
    }
}

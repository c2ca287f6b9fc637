//! A route with its description. The router, its guards and the OpenAPI document are built from one list.
//!
//! Invariant: the guard of a route reads the allowed callers from its description.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use http::header;
use serde_json::Value;

use super::auth::{Principal, admit};
use super::body;
use super::state::Gateway;
use svc_http::openapi::{Content, Credential, DocumentedResponse, Operation, Scheme};

/// Default maximum body size, for routes without a body or with a small one.
pub const DEFAULT_MAX_BODY_BYTES: usize = 64 * 1024;

/// One method of one path, its handler, and its maximum body size.
pub struct Endpoint {
    pub operation: Operation,
    pub max_body_bytes: usize,
    pub serve: fn() -> MethodRouter<Arc<Gateway>>,
}

pub const OWNER: Credential = Credential {
    name: "owner",
    scheme: Scheme::Bearer,
    about: "A JWT of the configured issuer for this machine's owner. Through the platform's router a browser's \
            session works as well: the router replaces it with its own proof, x-svc-proof.",
};
pub const OWNERS_PROCESS: Credential = Credential {
    name: "ownersProcess",
    scheme: Scheme::Bearer,
    about: "No token: a process of the owner's user, such as a terminal, on the machine's unix socket.",
};
pub const AGENT: Credential = Credential {
    name: "agent",
    scheme: Scheme::Bearer,
    about: "The token of a running agent (SVC_BRIDGE_TOKEN), on the agents' unix socket (SVC_BRIDGE_SOCKET).",
};
pub const APP: Credential = Credential {
    name: "app",
    scheme: Scheme::Bearer,
    about: "An app's token, through the platform's router, which replaces it with a proof.",
};
pub const ADMIN: Credential = Credential {
    name: "admin",
    scheme: Scheme::Bearer,
    about: "The machine's ADMIN_TOKEN, together with a proof.",
};
pub const PLATFORM: Credential = Credential {
    name: "platform",
    scheme: Scheme::Header("x-svc-proof"),
    about: "A proof of the platform for this request: route internal with method, path and a single-use id.",
};

/// The owner and the machine's administrators.
pub const OWNERS: &[Credential] = &[OWNER, ADMIN];
/// Callers that may read the owner's records, but not act for the owner.
pub const READERS: &[Credential] = &[OWNER, OWNERS_PROCESS, ADMIN];
/// [`READERS`], and the platform on behalf of its operators.
pub const READERS_AND_PLATFORM: &[Credential] = &[OWNER, OWNERS_PROCESS, ADMIN, PLATFORM];
/// Callers that may load pages of apps.
pub const VIEWERS: &[Credential] = &[OWNER, OWNERS_PROCESS, APP, ADMIN];
/// All callers except the platform.
pub const CALLERS: &[Credential] = &[OWNER, OWNERS_PROCESS, AGENT, APP, ADMIN];

impl Principal {
    /// The credential of this principal.
    pub fn credential(&self) -> Credential {
        match self {
            Self::Owner { .. } => OWNER,
            Self::OwnersProcess { .. } => OWNERS_PROCESS,
            Self::Agent { .. } => AGENT,
            Self::App { .. } => APP,
            Self::Admin => ADMIN,
            Self::Platform => PLATFORM,
        }
    }
}

/// Builds the router of the endpoints that are `open` to everyone, or of the others, each behind its guards. A request
/// is checked in this order: method and path, size, credential.
pub fn routes(endpoints: &[&'static Endpoint], open: bool) -> Router<Arc<Gateway>> {
    let chosen = endpoints.iter().filter(|endpoint| endpoint.operation.credentials.is_empty() == open);
    chosen.fold(Router::new(), |router, endpoint| router.route(endpoint.operation.path, guarded(endpoint)))
}

fn guarded(endpoint: &'static Endpoint) -> MethodRouter<Arc<Gateway>> {
    let Operation { credentials, .. } = endpoint.operation;
    let route = (endpoint.serve)();
    if credentials.is_empty() {
        return route;
    }
    let max_bytes = endpoint.max_body_bytes;
    route
        .route_layer(from_fn(move |request, next| admit(credentials, request, next)))
        .route_layer(from_fn(move |request, next| limit_body(max_bytes, request, next)))
}

/// Rejects a request by its declared length before its credential is checked. A body without a declared length is
/// limited where it is read.
async fn limit_body(max_bytes: usize, request: Request, next: Next) -> Response {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    let length: Option<u64> = length.and_then(|text| text.parse().ok());
    if length.is_some_and(|length| length > max_bytes as u64) {
        body::drain(request.into_body()).await;
        return body::too_large(max_bytes).into_response();
    }
    next.run(request).await
}

/// Describes a JSON response.
pub const fn documented_json(status: u16, about: &'static str, schema: fn() -> Value) -> DocumentedResponse {
    DocumentedResponse { status, about, content: Content::Json(schema) }
}

//! A route together with its description: the router, its guards and the document are made of the same list.
//!
//! Invariant: who may call a route is what its description says, for the guard reads it there.

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
use crate::http::openapi::{Answer, Content, Credential, Operation, Scheme};

/// The largest body of routes that take none, or a small one.
pub const OWN_BODY: usize = 64 * 1024;

/// One method of one path, what serves it, and how much of a body it hears.
pub struct Endpoint {
    pub operation: Operation,
    pub largest_body: usize,
    pub serve: fn() -> MethodRouter<Arc<Gateway>>,
}

pub const OWNER: Credential = Credential {
    name: "owner",
    scheme: Scheme::Bearer,
    about: "A JWT of the configured issuer for this machine's owner. Through the platform's router a browser's \
            session does as well: the router sends its own proof, x-svc-proof, in its place.",
};
pub const OWNERS_PROCESS: Credential = Credential {
    name: "ownersProcess",
    scheme: Scheme::Bearer,
    about: "No token: a process of the owner's user, such as a terminal, on the machine's unix socket.",
};
pub const AGENT: Credential = Credential {
    name: "agent",
    scheme: Scheme::Bearer,
    about: "The token of an agent that runs (SVC_BRIDGE_TOKEN), on the agents' unix socket (SVC_BRIDGE_SOCKET).",
};
pub const APP: Credential = Credential {
    name: "app",
    scheme: Scheme::Bearer,
    about: "An app's token, by way of the platform's router, which sends a proof in its place.",
};
pub const ADMIN: Credential =
    Credential { name: "admin", scheme: Scheme::Bearer, about: "The machine's ADMIN_TOKEN, beside a proof." };
pub const PLATFORM: Credential = Credential {
    name: "platform",
    scheme: Scheme::Header("x-svc-proof"),
    about: "A proof of the platform for this one request: route internal with method, path and an id used once.",
};

/// The owner and whoever administers the machine.
pub const OWNERS: &[Credential] = &[OWNER, ADMIN];
/// Whoever may read the owner's records, but not act for the owner.
pub const READERS: &[Credential] = &[OWNER, OWNERS_PROCESS, ADMIN];
/// The same, and the platform on behalf of its operators.
pub const READERS_AND_PLATFORM: &[Credential] = &[OWNER, OWNERS_PROCESS, ADMIN, PLATFORM];
/// Whoever sees pages of apps.
pub const VIEWERS: &[Credential] = &[OWNER, OWNERS_PROCESS, APP, ADMIN];
/// Anybody but the platform.
pub const CALLERS: &[Credential] = &[OWNER, OWNERS_PROCESS, AGENT, APP, ADMIN];

impl Principal {
    /// The credential that makes this principal.
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

/// The router of those endpoints that are `open` to all, or of the others, each behind its guards: method and path are
/// judged before the size, the size before the credential.
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
    let most = endpoint.largest_body;
    route
        .route_layer(from_fn(move |request, next| admit(credentials, request, next)))
        .route_layer(from_fn(move |request, next| at_most(most, request, next)))
}

/// Refuses a body that says that it is too large, before anybody looks at the credential. A body that does not say is
/// cut off where it is read.
async fn at_most(most: usize, request: Request, next: Next) -> Response {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    let length: Option<u64> = length.and_then(|text| text.parse().ok());
    if length.is_some_and(|length| length > most as u64) {
        body::hear_out(request.into_body()).await;
        return body::too_large(most).into_response();
    }
    next.run(request).await
}

/// An answer of JSON.
pub const fn told(status: u16, about: &'static str, schema: fn() -> Value) -> Answer {
    Answer { status, about, content: Content::Json(schema) }
}

//! A route together with its description: the router and the document are made of the same list.

use std::sync::Arc;

pub use super::access::Access;
pub use super::shape::*;
use crate::http::openapi::{
    Answer, Content, Credential, Operation, Parameter, Place, Scheme, any_text, matching, uuid,
};
use crate::platform::context::Platform;
use crate::platform::operators::Scope;
use axum::routing::MethodRouter;
use axum::{Extension, Router};
use serde_json::Value;

/// One method of one path, who may call it, and what serves it.
pub struct Endpoint {
    pub access: Access,
    pub operation: Operation,
    pub serve: fn() -> MethodRouter<Arc<Platform>>,
}

/// The router of these endpoints.
pub fn routes(endpoints: &[&Endpoint]) -> Router<Arc<Platform>> {
    endpoints
        .iter()
        .fold(Router::new(), |router, endpoint| router.route(endpoint.operation.path, guarded(endpoint)))
}

/// Tells [`Call::operator`](super::call::Call::operator) which scopes this route takes.
fn guarded(endpoint: &Endpoint) -> MethodRouter<Arc<Platform>> {
    (endpoint.serve)().route_layer(Extension(endpoint.access))
}

pub const OPERATOR: Credential = Credential {
    name: "operator",
    scheme: Scheme::ScopedBearer,
    about: "The token of a named operator (svco_…) that has one of the listed scopes, or PLATFORM_SECRET, which has all",
};

pub const READ: &[Scope] = &[Scope::Read];
pub const OPERATE: &[Scope] = &[Scope::Operate];
pub const BILLING: &[Scope] = &[Scope::Billing];
pub const METRICS: &[Scope] = &[Scope::Metrics];
pub const ADMIN: &[Scope] = &[Scope::Admin];
pub const READ_OR_BILLING: &[Scope] = &[Scope::Read, Scope::Billing];
pub const READ_OR_ADMIN: &[Scope] = &[Scope::Read, Scope::Admin];

pub const HOST: Credential = Credential {
    name: "host",
    scheme: Scheme::Bearer,
    about: "The UPGRADE_TOKEN of one machine, while it is its slot's machine",
};
pub const REGISTRATION: Credential = Credential {
    name: "registration",
    scheme: Scheme::Bearer,
    about: "The one-time registration token of one machine",
};

pub const MACHINE_ID: Parameter =
    Parameter { name: "id", place: Place::Path, schema: uuid, about: "The machine." };
pub const IDEMPOTENCY_KEY: Parameter = Parameter {
    name: "Idempotency-Key",
    place: Place::Header,
    schema: || matching("^[ -~]{1,255}$"),
    about: "The same key with the same body gets the first answer again.",
};
pub const PREFER: Parameter = Parameter {
    name: "Prefer",
    place: Place::Header,
    schema: any_text,
    about: "wait=N: answer when the operation has ended, or after N seconds, at most 60 (RFC 7240).",
};
pub const CURSOR: Parameter = Parameter {
    name: "cursor",
    place: Place::Query,
    schema: any_text,
    about: "The nextCursor of an earlier page.",
};

/// An answer of JSON.
pub const fn told(status: u16, about: &'static str, schema: fn() -> Value) -> Answer {
    Answer { status, about, content: Content::Json(schema) }
}

//! A route with its access rule, handler and description. The router and the OpenAPI document are built from the same
//! list.

use std::sync::Arc;

pub use super::access::Access;
pub use super::schemas::*;
use crate::context::Platform;
use axum::routing::MethodRouter;
use axum::{Extension, Router};
use svc_http::idempotency;
use svc_http::openapi::{
    Credential, CredentialScheme, Operation, Parameter, ParameterLocation, nul_free_text, uuid,
};
use svc_wire::operator::Scope;

pub use svc_http::openapi::documented_json;

/// A method on a path, with its access rule and its handler.
pub struct Endpoint {
    pub access: Access,
    pub operation: Operation,
    pub serve: fn() -> MethodRouter<Arc<Platform>>,
}

/// Builds a router for the endpoints.
pub fn routes(endpoints: &[&Endpoint]) -> Router<Arc<Platform>> {
    endpoints
        .iter()
        .fold(Router::new(), |router, endpoint| router.route(endpoint.operation.path, with_access(endpoint)))
}

/// Passes the route's access rule to [`ApiCall`](super::call::ApiCall).
fn with_access(endpoint: &Endpoint) -> MethodRouter<Arc<Platform>> {
    (endpoint.serve)().route_layer(Extension(endpoint.access))
}

pub const OPERATOR: Credential = Credential {
    name: "operator",
    scheme: CredentialScheme::ScopedBearer,
    description: "The token of a named operator (svco_…) with one of the listed scopes, or PLATFORM_SECRET, which \
                  has all scopes.",
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
    scheme: CredentialScheme::Bearer,
    description: "The UPGRADE_TOKEN of a machine; after the machine has left its slot, few routes accept it.",
};
pub const REGISTRATION: Credential = Credential {
    name: "registration",
    scheme: CredentialScheme::Bearer,
    description: "The single-use registration token of a machine.",
};

pub const MACHINE_ID: Parameter =
    Parameter { name: "id", location: ParameterLocation::Path, schema: uuid, description: "The machine." };
pub const IDEMPOTENCY_KEY: Parameter = Parameter {
    name: idempotency::HEADER,
    location: ParameterLocation::Header,
    schema: idempotency::key_schema,
    description: "A repeated request with the same key and body gets the response to the first one.",
};
pub const PREFER: Parameter = Parameter {
    name: "Prefer",
    location: ParameterLocation::Header,
    schema: nul_free_text,
    description: "wait=N: respond when the operation has ended, or after N seconds, at most 60 (RFC 7240).",
};
pub const CURSOR: Parameter = Parameter {
    name: "cursor",
    location: ParameterLocation::Query,
    schema: nul_free_text,
    description: "The nextCursor of the previous page.",
};

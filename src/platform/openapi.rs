//! Builds the OpenAPI document for the control API and the router.

use std::sync::LazyLock;

use bytes::Bytes;
use serde_json::Value;

use super::api::ENDPOINTS;
use super::api::endpoint::OPERATOR;
use svc_http::openapi::{Api, generate_document, schema_of};

const API: Api = Api {
    title: "svc platform",
    description: "The control plane: manages the machines in users' slots, and serves requests from their hosts.",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &[
        ("Machine", schema_of::<svc_wire::machine::Machine>),
        ("Operation", schema_of::<svc_wire::operation::Operation>),
        ("Rollout", schema_of::<svc_wire::rollout::Rollout>),
        ("RolloutSummary", schema_of::<svc_wire::rollout::RolloutSummary>),
        ("Subscription", schema_of::<svc_wire::slot::Subscription>),
        ("Alarm", schema_of::<svc_wire::alarm::Alarm>),
        ("Operator", schema_of::<svc_wire::operator::Operator>),
        ("UserSlot", svc_router::user_slot_schema),
    ],
};

/// The serialized [`openapi_document`], built on the first request for it.
pub static JSON: LazyLock<Bytes> = LazyLock::new(|| openapi_document().to_string().into());

/// Builds the OpenAPI document for all routes: the control API's, and the router's on the public hosts.
pub fn openapi_document() -> Value {
    let control = ENDPOINTS.iter().map(|endpoint| &endpoint.operation);
    let public = svc_router::ROUTES.iter().map(|route| &route.operation);
    let mut document = generate_document(&API, control.chain(public));
    for endpoint in ENDPOINTS {
        let Some(scopes) = endpoint.access.scopes() else { continue };
        let operation = &endpoint.operation;
        let path = operation.path.replace("{*", "{");
        let description = &mut document["paths"][path][operation.method.as_str().to_ascii_lowercase()];
        for requirement in description["security"].as_array_mut().into_iter().flatten() {
            if requirement[OPERATOR.name].is_array() {
                requirement[OPERATOR.name] = scopes.iter().map(|scope| scope.as_str()).collect();
            }
        }
    }
    for route in svc_router::ROUTES {
        document["paths"][route.operation.path]["servers"] = svc_router::openapi_servers();
    }
    document
}

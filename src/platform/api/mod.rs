//! The control API: one route per file. Errors are problem+json; the order of checks is the contract's.

pub mod backup;
pub mod backups;
pub mod boot_failure;
pub mod boot_stage;
pub mod bundle;
pub mod call;
pub mod delete;
pub mod endpoint;
pub mod entitlement;
pub mod fail;
pub mod fault;
pub mod fields;
pub mod fleet;
pub mod health;
pub mod heartbeat;
pub mod list;
pub mod machine;
pub mod metrics;
pub mod mutation;
pub mod operation;
pub mod provision;
pub mod recover;
pub mod register;
pub mod resize;
pub mod slots;
pub mod storage_credentials;

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::Value;

use self::endpoint::Endpoint;
use super::context::Platform;
use crate::http::observe::{self, Listener};
use crate::http::openapi::{self, Api};
use crate::http::problem::{Code, Problem};

/// Every route, in the order of the document.
pub static ENDPOINTS: [&Endpoint; 22] = [
    &provision::ENDPOINT,
    &register::ENDPOINT,
    &recover::ENDPOINT,
    &list::ENDPOINT,
    &fleet::ENDPOINT,
    &machine::ENDPOINT,
    &delete::ENDPOINT,
    &resize::ENDPOINT,
    &fail::ENDPOINT,
    &backup::ENDPOINT,
    &backups::ENDPOINT,
    &heartbeat::ENDPOINT,
    &storage_credentials::ENDPOINT,
    &boot_stage::ENDPOINT,
    &boot_failure::ENDPOINT,
    &operation::ENDPOINT,
    &slots::LIST,
    &slots::PUT,
    &bundle::ENDPOINT,
    &health::LIVE,
    &health::READY,
    &metrics::ENDPOINT,
];

const API: Api = Api {
    title: "svc platform",
    about: "The control plane: machines of slots, their lives, and what their hosts ask.",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &[
        ("Machine", endpoint::machine),
        ("Operation", endpoint::operation),
        ("Subscription", endpoint::subscription),
    ],
};

/// The document of all routes.
pub fn description() -> Value {
    openapi::document(&API, ENDPOINTS.iter().map(|endpoint| &endpoint.operation))
}

async fn openapi() -> Json<Value> {
    Json(description())
}

pub fn router(platform: Arc<Platform>) -> Router {
    endpoint::routes(&ENDPOINTS)
        .route("/openapi.json", get(openapi))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(Listener::Api, observe::layer))
        .with_state(platform)
}

async fn not_found(request: Request) -> Problem {
    call::discard(&mut request.into_body()).await;
    Problem::new(Code::NotFound, "There is no such route.")
}

async fn method_not_allowed(request: Request) -> Problem {
    call::discard(&mut request.into_body()).await;
    Problem::new(Code::MethodNotAllowed, "This route does not take that method.")
}

//! The gateway's routes. A request is checked in this order: method and path, size, identity; then the handler runs.

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use http::Method;
use serde_json::{Value, json};

use super::auth::{Denied, Identified, Ingress, admit, identify};
use super::endpoint::{CALLERS, DEFAULT_MAX_BODY_BYTES, Endpoint, OWNERS, documented_json, routes};
use super::routes::{
    backup_progress, dispatch, health, internal, limits, metrics, quiesce, records, side_database, usage,
};
use super::state::Gateway;
use super::{apps, body, bridge, proxy};
use svc_http::observe::{self, Listener};
use svc_http::openapi::{self, Api, Operation};
use svc_http::problem::{Code, Problem};

/// All routes of the gateway, in the order of the OpenAPI document. All other paths go to the shell.
pub static ENDPOINTS: [&Endpoint; 40] = [
    &bridge::QUERY,
    &bridge::SCHEMAS,
    &bridge::CHANGES,
    &DESCRIPTION,
    &apps::LIST,
    &apps::ICON,
    &apps::FRONT,
    &apps::FOLDER,
    &apps::PAGE,
    &records::BACKUPS,
    &records::FOLLOW_BACKUPS,
    &side_database::SHOW,
    &side_database::OPEN,
    &side_database::COPY,
    &side_database::CLOSE,
    &dispatch::DISPATCH,
    &dispatch::LIST,
    &dispatch::SHOW,
    &dispatch::FOLLOW,
    &dispatch::CANCEL,
    &records::INTERACTIONS,
    &records::FOLLOW_INTERACTIONS,
    &records::AUDIT,
    &records::FOLLOW_AUDIT,
    &records::ACTIVITY,
    &records::FOLLOW_ACTIVITY,
    &records::STORAGE,
    &records::FOLLOW_STORAGE,
    &usage::USAGE,
    &limits::SHOW_LIMITS,
    &limits::SET_LIMITS,
    &internal::BACKUP,
    &backup_progress::BACKUP_PROGRESS,
    &internal::ACCEPT,
    &internal::DRILL,
    &internal::UPDATE,
    &quiesce::QUIESCE,
    &quiesce::RESUME,
    &health::LIVE,
    &health::READY,
];

const API: Api = Api {
    title: "svc gateway",
    about: "A machine's API: for its owner, for its apps through the bridge, and for the platform.",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &[
        ("App", apps::app_schema_json),
        ("AppSchema", bridge::app_schema),
        ("ActivityLine", records::activity_schema),
        ("AuditEntry", records::audit_schema),
        ("Backup", records::backup_schema),
        ("Dispatch", dispatch::dispatch_schema),
        ("Interaction", records::interaction_schema),
        ("StorageDay", records::storage_schema),
        ("Limits", limits::limits_schema),
        ("SideDatabase", side_database::side_database_schema),
    ],
};

/// The OpenAPI document of all routes.
pub fn description() -> Value {
    openapi::document(&API, ENDPOINTS.iter().map(|endpoint| &endpoint.operation))
}

static DESCRIPTION: Endpoint = Endpoint {
    operation: Operation {
        id: "describe",
        method: Method::GET,
        path: "/api/bridge/openapi.json",
        summary: "This document.",
        credentials: CALLERS,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "OpenAPI 3.1.", || json!({ "type": "object" }))],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
    serve: || get(|| async { Json(description()) }),
};

/// The routes of one listener.
pub fn router(gateway: &Arc<Gateway>, ingress: Ingress) -> Router {
    let to_shell = middleware::from_fn(|request, next| admit(OWNERS, request, next));
    let shell = Router::new().fallback(proxy::to_shell).layer(to_shell);
    let (listener, own) = match ingress {
        Ingress::Public => (Listener::Gateway, Router::new()),
        Ingress::Trusted | Ingress::Agents => {
            (Listener::Socket, Router::new().route("/metrics", get(metrics::metrics)))
        }
    };
    let open =
        routes(&ENDPOINTS, true).method_not_allowed_fallback(method_not_allowed).layer(Extension(ingress));
    routes(&ENDPOINTS, false)
        .route("/_svc/internal/{*path}", axum::routing::any(unknown_route))
        .route("/api/{*path}", axum::routing::any(unknown_route))
        .fallback_service(shell.with_state(gateway.clone()))
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(gateway.clone(), identify))
        .layer(Extension(ingress))
        .merge(own)
        .merge(open)
        .layer(middleware::from_fn_with_state(listener, observe::layer))
        .with_state(gateway.clone())
}

/// Only the bridge, for agents with a token.
pub fn bridge(gateway: &Arc<Gateway>) -> Router {
    let endpoints = [&bridge::QUERY, &bridge::SCHEMAS, &bridge::CHANGES, &DESCRIPTION];
    routes(&endpoints, false)
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(gateway.clone(), identify))
        .layer(Extension(Ingress::Agents))
        .layer(middleware::from_fn_with_state(Listener::Socket, observe::layer))
        .with_state(gateway.clone())
}

async fn unknown_route(request: Request) -> Response {
    // Without a principal, an unknown path is indistinguishable from a known one.
    let refusal = match request.extensions().get::<Result<Identified, Denied>>() {
        Some(Ok(_)) => Problem::new(Code::NotFound, "There is no such route; see /api/bridge/openapi.json.")
            .into_response(),
        Some(Err(denied)) => denied.into_response(),
        None => Denied::Missing.into_response(),
    };
    body::drain(request.into_body()).await;
    refusal
}

async fn method_not_allowed(request: Request) -> Problem {
    body::drain(request.into_body()).await;
    Problem::new(Code::MethodNotAllowed, "This route does not allow this method; see the Allow header.")
}

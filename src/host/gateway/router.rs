//! The gateway's routes, and in which order a request is judged: method and path, size, identity, then the handler.

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use http::Method;
use serde_json::{Value, json};

use super::auth::{Denied, Identified, Ingress, admit, identify};
use super::endpoint::{CALLERS, Endpoint, OWN_BODY, OWNERS, routes, told};
use super::routes::{
    backup_progress, dispatch, health, internal, limits, metrics, quiesce, records, side_database, usage,
};
use super::state::Gateway;
use super::{apps, body, bridge, proxy};
use crate::http::observe::{self, Listener};
use crate::http::openapi::{self, Api, Operation};
use crate::http::problem::{Code, Problem};

/// Every route of the gateway's own, in the order of the document. What is not among them is the shell's.
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
    about: "A machine's own API: the owner's, its apps' bridge, and what the platform asks.",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &[
        ("App", apps::told_app),
        ("AppSchema", bridge::app_schema),
        ("ActivityLine", records::told_activity),
        ("AuditEntry", records::told_audit),
        ("Backup", records::told_backup),
        ("Dispatch", dispatch::told_dispatch),
        ("Interaction", records::told_interaction),
        ("StorageDay", records::told_storage),
        ("Limits", limits::told_limits),
        ("SideDatabase", side_database::told_side),
    ],
};

/// The document of all routes.
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
        answers: &[told(200, "OpenAPI 3.1.", || json!({ "type": "object" }))],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || get(|| async { Json(description()) }),
};

/// The routes as one listener serves them.
pub fn router(gateway: &Arc<Gateway>, ingress: Ingress) -> Router {
    let to_shell = middleware::from_fn(|request, next| admit(OWNERS, request, next));
    let shell = Router::new().fallback(proxy::to_shell).layer(to_shell);
    let (listener, own) = match ingress {
        Ingress::Public => (Listener::Gateway, Router::new()),
        Ingress::Trusted | Ingress::Agents => {
            (Listener::Socket, Router::new().route("/metrics", get(metrics::metrics)))
        }
    };
    let open = routes(&ENDPOINTS, true).method_not_allowed_fallback(wrong_method).layer(Extension(ingress));
    routes(&ENDPOINTS, false)
        .route("/_svc/internal/{*path}", axum::routing::any(nothing))
        .route("/api/{*path}", axum::routing::any(nothing))
        .fallback_service(shell.with_state(gateway.clone()))
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(gateway.clone(), identify))
        .layer(Extension(ingress))
        .merge(own)
        .merge(open)
        .layer(middleware::from_fn_with_state(listener, observe::layer))
        .with_state(gateway.clone())
}

/// The bridge alone, for agents with a token.
pub fn bridge(gateway: &Arc<Gateway>) -> Router {
    let endpoints = [&bridge::QUERY, &bridge::SCHEMAS, &bridge::CHANGES, &DESCRIPTION];
    routes(&endpoints, false)
        .fallback(nothing)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(gateway.clone(), identify))
        .layer(Extension(Ingress::Agents))
        .layer(middleware::from_fn_with_state(Listener::Socket, observe::layer))
        .with_state(gateway.clone())
}

async fn nothing(request: Request) -> Response {
    // Without a principal a path that is not there looks like any other.
    let refusal = match request.extensions().get::<Result<Identified, Denied>>() {
        Some(Ok(_)) => {
            Problem::new(Code::NotFound, "There is no such route; /api/bridge/openapi.json lists them.")
                .into_response()
        }
        Some(Err(denied)) => denied.into_response(),
        None => Denied::Missing.into_response(),
    };
    body::hear_out(request.into_body()).await;
    refusal
}

async fn wrong_method(request: Request) -> Problem {
    body::hear_out(request.into_body()).await;
    Problem::new(Code::MethodNotAllowed, "This route takes another method; the header Allow names it.")
}

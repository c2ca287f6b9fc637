//! GET `/livez`, `/readyz` and `/readyz/control`: report liveness, readiness to route, and readiness to manage
//! machines.
//!
//! Routing does not need the object store, and works without the database until the routes are too old
//! (`ROUTER_MAX_STALE_SECONDS`). Therefore, `/readyz` checks only the age of the routes and whether the process is
//! stopping, so that a load balancer keeps sending users' requests during an outage of the store or the database.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use serde_json::json;

use super::endpoint::{Access, Endpoint, component_status, documented_json};
use crate::context::Platform;
use crate::readiness::Readiness;
use axum::routing::get;
use svc_http::openapi::{Operation, count, nullable, object, string_enum};
use svc_router::route_freshness::RoutesState;

pub async fn show_liveness() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

pub async fn show_readiness(State(platform): State<Arc<Platform>>) -> Response {
    let routes = platform.route_freshness.state();
    let ok = routes.is_usable() && !platform.stop.is_cancelled();
    let age = platform.route_freshness.age().map(|age| age.as_secs());
    respond(ok, json!({"status": status_text(ok), "routes": routes.as_str(), "routesAgeSeconds": age}))
}

pub async fn show_control_readiness(State(platform): State<Arc<Platform>>) -> Response {
    let Readiness { database, store } = platform.readiness.check(&platform.db, &platform.bucket).await;
    let clock = platform.clock.is_within_tolerance();
    let ok = database && store && clock && !platform.stop.is_cancelled();
    let skew = platform.clock.skew_ms();
    let body = json!({
        "status": status_text(ok), "database": status_text(database), "store": status_text(store), "clock": status_text(clock), "clockSkewMs": skew,
    });
    respond(ok, body)
}

fn status_text(ok: bool) -> &'static str {
    if ok { "ok" } else { "failing" }
}

fn respond(ok: bool, body: serde_json::Value) -> Response {
    let status = if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

pub static LIVE: Endpoint = Endpoint {
    access: Access::Open,
    operation: Operation {
        id: "live",
        method: Method::GET,
        path: "/livez",
        summary: "Liveness of the process.",
        credentials: &[],
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The process is running.", || {
            object(&[("status", component_status())], &[])
        })],
        problems: &[],
    },
    serve: || get(show_liveness),
};

pub static READY: Endpoint = Endpoint {
    access: Access::Open,
    operation: Operation {
        id: "ready",
        method: Method::GET,
        path: "/readyz",
        summary: "Readiness of the router, for load balancers: its routes are recent enough to be served, and it is not stopping.",
        credentials: &[],
        parameters: &[],
        body: None,
        responses: &[
            documented_json(200, "Ready.", readiness_schema),
            documented_json(503, "Not ready.", readiness_schema),
        ],
        problems: &[],
    },
    serve: || get(show_readiness),
};

pub static READY_TO_CONTROL: Endpoint = Endpoint {
    access: Access::Open,
    operation: Operation {
        id: "readyToControl",
        method: Method::GET,
        path: "/readyz/control",
        summary: "Readiness of the control plane, for alerts: its database and object store are reachable, its clock is correct, and it is not stopping.",
        credentials: &[],
        parameters: &[],
        body: None,
        responses: &[
            documented_json(200, "Ready.", control_readiness_schema),
            documented_json(503, "Not ready.", control_readiness_schema),
        ],
        problems: &[],
    },
    serve: || get(show_control_readiness),
};

fn readiness_schema() -> serde_json::Value {
    let routes = [RoutesState::NotLoaded, RoutesState::Current, RoutesState::Stale, RoutesState::TooOld]
        .map(RoutesState::as_str);
    object(
        &[
            ("status", component_status()),
            ("routes", string_enum(&routes)),
            ("routesAgeSeconds", nullable(count())),
        ],
        &[],
    )
}

fn control_readiness_schema() -> serde_json::Value {
    let skew = nullable(json!({ "type": "integer" }));
    let parts = [
        ("database", component_status()),
        ("store", component_status()),
        ("clock", component_status()),
        ("clockSkewMs", skew),
    ];
    object(&[&[("status", component_status())], &parts[..]].concat(), &[])
}

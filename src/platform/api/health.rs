//! GET `/livez`, `/readyz` and `/readyz/control`: whether the process lives; whether it routes; whether it can change
//! machines.
//!
//! Routing needs neither the object store nor, for a while, the database: a load balancer that asks `/readyz` keeps
//! users' requests coming while either is unreachable.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use object_store::path::Path;
use serde_json::json;

use super::endpoint::{Access, Endpoint, told, well};
use crate::http::openapi::{Operation, count, nullable, object, one_of};
use crate::http::problem::chain;
use crate::platform::context::Platform;
use crate::platform::db::{self};
use crate::platform::router::Routes;
use axum::routing::get;

const PROBE: Duration = Duration::from_secs(3);

pub async fn live() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

pub async fn ready(State(platform): State<Arc<Platform>>) -> Response {
    let routes = platform.routes.routes();
    let ok = routes.are_served() && !platform.stop.is_cancelled();
    let age = platform.routes.age().map(|age| age.as_secs());
    answer(ok, json!({"status": word(ok), "routes": routes.as_str(), "routesAgeSeconds": age}))
}

pub async fn ready_to_control(State(platform): State<Arc<Platform>>) -> Response {
    let (database, store) = tokio::join!(database(&platform), store(&platform));
    let clock = platform.clock.is_ok();
    let ok = database && store && clock && !platform.stop.is_cancelled();
    let skew = platform.clock.skew_ms();
    let body = json!({
        "status": word(ok), "database": word(database), "store": word(store), "clock": word(clock), "clockSkewMs": skew,
    });
    answer(ok, body)
}

fn word(ok: bool) -> &'static str {
    if ok { "ok" } else { "failing" }
}

fn answer(ok: bool, body: serde_json::Value) -> Response {
    let status = if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

async fn database(platform: &Platform) -> bool {
    let probe = async {
        let session = platform.db.session().await?;
        db::rows(&session, "SELECT 1", &[]).await
    };
    match tokio::time::timeout(PROBE, probe).await {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => {
            tracing::warn!(error = %chain(&error), "not ready: database");
            false
        }
        Err(_) => false,
    }
}

/// Absence of the object that is asked for is an answer.
async fn store(platform: &Platform) -> bool {
    let key = Path::from("system-bundles/.ready");
    match tokio::time::timeout(PROBE, platform.bucket.head(&key)).await {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => {
            tracing::warn!(error = %chain(&error), "not ready: object store");
            false
        }
        Err(_) => false,
    }
}

/// The route and its description.
pub static LIVE: Endpoint = Endpoint {
    access: Access::Open,
    operation: Operation {
        id: "live",
        method: Method::GET,
        path: "/livez",
        summary: "Whether the process runs.",
        credentials: &[],
        parameters: &[],
        body: None,
        answers: &[told(200, "It does.", || object(&[("status", well())], &[]))],
        problems: &[],
    },
    serve: || get(live),
};

/// The route and its description.
pub static READY: Endpoint = Endpoint {
    access: Access::Open,
    operation: Operation {
        id: "ready",
        method: Method::GET,
        path: "/readyz",
        summary: "Whether the router can serve: its routes are loaded and young enough. For load balancers.",
        credentials: &[],
        parameters: &[],
        body: None,
        answers: &[told(200, "It can.", readiness), told(503, "It cannot now.", readiness)],
        problems: &[],
    },
    serve: || get(ready),
};

/// The route and its description.
pub static READY_TO_CONTROL: Endpoint = Endpoint {
    access: Access::Open,
    operation: Operation {
        id: "readyToControl",
        method: Method::GET,
        path: "/readyz/control",
        summary: "Whether the control plane can work: it reaches its database and its object store, and its clock is right. For \
                  alerts.",
        credentials: &[],
        parameters: &[],
        body: None,
        answers: &[told(200, "It can.", control_readiness), told(503, "It cannot now.", control_readiness)],
        problems: &[],
    },
    serve: || get(ready_to_control),
};

fn readiness() -> serde_json::Value {
    let routes = [Routes::NotLoaded, Routes::Current, Routes::Stale, Routes::TooOld].map(Routes::as_str);
    object(&[("status", well()), ("routes", one_of(&routes)), ("routesAgeSeconds", nullable(count()))], &[])
}

fn control_readiness() -> serde_json::Value {
    let skew = nullable(json!({ "type": "integer" }));
    let parts = [("database", well()), ("store", well()), ("clock", well()), ("clockSkewMs", skew)];
    object(&[&[("status", well())], &parts[..]].concat(), &[])
}

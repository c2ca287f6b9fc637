//! GET `/livez` and `/readyz`: whether the process lives; whether database and object store can be reached.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use object_store::path::Path;
use serde_json::json;

use super::endpoint::{Endpoint, told, well};
use crate::http::openapi::{Operation, object};
use crate::http::problem::chain;
use crate::platform::context::Platform;
use crate::platform::db::{self};
use axum::routing::get;

const PROBE: Duration = Duration::from_secs(3);

pub async fn live() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

pub async fn ready(State(platform): State<Arc<Platform>>) -> Response {
    let (database, store) = tokio::join!(database(&platform), store(&platform));
    let word = |ok: bool| if ok { "ok" } else { "failing" };
    let ok = database && store && !platform.stop.is_cancelled();
    let status = if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({"status": word(ok), "database": word(database), "store": word(store)});
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
    operation: Operation {
        id: "ready",
        method: Method::GET,
        path: "/readyz",
        summary: "Whether it can serve.",
        credentials: &[],
        parameters: &[],
        body: None,
        answers: &[told(200, "It can.", readiness), told(503, "It cannot now.", readiness)],
        problems: &[],
    },
    serve: || get(ready),
};

fn readiness() -> serde_json::Value {
    object(&[("status", well()), ("database", well()), ("store", well())], &[])
}

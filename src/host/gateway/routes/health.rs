//! `/livez` and `/readyz`: the two routes that answer anybody.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderValue, Method, StatusCode, header};
use serde_json::{Value, json};

use crate::host::gateway::auth::Ingress;
use crate::host::gateway::endpoint::{Endpoint, OWN_BODY, told};
use crate::host::gateway::state::Gateway;
use crate::http::openapi::{Operation, object, one_of, text};
use crate::http::problem::chain;

/// The process runs.
pub async fn live() -> Response {
    answer(StatusCode::OK, &json!({ "status": "live" }))
}

/// The database answers, and the apps that it keeps have been taken up: the bridge can be used.
pub async fn ready(State(gateway): State<Arc<Gateway>>, Extension(ingress): Extension<Ingress>) -> Response {
    let database = gateway.database.server().await;
    if let Err(error) = &database {
        tracing::warn!(error = %chain(error), "not ready");
    }
    let apps = gateway.apps.known().loaded;
    let (status, word) = match (&database, apps) {
        (Ok(_), true) => (StatusCode::OK, "ready"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "unready"),
    };
    let mut body = json!({
        "status": word,
        "database": if database.is_ok() { "ok" } else { "failing" },
        "apps": if apps { "ok" } else { "waiting" },
    });
    if let (Ok(server), Ingress::Trusted) = (&database, ingress) {
        body["server"] = server.map_or_else(|| "socket".to_owned(), |server| server.to_string()).into();
    }
    answer(status, &body)
}

fn answer(status: StatusCode, body: &Value) -> Response {
    let mut response = (status, body.to_string()).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

pub static LIVE: Endpoint = Endpoint {
    operation: Operation {
        id: "live",
        method: Method::GET,
        path: "/livez",
        summary: "Whether the process runs.",
        credentials: &[],
        parameters: &[],
        body: None,
        answers: &[told(200, "It does.", || object(&[("status", one_of(&["live"]))], &[]))],
        problems: &[],
    },
    largest_body: OWN_BODY,
    serve: || get(live),
};

pub static READY: Endpoint = Endpoint {
    operation: Operation {
        id: "ready",
        method: Method::GET,
        path: "/readyz",
        summary: "Whether the bridge can be used.",
        credentials: &[],
        parameters: &[],
        body: None,
        answers: &[told(200, "It can.", readiness), told(503, "It cannot now.", readiness)],
        problems: &[],
    },
    largest_body: OWN_BODY,
    serve: || get(ready),
};

fn readiness() -> Value {
    object(
        &[
            ("status", one_of(&["ready", "unready"])),
            ("database", one_of(&["ok", "failing"])),
            ("apps", one_of(&["ok", "waiting"])),
        ],
        // Of the database, on the unix socket alone: address and port, or `socket`.
        &[("server", text())],
    )
}

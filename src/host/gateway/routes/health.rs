//! `/livez` and `/readyz`: the only routes on the public port that need no authentication.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, Method, StatusCode, header};
use serde_json::{Value, json};

use crate::apps::Registry;
use crate::auth::Ingress;
use crate::database::Database;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use svc_http::openapi::{Operation, object, string_enum, text};
use svc_http::problem::format_chain;

/// Reports that the process is running.
pub async fn report_liveness() -> Response {
    json_response(StatusCode::OK, &json!({ "status": "live" }))
}

/// Reports whether the bridge is usable, i.e. the database responds and the apps are loaded.
pub async fn report_readiness(
    State(database): State<Arc<Database>>,
    State(apps): State<Arc<Registry>>,
    State(ingress): State<Ingress>,
) -> Response {
    let server_address = database.fetch_server_address().await;
    if let Err(error) = &server_address {
        tracing::warn!(error = %format_chain(error), "not ready: database not responding");
    }
    let are_apps_loaded = apps.snapshot().is_loaded;
    let (status, label) = match (&server_address, are_apps_loaded) {
        (Ok(_), true) => (StatusCode::OK, "ready"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "unready"),
    };
    let mut body = json!({
        "status": label,
        "database": if server_address.is_ok() { "ok" } else { "failing" },
        "apps": if are_apps_loaded { "ok" } else { "waiting" },
    });
    if let (Ok(address), Ingress::Trusted) = (&server_address, ingress) {
        body["server"] = address.map_or_else(|| "socket".to_owned(), |address| address.to_string()).into();
    }
    json_response(status, &body)
}

fn json_response(status: StatusCode, body: &Value) -> Response {
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
        summary: "Whether the process is running.",
        credentials: &[],
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "It is running.", || {
            object(&[("status", string_enum(&["live"]))], &[])
        })],
        problems: &[],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static READY: Endpoint = Endpoint {
    operation: Operation {
        id: "ready",
        method: Method::GET,
        path: "/readyz",
        summary: "Whether the bridge is usable.",
        credentials: &[],
        parameters: &[],
        body: None,
        responses: &[
            documented_json(200, "It is usable.", readiness_schema),
            documented_json(503, "It is not usable.", readiness_schema),
        ],
        problems: &[],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

fn readiness_schema() -> Value {
    object(
        &[
            ("status", string_enum(&["ready", "unready"])),
            ("database", string_enum(&["ok", "failing"])),
            ("apps", string_enum(&["ok", "waiting"])),
        ],
        // Database address and port, or `socket`. Only reported on the Unix socket for the machine's own users.
        &[("server", text())],
    )
}

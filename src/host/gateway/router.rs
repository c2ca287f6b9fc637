//! The gateway's routes, and in which order a request is judged: method and path, size, identity, then the handler.

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use http::header;

use super::auth::{Ingress, identify, require_caller, require_owner, require_platform};
use super::state::Gateway;
use super::{apps, backups, body, bridge, health, internal, measure, proxy};
use crate::http::observe::{self, Listener};
use crate::http::problem::{Code, Problem};

/// The largest body of the bridge's requests, in bytes.
pub const BRIDGE_BODY: usize = 1024 * 1024;
/// The largest body of the gateway's other own routes.
const OWN_BODY: usize = 64 * 1024;

/// The routes as one listener serves them.
pub fn router(gateway: &Arc<Gateway>, ingress: Ingress) -> Router {
    let bridge = Router::new()
        .route("/api/bridge/query", post(bridge::query))
        .route("/api/bridge/schemas", get(bridge::list_schemas))
        .route("/api/bridge/changes", get(bridge::changes))
        .route_layer(middleware::from_fn(require_caller))
        .layer(middleware::from_fn(at_most::<BRIDGE_BODY>));
    let pages = Router::new()
        .route("/apps/{slug}", get(apps::page))
        .route("/apps/{slug}/", get(apps::page))
        .route("/apps/{slug}/{*path}", get(apps::page))
        .route_layer(middleware::from_fn(require_caller));
    let owner = Router::new()
        .route("/api/apps", get(apps::list))
        .route("/api/backups", get(backups::list))
        .route("/icons/{slug}", get(apps::icon))
        .route_layer(middleware::from_fn(require_owner))
        .layer(middleware::from_fn(at_most::<OWN_BODY>));
    let internal = Router::new()
        .route("/_svc/internal/backup", post(internal::backup))
        .route_layer(middleware::from_fn(require_platform))
        .layer(middleware::from_fn(at_most::<OWN_BODY>));
    let shell = Router::new().fallback(proxy::to_shell).layer(middleware::from_fn(require_owner));
    let (listener, own) = match ingress {
        Ingress::Public => (Listener::Gateway, Router::new()),
        Ingress::Trusted => (Listener::Socket, Router::new().route("/metrics", get(measure::metrics))),
    };
    Router::new()
        .merge(bridge)
        .merge(pages)
        .merge(owner)
        .merge(internal)
        .route("/_svc/internal/{*path}", axum::routing::any(nothing))
        .route("/api/{*path}", axum::routing::any(nothing))
        .fallback_service(shell.with_state(gateway.clone()))
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(gateway.clone(), identify))
        .layer(Extension(ingress))
        .merge(own)
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .layer(middleware::from_fn_with_state(listener, observe::layer))
        .with_state(gateway.clone())
}

/// Refuses a body that says that it is too large, before anybody looks at the credential. A body that does not say is
/// cut off where it is read.
async fn at_most<const BYTES: usize>(request: Request, next: Next) -> Response {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    let length: Option<u64> = length.and_then(|text| text.parse().ok());
    if length.is_some_and(|length| length > BYTES as u64) {
        body::hear_out(request.into_body()).await;
        return body::too_large(BYTES).into_response();
    }
    next.run(request).await
}

async fn nothing(request: Request) -> Response {
    // Without a principal a path that is not there looks like any other.
    match request.extensions().get::<Result<super::auth::Identified, super::auth::Denied>>() {
        Some(Ok(_)) => Problem::new(Code::NotFound, "There is no such route.").into_response(),
        Some(Err(denied)) => denied.into_response(),
        None => super::auth::Denied::Missing.into_response(),
    }
}

async fn wrong_method() -> Problem {
    Problem::new(Code::MethodNotAllowed, "This route takes another method.")
}

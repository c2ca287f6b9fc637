//! The gateway's routes. A request to a known route is checked in this order: method, size, credential; then the
//! handler runs. An unknown path requires a principal, too.
//!
//! The router, its guards and the OpenAPI document are built from one table. Invariant: a route's guard reads the
//! allowed callers from the route's description.

use axum::extract::Request;
use axum::middleware::{self, Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post, put};
use axum::{Extension, Json, Router};
use http::Method;
use serde_json::{Value, json};

use super::auth::{AGENT, ALL_EXCEPT_PLATFORM, AuthFailure, Authentication, Ingress, OWNER_OR_ADMIN, admit};
use super::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use super::identify::identify;
use super::routes::{
    backup_progress, dispatch, files, health, internal, limits, metrics, quiesce, records, side_database,
    usage,
};
use super::state::Gateway;
use super::{apps, body, bridge, proxy};
use svc_http::body::content_length_exceeds;
use svc_http::observe::{self, Listener};
use svc_http::openapi::{self, Api, Operation};
use svc_http::problem::{Code, Problem};

/// A route's description and its handler.
struct Route {
    endpoint: &'static Endpoint,
    serve: fn() -> MethodRouter<Gateway>,
}

const fn route(endpoint: &'static Endpoint, serve: fn() -> MethodRouter<Gateway>) -> Route {
    Route { endpoint, serve }
}

/// All gateway routes except `/metrics`, in the order of the OpenAPI document. A path that matches none of them, and is
/// not under `/api` or `/_svc/internal`, is proxied to the shell.
static ROUTES: [Route; 48] = [
    route(&bridge::QUERY, || post(bridge::query)),
    route(&bridge::SCHEMAS, || get(bridge::list_schemas)),
    route(&bridge::CHANGES, || get(bridge::stream_changes)),
    route(&DESCRIPTION, || get(describe)),
    route(&apps::LIST, || get(apps::list_apps)),
    route(&apps::ICON, || get(apps::serve_icon)),
    route(&apps::FRONT_PAGE, || get(apps::serve_page)),
    route(&apps::FRONT_PAGE_REDIRECT, || get(apps::serve_page)),
    route(&apps::PAGE, || get(apps::serve_page)),
    route(&records::BACKUPS, || get(records::list_backups)),
    route(&records::FOLLOW_BACKUPS, || get(records::follow_backups)),
    route(&side_database::SHOW, || get(side_database::show)),
    route(&side_database::OPEN, || post(side_database::open)),
    route(&side_database::COPY, || post(side_database::copy)),
    route(&side_database::CLOSE, || delete(side_database::close)),
    route(&files::STATUS, || get(files::show_status)),
    route(&files::KEY, || get(files::show_key)),
    route(&files::VERSIONS, || get(files::forward)),
    route(&files::LIST, || get(files::forward)),
    route(&files::DOWNLOAD, || get(files::download)),
    route(&files::SHOW_RESTORE, || get(files::show_restore)),
    route(&files::RESTORE, || post(files::restore)),
    route(&dispatch::DISPATCH, || post(dispatch::submit)),
    route(&dispatch::LIST, || get(dispatch::list)),
    route(&dispatch::SHOW, || get(dispatch::show)),
    route(&dispatch::FOLLOW, || get(dispatch::follow)),
    route(&dispatch::CANCEL, || delete(dispatch::cancel)),
    route(&records::INTERACTIONS, || get(records::list_interactions)),
    route(&records::FOLLOW_INTERACTIONS, || get(records::follow_interactions)),
    route(&records::AUDIT, || get(records::list_audit)),
    route(&records::FOLLOW_AUDIT, || get(records::follow_audit)),
    route(&records::ACTIVITY, || get(records::list_activity)),
    route(&records::FOLLOW_ACTIVITY, || get(records::follow_activity)),
    route(&records::STORAGE, || get(records::list_storage)),
    route(&records::FOLLOW_STORAGE, || get(records::follow_storage)),
    route(&usage::USAGE, || get(usage::report_usage)),
    route(&limits::SHOW_LIMITS, || get(limits::show)),
    route(&limits::SET_LIMITS, || put(limits::set)),
    route(&internal::BACKUP, || post(internal::request_backup)),
    route(&backup_progress::BACKUP_PROGRESS, || get(backup_progress::show)),
    route(&internal::ACCEPT, || post(internal::request_backup_acceptance)),
    route(&internal::DRILL, || post(internal::request_drill)),
    route(&internal::VERIFY_FILES, || post(internal::request_files_verification)),
    route(&internal::UPDATE, || post(internal::request_update)),
    route(&quiesce::QUIESCE, || post(quiesce::quiesce)),
    route(&quiesce::RESUME, || post(quiesce::resume)),
    route(&health::LIVE, || get(health::report_liveness)),
    route(&health::READY, || get(health::report_readiness)),
];

/// The descriptions of all routes, in the order of the OpenAPI document.
pub fn endpoints() -> impl Iterator<Item = &'static Endpoint> {
    ROUTES.iter().map(|route| route.endpoint)
}

const API: Api = Api {
    title: "svc gateway",
    description: "A machine's API: for its owner, for its apps through the bridge, and for the platform.",
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

/// Builds the OpenAPI document for all routes.
pub fn openapi_document() -> Value {
    openapi::generate_document(&API, endpoints().map(|endpoint| &endpoint.operation))
}

static DESCRIPTION: Endpoint = Endpoint {
    operation: Operation {
        id: "describe",
        method: Method::GET,
        path: "/api/bridge/openapi.json",
        summary: "This document.",
        credentials: ALL_EXCEPT_PLATFORM,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "OpenAPI 3.1.", || json!({ "type": "object" }))],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

async fn describe() -> Json<Value> {
    Json(openapi_document())
}

/// Builds the router for the public port or for the socket of the machine's own users. Only the socket serves
/// `/metrics`.
pub fn router(gateway: &Gateway, ingress: Ingress) -> Router {
    let admit_owner_or_admin = from_fn(|request, next| admit(OWNER_OR_ADMIN, request, next));
    let shell = Router::new().fallback(proxy::proxy_to_shell).layer(admit_owner_or_admin);
    let (listener, metrics_router) = match ingress {
        Ingress::Public => (Listener::Gateway, Router::new()),
        Ingress::Trusted | Ingress::Agents => {
            (Listener::Socket, Router::new().route("/metrics", get(metrics::render_metrics)))
        }
    };
    let (public, authenticated): (Vec<_>, Vec<_>) =
        ROUTES.iter().partition(|route| route.endpoint.operation.credentials.is_empty());
    let public = build_routes(public.into_iter())
        .method_not_allowed_fallback(method_not_allowed)
        .layer(Extension(ingress));
    build_routes(authenticated.into_iter())
        .route("/_svc/internal/{*path}", axum::routing::any(unknown_route))
        .route("/api/{*path}", axum::routing::any(unknown_route))
        .fallback_service(shell.with_state(gateway.clone()))
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(gateway.clone(), identify))
        .layer(Extension(ingress))
        .merge(metrics_router)
        .merge(public)
        .layer(middleware::from_fn_with_state(listener, observe::layer))
        .with_state(gateway.clone())
}

/// Builds the router for the agents' socket: only the routes that accept an agent's token, which are the bridge's.
pub fn bridge_router(gateway: &Gateway) -> Router {
    build_routes(ROUTES.iter().filter(|route| route.endpoint.operation.credentials.contains(&AGENT)))
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(gateway.clone(), identify))
        .layer(Extension(Ingress::Agents))
        .layer(middleware::from_fn_with_state(Listener::Socket, observe::layer))
        .with_state(gateway.clone())
}

/// Builds a router from these routes, each behind its guards.
fn build_routes(routes: impl Iterator<Item = &'static Route>) -> Router<Gateway> {
    routes
        .fold(Router::new(), |router, route| router.route(route.endpoint.operation.path, guard_route(route)))
}

fn guard_route(route: &Route) -> MethodRouter<Gateway> {
    let Endpoint { operation: Operation { credentials, .. }, max_body_bytes: max_bytes } = *route.endpoint;
    let handler = (route.serve)();
    if credentials.is_empty() {
        return handler;
    }
    handler
        .route_layer(from_fn(move |request, next| admit(credentials, request, next)))
        .route_layer(from_fn(move |request, next| limit_body(max_bytes, request, next)))
}

/// Rejects a request based on its declared length, whether or not its credential is valid. A body without a declared
/// length is limited where it is read.
async fn limit_body(max_bytes: usize, request: Request, next: Next) -> Response {
    if content_length_exceeds(request.headers(), max_bytes) {
        body::LIMITS.drain(request.into_body()).await;
        return body::too_large_problem(max_bytes).into_response();
    }
    next.run(request).await
}

async fn unknown_route(request: Request) -> Response {
    // Without a principal, an unknown path gets the same refusal as a known one, so that the refusal does not reveal
    // which paths exist.
    let response = match request.extensions().get::<Result<Authentication, AuthFailure>>() {
        Some(Ok(_)) => Problem::new(Code::NotFound, "There is no such route; see /api/bridge/openapi.json.")
            .into_response(),
        Some(Err(failure)) => failure.into_response(),
        None => AuthFailure::Missing.into_response(),
    };
    body::LIMITS.drain(request.into_body()).await;
    response
}

async fn method_not_allowed(request: Request) -> Problem {
    body::LIMITS.drain(request.into_body()).await;
    Problem::new(Code::MethodNotAllowed, "This route does not allow this method; see the Allow header.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_too_large_remedy_names_limit_of_every_route() {
        let remedy = Code::RequestTooLarge.remedy();
        for Endpoint { operation, max_body_bytes } in endpoints() {
            let limit = match (operation.path, max_body_bytes >> 10) {
                ("/api/bridge/query", kib) => format!("{} MiB to the bridge", kib >> 10),
                (path, kib @ 1024..) => format!("{} MiB to `{path}`", kib >> 10),
                (_, kib) => format!("{kib} KiB to other routes"),
            };
            assert!(remedy.contains(&limit), "{}: {limit}", operation.path);
        }
    }
}

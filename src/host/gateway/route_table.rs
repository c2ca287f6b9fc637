//! The gateway's route table, from which [`Responder`](super::responder::Responder) and the OpenAPI document are built.
//! Invariant: a route's accepted callers and body limit always come from its description.

use std::collections::BTreeMap;
use std::pin::Pin;

use axum::Json;
use axum::extract::Request;
use axum::handler::Handler;
use axum::response::Response;
use http::{HeaderValue, Method};
use serde_json::{Value, json};

use super::auth::{AGENT, ALL_EXCEPT_PLATFORM, Ingress};
use super::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use super::routes::{
    backup_progress, dispatch, files, health, internal, limits, metrics, quiesce, records, side_database,
    usage,
};
use super::state::RequestState;
use super::{apps, bridge};
use svc_http::openapi::{self, Api, Credential, Operation};
use svc_http::problem::Code;

/// A route's description and handler.
pub struct Route {
    pub endpoint: &'static Endpoint,
    pub handler: fn(Request, RequestState) -> ResponseFuture,
}

type ResponseFuture = Pin<Box<dyn Future<Output = Response> + Send>>;

impl Route {
    /// Credentials accepted by the route.
    pub fn credentials(&self) -> &'static [Credential] {
        self.endpoint.operation.credentials
    }

    /// Whether the route needs no authentication.
    pub fn is_public(&self) -> bool {
        self.credentials().is_empty()
    }
}

macro_rules! route {
    ($endpoint:path, $handler:path) => {
        Route { endpoint: &$endpoint, handler: |request, state| Handler::call($handler, request, state) }
    };
}

/// All gateway routes except `/metrics`, in OpenAPI document order. Except on the agent socket, requests whose path has
/// no route and isn't under `/api` or `/_svc/internal` are proxied to the shell.
static ROUTES: [Route; 48] = [
    route!(bridge::QUERY, bridge::query),
    route!(bridge::SCHEMAS, bridge::list_schemas),
    route!(bridge::CHANGES, bridge::stream_changes),
    route!(DESCRIPTION, describe),
    route!(apps::LIST, apps::list_apps),
    route!(apps::ICON, apps::serve_icon),
    route!(apps::FRONT_PAGE, apps::serve_page),
    route!(apps::FRONT_PAGE_REDIRECT, apps::serve_page),
    route!(apps::PAGE, apps::serve_page),
    route!(records::BACKUPS, records::list_backups),
    route!(records::FOLLOW_BACKUPS, records::follow_backups),
    route!(side_database::SHOW, side_database::show),
    route!(side_database::OPEN, side_database::open),
    route!(side_database::COPY, side_database::copy),
    route!(side_database::CLOSE, side_database::close),
    route!(files::STATUS, files::show_status),
    route!(files::KEY, files::show_key),
    route!(files::VERSIONS, files::forward),
    route!(files::LIST, files::forward),
    route!(files::DOWNLOAD, files::download),
    route!(files::SHOW_RESTORE, files::show_restore),
    route!(files::RESTORE, files::restore),
    route!(dispatch::DISPATCH, dispatch::submit),
    route!(dispatch::LIST, dispatch::list),
    route!(dispatch::SHOW, dispatch::show),
    route!(dispatch::FOLLOW, dispatch::follow),
    route!(dispatch::CANCEL, dispatch::cancel),
    route!(records::INTERACTIONS, records::list_interactions),
    route!(records::FOLLOW_INTERACTIONS, records::follow_interactions),
    route!(records::AUDIT, records::list_audit),
    route!(records::FOLLOW_AUDIT, records::follow_audit),
    route!(records::ACTIVITY, records::list_activity),
    route!(records::FOLLOW_ACTIVITY, records::follow_activity),
    route!(records::STORAGE, records::list_storage),
    route!(records::FOLLOW_STORAGE, records::follow_storage),
    route!(usage::USAGE, usage::report_usage),
    route!(limits::SHOW_LIMITS, limits::show),
    route!(limits::SET_LIMITS, limits::set),
    route!(internal::BACKUP, internal::request_backup),
    route!(backup_progress::BACKUP_PROGRESS, backup_progress::show),
    route!(internal::ACCEPT, internal::request_backup_acceptance),
    route!(internal::DRILL, internal::request_drill),
    route!(internal::VERIFY_FILES, internal::request_files_verification),
    route!(internal::UPDATE, internal::request_update),
    route!(quiesce::QUIESCE, quiesce::quiesce),
    route!(quiesce::RESUME, quiesce::resume),
    route!(health::LIVE, health::report_liveness),
    route!(health::READY, health::report_readiness),
];

/// Paths that are never proxied to the shell, even if they have no route.
const RESERVED_PATHS: [&str; 2] = ["/_svc/internal/{*path}", "/api/{*path}"];

/// A listener's routes by path.
pub struct RouteTable {
    ingress: Ingress,
    paths: matchit::Router<PathRoutes>,
}

/// Routes on a single path; empty for a reserved path.
pub struct PathRoutes {
    template: &'static str,
    routes: Vec<&'static Route>,
    /// `Allow` header value.
    pub allowed_methods: HeaderValue,
}

/// Routing result for a path and method.
pub enum Target<'t> {
    /// `path_parameter` is the first path parameter, still percent-encoded.
    Route {
        route: &'static Route,
        path_parameter: Option<Box<str>>,
    },
    MethodNotAllowed(&'t PathRoutes),
    UnknownRoute,
    Shell,
}

impl RouteTable {
    /// The agent socket only serves routes that accept agent tokens, i.e. the bridge routes. The other listeners serve
    /// all routes, and the socket for the machine's own users also serves `/metrics`.
    pub fn new(ingress: Ingress) -> Self {
        let is_served = |route: &&'static Route| match ingress {
            Ingress::Public | Ingress::Trusted => true,
            Ingress::Agents => route.credentials().contains(&AGENT),
        };
        let metrics = (ingress == Ingress::Trusted).then_some(&METRICS);
        let mut by_path: BTreeMap<&str, Vec<&Route>> = BTreeMap::new();
        for route in ROUTES.iter().filter(is_served).chain(metrics) {
            by_path.entry(route.endpoint.operation.path).or_default().push(route);
        }
        by_path.extend(RESERVED_PATHS.map(|template| (template, Vec::new())));
        let mut paths = matchit::Router::new();
        for (template, routes) in by_path {
            let path = PathRoutes { template, allowed_methods: list_methods(&routes), routes };
            paths.insert(template, path).expect("path templates don't conflict");
        }
        Self { ingress, paths }
    }

    /// Returns the matching path template, if any, and the routing result.
    pub fn find(&self, method: &Method, path: &str) -> (Option<&'static str>, Target<'_>) {
        let Ok(matched) = self.paths.at(path) else {
            let is_for_agents = self.ingress == Ingress::Agents;
            return (None, if is_for_agents { Target::UnknownRoute } else { Target::Shell });
        };
        let path = matched.value;
        let target = match path.find_route(method) {
            Some(route) => {
                let path_parameter = matched.params.iter().next().map(|(_, value)| value.into());
                Target::Route { route, path_parameter }
            }
            None if path.routes.is_empty() => Target::UnknownRoute,
            None => Target::MethodNotAllowed(path),
        };
        (Some(path.template), target)
    }
}

impl PathRoutes {
    /// HEAD requests use the GET route; hyper drops the response body.
    fn find_route(&self, method: &Method) -> Option<&'static Route> {
        let method = if method == Method::HEAD { &Method::GET } else { method };
        self.routes.iter().find(|route| route.endpoint.operation.method == *method).copied()
    }

    /// Whether the path has routes and all of them are public.
    pub fn is_public(&self) -> bool {
        !self.routes.is_empty() && self.routes.iter().all(|route| route.is_public())
    }
}

fn list_methods(routes: &[&Route]) -> HeaderValue {
    let mut methods: Vec<&str> = Vec::new();
    for route in routes {
        match route.endpoint.operation.method.as_str() {
            "GET" => methods.extend(["GET", "HEAD"]),
            method => methods.push(method),
        }
    }
    HeaderValue::try_from(methods.join(",")).expect("method names are valid header values")
}

/// Descriptions of all routes except `/metrics`, in OpenAPI document order.
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

/// Builds the OpenAPI document, covering all routes except `/metrics`.
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

/// `/metrics`, which isn't part of the OpenAPI document.
static METRICS: Route = route!(METRICS_ENDPOINT, metrics::render_metrics);

static METRICS_ENDPOINT: Endpoint = Endpoint {
    operation: Operation {
        id: "metrics",
        method: Method::GET,
        path: "/metrics",
        summary: "The metrics, in Prometheus's text format.",
        credentials: &[],
        parameters: &[],
        body: None,
        responses: &[],
        problems: &[],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

async fn describe() -> Json<Value> {
    Json(openapi_document())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats a routing result for comparison.
    fn describe_target(ingress: Ingress, method: &Method, path: &str) -> String {
        match RouteTable::new(ingress).find(method, path).1 {
            Target::Route { route, path_parameter: None } => route.endpoint.operation.id.to_owned(),
            Target::Route { route, path_parameter: Some(value) } => {
                format!("{} {value}", route.endpoint.operation.id)
            }
            Target::MethodNotAllowed(path) => path.allowed_methods.to_str().unwrap().to_owned(),
            Target::UnknownRoute => "unknown".to_owned(),
            Target::Shell => "shell".to_owned(),
        }
    }

    #[test]
    fn find_selects_route_by_listener_method_and_path() {
        use Ingress::{Agents, Public, Trusted};
        for (ingress, method, path, selected) in [
            (Public, Method::POST, "/api/bridge/query", "query"),
            (Agents, Method::POST, "/api/bridge/query", "query"),
            (Public, Method::GET, "/api/bridge/query", "POST"),
            (Public, Method::GET, "/api/dispatch/a%20b", "showDispatch a%20b"),
            (Public, Method::HEAD, "/api/dispatch/a", "showDispatch a"),
            (Public, Method::OPTIONS, "/api/dispatch/a", "GET,HEAD,DELETE"),
            (Agents, Method::GET, "/api/dispatch/a", "unknown"),
            (Public, Method::GET, "/api/nothing", "unknown"),
            (Public, Method::POST, "/_svc/internal/nothing", "unknown"),
            (Public, Method::GET, "/api", "shell"),
            (Public, Method::GET, "/api/", "shell"),
            (Public, Method::GET, "/livez", "live"),
            (Trusted, Method::POST, "/livez", "GET,HEAD"),
            (Agents, Method::GET, "/livez", "unknown"),
            (Public, Method::GET, "/metrics", "shell"),
            (Trusted, Method::GET, "/metrics", "metrics"),
            (Trusted, Method::POST, "/metrics", "GET,HEAD"),
            (Agents, Method::GET, "/metrics", "unknown"),
            (Public, Method::GET, "/", "shell"),
            (Public, Method::CONNECT, "", "shell"),
            (Agents, Method::GET, "/", "unknown"),
        ] {
            let found = describe_target(ingress, &method, path);
            assert_eq!(found, selected, "{ingress:?} {method} {path}");
        }
    }

    #[test]
    fn only_health_routes_and_metrics_are_public() {
        let public = ROUTES.iter().chain([&METRICS]).filter(|route| route.is_public());
        let public: Vec<_> = public.map(|route| route.endpoint.operation.path).collect();
        assert_eq!(public, ["/livez", "/readyz", "/metrics"]);
    }

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

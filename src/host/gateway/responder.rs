//! Responds to the requests of one listener: finds the route, checks the request, and runs the route's handler.
//!
//! This is not an axum router, because each of its layers clones all inner services for every request: with the checks
//! as layers, most of the allocations of a bridge request were such clones.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, Method, header};

use super::auth::{AGENT, Authentication, Caller, Ingress, OWNER_OR_ADMIN, admit};
use super::identify::identify;
use super::route_table::{METRICS, ROUTES, Route};
use super::state::{RequestState, Services};
use super::{body, proxy};
use svc_http::body::content_length_exceeds;
use svc_http::observe::{Listener, observe};
use svc_http::problem::{Code, Problem};
use svc_http::proof;
use svc_http::server::{ConnectionInfo, Respond};

/// Paths that are never proxied to the shell, although not all of them have a route.
const RESERVED_PATHS: [&str; 2] = ["/_svc/internal/{*path}", "/api/{*path}"];

/// Responds to the requests of one listener.
#[derive(Clone)]
pub struct Responder(Arc<ResponderState>);

struct ResponderState {
    services: Arc<Services>,
    ingress: Ingress,
    paths: matchit::Router<PathRoutes>,
}

/// The routes of one path; none for a reserved path.
struct PathRoutes {
    template: &'static str,
    routes: Vec<&'static Route>,
}

/// What a request's path and method select.
enum Target<'r> {
    Route { route: &'static Route, path_parameter: Option<Box<str>> },
    MethodNotAllowed(&'r PathRoutes),
    UnknownRoute,
    Shell,
}

impl Respond for Responder {
    async fn respond(&self, request: Request, _: ConnectionInfo) -> Response {
        self.respond(request).await
    }
}

impl Responder {
    /// Serves, on the agents' socket, only the routes that accept an agent's token, which are the bridge's, and, on the
    /// other listeners, all routes. Only the socket of the machine's own users serves `/metrics`.
    pub fn new(services: Arc<Services>, ingress: Ingress) -> Self {
        let is_served = |route: &&'static Route| match ingress {
            Ingress::Public | Ingress::Trusted => true,
            Ingress::Agents => route.credentials().contains(&AGENT),
        };
        let metrics = (ingress == Ingress::Trusted).then_some(&METRICS);
        let mut by_path: Vec<PathRoutes> = Vec::new();
        for route in ROUTES.iter().filter(is_served).chain(metrics) {
            let template = route.endpoint.operation.path;
            match by_path.iter_mut().find(|path| path.template == template) {
                Some(path) => path.routes.push(route),
                None => by_path.push(PathRoutes { template, routes: vec![route] }),
            }
        }
        by_path.extend(RESERVED_PATHS.map(|template| PathRoutes { template, routes: Vec::new() }));
        let mut paths = matchit::Router::new();
        for path in by_path {
            paths.insert(path.template, path).expect("the paths of the routes are distinct");
        }
        Self(Arc::new(ResponderState { services, ingress, paths }))
    }

    /// Wraps the responder for a Unix socket, which axum serves.
    pub fn into_router(self) -> Router {
        Router::new().fallback(move |request: Request| {
            let responder = self.clone();
            async move { responder.respond(request).await }
        })
    }

    async fn respond(&self, request: Request) -> Response {
        let state = &*self.0;
        let listener = match state.ingress {
            Ingress::Public => Listener::Gateway,
            Ingress::Trusted | Ingress::Agents => Listener::Socket,
        };
        let (template, target) = state.find_target(&request);
        observe(listener, template, request, |request| state.respond_to_target(target, request)).await
    }
}

impl ResponderState {
    /// Returns the template of the request's path, if it has one, and what the request selects.
    fn find_target(&self, request: &Request) -> (Option<&'static str>, Target<'_>) {
        let Ok(matched) = self.paths.at(request.uri().path()) else {
            let is_for_agents = self.ingress == Ingress::Agents;
            return (None, if is_for_agents { Target::UnknownRoute } else { Target::Shell });
        };
        let path = matched.value;
        let target = match path.find_route(request.method()) {
            Some(route) => {
                let path_parameter = matched.params.iter().next().map(|(_, value)| value.into());
                Target::Route { route, path_parameter }
            }
            None if path.routes.is_empty() => Target::UnknownRoute,
            None => Target::MethodNotAllowed(path),
        };
        (Some(path.template), target)
    }

    /// Checks a request in this order: credential, method, size, and whether the route accepts the caller. A request
    /// whose proof is for the code host is proxied to code-server, regardless of its path and method.
    async fn respond_to_target(&self, target: Target<'_>, request: Request) -> Response {
        match target {
            Target::Route { route, path_parameter } if route.is_public() => {
                return self.run_handler(route, path_parameter, None, request).await;
            }
            Target::MethodNotAllowed(path) if path.is_public() => return path.reject_method(request).await,
            _ => {}
        }
        let (head, body) = request.into_parts();
        let outcome = identify(&self.services, &head, self.ingress).await;
        let request = Request::from_parts(head, body);
        if let Ok(Authentication { route: Some(proof::Route::Code), .. }) = outcome {
            return proxy::proxy_to_code(&self.services.upstreams, request).await;
        }
        match target {
            Target::Route { route, path_parameter } => {
                let max_bytes = route.endpoint.max_body_bytes;
                if content_length_exceeds(request.headers(), max_bytes) {
                    return reject(request, body::too_large_problem(max_bytes)).await;
                }
                match admit(route.credentials(), outcome) {
                    Ok(caller) => self.run_handler(route, path_parameter, Some(caller), request).await,
                    Err(refusal) => reject(request, refusal).await,
                }
            }
            Target::MethodNotAllowed(path) => path.reject_method(request).await,
            Target::UnknownRoute => {
                // Without a principal, an unknown path gets the same refusal as a known one, so that the refusal does
                // not reveal which paths exist.
                let refusal = match outcome {
                    Ok(_) => {
                        let detail = "There is no such route; see /api/bridge/openapi.json.";
                        Problem::new(Code::NotFound, detail).into_response()
                    }
                    Err(failure) => failure.into_response(),
                };
                reject(request, refusal).await
            }
            Target::Shell => match admit(OWNER_OR_ADMIN, outcome) {
                Ok(_) => proxy::proxy_to_shell(&self.services.upstreams, request).await,
                Err(refusal) => reject(request, refusal).await,
            },
        }
    }

    async fn run_handler(
        &self,
        route: &'static Route,
        path_parameter: Option<Box<str>>,
        caller: Option<Caller>,
        request: Request,
    ) -> Response {
        let is_head = request.method() == Method::HEAD;
        let services = self.services.clone();
        let state = RequestState { services, ingress: self.ingress, caller, path_parameter };
        let response = (route.handler)(request, state).await;
        if is_head { remove_body(response) } else { response }
    }
}

impl PathRoutes {
    /// A HEAD request selects the GET route.
    fn find_route(&self, method: &Method) -> Option<&'static Route> {
        let wanted = if method == Method::HEAD { &Method::GET } else { method };
        self.routes.iter().find(|route| route.endpoint.operation.method == *wanted).copied()
    }

    fn is_public(&self) -> bool {
        !self.routes.is_empty() && self.routes.iter().all(|route| route.is_public())
    }

    async fn reject_method(&self, request: Request) -> Response {
        let detail = "This route does not allow this method; see the Allow header.";
        let mut response = reject(request, Problem::new(Code::MethodNotAllowed, detail)).await;
        let mut allowed: Vec<&str> = Vec::new();
        for route in &self.routes {
            let method = route.endpoint.operation.method.as_str();
            allowed.push(method);
            if method == "GET" {
                allowed.push("HEAD");
            }
        }
        if let Ok(allowed) = HeaderValue::try_from(allowed.join(",")) {
            response.headers_mut().insert(header::ALLOW, allowed);
        }
        response
    }
}

/// Drains the request's body before it returns the response: otherwise, a client that is still sending may not receive
/// the response.
async fn reject(request: Request, refusal: impl IntoResponse) -> Response {
    let response = refusal.into_response();
    body::LIMITS.drain(request.into_body()).await;
    response
}

/// Turns the response to a GET request into that to a HEAD request.
fn remove_body(mut response: Response) -> Response {
    let length = response.body().size_hint().exact();
    if let Some(length) = length
        && !response.headers().contains_key(header::CONTENT_LENGTH)
    {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
    *response.body_mut() = Body::empty();
    response
}

//! Per-listener request handling: finds the route, checks the request, and runs the route's handler.
//!
//! We don't use an axum router because each layer clones all inner services on every request. When the checks were
//! layers, such clones made up most of the allocations for a bridge request.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::header;

use super::auth::{Authentication, Caller, Ingress, OWNER_OR_ADMIN, admit};
use super::identify::identify;
use super::route_table::{PathRoutes, Route, RouteTable, Target};
use super::state::{RequestState, Services};
use super::{body, proxy};
use svc_http::body::content_length_exceeds;
use svc_http::observe::{Listener, observe};
use svc_http::problem::{Code, Problem};
use svc_http::proof;
use svc_http::server::{ConnectionInfo, Respond};

/// Responds to the requests of one listener.
#[derive(Clone)]
pub struct Responder(Arc<ResponderState>);

struct ResponderState {
    services: Arc<Services>,
    ingress: Ingress,
    routes: RouteTable,
}

impl Respond for Responder {
    async fn respond(&self, request: Request, _: ConnectionInfo) -> Response {
        self.handle(request).await
    }
}

impl Responder {
    pub fn new(services: Arc<Services>, ingress: Ingress) -> Self {
        Self(Arc::new(ResponderState { services, ingress, routes: RouteTable::new(ingress) }))
    }

    /// Wraps the responder for a Unix socket served by axum.
    pub fn into_router(self) -> Router {
        Router::new().fallback(move |request: Request| {
            let responder = self.clone();
            async move { responder.handle(request).await }
        })
    }

    async fn handle(&self, request: Request) -> Response {
        let state = &*self.0;
        let listener = match state.ingress {
            Ingress::Public => Listener::Gateway,
            Ingress::Trusted | Ingress::Agents => Listener::Socket,
        };
        let (template, target) = state.routes.find(request.method(), request.uri().path());
        observe(listener, template, request, |request| state.respond_to_target(target, request)).await
    }
}

impl ResponderState {
    /// Resolves the caller first, which consumes an internal proof, but still checks the method, then the size, then
    /// the credential. Requests with a code-host proof are proxied to code-server regardless of path and method, except
    /// on public routes.
    async fn respond_to_target(&self, target: Target<'_>, request: Request) -> Response {
        match target {
            Target::Route { route, path_parameter } if route.is_public() => {
                return self.run_handler(route, path_parameter, None, request).await;
            }
            Target::MethodNotAllowed(path) if path.is_public() => return reject_method(path, request).await,
            _ => {}
        }
        let (head, body) = request.into_parts();
        let Services { principal_resolver, apps, .. } = &*self.services;
        let outcome = identify(principal_resolver, apps, &head, self.ingress).await;
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
            Target::MethodNotAllowed(path) => reject_method(path, request).await,
            Target::UnknownRoute => {
                // Without a principal, unknown paths get the same refusal as known ones with an allowed method and
                // size.
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
        let services = self.services.clone();
        let state = RequestState { services, ingress: self.ingress, caller, path_parameter };
        (route.handler)(request, state).await
    }
}

async fn reject_method(path: &PathRoutes, request: Request) -> Response {
    let detail = "This route does not allow this method; see the Allow header.";
    let mut response = reject(request, Problem::new(Code::MethodNotAllowed, detail)).await;
    response.headers_mut().insert(header::ALLOW, path.allowed_methods.clone());
    response
}

/// Drains the request body before responding; otherwise, a client that's still sending may never receive the response.
async fn reject(request: Request, refusal: impl IntoResponse) -> Response {
    let response = refusal.into_response();
    body::LIMITS.drain(request.into_body()).await;
    response
}

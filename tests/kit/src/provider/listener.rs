//! The HTTP server: accepts connections, checks the token and the rate limit, and applies scripted faults to calls.
//!
//! Faults that cut the connection act below HTTP, so that the client cannot distinguish them from a network failure.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::cloud::{Cloud, Outcome};
use super::error_response::ErrorResponse;
use super::faults::Fault;

/// Longer than any client timeout under test.
const HANG_DURATION: Duration = Duration::from_secs(300);

/// An error that closes the connection without a response.
#[derive(Debug)]
struct ConnectionCut;

impl std::fmt::Display for ConnectionCut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cut by a scripted fault")
    }
}

impl std::error::Error for ConnectionCut {}

/// Serves until the task is aborted, which also closes all connections.
pub(super) async fn serve(listener: TcpListener, cloud: Arc<Cloud>, api: Router, control: Router) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let (cloud, api, control) = (Arc::clone(&cloud), api.clone(), control.clone());
                connections.spawn(async move {
                    let handle = service_fn(move |request| {
                        let (cloud, api, control) = (Arc::clone(&cloud), api.clone(), control.clone());
                        async move { handle(&cloud, api, control, request).await }
                    });
                    // A cut connection is an expected error.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), handle)
                        .await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn handle(
    cloud: &Cloud,
    api: Router,
    control: Router,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, ConnectionCut> {
    if request.uri().path().starts_with("/_sim/") {
        return Ok(forward(control, request).await);
    }
    let path = request.uri().path_and_query().map_or("", |path| path.as_str()).to_owned();
    let call = cloud.script().record_call(request.method().as_str(), &path);
    if let Some(id) = request.headers().get("x-request-id").and_then(|id| id.to_str().ok()) {
        cloud.script().set_request_id(call, id);
    }
    let mut decision = cloud.bucket().take();

    let error = if !is_authorized(cloud, &request) {
        Some(ErrorResponse::new(StatusCode::UNAUTHORIZED, "unauthorized", "unable to authenticate"))
    } else if !decision.is_allowed {
        Some(ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", "rate limit exceeded"))
    } else {
        None
    };
    // A refused call consumes no fault: faults are scripted for calls that reach the API.
    let fault = match error {
        Some(_) => None,
        None => cloud.script().take_fault(request.method().as_str(), &path),
    };
    let mut response = match (error, fault) {
        (Some(error), _) => error.into_response(),
        (None, None) => forward(api, request).await,
        (None, Some(Fault::Status { status, code, reset_in_seconds })) => {
            if let Some(seconds) = reset_in_seconds {
                decision = decision.exhausted(seconds);
            }
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            ErrorResponse::new(status, &code, "a scripted fault").into_response()
        }
        (None, Some(Fault::LostRequest)) => return Err(ConnectionCut),
        (None, Some(Fault::LostReplyAfterCommit)) => {
            forward(api, request).await;
            return Err(ConnectionCut);
        }
        (None, Some(Fault::SlowReply { ms })) => {
            let response = forward(api, request).await;
            tokio::time::sleep(Duration::from_millis(ms)).await;
            response
        }
        (None, Some(Fault::ActionError)) => {
            request.extensions_mut().insert(Outcome::Failure);
            forward(api, request).await
        }
        (None, Some(Fault::Timeout)) => {
            tokio::time::sleep(HANG_DURATION).await;
            return Err(ConnectionCut);
        }
    };
    decision.write_headers(response.headers_mut());
    if let Ok(id) = HeaderValue::try_from(Uuid::new_v4().simple().to_string()) {
        response.headers_mut().insert("x-correlation-id", id);
    }
    cloud.script().set_status(call, response.status().as_u16());
    Ok(response)
}

async fn forward(router: Router, request: Request<Incoming>) -> Response<Body> {
    match TowerToHyperService::new(router).call(request).await {
        Ok(response) => response,
        Err(infallible) => match infallible {},
    }
}

fn is_authorized(cloud: &Cloud, request: &Request<Incoming>) -> bool {
    let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    authorization.and_then(|value| value.strip_prefix("Bearer ")) == Some(cloud.token.as_str())
}

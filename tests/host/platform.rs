//! A fake platform that sends scripted responses and records the calls it receives, and a gateway that is ready.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderMap, StatusCode, Uri, header};
use svc::http::server::{self, ListenerLimits};
use svc::http::tls;
use tokio_util::sync::CancellationToken;

use super::machine::Machine;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub path: String,
    pub authorization: String,
    pub body: String,
}

/// A scripted response. With `Lost`, the connection closes before the response is complete.
#[derive(Debug, Clone)]
pub enum ScriptedResponse {
    Json(u16, serde_json::Value),
    Lost,
}

#[derive(Default)]
struct PlatformState {
    calls: Vec<Call>,
    next: VecDeque<ScriptedResponse>,
    always: Option<ScriptedResponse>,
}

#[derive(Clone)]
pub struct Platform {
    state: Arc<Mutex<PlatformState>>,
    pub addr: SocketAddr,
}

impl Platform {
    /// Starts a platform that sends the queued responses first, then `always` to every call.
    pub async fn start(always: ScriptedResponse) -> Result<Self> {
        let state = Arc::new(Mutex::new(PlatformState { always: Some(always), ..PlatformState::default() }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let app = Router::new().fallback(respond).with_state(Arc::clone(&state));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { state, addr })
    }

    pub fn queue(&self, responses: impl IntoIterator<Item = ScriptedResponse>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).next.extend(responses);
    }

    pub fn calls(&self) -> Vec<Call> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).calls.clone()
    }

    pub fn configure(&self, machine: &Machine) -> Result<()> {
        machine.set_env_vars("host.env", &[("PLATFORM_INTERNAL_URL", &format!("http://{}", self.addr))])
    }
}

async fn respond(
    State(state): State<Arc<Mutex<PlatformState>>>,
    uri: Uri,
    headers: HeaderMap,
    body: String,
) -> Response {
    let response = {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let authorization = authorization.unwrap_or_default().to_owned();
        state.calls.push(Call { path: uri.path().to_owned(), authorization, body });
        state.next.pop_front().or(state.always.clone())
    };
    match response {
        Some(ScriptedResponse::Json(status, body)) => {
            (StatusCode::from_u16(status).expect("the status is valid"), axum::Json(body)).into_response()
        }
        // The response body fails, so hyper closes the connection.
        _ => {
            let broken = futures_util::stream::iter([Err::<bytes::Bytes, _>(std::io::Error::other("lost"))]);
            Response::new(axum::body::Body::from_stream(broken))
        }
    }
}

/// Starts a gateway that serves `/readyz`, with a new certificate that replaces the machine's stored one.
pub async fn start_gateway(machine: &Machine) -> Result<SocketAddr> {
    start_gateway_with_routes(machine, Router::new().route("/readyz", get(|| async { "ok" }))).await
}

/// Like [`start_gateway`], but with the given routes.
pub async fn start_gateway_with_routes(machine: &Machine, app: Router) -> Result<SocketAddr> {
    tls::install_provider();
    let identity = tls::generate_self_signed(&["svc".to_owned()])?;
    svc::fsx::write_atomic(&machine.path("var/lib/svc/tls/key.pem"), identity.key_pem.as_bytes(), 0o600)?;
    svc::fsx::write_atomic(&machine.path("var/lib/svc/tls/cert.pem"), identity.cert_pem.as_bytes(), 0o644)?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let config = Arc::new(identity.server_config()?);
    tokio::spawn(server::serve(
        listener,
        Some(config),
        app,
        ListenerLimits::default(),
        CancellationToken::new(),
    ));
    Ok(addr)
}

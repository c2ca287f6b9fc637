//! A platform that answers as it is told and remembers what it was asked; and a gateway that is ready.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderMap, StatusCode, Uri, header};
use svc::http::server::{self, Limits};
use svc::http::tls;
use tokio_util::sync::CancellationToken;

use super::machine::Machine;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub path: String,
    pub authorization: String,
    pub body: String,
}

/// One answer. `Lost`: the call counted, and the caller hears nothing.
#[derive(Debug, Clone)]
pub enum Answer {
    Json(u16, serde_json::Value),
    Lost,
}

#[derive(Default)]
struct Desk {
    calls: Vec<Call>,
    next: VecDeque<Answer>,
    always: Option<Answer>,
}

#[derive(Clone)]
pub struct Platform {
    desk: Arc<Mutex<Desk>>,
    pub addr: SocketAddr,
}

impl Platform {
    /// Answers every call with `always`, unless something else was put in line before.
    pub async fn start(always: Answer) -> Result<Self> {
        let desk = Arc::new(Mutex::new(Desk { always: Some(always), ..Desk::default() }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let app = Router::new().fallback(answer).with_state(Arc::clone(&desk));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { desk, addr })
    }

    pub fn next(&self, answers: impl IntoIterator<Item = Answer>) {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner).next.extend(answers);
    }

    pub fn calls(&self) -> Vec<Call> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner).calls.clone()
    }

    pub fn serves(&self, machine: &Machine) -> Result<()> {
        machine.add_env("host.env", &[("PLATFORM_INTERNAL_URL", &format!("http://{}", self.addr))])
    }
}

async fn answer(
    State(desk): State<Arc<Mutex<Desk>>>,
    uri: Uri,
    headers: HeaderMap,
    body: String,
) -> Response {
    let answer = {
        let mut desk = desk.lock().unwrap_or_else(PoisonError::into_inner);
        let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let authorization = authorization.unwrap_or_default().to_owned();
        desk.calls.push(Call { path: uri.path().to_owned(), authorization, body });
        desk.next.pop_front().or(desk.always.clone())
    };
    match answer {
        Some(Answer::Json(status, body)) => {
            (StatusCode::from_u16(status).expect("a status"), axum::Json(body)).into_response()
        }
        // hyper breaks the connection of a handler that panics; here the answer's body breaks instead.
        _ => {
            let broken = futures_util::stream::iter([Err::<bytes::Bytes, _>(std::io::Error::other("lost"))]);
            Response::new(axum::body::Body::from_stream(broken))
        }
    }
}

/// A gateway with a certificate of its own, which lies where the machine's gateway keeps it. Answers `/readyz`.
pub async fn gateway(machine: &Machine) -> Result<SocketAddr> {
    gateway_of(machine, Router::new().route("/readyz", get(|| async { "ok" }))).await
}

/// The same, with these routes.
pub async fn gateway_of(machine: &Machine, app: Router) -> Result<SocketAddr> {
    tls::install_provider();
    let identity = tls::self_signed(&["svc".to_owned()])?;
    svc::fsx::write_atomic(&machine.path("var/lib/svc/tls/key.pem"), identity.key_pem.as_bytes(), 0o600)?;
    svc::fsx::write_atomic(&machine.path("var/lib/svc/tls/cert.pem"), identity.cert_pem.as_bytes(), 0o644)?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let config = Arc::new(identity.server_config()?);
    tokio::spawn(server::serve(listener, Some(config), app, Limits::default(), CancellationToken::new()));
    Ok(addr)
}

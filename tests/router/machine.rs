//! A fake machine for the router: an HTTPS server that records every request.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures_util::{SinkExt, StreamExt};
use http::{HeaderMap, StatusCode};
use hyper_util::rt::TokioIo;
use svc::http::server::{ListenerLimits, serve};
use svc::http::tls::{Identity, SpkiPin, generate_self_signed};
use svc::machine::id::MachineId;
use tokio::net::TcpListener;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_util::sync::CancellationToken;

/// The time from a request for `/late-endless` to the head of its response.
const LATE_HEAD_DELAY: Duration = Duration::from_secs(4);

#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub uri: String,
    pub headers: HeaderMap,
}

/// A fake machine, which stops when it is dropped.
pub struct TestMachine {
    pub id: MachineId,
    pub addr: SocketAddr,
    pub pin: SpkiPin,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
    stop: CancellationToken,
}

impl TestMachine {
    pub async fn start() -> Result<Self> {
        Self::start_as(MachineId::new(), &generate_self_signed(&["127.0.0.1".to_owned()])?).await
    }

    /// Starts a machine with the given id, certificate and key.
    pub async fn start_as(id: MachineId, identity: &Identity) -> Result<Self> {
        let pin = identity.pin()?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let (addr, stop) = (listener.local_addr()?, CancellationToken::new());
        let requests = Arc::<Mutex<Vec<ReceivedRequest>>>::default();
        let app = axum::Router::new().fallback(respond).with_state(Arc::clone(&requests));
        let tls = Some(Arc::new(identity.server_config()?));
        let limits = ListenerLimits { drain_timeout: Duration::ZERO, ..ListenerLimits::default() };
        tokio::spawn(serve(listener, tls, app, limits, stop.clone()));
        Ok(Self { id, addr, pin, requests, stop })
    }

    pub fn ip(&self) -> IpAddr {
        self.addr.ip()
    }

    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.requests.lock().unwrap().clone()
    }

    pub fn last_request(&self) -> ReceivedRequest {
        self.requests().pop().expect("the machine has received no request")
    }
}

impl Drop for TestMachine {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn respond(State(requests): State<Arc<Mutex<Vec<ReceivedRequest>>>>, mut request: Request) -> Response {
    let (uri, headers) = (request.uri().to_string(), request.headers().clone());
    let path = request.uri().path().to_owned();
    requests.lock().unwrap().push(ReceivedRequest { uri, headers });
    match &*path {
        "/echo" => Response::new(request.into_body()),
        "/ws" => accept_websocket(&mut request),
        "/large" => {
            let chunk = bytes::Bytes::from(vec![7; 64 * 1024]);
            let chunks =
                futures_util::stream::iter((0..160).map(move |_| Ok::<_, std::io::Error>(chunk.clone())));
            Response::new(Body::from_stream(chunks))
        }
        "/count" => {
            let body = axum::body::to_bytes(request.into_body(), usize::MAX).await.unwrap();
            body.len().to_string().into_response()
        }
        "/endless" => endless_stream(),
        "/late-endless" => {
            tokio::time::sleep(LATE_HEAD_DELAY).await;
            endless_stream()
        }
        "/cookies" => {
            let mut response = "cookies".into_response();
            for line in ["theme=dark; Path=/", "svc_session=planted; Path=/", "svc_code_session=planted"] {
                response.headers_mut().append("set-cookie", line.parse().unwrap());
            }
            response.headers_mut().insert("connection", "x-hop".parse().unwrap());
            response.headers_mut().insert("x-hop", "1".parse().unwrap());
            response
        }
        "/page" => {
            let headers = [
                ("content-type", "text/html; charset=utf-8"),
                ("cache-control", "max-age=31536000, immutable"),
                ("alt-svc", "h3=\":443\""),
                ("clear-site-data", "\"cookies\""),
                ("nel", "{}"),
                ("report-to", "{}"),
                ("reporting-endpoints", "a=\"https://evil.test\""),
                ("service-worker-allowed", "/"),
                ("strict-transport-security", "max-age=1; includeSubDomains"),
                ("x-custom", "passed"),
            ];
            (headers, "<p>page").into_response()
        }
        "/missing" => (StatusCode::NOT_FOUND, "not found on the machine").into_response(),
        _ => format!("{} {path}", request.method()).into_response(),
    }
}

fn endless_stream() -> Response {
    let first = futures_util::stream::iter([Ok::<_, std::io::Error>(bytes::Bytes::from("started\n"))]);
    Response::new(Body::from_stream(first.chain(futures_util::stream::pending())))
}

/// Accepts a WebSocket and echoes every message.
fn accept_websocket(request: &mut Request) -> Response {
    let Some(key) = request.headers().get("sec-websocket-key") else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let accept = derive_accept_key(key.as_bytes());
    let upgrade = hyper::upgrade::on(request);
    tokio::spawn(async move {
        let stream = TokioIo::new(upgrade.await.unwrap());
        let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
        while let Some(Ok(message)) = socket.next().await {
            if message.is_close() || socket.send(message).await.is_err() {
                break;
            }
        }
    });
    Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-accept", accept)
        .body(Body::empty())
        .unwrap()
}

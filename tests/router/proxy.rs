//! Tests the reverse proxy in isolation, with misbehaving upstreams.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use axum::body::{Body, to_bytes};
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use svc::http::proxy::{Dial, Io, Proxy, ProxyError, ProxyLimits, end_stalled_body};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::io::ReaderStream;

struct PlainDialer(SocketAddr);

#[async_trait]
impl Dial for PlainDialer {
    async fn dial(&self) -> std::io::Result<Box<dyn Io>> {
        Ok(Box::new(TcpStream::connect(self.0).await?))
    }
}

/// How the upstream handles a request.
#[derive(Clone, Copy)]
enum Behavior {
    Respond,
    /// Closes the connection after reading the request.
    Disconnect,
    /// Reads the request and never responds.
    Silent,
    /// Responds, then closes the connection.
    RespondAndClose,
    /// Closes the connection in the middle of the response body.
    Truncate,
    /// Sends a response body that never ends.
    Endless,
}

struct Upstream {
    addr: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl Upstream {
    /// `behavior` gets the connection's number and the request's number on that connection; both start at 0.
    async fn start(behavior: fn(usize, usize) -> Behavior) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let (connections, requests) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let counts = (Arc::clone(&connections), Arc::clone(&requests));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let connection = counts.0.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(stream, Arc::clone(&counts.1), move |request| {
                    behavior(connection, request)
                }));
            }
        });
        Ok(Self { addr, connections, requests })
    }

    fn proxy(&self) -> Proxy {
        self.proxy_with(ProxyLimits::default())
    }

    fn proxy_with(&self, limits: ProxyLimits) -> Proxy {
        Proxy::new(PlainDialer(self.addr), limits)
    }

    fn counts(&self) -> (usize, usize) {
        (self.connections.load(Ordering::SeqCst), self.requests.load(Ordering::SeqCst))
    }
}

async fn serve(mut stream: TcpStream, requests: Arc<AtomicUsize>, behavior: impl Fn(usize) -> Behavior) {
    for index in 0.. {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => return,
            }
        }
        requests.fetch_add(1, Ordering::SeqCst);
        let response: &[u8] = match behavior(index) {
            Behavior::Respond | Behavior::RespondAndClose => {
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
            }
            Behavior::Truncate => b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nok",
            Behavior::Disconnect => return,
            Behavior::Endless => {
                let mut sent = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
                while sent.is_ok() {
                    sent = stream.write_all(&[0; 1 << 16]).await;
                }
                return;
            }
            Behavior::Silent => {
                std::future::pending::<()>().await;
                return;
            }
        };
        if stream.write_all(response).await.is_err()
            || matches!(behavior(index), Behavior::RespondAndClose | Behavior::Truncate)
        {
            return;
        }
    }
}

fn request(method: Method) -> Request<Body> {
    Request::builder().method(method).uri("/").header("host", "x").body(Body::empty()).unwrap()
}

async fn exchange(proxy: &Proxy, method: Method) -> Result<StatusCode, ProxyError> {
    let response = proxy.forward(request(method)).await?;
    let (status, body) = (response.status(), response.into_body());
    assert_eq!(to_bytes(body, 100).await.unwrap(), "ok");
    Ok(status)
}

#[tokio::test]
async fn connection_is_reused_for_many_requests() -> Result<()> {
    let upstream = Upstream::start(|_, _| Behavior::Respond).await?;
    let proxy = upstream.proxy();
    for _ in 0..10 {
        assert_eq!(exchange(&proxy, Method::GET).await?, StatusCode::OK);
        assert_eq!(exchange(&proxy, Method::POST).await?, StatusCode::OK);
    }
    assert_eq!(upstream.counts(), (1, 20));
    Ok(())
}

#[tokio::test]
async fn closed_idle_connection_is_not_reused() -> Result<()> {
    let upstream = Upstream::start(|_, _| Behavior::RespondAndClose).await?;
    let proxy = upstream.proxy();
    for _ in 0..3 {
        assert_eq!(exchange(&proxy, Method::POST).await?, StatusCode::OK);
        // Wait until the proxy has received the close.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(upstream.counts(), (3, 3));
    Ok(())
}

#[tokio::test]
async fn broken_idle_connection_is_replaced_for_idempotent_requests() -> Result<()> {
    let upstream = Upstream::start(|connection, request| {
        if (connection, request) == (0, 1) { Behavior::Disconnect } else { Behavior::Respond }
    });
    let upstream = upstream.await?;
    let proxy = upstream.proxy();
    exchange(&proxy, Method::GET).await?;
    assert_eq!(exchange(&proxy, Method::GET).await?, StatusCode::OK);
    assert_eq!(upstream.counts(), (2, 3));

    let upstream =
        Upstream::start(|_, request| if request == 1 { Behavior::Disconnect } else { Behavior::Respond })
            .await?;
    let proxy = upstream.proxy();
    exchange(&proxy, Method::GET).await?;
    // The request may have been processed, so it is not retried.
    assert!(matches!(exchange(&proxy, Method::POST).await, Err(ProxyError::Exchange(_))));
    assert_eq!(upstream.counts(), (1, 2));
    Ok(())
}

#[tokio::test]
async fn broken_new_connection_is_not_retried() -> Result<()> {
    let upstream = Upstream::start(|_, _| Behavior::Disconnect).await?;
    assert!(matches!(exchange(&upstream.proxy(), Method::GET).await, Err(ProxyError::Exchange(_))));
    assert_eq!(upstream.counts(), (1, 1));
    Ok(())
}

#[tokio::test]
async fn truncated_body_fails_and_closes_its_connection() -> Result<()> {
    let upstream =
        Upstream::start(|connection, _| if connection == 0 { Behavior::Truncate } else { Behavior::Respond })
            .await?;
    let proxy = upstream.proxy();
    let response = proxy.forward(request(Method::GET)).await?;
    assert!(to_bytes(response.into_body(), 100).await.is_err());
    assert_eq!(exchange(&proxy, Method::GET).await?, StatusCode::OK);
    assert_eq!(upstream.counts().0, 2);
    Ok(())
}

#[tokio::test]
async fn early_response_closes_connection_after_upload() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let proxy = Proxy::new(PlainDialer(listener.local_addr()?), ProxyLimits::default());
    let upstream = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        let mut received = Vec::new();
        while !received.ends_with(b"\r\n\r\n") {
            received.push(stream.read_u8().await?);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await?;
        stream.read_to_end(&mut received).await
    });
    let (upload, body) = tokio::io::duplex(64);
    let body = Body::from_stream(ReaderStream::new(body));
    let response = proxy.forward(Request::post("/").header("host", "x").body(body)?).await?;
    assert_eq!(to_bytes(response.into_body(), 100).await?, "ok");
    drop(upload);
    let closed = tokio::time::timeout(Duration::from_secs(10), upstream).await;
    closed.context("the connection is still open")???;
    Ok(())
}

#[tokio::test]
async fn head_timeout_and_connection_limit_are_enforced() -> Result<()> {
    let upstream = Upstream::start(|_, _| Behavior::Silent).await?;
    let limits =
        ProxyLimits { head_timeout: Duration::from_millis(50), max_connections: 1, ..ProxyLimits::default() };
    let proxy = Arc::new(upstream.proxy_with(limits));
    let (first, second) =
        tokio::join!(proxy.forward(request(Method::GET)), proxy.forward(request(Method::GET)));
    assert!(matches!(first, Err(ProxyError::HeadTimeout)), "{first:?}");
    assert!(matches!(second, Err(ProxyError::Full)), "{second:?}");
    let again = proxy.forward(request(Method::GET)).await;
    assert!(
        matches!(again, Err(ProxyError::HeadTimeout)),
        "the failed connection still counts towards the limit: {again:?}"
    );
    Ok(())
}

#[tokio::test]
async fn unread_response_releases_its_connection() -> Result<()> {
    let upstream =
        Upstream::start(|connection, _| if connection == 0 { Behavior::Endless } else { Behavior::Respond })
            .await?;
    let proxy = upstream.proxy_with(ProxyLimits { max_connections: 1, ..ProxyLimits::default() });
    let unread = proxy.forward(request(Method::GET)).await?;
    let unread = unread.map(|body| end_stalled_body(body, Duration::from_millis(100), ()));
    assert!(matches!(exchange(&proxy, Method::GET).await, Err(ProxyError::Full)));
    let released = async {
        while exchange(&proxy, Method::GET).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), released)
        .await
        .context("the connection still counts towards the limit")?;
    assert!(unread.into_body().collect().await.is_err(), "an incomplete response ended without an error");
    Ok(())
}

#[tokio::test]
async fn idle_connection_is_closed_after_its_timeout() -> Result<()> {
    let upstream = Upstream::start(|_, _| Behavior::Respond).await?;
    let limits = ProxyLimits { idle_timeout: Duration::from_millis(40), ..ProxyLimits::default() };
    let proxy = upstream.proxy_with(limits);
    exchange(&proxy, Method::GET).await?;
    tokio::time::sleep(Duration::from_millis(200)).await;
    exchange(&proxy, Method::GET).await?;
    assert_eq!(upstream.counts(), (2, 2));
    Ok(())
}

#[tokio::test]
async fn close_ends_exchanges_in_flight() -> Result<()> {
    let upstream = Upstream::start(|_, _| Behavior::Silent).await?;
    let proxy = Arc::new(upstream.proxy());
    let waiting = tokio::spawn({
        let proxy = Arc::clone(&proxy);
        async move { proxy.forward(request(Method::GET)).await.map(drop) }
    });
    while upstream.counts().1 == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    proxy.close();
    assert!(matches!(waiting.await?, Err(ProxyError::Closed)));
    assert!(matches!(exchange(&proxy, Method::GET).await, Err(ProxyError::Closed)));

    let upstream = Upstream::start(|_, _| Behavior::Endless).await?;
    let proxy = upstream.proxy();
    let mut body = proxy.forward(request(Method::GET)).await?.into_body();
    body.frame().await.context("the body has ended")??;
    proxy.close();
    for _ in 0..100 {
        if body.frame().await.context("the body has ended")?.is_err() {
            return Ok(());
        }
    }
    bail!("data that has already arrived must not keep the exchange open")
}

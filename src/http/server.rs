//! The server loop: accept, TLS where configured, HTTP/1.1 with upgrades, and a drain with a deadline.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use futures_util::FutureExt;
use http::Request;
use hyper::body::{Body as _, Incoming};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::shards::Shards;

/// Limits of one listener.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub connections: usize,
    pub handshake: Duration,
    pub header_read: Duration,
    /// How long requests under way may go on after the stop was asked.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            handshake: Duration::from_secs(10),
            header_read: Duration::from_secs(30),
            drain: Duration::from_secs(20),
        }
    }
}

/// Serves until `stop`, then lets requests under way end within the drain's deadline.
///
/// Each request carries `ConnectInfo<SocketAddr>` and [`Scheme`].
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    accept(listener, tls, router, limits, stop, None).await;
}

/// As [`serve`], with each connection on one of these threads.
pub async fn serve_on(
    shards: Shards,
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    accept(listener, tls, router, limits, stop, Some(shards)).await;
}

async fn accept(
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
    shards: Option<Shards>,
) {
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(limits.connections));
    let acceptor = tls.map(TlsAcceptor::from);
    let scheme = if acceptor.is_some() { Scheme::Https } else { Scheme::Http };
    loop {
        let place = tokio::select! {
            () = stop.cancelled() => break,
            place = places.clone().acquire_owned() => place,
        };
        let Ok(place) = place else { break };
        let (stream, peer) = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, mostly: give those that are open a moment to end.
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        // Small answers go out at once; a socket that is gone already shows when it is read.
        let _ = stream.set_nodelay(true);
        let router = router.clone();
        let from = Origin { peer, scheme };
        let acceptor = acceptor.clone();
        let watcher = graceful.watcher();
        let stop = stop.clone();
        let served = move |stream: TcpStream| async move {
            let _place = place;
            match acceptor {
                None => connection(stream, router, from, limits, watcher).await,
                Some(acceptor) => {
                    let handshake = tokio::time::timeout(limits.handshake, acceptor.accept(stream));
                    let stream = tokio::select! {
                        () = stop.cancelled() => return,
                        done = handshake => match done {
                            Ok(Ok(stream)) => stream,
                            _ => return,
                        },
                    };
                    // Apart: an idle connection should not keep the room that its handshake took.
                    Box::pin(connection(stream, router, from, limits, watcher)).await;
                }
            }
        };
        match &shards {
            None => drop(tokio::spawn(served(stream))),
            Some(shards) => {
                // Out of this thread's reactor and, on the other thread, into that one's.
                let Ok(stream) = stream.into_std() else { continue };
                shards.spawn(async move {
                    if let Ok(stream) = TcpStream::from_std(stream) {
                        served(stream).await;
                    }
                });
            }
        }
    }
    drop(listener);
    if tokio::time::timeout(limits.drain, graceful.shutdown()).await.is_err() {
        tracing::warn!("some requests did not end within the drain's deadline");
    }
}

/// How the client reached this listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Http,
    Https,
}

impl Scheme {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// What each request of a connection carries.
#[derive(Debug, Clone, Copy)]
struct Origin {
    peer: SocketAddr,
    scheme: Scheme,
}

/// One connection to its end. Not an `async fn`: that would hold the stream and all that is built around it twice.
fn connection<S>(
    stream: S,
    router: Router,
    from: Origin,
    limits: Limits,
    watcher: Watcher,
) -> impl Future<Output = ()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.header_read);
    let router = TowerToHyperService::new(router);
    // Put in here and not by layers of the router, each of which costs every request two boxes.
    let service = service_fn(move |request: Request<Incoming>| {
        let body = |body: Incoming| if body.is_end_stream() { Body::empty() } else { Body::new(body) };
        let mut request = request.map(body);
        request.extensions_mut().insert(ConnectInfo(from.peer));
        request.extensions_mut().insert(from.scheme);
        router.call(request)
    });
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
    watcher.watch(connection).map(|end| {
        if let Err(error) = end {
            tracing::debug!(%error, "connection ended");
        }
    })
}

/// Cancelled at the first SIGTERM or SIGINT.
///
/// # Errors
/// When the signal handlers cannot be installed.
pub fn stop_on_signal() -> std::io::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let told = stop.clone();
    tokio::spawn(async move {
        tokio::select! { _ = term.recv() => {} _ = int.recv() => {} }
        told.cancel();
    });
    Ok(stop)
}

/// The address that a listener got, for the line that tells it.
pub fn local_addr(listener: &TcpListener) -> std::io::Result<SocketAddr> {
    listener.local_addr()
}

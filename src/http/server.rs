//! The server loop: accept, TLS where configured, HTTP/1.1 with upgrades, and a drain with a deadline.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::{Extension, Router};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

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
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(limits.connections));
    let acceptor = tls.map(TlsAcceptor::from);
    let scheme = if acceptor.is_some() { Scheme::Https } else { Scheme::Http };
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { break };
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
        let router = router.clone().layer(Extension(ConnectInfo(peer))).layer(Extension(scheme));
        let acceptor = acceptor.clone();
        let watcher = graceful.watcher();
        let stop = stop.clone();
        tokio::spawn(async move {
            let _place = place;
            match acceptor {
                None => connection(stream, router, limits, watcher).await,
                Some(acceptor) => {
                    let handshake = tokio::time::timeout(limits.handshake, acceptor.accept(stream));
                    tokio::select! {
                        () = stop.cancelled() => {}
                        done = handshake => if let Ok(Ok(stream)) = done {
                            connection(stream, router, limits, watcher).await;
                        }
                    }
                }
            }
        });
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

async fn connection<S>(stream: S, router: Router, limits: Limits, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.header_read);
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "connection ended");
    }
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

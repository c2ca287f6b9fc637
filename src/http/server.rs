//! The server loop: accepts connections, with TLS if configured, serves HTTP/1.1 with upgrades, and drains at shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::response::Response;
use http::Request;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::address_limit::{AddressLimiter, AddressPermit};
use super::certificate::ACME_ALPN;
pub use super::connection::{ConnectionInfo, Respond, Scheme};
use super::connection::{ConnectionLimits, StopSignal, serve_connection};
use super::networks::Networks;
use super::passthrough::Passthrough;
use super::shards::{LoadGuard, Shards};

/// Limits for one listener.
#[derive(Debug, Clone)]
pub struct ListenerLimits {
    /// Maximum number of open connections, including upgraded ones.
    pub max_connections: usize,
    /// Maximum number of connections per IPv4 address or IPv6 /64. Loopback addresses have no limit.
    pub max_connections_per_address: usize,
    /// Load balancers, which are exempt from the per-address limit.
    pub trusted_proxies: Networks,
    /// Timeout for the TLS handshake.
    pub handshake_timeout: Duration,
    /// Timeout from the first byte of a request head to its last.
    pub head_timeout: Duration,
    pub max_head_bytes: usize,
    /// Timeout for an idle connection.
    pub idle_timeout: Duration,
    /// Timeout for requests in flight once the server has been stopped.
    pub drain_timeout: Duration,
}

impl Default for ListenerLimits {
    fn default() -> Self {
        let max_connections = max_connections();
        Self {
            max_connections,
            max_connections_per_address: max_connections / 4,
            trusted_proxies: Networks::default(),
            handshake_timeout: Duration::from_secs(10),
            head_timeout: Duration::from_secs(10),
            max_head_bytes: 32 * 1024,
            idle_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(20),
        }
    }
}

impl ListenerLimits {
    fn for_connections(&self) -> ConnectionLimits {
        let Self { idle_timeout, head_timeout, max_head_bytes, .. } = *self;
        ConnectionLimits { idle_timeout, head_timeout, max_head_bytes }
    }
}

/// Returns a connection limit that bounds the memory for incomplete request heads to an eighth of the machine's memory.
/// It is at least 512 and at most 16,384. `tests/incomplete_requests.rs` measures the memory per connection.
fn max_connections() -> usize {
    const BYTES_PER_CONNECTION: u64 = 128 * 1024;
    let memory = nix::sys::sysinfo::sysinfo().map_or(0, |info| info.ram_total());
    usize::try_from(memory / 8 / BYTES_PER_CONNECTION).unwrap_or(usize::MAX).clamp(512, 16_384)
}

/// Each request has the extension `ConnectInfo<SocketAddr>`.
impl Respond for Router {
    async fn respond(&self, mut request: Request<Body>, connection: ConnectionInfo) -> Response {
        // A router layer would cost each request two more allocations.
        request.extensions_mut().insert(ConnectInfo(connection.peer));
        let Ok(response) = TowerToHyperService::new(self.clone()).call(request).await;
        response
    }
}

/// Serves until `stop` is cancelled, then waits up to the drain timeout for the requests in flight.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    responder: impl Respond,
    limits: ListenerLimits,
    stop: CancellationToken,
) {
    serve_listener(listener, tls, responder, limits, stop, None).await;
}

/// Like [`serve`], but runs each connection on one of `threads`, and passes ACME validations through if configured.
pub async fn serve_on(
    threads: RouterThreads,
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    responder: impl Respond,
    limits: ListenerLimits,
    stop: CancellationToken,
) {
    serve_listener(listener, tls, responder, limits, stop, Some(threads)).await;
}

/// The threads of the router's public listener, and its passthrough for ACME validations.
pub struct RouterThreads {
    pub shards: Shards,
    /// Used only if the listener has TLS.
    pub passthrough: Option<Arc<Passthrough>>,
}

/// Makes the kernel close an idle connection two minutes after its client has vanished. A connection with
/// unacknowledged data is closed when the kernel stops retransmitting, after about 15 minutes. Without keepalive, an
/// upgraded connection to a vanished client would count against the listener's limits indefinitely, because it has no
/// idle timeout. Accepted sockets inherit the options, so setting them costs nothing per connection.
fn enable_keepalive(listener: &TcpListener) -> nix::Result<()> {
    setsockopt(listener, sockopt::KeepAlive, &true)?;
    setsockopt(listener, sockopt::TcpKeepIdle, &60)?;
    setsockopt(listener, sockopt::TcpKeepInterval, &15)?;
    setsockopt(listener, sockopt::TcpKeepCount, &4)
}

async fn serve_listener(
    listener: TcpListener,
    tls: Option<Arc<rustls::ServerConfig>>,
    responder: impl Respond,
    limits: ListenerLimits,
    stop: CancellationToken,
    threads: Option<RouterThreads>,
) {
    if let Err(error) = enable_keepalive(&listener) {
        tracing::warn!(%error, "cannot enable TCP keepalive; vanished clients are not detected");
    }
    let connections = TaskTracker::new();
    let stop = StopSignal::new(stop);
    let permits = Arc::new(Semaphore::new(limits.max_connections));
    let address_limiter =
        AddressLimiter::new(limits.max_connections_per_address, limits.trusted_proxies.clone());
    let acceptor = tls.map(TlsAcceptor::from);
    let (shards, passthrough) = threads.map(|threads| (threads.shards, threads.passthrough)).unzip();
    let passthrough = passthrough.flatten();
    let connection_limits = limits.for_connections();
    let scheme = if acceptor.is_some() { Scheme::Https } else { Scheme::Http };
    loop {
        let permit = tokio::select! {
            () = stop.wait() => break,
            permit = permits.clone().acquire_owned() => permit,
        };
        let Ok(permit) = permit else { break };
        let (stream, peer) = tokio::select! {
            () = stop.wait() => break,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // The usual cause is too many open files: wait for connections to close.
                    tracing::warn!(%error, "cannot accept a connection; retrying");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let Some(address_permit) = address_limiter.admit(peer.ip()) else {
            tracing::debug!(%peer, "connection rejected: too many connections from its address");
            continue;
        };
        // Small responses are sent without delay. An error means a closed socket, which the first read detects.
        let _ = stream.set_nodelay(true);
        let responder = responder.clone();
        let info = ConnectionInfo { peer, scheme };
        let (acceptor, handshake_timeout) = (acceptor.clone(), limits.handshake_timeout);
        let passthrough = passthrough.clone();
        let (stop, tracked) = (stop.clone(), connections.token());
        let serve_stream = move |stream: TcpStream, load: Option<LoadGuard>| async move {
            let _tracked = tracked;
            let permits = ConnectionPermits { _connection: permit, _address: address_permit, _load: load };
            match acceptor {
                None => {
                    serve_connection(stream, permits, responder, info, connection_limits, stop).await;
                }
                Some(acceptor) => {
                    // Boxed, so that a connection does not keep the memory for its handshake.
                    let handshake = Box::pin(tokio::time::timeout(handshake_timeout, async {
                        if let Some(passthrough) = passthrough
                            && let Some(validation) = passthrough.find_validation(&stream).await
                        {
                            passthrough.forward(stream, validation).await;
                            return None;
                        }
                        acceptor.accept(stream).await.ok()
                    }));
                    let mut stream = tokio::select! {
                        () = stop.wait() => return,
                        accepted = handshake => match accepted {
                            Ok(Some(stream)) => stream,
                            _ => return,
                        },
                    };
                    // A validation ends after the handshake (RFC 8737, section 3).
                    if stream.get_ref().1.alpn_protocol() == Some(ACME_ALPN) {
                        let _ = tokio::time::timeout(handshake_timeout, stream.shutdown()).await;
                        return;
                    }
                    serve_connection(stream, permits, responder, info, connection_limits, stop).await;
                }
            }
        };
        match &shards {
            None => drop(tokio::spawn(serve_stream(stream, None))),
            Some(shards) => {
                // Move the socket from this thread's reactor to the shard's.
                let Ok(stream) = stream.into_std() else { continue };
                shards.spawn(|load| async move {
                    if let Ok(stream) = TcpStream::from_std(stream) {
                        serve_stream(stream, Some(load)).await;
                    }
                });
            }
        }
    }
    stop.mark_stopping();
    drop(listener);
    connections.close();
    if tokio::time::timeout(limits.drain_timeout, connections.wait()).await.is_err() {
        tracing::warn!("some requests did not end within the drain timeout");
    }
}

/// Counts a connection against the listener's limits, and on its shard, until it is closed.
struct ConnectionPermits {
    _connection: OwnedSemaphorePermit,
    _address: AddressPermit,
    _load: Option<LoadGuard>,
}

/// Returns a token that is cancelled at the first SIGTERM or SIGINT.
///
/// # Errors
/// If the signal handlers cannot be installed.
pub fn stop_on_signal() -> std::io::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        tokio::select! { _ = term.recv() => {} _ = int.recv() => {} }
        token.cancel();
    });
    Ok(stop)
}

/// Returns the address that a listener is bound to.
///
/// # Errors
/// If the operating system does not report it.
pub fn local_addr(listener: &TcpListener) -> std::io::Result<SocketAddr> {
    listener.local_addr()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::routing::get;
    use hyper_util::rt::TokioIo;
    use tokio::io::AsyncReadExt;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n";
    const UPGRADE: &[u8] =
        b"GET /upgrade HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: test\r\n\r\n";

    async fn start_server(limits: ListenerLimits) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = local_addr(&listener).unwrap();
        let router = Router::new().route("/", get(async || "ok")).route("/upgrade", get(accept_upgrade));
        tokio::spawn(serve(listener, None, router, limits, CancellationToken::new()));
        address
    }

    /// Switches protocols, and keeps the stream until the client closes it.
    async fn accept_upgrade(request: Request<Body>) -> Response {
        tokio::spawn(async move {
            let mut stream = TokioIo::new(hyper::upgrade::on(request).await.unwrap());
            let _ = stream.read_u8().await;
        });
        Response::builder()
            .status(http::StatusCode::SWITCHING_PROTOCOLS)
            .header("connection", "upgrade")
            .header("upgrade", "test")
            .header("shard", format!("{:?}", crate::shards::current()))
            .body(Body::empty())
            .unwrap()
    }

    async fn read_until(stream: &mut TcpStream, end: &str) -> String {
        let mut text = String::new();
        let mut part = [0; 1024];
        while !text.ends_with(end) {
            let read = tokio::time::timeout(TEST_TIMEOUT, stream.read(&mut part))
                .await
                .expect("no response in time");
            match read.unwrap_or(0) {
                0 => break,
                bytes => text.push_str(&String::from_utf8_lossy(&part[..bytes])),
            }
        }
        text
    }

    #[tokio::test]
    async fn slow_head_times_out_and_idle_connection_is_kept() {
        let limits = ListenerLimits { head_timeout: Duration::from_millis(100), ..ListenerLimits::default() };
        let address = start_server(limits).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        let mut reused = TcpStream::connect(address).await.unwrap();
        reused.write_all(REQUEST).await.unwrap();
        assert!(read_until(&mut reused, "ok").await.starts_with("HTTP/1.1 200"));

        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(&REQUEST[..20]).await.unwrap();
        let response = read_until(&mut slow, "never").await;
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 408"), "{response}");

        // The other connections have now been open for longer than the head timeout.
        for stream in [&mut idle, &mut reused] {
            stream.write_all(REQUEST).await.unwrap();
            assert!(read_until(stream, "ok").await.starts_with("HTTP/1.1 200"));
        }

        // The head timeout applies to each request on a connection.
        reused.write_all(&REQUEST[..20]).await.unwrap();
        let response = read_until(&mut reused, "never").await;
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 408"), "{response}");
    }

    #[tokio::test]
    async fn accepted_socket_inherits_keepalive() {
        use nix::sys::socket::getsockopt;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        enable_keepalive(&listener).unwrap();
        let _client = TcpStream::connect(local_addr(&listener).unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(getsockopt(&accepted, sockopt::KeepAlive).unwrap());
        assert_eq!(getsockopt(&accepted, sockopt::TcpKeepIdle), Ok(60));
        assert_eq!(getsockopt(&accepted, sockopt::TcpKeepInterval), Ok(15));
        assert_eq!(getsockopt(&accepted, sockopt::TcpKeepCount), Ok(4));
    }

    #[tokio::test]
    async fn head_above_limit_is_rejected() {
        let address = start_server(ListenerLimits::default()).await;
        for (bytes, status) in [(20_000, "200"), (40_000, "431")] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let head = format!("GET / HTTP/1.1\r\nhost: h\r\nx-long: {}\r\n\r\n", "x".repeat(bytes));
            // The response may arrive before the head has been sent.
            let _ = stream.write_all(head.as_bytes()).await;
            let response = read_until(&mut stream, "ok").await;
            assert_eq!(response.get(9..12), Some(status), "{response}");
        }
    }

    #[tokio::test]
    async fn upgraded_connection_counts_against_limit_until_closed() {
        let limits = ListenerLimits { max_connections: 1, ..ListenerLimits::default() };
        let address = start_server(limits).await;
        let mut upgraded = TcpStream::connect(address).await.unwrap();
        upgraded.write_all(UPGRADE).await.unwrap();
        assert!(read_until(&mut upgraded, "\r\n\r\n").await.starts_with("HTTP/1.1 101"));

        let mut waiting = TcpStream::connect(address).await.unwrap();
        waiting.write_all(REQUEST).await.unwrap();
        let early = tokio::time::timeout(Duration::from_millis(200), waiting.read_u8()).await;
        assert!(early.is_err(), "a second connection was served: {early:?}");
        drop(upgraded);
        assert!(read_until(&mut waiting, "ok").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn upgraded_connections_are_spread_over_the_shards() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = local_addr(&listener).unwrap();
        let router = Router::new().route("/upgrade", get(accept_upgrade));
        let threads = RouterThreads { shards: Shards::start().unwrap(), passthrough: None };
        let limits = ListenerLimits::default();
        tokio::spawn(serve_on(threads, listener, None, router, limits, CancellationToken::new()));
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let (mut open, mut shards) = (Vec::new(), BTreeSet::new());
        for _ in 0..count {
            let mut upgraded = TcpStream::connect(address).await.unwrap();
            upgraded.write_all(UPGRADE).await.unwrap();
            let head = read_until(&mut upgraded, "\r\n\r\n").await;
            let shard = head.lines().find(|line| line.starts_with("shard: ")).map(str::to_owned);
            shards.insert(shard.unwrap_or_else(|| panic!("{head}")));
            open.push(upgraded);
        }
        assert_eq!(shards.len(), count, "{shards:?}");
    }
}

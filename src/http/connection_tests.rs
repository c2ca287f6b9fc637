//! Tests of connections that release their buffers.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::Response;
use http::Request;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::connection::{
    ConnectionInfo, ConnectionLimits, RELEASE_DELAY, Respond, Scheme, StopSignal, serve_connection,
};
use super::connection_state::PollReadable;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n";
const LARGE_REQUEST: &[u8] = b"GET /large HTTP/1.1\r\nhost: h\r\n\r\n";
/// A request whose body the responder does not read. hyper reads the rest of the body once it has written the response,
/// and then waits for the next head although the response has not been flushed.
const LARGE_UNREAD_REQUEST: &[u8] =
    b"POST /large HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n";
/// More than the socket's buffers hold.
const LARGE_BYTES: usize = 16 << 20;
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Enough for a connection to release its buffers, even on a busy machine.
const PAUSE: Duration = RELEASE_DELAY.saturating_mul(5);

#[derive(Clone)]
struct Responder;

impl Respond for Responder {
    async fn respond(&self, request: Request<Body>, _: ConnectionInfo) -> Response {
        let body = if request.uri().path() == "/large" { vec![b'x'; LARGE_BYTES] } else { b"ok".to_vec() };
        Response::new(Body::from(body))
    }
}

/// A stream that counts how often its connection has released its buffers.
struct CountingStream {
    stream: TcpStream,
    releases: Arc<AtomicUsize>,
    is_released: AtomicBool,
}

impl PollReadable for CountingStream {
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.is_released.swap(true, Ordering::Relaxed) {
            self.releases.fetch_add(1, Ordering::Relaxed);
        }
        self.stream.poll_readable(cx)
    }

    fn is_drained(&self) -> bool {
        self.stream.is_drained()
    }
}

impl AsyncRead for CountingStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.is_released.store(false, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for CountingStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

struct ServedConnection {
    client: TcpStream,
    releases: Arc<AtomicUsize>,
    token: CancellationToken,
    stop: StopSignal,
    task: JoinHandle<()>,
}

impl ServedConnection {
    async fn start(idle_timeout: Duration, head_timeout: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, peer): (_, SocketAddr) = listener.accept().await.unwrap();
        let releases = Arc::<AtomicUsize>::default();
        let stream =
            CountingStream { stream, releases: releases.clone(), is_released: AtomicBool::new(false) };
        let token = CancellationToken::new();
        let stop = StopSignal::new(token.clone());
        let info = ConnectionInfo { peer, scheme: Scheme::Http };
        let limits = ConnectionLimits { idle_timeout, head_timeout, max_head_bytes: 32 * 1024 };
        let task = tokio::spawn(serve_connection(stream, (), Responder, info, limits, stop.clone()));
        Self { client, releases, token, stop, task }
    }

    async fn start_with_default_timeouts() -> Self {
        Self::start(Duration::from_secs(30), Duration::from_secs(10)).await
    }

    fn stop(&self) {
        self.token.cancel();
        self.stop.mark_stopping();
    }

    fn releases(&self) -> usize {
        self.releases.load(Ordering::Relaxed)
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.client.write_all(bytes).await.unwrap();
    }

    /// Reads one response with a body of `bytes` bytes.
    async fn read_response(&mut self, bytes: usize) {
        let mut response = Vec::new();
        let mut part = vec![0; 1 << 16];
        let is_complete = |response: &[u8]| {
            response
                .windows(4)
                .position(|end| end == b"\r\n\r\n")
                .is_some_and(|head| response.len() == head + 4 + bytes)
        };
        while response.len() < bytes || !is_complete(&response) {
            let read =
                tokio::time::timeout(TEST_TIMEOUT, self.client.read(&mut part)).await.unwrap().unwrap();
            assert!(read > 0, "the connection ended after {} bytes", response.len());
            response.extend_from_slice(&part[..read]);
        }
        assert!(response.starts_with(b"HTTP/1.1 200"));
    }

    async fn wait_for_end(&mut self) {
        let mut rest = Vec::new();
        let read = tokio::time::timeout(TEST_TIMEOUT, self.client.read_to_end(&mut rest)).await.unwrap();
        assert!(read.is_err() || rest.is_empty(), "{}", String::from_utf8_lossy(&rest));
        tokio::time::timeout(TEST_TIMEOUT, &mut self.task).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn idle_connection_releases_buffers_and_serves_again() {
    let mut connection = ServedConnection::start_with_default_timeouts().await;
    for round in 0..3 {
        tokio::time::sleep(PAUSE).await;
        assert_eq!(connection.releases(), round + 1);
        connection.send(REQUEST).await;
        connection.read_response(2).await;
    }
    drop(connection.client);
    tokio::time::timeout(TEST_TIMEOUT, connection.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn start_of_pipelined_head_survives_release() {
    let mut connection = ServedConnection::start_with_default_timeouts().await;
    let (start, rest) = REQUEST.split_at(10);
    connection.send(&[REQUEST, start].concat()).await;
    connection.read_response(2).await;
    tokio::time::sleep(PAUSE).await;
    connection.send(rest).await;
    connection.read_response(2).await;
}

#[tokio::test]
async fn head_times_out_after_release() {
    let mut connection = ServedConnection::start(Duration::from_secs(30), Duration::from_millis(100)).await;
    connection.send(REQUEST).await;
    connection.read_response(2).await;
    tokio::time::sleep(PAUSE).await;
    assert_eq!(connection.releases(), 1);
    connection.send(&REQUEST[..10]).await;
    connection.wait_for_end().await;

    let mut pipelined = ServedConnection::start(Duration::from_secs(30), Duration::from_millis(100)).await;
    pipelined.send(&[REQUEST, &REQUEST[..10]].concat()).await;
    pipelined.read_response(2).await;
    pipelined.wait_for_end().await;
}

#[tokio::test]
async fn idle_timeout_includes_released_time() {
    let idle_timeout = PAUSE * 2;
    let mut connection = ServedConnection::start(idle_timeout, Duration::from_secs(10)).await;
    connection.send(REQUEST).await;
    connection.read_response(2).await;
    let start = Instant::now();
    connection.wait_for_end().await;
    assert!(start.elapsed() >= idle_timeout - Duration::from_millis(5), "{:?}", start.elapsed());
    assert_eq!(connection.releases(), 1);
}

#[tokio::test]
async fn slow_reader_receives_whole_response() {
    for request in [LARGE_REQUEST, LARGE_UNREAD_REQUEST] {
        let mut connection = ServedConnection::start_with_default_timeouts().await;
        connection.send(request).await;
        tokio::time::sleep(PAUSE).await;
        assert_eq!(connection.releases(), 0, "{}", String::from_utf8_lossy(request));
        connection.read_response(LARGE_BYTES).await;
        connection.send(REQUEST).await;
        connection.read_response(2).await;
    }
}

#[tokio::test]
async fn stop_ends_released_connection() {
    let mut connection = ServedConnection::start_with_default_timeouts().await;
    connection.send(REQUEST).await;
    connection.read_response(2).await;
    tokio::time::sleep(PAUSE).await;
    connection.stop();
    connection.wait_for_end().await;
}

#[tokio::test]
async fn stop_ends_connection_after_current_request() {
    let mut connection = ServedConnection::start_with_default_timeouts().await;
    connection.send(LARGE_REQUEST).await;
    tokio::time::sleep(PAUSE).await;
    connection.stop();
    connection.read_response(LARGE_BYTES).await;
    connection.wait_for_end().await;
}

/// A listener cancels the token first, and marks its connections as stopping a moment later.
#[tokio::test]
async fn stop_serves_request_with_partial_head() {
    for is_only_cancelled in [false, true] {
        let mut connection = ServedConnection::start_with_default_timeouts().await;
        let (start, rest) = REQUEST.split_at(10);
        connection.send(start).await;
        tokio::time::sleep(PAUSE).await;
        if is_only_cancelled {
            connection.token.cancel();
        } else {
            connection.stop.mark_stopping();
        }
        tokio::time::sleep(PAUSE).await;
        connection.send(rest).await;
        connection.read_response(2).await;
        connection.wait_for_end().await;
    }
}

#[tokio::test]
async fn stop_flushes_response_before_partial_head() {
    let mut connection = ServedConnection::start_with_default_timeouts().await;
    connection.send(LARGE_UNREAD_REQUEST).await;
    tokio::time::sleep(PAUSE).await;
    connection.send(&REQUEST[..10]).await;
    tokio::time::sleep(PAUSE).await;
    connection.stop();
    tokio::time::sleep(PAUSE).await;
    connection.read_response(LARGE_BYTES).await;
    connection.wait_for_end().await;
}

#[tokio::test]
async fn unflushed_response_has_no_head_timeout() {
    let mut connection =
        ServedConnection::start(Duration::from_millis(100), Duration::from_millis(100)).await;
    connection.send(LARGE_UNREAD_REQUEST).await;
    tokio::time::sleep(PAUSE).await;
    connection.read_response(LARGE_BYTES).await;
    connection.wait_for_end().await;
}

#[tokio::test]
async fn line_break_after_a_request_does_not_start_a_head() {
    for in_own_packet in [false, true] {
        let mut connection =
            ServedConnection::start(Duration::from_secs(30), Duration::from_millis(100)).await;
        if in_own_packet {
            connection.send(REQUEST).await;
            connection.read_response(2).await;
            connection.send(b"\r\n").await;
        } else {
            connection.send(&[REQUEST, b"\r\n"].concat()).await;
            connection.read_response(2).await;
        }
        // Longer than the head timeout.
        tokio::time::sleep(PAUSE).await;
        assert_eq!(connection.releases(), 1, "{in_own_packet}");
        connection.send(REQUEST).await;
        connection.read_response(2).await;
    }
}

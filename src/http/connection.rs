//! Serves one HTTP/1.1 connection.
//!
//! hyper keeps 16 KiB of buffers and 3 KiB of state for each connection, even while it is idle. A connection that has
//! been idle for a moment is therefore taken apart, and hyper serves it again when its socket becomes readable.
//! Meanwhile, the connection keeps only its TLS session and its deadlines.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::Request;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1::{self, UpgradeableConnection};
use hyper::service::{HttpService, service_fn};
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt;
use tokio_util::sync::CancellationToken;

use super::connection_state::{
    HeadTimeouts, LINE_BREAKS, ObservedStream, PollReadable, TimerEvent, WaitObserver,
};
use svc_base::error_chain::format_chain;

/// Idle time after which a connection releases its buffers. It is shorter than a person's pauses between pages, and
/// longer than the pauses within one.
pub(super) const RELEASE_DELAY: Duration = Duration::from_millis(50);
/// Timeout for sending the TLS alert `close_notify`.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Responds to a listener's requests.
pub trait Respond: Clone + Send + Sync + Unpin + 'static {
    fn respond(
        &self,
        request: Request<Body>,
        connection: ConnectionInfo,
    ) -> impl Future<Output = Response> + Send;
}

/// The scheme of the client's requests to this listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Scheme {
    Http,
    Https,
}

impl Scheme {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Limits for one connection; see `ListenerLimits`.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionLimits {
    pub idle_timeout: Duration,
    pub head_timeout: Duration,
    pub max_head_bytes: usize,
}

/// A connection's properties.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionInfo {
    pub peer: SocketAddr,
    pub scheme: Scheme,
}

/// Notifies the connections of a listener that the listener stops.
#[derive(Debug, Clone)]
pub(super) struct StopSignal {
    /// Wakes connections that are taken apart.
    token: CancellationToken,
    /// Checked by the others whenever they are polled. A token would cost each poll two locks that all connections
    /// share.
    is_stopping: Arc<AtomicBool>,
}

impl StopSignal {
    pub fn new(token: CancellationToken) -> Self {
        Self { token, is_stopping: Arc::default() }
    }

    /// Makes active connections close after their current request. The token must have been cancelled before.
    pub fn mark_stopping(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    pub async fn wait(&self) {
        self.token.cancelled().await;
    }
}

enum Outcome {
    Ended(hyper::Result<()>),
    Event(TimerEvent),
}

/// Serves a connection to its end or, once `stop` has been sent, to the end of the current request. This is not an
/// `async fn`, which would store the stream and its wrappers twice. It is separate from the handshake, so that an idle
/// connection does not keep the handshake's memory.
pub(super) fn serve_connection<S, P, R>(
    stream: S,
    permits: P,
    responder: R,
    info: ConnectionInfo,
    limits: ConnectionLimits,
    stop: StopSignal,
) -> impl Future<Output = ()> + use<S, P, R>
where
    S: PollReadable,
    P: Unpin + Send + 'static,
    R: Respond,
{
    let timeouts =
        HeadTimeouts { idle: limits.idle_timeout, head: limits.head_timeout, release: RELEASE_DELAY };
    let (stream, state) = ObservedStream::new(stream, permits);
    // Boxed, because hyper's state and this future would otherwise each reserve space for the whole stream.
    let stream = Box::new(stream);
    let mut builder = http1::Builder::new();
    builder
        .timer(WaitObserver(state.clone()))
        .header_read_timeout(limits.idle_timeout)
        .max_header_size(limits.max_head_bytes);
    let service_state = state.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        service_state.start_request();
        let into_body = |body: Incoming| if body.is_end_stream() { Body::empty() } else { Body::new(body) };
        let request = request.map(into_body);
        let responder = responder.clone();
        // Boxed, because an idle connection would otherwise keep the memory for a request's future.
        Box::pin(async move { Ok::<_, Infallible>(responder.respond(request, info).await) })
    });
    let mut connection = Box::pin(builder.serve_connection(TokioIo::new(stream), service).with_upgrades());
    async move {
        let mut timer = pin!(tokio::time::sleep_until(state.idle_deadline(timeouts)));
        loop {
            let outcome = {
                let mut stopped = pin!(stop.wait());
                let mut is_shutting_down = false;
                poll_fn(|cx| {
                    // A second call would end a request whose response has been sent.
                    if stop.is_stopping.load(Ordering::Relaxed) && !is_shutting_down {
                        is_shutting_down = true;
                        connection.as_mut().graceful_shutdown();
                    }
                    if let Poll::Ready(result) = connection.as_mut().poll(cx) {
                        return Poll::Ready(Outcome::Ended(result));
                    }
                    // The rest of the head may be slow, so the connection is woken. Its previous response may not have
                    // been flushed yet, and the head of a first request is still served, so hyper decides when it ends.
                    if !is_shutting_down && state.has_partial_head() && stopped.as_mut().poll(cx).is_ready() {
                        is_shutting_down = true;
                        connection.as_mut().graceful_shutdown();
                        if let Poll::Ready(result) = connection.as_mut().poll(cx) {
                            return Poll::Ready(Outcome::Ended(result));
                        }
                    }
                    state.poll_event(timeouts, timer.as_mut(), cx).map(Outcome::Event)
                })
                .await
            };
            match outcome {
                Outcome::Ended(Ok(())) => return,
                Outcome::Ended(Err(error)) => {
                    tracing::debug!(error = %format_chain(&error), "connection ended");
                    return;
                }
                Outcome::Event(TimerEvent::TimedOut) => {
                    tracing::debug!("connection ended: timed out while waiting for a request");
                    return;
                }
                Outcome::Event(TimerEvent::ReleaseBuffers) => {}
            }
            let Some((stream, service)) = take_apart(connection) else { return };
            if state.is_idle() {
                timer.as_mut().reset(state.idle_deadline(timeouts));
                let is_readable = tokio::select! {
                    () = poll_fn(|cx| stream.poll_readable(cx)) => true,
                    () = stop.wait() => false,
                    () = timer.as_mut() => false,
                };
                if !is_readable {
                    close(stream).await;
                    return;
                }
            }
            state.resume();
            connection = Box::pin(builder.serve_connection(TokioIo::new(stream), service).with_upgrades());
        }
    }
}

type BoxedStream<S, P> = Box<ObservedStream<S, P>>;
type HyperConnection<S, P, H> = UpgradeableConnection<TokioIo<BoxedStream<S, P>>, H>;

/// Takes a connection from hyper, without its buffers. Bytes that hyper has read of the next head are put back.
fn take_apart<S, P, H>(connection: Pin<Box<HyperConnection<S, P, H>>>) -> Option<(BoxedStream<S, P>, H)>
where
    S: PollReadable,
    P: Unpin + Send + 'static,
    H: HttpService<Incoming, ResBody = Body, Error = Infallible> + Unpin,
{
    let parts = Pin::into_inner(connection).into_parts()?;
    let mut stream = parts.io.into_inner();
    if let Some(start) = parts.read_buf.iter().position(|byte| !LINE_BREAKS.contains(byte)) {
        stream.prepend(&parts.read_buf[start..]);
    }
    Some((stream, parts.service))
}

/// Shuts down a stream; over TLS, this sends `close_notify`.
async fn close<S: PollReadable, P: Unpin>(mut stream: BoxedStream<S, P>) {
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, stream.shutdown()).await;
}

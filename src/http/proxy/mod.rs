//! The reverse proxy for the router and the gateway: one [`Proxy`] per upstream, HTTP/1.1 with keep-alive, tunneled
//! upgrades, and streamed bodies that are never buffered whole.
//!
//! A request and its upstream connection run in one task, without switching threads: the task drives the connection
//! while it waits for the response head and while the body is being read. A separate task drives the connection of an
//! upgrade, and of a response that begins before its request has been sent completely. Authorization and additional
//! headers are up to the caller. Invariant: no hop-by-hop header is forwarded in either direction, except those of a
//! tunneled upgrade.

mod body;
mod headers;
mod pool;
mod stall;
mod time_limit;
mod tunnel;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use axum::body::Body;
use http::{Method, Request, Response, StatusCode, Uri, Version, request};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep};

use body::{RequestBody, ResponseBody, Upload};
pub use headers::strip_hop_by_hop;
use pool::{ClientConnection, Pool, UpstreamConnection};
pub use stall::end_stalled_body;
use svc_base::error_chain::format_chain;
pub use time_limit::TimeLimit;

/// A connected byte stream to the upstream.
pub trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

/// Opens a connection to the upstream. Checks such as TLS verification are complete when `dial` returns.
#[async_trait]
pub trait Dial: Send + Sync + 'static {
    async fn dial(&self) -> std::io::Result<Box<dyn Io>>;
}

/// Limits for one upstream.
#[derive(Debug, Clone, Copy)]
pub struct ProxyLimits {
    /// Maximum number of open connections, including idle and upgraded ones.
    pub max_connections: usize,
    pub max_idle_connections: usize,
    /// Must be shorter than the upstream's idle timeout, so that the upstream seldom closes a connection that is about
    /// to be reused.
    pub idle_timeout: Duration,
    pub connect_timeout: Duration,
    /// Timeout for the response head. It restarts as long as the request body makes progress.
    pub head_timeout: Duration,
}

impl Default for ProxyLimits {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            max_idle_connections: 128,
            idle_timeout: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(5),
            head_timeout: Duration::from_secs(300),
        }
    }
}

/// The reason [`Proxy::forward`] returns no response.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error("cannot connect to the upstream")]
    Connect(#[source] std::io::Error),
    #[error("the upstream did not accept a connection in time")]
    ConnectTimeout,
    #[error("the exchange with the upstream failed")]
    Exchange(#[source] hyper::Error),
    #[error("the upstream did not respond in time")]
    HeadTimeout,
    #[error("the connection limit for the upstream has been reached")]
    Full,
    #[error("the upstream switched protocols without a request")]
    UnrequestedUpgrade,
    #[error("the method CONNECT is not supported")]
    ConnectMethod,
    #[error("the proxy to this upstream is closed")]
    Closed,
}

impl ProxyError {
    /// Returns the metric label.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::ConnectTimeout => "connect_timeout",
            Self::Exchange(_) => "exchange",
            Self::HeadTimeout => "head_timeout",
            Self::Full => "full",
            Self::UnrequestedUpgrade => "unasked_upgrade",
            Self::ConnectMethod => "tunnel",
            Self::Closed => "closed",
        }
    }
}

/// A reverse proxy to one upstream.
pub struct Proxy {
    pool: Arc<Pool>,
}

impl Proxy {
    pub fn new(dial: impl Dial, limits: ProxyLimits) -> Self {
        Self { pool: Arc::new(Pool::new(Box::new(dial), limits)) }
    }

    /// Forwards a request, and returns the response as soon as its head has been received.
    ///
    /// # Errors
    /// [`ProxyError`] if the request is not supported or cannot be sent, or if no valid response head arrives in time.
    pub async fn forward(&self, mut request: Request<Body>) -> Result<Response<Body>, ProxyError> {
        if request.method() == Method::CONNECT {
            return Err(ProxyError::ConnectMethod);
        }
        let is_upgrade = strip_hop_by_hop(request.headers_mut());
        let client = is_upgrade.then(|| hyper::upgrade::on(&mut request));
        let (mut parts, body) = request.into_parts();
        let time_limit = if is_upgrade { parts.extensions.remove() } else { None };
        convert_to_origin_form(&mut parts.uri);
        parts.version = Version::HTTP_11;
        let (body, upload) = RequestBody::new(body);
        // Only an idempotent request without a body is copied for a retry on a new connection.
        let is_replayable = upload.is_none() && parts.method.is_idempotent();
        let request = Request::from_parts(parts, body);
        let exchange = Exchange { pool: &self.pool, upload, client, time_limit };
        // The futures for a new connection and for a retry are boxed, because most requests need neither.
        let Some(upstream) = self.pool.reuse() else {
            return Box::pin(exchange.run_on_new_connection(request)).await;
        };
        let copy = is_replayable.then(|| copy_request(&request));
        let failed = match exchange.run(upstream, request).await {
            Ok(response) => return Ok(response),
            Err(failed) => failed,
        };
        match (failed.retry, failed.unsent.or(copy)) {
            (Some(exchange), Some(request)) => Box::pin(exchange.run_on_new_connection(request)).await,
            _ => Err(failed.error),
        }
    }

    /// Closes all connections: idle, upgraded, and in use by requests in flight. Later requests fail with
    /// [`ProxyError::Closed`].
    pub fn close(&self) {
        self.pool.close();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // After drop, the open connections could no longer be closed.
        self.pool.close();
    }
}

/// The state of one request, without its connection and message.
struct Exchange<'a> {
    pool: &'a Arc<Pool>,
    upload: Option<Arc<Upload>>,
    /// The client's side of the requested upgrade.
    client: Option<hyper::upgrade::OnUpgrade>,
    /// The time limit for the upgraded connection, if any.
    time_limit: Option<TimeLimit>,
}

struct FailedExchange<'a> {
    error: ProxyError,
    /// The request, if no byte of it was sent.
    unsent: Option<Request<RequestBody>>,
    /// `Some` if the connection ended before a complete response head was received.
    retry: Option<Exchange<'a>>,
}

impl<'a> Exchange<'a> {
    /// Sends the request on a new connection, without a retry.
    async fn run_on_new_connection(
        self,
        request: Request<RequestBody>,
    ) -> Result<Response<Body>, ProxyError> {
        let upstream = self.pool.connect().await?;
        self.run(upstream, request).await.map_err(|failed| failed.error)
    }

    async fn run(
        self,
        upstream: Box<UpstreamConnection>,
        request: Request<RequestBody>,
    ) -> Result<Response<Body>, Box<FailedExchange<'a>>> {
        if self.client.is_some() {
            Box::pin(self.run_upgrade(upstream, request)).await
        } else {
            self.run_plain(upstream, request).await
        }
    }

    async fn run_plain(
        self,
        mut upstream: Box<UpstreamConnection>,
        request: Request<RequestBody>,
    ) -> Result<Response<Body>, Box<FailedExchange<'a>>> {
        let UpstreamConnection { sender, connection, timer, .. } = &mut *upstream;
        let response = sender.try_send_request(request);
        let response = self.receive_head(response, Some(connection), timer.as_mut()).await;
        let (parts, body) = match response {
            Ok(response) => response.into_parts(),
            Err(error) => return Err(self.into_failed(error)),
        };
        if parts.status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(self.into_failed((ProxyError::UnrequestedUpgrade, None)));
        }
        let body = if self.upload.as_ref().is_some_and(|upload| !upload.is_done()) {
            // The response began before the request was sent completely, so a separate task drives the connection.
            ResponseBody::with_detached_connection(body, Arc::clone(self.pool), upstream)
        } else {
            ResponseBody::with_connection(body, Arc::clone(self.pool), upstream)
        };
        Ok(to_response(parts, body))
    }

    async fn run_upgrade(
        mut self,
        upstream: Box<UpstreamConnection>,
        request: Request<RequestBody>,
    ) -> Result<Response<Body>, Box<FailedExchange<'a>>> {
        let UpstreamConnection { mut sender, connection, mut timer, permit } = *upstream;
        let closed = self.pool.closed.clone();
        tokio::spawn(async move {
            let _permit = permit;
            tokio::select! {
                () = closed.cancelled() => {}
                result = connection.with_upgrades() => if let Err(error) = result {
                    tracing::debug!(error = %format_chain(&error), "upstream connection ended");
                }
            }
        });
        let response = sender.try_send_request(request);
        let mut response = match self.receive_head(response, None, timer.as_mut()).await {
            Ok(response) => response,
            Err(error) => return Err(self.into_failed(error)),
        };
        match self.client.take() {
            Some(client) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                tunnel::open(
                    client,
                    hyper::upgrade::on(&mut response),
                    self.pool.closed.clone(),
                    self.time_limit,
                );
                let (parts, _) = response.into_parts();
                Ok(to_response(parts, Body::empty()))
            }
            _ => {
                let (parts, body) = response.into_parts();
                Ok(to_response(parts, ResponseBody::without_connection(body, Arc::clone(self.pool))))
            }
        }
    }

    /// Waits for the response head, and drives the connection unless it is driven elsewhere. An error includes the
    /// request if no byte of it was sent.
    async fn receive_head(
        &self,
        response: impl Future<
            Output = Result<Response<Incoming>, hyper::client::conn::TrySendError<Request<RequestBody>>>,
        >,
        mut connection: Option<&mut ClientConnection>,
        mut timer: Pin<&mut Sleep>,
    ) -> Result<Response<Incoming>, (ProxyError, Option<Request<RequestBody>>)> {
        let mut response = pin!(response);
        let mut deadline = Instant::now() + self.pool.limits.head_timeout;
        if timer.is_elapsed() || timer.deadline() > deadline {
            timer.as_mut().reset(deadline);
        }
        let mut closed = pin!(self.pool.closed.cancelled());
        let mut sent_frames = 0;
        poll_fn(|cx| {
            if let Some(driven) = &mut connection
                && Pin::new(driven).poll(cx).is_ready()
            {
                // The response future returns the connection's error, if any.
                connection = None;
            }
            if let Poll::Ready(result) = response.as_mut().poll(cx) {
                return Poll::Ready(result.map_err(|mut failed| {
                    let unsent = failed.take_message();
                    (ProxyError::Exchange(failed.into_error()), unsent)
                }));
            }
            if closed.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err((ProxyError::Closed, None)));
            }
            while timer.as_mut().poll(cx).is_ready() {
                if timer.deadline() >= deadline {
                    let frames = self.upload.as_ref().map_or(0, |upload| upload.sent_frames());
                    if frames == sent_frames {
                        return Poll::Ready(Err((ProxyError::HeadTimeout, None)));
                    }
                    sent_frames = frames;
                    deadline = Instant::now() + self.pool.limits.head_timeout;
                }
                timer.as_mut().reset(deadline);
            }
            Poll::Pending
        })
        .await
    }

    fn into_failed(
        self,
        (error, unsent): (ProxyError, Option<Request<RequestBody>>),
    ) -> Box<FailedExchange<'a>> {
        let has_connection_ended = matches!(&error, ProxyError::Exchange(error)
            if error.is_canceled() || error.is_closed() || error.is_incomplete_message() || is_io_error(error));
        Box::new(FailedExchange { retry: has_connection_ended.then_some(self), error, unsent })
    }
}

/// Returns whether the transport failed.
fn is_io_error(error: &hyper::Error) -> bool {
    std::error::Error::source(error).is_some_and(<dyn std::error::Error>::is::<std::io::Error>)
}

fn to_response(mut parts: http::response::Parts, body: impl Into<Body>) -> Response<Body> {
    let has_upgrade = strip_hop_by_hop(&mut parts.headers);
    if has_upgrade && parts.status != StatusCode::SWITCHING_PROTOCOLS {
        parts.headers.remove(http::header::UPGRADE);
        parts.headers.remove(http::header::CONNECTION);
    }
    // The version is the one on our connection to the client; extensions belong to the upstream connection.
    parts.version = Version::HTTP_11;
    parts.extensions.clear();
    Response::from_parts(parts, body.into())
}

/// Copies a request, whose body must be empty.
fn copy_request(request: &Request<RequestBody>) -> Request<RequestBody> {
    let (mut parts, ()) = Request::new(()).into_parts();
    let request::Parts { method, uri, version, headers, .. } = &mut parts;
    request.method().clone_into(method);
    request.uri().clone_into(uri);
    *version = request.version();
    request.headers().clone_into(headers);
    Request::from_parts(parts, RequestBody::empty())
}

/// Converts a URI to origin form: only the path and query (RFC 9112, section 3.2.1).
fn convert_to_origin_form(uri: &mut Uri) {
    if uri.authority().is_none() {
        return;
    }
    let path = uri.path_and_query().cloned().unwrap_or_else(|| http::uri::PathAndQuery::from_static("/"));
    *uri = Uri::from(path);
}

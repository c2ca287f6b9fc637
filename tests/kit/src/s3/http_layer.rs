//! The HTTP layer in front of the S3 service: serves connections, logs requests, and applies faults.

use std::future::ready;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, BodyStream, Full, StreamBody};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::rt::TokioIo;
use s3s::service::S3Service;
use s3s::{HttpError, StdError};
use tokio::net::TcpStream;

use super::fault::{Fault, Faults};
use super::service::StaleRead;
use super::upstream::Upstream;

const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
const LOG_CAPACITY: usize = 100_000;

type Body = UnsyncBoxBody<Bytes, StdError>;

/// A request in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    pub method: String,
    /// `/bucket/key` as in the URL.
    pub path: String,
    pub query: String,
    /// The response status; `None` if the connection was cut.
    pub status: Option<u16>,
}

/// The service that executes the requests.
pub(super) enum Backend {
    Kit(S3Service),
    Upstream(Arc<Upstream>),
}

pub(super) struct HttpLayer {
    pub(super) backend: Backend,
    pub(super) faults: Faults,
    pub(super) log: Mutex<Vec<RequestRecord>>,
}

impl HttpLayer {
    pub(super) async fn serve(self: Arc<Self>, stream: TcpStream) {
        let service = hyper::service::service_fn(|request| self.handle(request));
        // A connection's errors affect only its client.
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await.ok();
    }

    async fn handle(&self, request: Request<Incoming>) -> Result<Response<Body>, HttpError> {
        let (method, uri) = (request.method().as_str().to_owned(), request.uri().clone());
        let (delay, fault) = self.faults.take_faults(&method, &uri);
        tokio::time::sleep(delay).await;
        let result = self.handle_with(request, fault).await;
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.len() < LOG_CAPACITY {
            log.push(RequestRecord {
                method,
                path: uri.path().to_owned(),
                query: uri.query().unwrap_or_default().to_owned(),
                status: result.as_ref().ok().map(|response| response.status().as_u16()),
            });
        }
        result
    }

    /// Handles a request with the given fault. An `Err` cuts the connection.
    async fn handle_with(
        &self,
        mut request: Request<Incoming>,
        fault: Option<Fault>,
    ) -> Result<Response<Body>, HttpError> {
        match fault {
            Some(Fault::Disconnect) => return Err(connection_cut("the request was dropped")),
            Some(Fault::Status(status)) => {
                return drain_and_refuse(request, status, error_code(status)).await;
            }
            Some(Fault::Code(status, code)) => return drain_and_refuse(request, status, code).await,
            Some(Fault::StaleRead) => {
                request.extensions_mut().insert(StaleRead);
            }
            _ => {}
        }
        let (parts, body) = request.into_parts();
        let body = SharedBody(Arc::new(Mutex::new(body)));
        let rest = BodyStream::new(body.clone());
        let request = Request::from_parts(parts, s3s::Body::http_body(body));
        let response = match &self.backend {
            Backend::Kit(service) => service.call(request).await?,
            Backend::Upstream(upstream) => upstream.forward(request).await?,
        };
        if response.status().is_client_error() {
            // Closing a connection with unread data can lose the response.
            let drained = rest.take_while(|frame| ready(frame.is_ok())).for_each(|_| ready(()));
            tokio::time::timeout(DRAIN_TIMEOUT, drained).await.ok();
        }
        match fault {
            Some(Fault::LostReply) => Err(connection_cut("the reply was lost")),
            Some(Fault::StatusAfterCommit(status)) => error_response(status, error_code(status)),
            Some(Fault::WrongEtag) => Ok(replace_etag(response.map(BodyExt::boxed_unsync))),
            Some(Fault::TruncateBody(after)) => Ok(response.map(|body| truncate(body, after))),
            Some(Fault::CorruptBody) => {
                let length = response.headers().get(http::header::CONTENT_LENGTH);
                let length = length.and_then(|l| l.to_str().ok()?.parse().ok()).unwrap_or(0u64);
                Ok(response.map(|body| corrupt(body, length / 2)))
            }
            _ => Ok(response.map(BodyExt::boxed_unsync)),
        }
    }
}

/// A request body that can be drained after the service has stopped reading it.
#[derive(Clone)]
struct SharedBody(Arc<Mutex<Incoming>>);

impl hyper::body::Body for SharedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).size_hint()
    }
}

/// Reads the request and returns an error without executing it, like an overloaded store.
async fn drain_and_refuse(
    request: Request<Incoming>,
    status: u16,
    code: &'static str,
) -> Result<Response<Body>, HttpError> {
    let mut body = BodyStream::new(request.into_body());
    while body.next().await.is_some_and(|frame| frame.is_ok()) {}
    error_response(status, code)
}

fn error_code(status: u16) -> &'static str {
    match status {
        403 => "AccessDenied",
        429 | 503 => "SlowDown",
        _ => "InternalError",
    }
}

/// Replaces the ETag. The new one has the format of a real ETag, so that only its value differs.
fn replace_etag(mut response: Response<Body>) -> Response<Body> {
    let etag = http::HeaderValue::from_static("\"00000000000000000000000000000000\"");
    if let Some(value) = response.headers_mut().get_mut(http::header::ETAG) {
        *value = etag;
    }
    response
}

fn error_response(status: u16, code: &'static str) -> Result<Response<Body>, HttpError> {
    let xml = format!(
        "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>an injected fault</Message></Error>"
    );
    let body = Full::new(Bytes::from(xml)).map_err(|never| match never {}).boxed_unsync();
    Response::builder()
        .status(status)
        .header("content-type", "application/xml")
        .body(body)
        .map_err(|e| HttpError::new(e.into()))
}

fn connection_cut(reason: &'static str) -> HttpError {
    HttpError::new(reason.into())
}

fn truncate(body: s3s::Body, after: u64) -> Body {
    let mut remaining = after;
    let data = body.into_data_stream().map(move |chunk| {
        let mut chunk = chunk?;
        if remaining == 0 && !chunk.is_empty() {
            return Err("the body was truncated".into());
        }
        chunk.truncate(usize::try_from(remaining).unwrap_or(usize::MAX));
        remaining -= chunk.len() as u64;
        Ok(Frame::data(chunk))
    });
    // If the limit lies in the last chunk or beyond it, no further chunk triggers the error above.
    let truncation_error = stream::once(std::future::ready(Err("the body was truncated".into())));
    StreamBody::new(data.chain(truncation_error)).boxed_unsync()
}

fn corrupt(body: s3s::Body, offset: u64) -> Body {
    let mut position = 0;
    let data = body.into_data_stream().map(move |chunk| {
        let chunk = chunk?;
        let index = usize::try_from(offset - offset.min(position))
            .ok()
            .filter(|index| position <= offset && *index < chunk.len());
        position += chunk.len() as u64;
        let Some(index) = index else {
            return Ok(Frame::data(chunk));
        };
        let mut bytes = chunk.to_vec();
        bytes[index] ^= 0x01;
        Ok(Frame::data(Bytes::from(bytes)))
    });
    StreamBody::new(data).boxed_unsync()
}

//! HTTP before the S3 service: serves connections, keeps a log of requests, and lets faults happen.

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

const DISCARD_DEADLINE: Duration = Duration::from_secs(5);
const LOG_LENGTH: usize = 100_000;

type Body = UnsyncBoxBody<Bytes, StdError>;

/// One request as the server saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub method: String,
    /// `/bucket/key` as it stands in the URL.
    pub path: String,
    pub query: String,
    /// The status it was answered with; none where a fault cut the connection.
    pub status: Option<u16>,
}

pub(super) struct Wire {
    pub(super) service: S3Service,
    pub(super) faults: Faults,
    pub(super) log: Mutex<Vec<Seen>>,
}

impl Wire {
    pub(super) async fn serve(self: Arc<Self>, stream: TcpStream) {
        let service = hyper::service::service_fn(|request| self.answer(request));
        // How a connection ends is the client's affair.
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await.ok();
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>, HttpError> {
        let (method, uri) = (request.method().as_str().to_owned(), request.uri().clone());
        let (delay, fault) = self.faults.of(&method, &uri);
        tokio::time::sleep(delay).await;
        let result = self.answer_with(request, fault).await;
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.len() < LOG_LENGTH {
            log.push(Seen {
                method,
                path: uri.path().to_owned(),
                query: uri.query().unwrap_or_default().to_owned(),
                status: result.as_ref().ok().map(|response| response.status().as_u16()),
            });
        }
        result
    }

    /// An `Err` cuts the connection.
    async fn answer_with(
        &self,
        mut request: Request<Incoming>,
        fault: Option<Fault>,
    ) -> Result<Response<Body>, HttpError> {
        match fault {
            Some(Fault::Refuse) => return Err(cut("refused")),
            Some(Fault::Status(status)) => return refusal(request, status, code_of(status)).await,
            Some(Fault::Code(status, code)) => return refusal(request, status, code).await,
            Some(Fault::StaleRead) => {
                request.extensions_mut().insert(StaleRead);
            }
            _ => {}
        }
        let (parts, body) = request.into_parts();
        let body = Lent(Arc::new(Mutex::new(body)));
        let rest = BodyStream::new(body.clone());
        let request = Request::from_parts(parts, s3s::Body::http_body(body));
        let response = self.service.call(request).await?;
        if response.status().is_client_error() {
            // A connection that is closed on unread bytes can lose the answer.
            let discarded = rest.take_while(|frame| ready(frame.is_ok())).for_each(|_| ready(()));
            tokio::time::timeout(DISCARD_DEADLINE, discarded).await.ok();
        }
        match fault {
            Some(Fault::LostReply) => Err(cut("the reply was lost")),
            Some(Fault::StatusAfterCommit(status)) => trouble(status, code_of(status)),
            Some(Fault::WrongEtag) => Ok(with_other_etag(response.map(BodyExt::boxed_unsync))),
            Some(Fault::TruncateBody(after)) => Ok(response.map(|body| truncated(body, after))),
            Some(Fault::CorruptBody) => {
                let length = response.headers().get(http::header::CONTENT_LENGTH);
                let length = length.and_then(|l| l.to_str().ok()?.parse().ok()).unwrap_or(0u64);
                Ok(response.map(|body| corrupted(body, length / 2)))
            }
            _ => Ok(response.map(BodyExt::boxed_unsync)),
        }
    }
}

/// A request's body that can be read to its end by us where the service did not.
#[derive(Clone)]
struct Lent(Arc<Mutex<Incoming>>);

impl hyper::body::Body for Lent {
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

/// As a store in trouble answers: it has read the request, and has not done it.
async fn refusal(
    request: Request<Incoming>,
    status: u16,
    code: &'static str,
) -> Result<Response<Body>, HttpError> {
    let mut body = BodyStream::new(request.into_body());
    while body.next().await.is_some_and(|frame| frame.is_ok()) {}
    trouble(status, code)
}

fn code_of(status: u16) -> &'static str {
    match status {
        403 => "AccessDenied",
        429 | 503 => "SlowDown",
        _ => "InternalError",
    }
}

/// Its form is that of a good one: nothing but the content would tell.
fn with_other_etag(mut response: Response<Body>) -> Response<Body> {
    let etag = http::HeaderValue::from_static("\"00000000000000000000000000000000\"");
    if let Some(there) = response.headers_mut().get_mut(http::header::ETAG) {
        *there = etag;
    }
    response
}

fn trouble(status: u16, code: &'static str) -> Result<Response<Body>, HttpError> {
    let xml = format!(
        "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>a fault of the test's</Message></Error>"
    );
    let body = Full::new(Bytes::from(xml)).map_err(|never| match never {}).boxed_unsync();
    Response::builder()
        .status(status)
        .header("content-type", "application/xml")
        .body(body)
        .map_err(|e| HttpError::new(e.into()))
}

fn cut(why: &'static str) -> HttpError {
    HttpError::new(why.into())
}

fn truncated(body: s3s::Body, after: u64) -> Body {
    let mut left = after;
    let data = body.into_data_stream().map(move |chunk| {
        let mut chunk = chunk?;
        if left == 0 && !chunk.is_empty() {
            return Err("the body broke off".into());
        }
        chunk.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        left -= chunk.len() as u64;
        Ok(Frame::data(chunk))
    });
    // Also where the body was shorter, or the limit fell on a chunk's end.
    let broken_off = stream::once(std::future::ready(Err("the body broke off".into())));
    StreamBody::new(data.chain(broken_off)).boxed_unsync()
}

fn corrupted(body: s3s::Body, at: u64) -> Body {
    let mut position = 0;
    let data = body.into_data_stream().map(move |chunk| {
        let chunk = chunk?;
        let index = usize::try_from(at - at.min(position))
            .ok()
            .filter(|index| position <= at && *index < chunk.len());
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

//! The two bodies in an exchange: the request's, and the response's, which drives the upstream connection.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::pool::{Pool, UpstreamConnection};
use svc_base::error_chain::format_chain;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Maximum number of frames that a response's body returns after the pool has been closed.
const MAX_FRAMES_AFTER_CLOSE: u8 = 16;

/// The progress of a request body.
#[derive(Default)]
pub(super) struct Upload {
    is_done: AtomicBool,
    frames: AtomicU64,
}

impl Upload {
    pub(super) fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    pub(super) fn sent_frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }
}

/// A request body for the upstream. hyper drops it after the last byte or a failure, which ends the [`Upload`].
pub(super) struct RequestBody {
    body: Body,
    upload: Option<Arc<Upload>>,
}

impl RequestBody {
    /// Wraps a body. Also returns the upload's progress; `None` if the body is empty.
    pub(super) fn new(body: Body) -> (Self, Option<Arc<Upload>>) {
        let upload = (!body.is_end_stream()).then(Arc::<Upload>::default);
        (Self { body, upload: upload.clone() }, upload)
    }

    pub(super) fn empty() -> Self {
        Self { body: Body::empty(), upload: None }
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(upload) = &self.upload {
            upload.frames.fetch_add(1, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let Some(upload) = &self.upload {
            upload.is_done.store(true, Ordering::Release);
        }
    }
}

/// A response body. Once read to its end, it returns the connection to the pool; if dropped earlier, it closes the
/// connection.
pub(super) struct ResponseBody {
    body: Incoming,
    /// `None` if a separate task drives the connection, or the connection has ended or is back in the pool.
    upstream: Option<Box<UpstreamConnection>>,
    pool: Arc<Pool>,
    /// Completes when the pool is closed. Created at the first wait, because most bodies are available immediately.
    closed: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    frames_after_close: u8,
}

impl ResponseBody {
    /// Creates the body of a response to a request that has been sent completely.
    pub(super) fn with_connection(
        body: Incoming,
        pool: Arc<Pool>,
        upstream: Box<UpstreamConnection>,
    ) -> Body {
        let mut response = Self { body, upstream: Some(upstream), pool, closed: None, frames_after_close: 0 };
        if response.body.is_end_stream() {
            response.release();
            return Body::empty();
        }
        Body::new(response)
    }

    /// Creates the body of a response to a request that is still being sent; a task drives the connection.
    pub(super) fn with_detached_connection(
        body: Incoming,
        pool: Arc<Pool>,
        upstream: Box<UpstreamConnection>,
    ) -> Body {
        let closed = pool.closed.clone();
        tokio::spawn(async move {
            let UpstreamConnection { sender, connection, permit: _permit, .. } = *upstream;
            // The connection is not reused; without a sender, it closes at the end of the response.
            drop(sender);
            tokio::select! {
                () = closed.cancelled() => {}
                result = connection => if let Err(error) = result {
                    tracing::debug!(error = %format_chain(&error), "upstream connection ended");
                }
            }
        });
        Self::without_connection(body, pool)
    }

    /// Creates the body of a response whose connection is driven elsewhere.
    pub(super) fn without_connection(body: Incoming, pool: Arc<Pool>) -> Body {
        if body.is_end_stream() {
            return Body::empty();
        }
        Body::new(Self { body, upstream: None, pool, closed: None, frames_after_close: 0 })
    }

    fn release(&mut self) {
        if let Some(upstream) = self.upstream.take() {
            self.pool.put_idle(upstream);
        }
    }

    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        match &frame {
            Some(Err(_)) => self.upstream = None,
            Some(Ok(_)) if !self.body.is_end_stream() => {}
            _ => self.release(),
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let token = &self.pool.closed;
        let closed = self.closed.get_or_insert_with(|| Box::pin(token.clone().cancelled_owned()));
        closed.as_mut().poll(cx)
    }

    /// Closes the connection because the pool has been closed, and returns the error for the body's reader.
    fn close_connection(&mut self) -> BoxError {
        self.upstream = None;
        "the proxy to the upstream was closed".into()
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        // A short response that has already arrived is completed. The number of frames is limited, because a body that
        // always has data would never reach `poll_closed`.
        if this.pool.closed.is_cancelled() {
            if this.frames_after_close == MAX_FRAMES_AFTER_CLOSE {
                return Poll::Ready(Some(Err(this.close_connection())));
            }
            this.frames_after_close += 1;
        }
        // Polling the body requests data; polling the connection then reads it, after which the body may have a frame.
        if let Poll::Ready(frame) = this.poll_body(cx) {
            return Poll::Ready(frame);
        }
        if let Some(upstream) = &mut this.upstream {
            if Pin::new(&mut upstream.connection).poll(cx).is_ready() {
                // The connection has ended; the body returns the remaining data and then ends.
                this.upstream = None;
            }
            if let Poll::Ready(frame) = this.poll_body(cx) {
                return Poll::Ready(frame);
            }
        }
        ready!(this.poll_closed(cx));
        Poll::Ready(Some(Err(this.close_connection())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

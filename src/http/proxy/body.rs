//! The two bodies of an exchange: the request's, and the response's, which drives the upstream connection.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::pool::{Pool, UpstreamConnection};

type Boxed = Box<dyn std::error::Error + Send + Sync>;

/// Progress of a request's body.
#[derive(Default)]
pub(super) struct Upload {
    done: AtomicBool,
    frames: AtomicU64,
}

impl Upload {
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(super) fn moved(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }
}

/// A request's body for the upstream; the inner body is dropped with the last byte.
pub(super) struct RequestBody {
    body: Body,
    upload: Option<Arc<Upload>>,
}

impl RequestBody {
    /// Returns the progress only if there is a body.
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
            upload.done.store(true, Ordering::Release);
        }
    }
}

/// A response's body. Read to its end, it returns the connection to the pool; dropped earlier, it closes the connection.
pub(super) struct ResponseBody {
    body: Incoming,
    /// `None` if a separate task drives the connection, or it has ended.
    wire: Option<Box<UpstreamConnection>>,
    pool: Arc<Pool>,
    /// Created at the first wait: most bodies are available at once.
    closed: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl ResponseBody {
    /// The response's body if the request has been sent completely.
    pub(super) fn driving(body: Incoming, pool: Arc<Pool>, wire: Box<UpstreamConnection>) -> Body {
        let mut response = Self { body, wire: Some(wire), pool, closed: None };
        if response.body.is_end_stream() {
            response.release();
            return Body::empty();
        }
        Body::new(response)
    }

    /// The response's body while the request is still being sent.
    pub(super) fn detached(body: Incoming, pool: Arc<Pool>, wire: Box<UpstreamConnection>) -> Body {
        let closed = pool.closed.clone();
        tokio::spawn(async move {
            let UpstreamConnection { sender: _sender, connection, permit: _permit } = *wire;
            tokio::select! {
                () = closed.cancelled() => {}
                ended = connection => if let Err(error) = ended {
                    tracing::debug!(%error, "upstream connection ended");
                }
            }
        });
        Self::undriven(body, pool)
    }

    /// The response's body if the connection is driven elsewhere.
    pub(super) fn undriven(body: Incoming, pool: Arc<Pool>) -> Body {
        if body.is_end_stream() {
            return Body::empty();
        }
        Body::new(Self { body, wire: None, pool, closed: None })
    }

    fn release(&mut self) {
        if let Some(wire) = self.wire.take() {
            self.pool.keep(wire);
        }
    }

    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Boxed>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        match &frame {
            Some(Err(_)) => self.wire = None,
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
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = Boxed;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Boxed>>> {
        let this = &mut *self;
        // Polling the body first makes the connection read; then the body may have a frame.
        if let Poll::Ready(frame) = this.poll_body(cx) {
            return Poll::Ready(frame);
        }
        if let Some(wire) = &mut this.wire {
            if Pin::new(&mut wire.connection).poll(cx).is_ready() {
                // Its remaining data, and its end, are in the body.
                this.wire = None;
            }
            if let Poll::Ready(frame) = this.poll_body(cx) {
                return Poll::Ready(frame);
            }
        }
        ready!(this.poll_closed(cx));
        this.wire = None;
        Poll::Ready(Some(Err("the proxy to the upstream was closed".into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

//! A time limit for an upgraded connection or a streaming response.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A limit that is reached at `deadline`, or earlier when `revoked` is cancelled. As a request extension, it makes
/// [`Proxy::forward`](super::Proxy::forward) end an upgraded connection at the limit; [`Self::limit_body`] ends a
/// response.
#[derive(Debug, Clone)]
pub struct TimeLimit {
    pub revoked: Arc<CancellationToken>,
    pub deadline: Instant,
}

impl TimeLimit {
    pub(super) async fn wait(self) {
        // Either event ends the wait; it does not matter which came first.
        let _ = tokio::time::timeout_at(self.deadline, self.revoked.cancelled()).await;
    }

    /// Wraps a body so that it ends with an error at the limit, because the reader must not treat it as complete.
    pub fn limit_body(self, body: Body) -> Body {
        Body::new(TimeLimitedBody { body, limit_reached: Box::pin(self.wait()) })
    }
}

struct TimeLimitedBody {
    body: Body,
    limit_reached: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl HttpBody for TimeLimitedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        // Checked first, because a body that is always ready must end too.
        if self.limit_reached.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(axum::Error::new("this request's session has ended"))));
        }
        Poll::Ready(ready!(Pin::new(&mut self.body).poll_frame(cx)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

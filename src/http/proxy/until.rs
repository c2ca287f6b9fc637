//! An end that is set for what a request opens: an upgraded connection, or an answer that goes on.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// As an extension of a request: what it opens ends when the token is cancelled, or at that time.
#[derive(Debug, Clone)]
pub struct Until {
    pub closed: Arc<CancellationToken>,
    pub at: Instant,
}

impl Until {
    pub(super) async fn ended(self) {
        // Either is an end.
        let _ = tokio::time::timeout_at(self.at, self.closed.cancelled()).await;
    }

    /// The same body, broken off at the end: its reader must not take it for whole.
    pub fn bound(self, body: Body) -> Body {
        Body::new(Bounded { body, ended: Box::pin(self.ended()) })
    }
}

struct Bounded {
    body: Body,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl HttpBody for Bounded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        // First: an answer that is always ready must end, too.
        if self.ended.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(axum::Error::new("the session of this request has ended"))));
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

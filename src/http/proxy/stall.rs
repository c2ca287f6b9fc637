//! A timeout for the reader of a response body.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use http_body_util::BodyExt;
use hyper::body::Frame;
use tokio::sync::mpsc;

/// A frame of the body, or `None` after the last one.
type NextFrame = Option<Result<Frame<Bytes>, axum::Error>>;

/// Wraps a body so that it is dropped, and `guard` with it, once its reader has not taken a frame for `timeout`. The
/// reader then gets an error, because it must not treat the body as complete.
///
/// The server stops polling a body when its client stops reading, so the body cannot detect the stall itself; a
/// separate task reads it.
pub fn end_stalled_body(body: Body, timeout: Duration, guard: impl Send + 'static) -> Body {
    if body.is_end_stream() {
        return body;
    }
    let (sender, frames) = mpsc::channel(1);
    tokio::spawn(async move {
        let end = send_frames(body, timeout, &sender).await;
        drop(guard);
        if let Some(end) = end {
            // No timeout is needed, because only the reader's connection is still in use. The send fails only if the
            // reader is gone.
            let _ = sender.send(end).await;
        }
    });
    Body::new(StallLimitedBody { frames })
}

/// Sends the frames of a body. Returns the end of the body, which is not sent yet, or `None` if its reader has stalled
/// or is gone.
async fn send_frames(
    mut body: Body,
    timeout: Duration,
    sender: &mpsc::Sender<NextFrame>,
) -> Option<NextFrame> {
    loop {
        let next = tokio::select! {
            () = sender.closed() => return None,
            next = body.frame() => next,
        };
        if !matches!(next, Some(Ok(_))) {
            return Some(next);
        }
        // The timeout applies only to the reader: a slow upstream does not end the body.
        match tokio::time::timeout(timeout, sender.send(next)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return None,
            Err(_) => {
                tracing::warn!("the client has stopped reading; closing the upstream connection");
                return None;
            }
        }
    }
}

struct StallLimitedBody {
    frames: mpsc::Receiver<NextFrame>,
}

impl HttpBody for StallLimitedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let next = ready!(self.frames.poll_recv(cx));
        Poll::Ready(next.unwrap_or_else(|| Some(Err(axum::Error::new("the response was not read in time")))))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use axum::body::to_bytes;
    use futures_util::{StreamExt, stream};

    use super::*;

    #[tokio::test]
    async fn stalled_body_is_dropped_and_returns_error() {
        let data = Arc::new(Bytes::from_static(b"data"));
        let weak_data = Arc::downgrade(&data);
        let guard = Arc::new(());
        let weak_guard = Arc::downgrade(&guard);
        let endless = Body::from_stream(stream::repeat_with(move || Ok::<_, io::Error>(Bytes::clone(&data))));
        let mut body = end_stalled_body(endless, Duration::from_millis(100), guard);
        body.frame().await.unwrap().unwrap();
        assert!(weak_data.strong_count() > 0 && weak_guard.strong_count() > 0);
        let dropped = async {
            while weak_data.strong_count() > 0 || weak_guard.strong_count() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), dropped).await.unwrap();
        assert!(to_bytes(body, 100).await.unwrap_err().to_string().contains("not read in time"));
    }

    #[tokio::test]
    async fn slow_upstream_is_not_a_stall() {
        let rest = stream::once(async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok::<_, io::Error>("b")
        });
        let slow = Body::from_stream(stream::once(async { Ok::<_, io::Error>("a") }).chain(rest));
        let body = end_stalled_body(slow, Duration::from_millis(20), ());
        assert_eq!(to_bytes(body, 100).await.unwrap(), "ab");
    }

    #[tokio::test]
    async fn dropping_reader_drops_pending_body() {
        let guard = Arc::new(());
        let weak_guard = Arc::downgrade(&guard);
        let silent = Body::from_stream(stream::pending::<io::Result<Bytes>>());
        drop(end_stalled_body(silent, Duration::from_secs(60), guard));
        let dropped = async {
            while weak_guard.strong_count() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), dropped).await.unwrap();
    }
}

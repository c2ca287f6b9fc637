//! Closes connections whose client has stopped reading, because each occupies one of a few processes.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How long a client may read nothing.
const TIMEOUT: Duration = Duration::from_secs(60);
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Since when a write waits for the client; `None` if none does.
#[derive(Clone, Default)]
pub(super) struct WaitingSince(Arc<Mutex<Option<Instant>>>);

impl WaitingSince {
    fn record<T>(&self, written: &Poll<T>) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match written {
            Poll::Pending => drop(since.get_or_insert_with(Instant::now)),
            Poll::Ready(_) => *since = None,
        }
    }

    /// Waits until the client has read nothing for [`TIMEOUT`].
    pub(super) async fn wait_for_stall(&self) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let since = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if since.is_some_and(|since| since.elapsed() >= TIMEOUT) {
                return;
            }
        }
    }
}

/// A connection that records since when its client reads nothing.
pub(super) struct Watched<S> {
    pub(super) stream: S,
    pub(super) waiting: WaitingSince,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.waiting.record(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.waiting.record(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn only_a_write_that_waits_counts() {
        let (stream, mut client) = tokio::io::duplex(10);
        let waiting = WaitingSince::default();
        let mut watched = Watched { stream, waiting: waiting.clone() };
        let since = || *waiting.0.lock().unwrap();
        watched.write_all(b"0123456789").await.unwrap();
        assert_eq!(since(), None);
        let writing = tokio::spawn(async move {
            watched.write_all(b"more").await.unwrap();
            watched
        });
        while since().is_none() {
            tokio::task::yield_now().await;
        }
        let mut buffer = [0; 14];
        client.read_exact(&mut buffer).await.unwrap();
        let _watched = writing.await.unwrap();
        assert_eq!(since(), None);
    }
}

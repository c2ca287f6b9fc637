//! Detects clients that have stopped reading so we can close their connections: each ties up one of a few processes.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How long a write may block on the client.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Time at which the pending write blocked; `None` if no write is pending.
#[derive(Clone, Default)]
pub(super) struct WriteStallTimer(Arc<Mutex<Option<Instant>>>);

impl WriteStallTimer {
    fn record<T>(&self, written: &Poll<T>) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match written {
            Poll::Pending => drop(since.get_or_insert_with(Instant::now)),
            Poll::Ready(_) => *since = None,
        }
    }

    /// Completes once a write has been blocked for [`STALL_TIMEOUT`].
    pub(super) async fn wait_for_stall(&self) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let since = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if since.is_some_and(|since| since.elapsed() >= STALL_TIMEOUT) {
                return;
            }
        }
    }
}

/// A connection that tracks blocked writes in its [`WriteStallTimer`].
pub(super) struct StallTrackedStream<S> {
    pub(super) stream: S,
    pub(super) stall_timer: WriteStallTimer,
}

impl<S: AsyncRead + Unpin> AsyncRead for StallTrackedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallTrackedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.stall_timer.record(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.stall_timer.record(&written);
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
    async fn stall_timer_runs_only_while_write_waits() {
        let (stream, mut client) = tokio::io::duplex(10);
        let stall_timer = WriteStallTimer::default();
        let mut tracked = StallTrackedStream { stream, stall_timer: stall_timer.clone() };
        let since = || *stall_timer.0.lock().unwrap();
        tracked.write_all(b"0123456789").await.unwrap();
        assert_eq!(since(), None);
        let writing = tokio::spawn(async move {
            tracked.write_all(b"more").await.unwrap();
            tracked
        });
        while since().is_none() {
            tokio::task::yield_now().await;
        }
        let mut buffer = [0; 14];
        client.read_exact(&mut buffer).await.unwrap();
        let _tracked = writing.await.unwrap();
        assert_eq!(since(), None);
    }
}

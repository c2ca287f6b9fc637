//! Separate timeouts for a request head and for an idle connection.
//!
//! hyper has one timer for both, which starts when hyper begins to wait for a head. Here, the first byte of a head
//! shortens the deadline: [`HeadStream`] records when that byte is read, and the sleeps that [`HeadTimer`] creates then
//! end `head_timeout` after it, if that is earlier than the idle deadline.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// The time of the first byte of the head that a connection is waiting for.
#[derive(Debug)]
struct FirstByte {
    opened: Instant,
    /// Milliseconds since `opened`, plus one; 0 before the first byte.
    elapsed_ms: AtomicU64,
}

impl FirstByte {
    fn record(&self) {
        if self.elapsed_ms.load(Ordering::Relaxed) == 0 {
            let ms = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
            self.elapsed_ms.store(ms + 1, Ordering::Relaxed);
        }
    }

    fn reset(&self) {
        self.elapsed_ms.store(0, Ordering::Relaxed);
    }

    fn get(&self) -> Option<Instant> {
        let ms = self.elapsed_ms.load(Ordering::Relaxed).checked_sub(1)?;
        self.opened.checked_add(Duration::from_millis(ms))
    }
}

/// A connection's stream, which records when the first byte of a head is read. It holds the connection's permits,
/// because an upgraded stream outlives the HTTP connection.
pub struct HeadStream<S, P> {
    stream: S,
    first_byte: Arc<FirstByte>,
    _permits: P,
}

impl<S, P> HeadStream<S, P> {
    /// Wraps a stream and creates the timer for its heads. `head_timeout` runs from a head's first byte to its last.
    pub fn new(stream: S, permits: P, head_timeout: Duration) -> (Self, HeadTimer) {
        let first_byte = Arc::new(FirstByte { opened: Instant::now(), elapsed_ms: AtomicU64::new(0) });
        let timer = HeadTimer { first_byte: Arc::clone(&first_byte), head_timeout };
        (Self { stream, first_byte, _permits: permits }, timer)
    }
}

impl<S: AsyncRead + Unpin, P: Unpin> AsyncRead for HeadStream<S, P> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        if into.filled().len() > before {
            self.first_byte.record();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin, P: Unpin> AsyncWrite for HeadStream<S, P> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// hyper's timer for one connection. hyper creates or resets a sleep when it begins to wait for a head.
#[derive(Debug, Clone)]
pub struct HeadTimer {
    first_byte: Arc<FirstByte>,
    head_timeout: Duration,
}

impl HeadTimer {
    fn start_sleep(&self, idle_deadline: Instant) -> HeadSleep {
        // Bytes read so far belong to earlier requests, except that a pipelining client may already have sent the
        // start of this head; its timeout then starts at the next read.
        self.first_byte.reset();
        let sleep = Box::pin(tokio::time::sleep_until(idle_deadline));
        HeadSleep {
            sleep,
            first_byte: self.first_byte.clone(),
            head_timeout: self.head_timeout,
            has_head_started: false,
        }
    }
}

impl rt::Timer for HeadTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn rt::Sleep>> {
        Box::pin(self.start_sleep(Instant::now() + duration))
    }

    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn rt::Sleep>> {
        Box::pin(self.start_sleep(deadline.into()))
    }

    fn now(&self) -> std::time::Instant {
        Instant::now().into()
    }

    /// hyper calls this only if the sleep for the previous head still exists. hyper 1.12 drops it once the head has
    /// been parsed, and calls `sleep_until` for the next one.
    fn reset(&self, sleep: &mut Pin<Box<dyn rt::Sleep>>, new_deadline: std::time::Instant) {
        match sleep.as_mut().downcast_mut_pin::<HeadSleep>() {
            Some(sleep) => sleep.get_mut().restart(new_deadline.into()),
            None => *sleep = self.sleep_until(new_deadline),
        }
    }
}

struct HeadSleep {
    sleep: Pin<Box<Sleep>>,
    first_byte: Arc<FirstByte>,
    head_timeout: Duration,
    /// Whether the head has started, so that the head timeout has been applied to `sleep`.
    has_head_started: bool,
}

impl HeadSleep {
    /// Waits for the next head, until `idle_deadline`.
    fn restart(&mut self, idle_deadline: Instant) {
        self.first_byte.reset();
        self.has_head_started = false;
        self.sleep.as_mut().reset(idle_deadline);
    }
}

impl Future for HeadSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if !self.has_head_started
            && let Some(first) = self.first_byte.get()
        {
            self.has_head_started = true;
            let deadline = (first + self.head_timeout).min(self.sleep.deadline());
            self.sleep.as_mut().reset(deadline);
        }
        self.sleep.as_mut().poll(cx)
    }
}

impl rt::Sleep for HeadSleep {}

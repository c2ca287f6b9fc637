//! What a connection waits for, and until when.
//!
//! hyper has one timeout, from the moment when it begins to wait for a request head, and it sets and clears a timer for
//! each request. Here, an idle connection and an incomplete head have separate timeouts, and the timer of a connection
//! is set again only after it has fired. [`WaitObserver`] records when hyper begins to wait, and [`ObservedStream`]
//! records the first byte of a head.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper::rt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;

/// The bytes that a client may send between a request and the next head.
pub const LINE_BREAKS: &[u8] = b"\r\n";

/// Timeouts while a connection waits for a request head.
#[derive(Debug, Clone, Copy)]
pub struct HeadTimeouts {
    /// From the previous response until the first byte of a head.
    pub idle: Duration,
    /// From a head's first byte to its last.
    pub head: Duration,
    /// From the previous response, or from the last bytes that are not part of a head, until the connection releases its
    /// buffers.
    pub release: Duration,
}

/// What a waiting connection has to do when its timer fires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimerEvent {
    /// The connection is idle, and nothing is buffered: release its buffers.
    ReleaseBuffers,
    /// Close the connection.
    TimedOut,
}

/// The state that a connection's stream, its service and its timer share. They run in one task, so that relaxed atomic
/// operations suffice.
#[derive(Debug)]
pub struct ConnectionState {
    opened: Instant,
    /// When the connection began to wait for a head; `None` while a request is in flight.
    waiting_since: RelativeTime,
    /// When hyper began to serve the connection, for the first time or again.
    served_since: RelativeTime,
    first_byte: RelativeTime,
    /// Whether the last read found nothing, neither in the socket nor in the TLS session.
    is_read_drained: AtomicBool,
    /// Whether everything that hyper has written has been flushed, hyper's own buffer included. hyper may wait for the
    /// next head before: it does so if the request ends after its response.
    is_flushed: AtomicBool,
}

/// An optional time, in milliseconds since the connection was opened, plus one; 0 is `None`.
#[derive(Debug, Default)]
struct RelativeTime(AtomicU64);

impl RelativeTime {
    fn get(&self, opened: Instant) -> Option<Instant> {
        let ms = self.0.load(Ordering::Relaxed).checked_sub(1)?;
        opened.checked_add(Duration::from_millis(ms))
    }

    fn is_some(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    fn set_to_now(&self, opened: Instant) {
        let ms = u64::try_from(opened.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.0.store(ms + 1, Ordering::Relaxed);
    }

    fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

impl ConnectionState {
    fn new() -> Arc<Self> {
        let state = Self {
            opened: Instant::now(),
            waiting_since: RelativeTime::default(),
            served_since: RelativeTime::default(),
            first_byte: RelativeTime::default(),
            is_read_drained: AtomicBool::new(false),
            is_flushed: AtomicBool::new(true),
        };
        state.waiting_since.set_to_now(state.opened);
        state.served_since.set_to_now(state.opened);
        Arc::new(state)
    }

    /// Whether the connection waits for a head of which it has not read a byte.
    pub fn is_idle(&self) -> bool {
        self.waiting_since.is_some() && !self.first_byte.is_some()
    }

    /// Whether the connection has read a head in part.
    pub fn has_partial_head(&self) -> bool {
        self.waiting_since.is_some() && self.first_byte.is_some()
    }

    /// Records that hyper serves the connection again.
    pub fn resume(&self) {
        self.served_since.set_to_now(self.opened);
    }

    /// Records that hyper has parsed a head.
    pub fn start_request(&self) {
        self.waiting_since.clear();
    }

    /// Records that hyper waits for a head. A connection that waits already, and that hyper serves again because its
    /// socket has become readable, keeps its deadlines: an incomplete TLS record is not a request.
    fn start_waiting(&self) {
        if !self.waiting_since.is_some() {
            // Bytes read so far belong to earlier requests. A pipelining client may already have sent the start of
            // this head; `ObservedStream::prepend` then records it.
            self.first_byte.clear();
            self.waiting_since.set_to_now(self.opened);
        }
    }

    /// Records bytes that were read. Line breaks before a head are not part of it (RFC 9112, section 2.2).
    fn record_read(&self, bytes: &[u8]) {
        if self.is_idle() && bytes.iter().any(|byte| !LINE_BREAKS.contains(byte)) {
            self.first_byte.set_to_now(self.opened);
        }
    }

    /// Records a complete flush. If hyper waits for a head already, its deadlines start now.
    fn record_flush(&self) {
        if !self.is_flushed.swap(true, Ordering::Relaxed) && self.waiting_since.is_some() {
            self.waiting_since.set_to_now(self.opened);
            if self.first_byte.is_some() {
                self.first_byte.set_to_now(self.opened);
            }
        }
    }

    /// Returns the next event of a waiting connection; `None` while a request is in flight, or its response is not flushed.
    fn next_event(&self, timeouts: HeadTimeouts) -> Option<(Instant, TimerEvent)> {
        let waiting_since = self.waiting_since.get(self.opened)?;
        if !self.is_flushed.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(first_byte) = self.first_byte.get(self.opened) {
            return Some((first_byte + timeouts.head, TimerEvent::TimedOut));
        }
        if self.is_read_drained.load(Ordering::Relaxed)
            && let Some(served_since) = self.served_since.get(self.opened)
        {
            return Some((waiting_since.max(served_since) + timeouts.release, TimerEvent::ReleaseBuffers));
        }
        Some((waiting_since + timeouts.idle, TimerEvent::TimedOut))
    }

    /// Returns when an idle connection is closed.
    pub fn idle_deadline(&self, timeouts: HeadTimeouts) -> Instant {
        self.waiting_since.get(self.opened).unwrap_or_else(Instant::now) + timeouts.idle
    }

    /// Returns the next event once it is due. A timer that is set for an earlier time stays set: a connection that
    /// serves many requests then sets its timer once per `timeouts.release`, not for each request.
    pub fn poll_event(
        &self,
        timeouts: HeadTimeouts,
        mut timer: Pin<&mut Sleep>,
        cx: &mut Context<'_>,
    ) -> Poll<TimerEvent> {
        let Some((deadline, event)) = self.next_event(timeouts) else { return Poll::Pending };
        if timer.is_elapsed() || timer.deadline() > deadline {
            timer.as_mut().reset(deadline);
        }
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(event);
            }
            timer.as_mut().reset(deadline);
        }
    }
}

/// A stream whose socket can be waited for without a buffer.
pub trait PollReadable: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Waits until the socket has bytes, an end or an error to read.
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()>;

    /// Whether there is nothing to read but what the socket may still receive.
    fn is_drained(&self) -> bool;
}

impl PollReadable for TcpStream {
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_read_ready(cx).map(drop)
    }

    fn is_drained(&self) -> bool {
        true
    }
}

impl PollReadable for TlsStream<TcpStream> {
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.get_ref().0.poll_readable(cx)
    }

    fn is_drained(&self) -> bool {
        self.get_ref().1.wants_read()
    }
}

/// A connection's stream, which records what [`ConnectionState`] needs. It holds the connection's permits, because an
/// upgraded stream outlives the HTTP connection.
pub struct ObservedStream<S, P> {
    stream: S,
    /// Read before the stream.
    prefix: Bytes,
    state: Arc<ConnectionState>,
    _permits: P,
}

impl<S: PollReadable, P> ObservedStream<S, P> {
    pub fn new(stream: S, permits: P) -> (Self, Arc<ConnectionState>) {
        let state = ConnectionState::new();
        (Self { stream, prefix: Bytes::new(), state: state.clone(), _permits: permits }, state)
    }

    /// Puts back bytes of a head that were read too early. They are copied, because they are a part of hyper's buffer.
    pub fn prepend(&mut self, bytes: &[u8]) {
        self.prefix = Bytes::copy_from_slice(bytes);
        self.state.record_read(bytes);
    }

    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_readable(cx)
    }
}

impl<S: PollReadable, P: Unpin> AsyncRead for ObservedStream<S, P> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.prefix.is_empty() {
            let bytes = self.prefix.len().min(into.remaining());
            into.put_slice(&self.prefix[..bytes]);
            self.prefix.advance(bytes);
            if self.prefix.is_empty() {
                self.prefix = Bytes::new();
            }
            return Poll::Ready(Ok(()));
        }
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        self.state.record_read(&into.filled()[before..]);
        self.state.is_read_drained.store(read.is_pending() && self.stream.is_drained(), Ordering::Relaxed);
        read
    }
}

impl<S: PollReadable, P: Unpin> AsyncWrite for ObservedStream<S, P> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.state.is_flushed.store(false, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    /// hyper flushes the stream in each poll in which it writes, once its own buffer is empty.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(Pin::new(&mut self.stream).poll_flush(cx));
        if flushed.is_ok() {
            self.state.record_flush();
        }
        Poll::Ready(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.state.is_flushed.store(false, Ordering::Relaxed);
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// The timer that hyper gets. hyper sets a sleep when it begins to wait for a head, and drops it once it has parsed the
/// head (hyper 1.12). The sleeps never end: [`ConnectionState::poll_event`] enforces the deadlines.
#[derive(Debug, Clone)]
pub struct WaitObserver(pub Arc<ConnectionState>);

impl rt::Timer for WaitObserver {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn rt::Sleep>> {
        self.0.start_waiting();
        Box::pin(Endless)
    }

    fn sleep_until(&self, _: std::time::Instant) -> Pin<Box<dyn rt::Sleep>> {
        self.0.start_waiting();
        Box::pin(Endless)
    }

    /// hyper uses the time only for deadlines, which are ignored, so this saves a system call.
    fn now(&self) -> std::time::Instant {
        self.0.opened.into()
    }

    fn reset(&self, _: &mut Pin<Box<dyn rt::Sleep>>, _: std::time::Instant) {
        self.0.start_waiting();
    }
}

/// A sleep without an end. It has no fields, so that its box takes no memory.
struct Endless;

impl Future for Endless {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

impl rt::Sleep for Endless {}

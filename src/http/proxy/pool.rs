//! The connection pool of one upstream: opens, counts, keeps and closes connections.
//!
//! An idle connection is not driven; it is polled once before it is reused, which shows whether the upstream has closed it.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Waker};
use std::time::Instant;

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::body::RequestBody;
use super::{Dial, Io, ProxyError, ProxyLimits};
use crate::shards;

/// A connection: the sender of requests, and the future that drives it.
pub(super) struct UpstreamConnection {
    pub(super) sender: SendRequest<RequestBody>,
    pub(super) connection: http1::Connection<TokioIo<Box<dyn Io>>, RequestBody>,
    pub(super) permit: OwnedSemaphorePermit,
}

impl UpstreamConnection {
    /// Polls the connection once after a response, and returns whether it can take another request. No task is woken for it
    /// afterwards.
    fn is_reusable(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut self.connection).poll(&mut cx).is_pending() && self.sender.is_ready()
    }
}

pub(super) struct Pool {
    dial: Box<dyn Dial>,
    pub(super) limits: ProxyLimits,
    permits: Arc<Semaphore>,
    idle: Mutex<Idle>,
    pub(super) closed: CancellationToken,
}

struct IdleConnection {
    wire: Box<UpstreamConnection>,
    since: Instant,
    /// The shard that drives its socket; only that shard reuses it.
    shard: Option<usize>,
}

#[derive(Default)]
struct Idle {
    /// The most recently used one is reused first, so that unneeded ones expire.
    wires: Vec<IdleConnection>,
    reaped: bool,
}

impl Pool {
    pub(super) fn new(dial: Box<dyn Dial>, limits: ProxyLimits) -> Self {
        Self {
            dial,
            permits: Arc::new(Semaphore::new(limits.connections)),
            limits,
            idle: Mutex::default(),
            closed: CancellationToken::new(),
        }
    }

    pub(super) fn close(&self) {
        self.closed.cancel();
        self.idle().wires.clear();
    }

    /// A live idle connection.
    pub(super) fn reuse(&self) -> Option<Box<UpstreamConnection>> {
        loop {
            let mut wire = self.idle().take(shards::current())?;
            if wire.is_reusable() {
                return Some(wire);
            }
        }
    }

    pub(super) async fn connect(&self) -> Result<Box<UpstreamConnection>, ProxyError> {
        if self.closed.is_cancelled() {
            return Err(ProxyError::Closed);
        }
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| ProxyError::Full)?;
        let dialled = tokio::select! {
            () = self.closed.cancelled() => return Err(ProxyError::Closed),
            dialled = tokio::time::timeout(self.limits.connect, self.dial.dial()) => dialled,
        };
        let io = dialled.map_err(|_| ProxyError::ConnectTimeout)?.map_err(ProxyError::Connect)?;
        let (sender, connection) = http1::handshake(TokioIo::new(io)).await.map_err(ProxyError::Exchange)?;
        Ok(Box::new(UpstreamConnection { sender, connection, permit }))
    }

    /// Keeps a connection after its response has been read to the end, if it can be reused.
    pub(super) fn keep(self: &Arc<Self>, mut wire: Box<UpstreamConnection>) {
        if !wire.is_reusable() {
            return;
        }
        let mut idle = self.idle();
        // `close` cancels the token before it clears the pool, so a later insertion sees the token.
        if self.closed.is_cancelled() {
            return;
        }
        // The oldest one is evicted, regardless of its shard, so that an inactive shard does not occupy the pool.
        let full = idle.wires.len() >= self.limits.idle_connections;
        let oldest = (full && !idle.wires.is_empty()).then(|| idle.wires.remove(0));
        idle.wires.push(IdleConnection { wire, since: Instant::now(), shard: shards::current() });
        if !std::mem::replace(&mut idle.reaped, true) {
            tokio::spawn(reap(Arc::downgrade(self), self.limits.idle));
        }
        drop(idle);
        drop(oldest);
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Idle {
    fn take(&mut self, shard: Option<usize>) -> Option<Box<UpstreamConnection>> {
        let index = self.wires.iter().rposition(|kept| kept.shard == shard)?;
        Some(self.wires.remove(index).wire)
    }
}

/// Drops expired connections; ends with the last connection or the pool.
async fn reap(pool: Weak<Pool>, limit: std::time::Duration) {
    loop {
        tokio::time::sleep(limit / 4).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut idle = pool.idle();
        let old = idle.wires.iter().take_while(|kept| kept.since.elapsed() >= limit).count();
        let dropped: Vec<_> = idle.wires.drain(..old).collect();
        let done = idle.wires.is_empty();
        idle.reaped = !done;
        drop(idle);
        drop(dropped);
        if done {
            return;
        }
    }
}

//! The connection pool for one upstream: opens and counts connections, and keeps idle ones for reuse until they expire.
//!
//! No task drives an idle connection. Before reuse, it is polled once, which shows whether the upstream has closed it.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Waker};
use std::time::Instant;

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::body::RequestBody;
use super::{Dial, Io, ProxyError, ProxyLimits};
use crate::shards;

pub(super) type ClientConnection = http1::Connection<TokioIo<Box<dyn Io>>, RequestBody>;

/// A connection: the request sender, and the future that drives it.
pub(super) struct UpstreamConnection {
    pub(super) sender: SendRequest<RequestBody>,
    pub(super) connection: ClientConnection,
    /// The timer for response heads. It stays set between requests, and is set again only when it has fired, so that
    /// most requests do not set it.
    pub(super) timer: Pin<Box<Sleep>>,
    pub(super) permit: OwnedSemaphorePermit,
}

impl UpstreamConnection {
    /// Polls the connection once, and returns whether it can take another request. Later events on the connection
    /// wake no task; its timer may wake the task of its last request.
    fn is_reusable(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut self.connection).poll(&mut cx).is_pending() && self.sender.is_ready()
    }
}

pub(super) struct Pool {
    dial: Box<dyn Dial>,
    pub(super) limits: ProxyLimits,
    permits: Arc<Semaphore>,
    idle: Mutex<IdleConnections>,
    pub(super) closed: CancellationToken,
}

struct IdleConnection {
    upstream: Box<UpstreamConnection>,
    idle_since: Instant,
    /// The shard that drives the connection's socket; only that shard can reuse the connection.
    shard: Option<usize>,
}

#[derive(Default)]
struct IdleConnections {
    /// Oldest first. The most recently used connection is reused first, so that unneeded ones expire.
    connections: Vec<IdleConnection>,
    has_reaper: bool,
}

impl Pool {
    pub(super) fn new(dial: Box<dyn Dial>, limits: ProxyLimits) -> Self {
        Self {
            dial,
            permits: Arc::new(Semaphore::new(limits.max_connections)),
            limits,
            idle: Mutex::default(),
            closed: CancellationToken::new(),
        }
    }

    pub(super) fn close(&self) {
        self.closed.cancel();
        self.lock_idle().connections.clear();
    }

    /// Takes a live idle connection that belongs to the current shard, if there is one.
    pub(super) fn reuse(&self) -> Option<Box<UpstreamConnection>> {
        loop {
            let mut upstream = self.lock_idle().remove_idle(shards::current())?;
            if upstream.is_reusable() {
                return Some(upstream);
            }
        }
    }

    pub(super) async fn connect(&self) -> Result<Box<UpstreamConnection>, ProxyError> {
        if self.closed.is_cancelled() {
            return Err(ProxyError::Closed);
        }
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| ProxyError::Full)?;
        let connected = tokio::select! {
            () = self.closed.cancelled() => return Err(ProxyError::Closed),
            connected = tokio::time::timeout(self.limits.connect_timeout, self.dial.dial()) => connected,
        };
        let io = connected.map_err(|_| ProxyError::ConnectTimeout)?.map_err(ProxyError::Connect)?;
        let (sender, connection) = http1::handshake(TokioIo::new(io)).await.map_err(ProxyError::Exchange)?;
        let timer = Box::pin(tokio::time::sleep(self.limits.head_timeout));
        Ok(Box::new(UpstreamConnection { sender, connection, timer, permit }))
    }

    /// Keeps a connection after its response has been read to the end, if it can be reused.
    pub(super) fn put_idle(self: &Arc<Self>, mut upstream: Box<UpstreamConnection>) {
        if self.limits.max_idle_connections == 0 || !upstream.is_reusable() {
            return;
        }
        let mut idle = self.lock_idle();
        // `close` cancels the token before it clears the pool, so a later insertion sees the cancellation.
        if self.closed.is_cancelled() {
            return;
        }
        // The oldest connection is evicted, regardless of its shard, so that an inactive shard does not occupy the
        // pool.
        let is_full = idle.connections.len() >= self.limits.max_idle_connections;
        let oldest = (is_full && !idle.connections.is_empty()).then(|| idle.connections.remove(0));
        let connection = IdleConnection { upstream, idle_since: Instant::now(), shard: shards::current() };
        idle.connections.push(connection);
        if !std::mem::replace(&mut idle.has_reaper, true) {
            tokio::spawn(reap(Arc::downgrade(self), self.limits.idle_timeout));
        }
        drop(idle);
        drop(oldest);
    }

    fn lock_idle(&self) -> std::sync::MutexGuard<'_, IdleConnections> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdleConnections {
    fn remove_idle(&mut self, shard: Option<usize>) -> Option<Box<UpstreamConnection>> {
        let index = self.connections.iter().rposition(|connection| connection.shard == shard)?;
        Some(self.connections.remove(index).upstream)
    }
}

/// Drops expired connections periodically, until no idle connection is left or the pool is dropped.
async fn reap(pool: Weak<Pool>, idle_timeout: std::time::Duration) {
    loop {
        tokio::time::sleep(idle_timeout / 4).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut idle = pool.lock_idle();
        let expired_count = idle
            .connections
            .iter()
            .take_while(|connection| connection.idle_since.elapsed() >= idle_timeout)
            .count();
        let expired: Vec<_> = idle.connections.drain(..expired_count).collect();
        let is_empty = idle.connections.is_empty();
        idle.has_reaper = !is_empty;
        drop(idle);
        drop(expired);
        if is_empty {
            return;
        }
    }
}

//! Threads that serve connections, each with its own runtime, so that all work for a connection stays on one thread.
//!
//! A proxy's work is short and involves two sockets, client and upstream; a work-stealing runtime would wake another
//! thread for every request. Invariant: everything spawned on a shard, including sockets and timers, is driven there.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

thread_local! {
    static CURRENT_SHARD: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the index of the current thread's shard; `None` if the thread is not a shard.
pub fn current() -> Option<usize> {
    CURRENT_SHARD.get()
}

/// Threads that serve connections; they end when this value is dropped.
pub struct Shards {
    all: Vec<Shard>,
    _stop_on_drop: DropGuard,
}

struct Shard {
    runtime: Handle,
    /// The shard's number of connections.
    load: Arc<AtomicUsize>,
}

impl Shards {
    /// Starts one thread for each available processor.
    ///
    /// # Errors
    /// If a thread or its runtime cannot be created.
    pub fn start() -> io::Result<Self> {
        let count = thread::available_parallelism().map_or(1, usize::from);
        let stop = CancellationToken::new();
        let all = (0..count).map(|index| Shard::start(index, stop.clone())).collect::<io::Result<_>>()?;
        Ok(Self { all, _stop_on_drop: stop.drop_guard() })
    }

    /// Runs a connection on the shard with the fewest connections. The connection counts toward the shard's load until
    /// its guard is dropped. That may be after its future has ended, because another task takes over an upgraded
    /// connection.
    pub fn spawn<F>(&self, connection: impl FnOnce(LoadGuard) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(least_loaded) = self.all.iter().min_by_key(|shard| shard.load.load(Ordering::Relaxed))
        else {
            return;
        };
        least_loaded.runtime.spawn(connection(LoadGuard::acquire(&least_loaded.load)));
    }
}

impl Shard {
    fn start(index: usize, stop: CancellationToken) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        thread::Builder::new().name(format!("shard-{index}")).spawn(move || {
            CURRENT_SHARD.set(Some(index));
            runtime.block_on(stop.cancelled());
        })?;
        Ok(Self { runtime: handle, load: Arc::default() })
    }
}

/// Counts a connection on a shard until dropped.
pub struct LoadGuard(Arc<AtomicUsize>);

impl LoadGuard {
    fn acquire(load: &Arc<AtomicUsize>) -> Self {
        load.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(load))
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn spawn_balances_connections_and_pins_each_to_a_thread() {
        let shards = Shards::start().unwrap();
        let count = shards.all.len();
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let close = CancellationToken::new();
        for _ in 0..count * 2 {
            let (sender, close) = (sender.clone(), close.clone());
            shards.spawn(|load| async move {
                let (shard, thread) = (current(), thread::current().id());
                tokio::time::sleep(Duration::from_millis(5)).await;
                let nested = tokio::spawn(async { (current(), thread::current().id()) }).await.unwrap();
                assert_eq!((shard, thread), nested);
                sender.send(shard).unwrap();
                close.cancelled().await;
                drop(load);
            });
        }
        let used: Vec<_> = (0..count * 2).map(|_| receiver.blocking_recv().unwrap().unwrap()).collect();
        assert_eq!(used.iter().collect::<BTreeSet<_>>().len(), count);
        assert!(shards.all.iter().all(|shard| shard.load.load(Ordering::Relaxed) == 2));
        close.cancel();
        drop(sender);
        assert_eq!(receiver.blocking_recv(), None, "a connection has not ended");
        assert_eq!(current(), None);
    }
}

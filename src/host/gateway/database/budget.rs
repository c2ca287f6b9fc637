//! The limit on the connections of all apps together, and how an app without a connection gets one when all are in use.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::pool::Pool;

/// Interval between attempts to free a permit while a request waits for one.
const RETIRE_INTERVAL: Duration = Duration::from_millis(50);

/// The connection limit shared by all pools.
pub struct ConnectionBudget {
    permits: Arc<Semaphore>,
    pools: Mutex<Vec<Weak<Pool>>>,
}

pub type ConnectionPermit = OwnedSemaphorePermit;

impl ConnectionBudget {
    pub fn new(connections: usize) -> Arc<Self> {
        Arc::new(Self { permits: Arc::new(Semaphore::new(connections)), pools: Mutex::default() })
    }

    /// Registers a pool, so that it can be made to close a connection.
    pub fn register(&self, pool: &Arc<Pool>) {
        self.pools().push(Arc::downgrade(pool));
    }

    /// Returns a permit if one is available.
    pub fn try_acquire(&self) -> Option<ConnectionPermit> {
        self.permits.clone().try_acquire_owned().ok()
    }

    /// Waits for a permit. While none is available, connections are retired one at a time, each from the pool that then
    /// has the most retirable ones. The result is never `None`, because the semaphore is never closed.
    pub async fn acquire(&self) -> Option<ConnectionPermit> {
        if let Some(permit) = self.try_acquire() {
            return Some(permit);
        }
        let mut waiting = pin!(self.permits.clone().acquire_owned());
        loop {
            self.retire_connection();
            // All permits may belong to connections that are being opened; these can be retired in a later iteration.
            if let Ok(permit) = tokio::time::timeout(RETIRE_INTERVAL, &mut waiting).await {
                return permit.ok();
            }
        }
    }

    fn retire_connection(&self) {
        let candidate = {
            let mut pools = self.pools();
            pools.retain(|pool| pool.strong_count() > 0);
            // Ties go to the least recently used pool.
            let usage = pools.iter().filter_map(Weak::upgrade).map(|pool| (pool.usage(), pool));
            usage
                .filter(|(usage, _)| usage.retirable > 0)
                .max_by_key(|(usage, _)| (usage.retirable, std::cmp::Reverse(usage.last_used_ms)))
                .map(|(_, pool)| pool)
        };
        if let Some(pool) = candidate {
            pool.retire_connection();
        }
    }

    fn pools(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Pool>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

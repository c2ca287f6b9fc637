//! How many connections all apps together may hold, and how an app without one gets one when all are taken.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::pool::Pool;

const ASK_EACH: Duration = Duration::from_millis(50);

/// The connections that all pools share.
pub struct Budget {
    places: Arc<Semaphore>,
    pools: Mutex<Vec<Weak<Pool>>>,
}

/// The right to one connection.
pub type Place = OwnedSemaphorePermit;

impl Budget {
    pub fn new(connections: usize) -> Arc<Self> {
        Arc::new(Self { places: Arc::new(Semaphore::new(connections)), pools: Mutex::default() })
    }

    /// Makes a pool one of those that may be asked to give a connection back.
    pub fn join(&self, pool: &Arc<Pool>) {
        self.pools().push(Arc::downgrade(pool));
    }

    /// A place, if one is free.
    pub fn spare(&self) -> Option<Place> {
        self.places.clone().try_acquire_owned().ok()
    }

    /// A place; when none is free, the pool that holds the most gives one up. `None` never comes while the gateway runs.
    pub async fn place(&self) -> Option<Place> {
        if let Some(place) = self.spare() {
            return Some(place);
        }
        let mut waiting = pin!(self.places.clone().acquire_owned());
        loop {
            self.retire_one();
            // Places may be held for connections that are only being made: those can be asked for a little later.
            if let Ok(place) = tokio::time::timeout(ASK_EACH, &mut waiting).await {
                return place.ok();
            }
        }
    }

    fn retire_one(&self) {
        let richest = {
            let mut pools = self.pools();
            pools.retain(|pool| pool.strong_count() > 0);
            // Among equals the one that was used longest ago.
            let holding = pools.iter().filter_map(Weak::upgrade).map(|pool| (pool.holding(), pool));
            holding
                .filter(|(holding, _)| holding.spare > 0)
                .max_by_key(|(holding, _)| (holding.spare, std::cmp::Reverse(holding.last_used)))
                .map(|(_, pool)| pool)
        };
        if let Some(pool) = richest {
            pool.retire_one();
        }
    }

    fn pools(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Pool>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

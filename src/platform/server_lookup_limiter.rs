//! Limits how often heartbeats trigger provider lookups of a machine's server: all machines share the provider's rate
//! limit, and a host can send any number of heartbeats.
//!
//! Each process enforces its own limit, in bounded memory.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use svc_machine::id::MachineId;

/// Maximum number of machines that one process remembers. When it is reached, lookups for other machines are refused
/// until a remembered machine's interval has passed.
const MAX_MACHINES: usize = 4096;

#[derive(Debug)]
pub struct ServerLookupLimiter {
    interval: Duration,
    last_lookups: Mutex<HashMap<MachineId, Instant>>,
}

impl ServerLookupLimiter {
    pub fn new(interval: Duration) -> Self {
        Self { interval, last_lookups: Mutex::default() }
    }

    /// Claims a lookup of this machine's server, and returns whether the claim succeeded. The next claim for the
    /// machine succeeds only after the interval.
    pub fn claim_lookup(&self, machine: MachineId) -> bool {
        self.claim_lookup_at(machine, Instant::now())
    }

    fn claim_lookup_at(&self, machine: MachineId, now: Instant) -> bool {
        let mut last_lookups = self.last_lookups.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = |last: &Instant| now.saturating_duration_since(*last) < self.interval;
        if last_lookups.get(&machine).is_some_and(is_recent) {
            return false;
        }
        if last_lookups.len() >= MAX_MACHINES {
            last_lookups.retain(|_, last| is_recent(last));
        }
        if last_lookups.len() >= MAX_MACHINES {
            return false;
        }
        last_lookups.insert(machine, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn lookup_is_allowed_once_per_machine_and_interval() {
        let (limiter, machine, start) = (ServerLookupLimiter::new(MINUTE), MachineId::new(), Instant::now());
        assert!(limiter.claim_lookup_at(machine, start));
        assert!(!limiter.claim_lookup_at(machine, start + MINUTE / 2));
        assert!(limiter.claim_lookup_at(MachineId::new(), start + MINUTE / 2), "another machine");
        assert!(limiter.claim_lookup_at(machine, start + MINUTE));
        assert!(!limiter.claim_lookup_at(machine, start + MINUTE));
    }

    #[test]
    fn remembered_machines_are_bounded_and_expired_ones_are_removed() {
        let (limiter, start) = (ServerLookupLimiter::new(MINUTE), Instant::now());
        for _ in 0..MAX_MACHINES {
            assert!(limiter.claim_lookup_at(MachineId::new(), start));
        }
        assert!(!limiter.claim_lookup_at(MachineId::new(), start));
        assert!(limiter.claim_lookup_at(MachineId::new(), start + MINUTE));
        assert_eq!(limiter.last_lookups.lock().unwrap().len(), 1);
    }
}

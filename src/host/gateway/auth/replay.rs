//! Replay protection: remembers the ids of single-use proofs until they expire.
//!
//! Memory is bounded: once the cache is full of unexpired ids, new ids are rejected rather than evicting old ones.

use std::collections::HashMap;

/// Maximum number of remembered ids.
const MAX_IDS: usize = 8192;
/// Longer ids are rejected; genuine ids are shorter.
const MAX_ID_BYTES: usize = 128;

#[derive(Debug, Default)]
pub struct ReplayCache {
    expires_at: HashMap<String, i64>,
}

/// Result of a replay check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayCheck {
    Accepted,
    /// The id was already recorded.
    Replayed,
    /// The id is empty or too long.
    InvalidId,
    /// The cache is full of unexpired ids.
    Full,
}

impl ReplayCache {
    /// Records `id`, valid until `expires_at`, at time `now`. Times are in Unix seconds.
    pub fn record(&mut self, id: &str, expires_at: i64, now: i64) -> ReplayCheck {
        if id.is_empty() || id.len() > MAX_ID_BYTES {
            return ReplayCheck::InvalidId;
        }
        if self.expires_at.contains_key(id) {
            return ReplayCheck::Replayed;
        }
        if self.expires_at.len() >= MAX_IDS {
            self.expires_at.retain(|_, expires_at| *expires_at >= now);
            if self.expires_at.len() >= MAX_IDS {
                return ReplayCheck::Full;
            }
        }
        self.expires_at.insert(id.to_owned(), expires_at);
        ReplayCheck::Accepted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_rejects_repeated_and_invalid_ids() {
        let mut cache = ReplayCache::default();
        assert_eq!(cache.record("a", 10, 0), ReplayCheck::Accepted);
        assert_eq!(cache.record("a", 10, 0), ReplayCheck::Replayed);
        assert_eq!(cache.record("", 10, 0), ReplayCheck::InvalidId);
        assert_eq!(cache.record(&"x".repeat(129), 10, 0), ReplayCheck::InvalidId);
    }

    #[test]
    fn full_cache_rejects_new_ids_and_keeps_unexpired_ids() {
        let mut cache = ReplayCache::default();
        for n in 0..MAX_IDS {
            assert_eq!(cache.record(&n.to_string(), 10, 0), ReplayCheck::Accepted);
        }
        assert_eq!(cache.record("more", 10, 5), ReplayCheck::Full);
        assert_eq!(cache.record("0", 10, 5), ReplayCheck::Replayed);
        assert_eq!(cache.record("more", 30, 11), ReplayCheck::Accepted, "expired ids were not evicted");
    }
}

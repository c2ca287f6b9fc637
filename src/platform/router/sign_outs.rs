//! Users who have signed out lately, and the streams of those who have not: a sign-out ends app tokens from before it,
//! and closes what the user's browsers have open.
//!
//! The watcher tells of sign-outs in other processes. Invariant: a stream that was registered before a sign-out was
//! taken is closed by it; one that is registered later is checked again by its opener.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::app_token;

use crate::machine::name::IdpUserId;

/// Longer than any app token is believed, whatever the clocks say.
pub const SIGN_OUTS_KEPT: Duration = app_token::LONGEST_LIFE.saturating_mul(2);
/// Users, below which nobody looks for those of whom nothing is needed any more.
const MIN_SWEEP: usize = 1024;

#[derive(Default)]
pub(super) struct SignOuts {
    last: RwLock<HashMap<IdpUserId, SignOut>>,
    streams: Mutex<Streams>,
}

/// A user's last one.
#[derive(Debug, Clone, Copy)]
struct SignOut {
    generation: i64,
    at: Instant,
}

#[derive(Default)]
struct Streams {
    of_users: HashMap<IdpUserId, Weak<CancellationToken>>,
    /// How many there may be until the next sweep.
    sweep_at: usize,
}

impl SignOuts {
    /// The number of the user's last sign-out, for a new token; 0 where there was none for long.
    pub(super) fn generation(&self, user: &IdpUserId) -> i64 {
        self.within(user, SIGN_OUTS_KEPT)
    }

    /// The least number that a token of this user must have. All tokens from before an older sign-out have ended by
    /// themselves, and a process that started since may not know of it: it counts for nobody.
    pub(super) fn required(&self, user: &IdpUserId) -> i64 {
        self.within(user, app_token::LONGEST_LIFE)
    }

    fn within(&self, user: &IdpUserId, longest: Duration) -> i64 {
        let last = self.last.read().unwrap_or_else(PoisonError::into_inner);
        last.get(user).filter(|last| last.at.elapsed() < longest).map_or(0, |last| last.generation)
    }

    /// A sign-out of so long ago; the same one again changes nothing.
    pub(super) fn take(&self, user: &IdpUserId, generation: i64, age: Duration) {
        let now = Instant::now();
        let at = now.checked_sub(age).unwrap_or(now);
        let mut last = self.last.write().unwrap_or_else(PoisonError::into_inner);
        if last.get(user).is_some_and(|known| known.generation >= generation) {
            return;
        }
        if last.len() >= MIN_SWEEP {
            last.retain(|_, known| known.at.elapsed() < SIGN_OUTS_KEPT);
        }
        last.insert(user.clone(), SignOut { generation, at });
        drop(last);
        self.close(user);
    }

    /// Closes the user's streams.
    pub(super) fn close(&self, user: &IdpUserId) {
        let streams = self.streams().of_users.remove(user);
        if let Some(streams) = streams.and_then(|streams| streams.upgrade()) {
            streams.cancel();
        }
    }

    /// Cancelled at the user's next sign-out. To be held for as long as the stream is open.
    pub(super) fn register(&self, user: &IdpUserId) -> Arc<CancellationToken> {
        let mut streams = self.streams();
        if let Some(token) = streams.of_users.get(user).and_then(Weak::upgrade) {
            return token;
        }
        if streams.of_users.len() >= streams.sweep_at.max(MIN_SWEEP) {
            streams.of_users.retain(|_, token| token.strong_count() > 0);
            streams.sweep_at = streams.of_users.len() * 2;
        }
        let token = Arc::new(CancellationToken::new());
        streams.of_users.insert(user.clone(), Arc::downgrade(&token));
        token
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str) -> IdpUserId {
        name.parse().unwrap()
    }

    #[test]
    fn a_sign_out_closes_the_users_streams_and_nobody_elses() {
        let all = SignOuts::default();
        let (ada, bob) = (all.register(&user("ada")), all.register(&user("bob")));
        let again = all.register(&user("ada"));
        all.take(&user("ada"), 7, Duration::ZERO);
        assert!(ada.is_cancelled() && again.is_cancelled() && !bob.is_cancelled());
        assert_eq!((all.generation(&user("ada")), all.generation(&user("bob"))), (7, 0));
        // The watcher tells of it several times.
        let later = all.register(&user("ada"));
        all.take(&user("ada"), 7, Duration::ZERO);
        all.take(&user("ada"), 3, Duration::ZERO);
        assert!(!later.is_cancelled());
        all.take(&user("ada"), 8, Duration::ZERO);
        assert!(later.is_cancelled());
    }

    /// Two processes of which one has started since, and another has not.
    #[test]
    fn a_sign_out_of_long_ago_asks_nothing_of_a_token() {
        let (old, new, ada) = (SignOuts::default(), SignOuts::default(), user("ada"));
        old.take(&ada, 7, app_token::LONGEST_LIFE + Duration::from_secs(1));
        assert!(old.required(&ada) <= new.generation(&ada), "a token of the new one holds at the old one");
        assert!(new.required(&ada) <= old.generation(&ada));
        let (recent, late) = (SignOuts::default(), Duration::from_secs(60));
        recent.take(&ada, 7, app_token::LONGEST_LIFE.saturating_sub(late));
        assert_eq!((recent.required(&ada), recent.generation(&ada)), (7, 7));
    }

    #[test]
    fn users_whose_streams_have_ended_are_forgotten() {
        let all = SignOuts::default();
        let open = all.register(&user("open"));
        for n in 0..10 * MIN_SWEEP {
            drop(all.register(&user(&format!("user_{n}"))));
        }
        assert!(all.streams().of_users.len() <= 2 * MIN_SWEEP);
        all.take(&user("open"), 1, Duration::ZERO);
        assert!(open.is_cancelled());
    }
}

//! Records recent sign-outs and each user's open streams. A sign-out invalidates the user's older app tokens and closes
//! the user's streams. Ending a session by switching its browser to another account also counts as a sign-out.
//!
//! The watcher also records other processes' sign-outs. Invariant: a sign-out closes every stream that was registered
//! before it. After registering a stream, the caller checks that no sign-out has happened in the meantime.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::signed_lifetimes::{MAX_APP_TOKEN_LIFETIME, SIGN_OUT_TTL};
use svc_machine::name::IdpUserId;

/// Minimum number of users at which a map is swept.
const MIN_SWEEP_USERS: usize = 1024;

/// The sign-outs that this process has recorded, and the users' open streams.
#[derive(Default)]
pub(super) struct SignOuts {
    last: RwLock<UserMap<SignOut>>,
    streams: Mutex<UserMap<Weak<CancellationToken>>>,
}

/// A user's last sign-out.
#[derive(Debug, Clone, Copy)]
struct SignOut {
    generation: i64,
    signed_out_at: Instant,
}

/// A map of users to values that expire. It is swept whenever its size has doubled, so that an insertion takes
/// amortized constant time.
struct UserMap<T> {
    by_id: HashMap<IdpUserId, T>,
    sweep_threshold: usize,
}

impl<T> Default for UserMap<T> {
    fn default() -> Self {
        Self { by_id: HashMap::new(), sweep_threshold: MIN_SWEEP_USERS }
    }
}

impl<T> UserMap<T> {
    fn insert(&mut self, user: &IdpUserId, value: T, is_current: impl Fn(&T) -> bool) {
        if self.by_id.len() >= self.sweep_threshold {
            self.by_id.retain(|_, value| is_current(value));
            self.sweep_threshold = MIN_SWEEP_USERS.max(self.by_id.len() * 2);
        }
        self.by_id.insert(user.clone(), value);
    }
}

impl SignOuts {
    /// Returns the generation of the user's last sign-out, for a new token; 0 if there was no recent sign-out.
    pub(super) fn generation(&self, user: &IdpUserId) -> i64 {
        self.generation_within(user, SIGN_OUT_TTL)
    }

    /// Returns the minimum generation of this user's valid tokens. A sign-out that is older than every valid token is
    /// not enforced: a process that started later may not have loaded it, and would then issue tokens with a lower
    /// generation.
    pub(super) fn required_generation(&self, user: &IdpUserId) -> i64 {
        self.generation_within(user, MAX_APP_TOKEN_LIFETIME)
    }

    fn generation_within(&self, user: &IdpUserId, max_age: Duration) -> i64 {
        let last = self.last.read().unwrap_or_else(PoisonError::into_inner);
        last.by_id
            .get(user)
            .filter(|sign_out| sign_out.signed_out_at.elapsed() < max_age)
            .map_or(0, |sign_out| sign_out.generation)
    }

    /// Records a sign-out that happened `age` ago, and closes the user's streams. Does nothing if this sign-out or a
    /// later one has been recorded.
    pub(super) fn record_sign_out(&self, user: &IdpUserId, generation: i64, age: Duration) {
        let now = Instant::now();
        let signed_out_at = now.checked_sub(age).unwrap_or(now);
        let mut last = self.last.write().unwrap_or_else(PoisonError::into_inner);
        if last.by_id.get(user).is_some_and(|recorded| recorded.generation >= generation) {
            return;
        }
        last.insert(user, SignOut { generation, signed_out_at }, |recorded| {
            recorded.signed_out_at.elapsed() < SIGN_OUT_TTL
        });
        drop(last);
        self.close_streams(user);
    }

    pub(super) fn close_streams(&self, user: &IdpUserId) {
        let streams = self.lock_streams().by_id.remove(user);
        if let Some(streams) = streams.and_then(|streams| streams.upgrade()) {
            streams.cancel();
        }
    }

    /// Returns a token that is cancelled when the user's streams are closed. The caller must hold it while the stream
    /// is open: this registry has only a weak reference.
    pub(super) fn register_stream(&self, user: &IdpUserId) -> Arc<CancellationToken> {
        let mut streams = self.lock_streams();
        if let Some(token) = streams.by_id.get(user).and_then(Weak::upgrade) {
            return token;
        }
        let token = Arc::new(CancellationToken::new());
        streams.insert(user, Arc::downgrade(&token), |token| token.strong_count() > 0);
        token
    }

    fn lock_streams(&self) -> MutexGuard<'_, UserMap<Weak<CancellationToken>>> {
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
    fn sign_out_closes_only_streams_of_its_user() {
        let sign_outs = SignOuts::default();
        let (ada, bob) = (sign_outs.register_stream(&user("ada")), sign_outs.register_stream(&user("bob")));
        let again = sign_outs.register_stream(&user("ada"));
        sign_outs.record_sign_out(&user("ada"), 7, Duration::ZERO);
        assert!(ada.is_cancelled() && again.is_cancelled() && !bob.is_cancelled());
        assert_eq!((sign_outs.generation(&user("ada")), sign_outs.generation(&user("bob"))), (7, 0));
        // The watcher reports each sign-out several times; only a new generation closes streams.
        let later = sign_outs.register_stream(&user("ada"));
        sign_outs.record_sign_out(&user("ada"), 7, Duration::ZERO);
        sign_outs.record_sign_out(&user("ada"), 3, Duration::ZERO);
        assert!(!later.is_cancelled());
        sign_outs.record_sign_out(&user("ada"), 8, Duration::ZERO);
        assert!(later.is_cancelled());
    }

    /// One process has loaded the sign-out, and the other, which started later, has not.
    #[test]
    fn old_sign_out_is_not_enforced() {
        let (old, new, ada) = (SignOuts::default(), SignOuts::default(), user("ada"));
        old.record_sign_out(&ada, 7, MAX_APP_TOKEN_LIFETIME + Duration::from_secs(1));
        assert!(
            old.required_generation(&ada) <= new.generation(&ada),
            "the old process accepts tokens from the new one"
        );
        assert!(new.required_generation(&ada) <= old.generation(&ada));
        let recent = SignOuts::default();
        recent.record_sign_out(&ada, 7, MAX_APP_TOKEN_LIFETIME.saturating_sub(Duration::from_secs(60)));
        assert_eq!((recent.required_generation(&ada), recent.generation(&ada)), (7, 7));
    }

    #[test]
    fn users_without_open_streams_are_swept() {
        let sign_outs = SignOuts::default();
        let open = sign_outs.register_stream(&user("open"));
        for n in 0..10 * MIN_SWEEP_USERS {
            drop(sign_outs.register_stream(&user(&format!("user_{n}"))));
        }
        assert!(sign_outs.lock_streams().by_id.len() <= 2 * MIN_SWEEP_USERS);
        sign_outs.record_sign_out(&user("open"), 1, Duration::ZERO);
        assert!(open.is_cancelled());
    }

    #[test]
    fn recording_many_sign_outs_takes_linear_time() {
        let sign_outs = SignOuts::default();
        // If each call scanned all users, this would take minutes.
        for n in 0..200_000 {
            sign_outs.record_sign_out(&user(&format!("user_{n}")), n, Duration::ZERO);
        }
        assert_eq!(sign_outs.generation(&user("user_7")), 7);
    }
}

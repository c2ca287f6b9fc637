//! Who asks: the identity provider's token, or the platform's own session that was opened after one.
//!
//! A bearer token that is not believed is a refusal, never a fall-through. A cookie of the provider that is not
//! believed is as good as none: browsers keep sending expired ones.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::header::{AUTHORIZATION, HeaderMap};
use jiff::Timestamp;

use super::cookie::{self, RouterCookie};
use super::serve::Visit;
use super::session::{Hash, Session, SessionError, Sessions, hash};
use crate::http::addresses::network;
use crate::http::jwt::{JwtError, LEEWAY_SECONDS, Subject, Verifier};
use crate::http::rate::RateLimit;
use crate::machine::name::{IdpUserId, Slot};

/// A believed token is checked again after this, against the keys of then.
const BELIEVED_FOR: Duration = Duration::from_secs(60);
/// A refused one, which a browser may send with each request.
const REFUSED_FOR: Duration = Duration::from_secs(5);
const MOST_KEPT: usize = 20_000;
const CHECK_BURST_SECONDS: u32 = 10;

/// Who asks, and by what credential.
pub(super) enum Identity {
    Session(Arc<Session>),
    /// A session, where the provider's cookie names another user. The session counts until the person decides, because
    /// that cookie may have been planted.
    Disputed(Arc<Session>, Arc<Subject>),
    /// The provider's cookie, on a browser that has no session for this user yet.
    Cookie(Arc<Subject>),
    Bearer(Arc<Subject>),
}

impl Identity {
    pub(super) fn user(&self) -> &IdpUserId {
        match self {
            Self::Session(session) | Self::Disputed(session, _) => &session.user,
            Self::Cookie(subject) | Self::Bearer(subject) => &subject.user,
        }
    }

    pub(super) fn slot(&self) -> Option<&Slot> {
        self.session()?.slot.as_ref()
    }

    pub(super) fn session(&self) -> Option<&Arc<Session>> {
        match self {
            Self::Session(session) | Self::Disputed(session, _) => Some(session),
            Self::Cookie(_) | Self::Bearer(_) => None,
        }
    }
}

/// Why nobody is let in by this request.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("the bearer token is not accepted: {0}")]
    Bearer(JwtError),
    #[error("the identity provider's keys cannot be fetched")]
    NoKeys,
    #[error("sessions cannot be looked up")]
    Sessions(#[from] SessionError),
    #[error("too many unverified credentials from this address")]
    TooMany(Duration),
}

pub(super) struct Gate {
    verifier: Verifier,
    sessions: Arc<Sessions>,
    checked: Mutex<HashMap<Hash, Checked>>,
    checks: RateLimit<IpAddr>,
}

/// A token's verdict, kept by its hash.
struct Checked {
    subject: Option<Arc<Subject>>,
    until: Instant,
}

impl Gate {
    /// `check_rate`: credentials that are not in memory, of each address, each second.
    pub(super) fn new(verifier: Verifier, sessions: Arc<Sessions>, check_rate: u32) -> Self {
        let checks = RateLimit::new(check_rate, CHECK_BURST_SECONDS);
        Self { verifier, sessions, checked: Mutex::default(), checks }
    }

    /// # Errors
    /// A refusal; `None` is a request without any credential.
    pub(super) async fn identify(
        &self,
        visit: &Visit,
        headers: &HeaderMap,
    ) -> Result<Option<Identity>, Refusal> {
        let now = visit.now;
        if let Some(token) = bearer(headers) {
            return match self.check(visit, token).await? {
                Ok(subject) => Ok(Some(Identity::Bearer(subject))),
                Err(JwtError::NoKeys) => Err(Refusal::NoKeys),
                Err(error) => Err(Refusal::Bearer(error)),
            };
        }
        let found = match RouterCookie::Session(visit.door).get(headers, visit.scheme) {
            Some(token) => self.sessions.find(visit.door, token, now).await,
            None => Ok(None),
        };
        let token = cookie::provider_token(headers);
        // Without the database, the provider's cookie still proves who asks.
        let (session, failure) = match found {
            Ok(session) => (session, None),
            Err(error) => (None, Some(error)),
        };
        match (session, token) {
            (None, None) => failure.map_or(Ok(None), |error| Err(error.into())),
            (Some(session), None) => Ok(Some(Identity::Session(session))),
            // A request with a session does not wait for the provider's keys.
            (Some(session), Some(token)) => match self.check_with_known_keys(visit, token) {
                Ok(subject) if subject.user != session.user => Ok(Some(Identity::Disputed(session, subject))),
                _ => Ok(Some(Identity::Session(session))),
            },
            (None, Some(token)) => match self.check(visit, token).await? {
                Ok(subject) => Ok(Some(Identity::Cookie(subject))),
                Err(JwtError::NoKeys) => Err(Refusal::NoKeys),
                Err(_) => failure.map_or(Ok(None), |error| Err(error.into())),
            },
        }
    }

    /// Counts a credential of this address that has to be verified.
    pub(super) fn admit_check(&self, visit: &Visit) -> Result<(), Refusal> {
        let Some(address) = visit.client else { return Ok(()) };
        self.checks.check(&network(address)).map_err(Refusal::TooMany)
    }

    /// The verdict on a token, unless its address had too many verified.
    async fn check(&self, visit: &Visit, token: &str) -> Result<Result<Arc<Subject>, JwtError>, Refusal> {
        let hash = hash(token.as_bytes());
        if let Some(verdict) = self.checked_before(&hash) {
            return Ok(verdict);
        }
        self.admit_check(visit)?;
        // In a box: it is once a minute, and every request's future would have room for it.
        let verdict = Box::pin(self.verifier.verify(token, visit.now)).await;
        Ok(self.remember(hash, verdict, visit.now))
    }

    fn check_with_known_keys(&self, visit: &Visit, token: &str) -> Result<Arc<Subject>, JwtError> {
        let hash = hash(token.as_bytes());
        if let Some(verdict) = self.checked_before(&hash) {
            return verdict;
        }
        self.admit_check(visit).map_err(|_| JwtError::Refused)?;
        self.remember(hash, self.verifier.verify_with_known_keys(token, visit.now), visit.now)
    }

    fn checked_before(&self, hash: &Hash) -> Option<Result<Arc<Subject>, JwtError>> {
        let checked = self.checked();
        let known = checked.get(hash).filter(|known| known.until > Instant::now())?;
        Some(known.subject.clone().ok_or(JwtError::Refused))
    }

    fn remember(
        &self,
        hash: Hash,
        verdict: Result<Subject, JwtError>,
        now: Timestamp,
    ) -> Result<Arc<Subject>, JwtError> {
        let verdict = verdict.map(Arc::new);
        let (subject, lasts) = match &verdict {
            Ok(subject) => {
                let left = (subject.expires_at + LEEWAY_SECONDS).saturating_sub(now.as_second());
                let left = Duration::from_secs(u64::try_from(left).unwrap_or_default());
                (Some(Arc::clone(subject)), left.min(BELIEVED_FOR))
            }
            Err(JwtError::NoKeys) => return verdict,
            Err(_) => (None, REFUSED_FOR),
        };
        let mut checked = self.checked();
        if checked.len() >= MOST_KEPT {
            checked.clear();
        }
        checked.insert(hash, Checked { subject, until: Instant::now() + lasts });
        verdict
    }

    fn checked(&self) -> MutexGuard<'_, HashMap<Hash, Checked>> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The token of an `Authorization: Bearer` (RFC 6750); other schemes are not ours.
pub(super) fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get_all(AUTHORIZATION).iter().find_map(|value| {
        let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    })
}

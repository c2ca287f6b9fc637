//! Identifies the caller by the identity provider's token, or by a platform session that was opened with such a token.
//!
//! A request with an invalid bearer token is rejected. An invalid provider cookie is ignored, because browsers keep
//! sending the cookie after the token in it has expired.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::header::{AUTHORIZATION, HeaderMap};
use jiff::Timestamp;

use super::cookie::{self, RouterCookie};
use super::request_context::RequestContext;
use super::session::{Session, SessionError, Sessions};
use super::session_token::{TokenHash, sha256};
use svc_http::address_limit::client_network;
use svc_http::jwt::{JwtError, LEEWAY_SECONDS, Subject, Verifier};
use svc_http::rate_limit::RateLimit;
use svc_machine::name::{IdpUserId, Slot};

/// Maximum time for which an accepted token is cached before it is verified again with the current keys.
const ACCEPTED_TTL: Duration = Duration::from_secs(60);
/// How long a rejection is cached. A browser may send the same invalid token with every request.
const REJECTED_TTL: Duration = Duration::from_secs(5);
const MAX_CACHED_VERDICTS: usize = 20_000;
/// Burst of the check limit, in seconds of the sustained rate.
const CHECK_BURST_SECONDS: u32 = 10;

/// The caller, by the kind of credential.
pub(super) enum Identity {
    Session(Arc<Session>),
    /// A session, while the provider's cookie belongs to a different user. The session takes precedence until the
    /// user chooses an account, because an attacker may have set the cookie.
    Disputed(Arc<Session>, Arc<Subject>),
    /// The provider's cookie. The browser has no session, or its session belongs to the same user and cannot be looked
    /// up because the database is unavailable.
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

/// The reason a request is not authenticated.
#[derive(Debug, thiserror::Error)]
pub(super) enum AuthError {
    #[error("invalid bearer token: {0}")]
    Bearer(JwtError),
    #[error("cannot fetch the identity provider's keys")]
    NoKeys,
    #[error("cannot look up sessions")]
    Sessions(#[from] SessionError),
    #[error("too many credential checks from this address")]
    RateLimited { retry_after: Duration },
}

pub(super) struct Authenticator {
    verifier: Verifier,
    sessions: Arc<Sessions>,
    cache: Mutex<HashMap<TokenHash, CachedVerdict>>,
    checks: RateLimit<IpAddr>,
}

/// The cached result of a token's verification.
struct CachedVerdict {
    subject: Option<Arc<Subject>>,
    expires_at: Instant,
}

impl Authenticator {
    /// Creates an authenticator. `check_rate` is the maximum number of uncached credentials verified per client address
    /// per second.
    pub(super) fn new(verifier: Verifier, sessions: Arc<Sessions>, check_rate: u32) -> Self {
        let checks = RateLimit::new(check_rate, CHECK_BURST_SECONDS);
        Self { verifier, sessions, cache: Mutex::default(), checks }
    }

    /// Identifies the caller; `None` if the request has no valid session or token.
    ///
    /// # Errors
    /// [`AuthError::Bearer`] if the bearer token is invalid, [`AuthError::RateLimited`] if the client address has
    /// exceeded its limit, [`AuthError::NoKeys`] if the provider's keys are needed but unavailable, and
    /// [`AuthError::Sessions`] if the session cannot be looked up and the provider's cookie does not identify its user.
    pub(super) async fn identify(
        &self,
        context: &RequestContext,
        headers: &HeaderMap,
    ) -> Result<Option<Identity>, AuthError> {
        let now = context.now;
        if let Some(token) = bearer_token(headers) {
            return match self.check_token(context, token).await? {
                Ok(subject) => Ok(Some(Identity::Bearer(subject))),
                Err(JwtError::NoKeys) => Err(AuthError::NoKeys),
                Err(error) => Err(AuthError::Bearer(error)),
            };
        }
        let session_token = RouterCookie::Session(context.host).get(headers, context.scheme);
        let lookup = match session_token {
            Some(token) => self.sessions.find(context.host, token, now).await,
            None => Ok(None),
        };
        let provider_token = cookie::provider_token(headers);
        // If the session cannot be looked up, the provider's cookie still identifies the caller, unless the session may
        // belong to another user: that session would take precedence.
        let (session, failure) = match lookup {
            Ok(session) => (session, None),
            Err(error) => (None, Some(error)),
        };
        match (session, provider_token) {
            (None, None) => failure.map_or(Ok(None), |error| Err(error.into())),
            (Some(session), None) => Ok(Some(Identity::Session(session))),
            // A request with a session does not wait for the provider's keys.
            (Some(session), Some(token)) => match self.check_with_cached_keys(context, token) {
                Ok(subject) if subject.user != session.user => Ok(Some(Identity::Disputed(session, subject))),
                _ => Ok(Some(Identity::Session(session))),
            },
            (None, Some(token)) => match self.check_token(context, token).await? {
                Ok(subject) => match (failure, session_token) {
                    (Some(error), Some(session_token))
                        if !self.sessions.is_issued_to(context.host, session_token, &subject.user) =>
                    {
                        Err(error.into())
                    }
                    _ => Ok(Some(Identity::Cookie(subject))),
                },
                Err(JwtError::NoKeys) => Err(AuthError::NoKeys),
                Err(_) => failure.map_or(Ok(None), |error| Err(error.into())),
            },
        }
    }

    /// Counts a credential check against the client address's limit.
    pub(super) fn admit_check(&self, context: &RequestContext) -> Result<(), AuthError> {
        let Some(address) = context.client_address else { return Ok(()) };
        self.checks
            .check(&client_network(address))
            .map_err(|retry_after| AuthError::RateLimited { retry_after })
    }

    /// Verifies a token or returns its cached verdict. A verification counts against the client address's limit.
    async fn check_token(
        &self,
        context: &RequestContext,
        token: &str,
    ) -> Result<Result<Arc<Subject>, JwtError>, AuthError> {
        let hash = sha256(token.as_bytes());
        if let Some(verdict) = self.cached_verdict(&hash) {
            return Ok(verdict);
        }
        self.admit_check(context)?;
        // Boxed: most requests hit the cache, but the unboxed future would enlarge every request's future.
        let verdict = Box::pin(self.verifier.verify(token, context.now)).await;
        Ok(self.cache_verdict(hash, verdict, context.now))
    }

    /// Like [`Self::check_token`], but never fetches the provider's keys, and rejects the token if the client address
    /// has exceeded its limit.
    fn check_with_cached_keys(
        &self,
        context: &RequestContext,
        token: &str,
    ) -> Result<Arc<Subject>, JwtError> {
        let hash = sha256(token.as_bytes());
        if let Some(verdict) = self.cached_verdict(&hash) {
            return verdict;
        }
        self.admit_check(context).map_err(|_| JwtError::RefusedWithoutCheck)?;
        self.cache_verdict(hash, self.verifier.verify_with_cached_keys(token, context.now), context.now)
    }

    fn cached_verdict(&self, hash: &TokenHash) -> Option<Result<Arc<Subject>, JwtError>> {
        let cache = self.lock_cache();
        let cached = cache.get(hash).filter(|cached| cached.expires_at > Instant::now())?;
        Some(cached.subject.clone().ok_or(JwtError::RefusedWithoutCheck))
    }

    fn cache_verdict(
        &self,
        hash: TokenHash,
        verdict: Result<Subject, JwtError>,
        now: Timestamp,
    ) -> Result<Arc<Subject>, JwtError> {
        let verdict = verdict.map(Arc::new);
        let (subject, ttl) = match &verdict {
            Ok(subject) => {
                let remaining = (subject.expires_at + LEEWAY_SECONDS).saturating_sub(now.as_second());
                let remaining = Duration::from_secs(u64::try_from(remaining).unwrap_or_default());
                (Some(Arc::clone(subject)), remaining.min(ACCEPTED_TTL))
            }
            Err(JwtError::NoKeys) => return verdict,
            Err(_) => (None, REJECTED_TTL),
        };
        let mut cache = self.lock_cache();
        if cache.len() >= MAX_CACHED_VERDICTS {
            cache.clear();
        }
        cache.insert(hash, CachedVerdict { subject, expires_at: Instant::now() + ttl });
        verdict
    }

    fn lock_cache(&self) -> MutexGuard<'_, HashMap<TokenHash, CachedVerdict>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the token from `Authorization: Bearer` (RFC 6750); other schemes are ignored. A token that is missing or not
/// UTF-8 is returned as an empty string, so that it is rejected like any other invalid token.
pub(super) fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    headers.get_all(AUTHORIZATION).iter().find_map(|value| {
        let value = value.as_bytes();
        let scheme_end = value.iter().position(|byte| *byte == b' ').unwrap_or(value.len());
        let (scheme, token) = value.split_at(scheme_end);
        scheme.eq_ignore_ascii_case(b"bearer").then(|| std::str::from_utf8(token).unwrap_or_default().trim())
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn bearer_token_is_empty_if_malformed() {
        let cases: [(&[u8], Option<&str>); 8] = [
            (b"Bearer a.b.c", Some("a.b.c")),
            (b"bearer  a.b.c ", Some("a.b.c")),
            (b"Bearer", Some("")),
            (b"Bearer ", Some("")),
            (b"Bearer a.b\xff.c", Some("")),
            (b"Basic dXNlcjpwYXNz", None),
            (b"Bearers a.b.c", None),
            (b"", None),
        ];
        for (value, expected) in cases {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_bytes(value).unwrap());
            assert_eq!(bearer_token(&headers), expected, "{}", value.escape_ascii());
        }
    }
}

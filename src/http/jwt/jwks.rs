//! The issuer's keys (RFC 7517): fetched on demand, and kept while the issuer is unreachable.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde::Deserialize;
use serde_json::Value;
use url::Url;

use super::error::JwtError;
use crate::body::{ResponseBodyError, read_response};
use crate::problem::format_chain;

/// Minimum interval between fetches for an unknown `kid`, and between attempts to replace stale keys.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(30);
/// Minimum interval between fetches before the first success. It is shorter because every token is rejected until then.
const MIN_FETCH_INTERVAL_WITHOUT_KEYS: Duration = Duration::from_secs(2);
/// Age at which [`Jwks::find`] fetches the keys again. A key that the issuer has withdrawn is trusted for about this
/// long, and longer while the issuer is unreachable.
const MAX_KEY_AGE: Duration = Duration::from_secs(600);
const MAX_BODY_BYTES: usize = 256 * 1024;

/// One of the issuer's keys, with its algorithm.
pub(super) struct VerifyingKey {
    pub(super) key: DecodingKey,
    pub(super) validation: Validation,
}

type Keys = HashMap<String, Arc<VerifyingKey>>;

pub(super) struct Jwks {
    url: Url,
    client: reqwest::Client,
    cached: RwLock<CachedKeys>,
    /// Held during a fetch, so that only one runs at a time.
    last_fetch: tokio::sync::Mutex<LastFetch>,
}

/// When keys were last fetched, successfully or not. Each fetch is recorded when it starts and again when it ends: if
/// the issuer does not respond and a fetch takes longer than the minimum interval, the requests that waited for it must
/// not repeat it.
#[derive(Default)]
struct LastFetch {
    at: Option<Instant>,
    /// The last fetch prompted by an unknown `kid`.
    for_unknown_kid_at: Option<Instant>,
}

impl LastFetch {
    fn record(&mut self, is_for_unknown_kid: bool) {
        self.at = Some(Instant::now());
        if is_for_unknown_kid {
            self.for_unknown_kid_at = self.at;
        }
    }
}

#[derive(Default)]
struct CachedKeys {
    keys: Arc<Keys>,
    fetched_at: Option<Instant>,
}

#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error("the request for the issuer's keys failed")]
    Http(#[from] reqwest::Error),
    #[error("the issuer's keys are too large")]
    TooLarge,
    #[error("the issuer's keys are not a JWK set")]
    Malformed(#[from] serde_json::Error),
    #[error("the issuer has no usable key")]
    Empty,
}

impl Jwks {
    pub(super) fn new(url: Url, client: reqwest::Client) -> Self {
        Self { url, client, cached: RwLock::default(), last_fetch: tokio::sync::Mutex::default() }
    }

    /// Finds the key with this id. Fetches the issuer's keys if the id is unknown, or if the cached keys are stale, but
    /// not more often than the minimum intervals allow.
    ///
    /// # Errors
    /// `NoKeys` if the keys have never been fetched; `UnknownKey` if the key is not among those fetched last.
    pub(super) async fn find(&self, kid: &str) -> Result<Arc<VerifyingKey>, JwtError> {
        let mut last_fetch = match (self.lookup(kid), self.last_fetch.try_lock()) {
            ((Some(key), Freshness::Fresh), _) => return Ok(key),
            (_, Ok(last_fetch)) => last_fetch,
            // Another request is fetching the keys, so use the stale key.
            ((Some(key), _), Err(_)) => return Ok(key),
            ((None, _), Err(_)) => self.last_fetch.lock().await,
        };
        // Another request may have fetched the keys in the meantime.
        let (key, freshness) = self.lookup(kid);
        let has_elapsed =
            |interval, since: Option<Instant>| since.is_none_or(|since: Instant| since.elapsed() >= interval);
        let is_due = match (&key, freshness) {
            (Some(_), Freshness::Fresh) => false,
            (_, Freshness::NeverFetched) => has_elapsed(MIN_FETCH_INTERVAL_WITHOUT_KEYS, last_fetch.at),
            (Some(_), Freshness::Stale) => has_elapsed(MIN_FETCH_INTERVAL, last_fetch.at),
            (None, Freshness::Stale | Freshness::Fresh) => {
                has_elapsed(MIN_FETCH_INTERVAL, last_fetch.for_unknown_kid_at)
            }
        };
        if is_due {
            let is_for_unknown_kid = key.is_none() && freshness != Freshness::NeverFetched;
            last_fetch.record(is_for_unknown_kid);
            let fetched = self.fetch().await;
            last_fetch.record(is_for_unknown_kid);
            match fetched {
                Ok(keys) => {
                    let cached = CachedKeys { keys: Arc::new(keys), fetched_at: Some(Instant::now()) };
                    *self.cached.write().unwrap_or_else(PoisonError::into_inner) = cached;
                }
                Err(error) => {
                    tracing::warn!(url = %self.url, error = %format_chain(&error), "cannot fetch the issuer's keys");
                }
            }
        }
        drop(last_fetch);
        match self.lookup(kid) {
            (Some(key), _) => Ok(key),
            (None, Freshness::NeverFetched) => Err(JwtError::NoKeys),
            (None, _) => Err(JwtError::UnknownKey),
        }
    }

    /// Returns the key with this id if it is among the keys fetched last, however old they are.
    pub(super) fn cached_key(&self, kid: &str) -> Option<Arc<VerifyingKey>> {
        self.lookup(kid).0
    }

    fn lookup(&self, kid: &str) -> (Option<Arc<VerifyingKey>>, Freshness) {
        let cached = self.cached.read().unwrap_or_else(PoisonError::into_inner);
        let freshness = match cached.fetched_at {
            None => Freshness::NeverFetched,
            Some(at) if at.elapsed() >= MAX_KEY_AGE => Freshness::Stale,
            Some(_) => Freshness::Fresh,
        };
        (cached.keys.get(kid).cloned(), freshness)
    }

    async fn fetch(&self) -> Result<Keys, FetchError> {
        let mut response = self.client.get(self.url.clone()).send().await?.error_for_status()?;
        let mut body = Vec::new();
        read_response(&mut response, MAX_BODY_BYTES, &mut body).await.map_err(|error| match error {
            ResponseBodyError::TooLarge(_) => FetchError::TooLarge,
            ResponseBodyError::Http(error) => FetchError::Http(error),
        })?;
        let keys = parse(&body)?;
        if keys.is_empty() { Err(FetchError::Empty) } else { Ok(keys) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freshness {
    NeverFetched,
    Stale,
    Fresh,
}

/// Parses a key set. Unusable keys are ignored (RFC 7517, section 5).
fn parse(body: &[u8]) -> Result<Keys, serde_json::Error> {
    #[derive(Deserialize)]
    struct Set {
        keys: Vec<Value>,
    }
    let set: Set = serde_json::from_slice(body)?;
    Ok(set.keys.into_iter().filter_map(parse_key).collect())
}

/// Parses the ids and algorithms of the usable keys in a set, for `tests/fuzz`.
///
/// # Errors
/// If `body` is not a key set.
#[cfg(feature = "fuzzing")]
pub fn read_keys(body: &[u8]) -> Result<Vec<(String, Vec<Algorithm>)>, serde_json::Error> {
    let keys = parse(body)?;
    Ok(keys.into_iter().map(|(kid, key)| (kid, key.validation.algorithms.clone())).collect())
}

/// Parses a key; `None` if it cannot verify our tokens.
fn parse_key(jwk: Value) -> Option<(String, Arc<VerifyingKey>)> {
    let jwk: Jwk = serde_json::from_value(jwk).ok()?;
    let common = &jwk.common;
    let (algorithm, key_algorithm) = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
            (Algorithm::EdDSA, KeyAlgorithm::EdDSA)
        }
        _ => return None,
    };
    let is_for_signatures =
        common.public_key_use.as_ref().is_none_or(|key_use| *key_use == PublicKeyUse::Signature);
    let can_verify =
        common.key_operations.as_ref().is_none_or(|operations| operations.contains(&KeyOperations::Verify));
    let matches_algorithm = common.key_algorithm.is_none_or(|declared| declared == key_algorithm);
    if !is_for_signatures || !can_verify || !matches_algorithm {
        return None;
    }
    let mut validation = Validation::new(algorithm);
    // `TrustedIssuer` checks the claims, with the time as an argument.
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_aud = false;
    let key = DecodingKey::from_jwk(&jwk).ok()?;
    Some((common.key_id.clone()?, Arc::new(VerifyingKey { key, validation })))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::client;

    #[tokio::test]
    async fn waiting_requests_do_not_repeat_hung_fetch() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/keys", listener.local_addr().unwrap());
        let timeout = MIN_FETCH_INTERVAL_WITHOUT_KEYS + Duration::from_millis(100);
        let timeouts = client::Timeouts { total: Some(timeout), ..client::Timeouts::CALL };
        let client = client::build(timeouts).unwrap();
        let jwks = Jwks::new(url.parse().unwrap(), client);
        // An issuer that accepts connections and never responds.
        let mut connections = Vec::new();
        let issuer = async {
            loop {
                connections.push(listener.accept().await.unwrap());
            }
        };
        let requests = futures_util::future::join_all((0..3).map(|_| jwks.find("kid")));
        let results = tokio::select! {
            results = requests => results,
            () = issuer => unreachable!(),
        };
        assert!(results.iter().all(|result| matches!(result, Err(JwtError::NoKeys))));
        assert_eq!(connections.len(), 1);
    }

    #[test]
    fn parse_keeps_only_keys_that_can_verify_our_tokens() {
        let ed = json!({"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"});
        let key_with = |name: &str, members: Value| {
            let mut key = ed.clone();
            key["kid"] = name.into();
            for (member, value) in members.as_object().unwrap() {
                key[member] = value.clone();
            }
            key
        };
        let set = json!({"keys": [
            key_with("plain", json!({})),
            key_with("full", json!({"alg": "EdDSA", "use": "sig", "key_ops": ["verify"]})),
            key_with("encrypts", json!({"use": "enc"})),
            key_with("signs", json!({"key_ops": ["sign"]})),
            key_with("other-alg", json!({"alg": "ES256"})),
            ed,
            {"kty": "oct", "kid": "secret", "k": "AAAA"},
            {"kty": "EC", "crv": "P-384", "kid": "p384", "x": "AA", "y": "AA"},
            {"kty": "new", "kid": "unknown"},
            "not a key",
        ]});
        let mut kids: Vec<_> = parse(set.to_string().as_bytes()).unwrap().into_keys().collect();
        kids.sort();
        assert_eq!(kids, ["full", "plain"]);
    }
}

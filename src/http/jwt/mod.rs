//! Verifies the identity provider's tokens, which are JWTs (RFC 7519), with the provider's published keys.
//!
//! A token must be signed with RS256, ES256 or EdDSA by a key in the configured JWKS, and its header must name that
//! key's algorithm; the issuer and audience must match, and the token must be valid now. Invariant: only a token's
//! `kid` is used before its signature is verified.

mod crypto;
mod error;
mod jwks;

use jiff::Timestamp;
use jsonwebtoken::{TokenData, decode, decode_header};
use serde::Deserialize;
use url::Url;

pub use error::JwtError;
#[cfg(feature = "fuzzing")]
pub use jwks::read_keys;
use jwks::{Jwks, VerifyingKey};
use svc_machine::name::IdpUserId;

/// Tolerated clock skew.
pub const LEEWAY_SECONDS: i64 = 30;
const MAX_TOKEN_BYTES: usize = 8 * 1024;

/// The trusted issuer and the accepted audiences.
#[derive(Debug, Clone)]
pub struct TrustedIssuer {
    pub issuer: String,
    /// A token must name at least one of them in `aud`, or in `azp` if it has no `aud`.
    pub audiences: Vec<String>,
    pub jwks_url: Url,
}

/// The contents of a verified token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    pub user: IdpUserId,
    /// Unix seconds; the leeway is not included.
    pub expires_at: i64,
}

/// Verifies tokens from one issuer.
pub struct Verifier {
    trust: TrustedIssuer,
    keys: Jwks,
}

impl Verifier {
    /// Creates a verifier without fetching any keys yet. `client`'s timeouts apply to each fetch.
    pub fn new(trust: TrustedIssuer, client: reqwest::Client) -> Self {
        crypto::install();
        let keys = Jwks::new(trust.jwks_url.clone(), client);
        Self { trust, keys }
    }

    /// Verifies a token. Fetches the issuer's keys if the token's key is unknown or the keys are stale.
    ///
    /// # Errors
    /// See [`JwtError`].
    pub async fn verify(&self, token: &str, now: Timestamp) -> Result<Subject, JwtError> {
        let key = self.keys.find(&parse_kid(token)?).await?;
        self.trust.check_claims(verify_signature(token, &key)?, now)
    }

    /// Verifies a token with the most recently fetched keys, however old they are, without fetching.
    ///
    /// # Errors
    /// See [`JwtError`]; `NoKeys` if the token's key is not among them.
    pub fn verify_with_cached_keys(&self, token: &str, now: Timestamp) -> Result<Subject, JwtError> {
        let key = self.keys.cached_key(&parse_kid(token)?).ok_or(JwtError::NoKeys)?;
        self.trust.check_claims(verify_signature(token, &key)?, now)
    }
}

fn parse_kid(token: &str) -> Result<String, JwtError> {
    if token.len() > MAX_TOKEN_BYTES {
        return Err(JwtError::Malformed);
    }
    decode_header(token).map_err(|_| JwtError::Malformed)?.kid.ok_or(JwtError::UnknownKey)
}

/// Verifies the token's signature with `key`, and returns its claims.
fn verify_signature(token: &str, key: &VerifyingKey) -> Result<Claims, JwtError> {
    use jsonwebtoken::errors::ErrorKind;
    let TokenData { header, claims } =
        decode(token, &key.key, &key.validation).map_err(|error| match error.kind() {
            ErrorKind::InvalidSignature => JwtError::InvalidSignature,
            ErrorKind::InvalidAlgorithm | ErrorKind::UnsupportedAlgorithm => JwtError::WrongAlgorithm,
            _ => JwtError::Malformed,
        })?;
    // No critical extension is supported (RFC 7515, section 4.1.11).
    if header.crit.is_some() { Err(JwtError::Malformed) } else { Ok(claims) }
}

#[derive(Deserialize)]
struct Claims {
    iss: String,
    sub: IdpUserId,
    exp: f64,
    nbf: Option<f64>,
    aud: Option<OneOrMany>,
    azp: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl TrustedIssuer {
    /// Derives the URL of an issuer's keys; `None` if the issuer is not an `http` or `https` URL.
    pub fn default_jwks_url(issuer: &str) -> Option<Url> {
        let url = Url::parse(&format!("{}/.well-known/jwks.json", issuer.trim_end_matches('/'))).ok()?;
        // An issuer without a scheme may still parse: `localhost:8080` is a URL with the scheme `localhost`.
        matches!(url.scheme(), "http" | "https").then_some(url)
    }

    fn check_claims(&self, claims: Claims, now: Timestamp) -> Result<Subject, JwtError> {
        if claims.iss != self.issuer {
            return Err(JwtError::WrongIssuer);
        }
        let is_accepted = |name: &String| self.audiences.contains(name);
        let is_for_us = match (&claims.aud, &claims.azp) {
            (Some(OneOrMany::One(one)), _) => is_accepted(one),
            (Some(OneOrMany::Many(many)), _) => many.iter().any(is_accepted),
            (None, Some(party)) => is_accepted(party),
            (None, None) => false,
        };
        if !is_for_us {
            return Err(JwtError::WrongAudience);
        }
        // An f64 represents the seconds of any realistic year exactly.
        let (now, leeway) = (now.as_second() as f64, LEEWAY_SECONDS as f64);
        if !claims.exp.is_finite() || now >= claims.exp + leeway {
            return Err(JwtError::OutsideValidity);
        }
        if claims.nbf.is_some_and(|nbf| nbf.is_nan() || now + leeway < nbf) {
            return Err(JwtError::OutsideValidity);
        }
        Ok(Subject { user: claims.sub, expires_at: claims.exp as i64 })
    }
}

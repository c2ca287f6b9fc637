//! Verification of the identity provider's tokens: JWTs (RFC 7519), with its published keys.
//!
//! A token must be signed with RS256, ES256 or EdDSA by a key of the configured JWKS, and its header must name that key's
//! algorithm; issuer, audience and times must match. There are no sessions here. Invariant: only the `kid` of a token is
//! used before its signature is verified.

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
/// Maximum length of a token.
const MAX_TOKEN_BYTES: usize = 8 * 1024;

/// The trusted issuer and the accepted audiences.
#[derive(Debug, Clone)]
pub struct TrustedIssuer {
    pub issuer: String,
    /// A token must name at least one of them in `aud`, or in `azp` if it has no `aud`.
    pub audiences: Vec<String>,
    pub jwks_url: Url,
}

/// The content of a verified token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    pub user: IdpUserId,
    /// Unix seconds; the token expires then, plus the leeway.
    pub expires_at: i64,
}

/// Verifies tokens of one issuer.
pub struct Verifier {
    trust: TrustedIssuer,
    keys: Jwks,
}

impl Verifier {
    /// Fetches nothing yet; the deadlines of `client` limit each fetch.
    pub fn new(trust: TrustedIssuer, client: reqwest::Client) -> Self {
        crypto::install();
        let keys = Jwks::new(trust.jwks_url.clone(), client);
        Self { trust, keys }
    }

    /// # Errors
    /// See [`JwtError`].
    pub async fn verify(&self, token: &str, now: Timestamp) -> Result<Subject, JwtError> {
        let key = self.keys.find(&kid(token)?).await?;
        self.trust.accept(open(token, &key)?, now)
    }

    /// Verifies a token without fetching keys.
    ///
    /// # Errors
    /// See [`JwtError`]; `NoKeys` if a fetch would be necessary.
    pub fn verify_with_known_keys(&self, token: &str, now: Timestamp) -> Result<Subject, JwtError> {
        let key = self.keys.known_key(&kid(token)?).ok_or(JwtError::NoKeys)?;
        self.trust.accept(open(token, &key)?, now)
    }
}

fn kid(token: &str) -> Result<String, JwtError> {
    if token.len() > MAX_TOKEN_BYTES {
        return Err(JwtError::Malformed);
    }
    decode_header(token).map_err(|_| JwtError::Malformed)?.kid.ok_or(JwtError::UnknownKey)
}

/// The claims of a token that this key signed.
fn open(token: &str, key: &VerifyingKey) -> Result<Claims, JwtError> {
    use jsonwebtoken::errors::ErrorKind;
    let TokenData { header, claims } =
        decode(token, &key.key, &key.validation).map_err(|error| match error.kind() {
            ErrorKind::InvalidSignature => JwtError::Signature,
            ErrorKind::InvalidAlgorithm | ErrorKind::UnsupportedAlgorithm => JwtError::Algorithm,
            _ => JwtError::Malformed,
        })?;
    // A critical extension, and none is supported (RFC 7515, section 4.1.11).
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
    fn accept(&self, claims: Claims, now: Timestamp) -> Result<Subject, JwtError> {
        if claims.iss != self.issuer {
            return Err(JwtError::Issuer);
        }
        let ours = |name: &String| self.audiences.contains(name);
        let for_us = match (&claims.aud, &claims.azp) {
            (Some(OneOrMany::One(one)), _) => ours(one),
            (Some(OneOrMany::Many(many)), _) => many.iter().any(ours),
            (None, Some(party)) => ours(party),
            (None, None) => false,
        };
        if !for_us {
            return Err(JwtError::Audience);
        }
        // An f64 represents the seconds of any realistic year exactly.
        let (now, leeway) = (now.as_second() as f64, LEEWAY_SECONDS as f64);
        if !claims.exp.is_finite() || now >= claims.exp + leeway {
            return Err(JwtError::Stale);
        }
        if claims.nbf.is_some_and(|nbf| nbf.is_nan() || now + leeway < nbf) {
            return Err(JwtError::Stale);
        }
        Ok(Subject { user: claims.sub, expires_at: claims.exp as i64 })
    }
}

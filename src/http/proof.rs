//! The platform's proof: a short-lived EdDSA JWT (RFC 7519, RFC 8037) in the `x-svc-proof` header. It names the user,
//! route and machine of a request that the platform forwards or makes.
//!
//! The platform signs it; the host verifies it with the keys from provisioning and heartbeats. The algorithm is fixed:
//! a different `alg` in the header is rejected.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use jiff::Timestamp;
use ring::rand::SystemRandom;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

use svc_machine::id::MachineId;
use svc_machine::name::{Handle, IdpUserId, Slot};

pub const HEADER: &str = "x-svc-proof";
pub const ISSUER: &str = "svc-platform";
/// Maximum lifetime of a proof.
pub const MAX_LIFETIME_SECONDS: i64 = 60;
/// Tolerated difference between the clocks of the platform and the host.
pub const LEEWAY_SECONDS: i64 = 30;

/// The route through which a request reaches the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Route {
    Shell,
    Code,
    App,
    /// The platform's own requests, for example for a backup.
    Internal,
}

/// The claims in a proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    pub iss: String,
    /// The machine that the proof is for.
    pub aud: MachineId,
    pub sub: IdpUserId,
    pub handle: Handle,
    pub slot: Slot,
    pub route: Route,
    /// The app's slug; present only for the route `app`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app: Option<String>,
    /// The request's method. Like `path` and `jti`, it is present only for the route `internal`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// An id that a host accepts only once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jti: Option<String>,
    pub iat: i64,
    pub exp: i64,
}

/// A public key that hosts accept: `x` is the Ed25519 key in base64url (RFC 8037).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProofKey {
    pub kid: String,
    pub x: String,
}

/// The keys that a host accepts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProofKeys {
    pub keys: Vec<ProofKey>,
}

/// The reason a proof is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// Also returned for a different algorithm or issuer, and for a lifetime above [`MAX_LIFETIME_SECONDS`].
    #[error("the proof is malformed")]
    Malformed,
    #[error("the proof's key is unknown")]
    UnknownKey,
    #[error("the proof's signature is invalid")]
    InvalidSignature,
    #[error("the proof is expired or not yet valid")]
    OutsideValidity,
    #[error("the proof is for a different machine")]
    WrongMachine,
}

#[derive(Serialize, Deserialize)]
struct Header {
    alg: String,
    typ: String,
    kid: String,
}

/// The platform's signing key.
pub struct Signer {
    kid: String,
    pair: Ed25519KeyPair,
    header: String,
}

impl Signer {
    /// Generates a key in PKCS#8 v2 DER; it must be sealed before it is stored.
    ///
    /// # Errors
    /// If the system random number generator fails.
    pub fn generate_pkcs8() -> Result<Vec<u8>, ring::error::Unspecified> {
        Ok(Ed25519KeyPair::generate_pkcs8(&SystemRandom::new())?.as_ref().to_vec())
    }

    /// # Errors
    /// If `pkcs8` is not an Ed25519 key.
    pub fn from_pkcs8(kid: &str, pkcs8: &[u8]) -> Result<Self, ring::error::KeyRejected> {
        let pair = Ed25519KeyPair::from_pkcs8(pkcs8)?;
        let header = Header { alg: "EdDSA".into(), typ: "JWT".into(), kid: kid.to_owned() };
        let header = B64.encode(serde_json::to_vec(&header).expect("the header serializes to JSON"));
        Ok(Self { kid: kid.to_owned(), pair, header })
    }

    pub fn kid(&self) -> &str {
        &self.kid
    }

    pub fn public_key(&self) -> ProofKey {
        ProofKey { kid: self.kid.clone(), x: B64.encode(self.pair.public_key()) }
    }

    pub fn sign(&self, claims: &Claims) -> String {
        self.sign_json(claims)
    }

    /// Signs any claims with this key, for the platform's other tokens.
    pub fn sign_json(&self, claims: &impl Serialize) -> String {
        let payload = B64.encode(serde_json::to_vec(claims).expect("claims serialize to JSON"));
        let signing_input = format!("{}.{payload}", self.header);
        let signature = B64.encode(self.pair.sign(signing_input.as_bytes()));
        format!("{signing_input}.{signature}")
    }
}

impl ProofKeys {
    /// Verifies the signature of a proof or another token with these keys, and returns the token's payload.
    ///
    /// # Errors
    /// If the token is malformed, its key is unknown, or its signature is invalid.
    pub fn verify_signature(&self, token: &str) -> Result<Vec<u8>, ProofError> {
        let (signing_input, signature) = token.rsplit_once('.').ok_or(ProofError::Malformed)?;
        let (header, payload) = signing_input.split_once('.').ok_or(ProofError::Malformed)?;
        let header = B64.decode(header).map_err(|_| ProofError::Malformed)?;
        let header: Header = serde_json::from_slice(&header).map_err(|_| ProofError::Malformed)?;
        if header.alg != "EdDSA" {
            return Err(ProofError::Malformed);
        }
        let key = self.keys.iter().find(|key| key.kid == header.kid).ok_or(ProofError::UnknownKey)?;
        let key = B64.decode(&key.x).map_err(|_| ProofError::UnknownKey)?;
        let signature = B64.decode(signature).map_err(|_| ProofError::Malformed)?;
        UnparsedPublicKey::new(&ED25519, key)
            .verify(signing_input.as_bytes(), &signature)
            .map_err(|_| ProofError::InvalidSignature)?;
        B64.decode(payload).map_err(|_| ProofError::Malformed)
    }

    /// Verifies a proof for `machine` at `now`. For the route `internal`, the caller must also compare the proof's
    /// method and path with the request's, and accept each `jti` only once.
    ///
    /// # Errors
    /// See [`ProofError`].
    pub fn verify(&self, token: &str, machine: MachineId, now: Timestamp) -> Result<Claims, ProofError> {
        let payload = self.verify_signature(token)?;
        let claims: Claims = serde_json::from_slice(&payload).map_err(|_| ProofError::Malformed)?;
        if claims.iss != ISSUER || claims.exp.saturating_sub(claims.iat) > MAX_LIFETIME_SECONDS {
            return Err(ProofError::Malformed);
        }
        if claims.aud != machine {
            return Err(ProofError::WrongMachine);
        }
        let now = now.as_second();
        let (begin, end) =
            (claims.iat.saturating_sub(LEEWAY_SECONDS), claims.exp.saturating_add(LEEWAY_SECONDS));
        if now < begin || now > end {
            return Err(ProofError::OutsideValidity);
        }
        Ok(claims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signer(kid: &str) -> Signer {
        Signer::from_pkcs8(kid, &Signer::generate_pkcs8().unwrap()).unwrap()
    }

    fn claims(machine: MachineId, now: Timestamp) -> Claims {
        Claims {
            iss: ISSUER.into(),
            aud: machine,
            sub: "user_1".parse().unwrap(),
            handle: "ada".parse().unwrap(),
            slot: Slot::primary(),
            route: Route::Shell,
            app: None,
            method: None,
            path: None,
            jti: None,
            iat: now.as_second(),
            exp: now.as_second() + 30,
        }
    }

    #[test]
    fn verify_checks_machine_and_time() {
        let (signer, machine, now) = (signer("k1"), MachineId::new(), Timestamp::now());
        let keys = ProofKeys { keys: vec![signer.public_key()] };
        let token = signer.sign(&claims(machine, now));
        assert_eq!(keys.verify(&token, machine, now).unwrap().sub.as_str(), "user_1");
        assert_eq!(keys.verify(&token, MachineId::new(), now), Err(ProofError::WrongMachine));
        let late = now + jiff::SignedDuration::from_secs(61);
        assert_eq!(keys.verify(&token, machine, late), Err(ProofError::OutsideValidity));
        let early = now - jiff::SignedDuration::from_secs(31);
        assert_eq!(keys.verify(&token, machine, early), Err(ProofError::OutsideValidity));
    }

    #[test]
    fn verify_rejects_other_keys_payloads_and_algorithms() {
        let (real, other, machine, now) = (signer("k1"), signer("k1"), MachineId::new(), Timestamp::now());
        let keys = ProofKeys { keys: vec![real.public_key()] };
        assert_eq!(
            keys.verify(&other.sign(&claims(machine, now)), machine, now),
            Err(ProofError::InvalidSignature)
        );
        let unknown = signer("k2").sign(&claims(machine, now));
        assert_eq!(keys.verify(&unknown, machine, now), Err(ProofError::UnknownKey));
        let token = real.sign(&claims(machine, now));
        let parts: Vec<&str> = token.split('.').collect();
        let forged = B64
            .encode(serde_json::to_vec(&claims(machine, now + jiff::SignedDuration::from_secs(9))).unwrap());
        let swapped = format!("{}.{forged}.{}", parts[0], parts[2]);
        assert_eq!(keys.verify(&swapped, machine, now), Err(ProofError::InvalidSignature));
        let none = format!("{}.{}.", B64.encode(br#"{"alg":"none","typ":"JWT","kid":"k1"}"#), parts[1]);
        assert_eq!(keys.verify(&none, machine, now), Err(ProofError::Malformed));
        assert_eq!(keys.verify("a.b", machine, now), Err(ProofError::Malformed));
    }

    #[test]
    fn verify_rejects_a_long_lifetime() {
        let (signer, machine, now) = (signer("k1"), MachineId::new(), Timestamp::now());
        let keys = ProofKeys { keys: vec![signer.public_key()] };
        let mut long = claims(machine, now);
        long.exp = long.iat + MAX_LIFETIME_SECONDS + 1;
        assert_eq!(keys.verify(&signer.sign(&long), machine, now), Err(ProofError::Malformed));
    }
}

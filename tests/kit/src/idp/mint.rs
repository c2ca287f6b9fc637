//! Mints valid and flawed session tokens.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use serde_json::{Map, Value, json};

use super::Idp;
use super::keys::{Alg, KeySet};

/// The content of a token; the default is a valid five-minute session.
#[derive(Clone, Debug)]
pub struct MintOptions {
    /// Seconds from now to `exp`; negative for an expired token.
    pub ttl_seconds: i64,
    /// Seconds from now to `nbf` and `iat`; positive for a token that is not valid yet.
    pub nbf_offset_seconds: i64,
    /// Overrides the issuer.
    pub iss: Option<String>,
    /// `None` omits `aud`.
    pub aud: Option<Value>,
    pub azp: Option<String>,
    pub alg: Alg,
    /// Overrides the key id in the header.
    pub kid: Option<String>,
    /// Additional claims, which override those above; `null` removes a claim.
    pub claims: Map<String, Value>,
    pub flaw: Option<Flaw>,
}

impl Default for MintOptions {
    fn default() -> Self {
        Self {
            ttl_seconds: 300,
            nbf_offset_seconds: -1,
            iss: None,
            aud: Some(Idp::AUDIENCE.into()),
            azp: None,
            alg: Alg::default(),
            kid: None,
            claims: Map::new(),
            flaw: None,
        }
    }
}

/// A flaw for which a verifier must reject a token regardless of its claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// One bit of the signature is flipped.
    BadSignature,
    /// The claims differ from the signed ones.
    ChangedClaims,
    /// `alg: none`, without a signature.
    AlgNone,
    /// `alg: HS256`, with the public key as the secret.
    HmacWithPublicKey,
    /// No signature, although the header names an algorithm.
    NoSignature,
    /// The header names an algorithm other than the key's.
    WrongAlg,
    /// No key id.
    NoKid,
    /// Two parts, not three.
    TwoParts,
}

impl Flaw {
    pub const ALL: [Self; 8] = [
        Self::BadSignature,
        Self::ChangedClaims,
        Self::AlgNone,
        Self::HmacWithPublicKey,
        Self::NoSignature,
        Self::WrongAlg,
        Self::NoKid,
        Self::TwoParts,
    ];
}

pub(super) fn mint(keys: &KeySet, issuer: &str, sub: &str, options: &MintOptions) -> String {
    let key = keys.current(options.alg);
    let alg = match options.flaw {
        Some(Flaw::AlgNone) => "none",
        Some(Flaw::HmacWithPublicKey) => "HS256",
        Some(Flaw::WrongAlg) if options.alg == Alg::Es256 => "EdDSA",
        Some(Flaw::WrongAlg) => "ES256",
        _ => options.alg.name(),
    };
    let mut header = json!({ "alg": alg, "typ": "JWT", "kid": options.kid.as_ref().unwrap_or(&key.kid) });
    if options.flaw == Some(Flaw::NoKid)
        && let Some(header) = header.as_object_mut()
    {
        header.shift_remove("kid");
    }
    let claims = build_claims(issuer, sub, options);
    let mut signing_input = format!("{}.{}", encode(&header), encode(&claims));
    let mut signature = key.sign(signing_input.as_bytes());
    match options.flaw {
        Some(Flaw::BadSignature) => signature[10] ^= 1,
        Some(Flaw::ChangedClaims) => {
            let mut changed = claims;
            changed["sub"] = format!("{sub}x").into();
            signing_input = format!("{}.{}", encode(&header), encode(&changed));
        }
        Some(Flaw::AlgNone | Flaw::NoSignature) => signature.clear(),
        Some(Flaw::HmacWithPublicKey) => {
            let secret = hmac::Key::new(hmac::HMAC_SHA256, key.public_bytes());
            signature = hmac::sign(&secret, signing_input.as_bytes()).as_ref().to_vec();
        }
        Some(Flaw::TwoParts) => return signing_input,
        Some(Flaw::WrongAlg | Flaw::NoKid) | None => {}
    }
    format!("{signing_input}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn build_claims(issuer: &str, sub: &str, options: &MintOptions) -> Value {
    let now = jiff::Timestamp::now().as_second();
    let mut claims = json!({
        "iss": options.iss.as_deref().unwrap_or(issuer),
        "sub": sub,
        "sid": format!("sess_{}", uuid::Uuid::new_v4().simple()),
        "iat": now + options.nbf_offset_seconds,
        "nbf": now + options.nbf_offset_seconds,
        "exp": now + options.ttl_seconds,
    });
    if let Some(claims) = claims.as_object_mut() {
        let optional = [("aud", options.aud.clone()), ("azp", options.azp.clone().map(Value::from))];
        claims.extend(optional.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
        claims.extend(options.claims.clone());
        claims.retain(|_, value| !value.is_null());
    }
    claims
}

fn encode(part: &Value) -> String {
    URL_SAFE_NO_PAD.encode(part.to_string())
}

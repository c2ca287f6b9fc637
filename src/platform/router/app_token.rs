//! Issues and verifies app tokens, which an app's page uses instead of its owner's session (docs/apps/tokens.md).
//!
//! A token is valid for one hour, for one app on one of a user's machines. App tokens are not signed with the proof
//! keys, so a token cannot be used as a proof, nor a proof as a token. Invariant: a token is never accepted for another
//! machine or app.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::signed_lifetimes::APP_TOKEN_SECONDS;
use svc_http::proof::{LEEWAY_SECONDS, ProofError, ProofKeys, Signer};
use svc_machine::id::MachineId;
use svc_machine::name::IdpUserId;

/// Distinguishes app tokens from the identity provider's tokens.
const PREFIX: &str = "svca_";
const ISSUER: &str = "svc-app-token";
const MAX_TOKEN_BYTES: usize = 2048;
const MAX_SLUG_BYTES: usize = 41;

/// An app token's claims.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AppClaims {
    iss: String,
    pub(super) sub: IdpUserId,
    /// The machine. A token is not valid for the machine's successor.
    pub(super) aud: MachineId,
    pub(super) app: String,
    iat: i64,
    pub(super) exp: i64,
    /// Generation of the user's last sign-out at the time of issue.
    #[serde(default)]
    pub(super) generation: i64,
}

/// An app token and its expiry as a Unix timestamp in seconds.
pub(super) struct MintedToken {
    pub(super) token: String,
    pub(super) expires_at: i64,
}

/// Issues a token; `app` must be a slug, see [`is_slug`].
pub(super) fn mint(
    signer: &Signer,
    user: &IdpUserId,
    machine: MachineId,
    app: &str,
    generation: i64,
    now: Timestamp,
) -> MintedToken {
    let iat = now.as_second();
    let exp = iat + APP_TOKEN_SECONDS;
    let claims = AppClaims {
        iss: ISSUER.to_owned(),
        sub: user.clone(),
        aud: machine,
        app: app.to_owned(),
        iat,
        exp,
        generation,
    };
    MintedToken { token: format!("{PREFIX}{}", signer.sign_json(&claims)), expires_at: exp }
}

pub(super) fn is_app_token(text: &str) -> bool {
    text.starts_with(PREFIX)
}

/// Verifies a token's signature, claims and times. The caller checks the machine, the app and the sign-out generation.
///
/// # Errors
/// [`ProofError::OutsideValidity`] if the token has expired or is not yet valid, [`ProofError::UnknownKey`] or
/// [`ProofError::InvalidSignature`] if none of `keys` has signed it, [`ProofError::Malformed`] for any other defect.
pub(super) fn verify(keys: &ProofKeys, token: &str, now: Timestamp) -> Result<AppClaims, ProofError> {
    let jwt =
        token.strip_prefix(PREFIX).filter(|_| token.len() <= MAX_TOKEN_BYTES).ok_or(ProofError::Malformed)?;
    let claims: AppClaims =
        serde_json::from_slice(&keys.verify_signature(jwt)?).map_err(|_| ProofError::Malformed)?;
    if claims.iss != ISSUER || claims.exp - claims.iat > APP_TOKEN_SECONDS || !is_slug(&claims.app) {
        return Err(ProofError::Malformed);
    }
    let now = now.as_second();
    if now > claims.exp + LEEWAY_SECONDS || now < claims.iat - LEEWAY_SECONDS {
        return Err(ProofError::OutsideValidity);
    }
    Ok(claims)
}

/// Whether `text` matches `^[a-z][a-z0-9-]{0,40}$`, as in the host's app registry.
pub(super) fn is_slug(text: &str) -> bool {
    text.len() <= MAX_SLUG_BYTES
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    fn signer() -> Signer {
        Signer::from_pkcs8("app-1", &Signer::generate_pkcs8().unwrap()).unwrap()
    }

    #[test]
    fn verify_rejects_expired_and_forged_tokens() {
        let (own, other, now) = (signer(), signer(), Timestamp::now());
        let keys = ProofKeys { keys: vec![own.public_key()] };
        let (user, machine) = ("user_1".parse().unwrap(), MachineId::new());
        let minted = mint(&own, &user, machine, "notes", 0, now);
        assert!(is_app_token(&minted.token));
        let claims = verify(&keys, &minted.token, now).unwrap();
        assert_eq!((claims.sub, claims.aud, &*claims.app), (user.clone(), machine, "notes"));
        let late = now + SignedDuration::from_secs(APP_TOKEN_SECONDS + LEEWAY_SECONDS + 1);
        assert_eq!(verify(&keys, &minted.token, late), Err(ProofError::OutsideValidity));
        let forged = mint(&other, &user, machine, "notes", 0, now);
        assert_eq!(verify(&keys, &forged.token, now), Err(ProofError::InvalidSignature));
    }

    #[test]
    fn verify_rejects_invalid_signed_claims() {
        let (own, now) = (signer(), Timestamp::now());
        let keys = ProofKeys { keys: vec![own.public_key()] };
        let (user, machine) = ("user_1".parse().unwrap(), MachineId::new());
        let good = || AppClaims {
            iss: ISSUER.to_owned(),
            sub: "user_1".parse().unwrap(),
            aud: machine,
            app: "notes".to_owned(),
            iat: now.as_second(),
            exp: now.as_second() + 60,
            generation: 0,
        };
        let sign = |claims: &AppClaims| format!("{PREFIX}{}", own.sign_json(claims));
        assert!(verify(&keys, &sign(&good()), now).is_ok());
        for bad in [
            AppClaims { iss: svc_http::proof::ISSUER.to_owned(), ..good() },
            AppClaims { exp: now.as_second() + APP_TOKEN_SECONDS + 1, ..good() },
            AppClaims { app: "a/b".to_owned(), ..good() },
            AppClaims { app: String::new(), ..good() },
        ] {
            assert_eq!(verify(&keys, &sign(&bad), now), Err(ProofError::Malformed), "{bad:?}");
        }
        let bare = mint(&own, &user, machine, "notes", 0, now).token.replacen(PREFIX, "", 1);
        assert_eq!(verify(&keys, &bare, now), Err(ProofError::Malformed));
    }

    #[test]
    fn is_slug_matches_host_pattern() {
        for good in ["a", "notes", "my-app-2", &"a".repeat(41)] {
            assert!(is_slug(good), "{good}");
        }
        for bad in ["", "A", "1a", "-a", "a_b", "a.b", "~a", &"a".repeat(42)] {
            assert!(!is_slug(bad), "{bad}");
        }
    }
}

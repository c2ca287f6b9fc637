//! App tokens: what an app's page holds in place of its owner's session (contract, part 4, "Apps").
//!
//! A token is for one app on one machine of one user, for an hour. It is signed by a key of its own purpose, so that
//! no token can pass for a proof, nor a proof for a token. Invariant: it never leads to another machine or another app.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::http::proof::{LEEWAY_SECONDS, ProofError, ProofKeys, Signer};
use crate::machine::id::MachineId;
use crate::machine::name::IdpUserId;

/// Tells an app token from the identity provider's.
const PREFIX: &str = "svca_";
const ISSUER: &str = "svc-app-token";
pub(super) const LIFE_SECONDS: i64 = 3600;
/// After this, counted from its making, no router believes a token.
pub const LONGEST_LIFE: Duration = Duration::from_secs((LIFE_SECONDS + LEEWAY_SECONDS) as u64);
/// Longer ones are not looked at.
const LONGEST: usize = 2048;
const LONGEST_SLUG: usize = 41;

/// For whom a token stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AppClaims {
    iss: String,
    pub(super) sub: IdpUserId,
    /// The machine; its successor needs a token of its own.
    pub(super) aud: MachineId,
    pub(super) app: String,
    iat: i64,
    pub(super) exp: i64,
    /// The number of the user's last sign-out when it was made.
    #[serde(default)]
    pub(super) generation: i64,
}

/// A token and the Unix second at which it ends.
pub(super) struct Minted {
    pub(super) token: String,
    pub(super) expires_at: i64,
}

/// `app` is a slug, see [`is_slug`].
pub(super) fn mint(
    signer: &Signer,
    user: &IdpUserId,
    machine: MachineId,
    app: &str,
    generation: i64,
    now: Timestamp,
) -> Minted {
    let iat = now.as_second();
    let exp = iat + LIFE_SECONDS;
    let claims = AppClaims {
        iss: ISSUER.to_owned(),
        sub: user.clone(),
        aud: machine,
        app: app.to_owned(),
        iat,
        exp,
        generation,
    };
    Minted { token: format!("{PREFIX}{}", signer.sign_json(&claims)), expires_at: exp }
}

pub(super) fn looks_like_one(text: &str) -> bool {
    text.starts_with(PREFIX)
}

/// # Errors
/// [`ProofError`]; never `WrongMachine`, which the caller knows better.
pub(super) fn verify(keys: &ProofKeys, token: &str, now: Timestamp) -> Result<AppClaims, ProofError> {
    let jwt = token.strip_prefix(PREFIX).filter(|_| token.len() <= LONGEST).ok_or(ProofError::Malformed)?;
    let claims: AppClaims = serde_json::from_slice(&keys.open(jwt)?).map_err(|_| ProofError::Malformed)?;
    if claims.iss != ISSUER || claims.exp - claims.iat > LIFE_SECONDS || !is_slug(&claims.app) {
        return Err(ProofError::Malformed);
    }
    let now = now.as_second();
    if now > claims.exp + LEEWAY_SECONDS || now < claims.iat - LEEWAY_SECONDS {
        return Err(ProofError::Stale);
    }
    Ok(claims)
}

/// `^[a-z][a-z0-9-]{0,40}$`, as the host's app registry has it.
pub(super) fn is_slug(text: &str) -> bool {
    text.len() <= LONGEST_SLUG
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    fn signer() -> Signer {
        Signer::from_pkcs8("app-1", &Signer::generate().unwrap()).unwrap()
    }

    #[test]
    fn a_token_holds_for_an_hour_and_by_its_key_alone() {
        let (own, other, now) = (signer(), signer(), Timestamp::now());
        let keys = ProofKeys { keys: vec![own.public()] };
        let (user, machine) = ("user_1".parse().unwrap(), MachineId::new());
        let minted = mint(&own, &user, machine, "notes", 0, now);
        assert!(looks_like_one(&minted.token));
        let claims = verify(&keys, &minted.token, now).unwrap();
        assert_eq!((claims.sub, claims.aud, &*claims.app), (user.clone(), machine, "notes"));
        let late = now + SignedDuration::from_secs(LIFE_SECONDS + LEEWAY_SECONDS + 1);
        assert_eq!(verify(&keys, &minted.token, late), Err(ProofError::Stale));
        let forged = mint(&other, &user, machine, "notes", 0, now);
        assert_eq!(verify(&keys, &forged.token, now), Err(ProofError::BadSignature));
    }

    #[test]
    fn what_else_the_key_signed_is_no_token() {
        let (own, now) = (signer(), Timestamp::now());
        let keys = ProofKeys { keys: vec![own.public()] };
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
            AppClaims { iss: crate::http::proof::ISSUER.to_owned(), ..good() },
            AppClaims { exp: now.as_second() + LIFE_SECONDS + 1, ..good() },
            AppClaims { app: "a/b".to_owned(), ..good() },
            AppClaims { app: String::new(), ..good() },
        ] {
            assert_eq!(verify(&keys, &sign(&bad), now), Err(ProofError::Malformed), "{bad:?}");
        }
        let bare = mint(&own, &user, machine, "notes", 0, now).token.replacen(PREFIX, "", 1);
        assert_eq!(verify(&keys, &bare, now), Err(ProofError::Malformed));
    }

    #[test]
    fn slugs_are_the_hosts() {
        for good in ["a", "notes", "my-app-2", &"a".repeat(41)] {
            assert!(is_slug(good), "{good}");
        }
        for bad in ["", "A", "1a", "-a", "a_b", "a.b", "~a", &"a".repeat(42)] {
            assert!(!is_slug(bad), "{bad}");
        }
    }
}

//! The value of a session cookie: a random id, signed by the key that signs app tokens.
//!
//! The signature grants nothing: the row of `sessions` decides. It only shows that a router made the value, so that an
//! invented one is refused without a query.

use serde::{Deserialize, Serialize};

use super::door::Door;
use super::session::{SessionError, random};
use crate::http::proof::{ProofKeys, Signer};

/// Tells a session from a JWT of the identity provider; `svcctl` reads it, too.
const PREFIX: &str = "svcs_";
const ISSUER: &str = "svc-session";
const MAX_CHARS: usize = 512;

#[derive(Serialize, Deserialize)]
struct SessionClaims {
    iss: String,
    jti: String,
    host: String,
}

pub(super) fn mint(signer: &Signer, door: Door) -> Result<String, SessionError> {
    let claims = SessionClaims { iss: ISSUER.to_owned(), jti: random()?, host: door.as_str().to_owned() };
    Ok(format!("{PREFIX}{}", signer.sign_json(&claims)))
}

/// Whether a router made this value for this host.
pub(super) fn is_genuine(keys: &ProofKeys, door: Door, token: &str) -> bool {
    let Some(jwt) = token.strip_prefix(PREFIX).filter(|_| token.len() <= MAX_CHARS) else { return false };
    let claims = keys.open(jwt).ok().and_then(|body| serde_json::from_slice::<SessionClaims>(&body).ok());
    claims.is_some_and(|claims| claims.iss == ISSUER && claims.host == door.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_routers_own_value_for_the_host_is_genuine() {
        let signer = |kid| Signer::from_pkcs8(kid, &Signer::generate().unwrap()).unwrap();
        let (own, other) = (signer("app-1"), signer("app-1"));
        let keys = ProofKeys { keys: vec![own.public()] };
        let token = mint(&own, Door::App).unwrap();
        assert!(token.len() < MAX_CHARS);
        assert!(is_genuine(&keys, Door::App, &token));
        assert!(!is_genuine(&keys, Door::Code, &token), "another host's");
        assert!(!is_genuine(&keys, Door::App, &mint(&other, Door::App).unwrap()), "another key's");
        let app_token =
            own.sign_json(&serde_json::json!({ "iss": "svc-app-token", "jti": "x", "host": "app" }));
        assert!(!is_genuine(&keys, Door::App, &format!("{PREFIX}{app_token}")), "another purpose");
        for invented in ["", "x", &"A".repeat(43), &token[..token.len() - 2], &"A".repeat(9999)] {
            assert!(!is_genuine(&keys, Door::App, invented), "{invented}");
        }
    }
}

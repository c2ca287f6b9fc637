//! A session cookie's value: a random id, signed with the key for app tokens.
//!
//! The signature grants no access: access requires a row in `sessions`. The signature only proves that a router issued
//! the value, so that a forged value is rejected without a query.

use serde::{Deserialize, Serialize};

use crate::public_host::PublicHost;
use svc_http::proof::{ProofKeys, Signer};

/// Distinguishes a session token from the identity provider's JWT. `svc_verify` relies on this prefix, too.
const PREFIX: &str = "svcs_";
const ISSUER: &str = "svc-session";
const MAX_TOKEN_BYTES: usize = 512;

#[derive(Serialize, Deserialize)]
struct SessionClaims {
    iss: String,
    jti: String,
    host: String,
}

/// Returns a token for this host. `id` must be random, because the token is the session's only secret.
pub(super) fn mint(signer: &Signer, host: PublicHost, id: String) -> String {
    let claims = SessionClaims { iss: ISSUER.to_owned(), jti: id, host: host.as_str().to_owned() };
    format!("{PREFIX}{}", signer.sign_json(&claims))
}

/// Whether a router issued this value for this host.
pub(super) fn is_genuine(keys: &ProofKeys, host: PublicHost, token: &str) -> bool {
    let Some(jwt) = token.strip_prefix(PREFIX).filter(|_| token.len() <= MAX_TOKEN_BYTES) else {
        return false;
    };
    let claims =
        keys.verify_signature(jwt).ok().and_then(|body| serde_json::from_slice::<SessionClaims>(&body).ok());
    claims.is_some_and(|claims| claims.iss == ISSUER && claims.host == host.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_genuine_accepts_only_tokens_issued_for_host() {
        let signer = |kid| Signer::from_pkcs8(kid, &Signer::generate().unwrap()).unwrap();
        let (own, other) = (signer("app-1"), signer("app-1"));
        let keys = ProofKeys { keys: vec![own.public_key()] };
        let id = || "A".repeat(43);
        let token = mint(&own, PublicHost::App, id());
        assert!(token.len() < MAX_TOKEN_BYTES);
        assert!(is_genuine(&keys, PublicHost::App, &token));
        assert!(!is_genuine(&keys, PublicHost::Code, &token), "for another host");
        assert!(
            !is_genuine(&keys, PublicHost::App, &mint(&other, PublicHost::App, id())),
            "signed with another key"
        );
        let app_token =
            own.sign_json(&serde_json::json!({ "iss": "svc-app-token", "jti": "x", "host": "app" }));
        assert!(!is_genuine(&keys, PublicHost::App, &format!("{PREFIX}{app_token}")), "a different purpose");
        for forged in ["", "x", &"A".repeat(43), &token[..token.len() - 2], &"A".repeat(9999)] {
            assert!(!is_genuine(&keys, PublicHost::App, forged), "{forged}");
        }
    }
}

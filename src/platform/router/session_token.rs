//! Issues and verifies the values of session cookies. A value consists of a random id and a digest of the user, and is
//! signed with the key for app tokens.
//!
//! The signature grants no access: access requires a row in `sessions`. The signature only proves that a router issued
//! the value, and to whom, so that a forged value is rejected without a query.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use crate::public_host::PublicHost;
use svc_http::proof::{ProofKeys, Signer};
use svc_machine::name::IdpUserId;

/// Distinguishes a session token from the identity provider's JWT. `svc_verify` relies on this prefix, too.
const PREFIX: &str = "svcs_";
const ISSUER: &str = "svc-session";
const MAX_TOKEN_BYTES: usize = 512;

/// Identifies a session in the database, which does not store its token.
pub(super) type TokenHash = [u8; 32];

#[derive(Serialize, Deserialize)]
struct SessionClaims {
    iss: String,
    jti: String,
    host: String,
    /// `None` in a token of an earlier release. Sessions expire after 12 hours.
    user: Option<String>,
}

/// Returns a token for this host. `id` must be random, because the token is the session's only secret.
pub(super) fn mint(signer: &Signer, host: PublicHost, id: String, user: &IdpUserId) -> String {
    let user = Some(digest_user(&id, user));
    let claims = SessionClaims { iss: ISSUER.to_owned(), jti: id, host: host.as_str().to_owned(), user };
    format!("{PREFIX}{}", signer.sign_json(&claims))
}

/// Whether a router issued this value for this host.
pub(super) fn is_genuine(keys: &ProofKeys, host: PublicHost, token: &str) -> bool {
    verify(keys, host, token).is_some()
}

/// Whether a router issued this value for this host and this user. `false` for a token of an earlier release.
pub(super) fn is_issued_to(keys: &ProofKeys, host: PublicHost, token: &str, user: &IdpUserId) -> bool {
    verify(keys, host, token).is_some_and(|claims| claims.user == Some(digest_user(&claims.jti, user)))
}

/// Returns the claims of a genuine token for this host.
fn verify(keys: &ProofKeys, host: PublicHost, token: &str) -> Option<SessionClaims> {
    let jwt = token.strip_prefix(PREFIX).filter(|_| token.len() <= MAX_TOKEN_BYTES)?;
    let body = keys.verify_signature(jwt).ok()?;
    let claims: SessionClaims = serde_json::from_slice(&body).ok()?;
    (claims.iss == ISSUER && claims.host == host.as_str()).then_some(claims)
}

/// Computes a digest, so that the cookie neither reveals the user's id nor grows with it.
fn digest_user(id: &str, user: &IdpUserId) -> String {
    B64.encode(sha256(format!("{id}\0{user}").as_bytes()))
}

pub(super) fn sha256(bytes: &[u8]) -> TokenHash {
    digest(&SHA256, bytes).as_ref().try_into().expect("SHA-256 is 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signer(kid: &str) -> Signer {
        Signer::from_pkcs8(kid, &Signer::generate_pkcs8().unwrap()).unwrap()
    }

    fn user(id: &str) -> IdpUserId {
        id.parse().unwrap()
    }

    #[test]
    fn is_genuine_accepts_only_tokens_issued_for_host() {
        let (own, other) = (signer("app-1"), signer("app-1"));
        let keys = ProofKeys { keys: vec![own.public_key()] };
        let (id, user) = (|| "A".repeat(43), user("user_1"));
        let token = mint(&own, PublicHost::App, id(), &user);
        assert!(token.len() < MAX_TOKEN_BYTES);
        assert!(is_genuine(&keys, PublicHost::App, &token));
        assert!(!is_genuine(&keys, PublicHost::Code, &token), "a token for another host");
        assert!(
            !is_genuine(&keys, PublicHost::App, &mint(&other, PublicHost::App, id(), &user)),
            "a token signed with another key"
        );
        let app_token =
            own.sign_json(&serde_json::json!({ "iss": "svc-app-token", "jti": "x", "host": "app" }));
        assert!(!is_genuine(&keys, PublicHost::App, &format!("{PREFIX}{app_token}")), "an app token");
        for forged in ["", "x", &"A".repeat(43), &token[..token.len() - 2], &"A".repeat(9999)] {
            assert!(!is_genuine(&keys, PublicHost::App, forged), "{forged}");
        }
    }

    #[test]
    fn is_issued_to_accepts_only_session_user() {
        let own = signer("app-1");
        let keys = ProofKeys { keys: vec![own.public_key()] };
        let token = mint(&own, PublicHost::App, "A".repeat(43), &user("user_1"));
        assert!(is_issued_to(&keys, PublicHost::App, &token, &user("user_1")));
        assert!(!is_issued_to(&keys, PublicHost::App, &token, &user("user_2")));
        assert!(!is_issued_to(&keys, PublicHost::Code, &token, &user("user_1")), "a token for another host");
        let earlier = own.sign_json(&serde_json::json!({ "iss": ISSUER, "jti": "x", "host": "app" }));
        let earlier = format!("{PREFIX}{earlier}");
        assert!(is_genuine(&keys, PublicHost::App, &earlier), "a token of an earlier release");
        assert!(!is_issued_to(&keys, PublicHost::App, &earlier, &user("user_1")), "a token without a user");
    }
}

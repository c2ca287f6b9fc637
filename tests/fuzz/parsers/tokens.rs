//! The two tokens that authenticate a user: the identity provider's JWT, and the platform's proof. Each is accepted
//! only for the user that it was signed for.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use jiff::Timestamp;
use proptest::prelude::*;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde_json::{Value, json};
use svc::http::jwt::{TrustedIssuer, Verifier};
use svc::http::proof::{self, ProofKey, ProofKeys};
use svc::machine::id::MachineId;

use super::Target;
use super::objects::block_on;

const NOW_SECONDS: i64 = 1_780_000_000;
const KID: &str = "k1";
const ISSUER: &str = "https://id.example";
const AUDIENCE: &str = "svc";
const JWT_LEEWAY_SECONDS: f64 = svc::http::jwt::LEEWAY_SECONDS as f64;

static KEY: LazyLock<Ed25519KeyPair> =
    LazyLock::new(|| Ed25519KeyPair::from_seed_unchecked(&[7; 32]).expect("32 bytes are a seed"));

fn now() -> Timestamp {
    Timestamp::from_second(NOW_SECONDS).expect("the time is in range")
}

fn public_key_base64() -> String {
    B64.encode(KEY.public_key())
}

fn sign_token(header: &[u8], payload: &[u8]) -> String {
    let signed = format!("{}.{}", B64.encode(header), B64.encode(payload));
    let signature = B64.encode(KEY.sign(signed.as_bytes()));
    format!("{signed}.{signature}")
}

fn header() -> Vec<u8> {
    json!({ "alg": "EdDSA", "typ": "JWT", "kid": KID }).to_string().into_bytes()
}

/// Returns the token's payload if the test's key signed it.
fn verified_payload(token: &str) -> Option<Vec<u8>> {
    let (signed, signature) = token.rsplit_once('.')?;
    let signature = B64.decode(signature).ok()?;
    UnparsedPublicKey::new(&ED25519, KEY.public_key()).verify(signed.as_bytes(), &signature).ok()?;
    B64.decode(signed.split_once('.')?.1).ok()
}

fn verified_claims(token: &str) -> Option<Value> {
    serde_json::from_slice(&verified_payload(token)?).ok()
}

/// Returns copies of the token with one byte changed, at positions throughout it.
fn altered_tokens(token: &str) -> impl Iterator<Item = String> {
    let step = (token.len() / 24).max(1);
    (0..token.len()).step_by(step).chain(token.len().checked_sub(1)).filter_map(|position| {
        let mut bytes = token.as_bytes().to_vec();
        bytes[position] = if bytes[position] == b'A' { b'B' } else { b'A' };
        String::from_utf8(bytes).ok()
    })
}

/// Checks an accepted token: the test's key signed it, and changing a sampled byte invalidates it. Returns `None` if an
/// ignored claim is JSON that this test's parser rejects, such as an out-of-range number.
fn check_signature_is_required<T>(
    token: &str,
    accept: impl Fn(&str) -> Option<T>,
) -> Result<Option<Value>, String> {
    let payload =
        verified_payload(token).ok_or_else(|| format!("{token} was accepted without a valid signature"))?;
    match altered_tokens(token).find(|altered| accept(altered).is_some()) {
        Some(altered) => Err(format!("{altered}, which differs from {token} in one byte, was accepted")),
        None => Ok(serde_json::from_slice(&payload).ok()),
    }
}

/// Uses the bytes as a token, as the claims of a signed token, and as the header of a signed token.
fn embed_in_tokens(bytes: &[u8], payload: &[u8]) -> Vec<String> {
    let token = std::str::from_utf8(bytes).map(str::to_owned).ok();
    token.into_iter().chain([sign_token(&header(), bytes), sign_token(bytes, payload)]).collect()
}

pub fn jwt() -> Target {
    Target {
        name: "jwt",
        valid: jwts().boxed(),
        check_any: check_any_jwt,
        check_valid: |bytes| check_valid(bytes, jwt_user),
        cases: 300,
    }
}

fn jwts() -> impl Strategy<Value = Vec<u8>> {
    let user = "[A-Za-z0-9][A-Za-z0-9._|:@+-]{0,30}";
    let audience = prop_oneof![Just(json!(AUDIENCE)), Just(json!(["other", AUDIENCE]))];
    let claims = (user, audience, 1..100_000i64).prop_map(|(user, audience, lifetime_seconds)| {
        json!({ "iss": ISSUER, "sub": user, "aud": audience, "exp": NOW_SECONDS + lifetime_seconds,
            "iat": NOW_SECONDS, "nbf": NOW_SECONDS })
    });
    (claims, any::<bool>()).prop_map(|(claims, is_token)| {
        let claims = claims.to_string().into_bytes();
        // Bare claims are signed after they have been mutated, so that mutations reach the claims parser.
        if is_token { sign_token(&header(), &claims).into_bytes() } else { claims }
    })
}

/// The URL of the issuer's keys, which this process serves.
static JWKS_URL: LazyLock<url::Url> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind a port");
    let address = listener.local_addr().expect("the listener is bound");
    let keys = json!({ "keys": [{ "kty": "OKP", "crv": "Ed25519", "kid": KID, "x": public_key_base64() }] })
        .to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let response = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{keys}",
                keys.len()
            );
            // Errors from a disconnected client are irrelevant.
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(response.as_bytes());
        }
    });
    format!("http://{address}/jwks").parse().expect("the URL is valid")
});

fn jwt_user(token: &str) -> Option<String> {
    thread_local! {
        static VERIFIER: Verifier = {
            let client = svc::http::client::build(svc::http::client::Timeouts::CALL).expect("build a client");
            let trust = TrustedIssuer { issuer: ISSUER.to_owned(), audiences: vec![AUDIENCE.to_owned()], jwks_url: JWKS_URL.clone() };
            let verifier = Verifier::new(trust, client);
            // Fetches the keys.
            let warm_up = sample_user_token();
            let user = block_on(verifier.verify(&warm_up, now())).expect("the token is valid");
            assert_eq!(user.user.as_str(), "sample_user");
            verifier
        };
    }
    VERIFIER.with(|verifier| {
        let subject = verifier.verify_with_cached_keys(token, now()).ok()?;
        Some(subject.user.as_str().to_owned())
    })
}

fn sample_user_claims() -> Value {
    json!({ "iss": ISSUER, "sub": "sample_user", "aud": AUDIENCE, "exp": NOW_SECONDS + 60 })
}

fn sample_user_token() -> String {
    sign_token(&header(), sample_user_claims().to_string().as_bytes())
}

fn check_any_jwt(bytes: &[u8]) -> Result<(), String> {
    let payload = sample_user_claims().to_string();
    for token in embed_in_tokens(bytes, payload.as_bytes()) {
        let Some(user) = jwt_user(&token) else { continue };
        let Some(claims) = check_signature_is_required(&token, jwt_user)? else { continue };
        let is_ours = |name: &Value| name == AUDIENCE;
        let is_for_us = match &claims["aud"] {
            Value::Array(all) => all.iter().any(is_ours),
            Value::Null => is_ours(&claims["azp"]),
            audience => is_ours(audience),
        };
        let is_unexpired =
            claims["exp"].as_f64().is_some_and(|end| NOW_SECONDS as f64 <= end + JWT_LEEWAY_SECONDS);
        let has_begun =
            claims["nbf"].as_f64().is_none_or(|begin| NOW_SECONDS as f64 + JWT_LEEWAY_SECONDS >= begin);
        if claims["sub"] != user.as_str()
            || claims["iss"] != ISSUER
            || !is_for_us
            || !is_unexpired
            || !has_begun
        {
            return Err(format!("{claims} is accepted as {user}"));
        }
    }
    Ok(())
}

/// Signs the claims, which the bytes contain directly or as a token, and checks that the new token is accepted for the
/// claims' user. `accept` returns the user.
fn check_valid(bytes: &[u8], accept: impl Fn(&str) -> Option<String>) -> Result<(), String> {
    let payload = std::str::from_utf8(bytes).ok().and_then(verified_claims);
    let claims: Value =
        payload.map_or_else(|| serde_json::from_slice(bytes).map_err(|error| error.to_string()), Ok)?;
    let user =
        accept(&sign_token(&header(), claims.to_string().as_bytes())).ok_or("the token was rejected")?;
    if claims["sub"] == user.as_str() { Ok(()) } else { Err(format!("accepted as {user}")) }
}

pub fn proof() -> Target {
    Target {
        name: "proof",
        valid: proofs().boxed(),
        check_any: check_any_proof,
        check_valid: |bytes| check_valid(bytes, proof_user),
        cases: 300,
    }
}

const MACHINE: MachineId = MachineId(uuid::Uuid::from_u128(7));

fn proof_claims(user: &str, lifetime_seconds: i64) -> Value {
    json!({ "iss": proof::ISSUER, "aud": MACHINE, "sub": user, "handle": "ada", "slot": "primary",
        "route": "shell", "iat": NOW_SECONDS, "exp": NOW_SECONDS + lifetime_seconds })
}

fn proofs() -> impl Strategy<Value = Vec<u8>> {
    let user = "[A-Za-z0-9][A-Za-z0-9._|:@+-]{0,30}";
    (user, 1..=proof::MAX_LIFETIME_SECONDS, any::<bool>()).prop_map(|(user, lifetime_seconds, is_token)| {
        let claims = proof_claims(&user, lifetime_seconds).to_string().into_bytes();
        if is_token { sign_token(&header(), &claims).into_bytes() } else { claims }
    })
}

fn verify_proof(token: &str) -> Option<proof::Claims> {
    let keys = ProofKeys { keys: vec![ProofKey { kid: KID.to_owned(), x: public_key_base64() }] };
    keys.verify(token, MACHINE, now()).ok()
}

fn proof_user(token: &str) -> Option<String> {
    Some(verify_proof(token)?.sub.as_str().to_owned())
}

fn check_any_proof(bytes: &[u8]) -> Result<(), String> {
    let payload = proof_claims("sample_user", 30).to_string();
    for token in embed_in_tokens(bytes, payload.as_bytes()) {
        let Some(claims) = verify_proof(&token) else { continue };
        let Some(signed) = check_signature_is_required(&token, verify_proof)? else { continue };
        let is_same = signed["sub"] == claims.sub.as_str()
            && signed["handle"] == claims.handle.as_str()
            && signed["slot"] == claims.slot.as_str()
            && signed["aud"].as_str().and_then(|text| text.parse().ok()) == Some(MACHINE.0);
        let lifetime_seconds = i128::from(claims.exp) - i128::from(claims.iat);
        let is_current = NOW_SECONDS <= claims.exp.saturating_add(proof::LEEWAY_SECONDS)
            && NOW_SECONDS >= claims.iat.saturating_sub(proof::LEEWAY_SECONDS);
        if !is_same
            || claims.iss != proof::ISSUER
            || lifetime_seconds > proof::MAX_LIFETIME_SECONDS.into()
            || !is_current
        {
            return Err(format!("{signed} is accepted as {claims:?}"));
        }
    }
    Ok(())
}

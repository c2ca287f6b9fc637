//! The identity provider's keys: each key is used only for its own purpose.

use proptest::prelude::*;
use serde_json::{Value, json};
use svc::http::jwt::read_keys;

use super::Target;

pub fn target() -> Target {
    Target { name: "jwks", valid: sets().boxed(), check_any, check_valid, cases: 1000 }
}

/// Returns public keys from RFC 8037 and RFC 7515; the RSA modulus is truncated.
fn keys() -> [Value; 3] {
    [
        json!({ "kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo" }),
        json!({ "kty": "EC", "crv": "P-256", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
            "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0" }),
        json!({ "kty": "RSA", "e": "AQAB", "n": "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp" }),
    ]
}

fn sets() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec((0..3_usize, 0..4_u8), 0..5).prop_map(|choices| {
        let chosen = choices.into_iter().enumerate().map(|(index, (kind, member))| {
            let mut key = keys()[kind].clone();
            key["kid"] = format!("k{index}").into();
            match member {
                0 => key["use"] = "sig".into(),
                1 => key["key_ops"] = json!(["verify"]),
                2 => key["use"] = "enc".into(),
                _ => {}
            }
            key
        });
        json!({ "keys": chosen.collect::<Vec<_>>() }).to_string().into_bytes()
    })
}

/// Checks that each accepted key has one algorithm that fits its type, and that the set permits it for signatures.
fn check_any(bytes: &[u8]) -> Result<(), String> {
    let Ok(keys) = read_keys(bytes) else { return Ok(()) };
    let set: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    // serde also accepts the set as an array of its members' values.
    let listed = set
        .get("keys")
        .or_else(|| set.get(0))
        .and_then(Value::as_array)
        .ok_or("the set has no list of keys")?;
    for (kid, algorithms) in keys {
        let [algorithm] = algorithms.as_slice() else { return Err(format!("{kid} has {algorithms:?}")) };
        let kty = match format!("{algorithm:?}").as_str() {
            "RS256" => "RSA",
            "ES256" => "EC",
            "EdDSA" => "OKP",
            other => return Err(format!("{kid} is for {other}")),
        };
        let is_for_signatures =
            |key: &Value| key.get("use").is_none_or(|usage| usage == "sig" || usage.is_null());
        if !listed.iter().any(|key| key["kid"] == kid.as_str() && key["kty"] == kty && is_for_signatures(key))
        {
            return Err(format!("{kid} was accepted for {algorithm:?} from {set}"));
        }
    }
    Ok(())
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let set: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let is_for_signatures = |key: &&Value| key["use"] != "enc";
    let expected = set["keys"].as_array().into_iter().flatten().filter(is_for_signatures).count();
    let read = read_keys(bytes).map_err(|error| error.to_string())?;
    if read.len() == expected { Ok(()) } else { Err(format!("{read:?} instead of {expected} keys")) }
}

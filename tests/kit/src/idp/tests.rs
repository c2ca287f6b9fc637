//! Tests of the issuer's tokens and keys from a verifier's point of view.

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};
use serde_json::Value;

use super::*;

fn decode(text: &str) -> Result<Vec<u8>> {
    Ok(URL_SAFE_NO_PAD.decode(text)?)
}

fn field(jwk: &Value, name: &str) -> Result<Vec<u8>> {
    decode(jwk[name].as_str().with_context(|| format!("no {name} in {jwk}"))?)
}

async fn get(url: &str) -> Result<String> {
    rustls::crypto::ring::default_provider().install_default().ok();
    Ok(reqwest::get(url).await?.error_for_status()?.text().await?)
}

/// Returns a token's claims if a published key has signed it with that key's algorithm.
async fn verify(idp: &Idp, token: &str) -> Result<Value> {
    let jwks: Value = serde_json::from_str(&get(&idp.jwks_url()).await?)?;
    let (signing_input, signature) = token.rsplit_once('.').context("the token has no signature")?;
    let (header, claims) = signing_input.split_once('.').context("the token does not have three parts")?;
    let (header, signature): (Value, _) = (serde_json::from_slice(&decode(header)?)?, decode(signature)?);
    let keys = jwks["keys"].as_array().context("the JWKS has no keys")?;
    let jwk = keys.iter().find(|jwk| jwk["kid"] == header["kid"]).context("unknown kid")?;
    anyhow::ensure!(jwk["alg"] == header["alg"], "the algorithm does not match the key");
    let result = match header["alg"].as_str().context("the header has no alg")? {
        "EdDSA" => {
            UnparsedPublicKey::new(&ED25519, field(jwk, "x")?).verify(signing_input.as_bytes(), &signature)
        }
        "ES256" => {
            let point = [vec![4], field(jwk, "x")?, field(jwk, "y")?].concat();
            UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point)
                .verify(signing_input.as_bytes(), &signature)
        }
        "RS256" => RsaPublicKeyComponents { n: field(jwk, "n")?, e: field(jwk, "e")? }.verify(
            &RSA_PKCS1_2048_8192_SHA256,
            signing_input.as_bytes(),
            &signature,
        ),
        other => anyhow::bail!("alg {other}"),
    };
    result.ok().context("the signature is invalid")?;
    Ok(serde_json::from_slice(&decode(claims)?)?)
}

#[tokio::test]
async fn tokens_verify_with_published_keys() -> Result<()> {
    let idp = Idp::start()?;
    for alg in Alg::ALL {
        let token =
            idp.mint("user_1", &MintOptions { alg, azp: Some("app".into()), ..MintOptions::default() });
        let claims = verify(&idp, &token).await?;
        assert_eq!((&claims["sub"], &claims["azp"]), (&"user_1".into(), &"app".into()), "{alg:?}");
        assert_eq!(
            (claims["iss"].as_str(), claims["aud"].as_str()),
            (Some(&*idp.issuer()), Some(Idp::AUDIENCE))
        );
        let now = jiff::Timestamp::now().as_second();
        assert!(claims["exp"].as_i64() > Some(now + 290) && claims["nbf"].as_i64() <= Some(now), "{claims}");
    }
    assert_eq!(idp.jwks_fetch_count(), 3);
    Ok(())
}

#[tokio::test]
async fn flawed_tokens_do_not_verify() -> Result<()> {
    let idp = Idp::start()?;
    for alg in Alg::ALL {
        for flaw in Flaw::ALL {
            let token = idp.mint("user_1", &MintOptions { alg, flaw: Some(flaw), ..MintOptions::default() });
            assert!(verify(&idp, &token).await.is_err(), "{alg:?} {flaw:?}");
        }
        let kid = Some("unknown".to_owned());
        assert!(
            verify(&idp, &idp.mint("user_1", &MintOptions { alg, kid, ..MintOptions::default() }))
                .await
                .is_err()
        );
    }
    Ok(())
}

#[tokio::test]
async fn mint_applies_claim_overrides() -> Result<()> {
    let idp = Idp::start()?;
    let mut options = MintOptions {
        ttl_seconds: -60,
        nbf_offset_seconds: -120,
        iss: Some("https://other".into()),
        aud: None,
        ..MintOptions::default()
    };
    options.claims.insert("sid".into(), Value::Null);
    options.claims.insert("role".into(), "admin".into());
    let claims = verify(&idp, &idp.mint("user_1", &options)).await?;
    let now = jiff::Timestamp::now().as_second();
    assert!(claims["exp"].as_i64() < Some(now - 50), "{claims}");
    assert_eq!((&claims["iss"], &claims["role"]), (&"https://other".into(), &"admin".into()));
    assert!(claims.get("aud").is_none() && claims.get("sid").is_none(), "{claims}");
    Ok(())
}

#[tokio::test]
async fn rotation_publishes_or_withdraws_old_keys() -> Result<()> {
    let idp = Idp::start()?;
    let options = MintOptions { alg: Alg::EdDsa, ..MintOptions::default() };
    let (first_kid, first) = (idp.kid(Alg::EdDsa), idp.mint("user_1", &options));
    idp.rotate(OldKeys::Published)?;
    assert_ne!(idp.kid(Alg::EdDsa), first_kid);
    let second = idp.mint("user_1", &options);
    verify(&idp, &first).await?;
    verify(&idp, &second).await?;
    idp.rotate(OldKeys::Withdrawn)?;
    assert!(verify(&idp, &second).await.is_err());
    verify(&idp, &idp.mint("user_1", &options)).await?;
    Ok(())
}

#[tokio::test]
async fn discovery_and_mint_work_over_http() -> Result<()> {
    let idp = Idp::start()?;
    let discovery: Value =
        serde_json::from_str(&get(&format!("{}/.well-known/openid-configuration", idp.issuer())).await?)?;
    assert_eq!(
        (&discovery["issuer"], &discovery["jwks_uri"]),
        (&idp.issuer().into(), &idp.jwks_url().into())
    );
    let token = get(&format!("{}/mint?sub=user_2&ttl=30&alg=ES256&aud=other", idp.issuer())).await?;
    let claims = verify(&idp, &token).await?;
    assert_eq!(
        (&claims["sub"], &claims["aud"], &claims["iss"]),
        (&"user_2".into(), &"other".into(), &idp.issuer().into())
    );
    assert!(get(&format!("{}/mint?sub=user_2&alg=HS256", idp.issuer())).await.is_err());
    Ok(())
}

#[tokio::test]
async fn jwks_errors_and_outages_can_be_simulated() -> Result<()> {
    let idp = Idp::start()?;
    idp.set_jwks_status(503);
    assert!(get(&idp.jwks_url()).await.is_err());
    idp.set_jwks_status(200);
    get(&idp.jwks_url()).await?;
    assert_eq!(idp.jwks_fetch_count(), 2);
    idp.take_down();
    assert!(get(&idp.jwks_url()).await.is_err());
    idp.bring_up()?;
    get(&idp.jwks_url()).await?;
    assert_eq!(idp.jwks_fetch_count(), 3);
    Ok(())
}

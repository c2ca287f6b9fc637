//! Tests for STS and sessions: with its token, a session may do exactly what its policy allows, until it expires.

use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::TryStreamExt;
use object_store::Error;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::client::{HttpClient, HttpRequest};

use super::*;

const POLICY: &str = r#"{"Version":"2012-10-17","Statement":[
    {"Effect":"Allow","Action":["s3:GetObject","s3:PutObject","s3:AbortMultipartUpload"],
     "Resource":"arn:aws:s3:::fleet/u/s/*"},
    {"Effect":"Allow","Action":"s3:ListBucket","Resource":"arn:aws:s3:::fleet",
     "Condition":{"StringLike":{"s3:prefix":"u/s/*"}}}]}"#;

async fn call_sts(
    fixture: &Fixture,
    credential: &AwsCredential,
    service: &str,
    form: &[(&str, &str)],
) -> Result<(u16, String)> {
    let form = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(form).finish();
    let mut request = HttpRequest::new(form.into());
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = format!("{}/", fixture.server.endpoint()).parse()?;
    request.headers_mut().insert("content-type", "application/x-www-form-urlencoded".parse()?);
    AwsAuthorizer::new(credential, service, "auto").try_authorize(&mut request, None)?;
    let response = HttpClient::new(reqwest::Client::new()).execute(request).await?;
    let status = response.status().as_u16();
    Ok((status, String::from_utf8(response.into_body().bytes().await?.to_vec())?))
}

fn owner(fixture: &Fixture) -> AwsCredential {
    let key_id = fixture.server.access_key().to_owned();
    AwsCredential { key_id, secret_key: fixture.server.secret_key().to_owned(), token: None }
}

fn form<'a>(policy: &'a str, overrides: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut form = vec![
        ("Action", "AssumeRole"),
        ("Version", "2011-06-15"),
        ("RoleArn", "arn:aws:iam::000000000000:role/x"),
        ("RoleSessionName", "svc-1"),
        ("Policy", policy),
    ];
    form.retain(|(name, _)| overrides.iter().all(|(overridden, _)| overridden != name));
    form.extend(overrides);
    form
}

async fn create_session(fixture: &Fixture) -> Result<AwsCredential> {
    let (status, xml) = call_sts(fixture, &owner(fixture), "sts", &form(POLICY, &[])).await?;
    anyhow::ensure!(status == 200, "{xml}");
    let field = |name: &str| {
        let after = xml.split_once(&format!("<{name}>")).context("a field is missing")?.1;
        Ok::<_, anyhow::Error>(after.split('<').next().unwrap_or_default().to_owned())
    };
    Ok(AwsCredential {
        key_id: field("AccessKeyId")?,
        secret_key: field("SecretAccessKey")?,
        token: Some(field("SessionToken")?),
    })
}

fn client(fixture: &Fixture, credential: AwsCredential) -> Result<AmazonS3> {
    Ok(AmazonS3Builder::new()
        .with_endpoint(fixture.server.endpoint())
        .with_allow_http(true)
        .with_bucket_name("fleet")
        .with_region(fixture.server.region())
        .with_credentials(Arc::new(object_store::StaticCredentialProvider::new(credential)))
        .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
        .build()?)
}

#[track_caller]
fn assert_denied<T: std::fmt::Debug>(access: &str, result: &object_store::Result<T>) {
    // The client has no specific error for a denied listing.
    let text = format!("{result:?}");
    let is_denied = matches!(result, Err(Error::PermissionDenied { .. })) || text.contains("AccessDenied");
    assert!(result.is_err() && is_denied, "{access}: {text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn session_may_do_only_what_its_policy_allows() -> Result<()> {
    let fixture = fixture()?;
    fixture.server.write("fleet", "u/other/secret", "another's");
    fixture.server.write("fleet", "system-bundles/1/x", "bundle");
    let client = client(&fixture, create_session(&fixture).await?)?;
    let allowed = Key::from("u/s/a");
    client.put(&allowed, "mine".into()).await?;
    assert_eq!(client.get(&allowed).await?.bytes().await?, "mine");
    let mut upload = client.put_multipart(&Key::from("u/s/b")).await?;
    upload.put_part("part".into()).await?;
    upload.complete().await?;
    let mut upload = client.put_multipart(&Key::from("u/s/c")).await?;
    upload.put_part("part".into()).await?;
    upload.abort().await?;
    let listed: Vec<_> = client.list(Some(&Key::from("u/s"))).try_collect().await?;
    assert_eq!(listed.len(), 2);

    for path in ["u/other/secret", "u/s2/x", "u/s", "system-bundles/1/x", "x"] {
        let key = Key::from(path);
        assert_denied(path, &client.get(&key).await);
        assert_denied(path, &client.head(&key).await);
        assert_denied(path, &client.put(&key, "x".into()).await);
        assert_denied(path, &client.put_multipart(&key).await);
        assert_denied(path, &client.copy(&allowed, &key).await);
        assert_denied(path, &client.copy(&key, &allowed).await);
    }
    for prefix in [None, Some("u"), Some("u/other"), Some("u/s2"), Some("system-bundles")] {
        let prefix = prefix.map(Key::from);
        assert_denied("list", &client.list(prefix.as_ref()).try_collect::<Vec<_>>().await);
    }
    assert_denied("delete", &client.delete(&allowed).await);
    assert_denied("a missing object", &client.get(&Key::from("u/s/none")).await);
    assert_eq!(fixture.server.read("fleet", "u/s/a").as_deref(), Some(&b"mine"[..]));
    assert_eq!(fixture.server.read("fleet", "u/other/secret").as_deref(), Some(&b"another's"[..]));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn session_requires_token_and_expires() -> Result<()> {
    let fixture = fixture()?;
    let key = Key::from("u/s/a");
    let credential = create_session(&fixture).await?;
    let with_token = |token: Option<String>| AwsCredential {
        key_id: credential.key_id.clone(),
        secret_key: credential.secret_key.clone(),
        token,
    };
    for token in [None, Some("another".to_owned())] {
        let error = client(&fixture, with_token(token))?
            .put(&key, "x".into())
            .await
            .expect_err("a request without the right token is rejected")
            .to_string();
        assert!(error.contains("InvalidToken"), "{error}");
    }
    let valid = client(&fixture, with_token(credential.token.clone()))?;
    valid.put(&key, "x".into()).await?;
    let wrong = AwsCredential { secret_key: "wrong".to_owned(), ..with_token(credential.token.clone()) };
    let error = client(&fixture, wrong)?
        .put(&key, "x".into())
        .await
        .expect_err("a wrong secret key is rejected")
        .to_string();
    assert!(error.contains("SignatureDoesNotMatch"), "{error}");

    fixture.server.expire_sessions();
    let error = valid.put(&key, "x".into()).await.expect_err("the session has expired").to_string();
    assert!(error.contains("ExpiredToken"), "{error}");

    fixture.server.set_session_lifetime(Some(Duration::from_millis(300)));
    let short = client(&fixture, create_session(&fixture).await?)?;
    short.put(&key, "x".into()).await?;
    tokio::time::sleep(Duration::from_millis(350)).await;
    short.put(&key, "x".into()).await.expect_err("the session has expired");

    fixture.server.set_session_lifetime(None);
    let last = client(&fixture, create_session(&fixture).await?)?;
    last.put(&key, "x".into()).await?;
    assert_eq!(fixture.server.revoke_sessions("svc-1"), 3);
    assert_denied("revoked", &last.put(&key, "x".into()).await);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sts_rejects_invalid_requests_like_aws() -> Result<()> {
    let fixture = fixture()?;
    let long_policy = format!(r#"{{"Version":"2012-10-17","Statement":[],"Sid":"{}"}}"#, "x".repeat(2048));
    let cases: [(&[(&str, &str)], &str); 6] = [
        (&[("RoleArn", "short")], "ValidationError"),
        (&[("RoleSessionName", "has space")], "ValidationError"),
        (&[("DurationSeconds", "899")], "ValidationError"),
        (&[("Policy", "{}")], "MalformedPolicyDocument"),
        (&[("Policy", &long_policy)], "ValidationError"),
        (&[("Action", "GetSessionToken")], "InvalidAction"),
    ];
    for (overrides, code) in cases {
        let (status, xml) = call_sts(&fixture, &owner(&fixture), "sts", &form(POLICY, overrides)).await?;
        assert!(status == 400 && xml.contains(code), "{overrides:?}: {status} {xml}");
    }
    let wrong = AwsCredential { secret_key: "wrong".to_owned(), ..owner(&fixture) };
    let (status, xml) = call_sts(&fixture, &wrong, "sts", &form(POLICY, &[])).await?;
    assert!(status == 403 && xml.contains("SignatureDoesNotMatch"), "{status} {xml}");
    let (status, _) = call_sts(&fixture, &owner(&fixture), "s3", &form(POLICY, &[])).await?;
    assert_eq!(status, 403, "a signature for the store is invalid for STS");
    let host = create_session(&fixture).await?;
    let (status, xml) = call_sts(&fixture, &host, "sts", &form(POLICY, &[])).await?;
    assert!(status == 403 && xml.contains("AccessDenied"), "a host may not create sessions: {xml}");
    assert_eq!(fixture.server.sessions().len(), 1);
    Ok(())
}

//! Tests for conditional reads and writes, sequential and racing.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions, ObjectStore, ObjectStoreExt, PutMode};

use super::{Fixture, fixture};

#[tokio::test]
async fn conditional_writes_are_enforced() -> Result<()> {
    let fixture = fixture()?;
    let first = fixture.put_if("pointer", "one", PutMode::Create).await?;
    assert!(matches!(
        fixture.put_if("pointer", "two", PutMode::Create).await,
        Err(Error::AlreadyExists { .. })
    ));
    let second = fixture.put_if("pointer", "two", PutMode::Update(first.clone())).await?;
    assert_ne!(first.e_tag, second.e_tag);
    assert!(matches!(
        fixture.put_if("pointer", "three", PutMode::Update(first)).await,
        Err(Error::Precondition { .. })
    ));
    assert_eq!(fixture.get("pointer").await?, b"two");

    fixture.server.remove("fleet", "pointer");
    fixture.server.clear_requests();
    assert!(matches!(
        fixture.put_if("pointer", "x", PutMode::Update(second)).await,
        Err(Error::Precondition { .. })
    ));
    assert_eq!(fixture.server.requests()[0].status, Some(412), "a missing object does not match");
    Ok(())
}

#[tokio::test]
async fn conditional_reads_are_enforced() -> Result<()> {
    let fixture = fixture()?;
    let key = Key::from("a");
    let etag = fixture.put_if("a", "one", PutMode::Create).await?.e_tag;
    let get = |if_match: Option<&str>, if_none_match: Option<&str>| {
        let options = GetOptions {
            if_match: if_match.map(str::to_owned),
            if_none_match: if_none_match.map(str::to_owned),
            ..GetOptions::default()
        };
        fixture.client.get_opts(&key, options)
    };
    assert!(matches!(get(None, etag.as_deref()).await, Err(Error::NotModified { .. })), "304");
    assert!(get(None, Some("\"other\"")).await.is_ok());
    assert!(get(etag.as_deref(), None).await.is_ok());
    assert!(matches!(get(Some("\"other\""), None).await, Err(Error::Precondition { .. })), "412");
    Ok(())
}

#[tokio::test]
async fn time_conditions_use_last_modification() -> Result<()> {
    let fixture = fixture()?;
    fixture.server.write("fleet", "a", "x");
    let written = fixture.client.head(&Key::from("a")).await?.last_modified;
    let earlier = written - Duration::from_secs(60);
    let get = |options: GetOptions| async { fixture.client.get_opts(&Key::from("a"), options).await };
    let since = |time| GetOptions { if_modified_since: Some(time), ..GetOptions::default() };
    let until = |time| GetOptions { if_unmodified_since: Some(time), ..GetOptions::default() };
    assert!(matches!(get(since(written)).await, Err(Error::NotModified { .. })));
    assert!(get(since(earlier)).await.is_ok());
    assert!(matches!(get(until(earlier)).await, Err(Error::Precondition { .. })));
    assert!(get(until(written)).await.is_ok());
    Ok(())
}

#[tokio::test]
async fn exactly_one_racing_conditional_write_wins() -> Result<()> {
    let fixture = Arc::new(fixture()?);
    let base = fixture.put_if("updated", "base", PutMode::Create).await?;
    let mut current = base;
    for round in 0..50 {
        let mut racers = tokio::task::JoinSet::new();
        for racer in 0..16 {
            let (fixture, current) = (Arc::clone(&fixture), current.clone());
            racers.spawn(async move {
                let content = format!("{round}-{racer}");
                let create = Key::from(format!("created-{round}"));
                let created =
                    fixture.client.put_opts(&create, content.clone().into(), PutMode::Create.into()).await;
                let update = PutMode::Update(current);
                let updated =
                    fixture.client.put_opts(&Key::from("updated"), content.into(), update.into()).await;
                (created.is_ok(), updated.ok())
            });
        }
        let outcomes = racers.join_all().await;
        assert_eq!(outcomes.iter().filter(|(created, _)| *created).count(), 1, "round {round}: creations");
        let mut updates = outcomes.into_iter().filter_map(|(_, updated)| updated);
        current = updates.next().expect("no update succeeded").into();
        assert!(updates.next().is_none(), "round {round}: several updates succeeded");
    }
    Ok(())
}

#[tokio::test]
async fn exactly_one_racing_conditional_completion_wins() -> Result<()> {
    let fixture = Arc::new(fixture()?);
    for round in 0..10 {
        let mut racers = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let fixture = Arc::clone(&fixture);
            racers.spawn(async move { complete_with_if_none_match(&fixture, &format!("k{round}")).await });
        }
        let statuses = racers.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1, "{statuses:?}");
        assert_eq!(statuses.iter().filter(|status| **status == 412).count(), 7, "{statuses:?}");
    }
    Ok(())
}

/// Uploads one part, and completes the upload with `If-None-Match: *`, which `object_store` does not support. Returns
/// the status of the completion.
async fn complete_with_if_none_match(fixture: &Fixture, key: &str) -> Result<u16> {
    let path = Key::from(key);
    let id = fixture.client.create_multipart(&path).await?;
    let etag = fixture.client.put_part(&path, &id, 0, "content".into()).await?.content_id;
    let body = format!(
        "<CompleteMultipartUpload><Part><ETag>{etag}</ETag><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>"
    );
    let url = format!("{}/fleet/{key}?uploadId={id}", fixture.server.endpoint());
    send_signed(fixture, http::Request::post(url).header("if-none-match", "*"), body).await
}

/// Signs a request, sends it, and returns the status of its response.
async fn send_signed(fixture: &Fixture, request: http::request::Builder, body: String) -> Result<u16> {
    let mut request = request.body(body.clone().into())?;
    let credential = AwsCredential {
        key_id: fixture.server.access_key().to_owned(),
        secret_key: fixture.server.secret_key().to_owned(),
        token: None,
    };
    AwsAuthorizer::new(&credential, "s3", fixture.server.region()).try_authorize(&mut request, None)?;
    let (head, _) = request.into_parts();
    let request = reqwest::Client::new().request(head.method, head.uri.to_string()).headers(head.headers);
    Ok(request.body(body).send().await?.status().as_u16())
}

#[tokio::test]
async fn copy_checks_conditions_on_source_and_target() -> Result<()> {
    let fixture = fixture()?;
    let etag = fixture.put_if("source", "one", PutMode::Create).await?.e_tag.unwrap_or_default();
    for (target, header, value, expected) in [
        ("a", "x-amz-copy-source-if-match", "\"other\"", 412),
        ("a", "x-amz-copy-source-if-none-match", etag.as_str(), 412),
        ("a", "x-amz-copy-source-if-match", etag.as_str(), 200),
        ("a", "if-none-match", "*", 412),
        ("b", "if-none-match", "*", 200),
    ] {
        let url = format!("{}/fleet/{target}", fixture.server.endpoint());
        let request = http::Request::put(url).header("x-amz-copy-source", "/fleet/source");
        let status = send_signed(&fixture, request.header(header, value), String::new()).await?;
        assert_eq!(status, expected, "{target}, {header}: {value}");
    }
    assert_eq!(fixture.get("b").await?, b"one");
    Ok(())
}

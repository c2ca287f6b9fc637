//! Conditional reads and writes, one at a time and racing.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions, ObjectStore, ObjectStoreExt, PutMode};

use super::{Rig, rig};

#[tokio::test]
async fn conditional_writes_hold() -> Result<()> {
    let rig = rig()?;
    let first = rig.put_if("pointer", "one", PutMode::Create).await?;
    assert!(matches!(rig.put_if("pointer", "two", PutMode::Create).await, Err(Error::AlreadyExists { .. })));
    let second = rig.put_if("pointer", "two", PutMode::Update(first.clone())).await?;
    assert_ne!(first.e_tag, second.e_tag);
    assert!(matches!(
        rig.put_if("pointer", "three", PutMode::Update(first)).await,
        Err(Error::Precondition { .. })
    ));
    assert_eq!(rig.get("pointer").await?, b"two");

    rig.server.remove("fleet", "pointer");
    rig.server.forget_requests();
    assert!(matches!(
        rig.put_if("pointer", "x", PutMode::Update(second)).await,
        Err(Error::Precondition { .. })
    ));
    assert_eq!(rig.server.requests()[0].status, Some(412), "a missing object does not match");
    Ok(())
}

#[tokio::test]
async fn conditional_reads_hold() -> Result<()> {
    let rig = rig()?;
    let key = Key::from("a");
    let etag = rig.put_if("a", "one", PutMode::Create).await?.e_tag;
    let get = |if_match: Option<&str>, if_none_match: Option<&str>| {
        let options = GetOptions {
            if_match: if_match.map(str::to_owned),
            if_none_match: if_none_match.map(str::to_owned),
            ..GetOptions::default()
        };
        rig.client.get_opts(&key, options)
    };
    assert!(matches!(get(None, etag.as_deref()).await, Err(Error::NotModified { .. })), "304");
    assert!(get(None, Some("\"other\"")).await.is_ok());
    assert!(get(etag.as_deref(), None).await.is_ok());
    assert!(matches!(get(Some("\"other\""), None).await, Err(Error::Precondition { .. })), "412");
    Ok(())
}

#[tokio::test]
async fn reads_depend_on_the_time_of_the_last_write() -> Result<()> {
    let rig = rig()?;
    rig.server.write("fleet", "a", "x");
    let written = rig.client.head(&Key::from("a")).await?.last_modified;
    let earlier = written - Duration::from_secs(60);
    let get = |options: GetOptions| async { rig.client.get_opts(&Key::from("a"), options).await };
    let since = |time| GetOptions { if_modified_since: Some(time), ..GetOptions::default() };
    let until = |time| GetOptions { if_unmodified_since: Some(time), ..GetOptions::default() };
    assert!(matches!(get(since(written)).await, Err(Error::NotModified { .. })));
    assert!(get(since(earlier)).await.is_ok());
    assert!(matches!(get(until(earlier)).await, Err(Error::Precondition { .. })));
    assert!(get(until(written)).await.is_ok());
    Ok(())
}

#[tokio::test]
async fn of_racing_conditional_writes_exactly_one_wins() -> Result<()> {
    let rig = Arc::new(rig()?);
    let base = rig.put_if("updated", "base", PutMode::Create).await?;
    let mut current = base;
    for round in 0..50 {
        let mut racers = tokio::task::JoinSet::new();
        for racer in 0..16 {
            let (rig, current) = (Arc::clone(&rig), current.clone());
            racers.spawn(async move {
                let content = format!("{round}-{racer}");
                let create = Key::from(format!("created-{round}"));
                let created =
                    rig.client.put_opts(&create, content.clone().into(), PutMode::Create.into()).await;
                let update = PutMode::Update(current);
                let updated = rig.client.put_opts(&Key::from("updated"), content.into(), update.into()).await;
                (created.is_ok(), updated.ok())
            });
        }
        let outcomes = racers.join_all().await;
        assert_eq!(outcomes.iter().filter(|(created, _)| *created).count(), 1, "round {round}: created");
        let mut updates = outcomes.into_iter().filter_map(|(_, updated)| updated);
        current = updates.next().expect("one wins").into();
        assert!(updates.next().is_none(), "round {round}: more than one updated");
    }
    Ok(())
}

#[tokio::test]
async fn of_racing_conditional_completions_exactly_one_wins() -> Result<()> {
    let rig = Arc::new(rig()?);
    for round in 0..10 {
        let mut racers = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let rig = Arc::clone(&rig);
            racers.spawn(async move { complete_if_none(&rig, &format!("k{round}")).await });
        }
        let statuses = racers.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1, "{statuses:?}");
        assert_eq!(statuses.iter().filter(|status| **status == 412).count(), 7, "{statuses:?}");
    }
    Ok(())
}

/// A multipart upload completed with `If-None-Match: *`, which `object_store` does not do by itself.
async fn complete_if_none(rig: &Rig, key: &str) -> Result<u16> {
    let path = Key::from(key);
    let id = rig.client.create_multipart(&path).await?;
    let etag = rig.client.put_part(&path, &id, 0, "content".into()).await?.content_id;
    let body = format!(
        "<CompleteMultipartUpload><Part><ETag>{etag}</ETag><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>"
    );
    let mut request = http::Request::post(format!("{}/fleet/{key}?uploadId={id}", rig.server.endpoint()))
        .header("if-none-match", "*")
        .body(body.clone().into())?;
    let credential = AwsCredential {
        key_id: rig.server.access_key().to_owned(),
        secret_key: rig.server.secret_key().to_owned(),
        token: None,
    };
    AwsAuthorizer::new(&credential, "s3", rig.server.region()).try_authorize(&mut request, None)?;
    let (head, _) = request.into_parts();
    let request = reqwest::Client::new().post(head.uri.to_string()).headers(head.headers).body(body);
    Ok(request.send().await?.status().as_u16())
}

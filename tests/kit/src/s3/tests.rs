//! The server against the client that the product uses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::TryStreamExt;
use object_store::aws::{
    AmazonS3, AmazonS3Builder, AwsAuthorizer, AwsCredential, Checksum, S3ConditionalPut,
};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{
    Attribute, Attributes, Error, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    RetryConfig, UpdateVersion,
};

use s3s::crypto::{Checksum as _, Crc32c, Md5};

use super::*;

const PART: usize = 5 * 1024 * 1024;

struct Rig {
    server: Arc<S3Server>,
    client: AmazonS3,
    dir: tempfile::TempDir,
}

fn rig() -> Result<Rig> {
    rig_with(|builder| builder.with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() }))
}

fn rig_with(adapt: impl FnOnce(AmazonS3Builder) -> AmazonS3Builder) -> Result<Rig> {
    rustls::crypto::ring::default_provider().install_default().ok();
    let dir = tempfile::tempdir()?;
    let server = Arc::new(S3Server::start(dir.path())?);
    server.create_bucket("fleet");
    let builder = AmazonS3Builder::new()
        .with_endpoint(server.endpoint())
        .with_allow_http(true)
        .with_bucket_name("fleet")
        .with_region(server.region())
        .with_access_key_id(server.access_key())
        .with_secret_access_key(server.secret_key())
        .with_conditional_put(S3ConditionalPut::ETagMatch);
    Ok(Rig { client: adapt(builder).build()?, server, dir })
}

impl Rig {
    async fn put_if(
        &self,
        key: &str,
        content: &'static str,
        mode: PutMode,
    ) -> object_store::Result<UpdateVersion> {
        let result = self
            .client
            .put_opts(&Key::from(key), PutPayload::from_static(content.as_bytes()), mode.into())
            .await;
        result.map(UpdateVersion::from)
    }

    async fn get(&self, key: &str) -> object_store::Result<Vec<u8>> {
        Ok(self.client.get(&Key::from(key)).await?.bytes().await?.to_vec())
    }

    fn blob_files(&self) -> usize {
        let dirs = std::fs::read_dir(self.dir.path()).expect("dir").map(|dir| dir.expect("entry").path());
        dirs.map(|dir| std::fs::read_dir(dir).expect("blobs").count()).sum()
    }
}

/// Bytes that differ everywhere, so that a wrong offset shows.
fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[tokio::test]
async fn an_object_comes_back_as_it_was_put_whole_and_in_ranges() -> Result<()> {
    let rig = rig()?;
    for len in [0, 1, 64 * 1024, 64 * 1024 + 1, 3_000_000] {
        let content = pattern(len);
        rig.client.put(&Key::from("a/b"), content.clone().into()).await?;
        assert!(rig.get("a/b").await? == content, "{len} bytes");
        assert_eq!(rig.client.head(&Key::from("a/b")).await?.size, len as u64);
        assert!(rig.server.read("fleet", "a/b") == Some(content.clone()), "{len} bytes, read directly");
        if len > 1000 {
            let (start, end) = (len / 3, len / 3 + 500);
            let part = rig.client.get_range(&Key::from("a/b"), start as u64..end as u64).await?;
            assert!(part == content[start..end], "a range of {len} bytes");
        }
    }
    assert!(matches!(rig.get("missing").await, Err(Error::NotFound { .. })));
    rig.client.delete(&Key::from("a/b")).await?;
    assert!(matches!(rig.get("a/b").await, Err(Error::NotFound { .. })));
    Ok(())
}

#[tokio::test]
async fn attributes_come_back() -> Result<()> {
    let rig = rig()?;
    let mut attributes = Attributes::new();
    attributes.insert(Attribute::ContentType, "application/gzip".into());
    attributes.insert(Attribute::Metadata("epoch".into()), "7".into());
    let options = PutOptions { attributes: attributes.clone(), ..PutOptions::default() };
    rig.client.put_opts(&Key::from("a"), "x".into(), options).await?;
    assert_eq!(rig.client.get(&Key::from("a")).await?.attributes, attributes);
    Ok(())
}

#[tokio::test]
async fn a_multipart_upload_is_its_parts_and_ranges_cross_them() -> Result<()> {
    let rig = rig()?;
    let content = pattern(2 * PART + 1234);
    let mut upload = rig.client.put_multipart(&Key::from("big")).await?;
    for part in content.chunks(PART) {
        upload.put_part(part.to_vec().into()).await?;
    }
    assert_eq!(rig.server.uploads("fleet"), ["big"]);
    assert!(rig.server.read("fleet", "big").is_none(), "not there before it is completed");
    upload.complete().await?;
    assert!(rig.get("big").await? == content);
    assert!(rig.server.uploads("fleet").is_empty());
    let over = rig.client.get_range(&Key::from("big"), PART as u64 - 10..2 * PART as u64 + 10).await?;
    assert!(over == content[PART - 10..2 * PART + 10], "a range over three parts");

    rig.client.delete(&Key::from("big")).await?;
    rig.server.write("fleet", "big", "x");
    rig.server.remove("fleet", "big");
    assert_eq!(rig.blob_files(), 0, "no file outlives its object");
    Ok(())
}

#[tokio::test]
async fn a_multipart_upload_keeps_to_the_rules() -> Result<()> {
    let rig = rig()?;
    let sizes: [&[usize]; 3] = [&[1000, 1000], &[PART, PART + 1, 10], &[PART, PART + 1]];
    for sizes in sizes {
        let mut upload = rig.client.put_multipart(&Key::from("big")).await?;
        for size in sizes {
            upload.put_part(pattern(*size).into()).await?;
        }
        assert!(upload.complete().await.is_err(), "{sizes:?}");
        upload.abort().await?;
    }
    assert!(rig.server.uploads("fleet").is_empty(), "aborted uploads are gone");
    assert!(rig.server.objects("fleet", "").is_empty());
    assert_eq!(rig.blob_files(), 0, "no file outlives its upload");
    Ok(())
}

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

#[tokio::test]
async fn listings_are_sorted_paged_and_folded() -> Result<()> {
    let rig = rig()?;
    let mut expected = Vec::new();
    for i in 0..1203 {
        let key = format!("user/primary/{:03}/{i:04}", i % 7);
        rig.server.write("fleet", &key, "x");
        expected.push(key);
    }
    rig.server.write("fleet", "user/second", "xx");
    rig.server.write("fleet", "z", "");
    expected.sort();
    rig.server.forget_requests();
    let listed: Vec<_> = rig.client.list(Some(&Key::from("user/primary"))).try_collect().await?;
    let keys: Vec<_> = listed.into_iter().map(|meta| meta.location.to_string()).collect();
    assert_eq!(keys, expected);
    assert_eq!(rig.server.requests().len(), 2, "1,203 keys are two pages");

    let folded = rig.client.list_with_delimiter(Some(&Key::from("user"))).await?;
    assert_eq!(folded.common_prefixes, [Key::from("user/primary")]);
    assert_eq!(folded.objects.iter().map(|o| o.size).collect::<Vec<_>>(), [2]);
    let folded = rig.client.list_with_delimiter(Some(&Key::from("user/primary"))).await?;
    assert_eq!(folded.common_prefixes.len(), 7);

    let offset = Key::from(expected[1200].as_str());
    let rest: Vec<_> =
        rig.client.list_with_offset(Some(&Key::from("user/primary")), &offset).try_collect().await?;
    assert_eq!(rest.len(), 2);
    Ok(())
}

#[tokio::test]
async fn many_objects_are_deleted_in_one_request() -> Result<()> {
    let rig = rig()?;
    for i in 0..20 {
        rig.server.write("fleet", &format!("k{i:02}"), "x");
    }
    rig.server.forget_requests();
    let keys = (0..19).map(|i| Ok(Key::from(format!("k{i:02}"))));
    let deleted: Vec<_> = rig
        .client
        .delete_stream(Box::pin(futures_util::stream::iter(keys.collect::<Vec<_>>())))
        .try_collect()
        .await?;
    assert_eq!(deleted.len(), 19);
    assert_eq!(rig.server.requests().len(), 1);
    assert_eq!(rig.server.objects("fleet", "")[0].key, "k19");
    Ok(())
}

#[tokio::test]
async fn a_wrong_signature_or_checksum_writes_nothing() -> Result<()> {
    let rig = rig_with(|builder| builder.with_secret_access_key("wrong"))?;
    let refused = rig.client.put(&Key::from("a"), "x".into()).await.expect_err("a wrong secret");
    assert!(format!("{refused:?}").contains("SignatureDoesNotMatch"), "{refused:?}");

    let rig = rig_with(|builder| builder.with_checksum_algorithm(Checksum::SHA256))?;
    rig.client.put(&Key::from("a"), "x".into()).await?;
    rig.server.remove("fleet", "a");
    let url = format!("{}/fleet/a", rig.server.endpoint());
    let anonymous = reqwest::Client::new().put(&url).body("x").send().await?;
    assert_eq!(anonymous.status(), 403);

    // Presigned, the body is not part of the signature: what is wrong is the checksum alone.
    let url = object_store::signer::Signer::signed_url(
        &rig.client,
        http::Method::PUT,
        &Key::from("a"),
        Duration::from_secs(60),
    )
    .await?;
    let put = |name: &'static str, value: String| {
        reqwest::Client::new().put(url.clone()).header(name, value).body("x").send()
    };
    let crc32c = STANDARD.encode(Crc32c::checksum(b"x"));
    let md5 = STANDARD.encode(Md5::checksum(b"x"));
    for (name, right, wrong) in
        [("x-amz-checksum-crc32c", crc32c, "AAAAAA=="), ("content-md5", md5, "AAAAAAAAAAAAAAAAAAAAAA==")]
    {
        let response = put(name, wrong.to_owned()).await?;
        assert_eq!(response.status(), 400, "{name}");
        assert!(response.text().await?.contains("BadDigest"), "{name}");
        assert!(rig.server.objects("fleet", "").is_empty(), "{name}");
        assert_eq!(put(name, right).await?.status(), 200, "{name}");
        assert!(rig.server.remove("fleet", "a"), "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn a_lost_reply_is_a_write_that_was_done() -> Result<()> {
    let rig = rig()?;
    let lost = rig.server.fault(Rule::new(Fault::LostReply).method("PUT").key("pointer"));
    assert!(rig.put_if("pointer", "one", PutMode::Create).await.is_err());
    assert_eq!(lost.hits(), 1);
    assert_eq!(rig.get("pointer").await?, b"one");
    assert_eq!(rig.server.requests()[0].status, None);

    // A client that tries again finds its own write in its way.
    let rig = rig_with(|builder| builder)?;
    let late = rig.server.fault(Rule::new(Fault::StatusAfterCommit(503)).method("PUT"));
    let result = rig.put_if("pointer", "two", PutMode::Create).await;
    assert!(matches!(result, Err(Error::AlreadyExists { .. })), "{result:?}");
    assert_eq!((late.hits(), rig.get("pointer").await?.as_slice()), (1, &b"two"[..]));
    let statuses: Vec<_> = rig.server.requests().iter().map(|request| request.status).collect();
    assert_eq!(statuses, [Some(503), Some(412), Some(200)]);
    Ok(())
}

#[tokio::test]
async fn faults_happen_to_whom_and_as_often_as_said() -> Result<()> {
    let rig = rig()?;
    rig.server.write("fleet", "one", "content of one");
    rig.server.write("fleet", "two", "content of two");
    let unavailable =
        rig.server.fault(Rule::new(Fault::Status(503)).method("GET").key("one").after(1).times(2));
    let outcomes = [rig.get("one").await.is_ok(), rig.get("one").await.is_ok(), rig.get("two").await.is_ok()];
    assert_eq!(outcomes, [true, false, true]);
    assert!(rig.get("one").await.is_err());
    assert!(rig.get("one").await.is_ok(), "twice, and no more");
    assert_eq!(unavailable.hits(), 2);

    rig.server.fault(Rule::new(Fault::Refuse).method("PUT").always());
    assert!(rig.put_if("three", "x", PutMode::Overwrite).await.is_err());
    assert!(rig.server.read("fleet", "three").is_none());
    rig.server.heal();
    rig.put_if("three", "x", PutMode::Overwrite).await?;

    rig.server.fault(Rule::new(Fault::Delay(Duration::from_millis(80))));
    let start = Instant::now();
    rig.get("one").await?;
    assert!(start.elapsed() >= Duration::from_millis(80));
    Ok(())
}

#[tokio::test]
async fn bodies_break_off_and_rot() -> Result<()> {
    let rig = rig()?;
    for len in [1000, 1_000_000] {
        let content = pattern(len);
        rig.server.write("fleet", "a", content.clone());
        for after in [0, 10, len as u64 / 2, len as u64] {
            rig.server.fault(Rule::new(Fault::TruncateBody(after)).method("GET"));
            // All of it and then a cut: to the client, that is all of it.
            assert_eq!(rig.get("a").await.is_ok(), after == len as u64, "{after} of {len}");
        }
        rig.server.fault(Rule::new(Fault::CorruptBody).method("GET"));
        let rotten = rig.get("a").await?;
        let different = rotten.iter().zip(&content).filter(|(a, b)| a != b).count();
        assert_eq!((rotten.len(), different), (len, 1));
        assert!(rig.get("a").await? == content);
    }
    Ok(())
}

#[tokio::test]
async fn a_stale_read_sees_what_was_before() -> Result<()> {
    let rig = rig()?;
    rig.server.fault(Rule::new(Fault::StaleRead).method("GET").always());
    rig.put_if("a", "one", PutMode::Create).await?;
    assert!(matches!(rig.get("a").await, Err(Error::NotFound { .. })));
    rig.put_if("a", "two", PutMode::Overwrite).await?;
    assert_eq!(rig.get("a").await?, b"one");
    rig.server.heal();
    assert_eq!(rig.get("a").await?, b"two");
    Ok(())
}

#[tokio::test]
async fn down_refuses_and_up_has_everything_on_the_same_port() -> Result<()> {
    let rig = rig()?;
    rig.put_if("a", "kept", PutMode::Create).await?;
    let endpoint = rig.server.endpoint();
    for _ in 0..5 {
        rig.server.down();
        let address = endpoint.trim_start_matches("http://");
        let refused = std::net::TcpStream::connect(address).expect_err("refused");
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        assert!(rig.get("a").await.is_err());
        rig.server.up()?;
        assert_eq!(rig.get("a").await?, b"kept");
    }
    assert_eq!(rig.server.endpoint(), endpoint);
    Ok(())
}

//! Tests for objects, uploads and listings.

use std::time::Duration;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::TryStreamExt;
use object_store::aws::Checksum;
use object_store::path::Path as Key;
use object_store::{Attribute, Attributes, Error, ObjectStore, ObjectStoreExt, PutOptions};
use s3s::crypto::{Checksum as _, Crc32c, Md5};

use super::{fixture, fixture_with, pattern};

const PART_BYTES: usize = 5 * 1024 * 1024;

#[tokio::test]
async fn objects_are_read_back_in_full_and_in_ranges() -> Result<()> {
    let fixture = fixture()?;
    for len in [0, 1, 64 * 1024, 64 * 1024 + 1, 3_000_000] {
        let content = pattern(len);
        fixture.client.put(&Key::from("a/b"), content.clone().into()).await?;
        assert!(fixture.get("a/b").await? == content, "{len} bytes");
        assert_eq!(fixture.client.head(&Key::from("a/b")).await?.size, len as u64);
        assert!(fixture.server.read("fleet", "a/b") == Some(content.clone()), "{len} bytes, read directly");
        if len > 1000 {
            let (start, end) = (len / 3, len / 3 + 500);
            let part = fixture.client.get_range(&Key::from("a/b"), start as u64..end as u64).await?;
            assert!(part == content[start..end], "a range of an object with {len} bytes");
        }
    }
    assert!(matches!(fixture.get("missing").await, Err(Error::NotFound { .. })));
    fixture.client.delete(&Key::from("a/b")).await?;
    assert!(matches!(fixture.get("a/b").await, Err(Error::NotFound { .. })));
    Ok(())
}

#[tokio::test]
async fn attributes_are_returned() -> Result<()> {
    let fixture = fixture()?;
    let mut attributes = Attributes::new();
    attributes.insert(Attribute::ContentType, "application/gzip".into());
    attributes.insert(Attribute::Metadata("epoch".into()), "7".into());
    let options = PutOptions { attributes: attributes.clone(), ..PutOptions::default() };
    fixture.client.put_opts(&Key::from("a"), "x".into(), options).await?;
    assert_eq!(fixture.client.get(&Key::from("a")).await?.attributes, attributes);
    Ok(())
}

#[tokio::test]
async fn multipart_object_concatenates_its_parts() -> Result<()> {
    let fixture = fixture()?;
    let content = pattern(2 * PART_BYTES + 1234);
    let mut upload = fixture.client.put_multipart(&Key::from("big")).await?;
    for part in content.chunks(PART_BYTES) {
        upload.put_part(part.to_vec().into()).await?;
    }
    assert_eq!(fixture.server.uploads("fleet"), ["big"]);
    assert!(fixture.server.read("fleet", "big").is_none(), "the object is visible before completion");
    upload.complete().await?;
    assert!(fixture.get("big").await? == content);
    assert!(fixture.server.uploads("fleet").is_empty());
    let part = fixture
        .client
        .get_range(&Key::from("big"), PART_BYTES as u64 - 10..2 * PART_BYTES as u64 + 10)
        .await?;
    assert!(part == content[PART_BYTES - 10..2 * PART_BYTES + 10], "a range over three parts");

    fixture.client.delete(&Key::from("big")).await?;
    fixture.server.write("fleet", "big", "x");
    fixture.server.remove("fleet", "big");
    assert_eq!(fixture.count_blob_files(), 0, "a file outlived its object");
    Ok(())
}

#[tokio::test]
async fn multipart_rules_are_enforced() -> Result<()> {
    let fixture = fixture()?;
    let sizes: [&[usize]; 3] =
        [&[1000, 1000], &[PART_BYTES, PART_BYTES + 1, 10], &[PART_BYTES, PART_BYTES + 1]];
    for sizes in sizes {
        let mut upload = fixture.client.put_multipart(&Key::from("big")).await?;
        for size in sizes {
            upload.put_part(pattern(*size).into()).await?;
        }
        assert!(upload.complete().await.is_err(), "{sizes:?}");
        upload.abort().await?;
    }
    assert!(fixture.server.uploads("fleet").is_empty(), "an aborted upload was not removed");
    assert!(fixture.server.objects("fleet", "").is_empty());
    assert_eq!(fixture.count_blob_files(), 0, "a file outlived its upload");
    Ok(())
}

#[tokio::test]
async fn listings_are_sorted_paginated_and_grouped() -> Result<()> {
    let fixture = fixture()?;
    let mut expected = Vec::new();
    for i in 0..1203 {
        let key = format!("user/primary/{:03}/{i:04}", i % 7);
        fixture.server.write("fleet", &key, "x");
        expected.push(key);
    }
    fixture.server.write("fleet", "user/second", "xx");
    fixture.server.write("fleet", "z", "");
    expected.sort();
    fixture.server.clear_requests();
    let listed: Vec<_> = fixture.client.list(Some(&Key::from("user/primary"))).try_collect().await?;
    let keys: Vec<_> = listed.into_iter().map(|meta| meta.location.to_string()).collect();
    assert_eq!(keys, expected);
    assert_eq!(fixture.server.requests().len(), 2, "1,203 keys require two pages");

    let grouped = fixture.client.list_with_delimiter(Some(&Key::from("user"))).await?;
    assert_eq!(grouped.common_prefixes, [Key::from("user/primary")]);
    assert_eq!(grouped.objects.iter().map(|o| o.size).collect::<Vec<_>>(), [2]);
    let grouped = fixture.client.list_with_delimiter(Some(&Key::from("user/primary"))).await?;
    assert_eq!(grouped.common_prefixes.len(), 7);

    fixture.server.write(
        "fleet",
        "user/primary/000/\u{10FFFF}",
        "a key of a common prefix that sorts after all others",
    );
    assert_eq!(
        fixture.client.list_with_delimiter(Some(&Key::from("user/primary"))).await?.common_prefixes.len(),
        7
    );

    let offset = Key::from(expected[1200].as_str());
    let rest: Vec<_> =
        fixture.client.list_with_offset(Some(&Key::from("user/primary")), &offset).try_collect().await?;
    assert_eq!(rest.len(), 2);
    Ok(())
}

#[tokio::test]
async fn delete_objects_deletes_many_in_one_request() -> Result<()> {
    let fixture = fixture()?;
    for i in 0..20 {
        fixture.server.write("fleet", &format!("k{i:02}"), "x");
    }
    fixture.server.clear_requests();
    let keys = (0..19).map(|i| Ok(Key::from(format!("k{i:02}"))));
    let deleted: Vec<_> = fixture
        .client
        .delete_stream(Box::pin(futures_util::stream::iter(keys.collect::<Vec<_>>())))
        .try_collect()
        .await?;
    assert_eq!(deleted.len(), 19);
    assert_eq!(fixture.server.requests().len(), 1);
    assert_eq!(fixture.server.objects("fleet", "")[0].key, "k19");
    Ok(())
}

#[tokio::test]
async fn wrong_signature_or_checksum_writes_nothing() -> Result<()> {
    let fixture = fixture_with(|builder| builder.with_secret_access_key("wrong"))?;
    let rejected =
        fixture.client.put(&Key::from("a"), "x".into()).await.expect_err("a wrong secret key is rejected");
    assert!(format!("{rejected:?}").contains("SignatureDoesNotMatch"), "{rejected:?}");
    assert!(fixture.server.objects("fleet", "").is_empty(), "the object was written");

    let fixture = fixture_with(|builder| builder.with_checksum_algorithm(Checksum::SHA256))?;
    fixture.client.put(&Key::from("a"), "x".into()).await?;
    fixture.server.remove("fleet", "a");
    let url = format!("{}/fleet/a", fixture.server.endpoint());
    let anonymous = reqwest::Client::new().put(&url).body("x").send().await?;
    assert_eq!(anonymous.status(), 403);

    // The signature of a presigned URL does not cover the body, so only the checksum is wrong.
    let url = object_store::signer::Signer::signed_url(
        &fixture.client,
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
        assert!(fixture.server.objects("fleet", "").is_empty(), "{name}");
        assert_eq!(put(name, right).await?.status(), 200, "{name}");
        assert!(fixture.server.remove("fleet", "a"), "{name}");
    }
    Ok(())
}

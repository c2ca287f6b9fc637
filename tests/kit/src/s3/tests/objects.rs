//! Objects, uploads and listings.

use std::time::Duration;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::TryStreamExt;
use object_store::aws::Checksum;
use object_store::path::Path as Key;
use object_store::{Attribute, Attributes, Error, ObjectStore, ObjectStoreExt, PutOptions};
use s3s::crypto::{Checksum as _, Crc32c, Md5};

use super::{pattern, rig, rig_with};

const PART: usize = 5 * 1024 * 1024;

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

    rig.server.write("fleet", "user/primary/000/\u{10FFFF}", "a folded key that sorts after all others");
    assert_eq!(
        rig.client.list_with_delimiter(Some(&Key::from("user/primary"))).await?.common_prefixes.len(),
        7
    );

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

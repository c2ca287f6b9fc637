//! Tests for the S3 server, with the client that the product uses.

use std::sync::Arc;

use anyhow::Result;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload, RetryConfig, UpdateVersion};

use super::*;

mod conditions;
mod faults;
mod objects;
mod sessions;

struct Fixture {
    server: Arc<S3Server>,
    client: AmazonS3,
    dir: tempfile::TempDir,
}

fn fixture() -> Result<Fixture> {
    fixture_with(|builder| builder.with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() }))
}

fn fixture_with(configure: impl FnOnce(AmazonS3Builder) -> AmazonS3Builder) -> Result<Fixture> {
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
    Ok(Fixture { client: configure(builder).build()?, server, dir })
}

impl Fixture {
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

    fn count_blob_files(&self) -> usize {
        let dirs = std::fs::read_dir(self.dir.path()).expect("the server's directory is readable");
        let dirs = dirs.map(|dir| dir.expect("the entry is readable").path());
        dirs.map(|dir| std::fs::read_dir(dir).expect("the blobs' directory is readable").count()).sum()
    }
}

/// Pseudorandom bytes without a period, so that a wrong offset is detected.
fn pattern(len: usize) -> Vec<u8> {
    let byte = |index: u64| {
        let mixed = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 56) as u8
    };
    (0..len as u64).map(byte).collect()
}

#[test]
fn pattern_differs_at_every_shift_by_a_power_of_two() {
    let bytes = pattern(10 << 20);
    for shift in (0..23).map(|exponent| 1_usize << exponent) {
        assert!(bytes[..1000] != bytes[shift..shift + 1000], "the bytes repeat after {shift}");
    }
}

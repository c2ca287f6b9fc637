//! Tests of the server with the product's client.

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

fn fixture_with(adapt: impl FnOnce(AmazonS3Builder) -> AmazonS3Builder) -> Result<Fixture> {
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
    Ok(Fixture { client: adapt(builder).build()?, server, dir })
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

    fn blob_files(&self) -> usize {
        let dirs = std::fs::read_dir(self.dir.path()).expect("dir").map(|dir| dir.expect("entry").path());
        dirs.map(|dir| std::fs::read_dir(dir).expect("blobs").count()).sum()
    }
}

/// Non-repeating bytes, so that a wrong offset is detected.
fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

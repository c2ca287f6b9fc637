//! The object stores on which the tests and the demo can run.

use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result};

use crate::moto::Moto;
use crate::s3::{S3Server, ThirdParty};
use crate::seaweed::Seaweed;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StoreKind {
    /// The kit's own server.
    #[default]
    Kit,
    Moto,
    Seaweedfs,
}

impl StoreKind {
    pub const ALL: [Self; 3] = [Self::Kit, Self::Moto, Self::Seaweedfs];

    pub fn name(self) -> &'static str {
        match self {
            Self::Kit => "kit",
            Self::Moto => "moto",
            Self::Seaweedfs => "seaweedfs",
        }
    }

    /// Starts the store with an empty bucket. The request log and all faults except
    /// [`Fault::StaleRead`](crate::s3::Fault::StaleRead) work with every kind of store.
    ///
    /// # Errors
    /// Fails if the server cannot be fetched or started, or if the bucket cannot be created.
    pub async fn start(self, dir: &Path, bucket: &str) -> Result<S3Server> {
        let (dir, bucket) = (dir.to_owned(), bucket.to_owned());
        let start = move || {
            let store = match self {
                Self::Kit => S3Server::start(&dir)?,
                Self::Moto => S3Server::start_in_front_of(ThirdParty::Moto(Moto::start()?), &dir)?,
                Self::Seaweedfs => S3Server::start_in_front_of(ThirdParty::Seaweed(Seaweed::start()?), &dir)?,
            };
            store.try_create_bucket(&bucket)?;
            Ok(store)
        };
        let started: Result<S3Server> = crate::runtime::handle().spawn_blocking(start).await?;
        started.with_context(|| format!("cannot start the store {}", self.name()))
    }
}

impl FromStr for StoreKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| "must be kit, moto or seaweedfs".to_owned())
    }
}

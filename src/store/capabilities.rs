//! What an object store can do, found out by trying it: each capability with what does not work without it.
//!
//! It writes only temporary objects below [`RUN_PREFIX`] and deletes them again. Sessions of hosts are not part of it, because
//! only the platform requests them.

mod objects;
mod uploads;
mod wire;

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use object_store::ObjectStoreExt;
use object_store::path::Path;

use super::bucket::{Bucket, StoreError};
use super::config::StoreConfig;
use super::parallel_probe::{self, Exactness, RUN_PREFIX};
use super::protection::{self, Setting};
use svc_base::chain::chain;

/// How much svc depends on a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Without it, data can be lost: the store must not be used.
    Required,
    /// It protects against something that also has another guard, or makes work faster.
    Recommended,
    /// svc does not use it; it is reported because other tools on the bucket may.
    Unused,
}

/// Something that a store can or cannot do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    pub name: &'static str,
    pub need: Need,
    /// What does not work without it: a sentence for operators.
    pub without: &'static str,
}

impl Capability {
    /// Whether it cannot be tried on a directory, which has neither requests nor credentials.
    pub fn applies_only_to_servers(&self) -> bool {
        [CHECKSUMS, SIGNATURES].contains(self)
    }
}

/// The result of trying a capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Support {
    Yes,
    /// What the store did instead.
    No(String),
    /// Why it could not be tried.
    Unknown(String),
}

/// A capability and the result of trying it.
#[derive(Debug, Clone)]
pub struct Probed {
    pub capability: Capability,
    pub support: Support,
}

impl Probed {
    pub fn new(capability: Capability, support: Support) -> Self {
        Self { capability, support }
    }
}

pub const CREATE_ONCE: Capability = Capability {
    name: "a put creates an object only if there is none (`If-None-Match: *`)",
    need: Need::Required,
    without: "A replaced host could move the snapshot pointer, and a new machine could start from old data.",
};
pub const REPLACE_READ_VERSION: Capability = Capability {
    name: "a put replaces only the version that was read (`If-Match`)",
    need: Need::Required,
    without: "A late writer could replace what a newer one wrote.",
};
pub const CREATE_ONCE_IN_PARALLEL: Capability = Capability {
    name: "of several writers at a time, one creates the object",
    need: Need::Required,
    without: "Two hosts could both move the snapshot pointer; `svc-platform` refuses to start.",
};
pub const REPLACE_IN_PARALLEL: Capability = Capability {
    name: "of several writers at a time, one replaces a version",
    need: Need::Recommended,
    without: "The snapshot pointer is safe, because its log only creates objects; releases without that log are not.",
};
pub const CURRENT_READS: Capability = Capability {
    name: "a read returns the last write at once",
    need: Need::Required,
    without: "A host could restore a snapshot that is not the latest.",
};
pub const CURRENT_LISTS: Capability = Capability {
    name: "a list shows new objects, and no deleted ones, at once",
    need: Need::Recommended,
    without: "`svcctl backup list` can miss the newest snapshot, and a check after a backup can fail.",
};
pub const RANGES: Capability = Capability {
    name: "a range of one version can be read (`Range` with `If-Match`)",
    need: Need::Recommended,
    without: "A download that was interrupted cannot resume, or could mix two versions.",
};
pub const UPLOADS: Capability = Capability {
    name: "an upload in parts is visible only when it is completed",
    need: Need::Required,
    without: "No snapshot can be stored, or a broken one becomes an object.",
};
pub const UPLOAD_ONCE: Capability = Capability {
    name: "an upload in parts creates an object only if there is none",
    need: Need::Recommended,
    without: "Stolen credentials of a host can overwrite a snapshot; hosts themselves never do.",
};
pub const CHECKSUMS: Capability = Capability {
    name: "a body that does not match its SHA-256 is refused",
    need: Need::Recommended,
    without: "A snapshot that was damaged on its way is stored; the host finds it when it reads the snapshot back.",
};
pub const SIGNATURES: Capability = Capability {
    name: "a request with a wrong secret key is refused",
    need: Need::Required,
    without: "Everyone who reaches the endpoint can read and delete every snapshot.",
};
pub const VERSIONING: Capability = Capability {
    name: "the bucket can keep overwritten and deleted objects (versioning)",
    need: Need::Recommended,
    without: "An object that is overwritten or deleted is gone.",
};
pub const CONDITIONAL_COPY: Capability = Capability {
    name: "a copy is made only of the version that was read",
    need: Need::Unused,
    without: "Nothing: svc copies no objects inside the store.",
};

/// How long and how often the races of writers are tried.
#[derive(Debug, Clone, Copy)]
pub struct RaceLimits {
    pub rounds: usize,
    pub timeout: Duration,
}

/// Tries the conditional puts of a single writer.
///
/// # Errors
/// [`StoreError`] of the first call that failed otherwise than on its condition.
pub async fn probe_conditions(bucket: &Bucket) -> Result<[Probed; 2], StoreError> {
    Ok([
        Probed::new(CREATE_ONCE, support(objects::create_once(bucket).await?)),
        Probed::new(REPLACE_READ_VERSION, support(objects::replace_read_version(bucket).await?)),
    ])
}

/// Tries everything except conditional puts and the bucket's settings, all at the same time.
pub async fn probe_further(config: &StoreConfig, bucket: &Bucket) -> Vec<Probed> {
    let s3 = match config {
        StoreConfig::S3(s3) => Some(s3),
        StoreConfig::Directory(_) => None,
    };
    let tries: Vec<(Capability, BoxFuture<'_, Support>)> = vec![
        (CURRENT_READS, settle(objects::current_reads(bucket)).boxed()),
        (CURRENT_LISTS, settle(objects::current_lists(bucket)).boxed()),
        (RANGES, settle(objects::ranges(bucket)).boxed()),
        (UPLOADS, settle(uploads::visible_when_completed(bucket)).boxed()),
        (UPLOAD_ONCE, settle(uploads::created_once(bucket)).boxed()),
        (CHECKSUMS, wire::checksums(s3).boxed()),
        (SIGNATURES, wire::signatures(s3).boxed()),
    ];
    let tries = tries.into_iter();
    let tries = tries.map(async |(capability, support)| Probed::new(capability, support.await));
    join_all(tries).await
}

/// Tries all capabilities, for a table of stores.
pub async fn probe_all(config: &StoreConfig, races: RaceLimits) -> Vec<Probed> {
    let bucket = match config.open() {
        Ok(bucket) => bucket,
        Err(error) => return vec![Probed::new(CREATE_ONCE, Support::Unknown(format!("{error:#}")))],
    };
    let mut found = vec![
        Probed::new(CREATE_ONCE, settle(objects::create_once(&bucket)).await),
        Probed::new(REPLACE_READ_VERSION, settle(objects::replace_read_version(&bucket)).await),
    ];
    let (create, replace) = match parallel_probe::run_rounds(&bucket, races.rounds, races.timeout).await {
        Ok(seen) => (exactness(seen.create), exactness(seen.replace)),
        Err(error) => {
            let why = Support::Unknown(chain(&error));
            (why.clone(), why)
        }
    };
    found.push(Probed::new(CREATE_ONCE_IN_PARALLEL, create));
    found.push(Probed::new(REPLACE_IN_PARALLEL, replace));
    found.extend(probe_further(config, &bucket).await);
    if let StoreConfig::S3(s3) = config {
        let versioning = match protection::read(s3).await.map(|read| read.versioning) {
            Ok(Setting::On | Setting::Off) => Support::Yes,
            Ok(Setting::Unknown(status)) => Support::No(format!("it returned {status}")),
            Err(error) => Support::Unknown(chain(&error)),
        };
        found.push(Probed::new(VERSIONING, versioning));
        found.push(Probed::new(CONDITIONAL_COPY, wire::conditional_copy(s3).await));
    }
    found
}

fn exactness(seen: Exactness) -> Support {
    match seen {
        Exactness::Exact => Support::Yes,
        Exactness::Inexact { .. } => Support::No("several writers succeeded".to_owned()),
    }
}

/// `Some` is what the store did instead.
type Outcome = Result<Option<String>, StoreError>;

fn support(instead: Option<String>) -> Support {
    instead.map_or(Support::Yes, Support::No)
}

async fn settle(tried: impl Future<Output = Outcome>) -> Support {
    tried.await.map_or_else(|error| Support::Unknown(chain(&error)), support)
}

/// The key of a temporary object, below its own folder.
fn temporary_key(name: &str) -> Path {
    Path::from(format!("{}/{}/{name}", *RUN_PREFIX, uuid::Uuid::new_v4()))
}

/// Deletes a temporary object; a failure leaves a few bytes.
async fn delete(bucket: &Bucket, key: &Path) {
    if let Err(error) = bucket.raw().delete(key).await {
        tracing::debug!(%key, %error, "the probe's object was not deleted");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::ObjectStore;
    use object_store::memory::InMemory;

    use super::*;
    use crate::lenient::{Ignored, Lenient};

    fn directory() -> StoreConfig {
        StoreConfig::Directory("/nonexistent".into())
    }

    #[tokio::test]
    async fn exact_store_can_do_all_that_can_be_tried() {
        let store = Arc::new(InMemory::new());
        let bucket = Bucket::new(store.clone());
        let mut found = probe_conditions(&bucket).await.unwrap().to_vec();
        found.extend(probe_further(&directory(), &bucket).await);
        for Probed { capability, support } in found {
            match support {
                // Memory has no requests, and completes every upload.
                Support::Unknown(why) => {
                    assert!(capability.applies_only_to_servers(), "{}: {why}", capability.name);
                }
                Support::No(_) => assert_eq!(capability, UPLOAD_ONCE),
                Support::Yes => {}
            }
        }
        let remaining = futures_util::TryStreamExt::try_next(&mut store.list(None)).await.unwrap();
        assert_eq!(remaining, None, "temporary objects are deleted");
    }

    #[tokio::test]
    async fn store_that_ignores_a_condition_is_detected() {
        for (ignored, expected) in [(Ignored::Create, CREATE_ONCE), (Ignored::Replace, REPLACE_READ_VERSION)]
        {
            let bucket = Bucket::new(Arc::new(Lenient::new(ignored)));
            let found = probe_conditions(&bucket).await.unwrap();
            let missing = found.iter().filter(|probed| matches!(probed.support, Support::No(_)));
            let missing: Vec<_> = missing.map(|probed| probed.capability).collect();
            assert_eq!(missing, [expected], "{ignored:?}");
        }
    }
}

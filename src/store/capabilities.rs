//! Probes what an object store can do. Each capability states what fails without it.
//!
//! The probes write only temporary objects below [`RUN_PREFIX`] and delete them. Hosts' sessions are not probed here,
//! because only the platform requests them.

mod objects;
mod raw_requests;
mod uploads;

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use object_store::ObjectStoreExt;
use object_store::path::Path;

use super::bucket::{Bucket, StoreError};
use super::config::StoreConfig;
use super::parallel_probe::{self, Atomicity, RUN_PREFIX};
use super::protection::{self, SettingState};
use svc_base::error_chain::format_chain;

/// How much svc depends on a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapabilityNeed {
    /// Without it, data can be lost: the store must not be used.
    Required,
    /// It is an additional safeguard, or improves performance.
    Recommended,
    /// svc does not use it; it is reported because other tools may use it on the bucket.
    Unused,
}

/// A feature that a store may or may not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    pub name: &'static str,
    pub need: CapabilityNeed,
    /// What goes wrong on a store without the capability, in a sentence for operators.
    pub without: &'static str,
}

impl Capability {
    /// Whether probing the capability on a directory is always inconclusive: a directory receives no requests and has
    /// no credentials.
    pub fn applies_only_to_servers(&self) -> bool {
        [CHECKSUMS, SIGNATURES].contains(self)
    }
}

/// The result of probing a capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Support {
    Yes,
    /// The store's actual behavior.
    No(String),
    /// The reason the probe was inconclusive.
    Unknown(String),
}

/// A capability and the result of probing it.
#[derive(Debug, Clone)]
pub struct ProbeResult {
    pub capability: Capability,
    pub support: Support,
}

impl ProbeResult {
    pub fn new(capability: Capability, support: Support) -> Self {
        Self { capability, support }
    }
}

pub const CREATE_ONCE: Capability = Capability {
    name: "a put creates an object only if there is none (`If-None-Match: *`)",
    need: CapabilityNeed::Required,
    without: "A replaced host could move the snapshot pointer, and a new machine could start from old data.",
};
pub const REPLACE_READ_VERSION: Capability = Capability {
    name: "a put replaces only the version that was read (`If-Match`)",
    need: CapabilityNeed::Required,
    without: "A delayed writer could overwrite a newer object.",
};
pub const CREATE_ONCE_IN_PARALLEL: Capability = Capability {
    name: "of several concurrent writers, only one creates the object",
    need: CapabilityNeed::Required,
    without: "Two hosts could both move the snapshot pointer; `svc-platform` refuses to start.",
};
pub const REPLACE_IN_PARALLEL: Capability = Capability {
    name: "of several concurrent writers, only one replaces a version",
    need: CapabilityNeed::Recommended,
    without: "The snapshot pointer is safe, because its log only ever creates objects; in releases without that \
              log, it is not.",
};
pub const CONSISTENT_READS: Capability = Capability {
    name: "a read immediately returns the last write",
    need: CapabilityNeed::Required,
    without: "A host could restore a snapshot that is not the latest.",
};
pub const CONSISTENT_LISTINGS: Capability = Capability {
    name: "a listing immediately shows new objects, and no deleted ones",
    need: CapabilityNeed::Recommended,
    without: "`svcctl backup list` can miss the newest snapshot, and a check after a backup can fail.",
};
pub const RANGES: Capability = Capability {
    name: "a range of one version can be read (`Range` with `If-Match`)",
    need: CapabilityNeed::Recommended,
    without: "An interrupted download cannot resume, or could mix two versions.",
};
pub const UPLOADS: Capability = Capability {
    name: "a multipart upload is visible only when it is completed",
    need: CapabilityNeed::Required,
    without: "No snapshot can be stored, or a broken one becomes an object.",
};
pub const CREATE_ONLY_UPLOAD: Capability = Capability {
    name: "a multipart upload creates an object only if there is none",
    need: CapabilityNeed::Recommended,
    without: "Credentials stolen from a host can overwrite a snapshot; hosts themselves never do.",
};
pub const CHECKSUMS: Capability = Capability {
    name: "a body that does not match its SHA-256 is refused",
    need: CapabilityNeed::Recommended,
    without: "A snapshot that was corrupted in transit is stored; the host detects it only when it reads the snapshot back.",
};
pub const SIGNATURES: Capability = Capability {
    name: "a request with a wrong secret key is refused",
    need: CapabilityNeed::Required,
    without: "Anyone who can reach the endpoint can read and delete every snapshot.",
};
pub const VERSIONING: Capability = Capability {
    name: "the bucket can keep overwritten and deleted objects (versioning)",
    need: CapabilityNeed::Recommended,
    without: "Overwritten and deleted objects are lost.",
};
pub const CONDITIONAL_COPY: Capability = Capability {
    name: "a copy can require the version that was read",
    need: CapabilityNeed::Unused,
    without: "Nothing: svc does not copy objects within the store.",
};

/// Limits for the probes with concurrent writers.
#[derive(Debug, Clone, Copy)]
pub struct RaceLimits {
    pub rounds: usize,
    pub timeout: Duration,
}

/// Probes conditional puts by a single writer.
///
/// # Errors
/// [`StoreError`] from the first call that failed for a reason other than its condition.
pub async fn probe_conditions(bucket: &Bucket) -> Result<[ProbeResult; 2], StoreError> {
    Ok([
        ProbeResult::new(CREATE_ONCE, to_support(objects::probe_create_once(bucket).await?)),
        ProbeResult::new(
            REPLACE_READ_VERSION,
            to_support(objects::probe_replace_read_version(bucket).await?),
        ),
    ])
}

/// Probes, concurrently, the capabilities that need neither conditional puts nor the bucket's settings: reads,
/// listings, ranges, uploads, checksums and signatures.
pub async fn probe_other_capabilities(config: &StoreConfig, bucket: &Bucket) -> Vec<ProbeResult> {
    let s3 = match config {
        StoreConfig::S3(s3) => Some(s3),
        StoreConfig::Directory(_) => None,
    };
    let probes: Vec<(Capability, BoxFuture<'_, Support>)> = vec![
        (CONSISTENT_READS, determine_support(objects::probe_consistent_reads(bucket)).boxed()),
        (CONSISTENT_LISTINGS, determine_support(objects::probe_consistent_listings(bucket)).boxed()),
        (RANGES, determine_support(objects::probe_ranges(bucket)).boxed()),
        (UPLOADS, determine_support(uploads::probe_visibility(bucket)).boxed()),
        (CREATE_ONLY_UPLOAD, determine_support(uploads::probe_create_only_upload(bucket)).boxed()),
        (CHECKSUMS, raw_requests::probe_checksums(s3).boxed()),
        (SIGNATURES, raw_requests::probe_signatures(s3).boxed()),
    ];
    let probes = probes.into_iter();
    let probes = probes.map(async |(capability, support)| ProbeResult::new(capability, support.await));
    join_all(probes).await
}

/// Probes all capabilities, for the store comparison table; [`VERSIONING`] and [`CONDITIONAL_COPY`] only on S3. If the
/// store cannot be opened, returns only [`CREATE_ONCE`] as unknown, with the error.
pub async fn probe_all(config: &StoreConfig, races: RaceLimits) -> Vec<ProbeResult> {
    let bucket = match config.open() {
        Ok(bucket) => bucket,
        Err(error) => return vec![ProbeResult::new(CREATE_ONCE, Support::Unknown(format!("{error:#}")))],
    };
    let mut results = vec![
        ProbeResult::new(CREATE_ONCE, determine_support(objects::probe_create_once(&bucket)).await),
        ProbeResult::new(
            REPLACE_READ_VERSION,
            determine_support(objects::probe_replace_read_version(&bucket)).await,
        ),
    ];
    let (create, replace) = match parallel_probe::run_rounds(&bucket, races.rounds, races.timeout).await {
        Ok(findings) => (atomicity_support(findings.create), atomicity_support(findings.replace)),
        Err(error) => {
            let unknown = Support::Unknown(format_chain(&error));
            (unknown.clone(), unknown)
        }
    };
    results.push(ProbeResult::new(CREATE_ONCE_IN_PARALLEL, create));
    results.push(ProbeResult::new(REPLACE_IN_PARALLEL, replace));
    results.extend(probe_other_capabilities(config, &bucket).await);
    if let StoreConfig::S3(s3) = config {
        let versioning = match protection::read(s3).await.map(|read| read.versioning) {
            Ok(SettingState::On | SettingState::Off) => Support::Yes,
            Ok(SettingState::Unknown(status)) => Support::No(format!("it returned {status}")),
            Err(error) => Support::Unknown(format_chain(&error)),
        };
        results.push(ProbeResult::new(VERSIONING, versioning));
        results.push(ProbeResult::new(CONDITIONAL_COPY, raw_requests::probe_conditional_copy(s3).await));
    }
    results
}

fn atomicity_support(atomicity: Atomicity) -> Support {
    match atomicity {
        Atomicity::Atomic => Support::Yes,
        Atomicity::Violated { .. } => Support::No("several writers succeeded".to_owned()),
    }
}

/// `None` if the store has the capability; otherwise, the store's actual behavior. An error makes the probe
/// inconclusive.
type ProbeOutcome = Result<Option<String>, StoreError>;

fn to_support(deviation: Option<String>) -> Support {
    deviation.map_or(Support::Yes, Support::No)
}

async fn determine_support(probe: impl Future<Output = ProbeOutcome>) -> Support {
    probe.await.map_or_else(|error| Support::Unknown(format_chain(&error)), to_support)
}

/// Returns the key of a temporary object, in a unique directory.
fn temporary_key(name: &str) -> Path {
    Path::from(format!("{}/{}/{name}", *RUN_PREFIX, uuid::Uuid::new_v4()))
}

/// Deletes a temporary object. Best effort: a failed deletion leaves a few bytes in the store.
async fn delete(bucket: &Bucket, key: &Path) {
    if let Err(error) = bucket.raw().delete(key).await {
        tracing::debug!(%key, error = %format_chain(&error), "cannot delete the probe's object");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::ObjectStore;
    use object_store::memory::InMemory;

    use super::*;
    use crate::lenient::{IgnoredCondition, LenientStore};

    fn directory() -> StoreConfig {
        StoreConfig::Directory("/nonexistent".into())
    }

    #[tokio::test]
    async fn probes_find_every_capability_of_a_conforming_store() {
        let store = Arc::new(InMemory::new());
        let bucket = Bucket::new(store.clone());
        let mut results = probe_conditions(&bucket).await.unwrap().to_vec();
        results.extend(probe_other_capabilities(&directory(), &bucket).await);
        for ProbeResult { capability, support } in results {
            match support {
                // An in-memory store receives no requests, and completes every upload unconditionally.
                Support::Unknown(reason) => {
                    assert!(capability.applies_only_to_servers(), "{}: {reason}", capability.name);
                }
                Support::No(_) => assert_eq!(capability, CREATE_ONLY_UPLOAD),
                Support::Yes => {}
            }
        }
        let remaining = futures_util::TryStreamExt::try_next(&mut store.list(None)).await.unwrap();
        assert_eq!(remaining, None, "a temporary object was not deleted");
    }

    #[tokio::test]
    async fn probes_detect_a_store_that_ignores_a_condition() {
        for (ignored, expected) in
            [(IgnoredCondition::Create, CREATE_ONCE), (IgnoredCondition::Replace, REPLACE_READ_VERSION)]
        {
            let bucket = Bucket::new(Arc::new(LenientStore::new(ignored)));
            let results = probe_conditions(&bucket).await.unwrap();
            let missing = results.iter().filter(|result| matches!(result.support, Support::No(_)));
            let missing: Vec<_> = missing.map(|result| result.capability).collect();
            assert_eq!(missing, [expected], "{ignored:?}");
        }
    }
}

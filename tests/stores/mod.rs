//! Runs the same cases on each object store: the kit's own, moto and SeaweedFS. [`DEVIATIONS`] declares what a store
//! cannot do; any other deviation, and a declared one that no longer occurs, fails the test.

mod cases;
mod condition_races;
mod doctor;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::s3::S3Server;
use kit::stores::StoreKind;
use svc::config::Env;
use svc::store::Bucket;
use svc::store::capabilities::Support;
use svc::store::config::{S3Config, StoreConfig};

const BUCKET: &str = "svc-test";
const CASE_TIMEOUT: Duration = Duration::from_secs(120);

/// Store, case, and a substring of the deviation that [`Support::No`] reports.
const DEVIATIONS: [(StoreKind, &str, &str); 5] = [
    (StoreKind::Moto, "session_reaches_only_its_slot", "the session wrote an object in another slot"),
    (StoreKind::Moto, "damaged_body_is_refused", "it stored the object"),
    (StoreKind::Moto, "wrong_secret_is_refused", "it stored an object"),
    // The tests run SeaweedFS without an identity configuration, and so without STS.
    (StoreKind::Seaweedfs, "session_reaches_only_its_slot", "STS returned"),
    (StoreKind::Seaweedfs, "wrong_secret_is_refused", "it stored an object"),
];

/// A store with an empty bucket.
struct StoreFixture {
    server: S3Server,
    s3: S3Config,
    bucket: Bucket,
    _dir: tempfile::TempDir,
}

impl StoreFixture {
    /// Records a skip and returns `None` if SeaweedFS cannot be fetched on this machine.
    async fn start(kind: StoreKind) -> Result<Option<Self>> {
        svc::http::tls::install_provider();
        if kind == StoreKind::Seaweedfs {
            let fetch = || kit::seaweed::fetch(&kit::fetch::target_dir());
            if let Err(error) = tokio::task::spawn_blocking(fetch).await? {
                kit::skip::record(format_args!("SeaweedFS cannot be fetched: {error:#}"));
                return Ok(None);
            }
        }
        let dir = tempfile::tempdir()?;
        let server = kind.start(dir.path(), BUCKET).await?;
        let pairs = server.env(BUCKET);
        let mut env = Env::from_pairs(pairs.iter().map(|(name, value)| (&**name, &**value)));
        let config = StoreConfig::read(&mut env);
        let StoreConfig::S3(s3) = env.finish(config)? else {
            anyhow::bail!("expected an S3 configuration, got a directory")
        };
        let bucket = StoreConfig::S3(s3.clone()).open()?;
        Ok(Some(Self { server, s3, bucket, _dir: dir }))
    }
}

/// Runs a case on a store, and compares the result with the declared deviations.
async fn check_case(
    kind: StoreKind,
    name: &str,
    case: impl AsyncFn(&StoreFixture) -> Result<Support>,
) -> Result<()> {
    let Some(fixture) = StoreFixture::start(kind).await? else { return Ok(()) };
    let outcome = tokio::time::timeout(CASE_TIMEOUT, case(&fixture)).await.context("the case timed out")?;
    let outcome = outcome.with_context(|| format!("{name} on {}", kind.name()))?;
    let declared = DEVIATIONS.iter().find(|(store, case, _)| (*store, *case) == (kind, name));
    match (outcome, declared) {
        (Support::Yes, None) => Ok(()),
        (Support::Yes, Some((.., deviation))) => {
            anyhow::bail!("{} no longer deviates: remove {deviation:?} from DEVIATIONS", kind.name())
        }
        (Support::No(deviation), Some((.., expected))) => {
            ensure!(deviation.contains(expected), "{deviation:?} instead of {expected:?}");
            Ok(())
        }
        (outcome, _) => anyhow::bail!("{name} on {}: {outcome:?}", kind.name()),
    }
}

macro_rules! cases_on {
    ($store:ident, $kind:expr, [$($case:ident),* $(,)?]) => {
        mod $store {
            use anyhow::Result;
            use kit::stores::StoreKind;

            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() -> Result<()> {
                    super::check_case($kind, stringify!($case), super::cases::$case).await
                }
            )*
        }
    };
}

macro_rules! cases_on_each_store {
    ($cases:tt) => {
        cases_on!(kit_store, StoreKind::Kit, $cases);
        cases_on!(moto, StoreKind::Moto, $cases);
        cases_on!(seaweedfs, StoreKind::Seaweedfs, $cases);
    };
}

cases_on_each_store!([
    conditional_puts_have_one_winner,
    pointer_follows_backups_and_fences,
    pointer_moves_once_when_responses_are_lost,
    missing_pointer_with_snapshots_is_reported_as_damaged,
    large_upload_is_stored_as_sent,
    aborted_upload_leaves_nothing,
    upload_from_killed_process_can_be_aborted,
    upload_creates_a_snapshot_only_once,
    interrupted_download_resumes_with_the_same_version,
    outage_is_not_reported_as_not_found,
    list_of_many_keys_is_complete_and_sorted,
    reads_and_listings_are_consistent,
    session_reaches_only_its_slot,
    damaged_body_is_refused,
    wrong_secret_is_refused,
]);

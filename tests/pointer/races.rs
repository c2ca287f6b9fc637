//! Races between real clients, over HTTP, on third-party servers.

use std::time::Duration;

use anyhow::{Context, Result};
use jiff::{SignedDuration, Timestamp};
use kit::moto::Moto;
use kit::seaweed::Seaweed;
use svc::config::Env;
use svc::machine::epoch::Epoch;
use svc::machine::name::Slot;
use svc::store::config::StoreConfig;
use svc::store::key::SlotPrefix;
use svc::store::pointer::{Fence, Pointer};
use svc::store::pointer_io::{self, PointerError};
use svc::store::snapshot_with_sidecar::SnapshotWithSidecar;
use svc::store::{Bucket, parallel_probe, snapshot};

use super::actors::{machine, sidecar};
use super::schedule::{Choices, SeededChoices};

/// The environment variables that configure svc's object store.
type StoreSettings = Vec<(String, String)>;

fn open_bucket(pairs: &StoreSettings) -> Result<Bucket> {
    let mut env = Env::from_pairs(pairs.iter().map(|(name, value)| (&**name, &**value)));
    let config = StoreConfig::read(&mut env);
    env.finish(config)?.open()
}

/// Performs all but the last step of a backup on the machine for `epoch`.
async fn prepare_backup(
    bucket: &Bucket,
    slot: &SlotPrefix,
    epoch: u32,
    seconds: i64,
) -> Result<SnapshotWithSidecar> {
    let sidecar = sidecar(Epoch(epoch), Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds));
    bucket.put(&slot.snapshot(&sidecar.key).context("the key is not a snapshot key")?, &b"dump"[..]).await?;
    Ok(snapshot::write_sidecar(bucket, slot, &sidecar, None).await?)
}

/// Reads until cancelled, and returns the pointers in the observed order.
async fn observe_pointers(
    bucket: Bucket,
    slot: SlotPrefix,
    stop: tokio_util::sync::CancellationToken,
) -> Vec<Pointer> {
    let mut pointers: Vec<Pointer> = Vec::new();
    while !stop.is_cancelled() {
        if let Ok(Some(read)) = pointer_io::read(&bucket, &slot).await
            && pointers.last() != Some(&read.value)
        {
            pointers.push(read.value);
        }
    }
    pointers
}

/// Races the last steps of the old machine's three backups against the platform's fence, which the new machine's backup
/// follows. Returns the number of successful writes.
async fn race(bucket: &Bucket, slot: &SlotPrefix, choices: &mut SeededChoices) -> Result<u64> {
    // Staggers the starts by about the duration of a call; otherwise the same writer would always win.
    let mut delay = || Duration::from_millis(choices.pick(40) as u64);

    pointer_io::fence(bucket, slot, &Fence::unsigned(Epoch(1), machine(1))).await?;
    let mut writers = tokio::task::JoinSet::new();
    for seconds in 0..3 {
        let recorded = prepare_backup(bucket, slot, 1, seconds).await?;
        let (bucket, slot, delay) = (bucket.clone(), slot.clone(), delay());
        writers.spawn(async move {
            tokio::time::sleep(delay).await;
            pointer_io::advance(&bucket, &slot, &recorded).await
        });
    }
    let recorded = prepare_backup(bucket, slot, 2, 10).await?;
    let (platform_bucket, platform_slot, delay) = (bucket.clone(), slot.clone(), delay());
    writers.spawn(async move {
        tokio::time::sleep(delay).await;
        pointer_io::fence(&platform_bucket, &platform_slot, &Fence::unsigned(Epoch(2), machine(2))).await?;
        pointer_io::advance(&platform_bucket, &platform_slot, &recorded).await
    });
    // The fences for epochs 1 and 2 are two writes; each task that succeeds adds one, for its backup.
    let mut writes = 2;
    while let Some(result) = writers.join_next().await {
        match result? {
            Ok(()) => writes += 1,
            Err(PointerError::Fenced(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(writes)
}

#[tokio::test(flavor = "multi_thread")]
async fn pointer_invariants_hold_on_moto() -> Result<()> {
    race_on_moto(15).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a long campaign: cargo xtask test --long"]
async fn pointer_invariants_hold_on_moto_in_thousands_of_races() -> Result<()> {
    race_on_moto(2000).await
}

#[tokio::test(flavor = "multi_thread")]
async fn pointer_invariants_hold_on_seaweedfs() -> Result<()> {
    race_on_seaweedfs(40).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a long campaign: cargo xtask test --long"]
async fn pointer_invariants_hold_on_seaweedfs_in_thousands_of_races() -> Result<()> {
    race_on_seaweedfs(2000).await
}

async fn race_on_moto(count: usize) -> Result<()> {
    svc::http::tls::install_provider();
    let moto = tokio::task::spawn_blocking(Moto::start).await??;
    moto.s3().create_bucket().await?;
    run_races(&moto.s3().env(), count).await
}

async fn race_on_seaweedfs(count: usize) -> Result<()> {
    let Some(seaweed) = start_seaweedfs().await? else { return Ok(()) };
    run_races(&seaweed.s3().env(), count).await
}

/// Starts a server with its bucket; records a skip and returns `None` if the server cannot be fetched.
async fn start_seaweedfs() -> Result<Option<Seaweed>> {
    svc::http::tls::install_provider();
    if let Err(error) = tokio::task::spawn_blocking(|| kit::seaweed::fetch(&kit::fetch::target_dir())).await?
    {
        kit::skip::record(format_args!("SeaweedFS cannot be fetched: {error:#}"));
        return Ok(None);
    }
    let seaweed = tokio::task::spawn_blocking(Seaweed::start).await??;
    seaweed.s3().create_bucket().await?;
    Ok(Some(seaweed))
}

/// The platform accepts this store, because only one of several concurrent writers can create an object. Whether the
/// probe detects that several writers can replace one version depends on timing, so that result is only printed.
#[tokio::test(flavor = "multi_thread")]
async fn probe_accepts_seaweedfs() -> Result<()> {
    let Some(seaweed) = start_seaweedfs().await? else { return Ok(()) };
    let probe = parallel_probe::run(&open_bucket(&seaweed.s3().env())?, Duration::from_secs(60)).await?;
    println!("If-Match on SeaweedFS: {:?}", probe.replace);
    assert_eq!(probe.refusal(), None);
    Ok(())
}

async fn run_races(settings: &StoreSettings, count: usize) -> Result<()> {
    let bucket = open_bucket(settings)?;
    let mut refused = 0;
    for n in 0..count {
        let slot = SlotPrefix::new(&format!("user_{n}").parse()?, &Slot::primary());
        let stop = tokio_util::sync::CancellationToken::new();
        let watcher = tokio::spawn(observe_pointers(open_bucket(settings)?, slot.clone(), stop.clone()));
        let writes =
            race(&bucket, &slot, &mut SeededChoices(n as u64)).await.with_context(|| format!("race {n}"))?;
        stop.cancel();
        let observed = watcher.await?;
        for pair in observed.windows(2) {
            assert!(
                pair[0].seq < pair[1].seq && pair[0].fence_epoch <= pair[1].fence_epoch,
                "race {n}: {observed:?}"
            );
        }
        let last = pointer_io::read(&bucket, &slot).await?.context("the slot has no pointer")?.value;
        let named = last.snapshot.as_ref().context("the pointer names no snapshot")?;
        assert_eq!((last.fence_epoch, named.epoch), (Epoch(2), Epoch(2)), "race {n}: {last:?}");
        assert_eq!(last.seq, writes, "race {n}: a successful writer did not write exactly once: {last:?}");
        assert_eq!(snapshot::find_latest(&bucket, &slot).await?.key, named.key);
        refused += 6 - writes;
    }
    println!("{count} races, {refused} of {} writers refused by the fence", 3 * count);
    assert!(refused > 0 && refused < 3 * count as u64, "the same writer won every race");
    Ok(())
}

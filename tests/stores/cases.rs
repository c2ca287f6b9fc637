//! The test cases. If the store deviates, a case returns the deviation; any other failure is an error.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use kit::s3::{Fault, FaultRule};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStoreExt};
use svc::machine::epoch::Epoch;
use svc::machine::name::Slot;
use svc::store::bucket::StoreError;
use svc::store::capabilities::{self, Capability, Support};
use svc::store::config::{S3Config, StoreConfig};
use svc::store::key::SlotPrefix;
use svc::store::parallel_probe;
use svc::store::pointer::Fence;
use svc::store::pointer_io::{self, PointerError};
use svc::store::policy::{self, Overwrites};
use svc::store::snapshot::{self, SnapshotUnusable};
use svc::store::sts::Sts;
use svc::store::upload::{PartLayout, Upload};

use super::{BUCKET, StoreFixture};
use crate::pointer::actors::{machine, sidecar};

const MIB: usize = 1 << 20;

fn slot_of(user: &str) -> Result<SlotPrefix> {
    Ok(SlotPrefix::new(&user.parse()?, &Slot::primary()))
}

/// Returns the key prefix for pointer log entries.
fn pointer_log(slot: &SlotPrefix) -> String {
    let entry = slot.pointer_entry(0).to_string();
    entry.rsplit_once('/').map_or(entry.clone(), |(dir, _)| format!("{dir}/"))
}

/// Stores the dump of a backup from the machine for `epoch`; [`advance`] writes its sidecar.
async fn store_backup(
    fixture: &StoreFixture,
    slot: &SlotPrefix,
    epoch: u32,
    taken_at_seconds: i64,
) -> Result<snapshot::Sidecar> {
    let taken_at = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(taken_at_seconds);
    let sidecar = sidecar(Epoch(epoch), taken_at);
    fixture
        .bucket
        .put(&slot.snapshot(&sidecar.key).context("the key is not a snapshot key")?, &b"dump"[..])
        .await?;
    Ok(sidecar)
}

async fn advance(
    fixture: &StoreFixture,
    slot: &SlotPrefix,
    sidecar: &snapshot::Sidecar,
) -> Result<(), PointerError> {
    let recorded = snapshot::write_sidecar(&fixture.bucket, slot, sidecar, None).await?;
    pointer_io::advance(&fixture.bucket, slot, &recorded).await
}

pub async fn conditional_puts_have_one_winner(fixture: &StoreFixture) -> Result<Support> {
    let results = capabilities::probe_conditions(&fixture.bucket).await?;
    if let Some(deviation) = results.into_iter().find(|result| result.support != Support::Yes) {
        return Ok(deviation.support);
    }
    let probe = parallel_probe::run(&fixture.bucket, Duration::from_secs(60)).await?;
    Ok(probe.refusal().map_or(Support::Yes, Support::No))
}

pub async fn pointer_follows_backups_and_fences(fixture: &StoreFixture) -> Result<Support> {
    let slot = slot_of("user_1")?;
    ensure!(pointer_io::read(&fixture.bucket, &slot).await?.is_none(), "a new slot has a pointer");
    let absent = snapshot::find_latest(&fixture.bucket, &slot).await;
    ensure!(matches!(absent, Err(SnapshotUnusable::Absent)), "{absent:?}");
    pointer_io::fence(&fixture.bucket, &slot, &Fence::unsigned(Epoch(1), machine(1))).await?;
    let first = store_backup(fixture, &slot, 1, 1).await?;
    advance(fixture, &slot, &first).await?;
    let latest = snapshot::find_latest(&fixture.bucket, &slot).await?;
    ensure!(latest.key == first.key, "the latest snapshot is not the first");

    pointer_io::fence(&fixture.bucket, &slot, &Fence::unsigned(Epoch(2), machine(2))).await?;
    let late = store_backup(fixture, &slot, 1, 2).await?;
    let refused = advance(fixture, &slot, &late).await;
    ensure!(matches!(refused, Err(PointerError::Fenced(_))), "a replaced machine moved the pointer");
    let latest = snapshot::find_latest(&fixture.bucket, &slot).await?;
    ensure!(latest.key == first.key, "the pointer has moved");
    let second = store_backup(fixture, &slot, 2, 3).await?;
    advance(fixture, &slot, &second).await?;
    let pointer = pointer_io::read(&fixture.bucket, &slot).await?.context("the slot has no pointer")?.value;
    ensure!((pointer.seq, pointer.fence_epoch) == (4, Epoch(2)), "{pointer:?}");
    Ok(Support::Yes)
}

pub async fn pointer_moves_once_when_responses_are_lost(fixture: &StoreFixture) -> Result<Support> {
    let slot = slot_of("user_1")?;
    pointer_io::fence(&fixture.bucket, &slot, &Fence::unsigned(Epoch(1), machine(1))).await?;
    let sidecar = store_backup(fixture, &slot, 1, 1).await?;
    let lost =
        fixture.server.add_fault(FaultRule::new(Fault::LostReply).method("PUT").key("pointer-log/").times(1));
    advance(fixture, &slot, &sidecar).await?;
    ensure!(lost.hits() == 1, "the fault did not occur");
    let pointer = pointer_io::read(&fixture.bucket, &slot).await?.context("the slot has no pointer")?.value;
    ensure!(
        pointer.snapshot.is_some_and(|named| named.key == sidecar.key),
        "the pointer names the wrong snapshot"
    );
    let entries = fixture.server.objects(BUCKET, &pointer_log(&slot));
    ensure!(entries.len() as u64 == pointer.seq, "{} entries for seq {}", entries.len(), pointer.seq);
    Ok(Support::Yes)
}

pub async fn missing_pointer_with_snapshots_is_reported_as_damaged(
    fixture: &StoreFixture,
) -> Result<Support> {
    let slot = slot_of("user_1")?;
    pointer_io::fence(&fixture.bucket, &slot, &Fence::unsigned(Epoch(1), machine(1))).await?;
    let sidecar = store_backup(fixture, &slot, 1, 1).await?;
    advance(fixture, &slot, &sidecar).await?;
    ensure!(fixture.server.remove(BUCKET, slot.pointer().as_ref()), "there was no pointer");
    for entry in fixture.server.objects(BUCKET, &pointer_log(&slot)) {
        fixture.server.remove(BUCKET, &entry.key);
    }
    match snapshot::find_latest(&fixture.bucket, &slot).await {
        Err(SnapshotUnusable::Absent) => anyhow::bail!("a slot with snapshots counts as empty"),
        Err(SnapshotUnusable::Damaged { .. }) => Ok(Support::Yes),
        Err(error) => Err(error.into()),
        Ok(snapshot) => anyhow::bail!("{snapshot:?} without a pointer"),
    }
}

fn generate_content(size_bytes: usize) -> Bytes {
    (0..size_bytes).map(|n| (n % 251) as u8).collect::<Vec<u8>>().into()
}

async fn start_upload(fixture: &StoreFixture, key: &Path, mut content: Bytes) -> Result<Upload> {
    let mut upload = Upload::begin(&fixture.bucket, key, PartLayout::for_max_bytes(0)).await?;
    while !content.is_empty() {
        let size = upload.part_space().min(content.len()).min(MIB);
        upload.push(content.split_to(size)).await?;
    }
    upload.flush().await?;
    Ok(upload)
}

pub async fn large_upload_is_stored_as_sent(fixture: &StoreFixture) -> Result<Support> {
    let (key, content) = (Path::from("user_1/large.dump"), generate_content(12 * MIB + 7));
    let mut upload = start_upload(fixture, &key, content.clone()).await?;
    ensure!(
        fixture.bucket.head(&key).await?.is_none(),
        "the object is visible before the upload is completed"
    );
    ensure!(upload.complete().await?.size == content.len() as u64, "the object has a different size");
    let read = fixture.bucket.get(&key, u64::MAX).await?.context("the object was not stored")?.value;
    ensure!(read == content, "the object has different content");
    ensure!(fixture.server.uploads(BUCKET).is_empty(), "the upload is still open");
    Ok(Support::Yes)
}

pub async fn aborted_upload_leaves_nothing(fixture: &StoreFixture) -> Result<Support> {
    let key = Path::from("user_1/aborted.dump");
    let upload = start_upload(fixture, &key, generate_content(6 * MIB)).await?;
    ensure!(upload.abort().await, "the upload could not be aborted");
    ensure!(fixture.bucket.head(&key).await?.is_none(), "an object remains");
    ensure!(fixture.server.uploads(BUCKET).is_empty(), "the upload is still open");
    Ok(Support::Yes)
}

pub async fn upload_from_killed_process_can_be_aborted(fixture: &StoreFixture) -> Result<Support> {
    let key = Path::from("user_1/killed.dump");
    let mut upload = start_upload(fixture, &key, generate_content(6 * MIB)).await?;
    let open = upload.open_upload().cloned().context("the upload has no id")?;
    ensure!(fixture.server.uploads(BUCKET) == [key.as_ref()], "{:?}", fixture.server.uploads(BUCKET));
    fixture.bucket.abort_upload(&open).await?;
    ensure!(fixture.server.uploads(BUCKET).is_empty(), "the upload is still open");
    fixture.bucket.abort_upload(&open).await.context("the second abort failed")?;
    ensure!(upload.complete().await.is_err(), "an aborted upload was completed");
    ensure!(fixture.bucket.head(&key).await?.is_none(), "an object remains");
    Ok(Support::Yes)
}

/// Returns the result of the product's probe for a capability.
async fn probe_capability(fixture: &StoreFixture, capability: Capability) -> Result<Support> {
    let results =
        capabilities::probe_other_capabilities(&StoreConfig::S3(fixture.s3.clone()), &fixture.bucket).await;
    let result = results.into_iter().find(|result| result.capability == capability);
    Ok(result.context("the capability was not probed")?.support)
}

pub async fn upload_creates_a_snapshot_only_once(fixture: &StoreFixture) -> Result<Support> {
    probe_capability(fixture, capabilities::CREATE_ONLY_UPLOAD).await
}

pub async fn damaged_body_is_refused(fixture: &StoreFixture) -> Result<Support> {
    probe_capability(fixture, capabilities::CHECKSUMS).await
}

pub async fn wrong_secret_is_refused(fixture: &StoreFixture) -> Result<Support> {
    probe_capability(fixture, capabilities::SIGNATURES).await
}

pub async fn interrupted_download_resumes_with_the_same_version(fixture: &StoreFixture) -> Result<Support> {
    let (key, content) = (Path::from("user_1/resumed.dump"), generate_content(2 * MIB));
    fixture.bucket.put(&key, content.clone()).await?;
    let truncated = fixture.server.add_fault(
        FaultRule::new(Fault::TruncateBody(MIB as u64)).method("GET").key("resumed.dump").times(1),
    );
    let first = fixture.bucket.raw().get(&key).await?;
    let version = first.meta.e_tag.clone();
    let mut read = Vec::new();
    let mut chunks = first.into_stream();
    while let Some(chunk) = chunks.next().await {
        read.extend_from_slice(&chunk?);
    }
    ensure!(truncated.hits() == 1, "the download was not interrupted");
    let get_from = async |from: u64| {
        let (range, if_match) = (Some(GetRange::Offset(from)), version.clone());
        fixture.bucket.raw().get_opts(&key, GetOptions { range, if_match, ..GetOptions::default() }).await
    };
    ensure!(read == content, "the {} bytes that were read differ from the stored ones", read.len());
    fixture.bucket.put(&key, &b"another version"[..]).await?;
    match get_from(3).await {
        Err(object_store::Error::Precondition { .. }) => Ok(Support::Yes),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(Support::No("the download resumed with a different version".to_owned())),
    }
}

pub async fn outage_is_not_reported_as_not_found(fixture: &StoreFixture) -> Result<Support> {
    let key = Path::from("user_1/there");
    ensure!(fixture.bucket.head(&key).await?.is_none(), "an object exists that was never stored");
    fixture.bucket.put(&key, &b"x"[..]).await?;
    fixture.server.add_fault(FaultRule::new(Fault::Status(503)).key("user_1/there").always());
    let failed = fixture.bucket.get(&key, 10).await;
    ensure!(matches!(failed, Err(StoreError::Unavailable { .. })), "{failed:?}");
    fixture.server.heal();
    fixture.server.take_down();
    let down =
        fixture.bucket.run_with_timeout(&key, Duration::from_secs(20), fixture.bucket.head(&key)).await;
    ensure!(matches!(down, Err(StoreError::Unavailable { .. })), "{down:?}");
    fixture.server.bring_up()?;
    ensure!(fixture.bucket.get(&key, 10).await?.is_some(), "the object has disappeared");
    Ok(Support::Yes)
}

/// Lists more keys than fit on one page.
pub async fn list_of_many_keys_is_complete_and_sorted(fixture: &StoreFixture) -> Result<Support> {
    const KEYS: usize = 1100;
    let dir = Path::from("user_1/primary/system/db/pointer-log");
    let keys: Vec<Path> = (0..KEYS).map(|n| dir.clone().join(format!("{n:016}.json"))).collect();
    let puts = stream::iter(&keys).map(|key| fixture.bucket.put(key, &b"{}"[..]));
    puts.buffer_unordered(8).try_collect::<()>().await?;
    fixture.bucket.put(&Path::from("user_1/primary/system/db/pointer-log-other"), &b"{}"[..]).await?;
    let listed: Vec<Path> =
        fixture.bucket.raw().list(Some(&dir)).map_ok(|object| object.location).try_collect().await?;
    ensure!(listed == keys, "{} keys were listed, or their order differs", listed.len());
    let after: Vec<Path> = fixture
        .bucket
        .raw()
        .list_with_offset(Some(&dir), &keys[KEYS - 3])
        .map_ok(|object| object.location)
        .try_collect()
        .await?;
    ensure!(after == keys[KEYS - 2..], "{after:?}");
    Ok(Support::Yes)
}

pub async fn reads_and_listings_are_consistent(fixture: &StoreFixture) -> Result<Support> {
    match probe_capability(fixture, capabilities::CONSISTENT_READS).await? {
        Support::Yes => probe_capability(fixture, capabilities::CONSISTENT_LISTINGS).await,
        deviation => Ok(deviation),
    }
}

pub async fn session_reaches_only_its_slot(fixture: &StoreFixture) -> Result<Support> {
    let (own_slot, other_slot) = (slot_of("user_1")?, slot_of("user_2")?);
    let role = "arn:aws:iam::000000000000:role/svc-host".to_owned();
    let endpoint = fixture.server.endpoint().parse()?;
    let sts = Sts::new(&endpoint, fixture.s3.region.clone(), role, fixture.s3.credential())?;
    let policy = policy::slot_policy("aws", BUCKET, &own_slot, Overwrites::Allowed);
    let session = match sts.assume_role("svc-test", &policy, Duration::from_secs(900)).await {
        Ok(session) => session,
        Err(error) => return Ok(Support::No(error.to_string())),
    };
    let host_config = S3Config {
        access_key: session.access_key,
        secret_key: session.secret_key,
        session_token: session.session_token,
        expires_at: Some(session.expires_at),
        ..fixture.s3.clone()
    };
    let host = StoreConfig::S3(host_config).open()?;
    host.put(&own_slot.pointer(), &b"{}"[..]).await?;
    ensure!(host.get(&own_slot.pointer(), 10).await?.is_some(), "the session cannot read its own object");
    match host.put(&other_slot.pointer(), &b"{}"[..]).await {
        Err(StoreError::Denied { .. }) => {}
        Ok(()) => return Ok(Support::No("the session wrote an object in another slot".to_owned())),
        Err(error) => return Err(error.into()),
    }
    fixture.bucket.put(&other_slot.pointer(), &b"{}"[..]).await?;
    let read = host.get(&other_slot.pointer(), 10).await;
    ensure!(matches!(read, Err(StoreError::Denied { .. })), "the session read an object in another slot");
    let deleted = host.raw().delete(&own_slot.pointer()).await;
    ensure!(deleted.is_err(), "the session deleted an object");
    Ok(Support::Yes)
}

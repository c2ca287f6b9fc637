//! The cases. Each returns what the store did instead if it deviates; everything else that is wrong is an error.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use kit::s3::{Fault, Rule};
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
use svc::store::policy::{self, SnapshotWrites};
use svc::store::snapshot::{self, SnapshotUnusable};
use svc::store::sts::Sts;
use svc::store::upload::{PartLayout, Upload};

use super::{BUCKET, Stage};
use crate::pointer::actors::{machine, side_record};

const MIB: usize = 1 << 20;

fn slot_of(user: &str) -> Result<SlotPrefix> {
    Ok(SlotPrefix::new(&user.parse()?, &Slot::primary()))
}

/// The prefix of the entries of the pointer's log.
fn pointer_log(slot: &SlotPrefix) -> String {
    let entry = slot.pointer_entry(0).to_string();
    entry.rsplit_once('/').map_or(entry.clone(), |(folder, _)| format!("{folder}/"))
}

/// A backup of the machine of `epoch`, up to its last step.
async fn backup(stage: &Stage, slot: &SlotPrefix, epoch: u32, at: i64) -> Result<snapshot::SideRecord> {
    let side = side_record(Epoch(epoch), Timestamp::UNIX_EPOCH + SignedDuration::from_secs(at));
    stage.bucket.put(&slot.snapshot(&side.key).context("a snapshot's key")?, &b"dump"[..]).await?;
    Ok(side)
}

async fn advance(stage: &Stage, slot: &SlotPrefix, side: &snapshot::SideRecord) -> Result<(), PointerError> {
    let recorded = snapshot::record(&stage.bucket, slot, side, None).await?;
    pointer_io::advance(&stage.bucket, slot, &recorded).await
}

pub async fn conditional_puts_have_one_winner(stage: &Stage) -> Result<Support> {
    let one = capabilities::probe_conditions(&stage.bucket).await?;
    if let Some(deviation) = one.into_iter().find(|probed| probed.support != Support::Yes) {
        return Ok(deviation.support);
    }
    let found = parallel_probe::run(&stage.bucket, Duration::from_secs(60)).await?;
    Ok(found.refusal().map_or(Support::Yes, Support::No))
}

pub async fn pointer_follows_backups_and_fences(stage: &Stage) -> Result<Support> {
    let slot = slot_of("user_1")?;
    ensure!(pointer_io::read(&stage.bucket, &slot).await?.is_none(), "a new slot has a pointer");
    let absent = snapshot::latest(&stage.bucket, &slot).await;
    ensure!(matches!(absent, Err(SnapshotUnusable::Absent)), "{absent:?}");
    pointer_io::fence(&stage.bucket, &slot, &Fence::unsigned(Epoch(1), machine(1))).await?;
    let first = backup(stage, &slot, 1, 1).await?;
    advance(stage, &slot, &first).await?;
    ensure!(snapshot::latest(&stage.bucket, &slot).await?.key == first.key, "not the first snapshot");

    pointer_io::fence(&stage.bucket, &slot, &Fence::unsigned(Epoch(2), machine(2))).await?;
    let late = backup(stage, &slot, 1, 2).await?;
    let refused = advance(stage, &slot, &late).await;
    ensure!(matches!(refused, Err(PointerError::Fenced(_))), "a replaced machine moved the pointer");
    ensure!(snapshot::latest(&stage.bucket, &slot).await?.key == first.key, "the pointer has moved");
    let second = backup(stage, &slot, 2, 3).await?;
    advance(stage, &slot, &second).await?;
    let end = pointer_io::read(&stage.bucket, &slot).await?.context("no pointer")?.value;
    ensure!((end.seq, end.fence_epoch) == (4, Epoch(2)), "{end:?}");
    Ok(Support::Yes)
}

pub async fn pointer_moves_once_although_replies_are_lost(stage: &Stage) -> Result<Support> {
    let slot = slot_of("user_1")?;
    pointer_io::fence(&stage.bucket, &slot, &Fence::unsigned(Epoch(1), machine(1))).await?;
    let side = backup(stage, &slot, 1, 1).await?;
    let lost = stage.server.fault(Rule::new(Fault::LostReply).method("PUT").key("pointer-log/").times(1));
    advance(stage, &slot, &side).await?;
    ensure!(lost.hits() == 1, "the fault did not occur");
    let end = pointer_io::read(&stage.bucket, &slot).await?.context("no pointer")?.value;
    ensure!(end.snapshot.is_some_and(|named| named.key == side.key), "the pointer names another snapshot");
    let entries = stage.server.objects(BUCKET, &pointer_log(&slot));
    ensure!(entries.len() as u64 == end.seq, "{} entries for seq {}", entries.len(), end.seq);
    Ok(Support::Yes)
}

pub async fn missing_pointer_beside_snapshots_is_damage(stage: &Stage) -> Result<Support> {
    let slot = slot_of("user_1")?;
    pointer_io::fence(&stage.bucket, &slot, &Fence::unsigned(Epoch(1), machine(1))).await?;
    let side = backup(stage, &slot, 1, 1).await?;
    advance(stage, &slot, &side).await?;
    ensure!(stage.server.remove(BUCKET, slot.pointer().as_ref()), "there was no pointer");
    for entry in stage.server.objects(BUCKET, &pointer_log(&slot)) {
        stage.server.remove(BUCKET, &entry.key);
    }
    match snapshot::latest(&stage.bucket, &slot).await {
        Err(SnapshotUnusable::Absent) => anyhow::bail!("a slot with snapshots counts as empty"),
        Err(_) => Ok(Support::Yes),
        Ok(found) => anyhow::bail!("{found:?} without a pointer"),
    }
}

fn content(bytes: usize) -> Bytes {
    (0..bytes).map(|n| (n % 251) as u8).collect::<Vec<u8>>().into()
}

async fn sent(stage: &Stage, key: &Path, mut content: Bytes) -> Result<Upload> {
    let mut upload = Upload::begin(&stage.bucket, key, PartLayout::for_max_bytes(0)).await?;
    while !content.is_empty() {
        let size = upload.part_space().min(content.len()).min(MIB);
        upload.push(content.split_to(size)).await?;
    }
    upload.flush().await?;
    Ok(upload)
}

pub async fn large_upload_is_stored_as_sent(stage: &Stage) -> Result<Support> {
    let (key, content) = (Path::from("user_1/large.dump"), content(12 * MIB + 7));
    let mut upload = sent(stage, &key, content.clone()).await?;
    ensure!(stage.bucket.head(&key).await?.is_none(), "visible before its completion");
    ensure!(upload.complete().await?.size == content.len() as u64, "another size");
    let read = stage.bucket.get(&key, u64::MAX).await?.context("not stored")?.value;
    ensure!(read == content, "other bytes");
    ensure!(stage.server.uploads(BUCKET).is_empty(), "the upload is still open");
    Ok(Support::Yes)
}

pub async fn aborted_upload_leaves_nothing(stage: &Stage) -> Result<Support> {
    let key = Path::from("user_1/aborted.dump");
    let upload = sent(stage, &key, content(6 * MIB)).await?;
    ensure!(upload.abort().await, "it could not be aborted");
    ensure!(stage.bucket.head(&key).await?.is_none(), "an object remains");
    ensure!(stage.server.uploads(BUCKET).is_empty(), "the upload is still open");
    Ok(Support::Yes)
}

pub async fn upload_of_killed_process_can_be_aborted(stage: &Stage) -> Result<Support> {
    let key = Path::from("user_1/killed.dump");
    let mut upload = sent(stage, &key, content(6 * MIB)).await?;
    let open = upload.open().cloned().context("an upload of S3 has an id")?;
    ensure!(stage.server.uploads(BUCKET) == [key.as_ref()], "{:?}", stage.server.uploads(BUCKET));
    stage.bucket.abort_upload(&open).await?;
    ensure!(stage.server.uploads(BUCKET).is_empty(), "the upload is still open");
    stage.bucket.abort_upload(&open).await.context("the second abort")?;
    ensure!(upload.complete().await.is_err(), "an aborted upload was completed");
    ensure!(stage.bucket.head(&key).await?.is_none(), "an object remains");
    Ok(Support::Yes)
}

/// What the store's own probe finds for a capability.
async fn probed(stage: &Stage, capability: Capability) -> Result<Support> {
    let found = capabilities::probe_further(&StoreConfig::S3(stage.s3.clone()), &stage.bucket).await;
    let probed = found.into_iter().find(|probed| probed.capability == capability);
    Ok(probed.context("not probed")?.support)
}

pub async fn upload_creates_a_snapshot_only_once(stage: &Stage) -> Result<Support> {
    probed(stage, capabilities::UPLOAD_ONCE).await
}

pub async fn damaged_body_is_refused(stage: &Stage) -> Result<Support> {
    probed(stage, capabilities::CHECKSUMS).await
}

pub async fn wrong_secret_is_refused(stage: &Stage) -> Result<Support> {
    probed(stage, capabilities::SIGNATURES).await
}

pub async fn interrupted_download_resumes_on_the_same_version(stage: &Stage) -> Result<Support> {
    let (key, content) = (Path::from("user_1/resumed.dump"), content(2 * MIB));
    stage.bucket.put(&key, content.clone()).await?;
    stage.server.fault(Rule::new(Fault::TruncateBody(MIB as u64)).method("GET").key("resumed.dump").times(1));
    let first = stage.bucket.raw().get(&key).await?;
    let version = first.meta.e_tag.clone();
    let mut read = Vec::new();
    let mut chunks = first.into_stream();
    while let Some(Ok(chunk)) = chunks.next().await {
        read.extend_from_slice(&chunk);
    }
    let rest = async |from: u64| {
        let (range, if_match) = (Some(GetRange::Offset(from)), version.clone());
        stage.bucket.raw().get_opts(&key, GetOptions { range, if_match, ..GetOptions::default() }).await
    };
    if read.len() < content.len() {
        read.extend_from_slice(&rest(read.len() as u64).await?.bytes().await?);
    }
    ensure!(read == content, "{} bytes that differ from those stored", read.len());
    stage.bucket.put(&key, &b"another version"[..]).await?;
    match rest(3).await {
        Err(object_store::Error::Precondition { .. }) => Ok(Support::Yes),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(Support::No("it resumed with another version".to_owned())),
    }
}

pub async fn outage_is_never_an_absence(stage: &Stage) -> Result<Support> {
    let key = Path::from("user_1/there");
    ensure!(stage.bucket.head(&key).await?.is_none(), "an object that was never stored");
    stage.bucket.put(&key, &b"x"[..]).await?;
    stage.server.fault(Rule::new(Fault::Status(503)).key("user_1/there").always());
    let failed = stage.bucket.get(&key, 10).await;
    ensure!(matches!(failed, Err(StoreError::Unavailable { .. })), "{failed:?}");
    stage.server.heal();
    stage.server.down();
    let down = stage.bucket.within(&key, Duration::from_secs(20), stage.bucket.head(&key)).await;
    ensure!(matches!(down, Err(StoreError::Unavailable { .. })), "{down:?}");
    stage.server.up()?;
    ensure!(stage.bucket.get(&key, 10).await?.is_some(), "the object is gone");
    Ok(Support::Yes)
}

/// More keys than a page of a list has.
pub async fn list_of_many_keys_is_complete_and_sorted(stage: &Stage) -> Result<Support> {
    const KEYS: usize = 1100;
    let folder = Path::from("user_1/primary/system/db/pointer-log");
    let keys: Vec<Path> = (0..KEYS).map(|n| folder.clone().join(format!("{n:016}.json"))).collect();
    let puts = stream::iter(&keys).map(|key| stage.bucket.put(key, &b"{}"[..]));
    puts.buffer_unordered(8).try_collect::<()>().await?;
    stage.bucket.put(&Path::from("user_1/primary/system/db/pointer-log-other"), &b"{}"[..]).await?;
    let listed: Vec<Path> =
        stage.bucket.raw().list(Some(&folder)).map_ok(|object| object.location).try_collect().await?;
    ensure!(listed == keys, "{} keys, or another order", listed.len());
    let after: Vec<Path> = stage
        .bucket
        .raw()
        .list_with_offset(Some(&folder), &keys[KEYS - 3])
        .map_ok(|object| object.location)
        .try_collect()
        .await?;
    ensure!(after == keys[KEYS - 2..], "{after:?}");
    Ok(Support::Yes)
}

pub async fn reads_and_lists_are_current(stage: &Stage) -> Result<Support> {
    match probed(stage, capabilities::CURRENT_READS).await? {
        Support::Yes => probed(stage, capabilities::CURRENT_LISTS).await,
        deviation => Ok(deviation),
    }
}

pub async fn session_reaches_only_its_slot(stage: &Stage) -> Result<Support> {
    let (own, other) = (slot_of("user_1")?, slot_of("user_2")?);
    let role = "arn:aws:iam::000000000000:role/svc-host".to_owned();
    let endpoint = stage.server.endpoint().parse()?;
    let sts = Sts::new(endpoint, stage.s3.region.clone(), role, stage.s3.credential())?;
    let policy = policy::slot_policy("aws", BUCKET, &own, SnapshotWrites::Any);
    let session = match sts.assume("svc-test", &policy, Duration::from_secs(900)).await {
        Ok(session) => session,
        Err(error) => return Ok(Support::No(error.to_string())),
    };
    let of_host = S3Config {
        access_key: session.access_key,
        secret_key: session.secret_key,
        session_token: session.session_token,
        expires_at: Some(session.expires_at),
        ..stage.s3.clone()
    };
    let host = StoreConfig::S3(of_host).open()?;
    host.put(&own.pointer(), &b"{}"[..]).await?;
    ensure!(host.get(&own.pointer(), 10).await?.is_some(), "its own object cannot be read");
    match host.put(&other.pointer(), &b"{}"[..]).await {
        Err(StoreError::Denied { .. }) => {}
        Ok(()) => return Ok(Support::No("it wrote an object of another slot".to_owned())),
        Err(error) => return Err(error.into()),
    }
    stage.bucket.put(&other.pointer(), &b"{}"[..]).await?;
    let read = host.get(&other.pointer(), 10).await;
    ensure!(matches!(read, Err(StoreError::Denied { .. })), "it read an object of another slot");
    let deleted = host.raw().delete(&own.pointer()).await;
    ensure!(deleted.is_err(), "it deleted an object");
    Ok(Support::Yes)
}

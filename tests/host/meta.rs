//! With an unreliable store, a write of `vps-meta.json` whose reply is lost is confirmed by a read, and no earlier
//! machine overwrites the metadata.

use anyhow::{Context, Result};
use kit::s3::{Fault, FaultRule, S3Server};
use svc::machine::epoch::Epoch;
use svc::machine::id::MachineId;
use svc::store::meta::{self, FORMAT_VERSION, VpsMeta, VpsMetaError};

use super::machine::{self, BUCKET, USER, slot};

fn make_metadata(epoch: u32, second: i64) -> Result<VpsMeta> {
    Ok(VpsMeta {
        version: FORMAT_VERSION,
        idp_user_id: USER.parse()?,
        slot: "primary".parse()?,
        machine_id: MachineId(uuid::Uuid::from_u128(u128::from(epoch))),
        epoch: Epoch(epoch),
        provider_server_id: None,
        image_version: "1.0.0".parse()?,
        status: "running".to_owned(),
        public_ipv4: None,
        heartbeat_at: jiff::Timestamp::from_second(1_800_000_000 + second)?,
        last_backup: None,
    })
}

fn read_metadata(store: &S3Server) -> Result<VpsMeta> {
    let text = store
        .read(BUCKET, &format!("{USER}/primary/system/vps-meta.json"))
        .context("the metadata is missing")?;
    Ok(serde_json::from_slice(&text)?)
}

fn meta_rule(fault: Fault) -> FaultRule {
    FaultRule::new(fault).key("vps-meta.json")
}

/// Returns the number of writes that changed the object.
fn count_writes(store: &S3Server) -> usize {
    let puts = store.requests().into_iter().filter(|request| request.method == "PUT");
    puts.filter(|request| request.path.ends_with("vps-meta.json") && request.status != Some(412)).count()
}

#[tokio::test]
async fn lost_reply_is_resolved_by_reading_back() -> Result<()> {
    for fault in [Fault::LostReply, Fault::StatusAfterCommit(500), Fault::StatusAfterCommit(503)] {
        let store = machine::start_store()?;
        let bucket = machine::bucket(&store)?;
        for second in [1, 2] {
            let hits = store.add_fault(meta_rule(fault.clone()).method("PUT"));
            store.clear_requests();
            meta::write(&bucket, &slot(), &make_metadata(1, second)?).await?;
            assert_eq!(read_metadata(&store)?, make_metadata(1, second)?, "{fault:?}");
            assert_eq!(
                (hits.hits(), count_writes(&store)),
                (1, 1),
                "{fault:?}: the metadata must be written once: {:?}",
                store.requests()
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn earlier_machine_never_overwrites_a_later_one() -> Result<()> {
    let store = machine::start_store()?;
    let bucket = machine::bucket(&store)?;
    meta::write(&bucket, &slot(), &make_metadata(1, 1)?).await?;
    meta::write(&bucket, &slot(), &make_metadata(2, 2)?).await?;
    // The old machine reads the value from before the new one's write; its conditional put detects that.
    let stale = store.add_fault(meta_rule(Fault::StaleRead).method("GET"));
    let refused = meta::write(&bucket, &slot(), &make_metadata(1, 3)?).await;
    assert!(matches!(refused, Err(VpsMetaError::Fenced(_))), "{refused:?}");
    assert_eq!(stale.hits(), 1);
    assert_eq!(read_metadata(&store)?, make_metadata(2, 2)?);
    Ok(())
}

#[tokio::test]
async fn unreadable_metadata_is_rewritten() -> Result<()> {
    let store = machine::start_store()?;
    // The second object exceeds the size limit for JSON objects.
    for unreadable in ["{torn".to_owned(), " ".repeat(2 << 20)] {
        store.write(BUCKET, &format!("{USER}/primary/system/vps-meta.json"), unreadable);
        store.clear_requests();
        meta::write(&machine::bucket(&store)?, &slot(), &make_metadata(1, 1)?).await?;
        assert_eq!(read_metadata(&store)?, make_metadata(1, 1)?);
        let reads = store.requests().into_iter().filter(|request| request.method == "GET").count();
        assert_eq!(reads, 1, "the object must be read only once, for its version: {:?}", store.requests());
    }
    Ok(())
}

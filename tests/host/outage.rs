//! While the platform is unreachable, a backup stores snapshots with the outage session, which cannot move the pointer
//! or change any other object.

use anyhow::{Context, Result};
use jiff::{SignedDuration, Timestamp};
use kit::s3::S3Server;
use nix::sys::signal::Signal;
use object_store::ObjectStoreExt;
use serde_json::{Value, json};
use svc::clock::rfc3339_ms;
use svc::machine::epoch::Epoch;
use svc::store::bucket::{Condition, StoreError};
use svc::store::{key, snapshots};

use super::credentials::{CredentialPlatform, CredentialResponse, create_machine_with_credentials};
use super::machine::{self, BUCKET, Machine, slot, wait_until};

/// Creates a machine whose platform is unreachable and whose working session has expired. It has an outage session.
async fn machine_without_platform(store: &S3Server, platform: &CredentialPlatform) -> Result<Machine> {
    let machine = create_machine_with_credentials(store, platform, SignedDuration::from_secs(-60)).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let credentials_path = machine.path("var/lib/svc/store-credentials.json");
    let mut credentials: Value = serde_json::from_slice(&std::fs::read(&credentials_path)?)?;
    credentials["expiresAt"] = json!(rfc3339_ms(Timestamp::now().checked_sub(SignedDuration::from_secs(1))?));
    std::fs::write(&credentials_path, serde_json::to_vec(&credentials)?)?;
    platform.set_response(CredentialResponse::Unavailable);
    Ok(machine)
}

#[tokio::test(flavor = "multi_thread")]
async fn outage_session_stores_snapshots_without_moving_pointer() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = machine_without_platform(&store, &platform).await?;
    let before = machine::read_pointer(&store).await?.context("there is no pointer")?;
    let result = machine.run(&["svc-db-backup"])?.expect(69);
    assert!(result.stderr.contains("is stored but is not the latest"), "{}", result.stderr);
    assert_eq!(machine::read_pointer(&store).await?.as_ref(), Some(&before));
    let (bucket, slot) = (machine::bucket(&store)?, slot());
    let window = snapshots::PageWindow { before: None, latest: None, limit: 10 };
    let snapshots = snapshots::list_page(&bucket, &slot, window).await?.snapshots;
    assert_eq!(snapshots.len(), 2, "the snapshot from the outage must be complete");
    let last: Value = serde_json::from_slice(&std::fs::read(machine.path("var/lib/svc/last-backup.json"))?)?;
    assert_eq!((&last["stage"], &last["key"]), (&json!("pointer"), &json!(snapshots[0].key)), "{last}");
    // A verification needs a working session.
    machine.run(&["svc-db-backup", "verify", "--latest"])?.expect(69);

    platform.set_response(CredentialResponse::Issue);
    machine.run(&["svc-db-backup"])?.expect(0);
    let latest = svc::store::snapshot::find_latest(&bucket, &slot).await?;
    assert!(latest.key > snapshots[0].key, "the next run must create its own snapshot: {}", latest.key);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_publishes_the_snapshot_stored_during_an_outage() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = machine_without_platform(&store, &platform).await?;
    let running = machine.spawn(&["svc-db-backup", "run", "--retry"], &[("BACKUP_RETRY_SECONDS", "1")])?;
    wait_until("the stored snapshot", || {
        let objects = store.objects(BUCKET, "");
        objects.iter().filter(|object| object.key.ends_with(".dump.json")).count() == 2
    })
    .await?;
    machine.postgres().stop().await?;
    let last_record =
        || machine.backup_records().ok().and_then(|mut records| records.pop()).unwrap_or_default();
    wait_until("an attempt without the database", || last_record()["stage"] == "gate").await?;
    let failed = last_record();
    for field in ["key", "sizeBytes", "sha256"] {
        assert_eq!(failed[field], Value::Null, "{failed}");
    }
    machine.postgres().restart().await?;
    platform.set_response(CredentialResponse::Issue);
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
    let dumps = store.objects(BUCKET, "").into_iter().filter(|object| object.key.ends_with(".dump"));
    assert_eq!(dumps.count(), 2, "no third snapshot may be created");
    let log = std::fs::read_to_string(machine.path("home/svc/home/system/logs/backup.jsonl"))?;
    let last: Value = serde_json::from_str(log.lines().last().context("backup.jsonl is empty")?)?;
    let latest = svc::store::snapshot::find_latest(&machine::bucket(&store)?, &slot()).await?;
    assert_eq!((&last["status"], &last["key"]), (&json!("success"), &json!(latest.key)), "{last}");
    assert_eq!(last["sizeBytes"], json!(latest.size_bytes), "{last}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requested_backup_does_not_wait_for_an_acceptance() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = machine_without_platform(&store, &platform).await?;
    machine.client().await?.batch_execute("DELETE FROM t WHERE id > 5").await?;
    machine.run(&["svc-db-backup"])?.expect(65);
    let requests = ["accept", "backup"].map(|name| machine.path(&format!("var/lib/svc/requests/{name}")));
    for request in &requests {
        svc::fsx::write_atomic(request, b"{}", 0o600)?;
    }
    let backups = machine.backup_records()?.len();
    // Until the platform is reachable, the acceptance is retried, but no further backup is taken.
    for _ in 0..2 {
        machine.run(&["svc-db-backup", "run", "--request"])?.expect(69);
        assert_eq!(machine.backup_records()?.len(), backups + 1);
        assert_eq!(requests.each_ref().map(|request| request.exists()), [true, false]);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn outage_session_reads_and_changes_nothing_else() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_hours(1)).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let latest = svc::store::snapshot::find_latest(&machine::bucket(&store)?, &slot()).await?;
    let session = platform.issue_outage_session().await.context("no outage session")?;
    let bucket = machine::bucket_as(&store, &session)?;
    let own_snapshot = slot().snapshot(&latest.key).context("not a snapshot key")?;
    assert!(bucket.head(&own_snapshot).await?.is_some(), "the machine's own snapshot must be readable");
    let snapshot_path = |at: Timestamp, epoch| {
        slot().snapshot(&key::snapshot_key(at, Epoch(epoch))).context("not a snapshot key")
    };
    let now = Timestamp::now();
    let foreign = snapshot_path(now, 2)?;
    // The day in this key is before the session's first day, even with the permitted clock skew.
    let day_before = snapshot_path(now.checked_sub(SignedDuration::from_hours(25))?, 1)?;
    let admin_bucket = machine::bucket(&store)?;
    admin_bucket.put(&foreign, &b"from another epoch"[..]).await?;
    admin_bucket.put(&slot().vps_meta(), &b"{}"[..]).await?;
    for key in [&foreign, &slot().vps_meta()] {
        let refused = bucket.get(key, 100).await.unwrap_err();
        assert!(matches!(refused, StoreError::Denied { .. }), "{key}: {refused:?}");
    }
    for key in [foreign, day_before, slot().pointer(), slot().vps_meta()] {
        let refused = bucket.put_if(&key, &b"x"[..], Condition::Absent).await.unwrap_err();
        assert!(matches!(refused, StoreError::Denied { .. }), "{key}: {refused:?}");
    }
    let refused = bucket.put(&own_snapshot, &b"x"[..]).await.unwrap_err();
    assert!(
        matches!(refused, StoreError::Denied { .. }),
        "an object must be writable only once: {refused:?}"
    );
    let entry = slot().pointer_entry(9);
    let refused = bucket.put_if(&entry, &b"x"[..], Condition::Absent).await.unwrap_err();
    assert!(matches!(refused, StoreError::Denied { .. }), "{refused:?}");
    let refused = bucket.raw().delete(&own_snapshot).await.expect_err("an object was deleted");
    assert!(matches!(refused, object_store::Error::PermissionDenied { .. }), "{refused:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sync_agent_renews_the_outage_session() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = create_machine_with_credentials(&store, &platform, SignedDuration::from_hours(1)).await?;
    let credentials_path = machine.path("var/lib/svc/store-credentials.json");
    let extra = [("GATEWAY_LISTEN", "127.0.0.1:9"), ("HEARTBEAT_SECONDS", "1"), ("VPS_META_SECONDS", "1")];
    let running = machine.spawn(&["svc-sync-agent"], &extra)?;
    wait_until("the first renewal", || credentials_path.exists()).await?;
    let expected_heartbeats = platform.heartbeat_count() + 4;
    wait_until("four more heartbeats", || platform.heartbeat_count() >= expected_heartbeats).await?;
    assert_eq!(platform.request_count(), 1, "a recent session must be kept");
    let mut credentials: Value = serde_json::from_slice(&std::fs::read(&credentials_path)?)?;
    assert!(credentials["outage"]["sessionToken"].is_string(), "there must be an outage session");
    credentials["renewedAt"] =
        json!(rfc3339_ms(Timestamp::now().checked_sub(SignedDuration::from_mins(51))?));
    // The agent loads the stored sessions only if they expire later than its own, as after another applet's renewal.
    credentials["expiresAt"] =
        json!(rfc3339_ms(Timestamp::now().checked_add(SignedDuration::from_hours(2))?));
    svc::fsx::write_atomic(&credentials_path, &serde_json::to_vec(&credentials)?, 0o600)?;
    wait_until("another renewal", || platform.request_count() >= 2).await?;
    running.signal(Signal::SIGTERM)?;
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_uses_no_outage_session_after_a_refusal() -> Result<()> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = machine_without_platform(&store, &platform).await?;
    for response in [CredentialResponse::Superseded, CredentialResponse::Unauthorized] {
        platform.set_response(response);
        let exit_code = if response == CredentialResponse::Superseded { 77 } else { 69 };
        machine.run(&["svc-db-backup"])?.expect(exit_code);
        let dumps = store.objects(BUCKET, "").into_iter().filter(|object| object.key.ends_with(".dump"));
        assert_eq!(dumps.count(), 1, "no snapshot may be stored");
    }
    Ok(())
}

//! The sync agent reports the machine's state, stores what it receives, and exits when the machine has been replaced or
//! deleted.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use svc::store::meta::VpsMeta;

use super::machine::{self, BUCKET, Machine, RunResult, RunningApplet, USER, wait_until};
use super::platform::{Platform, ScriptedResponse, start_gateway};

fn accepted_heartbeat() -> ScriptedResponse {
    let keys = json!({ "keys": [{ "kid": "second", "x": "BBBB" }] });
    ScriptedResponse::Json(
        200,
        json!({ "desiredImageVersion": "1.0.0", "epoch": 3, "superseded": false, "proofKeys": keys, "newer": 1 }),
    )
}

async fn wait_for_exit(running: RunningApplet) -> Result<RunResult> {
    tokio::task::spawn_blocking(move || running.wait()).await?
}

#[tokio::test]
async fn heartbeat_reports_the_state_of_the_machine() -> Result<()> {
    let store = machine::start_store()?;
    let platform = Platform::start(accepted_heartbeat()).await?;
    let machine = Machine::in_use(&store, 3).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    platform.configure(&machine)?;
    let listen = start_gateway(&machine).await?.to_string();
    let extra = [("GATEWAY_LISTEN", listen.as_str()), ("HEARTBEAT_SECONDS", "1")];
    let running = machine.spawn(&["svc-sync-agent"], &extra)?;
    wait_until("two heartbeats", || platform.calls().len() >= 2).await?;
    let meta_key = format!("{USER}/primary/system/vps-meta.json");
    wait_until("the metadata", || store.read(BUCKET, &meta_key).is_some()).await?;
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);

    let calls = platform.calls();
    assert_eq!(calls[0].path, format!("/vps/{}/heartbeat", machine.id));
    assert_eq!(calls[0].authorization, "Bearer upgrade-token-of-a-machine");
    let first: Value = serde_json::from_str(&calls[0].body)?;
    assert_eq!(first["imageVersion"], "1.0.0");
    assert_eq!(first["epoch"], 3);
    assert_eq!(first["health"], json!({ "gateway": "ok", "database": "ok" }));
    assert_eq!(first["lastBackup"]["status"], "success");
    let snapshot = machine::read_pointer(&store)
        .await?
        .and_then(|p| p.snapshot)
        .context("the pointer names no snapshot")?;
    assert_eq!(first["lastBackup"]["key"], snapshot.key.as_str());
    assert_eq!(first["lastBackup"]["takenAt"], svc::clock::rfc3339_ms(snapshot.taken_at));
    assert!(first["lastBackup"]["beganAt"].as_str().is_some_and(|began| began.ends_with('Z')), "{first}");
    let disk_bytes = |name: &str| first["disk"][name].as_u64().with_context(|| format!("{name} in {first}"));
    let (total, free) = (disk_bytes("totalBytes")?, disk_bytes("freeBytes")?);
    assert!(total > 0 && total >= free, "{total} and {free}");
    assert_eq!(first["proofKids"], json!(["first"]));
    let second: Value = serde_json::from_str(&calls[1].body)?;
    assert_eq!(second["proofKids"], json!(["second"]), "delivered keys must be active");

    let meta: VpsMeta =
        serde_json::from_slice(&store.read(BUCKET, &meta_key).context("the metadata is missing")?)?;
    assert_eq!((meta.machine_id, meta.epoch, meta.status.as_str()), (machine.id, machine.epoch, "running"));
    assert_eq!(meta.last_backup, Some(snapshot.taken_at));
    Ok(())
}

#[tokio::test]
async fn agent_of_replaced_machine_exits() -> Result<()> {
    let store = machine::start_store()?;
    let responses = [
        ScriptedResponse::Json(
            200,
            json!({ "desiredImageVersion": "1.0.0", "epoch": 4, "superseded": true, "proofKeys": { "keys": [] } }),
        ),
        ScriptedResponse::Json(403, json!({ "code": "superseded", "detail": "another machine" })),
    ];
    for response in responses {
        let platform = Platform::start(response).await?;
        let machine = Machine::new(&store, 3).await?;
        platform.configure(&machine)?;
        let result = wait_for_exit(machine.spawn(&["svc-sync-agent"], &[])?).await?.expect(0);
        assert!(result.stderr.contains("this machine has been replaced or deleted"), "{}", result.stderr);
        let record: Value = serde_json::from_slice(&fs::read(machine.path("var/lib/svc/superseded.json"))?)?;
        assert_eq!(record["mine"], 3);
        wait_for_exit(machine.spawn(&["svc-sync-agent"], &[])?).await?.expect(77);
        assert_eq!(platform.calls().len(), 1, "no heartbeat may follow");
    }
    Ok(())
}

#[tokio::test]
async fn agent_survives_platform_failures_and_keeps_its_keys() -> Result<()> {
    let store = machine::start_store()?;
    let platform = Platform::start(ScriptedResponse::Json(503, json!({}))).await?;
    platform.queue([
        accepted_heartbeat(),
        ScriptedResponse::Json(200, json!({ "superseded": false, "proofKeys": { "keys": [] } })),
        ScriptedResponse::Lost,
        ScriptedResponse::Json(403, json!({ "code": "forbidden" })),
        ScriptedResponse::Json(401, json!({})),
    ]);
    let machine = Machine::new(&store, 3).await?;
    platform.configure(&machine)?;
    store.take_down();
    let running = machine.spawn(&["svc-sync-agent"], &[("HEARTBEAT_SECONDS", "1")])?;
    wait_until("six heartbeats", || platform.calls().len() >= 6).await?;
    let read_failure =
        || fs::read_to_string(machine.path("var/lib/svc/heartbeat-failure.json")).unwrap_or_default();
    wait_until("the recorded failure", || read_failure().contains("503")).await?;
    assert!(!machine.path("var/lib/svc/superseded.json").exists());
    let keys: Value = serde_json::from_slice(&fs::read(machine.path("var/lib/svc/proof-keys.json"))?)?;
    assert_eq!(keys["keys"][0]["kid"], "second");
    let last: Value = serde_json::from_str(&platform.calls()[5].body)?;
    assert_eq!(last["health"], json!({ "gateway": "failing", "database": "ok" }));
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    Ok(())
}

/// A machine that was replaced during a platform outage does not overwrite the new machine's metadata.
#[tokio::test]
async fn later_machines_metadata_is_kept() -> Result<()> {
    let store = machine::start_store()?;
    let platform = Platform::start(accepted_heartbeat()).await?;
    let key = format!("{USER}/primary/system/vps-meta.json");
    for (epoch, expected) in [(3, 3), (5, 5), (4, 5)] {
        let machine = Machine::new(&store, epoch).await?;
        platform.configure(&machine)?;
        store.clear_requests();
        let running = machine.spawn(&["svc-sync-agent"], &[])?;
        wait_until("a read of the metadata", || {
            store.requests().iter().any(|request| request.path.ends_with("vps-meta.json"))
        })
        .await?;
        wait_until("the end of the attempt", || {
            let written = store.requests().iter().any(|request| request.method == "PUT");
            written || running.stderr().contains("could not write vps-meta.json")
        })
        .await?;
        running.signal(Signal::SIGTERM)?;
        wait_for_exit(running).await?.expect(0);
        let meta: VpsMeta =
            serde_json::from_slice(&store.read(BUCKET, &key).context("the metadata is missing")?)?;
        assert_eq!(meta.epoch.0, expected);
    }
    Ok(())
}

#[tokio::test]
async fn desired_release_is_requested_until_outcome_is_known() -> Result<()> {
    let store = machine::start_store()?;
    let response_with_release = |id: &str| json!({ "desiredImageVersion": "2.0.0", "desiredRequestId": id, "epoch": 3, "superseded": false, "proofKeys": { "keys": [] } });
    let platform = Platform::start(ScriptedResponse::Json(200, response_with_release("rollout-one"))).await?;
    let machine = Machine::in_use(&store, 3).await?;
    platform.configure(&machine)?;
    let listen = start_gateway(&machine).await?.to_string();
    let extra = [("GATEWAY_LISTEN", listen.as_str()), ("HEARTBEAT_SECONDS", "1")];
    let running = machine.spawn(&["svc-sync-agent"], &extra)?;
    let request = machine.path("var/lib/svc/requests/update");
    wait_until("the request", || request.exists()).await?;
    let request_body: Value = serde_json::from_slice(&std::fs::read(&request)?)?;
    assert_eq!(
        (&request_body["imageVersion"], &request_body["requestId"]),
        (&json!("2.0.0"), &json!("rollout-one"))
    );
    // The updater consumes the request, and the update fails.
    let journal = machine.path("var/lib/svc/update/journal.json");
    svc::fsx::write_atomic(&journal, b"{}", 0o644)?;
    std::fs::remove_file(&request)?;
    let is_reported = |text: &str| platform.calls().iter().any(|call| call.body.contains(text));
    wait_until("a report of the running update", || is_reported("\"updating\":true")).await?;
    let last = json!({ "version": "2.0.0", "outcome": "failed", "stage": "manifest", "error": "x", "at": "2026-11-21T00:00:00.000Z" });
    let mut stored = last.clone();
    stored["requestId"] = json!("rollout-one");
    svc::fsx::write_atomic(
        &machine.path("var/lib/svc/update/last.json"),
        stored.to_string().as_bytes(),
        0o644,
    )?;
    std::fs::remove_file(&journal)?;
    let before = platform.calls().len();
    wait_until("more heartbeats", || platform.calls().len() >= before + 3).await?;
    assert!(!request.exists(), "a failed update must not be requested again");
    let heartbeat: Value =
        serde_json::from_str(&platform.calls().last().context("no call was recorded")?.body)?;
    assert_eq!((&heartbeat["lastUpdate"], &heartbeat["updating"]), (&last, &json!(false)));
    // The next rollout of the same release is a new request.
    platform.queue([ScriptedResponse::Json(200, response_with_release("rollout-two"))]);
    wait_until("the second request", || request.exists()).await?;
    let request_body: Value = serde_json::from_slice(&std::fs::read(&request)?)?;
    assert_eq!(
        (&request_body["imageVersion"], &request_body["requestId"]),
        (&json!("2.0.0"), &json!("rollout-two"))
    );
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    Ok(())
}

/// The epoch from a heartbeat response is used for heartbeats, metadata and backups, and never decreases.
#[tokio::test]
async fn raised_epoch_is_stored_and_used_by_backups() -> Result<()> {
    let store = machine::start_store()?;
    let platform =
        Platform::start(ScriptedResponse::Json(200, json!({ "epoch": 5, "superseded": false }))).await?;
    let machine = Machine::in_use(&store, 3).await?;
    machine.client().await?.batch_execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)").await?;
    let bucket = machine::bucket(&store)?;
    svc::store::pointer_io::fence(
        &bucket,
        &machine::slot(),
        &svc::store::pointer::Fence::unsigned(
            svc::machine::epoch::Epoch(4),
            svc::machine::id::MachineId::new(),
        ),
    )
    .await?;
    machine.run(&["svc-db-backup"])?.expect(77);
    platform.configure(&machine)?;
    let running = machine.spawn(&["svc-sync-agent"], &[("HEARTBEAT_SECONDS", "1")])?;
    wait_until("two heartbeats", || platform.calls().len() >= 2).await?;
    platform.queue([ScriptedResponse::Json(200, json!({ "epoch": 4, "superseded": false }))]);
    let before = platform.calls().len();
    wait_until("more heartbeats", || platform.calls().len() >= before + 3).await?;
    let heartbeat: Value =
        serde_json::from_str(&platform.calls().last().context("no call was recorded")?.body)?;
    assert_eq!(heartbeat["epoch"], 5);
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    machine.run(&["svc-db-backup"])?.expect(0);
    let snapshot = machine::read_pointer(&store)
        .await?
        .and_then(|pointer| pointer.snapshot)
        .context("the pointer names no snapshot")?;
    assert_eq!(snapshot.epoch.0, 5);
    Ok(())
}

/// Writers resume only once the response to a heartbeat sent after the quiesce no longer names the operation.
#[tokio::test]
async fn writers_resume_when_response_names_no_operation() -> Result<()> {
    let store = machine::start_store()?;
    let operation = svc::machine::id::OperationId::new();
    let response = json!({ "epoch": 3, "superseded": false, "quiesce": operation.to_string() });
    let platform = Platform::start(ScriptedResponse::Json(200, response)).await?;
    let machine = Machine::in_use(&store, 3).await?;
    platform.configure(&machine)?;
    let layout = svc::host::system::layout::Layout::new(machine.path(""));
    let lock = svc::host::system::quiesce::acquire_lock(&layout).await?;
    svc::host::system::quiesce::Quiesce::new(operation).write(&layout, &lock)?;
    drop(lock);
    let running = machine.spawn(&["svc-sync-agent"], &[("HEARTBEAT_SECONDS", "1")])?;
    wait_until("three heartbeats", || platform.calls().len() >= 3).await?;
    assert!(layout.quiesce().exists(), "writers must stay stopped while the response names the operation");
    platform.queue([ScriptedResponse::Json(500, json!({})), ScriptedResponse::Lost]);
    let before = platform.calls().len();
    wait_until("more heartbeats", || platform.calls().len() >= before + 3).await?;
    assert!(layout.quiesce().exists(), "an error or a lost response must not end the quiesce");
    platform
        .queue([ScriptedResponse::Json(200, json!({ "epoch": 3, "superseded": false, "quiesce": null }))]);
    wait_until("writers to resume", || !layout.quiesce().exists()).await?;
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    Ok(())
}

/// The metadata contains the server's id and address, and is written only when it changes.
#[tokio::test]
async fn metadata_is_written_only_when_it_changes() -> Result<()> {
    let store = machine::start_store()?;
    let platform = Platform::start(accepted_heartbeat()).await?;
    let machine = Machine::in_use(&store, 3).await?;
    platform.configure(&machine)?;
    // Hetzner's data source stores no address, so the metadata contains the gateway's listen address.
    let data = json!({ "v1": { "instance_id": "4711" },
        "ds": { "meta_data": { "instance-id": 4711, "local-hostname": "svc-1", "public-keys": [] } } });
    let path = machine.path("run/cloud-init/instance-data.json");
    svc::fsx::write_atomic(&path, data.to_string().as_bytes(), 0o644)?;
    let count_writes = || store.requests().iter().filter(|request| request.method == "PUT").count();
    let extra = [("GATEWAY_LISTEN", "127.0.0.1:9"), ("HEARTBEAT_SECONDS", "1"), ("VPS_META_SECONDS", "1")];
    let running = machine.spawn(&["svc-sync-agent"], &extra)?;
    wait_until("five heartbeats", || platform.calls().len() >= 5).await?;
    assert_eq!(count_writes(), 1, "unchanged metadata must not be written again");
    let layout = svc::host::system::layout::Layout::new(machine.path(""));
    platform.queue((0..60).map(|_| ScriptedResponse::Lost));
    let lock = svc::host::system::quiesce::acquire_lock(&layout).await?;
    svc::host::system::quiesce::Quiesce::new(svc::machine::id::OperationId::new()).write(&layout, &lock)?;
    wait_until("the changed metadata", || count_writes() == 2).await?;
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    let key = format!("{USER}/primary/system/vps-meta.json");
    let meta: VpsMeta =
        serde_json::from_slice(&store.read(BUCKET, &key).context("the metadata is missing")?)?;
    assert_eq!((meta.provider_server_id.as_deref(), meta.status.as_str()), (Some("4711"), "quiesced"));
    assert_eq!(meta.public_ipv4, Some(std::net::Ipv4Addr::LOCALHOST));
    Ok(())
}

#[tokio::test]
async fn certificate_settings_are_stored_and_certificate_is_reported() -> Result<()> {
    let store = machine::start_store()?;
    let external = json!({ "keyId": "kid-1", "hmacKey": "bWFj" });
    let settings = json!({ "hostName": "a.hosts.example",
        "acme": { "directoryUrl": "https://ca.example/dir", "externalAccount": external } });
    let response = json!({ "superseded": false, "proofKeys": { "keys": [] }, "certificate": settings });
    let platform = Platform::start(ScriptedResponse::Json(200, response)).await?;
    let machine = Machine::in_use(&store, 3).await?;
    platform.configure(&machine)?;
    let presented = json!({ "hostName": "a.hosts.example", "source": "acme", "issuedAt": "2026-11-21T11:05:00.000Z",
        "expiresAt": "2027-02-19T11:05:00.000Z", "isTrusted": true, "error": null });
    let path = machine.path("var/lib/svc/certificate.json");
    svc::fsx::write_atomic(&path, presented.to_string().as_bytes(), 0o644)?;
    let listen = start_gateway(&machine).await?.to_string();
    let extra = [("GATEWAY_LISTEN", listen.as_str()), ("HEARTBEAT_SECONDS", "1")];
    let running = machine.spawn(&["svc-sync-agent"], &extra)?;
    let stored = machine.path("var/lib/svc/tls/settings.json");
    wait_until("the stored settings", || stored.exists()).await?;
    running.signal(Signal::SIGTERM)?;
    wait_for_exit(running).await?.expect(0);
    assert_eq!(serde_json::from_slice::<Value>(&fs::read(&stored)?)?, settings);
    assert_eq!(fs::metadata(&stored)?.permissions().mode() & 0o777, 0o600);
    let first: Value = serde_json::from_str(&platform.calls()[0].body)?;
    assert_eq!(first["certificate"], presented);
    Ok(())
}

//! Verification and drills of a machine's file backup: damage is located, reported, and repaired from the machine.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::TryStreamExt;
use kit::disk::SmallDisk;
use kit::s3::S3Server;
use serde_json::Value;

use super::machine::{FilesPlatform, Host};
use super::parse_files_read;
use crate::host::machine::{BUCKET, bucket, slot, start_store};

fn read_checks(host: &Host) -> Result<Value> {
    Ok(serde_json::from_str(&fs::read_to_string(host.machine.path("var/lib/svc/files/checks.json"))?)?)
}

/// Creates a machine that can request verifications and record them.
fn create_host(store: &S3Server, platform: &FilesPlatform) -> Result<Host> {
    let host = Host::new(store, platform, 1)?;
    for dir in ["var/lib/svc/requests", "home/svc/home/system/logs"] {
        fs::create_dir_all(host.machine.path(dir))?;
    }
    Ok(host)
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_is_located_and_repaired() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let host = create_host(&store, &platform)?;
    let content: String = (0..60_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_string()).collect();
    host.write("home/projects/large", &content)?;
    let _service = host.start_and_save().await?;
    let verify = ["svc-sync-agent", "verify", "--all"];
    let intact = host.machine.run(&verify)?.expect(0);
    assert!(intact.stdout.contains("no damage found"), "{}", intact.stdout);
    let checks = read_checks(&host)?;
    assert_eq!(
        (&checks["drill"]["compared"], &checks["drill"]["differing"]),
        (&1.into(), &Value::Array(vec![]))
    );

    // The largest pack contains the file's content.
    let prefix = format!("{}/data", slot().files()).into();
    let objects: Vec<_> = bucket(&store)?.raw().list(Some(&prefix)).try_collect().await?;
    let key = objects.iter().max_by_key(|object| object.size).context("no pack")?.location.to_string();
    let mut damaged = store.read(BUCKET, &key).context("no pack")?;
    damaged[100] ^= 1;
    store.write(BUCKET, &key, damaged);
    let verified = host.machine.run(&verify)?.expect(65);
    assert!(verified.stderr.contains("/home/svc/home/projects/large from "), "{}", verified.stderr);
    let status = host.machine.run(&["svc-sync-agent", "status"])?.expect(0);
    assert!(status.stdout.contains("damaged     1 damaged pack, needed by"), "{}", status.stdout);

    // The verification has requested a save, which reads everything again and requests another verification.
    let request = host.machine.path("var/lib/svc/requests/files-verify");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !request.exists() {
        ensure!(Instant::now() < deadline, "the service has not repaired the damage");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let repaired = host.machine.run(&["svc-sync-agent", "verify"])?.expect(0);
    assert!(
        repaired.stdout.contains("nothing is lost; the content of 1 damaged pack can be read"),
        "{}",
        repaired.stdout
    );
    assert!(!request.exists());
    assert_eq!(read_checks(&host)?["damaged"], serde_json::json!({}));
    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    assert!(fs::read_to_string(next.home().join("home/projects/large"))? == content);
    Ok(())
}

/// The machine caches index files and snapshots; the cached copies must not hide that the store's copies are damaged.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_index_or_snapshot_is_detected_despite_cache() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let host = create_host(&store, &platform)?;
    host.write("home/projects/plan.md", "version 1")?;
    drop(host.start_and_save().await?);
    let verify = ["svc-sync-agent", "verify"];
    host.machine.run(&verify)?.expect(0);
    for (dir, has_key) in [("index", true), ("snapshots", true), ("snapshots", false)] {
        let prefix = format!("{}/{dir}", slot().files()).into();
        let objects: Vec<_> = bucket(&store)?.raw().list(Some(&prefix)).try_collect().await?;
        let key = objects.first().context("no object")?.location.to_string();
        let intact = store.read(BUCKET, &key).context("no object")?;
        let mut damaged = intact.clone();
        damaged[20] ^= 1;
        store.write(BUCKET, &key, damaged);
        if !has_key {
            // The machine requests the key from the platform.
            fs::remove_file(host.machine.path("var/lib/svc/files/key"))?;
        }
        let verified = host.machine.run(&verify)?.expect(65);
        assert!(verified.stderr.contains("is damaged"), "{dir}: {}", verified.stderr);
        let status = host.machine.run(&["svc-sync-agent", "status"])?.expect(0);
        assert!(status.stdout.contains("damaged     the repository's"), "{dir}: {}", status.stdout);
        store.write(BUCKET, &key, intact);
        host.machine.run(&verify)?.expect(0);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_latest_snapshot_is_replaced() -> Result<()> {
    for case in ["lost", "damaged", "invalid pointer", "lost index", "lost key file"] {
        let store = start_store()?;
        let platform = FilesPlatform::start().await?;
        let host = create_host(&store, &platform)?;
        for number in 0..50 {
            host.write(&format!("home/projects/{number}"), "version 1")?;
        }
        let service = host.start_and_save().await?;
        // The first save causes another change: it adds a line to `backup.jsonl`.
        host.machine.run(&["svc-sync-agent", "now"])?.expect(0);
        let latest = host.read_status()?["snapshot"].as_str().context("no snapshot")?.to_owned();
        let key = format!("{}/snapshots/{latest}", slot().files());
        let remove_all = async |dir: &str| -> Result<()> {
            let prefix = format!("{}/{dir}", slot().files()).into();
            let objects: Vec<_> = bucket(&store)?.raw().list(Some(&prefix)).try_collect().await?;
            ensure!(
                !objects.is_empty()
                    && objects.iter().all(|object| store.remove(BUCKET, object.location.as_ref()))
            );
            Ok(())
        };
        let reason = match case {
            "lost" => {
                assert!(store.remove(BUCKET, &key), "{key}");
                latest.as_str()
            }
            "damaged" => {
                store.write(BUCKET, &key, "damaged");
                latest.as_str()
            }
            "invalid pointer" => {
                let paths = slot().files_pointer_paths();
                let text = store.read(BUCKET, paths.latest.as_ref()).context("no pointer")?;
                let mut pointer: Value = serde_json::from_slice(&text)?;
                pointer["snapshot"]["id"] = "zz".into();
                let entry = paths.entry(pointer["seq"].as_u64().context("no seq")?);
                for path in [paths.latest, entry] {
                    store.write(BUCKET, path.as_ref(), pointer.to_string());
                }
                "it names an invalid snapshot"
            }
            "lost index" => {
                remove_all("index").await?;
                "rebuild-index"
            }
            _ => {
                remove_all("keys").await?;
                "key file"
            }
        };
        let verified = host.machine.run(&["svc-sync-agent", "verify"])?.expect(65);
        assert!(verified.stderr.contains(reason), "{case}: {}", verified.stderr);
        let request = host.machine.path("var/lib/svc/requests/files-verify");
        let deadline = Instant::now() + Duration::from_secs(60);
        while !request.exists() {
            ensure!(Instant::now() < deadline, "the service has not saved the files again");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // The request is written before the log line.
        while case == "invalid pointer"
            && service.stderr().lines().filter_map(parse_files_read).next_back() < Some(50)
        {
            ensure!(
                Instant::now() < deadline,
                "{case}: the save did not read all files: {}",
                service.stderr()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // The status is written after the request.
        while ["lost", "damaged"].contains(&case) && host.read_status()?["snapshot"] == latest {
            ensure!(Instant::now() < deadline, "{case}: the service has not written a new snapshot");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        if case == "lost index" {
            // The next save does not read everything again, even if no verification has followed the repair.
            host.write("home/projects/7", "version 1")?;
            host.machine.run(&["svc-sync-agent", "now"])?.expect(0);
            // The line is logged after the status is written.
            while service.stderr().lines().filter_map(parse_files_read).next_back() >= Some(50) {
                ensure!(Instant::now() < deadline, "the save read all files: {}", service.stderr());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        // Earlier snapshots that cannot be restored are still reported.
        let exit_code = if ["damaged", "lost index"].contains(&case) { 69 } else { 0 };
        host.machine.run(&["svc-sync-agent", "verify"])?.expect(exit_code);
        let checks = read_checks(&host)?;
        assert_eq!(
            (&checks["unreadable"], &checks["damagedLatest"]),
            (&Value::Null, &Value::Null),
            "{checks}"
        );
        let next = Host::new(&store, &platform, 2)?;
        next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
        assert_eq!(fs::read_to_string(next.home().join("home/projects/7"))?, "version 1");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn drill_waits_until_the_disk_has_space() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let host = create_host(&store, &platform)?;
    host.write("home/projects/empty", "")?;
    host.write("home/projects/large", &"0123456789abcdef".repeat(1 << 17))?;
    drop(host.start_and_save().await?);
    let Some(disk) = SmallDisk::mount(host.machine.path("var/lib/svc/files"), 16)? else { return Ok(()) };
    disk.fill(2 << 20)?;
    let verify = ["svc-sync-agent", "verify"];
    let postponed = host.machine.run(&verify)?.expect(0);
    assert!(postponed.stderr.contains("too little free space to restore a sample"), "{}", postponed.stderr);
    let checks = read_checks(&host)?;
    assert!(checks["verifiedAt"].is_string(), "{checks}");
    assert_eq!((&checks["drill"], &checks["failingSince"]), (&Value::Null, &Value::Null));

    disk.delete_filler()?;
    host.machine.run(&verify)?.expect(0);
    assert_eq!(read_checks(&host)?["drill"]["compared"], 2);
    Ok(())
}

/// systemd restarts the program while the request exists, so a run that rejects its configuration must remove the
/// request.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_configuration_removes_verification_request() -> Result<()> {
    let host = create_host(&start_store()?, &FilesPlatform::start().await?)?;
    let request = host.machine.path("var/lib/svc/requests/files-verify");
    fs::create_dir_all(host.machine.path("var/lib/svc/files"))?;
    fs::write(&request, "")?;
    host.machine.run_with(&["svc-sync-agent", "verify"], &[("VERIFY_WITHIN_DAYS", "0")])?.expect(78);
    assert!(!request.exists());
    Ok(())
}

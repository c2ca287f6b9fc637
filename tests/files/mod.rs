//! Backups of the owner's files on a machine: the service with the real watcher, and the restore on a new machine.

pub mod history;
mod machine;
mod verification;
mod without_files;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use kit::disk::SmallDisk;
use kit::s3::S3Server;
use svc::host::files::{restore_home, service};
use svc::host::system::layout::Layout;
use svc::host::system::quiesce::{self, Quiesce};
use svc::machine::epoch::Epoch;
use svc::machine::id::OperationId;
use svc::store::files_pointer;

use self::machine::{FilesPlatform, Host, describe_tree};
use super::host::machine::{BUCKET, bucket, slot, start_store};

/// Writes a small home directory.
fn populate_home(host: &Host) -> Result<()> {
    host.write("home/projects/app/main.rs", "fn main() {}")?;
    host.write("home/projects/app/deep/er/notes", "1")?;
    host.write("home/system/config.json", "{}")?;
    host.write(".agent/login", "secret")?;
    fs::set_permissions(host.home().join(".agent/login"), fs::Permissions::from_mode(0o600))?;
    fs::set_permissions(host.home().join("home/projects"), fs::Permissions::from_mode(0o2750))?;
    std::os::unix::fs::symlink("/etc/passwd", host.home().join("home/link"))?;
    fs::hard_link(host.home().join("home/system/config.json"), host.home().join("home/second-name"))?;
    Ok(())
}

/// Saves a small home directory on the first machine, and describes it.
async fn save_once(store: &S3Server, platform: &FilesPlatform) -> Result<BTreeMap<String, String>> {
    let first = Host::new(store, platform, 1)?;
    populate_home(&first)?;
    let _service = first.start_and_save().await?;
    describe_tree(&first.home())
}

#[tokio::test(flavor = "multi_thread")]
async fn saved_files_are_restored_on_next_machine() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    populate_home(&first)?;
    let _watcher = first.start_watcher()?;
    let service = first.start_and_save().await?;
    // The service learns of these changes only from the watcher.
    first.write("home/projects/app/deep/er/notes", "2")?;
    first.write("home/new/below/file", "new")?;
    fs::remove_file(first.home().join("home/link"))?;
    fs::rename(first.home().join("home/projects/app"), first.home().join("home/moved"))?;
    first.write("home/moved/main.rs", "fn main() { loop {} }")?;
    first.wait_until_saved().await?;
    let mut expected = describe_tree(&first.home())?;
    // New ignore rules also apply to unchanged directories.
    first.write("home/.svcignore", "/new/\n!node_modules/\na{b\n")?;
    first.write("home/moved/node_modules/kept", "x")?;
    first.wait_until_saved().await?;
    expected.extend(describe_tree(&first.home())?);
    expected.retain(|path, _| path != "home/new" && !path.starts_with("home/new/"));
    let status = first.machine.run(&["svc-sync-agent", "status"])?.expect(0);
    for part in [".svcignore  invalid: a{b\n", " 3 items, 3 B\n", " /home/svc/home/new: 3 items, 3 B\n"] {
        assert!(status.stdout.contains(part), "{part:?} is not in {}", status.stdout);
    }

    let second = Host::new(&store, &platform, 2)?;
    // The new machine wrote this log file during its boot.
    second.write("home/system/logs/activity.log", "the new machine's\n")?;
    let bucket = bucket(&store)?;
    files_pointer::set_fence(&bucket, &slot(), Epoch(2), second.machine.id).await?;
    second.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    assert_eq!(describe_tree(&second.home())?, expected);
    let log = fs::read_to_string(second.home().join("home/system/logs/activity.log"))?;
    assert!(log.contains("the new machine's") && log.contains(" files as of "), "{log}");
    let outcome = second.read_outcome()?;
    assert_eq!(outcome["error"], serde_json::Value::Null, "{outcome}");

    // The replaced machine can no longer move the pointer.
    first.write("home/too-late", "x")?;
    first.wait_for_error("may no longer move the pointer").await?;
    let pointer = files_pointer::read(&bucket, &slot()).await?.context("no pointer")?.value;
    assert_eq!(pointer.snapshot.map(|snapshot| snapshot.epoch), Some(Epoch(1)));
    assert_eq!(pointer.fence_epoch, Epoch(2));
    let log = service.stderr();
    assert!(!log.contains(&platform.key()), "the key is in the log: {log}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_survives_a_kill_at_every_fail_point() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let expected = save_once(&store, &platform).await?;
    for point in restore_home::FAILPOINTS {
        let next = Host::new(&store, &platform, 2)?;
        let failpoints = format!("{point}=return(kill)");
        let restore = ["svc-sync-agent", "restore-home"];
        next.machine.run_with(&restore, &[("FAILPOINTS", &failpoints)])?.expect_killed();
        next.machine.run(&restore)?.expect(0);
        assert_eq!(describe_tree(&next.home())?, expected, "{point}");
        assert!(!next.home().join(".svc-restore").exists(), "{point}");

        // Later boots restore nothing over the owner's newer files.
        next.write("home/projects/app/main.rs", "newer")?;
        for marker in [None, Some("var/lib/svc/files/restored.json")] {
            if let Some(marker) = marker {
                fs::remove_file(next.machine.path(marker))?;
                fs::write(next.machine.path("opt/svc/restore-complete"), "")?;
            }
            next.machine.run(&restore)?.expect(0);
            let text = fs::read_to_string(next.home().join("home/projects/app/main.rs"))?;
            assert_eq!(text, "newer", "{point}");
        }
    }
    Ok(())
}

/// A restore that is repeated on a machine in use deletes nothing that the owner has created in the meantime.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_restore_keeps_replaced_files_despite_kills() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    save_once(&store, &platform).await?;
    for point in restore_home::FAILPOINTS {
        let next = Host::new(&store, &platform, 2)?;
        fs::write(next.machine.path("opt/svc/restore-complete"), "")?;
        // The snapshot has a symbolic link with the name of the directory.
        let new_files = ["home/link/inside", "home/projects/app/main.rs"];
        for path in new_files {
            next.write(path, "newer")?;
        }
        let retry = ["svc-sync-agent", "restore-home", "--retry"];
        let failpoints = format!("{point}=return(kill)");
        next.machine.run_with(&retry, &[("FAILPOINTS", &failpoints)])?.expect_killed();
        next.machine.run(&retry)?.expect(0);
        assert!(next.home().join("home/link").is_symlink(), "{point}");
        let replaced_dir = fs::read_dir(next.home().join("home"))?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.to_string_lossy().contains("/home.replaced-"))
            .with_context(|| format!("{point}: the replaced files are not kept"))?;
        for path in new_files {
            assert_eq!(fs::read_to_string(replaced_dir.join(path))?, "newer", "{point}: {path}");
        }
        assert!(!next.home().join(".svc-restore").exists(), "{point}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn service_survives_a_kill_at_every_fail_point() -> Result<()> {
    for point in service::FAILPOINTS {
        let store = start_store()?;
        let platform = FilesPlatform::start().await?;
        let first = Host::new(&store, &platform, 1)?;
        populate_home(&first)?;
        let _watcher = first.start_watcher()?;
        first.start_service(&format!("{point}=return(kill)"))?.wait()?.expect_killed();
        first.write("home/after-the-kill", "x")?;
        let _service = first.start_and_save().await?;
        let expected = describe_tree(&first.home())?;
        let next = Host::new(&store, &platform, 2)?;
        next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
        assert_eq!(describe_tree(&next.home())?, expected, "{point}");
    }
    Ok(())
}

/// The machine serves without the files, and its own, nearly empty home directory never becomes the latest snapshot.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_snapshot_is_not_replaced_by_empty_home() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let expected = save_once(&store, &platform).await?;
    let bucket = bucket(&store)?;
    let read_latest_id = async || -> Result<String> {
        let pointer = files_pointer::read(&bucket, &slot()).await?.context("no pointer")?.value;
        Ok(pointer.snapshot.context("no snapshot")?.id)
    };
    let id = read_latest_id().await?;
    let key = format!("{}/snapshots/{id}", slot().files());
    let intact = store.read(BUCKET, &key).context("the snapshot is not in the store")?;
    store.write(BUCKET, &key, b"damaged".to_vec());

    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    let outcome = next.read_outcome()?;
    assert!(outcome["error"].as_str().is_some_and(|error| error.contains("damaged")), "{outcome}");
    fs::write(next.machine.path("opt/svc/restore-complete"), "")?;
    let service = next.start_service("")?;
    next.wait_for_error("restore-home --retry").await?;
    drop(service);
    assert_eq!(read_latest_id().await?, id);

    store.write(BUCKET, &key, intact);
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    assert!(next.read_outcome()?["error"].is_string(), "only an operator may repeat the restore");
    next.machine.run(&["svc-sync-agent", "restore-home", "--retry"])?.expect(0);
    let mut restored = describe_tree(&next.home())?;
    restored
        .retain(|path, _| !path.starts_with("home/system/logs") && !path.starts_with("home/home.replaced-"));
    assert_eq!(restored, expected);
    let _service = next.start_and_save().await?;
    ensure!(read_latest_id().await? != id, "the machine has not saved again");
    Ok(())
}

/// Damages the largest pack, which contains the content of a test's large file.
fn damage_largest_pack(store: &S3Server) -> Result<()> {
    let packs = store.objects(BUCKET, &format!("{}/data/", slot().files()));
    let pack = packs.iter().max_by_key(|object| object.size).context("no pack")?;
    let mut damaged = store.read(BUCKET, &pack.key).context("no pack")?;
    damaged[100] ^= 1;
    store.write(BUCKET, &pack.key, damaged);
    Ok(())
}

/// No later run uses the staged files, so they would only fill the disk.
#[tokio::test(flavor = "multi_thread")]
async fn restore_with_damaged_pack_leaves_no_staged_files() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    let content: String = (0..60_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_string()).collect();
    first.write("home/projects/large", &content)?;
    drop(first.start_and_save().await?);
    damage_largest_pack(&store)?;
    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    let outcome = next.read_outcome()?;
    assert!(outcome["error"].as_str().is_some_and(|error| error.contains("damaged")), "{outcome}");
    assert!(!next.home().join(".svc-restore").exists());
    Ok(())
}

/// Damage that cannot be repaired must not leave a machine without its files and without backups forever.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_restore_can_leave_out_damaged_files() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    let content: String = (0..60_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_string()).collect();
    first.write("home/projects/large", &content)?;
    let watcher = first.start_watcher()?;
    let service = first.start_and_save().await?;
    // Each save writes its own packs.
    for path in ["home/projects/small", "home/notes"] {
        first.write(path, path)?;
        first.wait_until_saved().await?;
    }
    drop((watcher, service));
    damage_largest_pack(&store)?;

    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    fs::write(next.machine.path("opt/svc/restore-complete"), "")?;
    next.machine.run(&["svc-sync-agent", "restore-home", "--retry"])?.expect(65);
    assert!(!next.home().join("home/notes").exists());
    let skip = ["svc-sync-agent", "restore-home", "--retry", "--skip-damaged"];
    let restored = next.machine.run(&skip)?.expect(0);
    let lost_path = "/home/svc/home/projects/large";
    assert!(restored.stdout.contains(lost_path), "{}", restored.stdout);
    let outcome = next.read_outcome()?;
    assert_eq!(
        (&outcome["damaged"], &outcome["damagedPaths"][0]),
        (&1.into(), &lost_path.into()),
        "{outcome}"
    );
    assert!(outcome["error"].is_null(), "{outcome}");
    for path in ["home/projects/small", "home/notes"] {
        assert_eq!(fs::read_to_string(next.home().join(path))?, path);
    }
    assert!(!next.home().join("home/projects/large").exists());
    let _service = next.start_and_save().await?;
    Ok(())
}

/// Without the watcher, a requested save reads everything.
#[tokio::test(flavor = "multi_thread")]
async fn requested_save_needs_no_watcher() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    populate_home(&first)?;
    let _service = first.start_and_save().await?;
    first.write("home/projects/app/deep/er/notes", "changed")?;
    fs::create_dir_all(first.machine.path("var/lib/svc/requests"))?;
    let saved = first.machine.run(&["svc-sync-agent", "now"])?.expect(0);
    assert!(saved.stdout.contains("files saved as of"), "{}", saved.stdout);
    let status = first.machine.run(&["svc-sync-agent", "status"])?.expect(0);
    assert!(status.stdout.contains("snapshot"), "{}", status.stdout);
    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    assert_eq!(describe_tree(&next.home())?, describe_tree(&first.home())?);
    Ok(())
}

/// The store has lost everything, or the snapshots, the pointer or the index, since the last save, and no file has
/// changed.
#[tokio::test(flavor = "multi_thread")]
async fn requested_save_replaces_what_the_store_has_lost() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    populate_home(&first)?;
    let _watcher = first.start_watcher()?;
    let _service = first.start_and_save().await?;
    for lost_paths in [&[""][..], &["snapshots/"], &["latest", "pointer-log/"], &["index/"]] {
        for prefix in lost_paths.iter().map(|path| format!("{}/{path}", slot().files())) {
            let objects = store.objects(BUCKET, &prefix);
            let removed = objects.iter().filter(|object| store.remove(BUCKET, &object.key)).count();
            assert!(removed > 0 && removed == objects.len(), "{prefix}");
        }
        first.machine.run(&["svc-sync-agent", "now"])?.expect(0);
        let next = Host::new(&store, &platform, 2)?;
        next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
        let restored = next.home().join("home/projects/app/main.rs");
        assert!(
            restored.exists(),
            "after the loss of {lost_paths:?}, the save reported success with nothing in the store"
        );
    }
    Ok(())
}

/// Without the watcher, the service cannot detect moves during a save, so it repeats a slow save before it updates the
/// pointer.
#[tokio::test(flavor = "multi_thread")]
async fn slow_save_without_watcher_includes_moved_files() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    populate_home(&first)?;
    let before = Timestamp::now();
    let service = first.start_service("files.save.walked=1*sleep(3000)")?;
    // The index is written after the walk.
    let index = format!("{}/index/", slot().files());
    let deadline = Instant::now() + Duration::from_secs(60);
    while store.objects(BUCKET, &index).is_empty() {
        ensure!(Instant::now() < deadline, "no index in the store: {}", service.stderr());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    fs::rename(first.home().join("home/projects/app"), first.home().join("home/moved"))?;
    first.wait_until_saved_up_to(before).await?;
    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    assert_eq!(describe_tree(&next.home())?, describe_tree(&first.home())?);
    Ok(())
}

/// The watcher does not report a write through a hard link outside `home`, so the final backup reads everything.
#[tokio::test(flavor = "multi_thread")]
async fn final_backup_contains_writes_through_other_links() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    populate_home(&first)?;
    first.write(".settings", "old")?;
    fs::hard_link(first.home().join(".settings"), first.home().join("home/linked"))?;
    let _watcher = first.start_watcher()?;
    let _service = first.start_and_save().await?;
    first.write(".settings", "new content")?;
    fs::remove_file(first.home().join(".settings"))?;
    let layout = Layout::new(first.machine.path(""));
    let lock = quiesce::acquire_lock(&layout).await?;
    let quiesced_at = svc::clock::now_ms();
    let mut quiesce = Quiesce::new(OperationId::new());
    quiesce.quiesced_at = Some(quiesced_at);
    quiesce.write(&layout, &lock)?;
    first.wait_until_saved_up_to(quiesced_at).await?;
    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    assert_eq!(fs::read_to_string(next.home().join("home/linked"))?, "new content");
    Ok(())
}

/// Changes made during an outage of the store are saved afterwards; they do not accumulate on the disk meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn changes_during_store_outage_are_saved_later() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    populate_home(&first)?;
    fs::create_dir_all(first.machine.path("var/lib/svc/requests"))?;
    let _watcher = first.start_watcher()?;
    let _service = first.start_and_save().await?;
    store.take_down();
    let state_bytes = || -> Result<u64> {
        let mut total = 0;
        let mut pending = vec![first.machine.path("var/lib/svc/files")];
        while let Some(dir) = pending.pop() {
            for entry in fs::read_dir(dir)? {
                let (path, meta) = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?)))?;
                if meta.is_dir() { pending.push(path) } else { total += meta.len() }
            }
        }
        Ok(total)
    };
    let before = state_bytes()?;
    let large: String = (0..200_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_string()).collect();
    first.write("home/during-the-outage", &large)?;
    let failed = first.machine.run(&["svc-sync-agent", "now"])?.expect(69);
    assert!(!failed.stderr.is_empty());
    first.write("home/during-the-outage-2", "x")?;
    let growth = state_bytes()?.saturating_sub(before);
    ensure!(growth < 100_000, "the state grew by {growth} bytes for {} bytes of changes", large.len());
    store.bring_up()?;
    first.machine.run(&["svc-sync-agent", "now"])?.expect(0);
    let records = first.read_backup_records()?;
    let outcomes: Vec<_> =
        records.iter().map(|line| format!("{} {}", line["kind"], line["status"])).collect();
    assert_eq!(outcomes, [r#""files" "success""#, r#""files" "error""#], "{records:?}");
    assert!(records[1]["error"].is_string(), "{records:?}");
    let key = records[0]["key"].as_str().and_then(|key| key.strip_prefix("files/")).context("no key")?;
    assert!(store.read(BUCKET, &format!("{}/{key}", slot().files())).is_some(), "{key}");
    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    assert_eq!(describe_tree(&next.home())?, describe_tree(&first.home())?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_reports_that_the_platform_lacks_its_key() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    populate_home(&first)?;
    drop(first.start_and_save().await?);
    assert!(first.read_status()?["keyProblem"].is_null());
    platform.lose_key();
    let _service = first.start_and_save().await?;
    let status = first.machine.run(&["svc-sync-agent", "status"])?.expect(0);
    assert!(
        status.stdout.contains("key         the platform cannot open the file backup"),
        "{}",
        status.stdout
    );
    Ok(())
}

/// While the disk with the service's state is full, changes are still saved, and unchanged files are not read.
#[tokio::test(flavor = "multi_thread")]
async fn full_disk_does_not_stop_saves() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let first = Host::new(&store, &platform, 1)?;
    populate_home(&first)?;
    let Some(disk) = SmallDisk::mount(first.machine.path("var/lib/svc/files"), 4)? else { return Ok(()) };
    let _watcher = first.start_watcher()?;
    let service = first.start_and_save().await?;
    disk.fill(0)?;
    for text in ["1", "2", "3"] {
        first.write("home/new/note", text)?;
        first.wait_until_saved().await?;
    }
    let reads: Vec<u64> = service.stderr().lines().filter_map(parse_files_read).collect();
    ensure!(reads.len() >= 4 && reads[0] >= 4, "the first save did not read everything: {reads:?}");
    ensure!(reads[2..].iter().all(|files| *files <= 2), "later saves read unchanged files: {reads:?}");
    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    assert_eq!(fs::read_to_string(next.home().join("home/new/note"))?, "3");
    Ok(())
}

/// Parses the number of files that a save read from its log line.
fn parse_files_read(line: &str) -> Option<u64> {
    let (_, count) = line.split_once("files_read=")?;
    count.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

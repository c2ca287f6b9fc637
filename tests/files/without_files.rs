//! Machines that start without their predecessor's files because the files cannot be restored.

use std::fs;

use anyhow::{Context, Result, ensure};
use kit::disk::SmallDisk;
use serde_json::Value;

use super::machine::{FilesPlatform, Host, describe_tree};
use super::save_once;
use crate::host::machine::{BUCKET, slot, start_store};

/// A snapshot that fits on no server, or that cannot be repaired, must not keep the owner from the database, or the
/// machine from saving files again.
#[tokio::test(flavor = "multi_thread")]
async fn machine_can_start_without_files_and_restore_or_give_up_later() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    let expected = save_once(&store, &platform).await?;
    let restore =
        |arguments: &'static [&'static str]| [&["svc-sync-agent", "restore-home"], arguments].concat();
    for gives_up in [false, true] {
        let next = Host::new(&store, &platform, 2)?;
        next.machine.run(&restore(&["--give-up"]))?.expect(65);
        next.machine.write_boot_env(&[("SVC_RESTORE_FILES", "false")])?;
        next.machine.run(&restore(&[]))?.expect(0);
        assert!(!next.home().join("home/projects").exists());
        let outcome = next.read_outcome()?;
        assert!(
            outcome["error"].as_str().is_some_and(|error| error.contains("--without-files")),
            "{outcome}"
        );
        fs::write(next.machine.path("opt/svc/restore-complete"), "")?;
        next.machine.run(&restore(&[]))?.expect(0);
        next.write("home/own", "written on this machine")?;
        let service = next.start_service("")?;
        next.wait_for_error("restore-home --retry").await?;
        drop(service);
        if gives_up {
            // A restore that has begun to move files into place must be completed.
            let failpoint = [("FAILPOINTS", "files.gate.placed=return(kill)")];
            let interrupted = Host::new(&store, &platform, 2)?;
            interrupted.machine.write_boot_env(&[("SVC_RESTORE_FILES", "false")])?;
            interrupted.machine.run(&restore(&[]))?.expect(0);
            interrupted.machine.run_with(&restore(&["--retry"]), &failpoint)?.expect_killed();
            let refused = interrupted.machine.run(&restore(&["--give-up"]))?.expect(65);
            assert!(refused.stderr.contains("complete it with"), "{}", refused.stderr);
            interrupted.machine.run(&restore(&["--retry"]))?.expect(0);

            next.machine.run(&restore(&["--give-up"]))?.expect(0);
            next.machine.run(&restore(&["--give-up"]))?.expect(65);
            next.machine.run(&restore(&["--retry"]))?.expect(65);
            assert!(
                !next.home().join("home/projects").exists(),
                "files were restored after the restore was given up"
            );
            let status = next.machine.run(&["svc-sync-agent", "status"])?.expect(0);
            assert!(status.stdout.contains("an operator decided"), "{}", status.stdout);
            let _service = next.start_and_save().await?;
            let last = Host::new(&store, &platform, 3)?;
            last.machine.run(&restore(&[]))?.expect(0);
            assert_eq!(fs::read_to_string(last.home().join("home/own"))?, "written on this machine");
        } else {
            next.machine.run(&restore(&["--retry"]))?.expect(0);
            let restored = describe_tree(&next.home())?;
            for (path, entry) in &expected {
                ensure!(path.ends_with("home") || restored.get(path) == Some(entry), "{path} differs");
            }
        }
    }
    Ok(())
}

/// Anyone with a host's credentials for the store can overwrite the pointer so that it references no snapshot. The
/// machine must not start as if there had never been any files.
#[tokio::test(flavor = "multi_thread")]
async fn pointer_without_snapshot_does_not_count_as_no_files() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    save_once(&store, &platform).await?;
    let key = format!("{}/latest", slot().files());
    let intact = store.read(BUCKET, &key).context("no pointer")?;
    let mut pointer: Value = serde_json::from_slice(&intact)?;
    pointer["snapshot"] = Value::Null;
    pointer["seq"] = (pointer["seq"].as_u64().context("no sequence number")? + 1).into();
    store.write(BUCKET, &key, serde_json::to_vec(&pointer)?);
    let next = Host::new(&store, &platform, 2)?;
    next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
    let outcome = next.read_outcome()?;
    assert!(outcome["error"].as_str().is_some_and(|error| error.contains("names no snapshot")), "{outcome}");
    fs::write(next.machine.path("opt/svc/restore-complete"), "")?;
    next.machine.run(&["svc-sync-agent", "restore-home", "--retry"])?.expect(65);
    assert!(next.read_outcome()?["error"].is_string(), "the failed retry removed the error");
    store.write(BUCKET, &key, intact);
    next.machine.run(&["svc-sync-agent", "restore-home", "--retry"])?.expect(0);
    assert!(next.home().join("home/projects/app/main.rs").exists());
    Ok(())
}

/// If everything in the store is lost, only the platform knows that there were files.
#[tokio::test(flavor = "multi_thread")]
async fn empty_store_counts_as_loss_if_the_platform_expects_files() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    for is_expected in [false, true] {
        let next = Host::new(&store, &platform, 2)?;
        next.machine.write_boot_env(&[("SVC_EXPECT_FILES", if is_expected { "true" } else { "false" })])?;
        next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(0);
        let outcome = next.read_outcome()?;
        assert_eq!(outcome["error"].is_string(), is_expected, "{outcome}");
    }
    Ok(())
}

/// The platform's advice depends on the code in the last line of the log.
#[tokio::test(flavor = "multi_thread")]
async fn restore_without_space_for_the_files_reports_its_code() -> Result<()> {
    let store = start_store()?;
    let platform = FilesPlatform::start().await?;
    save_once(&store, &platform).await?;
    let next = Host::new(&store, &platform, 2)?;
    let Some(disk) = SmallDisk::mount(next.home(), 1)? else { return Ok(()) };
    disk.limit_inodes(12)?;
    let failed = next.machine.run(&["svc-sync-agent", "restore-home"])?.expect(65);
    let last_line = failed.stderr.lines().last().unwrap_or_default();
    assert!(
        last_line.contains("has room for only") && last_line.contains("(code files_no_space) "),
        "{}",
        failed.stderr
    );
    assert!(!next.home().join(".svc-restore").exists());
    Ok(())
}

//! The owner's files: saved files survive the loss of the machine, and deleted files stay deleted.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::first_machine::MachineRecord;
use super::stack::{HANDLE, Stack, eventually};

/// Path relative to `/home/svc`, content and mode. The first file is outside the watched directory.
const SAVED_FILES: [(&str, &str, u32); 3] = [
    (".agent/login.json", "{\"token\":\"owner-token\"}", 0o600),
    ("home/projects/plan.md", "version 2", 0o640),
    ("home/projects/new/deep/er.txt", "", 0o644),
];
const DELETED_FILE: &str = "home/projects/deleted.md";
/// Excluded from every backup.
const EXCLUDED_FILE: &str = "home/projects/node_modules/module.js";
/// Longer than the interval at which saves without changes advance `savedUntil`.
const SAVE_TIMEOUT: Duration = Duration::from_secs(120);

/// Writes files and waits until they are saved; then changes them, deletes one, and waits until that state is saved.
pub async fn save(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let home = stack.provider.disk(&machine.server)?.join("home/svc");
    let write = |path: &str, text: &str| -> Result<()> {
        let path = home.join(path);
        fs::create_dir_all(path.parent().context("the file has no directory")?)?;
        Ok(fs::write(path, text)?)
    };
    write("home/projects/plan.md", "version 1")?;
    write(DELETED_FILE, "to be deleted")?;
    write(EXCLUDED_FILE, "downloaded again")?;
    wait_until_saved(stack, machine).await?;
    fs::remove_file(home.join(DELETED_FILE))?;
    for (path, text, mode) in SAVED_FILES {
        write(path, text)?;
        fs::set_permissions(home.join(path), Permissions::from_mode(mode))?;
    }
    std::os::unix::fs::symlink("plan.md", home.join("home/projects/current"))?;
    let status = wait_until_saved(stack, machine).await?;
    Ok(((), format!("{} files, snapshot {}", status["files"], status["snapshot"])))
}

/// Waits until everything written so far is in the store.
async fn wait_until_saved(stack: &Stack, machine: &MachineRecord) -> Result<Value> {
    let now = jiff::Timestamp::now();
    let disk = stack.provider.disk(&machine.server)?;
    eventually("the files are saved", SAVE_TIMEOUT, || async {
        let text = fs::read_to_string(disk.join("var/lib/svc/files/status.json"))?;
        let status: Value = serde_json::from_str(&text)?;
        let saved: Option<jiff::Timestamp> = status["savedUntil"].as_str().and_then(|time| time.parse().ok());
        ensure!(saved.is_some_and(|saved| saved > now), "not saved since {now}: {status}");
        Ok(status)
    })
    .await
}

/// Checks the files on the new machine.
pub fn check_restored(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let disk = stack.provider.disk(&machine.server)?;
    let home = disk.join("home/svc");
    for (path, text, mode) in SAVED_FILES {
        let restored = fs::read_to_string(home.join(path)).with_context(|| format!("{path} is missing"))?;
        ensure!(restored == text, "{path} is {restored:?}");
        let actual_mode = fs::metadata(home.join(path))?.mode() & 0o7777;
        ensure!(actual_mode == mode, "{path} has mode {actual_mode:o}");
    }
    ensure!(
        fs::read_link(home.join("home/projects/current"))?.to_str() == Some("plan.md"),
        "home/projects/current does not point to plan.md"
    );
    for absent in [DELETED_FILE, EXCLUDED_FILE, ".svc-restore"] {
        ensure!(fs::symlink_metadata(home.join(absent)).is_err(), "{absent} was restored");
    }
    let outcome = fs::read_to_string(disk.join("var/lib/svc/files/restored.json"))?;
    let outcome: Value = serde_json::from_str(&outcome)?;
    ensure!(outcome["snapshot"].is_string() && outcome["error"].is_null(), "the outcome is {outcome}");
    Ok(((), format!("{} files, as they were at {}", outcome["files"], outcome["takenAt"])))
}

/// Restores the deleted file on the new machine, as it was on the first one.
pub async fn restore_deleted_file(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let path = DELETED_FILE.strip_prefix("home/").context("the file is outside the watched directory")?;
    let versions = stack.svcctl(&["--json", "files", "versions", HANDLE, path]).await?.ensure_success()?;
    let page: Value = versions.json()?;
    let (newest, saved) = (&page["versions"][0], &page["versions"][1]);
    ensure!(newest["entry"].is_null() && saved["entry"]["sizeBytes"] == 13, "the versions are {page}");
    let time = saved["lastSavedAt"].as_str().context("the version has no time")?;
    let run = stack
        .svcctl(&["--json", "files", "restore", HANDLE, path, "--time", time])
        .await?
        .ensure_success()?;
    let result: Value = run.json()?;
    let restored =
        fs::read_to_string(stack.provider.disk(&machine.server)?.join("home/svc").join(DELETED_FILE))?;
    ensure!(restored == "to be deleted", "the file is {restored:?}");
    Ok(((), format!("{} as it was at {time}", result["restore"]["restoredTo"])))
}

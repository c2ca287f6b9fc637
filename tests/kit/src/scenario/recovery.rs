//! The loss of the machine, its recovery, the fencing of the old machine, and the deletion.

use std::time::Duration;

use anyhow::{Result, ensure};
use reqwest::StatusCode;

use super::first_machine::{LATER_TITLE, MachineRecord, TITLES};
use super::stack::{HANDLE, Stack, USER, eventually};
use super::web;
use crate::provider::Power;
use crate::s3::{Fault, FaultRule};

pub async fn lose_machine(stack: &Stack, first: &MachineRecord) -> Result<((), String)> {
    stack.provider.kill_server(&first.server).await?;
    stack.provider.lose_server(&first.server).await?;
    ensure!(stack.provider.servers().is_empty(), "the provider still has {:?}", stack.provider.servers());
    let owner = stack.owner_token();
    let response = stack.web.get("/", Some(&owner), "text/html").await?;
    ensure!(
        response.status == StatusCode::BAD_GATEWAY,
        "after the loss of the machine, the owner gets {}",
        response.status
    );
    Ok(((), "killed and deleted at the provider; the owner gets a 502 page".to_owned()))
}

/// Timeouts that depend on the kind of server.
#[derive(Debug, Clone, Copy)]
pub struct RecoveryTimeouts {
    /// From the request until the machine is serving.
    pub ready: Duration,
    /// Until a server that is no longer needed is deleted.
    pub removal: Duration,
}

impl RecoveryTimeouts {
    pub const DEMO: Self = Self { ready: Duration::from_secs(220), removal: Duration::from_secs(60) };

    fn wait_arg(self) -> String {
        format!("--wait={}", self.ready.as_secs())
    }
}

/// Starts a recovery whose new machine cannot restore the snapshot. The slot returns to its previous machine, which
/// serves again.
pub async fn fail_recovery_midway(
    stack: &Stack,
    first: &MachineRecord,
    timeouts: RecoveryTimeouts,
) -> Result<(MachineRecord, String)> {
    let expected = stack.web.list_titles(&stack.owner_token()).await?;
    stack.store.add_fault(FaultRule::new(Fault::CorruptBody).method("GET").key_suffix(".dump").always());
    let run = stack.svcctl(&["--json", "recover", USER, "--yes", &timeouts.wait_arg()]).await?;
    stack.store.heal();
    ensure!(
        run.exit_code == Some(69),
        "svcctl exited with {:?}: {}{}",
        run.exit_code,
        run.stdout,
        run.stderr
    );
    let machine = eventually("the old machine serves again", timeouts.ready, || async {
        let record = stack.svcctl(&["--json", "status", HANDLE]).await?.ensure_success()?.stdout;
        let machine = MachineRecord::parse(&record)?;
        ensure!(machine.id == first.id && machine.status == "running", "the slot's machine is {machine:?}");
        Ok(machine)
    })
    .await?;
    let owner = stack.owner_token();
    eventually("the owner's rows are found", timeouts.ready, || async {
        let titles = stack.web.list_titles(&owner).await?;
        ensure!(titles == expected, "the rows are {titles:?}, expected {expected:?}");
        Ok(())
    })
    .await?;
    eventually("the new server is deleted", timeouts.removal, || async {
        let servers = stack.provider.servers();
        ensure!(servers.len() == 1 && servers[0].name == first.server, "the provider has {servers:?}");
        Ok(())
    })
    .await?;
    let epoch = machine.epoch;
    Ok((
        machine,
        format!("the restore fails; machine {} serves again with all rows, epoch {epoch}", first.id),
    ))
}

/// Deletes the machine, and undoes the deletion while the server is kept.
pub async fn undelete(
    stack: &Stack,
    second: &MachineRecord,
    timeouts: RecoveryTimeouts,
) -> Result<((), String)> {
    let expected = stack.web.list_titles(&stack.owner_token()).await?;
    stack.svcctl(&["--json", "delete", &second.id, "--yes", &timeouts.wait_arg()]).await?.ensure_success()?;
    let servers = stack.provider.servers();
    let is_off = servers.len() == 1 && servers[0].status == Power::Off;
    ensure!(is_off, "a deleted machine's server must be kept and off: {servers:?}");
    stack.svcctl(&["--json", "undelete", &second.id, &timeouts.wait_arg()]).await?.ensure_success()?;
    let owner = stack.owner_token();
    let titles = eventually("the rows are found again", timeouts.ready, || async {
        let titles = stack.web.list_titles(&owner).await?;
        ensure!(titles == expected, "the rows are {titles:?}, expected {expected:?}");
        Ok(titles)
    })
    .await?;
    Ok(((), format!("deleted, server kept and off; undeleted, {} rows", titles.len())))
}

pub async fn recover(stack: &Stack, first: &MachineRecord) -> Result<(MachineRecord, String)> {
    let run = stack.svcctl(&["--json", "recover", USER, "--yes", "--wait=220"]).await?.ensure_success()?;
    let second = MachineRecord::parse(&run.stdout)?;
    ensure!(second.status == "running" && second.id != first.id, "the new machine is {second:?}");
    ensure!(second.epoch == first.epoch + 1, "the new machine has epoch {}", second.epoch);
    let servers = stack.provider.servers();
    ensure!(servers.len() == 1 && servers[0].name == second.server, "the provider has {servers:?}");
    ensure!(second.image_version == first.image_version, "the machine is running {}", second.image_version);
    let pointer = stack.slot.read_pointer(&stack.store)?;
    ensure!(pointer["fenceEpoch"] == second.epoch, "the fence is at {}", pointer["fenceEpoch"]);
    Ok((second.clone(), format!("machine {} is running, epoch {}", second.id, second.epoch)))
}

pub async fn check_restored_rows(stack: &Stack) -> Result<((), String)> {
    let owner = stack.owner_token();
    let titles =
        eventually("the rows are found", Duration::from_secs(5), || stack.web.list_titles(&owner)).await?;
    ensure!(
        !titles.iter().any(|title| title == LATER_TITLE),
        "a row that no backup contains was restored: {titles:?}"
    );
    ensure!(titles == TITLES, "unexpected rows: {titles:?}");
    let row = stack.web.insert_note(&owner, "written after the recovery").await?;
    ensure!(row["id"].is_string(), "a row cannot be added: {row}");
    Ok((
        (),
        format!(
            "{} rows restored from the backup; the row added after it is gone, as expected; inserts work",
            TITLES.len()
        ),
    ))
}

/// Starts only the old machine's database, and checks that its backup is refused.
pub async fn check_old_backup_refused(
    stack: &Stack,
    first: &MachineRecord,
    backup: &str,
) -> Result<((), String)> {
    let before = stack.slot.read(&stack.store, "system/db/latest")?;
    stack.provider.start_database_only(&first.server).await?;
    let run = stack.provider.run_unit(&first.server, "svc-db-backup", &["run"]).await?;
    let output = String::from_utf8_lossy(&run.stderr).trim().to_owned();
    ensure!(!run.status.success(), "the replaced machine's backup was not refused");
    ensure!(output.contains("fence"), "the backup failed for another reason: {output}");
    ensure!(stack.slot.read(&stack.store, "system/db/latest")? == before, "the pointer has changed");
    ensure!(
        stack.slot.list_snapshots(&stack.store).iter().any(|key| key == backup),
        "the snapshot is missing"
    );
    let last = output.lines().last().unwrap_or_default();
    Ok(((), format!("the old machine's backup exits with {}, pointer unchanged: {last}", run.status)))
}

/// Starts the old machine completely, and checks that it detects that it has been superseded.
pub async fn check_old_machine_superseded(
    stack: &Stack,
    first: &MachineRecord,
    backup: &str,
) -> Result<((), String)> {
    let before = stack.slot.read(&stack.store, "system/db/latest")?;
    stack.provider.stop_unlisted(&first.server).await?;
    stack.provider.start_from_disk(&first.server)?;
    let marker = stack.provider.disk(&first.server)?.join("var/lib/svc/superseded.json");
    eventually("the old machine records that it is superseded", Duration::from_secs(60), || async {
        ensure!(marker.exists(), "no {}", marker.display());
        Ok(())
    })
    .await?;
    eventually("the old machine's gateway stops", Duration::from_secs(30), || async {
        let response = web::get_from_host(first.ip, first.https_port, "/livez", None).await;
        ensure!(response.is_err(), "the gateway still responds");
        Ok(())
    })
    .await?;
    let run = stack.provider.run_unit(&first.server, "svc-db-backup", &["run"]).await?;
    ensure!(!run.status.success(), "a superseded machine's backup was not refused");
    ensure!(stack.slot.read(&stack.store, "system/db/latest")? == before, "the pointer has changed");
    ensure!(
        stack.slot.list_snapshots(&stack.store).iter().any(|key| key == backup),
        "the snapshot is missing"
    );
    stack.provider.stop_unlisted(&first.server).await?;
    Ok(((), "the old machine is superseded: its gateway stops, and its backups are refused".to_owned()))
}

pub async fn delete(stack: &Stack, second: &MachineRecord) -> Result<((), String)> {
    let before = stack.slot.list_snapshots(&stack.store).len();
    // If the machine was just restored, its final backup waits up to three minutes for its files to be saved.
    let wait = format!("--wait={}", stack.svcctl_timeout.as_secs() - 20);
    let run =
        stack.svcctl(&["--json", "delete", &second.id, "--now", "--yes", &wait]).await?.ensure_success()?;
    let record: serde_json::Value = run.json()?;
    ensure!(record["deletedAt"].is_string(), "the record is {record}");
    eventually("the machine's server is deleted", Duration::from_secs(60), || async {
        let servers = stack.provider.servers();
        ensure!(servers.is_empty(), "the provider has {servers:?}");
        Ok(())
    })
    .await?;
    let after = stack.slot.list_snapshots(&stack.store).len();
    ensure!(after > before, "{after} snapshots, {before} before the deletion: the final backup is missing");
    Ok(((), format!("final backup taken, soft-deleted, server deleted, {after} snapshots kept")))
}

pub async fn check_owner_gets_503(stack: &Stack) -> Result<((), String)> {
    let owner = stack.owner_token();
    let page = eventually("the 503 page is served", Duration::from_secs(3), || async {
        let page = stack.web.get("/", Some(&owner), "text/html").await?;
        ensure!(page.status == StatusCode::SERVICE_UNAVAILABLE, "the owner gets {}", page.status);
        Ok(page)
    })
    .await?;
    ensure!(page.content_type.starts_with("text/html"), "the page's content type is {}", page.content_type);
    ensure!(page.retry_after.is_some(), "the page has no Retry-After header");
    let problem = stack.web.get("/", Some(&owner), "application/json").await?;
    ensure!(problem.status == StatusCode::SERVICE_UNAVAILABLE, "a program gets {}", problem.status);
    ensure!(
        problem.content_type.starts_with("application/problem+json"),
        "the problem's content type is {}",
        problem.content_type
    );
    let code = problem.json()?["code"].clone();
    Ok(((), format!("503: a page for a browser, problem+json ({code}) for a program")))
}

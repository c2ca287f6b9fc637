//! The machine is lost; another takes its place; the first one comes back and may not do harm; the end.

use std::time::Duration;

use anyhow::{Result, ensure};
use reqwest::StatusCode;

use super::first_life::{LATER, Machine, TITLES};
use super::stack::{HANDLE, Stack, USER, eventually};
use super::web;
use crate::provider::Power;
use crate::s3::{Fault, Rule};

pub async fn lose(stack: &Stack, first: &Machine) -> Result<((), String)> {
    stack.provider.kill_server(&first.server).await?;
    stack.provider.vanish_server(&first.server).await?;
    ensure!(stack.provider.servers().is_empty(), "the provider still has {:?}", stack.provider.servers());
    let owner = stack.owner();
    let answer = stack.web.get("/", Some(&owner), "text/html").await?;
    ensure!(
        answer.status == StatusCode::BAD_GATEWAY,
        "with its machine dead, the owner gets {}",
        answer.status
    );
    Ok(((), "killed and gone at the provider; the owner gets a 502 page".to_owned()))
}

/// How long this ground takes.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// From an order to a machine that serves.
    pub up: Duration,
    pub removal: Duration,
}

impl Patience {
    pub const DEMO: Self = Self { up: Duration::from_secs(220), removal: Duration::from_secs(60) };

    fn wait(self) -> String {
        format!("--wait={}", self.up.as_secs())
    }
}

/// A recovery whose new machine cannot restore: the slot goes back to the machine that it had, which serves on.
pub async fn fail_half_way(stack: &Stack, first: &Machine, patience: Patience) -> Result<(Machine, String)> {
    let titles = stack.web.titles(&stack.owner()).await?;
    stack.store.fault(Rule::new(Fault::CorruptBody).method("GET").key_ending(".dump").always());
    let run = stack.svcctl(&["--json", "recover", USER, "--yes", &patience.wait()]).await?;
    stack.store.heal();
    ensure!(run.code == Some(69), "svcctl ended with {:?}: {}{}", run.code, run.stdout, run.stderr);
    let back = eventually("the old machine serves again", patience.up, || async {
        let record = stack.svcctl(&["--json", "status", HANDLE]).await?.success()?.stdout;
        let back = Machine::read(&record)?;
        ensure!(back.id == first.id && back.status == "running", "the slot's machine is {back:?}");
        Ok(back)
    })
    .await?;
    let owner = stack.owner();
    eventually("the owner's rows are there", patience.up, || async {
        let found = stack.web.titles(&owner).await?;
        ensure!(found == titles, "found {found:?}");
        Ok(())
    })
    .await?;
    eventually("the new server is deleted", patience.removal, || async {
        let servers = stack.provider.servers();
        ensure!(servers.len() == 1 && servers[0].name == first.server, "at the provider: {servers:?}");
        Ok(())
    })
    .await?;
    let epoch = back.epoch;
    Ok((back, format!("the restore fails; machine {} serves again with all rows, epoch {epoch}", first.id)))
}

/// A deletion that is undone while the server is kept.
pub async fn undelete(stack: &Stack, second: &Machine, patience: Patience) -> Result<((), String)> {
    let titles = stack.web.titles(&stack.owner()).await?;
    stack.svcctl(&["--json", "delete", &second.id, "--yes", &patience.wait()]).await?.success()?;
    let servers = stack.provider.servers();
    let is_off = servers.len() == 1 && servers[0].status == Power::Off;
    ensure!(is_off, "a deleted machine's server is kept, switched off: {servers:?}");
    stack.svcctl(&["--json", "undelete", &second.id, &patience.wait()]).await?.success()?;
    let owner = stack.owner();
    let found = eventually("the rows are there again", patience.up, || async {
        let found = stack.web.titles(&owner).await?;
        ensure!(found == titles, "found {found:?}, there were {titles:?}");
        Ok(found)
    })
    .await?;
    Ok(((), format!("deleted, its server kept and switched off; undeleted, {} rows", found.len())))
}

pub async fn recover(stack: &Stack, first: &Machine) -> Result<(Machine, String)> {
    let run = stack.svcctl(&["--json", "recover", USER, "--yes", "--wait=220"]).await?.success()?;
    let second = Machine::read(&run.stdout)?;
    ensure!(second.status == "running" && second.id != first.id, "the new machine is {second:?}");
    ensure!(second.epoch == first.epoch + 1, "its epoch is {}", second.epoch);
    let servers = stack.provider.servers();
    ensure!(servers.len() == 1 && servers[0].name == second.server, "at the provider: {servers:?}");
    ensure!(second.image_version == first.image_version, "it runs {}", second.image_version);
    let pointer = stack.slot.pointer(&stack.store)?;
    ensure!(pointer["fenceEpoch"] == second.epoch, "the fence is at {}", pointer["fenceEpoch"]);
    Ok((second.clone(), format!("machine {} is running, epoch {}", second.id, second.epoch)))
}

pub async fn rows_are_back(stack: &Stack) -> Result<((), String)> {
    let owner = stack.owner();
    let found = eventually("find the rows", Duration::from_secs(5), || stack.web.titles(&owner)).await?;
    ensure!(!found.iter().any(|title| title == LATER), "a row that no backup has is there: {found:?}");
    ensure!(found == TITLES, "the backup's rows are not back: {found:?}");
    let row = stack.web.insert(&owner, "written after the recovery").await?;
    ensure!(row["id"].is_string(), "no row can be added: {row}");
    Ok(((), format!("{} rows of the backup are back, the later one is not; rows can be added", TITLES.len())))
}

/// The old machine wakes with its disk, but only its database yet: a backup that was due runs at once.
pub async fn old_machine_is_fenced(stack: &Stack, first: &Machine, backup: &str) -> Result<((), String)> {
    let before = stack.slot.read(&stack.store, "system/db/latest")?;
    stack.provider.start_database_only(&first.server).await?;
    let run = stack.provider.run_unit(&first.server, "svc-db-backup", &["run"]).await?;
    let said = String::from_utf8_lossy(&run.stderr).trim().to_owned();
    ensure!(!run.status.success(), "the replaced machine's backup was not refused; it moved the pointer");
    ensure!(said.contains("fence"), "its backup failed, but not because it is fenced: {said}");
    ensure!(stack.slot.read(&stack.store, "system/db/latest")? == before, "the pointer has moved");
    ensure!(stack.slot.snapshots(&stack.store).iter().any(|key| key == backup), "the snapshot is gone");
    let last = said.lines().last().unwrap_or_default();
    Ok(((), format!("its backup ends with {}, the pointer stays: {last}", run.status)))
}

/// Now it starts in full, and is told.
pub async fn old_machine_learns(stack: &Stack, first: &Machine, backup: &str) -> Result<((), String)> {
    let before = stack.slot.read(&stack.store, "system/db/latest")?;
    stack.provider.stop_unlisted(&first.server).await?;
    stack.provider.start_from_disk(&first.server)?;
    let marker = stack.provider.disk(&first.server)?.join("var/lib/svc/superseded.json");
    eventually("the old machine learns that it is superseded", Duration::from_secs(60), || async {
        ensure!(marker.exists(), "no {}", marker.display());
        Ok(())
    })
    .await?;
    eventually("the old machine's gateway ends", Duration::from_secs(30), || async {
        let answer = web::at_host(first.ip, first.https_port, "/livez", None).await;
        ensure!(answer.is_err(), "it still answers");
        Ok(())
    })
    .await?;
    let run = stack.provider.run_unit(&first.server, "svc-db-backup", &["run"]).await?;
    ensure!(!run.status.success(), "a superseded machine's backup was not refused");
    ensure!(stack.slot.read(&stack.store, "system/db/latest")? == before, "the pointer has moved");
    ensure!(stack.slot.snapshots(&stack.store).iter().any(|key| key == backup), "the snapshot is gone");
    stack.provider.stop_unlisted(&first.server).await?;
    Ok(((), "it is told that it is superseded; its gateway ends, its backups are refused".to_owned()))
}

pub async fn delete(stack: &Stack, second: &Machine) -> Result<((), String)> {
    let snapshots = stack.slot.snapshots(&stack.store).len();
    let run =
        stack.svcctl(&["--json", "delete", &second.id, "--now", "--yes", "--wait=120"]).await?.success()?;
    let record: serde_json::Value = run.json()?;
    ensure!(record["deletedAt"].is_string(), "the record is {record}");
    eventually("its server is deleted", Duration::from_secs(60), || async {
        let servers = stack.provider.servers();
        ensure!(servers.is_empty(), "at the provider: {servers:?}");
        Ok(())
    })
    .await?;
    let kept = stack.slot.snapshots(&stack.store).len();
    ensure!(kept > snapshots, "{kept} snapshots after {snapshots}: the last backup is missing");
    Ok(((), format!("a last backup, soft-deleted, its server gone, {kept} snapshots kept")))
}

pub async fn nobody_is_served(stack: &Stack) -> Result<((), String)> {
    let owner = stack.owner();
    let page = eventually("the 503 page", Duration::from_secs(3), || async {
        let page = stack.web.get("/", Some(&owner), "text/html").await?;
        ensure!(page.status == StatusCode::SERVICE_UNAVAILABLE, "the owner gets {}", page.status);
        Ok(page)
    })
    .await?;
    ensure!(page.kind.starts_with("text/html"), "the page is {}", page.kind);
    ensure!(page.retry_after.is_some(), "no Retry-After");
    let problem = stack.web.get("/", Some(&owner), "application/json").await?;
    ensure!(problem.status == StatusCode::SERVICE_UNAVAILABLE, "{}", problem.status);
    ensure!(problem.kind.starts_with("application/problem+json"), "the problem is {}", problem.kind);
    let code = problem.json()?["code"].clone();
    Ok(((), format!("503: a page for a browser, problem+json ({code}) for a program")))
}

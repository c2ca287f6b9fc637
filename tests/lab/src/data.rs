//! The owner's data: a store outage during two backups, a table restored from a snapshot, and an export of all data as
//! one archive, which is imported again.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::Method;
use serde_json::{Value, json};

use super::faults::{LONG_TIMEOUT, RUN_BACKUP, SHORT_TIMEOUT, verified_pointer, wait_until_served};
use super::scenario::BOOT_TIMEOUT;
use kit::s3::{Fault, FaultRule};
use kit::scenario::{MachineRecord, Stack, eventually};

/// A script that lists the databases that the product has created, except the owner's.
pub(super) const LIST_EXTRA_DATABASES: &str = r#"
url=$(sed -n 's/^DATABASE_URL=//p' /opt/svc/env/host.env | tr -d '"')
PGPASSWORD=$(echo "$url" | sed 's|.*://[^:]*:\([^@]*\)@.*|\1|') /opt/svc/runtime/postgres/bin/psql -v ON_ERROR_STOP=1 -qh 127.0.0.1 \
  -U postgres -d svc -Atc "select datname from pg_database where datname ~ '^svc_'"
"#;

/// Makes the store unreachable for two backups. The exit code, the backup log, the metrics, doctor and the fleet report
/// the failure, and the pointer is unchanged.
pub async fn interrupt_store(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("first backup")?;
    let before = verified_pointer(stack)?;
    vm.run(&set_retries_command(false), SHORT_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot disable retries")?;
    let outage = stack.store.add_fault(FaultRule::new(Fault::Disconnect).key("/system/db/").always());
    for nth in 1..=2 {
        let failed = vm.run(RUN_BACKUP, LONG_TIMEOUT).await?;
        ensure!(!failed.status.success(), "backup {nth} succeeded although the store was unreachable");
    }
    let code = vm
        .run("systemctl show -P ExecMainStatus svc-db-backup.service", SHORT_TIMEOUT)
        .await?
        .into_stdout()?;
    ensure!(code.trim() == "69", "the backup exited with {}", code.trim());
    let lines = vm
        .run(
            "grep '\"kind\":\"database\"' /home/svc/home/system/logs/backup.jsonl | tail -n 2",
            SHORT_TIMEOUT,
        )
        .await?
        .into_stdout()?;
    let failed = lines.lines().filter(|line| line.contains(r#""status":"error""#)).count();
    ensure!(failed == 2, "backup.jsonl: {lines}");
    let metrics = "curl -sS --unix-socket /run/svc/gateway/gateway.sock http://localhost/metrics | grep ^svc_backup_last_run_success";
    let metrics = vm.run(metrics, SHORT_TIMEOUT).await?.into_stdout()?;
    ensure!(metrics.trim().ends_with(" 0"), "/metrics: {metrics}");
    let doctor = vm.run("/opt/svc/bin/svcctl doctor host", LONG_TIMEOUT).await?;
    let is_backup_problem = |line: &str| line.split_whitespace().take(2).eq(["problem", "backup"]);
    ensure!(
        doctor.stdout.lines().any(is_backup_problem),
        "doctor does not report the failed backup: {}",
        doctor.stdout
    );
    eventually("the fleet reports the failing backup", BOOT_TIMEOUT, || check_fleet_attention(stack, true))
        .await?;
    ensure!(stack.slot.read_pointer(&stack.store)? == before, "a failed backup moved the pointer");
    let dropped = outage.hits();
    stack.store.heal();
    vm.run(&set_retries_command(true), SHORT_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot enable retries")?;
    verified_pointer(stack)?;
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("backup after the outage")?;
    ensure!(verified_pointer(stack)?["seq"].as_u64() > before["seq"].as_u64(), "the pointer did not move");
    eventually("the fleet no longer reports the failing backup", BOOT_TIMEOUT, || {
        check_fleet_attention(stack, false)
    })
    .await?;
    let detail =
        "two backups exited with 69; log, metrics, doctor and fleet report the failure, pointer unchanged";
    Ok(((), format!("{detail}; {dropped} requests dropped; the next backup succeeded")))
}

/// Returns a command that enables or disables the retries of the hourly unit. While the store is unreachable, the unit
/// retries for most of an hour if they are enabled, and otherwise fails immediately.
fn set_retries_command(is_enabled: bool) -> String {
    const DIR: &str = "/run/systemd/system/svc-db-backup.service.d";
    let change = if is_enabled {
        format!("rm -r {DIR}")
    } else {
        let once = r"[Service]\nExecStart=\nExecStart=/opt/svc/bin/svc-db-backup run\n";
        format!("mkdir -p {DIR} && printf '{once}' > {DIR}/once.conf")
    };
    format!("{change} && systemctl daemon-reload")
}

async fn check_fleet_attention(stack: &Stack, is_backup_failing: bool) -> Result<()> {
    let fleet: Value = stack.svcctl(&["--json", "fleet"]).await?.ensure_success()?.json()?;
    let attention = fleet["attention"].to_string();
    ensure!(
        attention.contains("backup_failing") == is_backup_failing,
        "the fleet's attention list is {attention}"
    );
    Ok(())
}

/// The owner deletes all notes, opens the last snapshot as a side database, and copies the notes back through the
/// router.
pub async fn restore_from_side_database(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    const NOTES: &str = "app_notes.notes";
    let vm = stack.provider.machine(&machine.server)?;
    let rows = wait_until_served(stack).await?;
    ensure!(!rows.is_empty(), "there are no rows: run the step `use` first");
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("first backup")?;
    let delete =
        json!({"action": "delete", "app": "notes", "table": "notes", "filter": {"title": {"ne": ""}}});
    stack.web.call_bridge(&stack.owner_token(), &delete).await?;
    ensure!(stack.web.list_titles(&stack.owner_token()).await?.is_empty(), "some rows were not deleted");
    send_side_database_request(stack, Method::POST, "", json!({})).await?;
    let opened = wait_for_side_database(stack, "open").await?;
    let tables = opened["tables"].to_string();
    ensure!(tables.contains(NOTES), "the snapshot has {tables}");
    send_side_database_request(stack, Method::POST, "/copy", json!({"tables": [NOTES]})).await?;
    let copied = wait_for_side_database(stack, "open").await?["lastCopy"].clone();
    ensure!(copied.get("error").is_none_or(Value::is_null), "{copied}");
    let restored = stack.web.list_titles(&stack.owner_token()).await?;
    ensure!(restored == rows, "there were {rows:?}, now {restored:?}");
    send_side_database_request(stack, Method::DELETE, "", Value::Null).await?;
    wait_for_side_database(stack, "closed").await?;
    let leftover = vm.run(LIST_EXTRA_DATABASES, SHORT_TIMEOUT).await?.into_stdout()?;
    ensure!(leftover.trim().is_empty(), "leftover databases: {leftover}");
    let inserted = &copied["tables"][0]["inserted"];
    Ok(((), format!("{} rows deleted; {inserted} restored from {}", rows.len(), opened["key"])))
}

async fn send_side_database_request(stack: &Stack, method: Method, path: &str, body: Value) -> Result<()> {
    let request =
        stack.web.request(method, &format!("/api/side-database{path}")).bearer_auth(stack.owner_token());
    let request = if body.is_null() { request } else { request.json(&body) };
    let response = request.send().await?;
    let (status, body) = (response.status(), response.text().await?);
    ensure!(status == 202, "{path}: {status} {body}");
    Ok(())
}

/// Waits until nothing is pending and the side database has this status.
async fn wait_for_side_database(stack: &Stack, status: &str) -> Result<Value> {
    eventually(&format!("the side database is {status}"), BOOT_TIMEOUT + Duration::from_secs(60), || async {
        let request = stack.web.request(Method::GET, "/api/side-database").bearer_auth(stack.owner_token());
        let state: Value = request.send().await?.error_for_status()?.json().await?;
        ensure!(state["status"] != "failed", "{state}");
        ensure!(state["status"] == status && state["pending"].is_null(), "the side database is {state}");
        Ok(state)
    })
    .await
}

/// Exports everything as one archive, deletes the rows and files, and imports the archive on the same machine.
pub async fn export_and_import(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let rows = wait_until_served(stack).await?;
    ensure!(!rows.is_empty(), "there are no rows: run the step `use` first");
    let export = "install -d -o svc -g svc /home/svc/home/projects && echo mine >/home/svc/home/projects/file && \
                  chown svc:svc /home/svc/home/projects/file && rm -f /var/backups/ada.tar && \
                  /opt/svc/bin/svc-db-backup export --output /var/backups/ada.tar";
    let exported = vm.run(export, LONG_TIMEOUT).await?.into_stdout().context("export")?;
    vm.run("rm -r /home/svc/home/projects", SHORT_TIMEOUT).await?.into_stdout()?;
    let delete =
        json!({"action": "delete", "app": "notes", "table": "notes", "filter": {"title": {"ne": ""}}});
    stack.web.call_bridge(&stack.owner_token(), &delete).await?;
    let import = vm
        .run("/opt/svc/bin/svc-restore import /var/backups/ada.tar", LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("import")?;
    let restored = eventually("the rows are restored", BOOT_TIMEOUT, || async {
        let restored = stack.web.list_titles(&stack.owner_token()).await?;
        ensure!(restored == rows, "there were {rows:?}, now {restored:?}");
        Ok(restored)
    })
    .await?;
    let inspect = "stat -c '%U:%G %n' /home/svc/home/projects/file /home/svc/home/system/logs; cat /home/svc/home/projects/file; \
                systemctl --failed --no-legend; rm -rf /var/backups/ada.tar /home/svc/home/.before-import-* \
                /home/svc/home/system/.before-import-*";
    let report = vm.run(inspect, SHORT_TIMEOUT).await?.into_stdout()?;
    let expected_lines =
        ["svc:svc /home/svc/home/projects/file", "svc-gateway:svc /home/svc/home/system/logs", "mine"];
    ensure!(expected_lines.iter().all(|line| report.contains(line)), "{report}");
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("backup after the import")?;
    ensure!(import.contains("restarted svc-gateway"), "{import}");
    Ok((
        (),
        format!("{}; {} rows and the files are restored with their owners", exported.trim(), restored.len()),
    ))
}

//! The owner's data: a store that is away for two backups, a table that comes back out of an earlier snapshot, everything as
//! one archive.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::Method;
use serde_json::{Value, json};

use super::faults::{BACKUP, LONG, SHORT, serves_again, verified};
use super::life::UP;
use crate::s3::{Fault, Rule};
use crate::story::{MachineRecord, Stack, eventually};

/// Databases beside the owner's that programs of ours have made.
pub(super) const BESIDE: &str = r#"
url=$(sed -n 's/^DATABASE_URL=//p' /opt/svc/env/host.env | tr -d '"')
PGPASSWORD=$(echo "$url" | sed 's|.*://[^:]*:\([^@]*\)@.*|\1|') /opt/svc/runtime/postgres/bin/psql -v ON_ERROR_STOP=1 -qh 127.0.0.1 \
  -U postgres -d svc -Atc "select datname from pg_database where datname ~ '^svc_'"
"#;

/// Two backups find no store: exit code, record, metrics, doctor and fleet say so, and the pointer names the last good one.
pub async fn store_away(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    on.run(BACKUP, LONG).await?.success().context("a backup before")?;
    let before = verified(stack)?;
    let away = stack.store.fault(Rule::new(Fault::Refuse).key("/system/db/").always());
    for nth in 1..=2 {
        let failed = on.run(BACKUP, LONG).await?;
        ensure!(!failed.status.success(), "backup {nth} succeeded without a store");
    }
    let code = on.run("systemctl show -P ExecMainStatus svc-db-backup.service", SHORT).await?.success()?;
    ensure!(code.trim() == "69", "it ended with {}", code.trim());
    let lines = on.run("tail -n 2 /home/svc/home/system/logs/backup.jsonl", SHORT).await?.success()?;
    let failed = lines.lines().filter(|line| line.contains(r#""status":"error""#)).count();
    ensure!(failed == 2, "backup.jsonl has {lines}");
    let metrics = "curl -sS --unix-socket /run/svc/gateway/gateway.sock http://localhost/metrics | grep ^svc_backup_last_run_success";
    let metrics = on.run(metrics, SHORT).await?.success()?;
    ensure!(metrics.trim().ends_with(" 0"), "/metrics says {metrics}");
    let doctor = on.run("/opt/svc/bin/svcctl doctor host", LONG).await?;
    let is_it = |line: &str| line.split_whitespace().take(2).eq(["problem", "backup"]);
    ensure!(doctor.stdout.lines().any(is_it), "doctor does not see it: {}", doctor.stdout);
    eventually("the fleet says so", UP, || fleet_says(stack, true)).await?;
    ensure!(stack.slot.pointer(&stack.store)? == before, "a failed backup moved the pointer");
    let asked = away.hits();
    stack.store.heal();
    verified(stack)?;
    on.run(BACKUP, LONG).await?.success().context("the backup after")?;
    ensure!(verified(stack)?["seq"].as_u64() > before["seq"].as_u64(), "the pointer did not move");
    eventually("the fleet is content again", UP, || fleet_says(stack, false)).await?;
    let said = "two backups ended with 69; record, metrics, doctor and fleet say so, the pointer stayed";
    Ok(((), format!("{said}; {asked} calls refused; the next one is good")))
}

async fn fleet_says(stack: &Stack, expected: bool) -> Result<()> {
    let fleet: Value = stack.svcctl(&["--json", "fleet"]).await?.success()?.json()?;
    let told = fleet["attention"].to_string();
    ensure!(told.contains("backup_failing") == expected, "the fleet says {told}");
    Ok(())
}

/// The owner deletes all notes, opens the last snapshot beside, and takes them back, through the router.
pub async fn side_database(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    const NOTES: &str = "app_notes.notes";
    let on = stack.provider.machine(&machine.server)?;
    let rows = serves_again(stack).await?;
    ensure!(!rows.is_empty(), "there is nothing to lose; the act `use` comes before");
    on.run(BACKUP, LONG).await?.success().context("a backup before")?;
    let gone = json!({"action": "delete", "app": "notes", "table": "notes", "filter": {"title": {"ne": ""}}});
    stack.web.bridge(&stack.owner(), &gone).await?;
    ensure!(stack.web.titles(&stack.owner()).await?.is_empty(), "there are rows left");
    call(stack, Method::POST, "", json!({})).await?;
    let opened = until(stack, "open").await?;
    let known = opened["tables"].to_string();
    ensure!(known.contains(NOTES), "the snapshot has {known}");
    call(stack, Method::POST, "/copy", json!({"tables": [NOTES]})).await?;
    let copied = until(stack, "open").await?["lastCopy"].clone();
    ensure!(copied.get("error").is_none_or(Value::is_null), "{copied}");
    let back = stack.web.titles(&stack.owner()).await?;
    ensure!(back == rows, "there were {rows:?}, now {back:?}");
    call(stack, Method::DELETE, "", Value::Null).await?;
    until(stack, "closed").await?;
    let left = on.run(BESIDE, SHORT).await?.success()?;
    ensure!(left.trim().is_empty(), "it leaves {left}");
    let inserted = &copied["tables"][0]["inserted"];
    Ok(((), format!("{} rows deleted; {inserted} came back out of {}", rows.len(), opened["key"])))
}

async fn call(stack: &Stack, method: Method, path: &str, body: Value) -> Result<()> {
    let request = stack.web.request(method, &format!("/api/side-database{path}")).bearer_auth(stack.owner());
    let request = if body.is_null() { request } else { request.json(&body) };
    let answer = request.send().await?;
    let (status, said) = (answer.status(), answer.text().await?);
    ensure!(status == 202, "{path}: {status} {said}");
    Ok(())
}

/// Nothing is pending, and the side database is so.
async fn until(stack: &Stack, status: &str) -> Result<Value> {
    eventually(&format!("the side database is {status}"), UP + Duration::from_secs(60), || async {
        let request = stack.web.request(Method::GET, "/api/side-database").bearer_auth(stack.owner());
        let told: Value = request.send().await?.error_for_status()?.json().await?;
        ensure!(told["status"] != "failed", "{told}");
        ensure!(told["status"] == status && told["pending"].is_null(), "it is {told}");
        Ok(told)
    })
    .await
}

/// Everything as one archive, brought back on the same machine after it was lost: root's way, at the machine itself.
pub async fn archive(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let rows = serves_again(stack).await?;
    ensure!(!rows.is_empty(), "there is nothing to lose; the act `use` comes before");
    let export = "install -d -o svc -g svc /home/svc/home/projects && echo mine >/home/svc/home/projects/file && \
                  chown svc:svc /home/svc/home/projects/file && rm -f /var/backups/ada.tar && \
                  /opt/svc/bin/svc-db-backup export --output /var/backups/ada.tar";
    let said = on.run(export, LONG).await?.success().context("export")?;
    on.run("rm -r /home/svc/home/projects", SHORT).await?.success()?;
    let gone = json!({"action": "delete", "app": "notes", "table": "notes", "filter": {"title": {"ne": ""}}});
    stack.web.bridge(&stack.owner(), &gone).await?;
    let import = on
        .run("/opt/svc/bin/svc-restore import /var/backups/ada.tar", LONG)
        .await?
        .success()
        .context("import")?;
    let back = eventually("the rows are back", UP, || async {
        let back = stack.web.titles(&stack.owner()).await?;
        ensure!(back == rows, "there were {rows:?}, now {back:?}");
        Ok(back)
    })
    .await?;
    let look = "stat -c '%U:%G %n' /home/svc/home/projects/file /home/svc/home/system/logs; cat /home/svc/home/projects/file; \
                systemctl --failed --no-legend; rm -rf /var/backups/ada.tar /home/svc/home/.before-import-* \
                /home/svc/home/system/.before-import-*";
    let look = on.run(look, SHORT).await?.success()?;
    let owners =
        ["svc:svc /home/svc/home/projects/file", "svc-gateway:svc /home/svc/home/system/logs", "mine"];
    ensure!(owners.iter().all(|line| look.contains(line)), "{look}");
    on.run(BACKUP, LONG).await?.success().context("a backup after it")?;
    ensure!(import.contains("restarted svc-gateway"), "{import}");
    Ok(((), format!("{}; {} rows and the files are back, each its owner's", said.trim(), back.len())))
}

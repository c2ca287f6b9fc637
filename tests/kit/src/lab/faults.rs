//! What machines suffer: a dead database, a full disk, a wrong clock, a power cut at a bad moment.
//!
//! After each, what was acknowledged is there, and the machine serves again without anybody's help.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hex::encode;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::life::UP;
use crate::story::{MachineRecord, Stack, eventually};

pub(super) const SHORT: Duration = Duration::from_secs(60);
pub(super) const LONG: Duration = Duration::from_secs(400);
pub(super) const BACKUP: &str = "systemctl start svc-db-backup.service";
const GATEWAY: &str = "systemctl show -P MainPID svc-gateway.service";
const AFTERWARDS: &str = "after the full disk";
/// Large enough that a backup of it takes seconds.
const BALLAST: &str = r#"
url=$(sed -n 's/^DATABASE_URL=//p' /opt/svc/env/host.env | tr -d '"')
PGPASSWORD=$(echo "$url" | sed 's|.*://[^:]*:\([^@]*\)@.*|\1|') /opt/svc/runtime/postgres/bin/psql -v ON_ERROR_STOP=1 -qh 127.0.0.1 -U postgres -d svc \
  -c 'create table public.ballast as select g id, repeat(md5(random()::text), 8) t from generate_series(1, 400000) g'
"#;

/// The database's container is killed: the gateway stays, and answers again when the database does.
pub async fn database_killed(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let before = stack.web.titles(&stack.owner()).await?;
    let gateway = on.run(GATEWAY, SHORT).await?.success()?;
    on.run("podman kill --signal KILL svc-postgres", SHORT).await?.success()?;
    let killed = Instant::now();
    let after = serves_again(stack).await?;
    let seconds = killed.elapsed().as_secs_f64();
    ensure!(after == before, "there were {before:?}, now {after:?}");
    ensure!(on.run(GATEWAY, SHORT).await?.success()? == gateway, "the gateway was started again with it");
    Ok(((), format!("served again {seconds:.0} s later by the same gateway; {} rows", after.len())))
}

/// No block is left: writes are refused by the gateway, which stays, and nothing that was acknowledged is lost.
pub async fn disk_full(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    on.run(BACKUP, LONG).await?.success().context("a backup before")?;
    let pointer = verified(stack)?;
    let gateway = on.run(GATEWAY, SHORT).await?.success()?;
    // Blocks that are taken and not written; the last ones, which are kept for root, by writing.
    let fill = "fallocate -l $(($(df --output=avail -B1 / | tail -n 1) - 65536)) /filler; dd if=/dev/zero of=/filler2 bs=1M status=none; sync; true";
    on.run(fill, LONG).await?.success()?;
    let mut kept = Vec::new();
    let mut refused = None;
    for nth in 0..400 {
        let title = format!("full {nth:03}");
        match insert_large(stack, &title).await? {
            None => kept.push(title),
            Some(code) => {
                refused = Some(code);
                break;
            }
        }
    }
    let refused = refused.context("400 rows of 100 kB fit on a full disk")?;
    ensure!(refused == "database_unavailable", "the gateway says {refused}");
    let failed = on.run(BACKUP, LONG).await?;
    let now = stack.slot.pointer(&stack.store)?;
    ensure!(failed.status.success() || now == pointer, "a failed backup moved the pointer");
    verified(stack)?;
    on.run("rm /filler /filler2 && sync", LONG).await?.success()?;
    let after = serves_again(stack).await?;
    ensure!(on.run(GATEWAY, SHORT).await?.success()? == gateway, "the gateway was started again");
    let lost: Vec<&String> = kept.iter().filter(|title| !after.contains(title)).collect();
    ensure!(lost.is_empty(), "acknowledged and lost: {lost:?}");
    let owner = stack.owner();
    eventually("a row can be added again", UP, || stack.web.insert(&owner, AFTERWARDS)).await?;
    for title in &kept {
        forget(stack, title).await?;
    }
    forget(stack, AFTERWARDS).await?;
    on.run("systemctl reset-failed", SHORT).await?.success()?;
    Ok((
        (),
        format!("{} rows fitted, then {refused}; with room again all are there, same gateway", kept.len()),
    ))
}

/// The gateway's problem code where it refuses.
async fn insert_large(stack: &Stack, title: &str) -> Result<Option<String>> {
    let data = json!({"title": title, "body": "x".repeat(100_000), "pinned": false, "rank": 1});
    let call = json!({"action": "insert", "app": "notes", "table": "notes", "data": data});
    let answer = stack
        .web
        .request(reqwest::Method::POST, "/api/bridge/query")
        .bearer_auth(stack.owner())
        .json(&call)
        .send()
        .await?;
    if answer.status().is_success() {
        return Ok(None);
    }
    let problem: Value = answer.json().await.context("refused without a problem")?;
    Ok(Some(problem["code"].as_str().context("a problem without a code")?.to_owned()))
}

/// Ahead and back: the order of snapshots is not the clock's, and a store that takes no such time is told apart.
pub async fn clock_jump(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let seq = |pointer: &Value| pointer["seq"].as_u64().unwrap_or(0);
    on.run("systemctl stop systemd-timesyncd", SHORT).await?;
    on.run(BACKUP, LONG).await?.success().context("a backup before")?;
    let first = verified(stack)?;
    on.run("date -s '+8 minutes'", SHORT).await?.success()?;
    on.run(BACKUP, LONG).await?.success().context("a backup eight minutes ahead")?;
    let ahead = verified(stack)?;
    ensure!(seq(&ahead) > seq(&first), "the pointer stays at {first}");
    on.run("date -s '-8 minutes'", SHORT).await?.success()?;
    on.run(BACKUP, LONG).await?.success().context("a backup after that")?;
    let back = verified(stack)?;
    ensure!(seq(&back) > seq(&ahead), "the pointer stays at the snapshot of later: {back}");
    on.run("date -s '+1 day'", SHORT).await?.success()?;
    let refused = on.run(BACKUP, LONG).await?;
    let words =
        on.run("journalctl -u svc-db-backup.service -n 20 --no-pager -o cat", SHORT).await?.success()?;
    let doctor = on.run("/opt/svc/bin/svcctl doctor host", LONG).await?;
    on.run("date -s '-1 day'", SHORT).await?.success()?;
    ensure!(!refused.status.success(), "the store took a request of tomorrow");
    ensure!(words.contains("timedatectl"), "nobody can see why: {words}");
    let is_it = |line: &str| line.split_whitespace().take(2).eq(["problem", "clock"]);
    ensure!(doctor.stdout.lines().any(is_it), "doctor does not see it: {}", doctor.stdout);
    ensure!(verified(stack)? == back, "a refused backup moved the pointer");
    on.run(BACKUP, LONG).await?.success().context("a backup with the right time")?;
    serves_again(stack).await?;
    let order = format!("{} → {} → {}", seq(&first), seq(&ahead), seq(&back));
    Ok((
        (),
        format!(
            "8 minutes ahead and back: pointer {order}; a day ahead: refused, and doctor says so; served"
        ),
    ))
}

/// The power goes while the dump runs: the pointer names a whole snapshot, and the next backup works.
pub async fn power_cut_in_backup(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    on.run(BACKUP, LONG).await?.success().context("a backup before")?;
    let before = verified(stack)?;
    on.run(BALLAST, LONG).await?.success().context("make a database that takes a while")?;
    let rows = stack.web.titles(&stack.owner()).await?;
    let dumping = "systemctl start --no-block svc-db-backup.service; for n in $(seq 600); do pgrep -x pg_dump && exit 0; sleep 0.1; done; exit 1";
    on.run(dumping, LONG).await?.success().context("wait for the dump")?;
    stack.provider.kill_server(&machine.server).await?;
    let at_cut = verified(stack)?;
    ensure!(at_cut == before, "the pointer has moved before the dump was whole: {at_cut}");
    stack.provider.switch_on(&machine.server)?;
    let on_again = Instant::now();
    let after = serves_again(stack).await?;
    let seconds = on_again.elapsed().as_secs_f64();
    ensure!(after == rows, "there were {rows:?}, now {after:?}");
    on.run(BACKUP, LONG).await?.success().context("the next backup")?;
    let next = verified(stack)?;
    ensure!(next["seq"].as_u64() > before["seq"].as_u64(), "the next backup moved no pointer");
    let size = next["snapshot"]["sizeBytes"].as_u64().unwrap_or(0) >> 20;
    Ok((
        (),
        format!("served {seconds:.0} s after power-on, pointer as before; the next snapshot has {size} MiB"),
    ))
}

/// The pointer, whose snapshot is whole.
pub(super) fn verified(stack: &Stack) -> Result<Value> {
    let pointer = stack.slot.pointer(&stack.store)?;
    let key =
        pointer["snapshot"]["key"].as_str().with_context(|| format!("it names no snapshot: {pointer}"))?;
    let found = encode(Sha256::digest(stack.slot.read(&stack.store, key)?));
    ensure!(pointer["snapshot"]["sha256"] == found.as_str(), "{key} is not what the pointer says");
    Ok(pointer)
}

/// The rows, as soon as the machine answers.
pub async fn serves_again(stack: &Stack) -> Result<Vec<String>> {
    let owner = stack.owner();
    eventually("the owner is served again", UP, || stack.web.titles(&owner)).await
}

async fn forget(stack: &Stack, title: &str) -> Result<()> {
    let filter = json!({"title": title});
    let call = json!({"action": "delete", "app": "notes", "table": "notes", "filter": filter});
    let gone = stack.web.bridge(&stack.owner(), &call).await?;
    if gone["affected"] != 1 {
        bail!("{title} was there {} times", gone["affected"]);
    }
    Ok(())
}

//! Machine faults: a killed database, a full disk, a wrong clock, a power cut at a critical moment. After each fault,
//! acknowledged data is intact, and the machine recovers without intervention.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hex::encode;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::scenario::BOOT_TIMEOUT;
use kit::scenario::{MachineRecord, Stack, eventually};

pub(super) const SHORT_TIMEOUT: Duration = Duration::from_secs(60);
pub(super) const LONG_TIMEOUT: Duration = Duration::from_secs(400);
pub(super) const RUN_BACKUP: &str = "systemctl start svc-db-backup.service";
const PRINT_GATEWAY_PID: &str = "systemctl show -P MainPID svc-gateway.service";
const RECOVERY_TITLE: &str = "after the full disk";
/// A script that creates a table so large that its backup takes seconds.
const CREATE_LARGE_TABLE: &str = r#"
url=$(sed -n 's/^DATABASE_URL=//p' /opt/svc/env/host.env | tr -d '"')
PGPASSWORD=$(echo "$url" | sed 's|.*://[^:]*:\([^@]*\)@.*|\1|') /opt/svc/runtime/postgres/bin/psql -v ON_ERROR_STOP=1 -qh 127.0.0.1 -U postgres -d svc \
  -c 'create table public.large_table as select g id, repeat(md5(random()::text), 8) t from generate_series(1, 400000) g'
"#;

/// Kills the database's container: the gateway keeps running, and serves again once the database has restarted.
pub async fn kill_database(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let before = stack.web.list_titles(&stack.owner_token()).await?;
    let gateway = vm.run(PRINT_GATEWAY_PID, SHORT_TIMEOUT).await?.into_stdout()?;
    vm.run("podman kill --signal KILL svc-postgres", SHORT_TIMEOUT).await?.into_stdout()?;
    let killed = Instant::now();
    let after = wait_until_served(stack).await?;
    let seconds = killed.elapsed().as_secs_f64();
    ensure!(after == before, "the rows changed from {before:?} to {after:?}");
    ensure!(
        vm.run(PRINT_GATEWAY_PID, SHORT_TIMEOUT).await?.into_stdout()? == gateway,
        "the gateway was also restarted"
    );
    Ok(((), format!("served after {seconds:.0} s by the same gateway; {} rows", after.len())))
}

/// Fills the disk: the gateway rejects writes but keeps running, and no acknowledged row is lost.
pub async fn fill_disk(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("first backup")?;
    let pointer = verified_pointer(stack)?;
    let gateway = vm.run(PRINT_GATEWAY_PID, SHORT_TIMEOUT).await?.into_stdout()?;
    // Allocates blocks without writing them; then fills the blocks reserved for root by writing.
    let fill = "fallocate -l $(($(df --output=avail -B1 / | tail -n 1) - 65536)) /filler; dd if=/dev/zero of=/filler2 bs=1M status=none; sync; true";
    vm.run(fill, LONG_TIMEOUT).await?.into_stdout()?;
    let mut accepted = Vec::new();
    let mut problem_code = None;
    for nth in 0..400 {
        let title = format!("full {nth:03}");
        match insert_large_note(stack, &title).await? {
            None => accepted.push(title),
            Some(code) => {
                problem_code = Some(code);
                break;
            }
        }
    }
    let problem_code = problem_code.context("400 rows of 100 kB fit on a full disk")?;
    ensure!(problem_code == "database_unavailable", "the gateway returned {problem_code}");
    let backup = vm.run(RUN_BACKUP, LONG_TIMEOUT).await?;
    let current = stack.slot.read_pointer(&stack.store)?;
    ensure!(backup.status.success() || current == pointer, "a failed backup moved the pointer");
    verified_pointer(stack)?;
    vm.run("rm /filler /filler2 && sync", LONG_TIMEOUT).await?.into_stdout()?;
    let after = wait_until_served(stack).await?;
    ensure!(
        vm.run(PRINT_GATEWAY_PID, SHORT_TIMEOUT).await?.into_stdout()? == gateway,
        "the gateway was restarted"
    );
    let lost: Vec<&String> = accepted.iter().filter(|title| !after.contains(title)).collect();
    ensure!(lost.is_empty(), "acknowledged rows were lost: {lost:?}");
    let owner = stack.owner_token();
    eventually("a row can be added again", BOOT_TIMEOUT, || stack.web.insert_note(&owner, RECOVERY_TITLE))
        .await?;
    for title in &accepted {
        delete_note(stack, title).await?;
    }
    delete_note(stack, RECOVERY_TITLE).await?;
    vm.run("systemctl reset-failed", SHORT_TIMEOUT).await?.into_stdout()?;
    Ok((
        (),
        format!(
            "{} rows accepted, then {problem_code}; all are present after the space was freed, same gateway",
            accepted.len()
        ),
    ))
}

/// Inserts a 100 kB note; returns the gateway's problem code if it rejects the note.
async fn insert_large_note(stack: &Stack, title: &str) -> Result<Option<String>> {
    let data = json!({"title": title, "body": "x".repeat(100_000), "pinned": false, "rank": 1});
    let call = json!({"action": "insert", "app": "notes", "table": "notes", "data": data});
    let response = stack
        .web
        .request(reqwest::Method::POST, "/api/bridge/query")
        .bearer_auth(stack.owner_token())
        .json(&call)
        .send()
        .await?;
    if response.status().is_success() {
        return Ok(None);
    }
    let problem: Value = response.json().await.context("cannot parse the problem document")?;
    Ok(Some(problem["code"].as_str().context("the problem document has no code")?.to_owned()))
}

/// Moves the clock ahead and back: the order of snapshots does not depend on the clock, and a request that the store
/// rejects because of its time is reported.
pub async fn jump_clock(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let seq = |pointer: &Value| pointer["seq"].as_u64().unwrap_or(0);
    vm.run("systemctl stop systemd-timesyncd", SHORT_TIMEOUT).await?;
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("first backup")?;
    let first = verified_pointer(stack)?;
    vm.run("date -s '+8 minutes'", SHORT_TIMEOUT).await?.into_stdout()?;
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("a backup eight minutes ahead")?;
    let ahead = verified_pointer(stack)?;
    ensure!(seq(&ahead) > seq(&first), "the pointer did not move: {first}");
    vm.run("date -s '-8 minutes'", SHORT_TIMEOUT).await?.into_stdout()?;
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("backup after moving the clock back")?;
    let later = verified_pointer(stack)?;
    ensure!(seq(&later) > seq(&ahead), "the pointer did not move: {later}");
    vm.run("date -s '+1 day'", SHORT_TIMEOUT).await?.into_stdout()?;
    let refused = vm.run(RUN_BACKUP, LONG_TIMEOUT).await?;
    let journal = vm
        .run("journalctl -u svc-db-backup.service -n 20 --no-pager -o cat", SHORT_TIMEOUT)
        .await?
        .into_stdout()?;
    let doctor = vm.run("/opt/svc/bin/svcctl doctor host", LONG_TIMEOUT).await?;
    vm.run("date -s '-1 day'", SHORT_TIMEOUT).await?.into_stdout()?;
    ensure!(!refused.status.success(), "the store accepted a request from the future");
    ensure!(journal.contains("timedatectl"), "the journal does not explain the failure: {journal}");
    let is_clock_problem = |line: &str| line.split_whitespace().take(2).eq(["problem", "clock"]);
    ensure!(
        doctor.stdout.lines().any(is_clock_problem),
        "doctor does not report the clock: {}",
        doctor.stdout
    );
    ensure!(verified_pointer(stack)? == later, "a refused backup moved the pointer");
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("backup with the correct time")?;
    wait_until_served(stack).await?;
    let order = format!("{} → {} → {}", seq(&first), seq(&ahead), seq(&later));
    Ok((
        (),
        format!(
            "8 minutes ahead and back: pointer {order}; a day ahead: refused and reported by doctor; served"
        ),
    ))
}

/// Cuts the power during a dump: the pointer still names a complete snapshot, and the next backup works.
pub async fn cut_power_during_backup(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("first backup")?;
    let before = verified_pointer(stack)?;
    vm.run(CREATE_LARGE_TABLE, LONG_TIMEOUT).await?.into_stdout().context("cannot create a large table")?;
    let rows = stack.web.list_titles(&stack.owner_token()).await?;
    let start_dump = "systemctl start --no-block svc-db-backup.service; for n in $(seq 600); do pgrep -x pg_dump && exit 0; sleep 0.1; done; exit 1";
    vm.run(start_dump, LONG_TIMEOUT).await?.into_stdout().context("pg_dump did not start")?;
    stack.provider.kill_server(&machine.server).await?;
    let at_cut = verified_pointer(stack)?;
    ensure!(at_cut == before, "the pointer moved before the dump was complete: {at_cut}");
    stack.provider.power_on(&machine.server)?;
    let powered_on = Instant::now();
    let after = wait_until_served(stack).await?;
    let seconds = powered_on.elapsed().as_secs_f64();
    ensure!(after == rows, "the rows changed from {rows:?} to {after:?}");
    vm.run(RUN_BACKUP, LONG_TIMEOUT).await?.into_stdout().context("the next backup")?;
    let next = verified_pointer(stack)?;
    ensure!(next["seq"].as_u64() > before["seq"].as_u64(), "the next backup did not move the pointer");
    let size = next["snapshot"]["sizeBytes"].as_u64().unwrap_or(0) >> 20;
    Ok((
        (),
        format!(
            "served {seconds:.0} s after power-on, pointer unchanged; the next snapshot is {size} MiB in size"
        ),
    ))
}

/// Returns the pointer after checking the digest of its snapshot.
pub(super) fn verified_pointer(stack: &Stack) -> Result<Value> {
    let pointer = stack.slot.read_pointer(&stack.store)?;
    let key = pointer["snapshot"]["key"].as_str().with_context(|| format!("no snapshot in {pointer}"))?;
    let sha256 = encode(Sha256::digest(stack.slot.read(&stack.store, key)?));
    ensure!(pointer["snapshot"]["sha256"] == sha256.as_str(), "the digest of {key} differs from the pointer");
    Ok(pointer)
}

/// Waits until the machine is serving its owner; returns the titles of all notes.
pub async fn wait_until_served(stack: &Stack) -> Result<Vec<String>> {
    let owner = stack.owner_token();
    eventually("the owner is served", BOOT_TIMEOUT, || stack.web.list_titles(&owner)).await
}

async fn delete_note(stack: &Stack, title: &str) -> Result<()> {
    let filter = json!({"title": title});
    let call = json!({"action": "delete", "app": "notes", "table": "notes", "filter": filter});
    let deleted = stack.web.call_bridge(&stack.owner_token(), &call).await?;
    if deleted["affected"] != 1 {
        bail!("deleted {} rows with title {title}", deleted["affected"]);
    }
    Ok(())
}

//! Verification and drills detect damaged snapshots, and report intact ones as such. A database that lost its data does
//! not replace its snapshot.

use std::time::Duration;

use anyhow::{Context, Result};
use kit::s3::{Fault, FaultRule, S3Server};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use svc::host::system::lock::Lock;

use super::machine::{self, BUCKET, Machine, USER, path_str, tools_with_script, wait_until};

const CREATE_ROWS: &str = "CREATE ROLE app_t NOLOGIN; CREATE TABLE t (id int PRIMARY KEY, message text); ALTER TABLE t OWNER TO app_t; \
     INSERT INTO t SELECT n, md5(n::text) FROM generate_series(1, 20000) n";

/// Creates a machine with `count` snapshots. Returns the machine and the snapshots' keys.
async fn create_machine_with_snapshots(store: &S3Server, count: usize) -> Result<(Machine, Vec<String>)> {
    let machine = Machine::in_use(store, 1).await?;
    machine.client().await?.batch_execute(CREATE_ROWS).await?;
    let mut keys = Vec::new();
    for _ in 0..count {
        machine.run(&["svc-db-backup"])?.expect(0);
        let last = machine.backup_records()?.pop().context("no record")?;
        keys.push(last["key"].as_str().context("no key")?.to_owned());
        // The next snapshot has different content.
        let row = format!("INSERT INTO t VALUES ({}, 'more')", 20_000 + keys.len());
        machine.client().await?.batch_execute(&row).await?;
    }
    Ok((machine, keys))
}

fn object_key(key: &str) -> String {
    format!("{USER}/primary/{key}")
}

fn read_checks(machine: &Machine) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(machine.path("home/svc/home/system/logs/backup-checks.jsonl"))?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn read_last_check(machine: &Machine, kind: &str) -> Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(machine.path(&format!("var/lib/svc/last-{kind}.json")))?)?)
}

/// Stores a copy of the snapshot as if it had been taken at `time`. Returns the copy's key.
fn store_copy_taken_at(store: &S3Server, key: &str, time: &str) -> Result<String> {
    let copy_key = format!("system/db/snapshots/{time}-1.dump");
    let dump = store.read(BUCKET, &object_key(key)).context("the object is missing")?;
    let sidecar =
        store.read(BUCKET, &object_key(&format!("{key}.json"))).context("the sidecar is missing")?;
    store.write(BUCKET, &object_key(&copy_key), dump);
    let mut sidecar: Value = serde_json::from_slice(&sidecar)?;
    sidecar["key"] = copy_key.as_str().into();
    let taken_at = svc::store::key::taken_at(&copy_key).context("no time in the key")?;
    sidecar["takenAt"] = svc::clock::rfc3339_ms(taken_at).into();
    store.write(BUCKET, &object_key(&format!("{copy_key}.json")), sidecar.to_string());
    Ok(copy_key)
}

#[tokio::test]
async fn verify_detects_every_kind_of_damage() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, keys) = create_machine_with_snapshots(&store, 6).await?;
    let result = machine.run(&["svc-db-backup", "verify", "--all"])?.expect(0);
    assert!(result.stdout.contains(": 6 snapshots, "), "{}", result.stdout);

    let flipped = {
        let mut dump = store.read(BUCKET, &object_key(&keys[0])).context("the object is missing")?;
        let middle = dump.len() / 2;
        dump[middle] ^= 0x10;
        dump
    };
    store.write(BUCKET, &object_key(&keys[0]), flipped);
    let mut shorter = store.read(BUCKET, &object_key(&keys[1])).context("the object is missing")?;
    shorter.truncate(shorter.len() - 10);
    store.write(BUCKET, &object_key(&keys[1]), shorter);
    store.remove(BUCKET, &object_key(&keys[2]));
    store.write(BUCKET, &object_key(&format!("{}.json", keys[3])), "{}");
    // This snapshot gets the content of another, intact one.
    let intact_dump = store.read(BUCKET, &object_key(&keys[5])).context("the object is missing")?;
    store.write(BUCKET, &object_key(&keys[4]), intact_dump);

    let result = machine.run(&["svc-db-backup", "verify", "--all"])?.expect(65);
    let check = read_last_check(&machine, "verify")?;
    let mut damaged: Vec<_> = check["damaged"]
        .as_array()
        .context("no list of damaged snapshots")?
        .iter()
        .filter_map(Value::as_str)
        .collect();
    damaged.sort_unstable();
    assert_eq!(damaged, keys[..5], "{check}\n{}", result.stderr);
    assert_eq!((&check["status"], &check["snapshots"]), (&"error".into(), &1.into()), "{check}");
    for key in &keys[..5] {
        machine.run(&["svc-db-backup", "verify", key])?.expect(65);
    }
    machine.run(&["svc-db-backup", "verify", "--latest"])?.expect(0);
    let check = read_last_check(&machine, "verify")?;
    assert_eq!((&check["status"], &check["key"]), (&"success".into(), &keys[5].as_str().into()), "{check}");
    machine.run(&["svc-db-backup", "verify", "system/db/snapshots/../../x.dump"])?.expect(65);
    assert_eq!(read_checks(&machine)?.len(), 9, "there must be one line for each run");
    Ok(())
}

/// A restore needs exactly the snapshot that the pointer names: a different one under the same key counts as damage,
/// even if it is intact.
#[tokio::test]
async fn latest_snapshot_that_differs_from_pointer_is_damaged() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, keys) = create_machine_with_snapshots(&store, 2).await?;
    let time = keys[1].rsplit_once('/').and_then(|(_, name)| name.strip_suffix("-1.dump"));
    assert_eq!(store_copy_taken_at(&store, &keys[0], time.context("unexpected key")?)?, keys[1]);
    machine.run(&["svc-db-backup", "verify", &keys[1]])?.expect(0);
    let result = machine.run(&["svc-db-backup", "verify", "--latest"])?.expect(65);
    assert!(result.stderr.contains(&format!("{} is not usable", keys[1])), "{}", result.stderr);
    let check = read_last_check(&machine, "verify")?;
    assert_eq!((&check["key"], &check["damaged"][0]), (&keys[1].as_str().into(), &keys[1].as_str().into()));
    Ok(())
}

#[tokio::test]
async fn daily_share_of_snapshots_is_verified() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, keys) = create_machine_with_snapshots(&store, 1).await?;
    // The backup has just verified this snapshot, so it is not read again.
    let result = machine.run(&["svc-db-backup", "verify"])?.expect(0);
    assert!(result.stdout.contains(": 0 snapshots"), "{}", result.stdout);

    let mut old_keys = Vec::new();
    for day in 1..=9 {
        old_keys.push(store_copy_taken_at(&store, &keys[0], &format!("2026-01-{day:02}T00-00-00.000Z"))?);
    }
    let verify_within = [("VERIFY_WITHIN_DAYS", "10")];
    // Each of the ten snapshots is due within ten days. After downtime, one run verifies three days' share, oldest
    // first.
    let result = machine.run_with(&["svc-db-backup", "verify"], &verify_within)?.expect(0);
    assert!(result.stdout.contains(": 3 snapshots"), "{}", result.stdout);
    let dump = store.read(BUCKET, &object_key(&old_keys[3])).context("the object is missing")?;
    store.remove(BUCKET, &object_key(&old_keys[3]));
    let result = machine.run_with(&["svc-db-backup", "verify"], &verify_within)?.expect(65);
    assert!(result.stderr.contains(&old_keys[3]) && result.stderr.contains("1 of 3"), "{}", result.stderr);
    // The next run reads three others. It reports the damage without reading the damaged snapshot again.
    let result = machine.run_with(&["svc-db-backup", "verify"], &verify_within)?.expect(65);
    assert!(result.stderr.contains(&old_keys[3]) && result.stderr.contains("1 of 4"), "{}", result.stderr);
    store.write(BUCKET, &object_key(&old_keys[3]), dump);
    machine.run(&["svc-db-backup", "verify", &old_keys[3]])?.expect(0);
    let result = machine.run_with(&["svc-db-backup", "verify"], &verify_within)?.expect(0);
    assert!(result.stdout.contains(": 0 snapshots"), "{}", result.stdout);
    for invalid in ["0", "x"] {
        machine.run_with(&["svc-db-backup", "verify"], &[("VERIFY_WITHIN_DAYS", invalid)])?.expect(78);
    }
    Ok(())
}

#[tokio::test]
async fn store_failure_is_not_reported_as_damage() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, keys) = create_machine_with_snapshots(&store, 1).await?;
    // The download is interrupted twice, and resumes.
    store.add_fault(FaultRule::new(Fault::TruncateBody(20_000)).method("GET").key_suffix(".dump").times(2));
    machine.run(&["svc-db-backup", "verify", "--latest"])?.expect(0);
    store.heal();
    store.add_fault(FaultRule::new(Fault::Status(503)).method("GET").key_suffix(".dump").always());
    let short_timeout = [("RESTORE_STORE_DEADLINE_SECONDS", "1")];
    for args in [&["svc-db-backup", "verify", "--latest"][..], &["svc-db-backup", "drill"][..]] {
        machine.run_with(args, &short_timeout)?.expect(69);
    }
    let check = read_last_check(&machine, "verify")?;
    assert_eq!((&check["status"], check.get("damaged")), (&"error".into(), None), "{check}");
    assert_eq!(read_last_check(&machine, "drill")?["key"], keys[0].as_str());
    Ok(())
}

#[tokio::test]
async fn verify_continues_after_a_killed_tool() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, keys) = create_machine_with_snapshots(&store, 2).await?;
    store.remove(BUCKET, &object_key(&keys[0]));
    let marker = machine.path("begun");
    let script =
        format!("#!/bin/sh\nmkdir {} 2>/dev/null && kill -9 $$\nexec REAL \"$@\"\n", path_str(&marker));
    let tools = tools_with_script("pg_restore", &script)?;
    let env = [("SVC_PG_BIN_DIR", path_str(tools.path()))];
    // The newest snapshot is read first. Its verification is killed, so its state remains unknown.
    let result = machine.run_with(&["svc-db-backup", "verify", "--all"], &env)?.expect(70);
    assert!(result.stderr.contains("pg_restore was killed"), "{}", result.stderr);
    let check = read_last_check(&machine, "verify")?;
    assert_eq!((&check["snapshots"], &check["damaged"]), (&0.into(), &json!([keys[0]])), "{check}");
    machine.run_with(&["svc-db-backup", "verify", &keys[1]], &env)?.expect(0);
    Ok(())
}

#[tokio::test]
async fn unverifiable_snapshots_do_not_take_up_the_daily_share() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, keys) = create_machine_with_snapshots(&store, 1).await?;
    for day in 1..=4 {
        store_copy_taken_at(&store, &keys[0], &format!("2026-01-{day:02}T00-00-00.000Z"))?;
    }
    let verify_within = ("VERIFY_WITHIN_DAYS", "10");
    let tools = tools_with_script("pg_restore", "#!/bin/sh\nkill -9 $$\n")?;
    let env = [verify_within, ("SVC_PG_BIN_DIR", path_str(tools.path()))];
    // Each run reads three of the four overdue snapshots. The second run begins with the one that the first did not
    // read.
    machine.run_with(&["svc-db-backup", "verify"], &env)?.expect(70);
    let result = machine.run_with(&["svc-db-backup", "verify"], &[verify_within])?.expect(70);
    assert!(
        result.stderr.contains("1 snapshot could not be verified at the last attempt"),
        "{}",
        result.stderr
    );
    assert_eq!(read_last_check(&machine, "verify")?["snapshots"], 3);
    let result = machine.run_with(&["svc-db-backup", "verify"], &[verify_within])?.expect(0);
    assert!(result.stdout.contains(": 1 snapshot,"), "{}", result.stdout);
    Ok(())
}

/// Lists the databases, roles and files that a drill may have left behind.
async fn list_leftovers(machine: &Machine) -> Result<Vec<String>> {
    let mut leftovers: Vec<String> =
        machine.databases().await?.into_iter().filter(|name| name.starts_with("svc_")).collect();
    let sql = "SELECT rolname::text FROM pg_roles WHERE rolname ~ '^app_'";
    leftovers
        .extend(machine.client().await?.query(sql, &[]).await?.iter().map(|row| row.get::<_, String>(0)));
    let files = std::fs::read_dir(machine.path("var/lib/svc/drill"))?;
    leftovers.extend(files.flatten().map(|file| file.file_name().to_string_lossy().into_owned()));
    leftovers.sort_unstable();
    Ok(leftovers)
}

#[tokio::test]
async fn drill_restores_compares_and_cleans_up() -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    let result = machine.run(&["svc-db-backup", "drill"])?.expect(0);
    assert!(result.stdout.contains("no snapshot yet"), "{}", result.stdout);
    machine.client().await?.batch_execute(CREATE_ROWS).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    // A role in the snapshot that the machine no longer has is created only for the drill.
    machine.client().await?.batch_execute("REASSIGN OWNED BY app_t TO CURRENT_USER; DROP ROLE app_t").await?;

    let result = machine.run(&["svc-db-backup", "drill"])?.expect(0);
    assert!(result.stdout.contains("1 table, 20000 rows"), "{}", result.stdout);
    assert_eq!(list_leftovers(&machine).await?, ["lock"]);
    assert_eq!(read_last_check(&machine, "drill")?["status"], "success");

    let mut points = vec!["restore.roles", "restore.created", "restore.loaded", "restore.counted"];
    for point in svc::host::snapshots::backup::DRILL_FAILPOINTS {
        points.push(point);
    }
    for point in points {
        let kill = format!("{point}=return(kill)");
        machine.run_with(&["svc-db-backup", "drill"], &[("FAILPOINTS", &kill)])?.expect_killed();
        machine.run(&["svc-db-backup", "drill"])?.expect(0);
        assert_eq!(list_leftovers(&machine).await?, ["lock"], "after a kill at {point}");
    }
    for point in svc::host::snapshots::backup::VERIFY_FAILPOINTS {
        let kill = format!("{point}=return(kill)");
        machine.run_with(&["svc-db-backup", "verify", "--all"], &[("FAILPOINTS", &kill)])?.expect_killed();
        machine.run(&["svc-db-backup", "verify", "--all"])?.expect(0);
    }
    // The owner's database is unchanged.
    let rows = machine.client().await?.query_one("SELECT count(*) FROM t", &[]).await?.get::<_, i64>(0);
    assert_eq!(rows, 20000);
    Ok(())
}

#[tokio::test]
async fn drill_request_is_kept_if_its_run_is_stopped() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, _) = create_machine_with_snapshots(&store, 1).await?;
    let request = machine.path("var/lib/svc/requests/drill");
    svc::fsx::write_atomic(&request, b"{}", 0o600)?;
    let drill = ["svc-db-backup", "drill", "--request"];
    let lock = Lock::acquire(&machine.path("var/lib/svc/drill/lock"))?;
    let waiting = machine.spawn(&drill, &[])?;
    wait_until("the signal handler", || waiting.handles_sigterm()).await?;
    waiting.signal(Signal::SIGTERM)?;
    waiting.wait()?.expect(75);
    drop(lock);
    store.add_fault(
        FaultRule::new(Fault::Delay(Duration::from_secs(20))).method("GET").key_suffix(".dump").always(),
    );
    let running = machine.spawn(&drill, &[])?;
    wait_until("the lock", || Lock::is_held(&machine.path("var/lib/svc/drill/lock")).unwrap_or(false))
        .await?;
    running.signal(Signal::SIGTERM)?;
    running.wait()?.expect(75);
    assert!(request.exists(), "the request must be kept, so that the drill runs after the reboot");
    store.heal();
    machine.run(&drill)?.expect(0);
    assert!(!request.exists());
    Ok(())
}

#[tokio::test]
async fn snapshot_with_missing_rows_fails_the_drill() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, keys) = create_machine_with_snapshots(&store, 1).await?;
    let sidecar_key = format!("{}.json", object_key(&keys[0]));
    let sidecar = String::from_utf8(store.read(BUCKET, &sidecar_key).context("the sidecar is missing")?)?;
    store.write(BUCKET, &sidecar_key, sidecar.replace("\"rows\":20000", "\"rows\":20001"));
    let result = machine.run(&["svc-db-backup", "drill"])?.expect(65);
    assert!(result.stderr.contains("public.t: 20000 rows restored"), "{}", result.stderr);
    store.write(BUCKET, &sidecar_key, sidecar);
    let mut dump = store.read(BUCKET, &object_key(&keys[0])).context("the object is missing")?;
    let middle = dump.len() / 2;
    dump[middle] ^= 1;
    store.write(BUCKET, &object_key(&keys[0]), dump);
    machine.run(&["svc-db-backup", "drill"])?.expect(65);
    let check = read_last_check(&machine, "drill")?;
    assert_eq!((&check["status"], &check["key"]), (&"error".into(), &keys[0].as_str().into()), "{check}");
    assert_eq!(list_leftovers(&machine).await?, ["app_t", "lock"]);
    // A failed drill does not stop the hourly backups.
    machine.run(&["svc-db-backup"])?.expect(0);
    machine.run(&["svc-db-backup", "drill"])?.expect(0);
    Ok(())
}

/// Without the switch, root would create files that the unit cannot write.
#[tokio::test]
async fn check_run_by_root_switches_to_the_unit_user() -> Result<()> {
    const USER_ID: u32 = 54_321;
    if !nix::unistd::geteuid().is_root() {
        kit::skip::record("only root can run a process as another user");
        return Ok(());
    }
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute(CREATE_ROWS).await?;
    let mut pending = vec![machine.root.path().to_owned()];
    while let Some(path) = pending.pop() {
        std::os::unix::fs::lchown(&path, Some(USER_ID), Some(USER_ID))?;
        if path.is_dir() {
            pending.extend(std::fs::read_dir(&path)?.flatten().map(|entry| entry.path()));
        }
    }
    for args in
        [&["svc-db-backup"][..], &["svc-db-backup", "verify", "--all"][..], &["svc-db-backup", "drill"][..]]
    {
        machine.run(args)?.expect(0);
    }
    let created = ["last-backup.json", "backup.lock", "verified.json", "drill/lock", "last-drill.json"];
    for path in created.map(|name| machine.path("var/lib/svc").join(name)) {
        let owner = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(&path)?);
        assert_eq!(owner, USER_ID, "{}", path.display());
    }
    Ok(())
}

#[tokio::test]
async fn lost_database_does_not_replace_its_snapshot() -> Result<()> {
    let store = machine::start_store()?;
    let (machine, keys) = create_machine_with_snapshots(&store, 1).await?;
    let good = machine::read_pointer(&store).await?;
    // The tables that the gateway creates at startup are not the owner's data.
    let drop_data = "DROP TABLE t; CREATE SCHEMA svc; CREATE TABLE svc.apps (slug text); INSERT INTO svc.apps VALUES ('notes'); \
                CREATE TABLE notes (id int)";
    machine.client().await?.batch_execute(drop_data).await?;
    let result = machine.run(&["svc-db-backup"])?.expect(65);
    assert!(result.stderr.contains(&keys[0]) && result.stderr.contains("20000"), "{}", result.stderr);
    assert_eq!(machine::read_pointer(&store).await?, good);
    assert_eq!(store.uploads(BUCKET), Vec::<String>::new(), "the upload must be aborted");
    let record = machine.backup_records()?.pop().context("no record")?;
    assert_eq!((&record["status"], &record["stage"]), (&"error".into(), &"dump".into()), "{record}");
    machine.run(&["svc-db-backup", "run", "--allow-empty"])?.expect(0);
    assert_ne!(machine::read_pointer(&store).await?, good);
    // From now on, the empty database is the expected state.
    machine.run(&["svc-db-backup"])?.expect(0);
    machine.client().await?.batch_execute("INSERT INTO notes VALUES (1)").await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    Ok(())
}

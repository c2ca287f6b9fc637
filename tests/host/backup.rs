//! If a backup fails, the pointer still names a verified snapshot.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kit::s3::{Fault, FaultRule, S3Server};
use nix::sys::signal::Signal;
use svc::host::system::lock::Lock;
use svc::store::pointer::Fence;
use svc::store::pointer_io;
use svc::store::snapshot;

use super::machine::{self, BUCKET, Machine, USER, path_str, slot, tools_with_script, wait_until};

const CREATE_ROWS: &str = "CREATE TABLE t (id int); INSERT INTO t SELECT * FROM generate_series(1, 1000)";
/// Creates a table that is larger than one upload part.
const CREATE_LARGE_TABLE: &str = "CREATE TABLE noise AS SELECT decode(string_agg(md5(n::text || '-' || m), ''), \
     'hex') AS bytes FROM generate_series(1, 600) n, generate_series(1, 1000) m GROUP BY n";

fn list_snapshot_objects(store: &S3Server) -> Vec<String> {
    let objects = store.objects(BUCKET, &format!("{USER}/primary/system/db/snapshots/"));
    objects.into_iter().map(|object| object.key).collect()
}

async fn create_machine_with_tables(store: &S3Server, sql: &str) -> Result<Machine> {
    let machine = Machine::in_use(store, 1).await?;
    machine.client().await?.batch_execute(sql).await?;
    Ok(machine)
}

/// Asserts that the pointer is absent, or names a complete object with its sidecar.
async fn assert_pointer_valid(store: &S3Server) -> Result<()> {
    let has_pointer = machine::read_pointer(store).await?.is_some();
    match snapshot::find_latest(&machine::bucket(store)?, &slot()).await {
        Ok(_) | Err(snapshot::SnapshotUnusable::Absent) => Ok(()),
        // After an interrupted first backup, the slot does not count as empty.
        Err(snapshot::SnapshotUnusable::Damaged { reason, .. })
            if !has_pointer && reason.contains("even though snapshots") =>
        {
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

#[tokio::test]
async fn invalid_dump_is_never_stored() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, &format!("{CREATE_ROWS}; {CREATE_LARGE_TABLE}")).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let good = machine::read_pointer(&store).await?;
    let before = list_snapshot_objects(&store);
    let wrappers = [
        ("cut near the start", "REAL \"$@\" | head -c 300"),
        ("cut in the middle", "REAL \"$@\" | head -c 6000000"),
        ("cut near the end", "REAL \"$@\" | head -c -20"),
        ("empty", "exit 0"),
        ("not a dump", "echo hello"),
        (
            "corrupted in the middle",
            "REAL \"$@\" | { head -c 5000000; head -c 4000 >/dev/null; head -c 4000 /dev/zero; cat; }",
        ),
        ("a failed pg_dump", "REAL \"$@\"; exit 3"),
    ];
    for (name, script) in wrappers {
        let tools = tools_with_script("pg_dump", &format!("#!/bin/sh\n{script}\n"))?;
        let result = machine.run_with(&["svc-db-backup"], &[("SVC_PG_BIN_DIR", path_str(tools.path()))])?;
        assert_eq!(result.exit_code, Some(70), "{name}: {}", result.stderr);
        assert_eq!(list_snapshot_objects(&store), before, "{name}");
        assert_eq!(store.uploads(BUCKET), Vec::<String>::new(), "{name}: the upload must be aborted");
        assert_eq!(machine::read_pointer(&store).await?, good, "{name}");
        let record = machine.backup_records()?.pop().context("no record")?;
        assert_eq!(
            (&record["status"], &record["stage"]),
            (&"error".into(), &"dump".into()),
            "{name}: {record}"
        );
    }
    let tools = tools_with_script("pg_restore", "#!/bin/sh\ncat >/dev/null\nexit 1\n")?;
    machine.run_with(&["svc-db-backup"], &[("SVC_PG_BIN_DIR", path_str(tools.path()))])?.expect(70);
    assert_eq!(list_snapshot_objects(&store), before);
    Ok(())
}

/// Readers reject a sidecar larger than 1 MiB.
#[tokio::test]
async fn snapshot_with_oversized_sidecar_is_not_stored() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let (good, before) = (machine::read_pointer(&store).await?, list_snapshot_objects(&store));
    let create_roles =
        "DO $$ BEGIN FOR n IN 1..6000 LOOP EXECUTE format('CREATE ROLE role_%s', n); END LOOP; END $$";
    machine.client().await?.batch_execute(create_roles).await?;
    let result = machine.run(&["svc-db-backup"])?.expect(65);
    assert!(result.stderr.contains("drop roles or tables"), "{}", result.stderr);
    assert_eq!(list_snapshot_objects(&store), before);
    assert_eq!(store.uploads(BUCKET), Vec::<String>::new(), "the upload must be aborted");
    assert_eq!(machine::read_pointer(&store).await?, good);
    Ok(())
}

#[tokio::test]
async fn password_is_not_in_arguments_or_output() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    let args_dir = tempfile::tempdir()?;
    let script =
        format!("#!/bin/sh\ncat /proc/$$/cmdline > {}/args\nexec REAL \"$@\"\n", path_str(args_dir.path()));
    let tools = tools_with_script("pg_dump", &script)?;
    let result =
        machine.run_with(&["svc-db-backup"], &[("SVC_PG_BIN_DIR", path_str(tools.path()))])?.expect(0);
    let args = std::fs::read_to_string(args_dir.path().join("args"))?;
    assert!(args.contains("--snapshot="), "{args:?}");
    let password = machine.postgres().password();
    assert!(
        !args.contains(password) && !result.stderr.contains(password) && !result.stdout.contains(password)
    );
    Ok(())
}

#[tokio::test]
async fn transient_store_faults_are_retried() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_LARGE_TABLE).await?;
    let faults = [
        ("a part fails twice", FaultRule::new(Fault::Status(500)).query("partNumber=2").times(2)),
        ("a part's response is lost", FaultRule::new(Fault::LostReply).query("partNumber=1")),
        (
            "the completion's response is lost",
            FaultRule::new(Fault::LostReply).method("POST").query("uploadId="),
        ),
        (
            "the completion fails after taking effect",
            FaultRule::new(Fault::StatusAfterCommit(500)).method("POST").query("uploadId="),
        ),
        ("the pointer's response is lost", FaultRule::new(Fault::LostReply).method("PUT").key("db/latest")),
        (
            "the pointer's write fails after taking effect",
            FaultRule::new(Fault::StatusAfterCommit(503)).method("PUT").key("db/latest"),
        ),
        ("the sidecar's response is lost", FaultRule::new(Fault::LostReply).method("PUT").key(".dump.json")),
    ];
    for (seq, (name, rule)) in (1..).zip(faults) {
        let fault = store.add_fault(rule);
        let result = machine.run(&["svc-db-backup"])?;
        assert_eq!(result.exit_code, Some(0), "{name}: {}", result.stderr);
        assert!(fault.hits() > 0, "{name}: the fault was not triggered");
        let pointer = machine::read_pointer(&store).await?.context("there is no pointer")?;
        assert_eq!(pointer.seq, seq, "{name}: the pointer did not move exactly once");
        assert_pointer_valid(&store).await.context(name)?;
        store.heal();
    }
    Ok(())
}

#[tokio::test]
async fn backup_without_store_or_database_exits_with_69() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let good = machine::read_pointer(&store).await?;
    store.take_down();
    machine.run(&["svc-db-backup"])?.expect(69);
    store.bring_up()?;
    store.add_fault(FaultRule::new(Fault::Status(503)).method("PUT").key("db/latest").always());
    machine.run(&["svc-db-backup"])?.expect(69);
    store.heal();
    machine.postgres().stop().await?;
    machine.run(&["svc-db-backup"])?.expect(69);
    // The second failed backup had claimed its `seq` before its write to `latest` failed, and a claim is final.
    let moved = machine::read_pointer(&store).await?.context("there is no pointer")?;
    assert_eq!(Some(moved.seq), good.map(|good| good.seq + 1));
    assert_pointer_valid(&store).await?;
    let records = machine.backup_records()?;
    let statuses: Vec<_> =
        records.iter().map(|record| record["status"].as_str().unwrap_or_default()).collect();
    assert_eq!(statuses, ["success", "error", "error", "error"]);
    let last: serde_json::Value =
        serde_json::from_slice(&std::fs::read(machine.path("var/lib/svc/last-backup.json"))?)?;
    assert_eq!(last["status"], "error");
    Ok(())
}

#[tokio::test]
async fn replaced_machine_does_not_move_the_pointer() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let bucket = machine::bucket(&store)?;

    // The fence is written after the sidecar, and before the pointer would move.
    let running = machine.spawn(&["svc-db-backup"], &[("FAILPOINTS", "backup.sidecar=sleep(2000)")])?;
    wait_until("a second sidecar", || list_snapshot_objects(&store).len() == 4).await?;
    pointer_io::fence(
        &bucket,
        &slot(),
        &Fence::unsigned(svc::machine::epoch::Epoch(2), svc::machine::id::MachineId::new()),
    )
    .await?;
    let fenced = machine::read_pointer(&store).await?;
    let result = running.wait()?.expect(77);
    assert!(result.stderr.contains("fenced at epoch 2"), "{}", result.stderr);
    assert_eq!(machine::read_pointer(&store).await?, fenced);

    // Later runs detect the fence at the start, and create no dump.
    store.clear_requests();
    machine.run(&["svc-db-backup"])?.expect(77);
    assert!(!store.requests().iter().any(|request| request.method != "GET"), "{:?}", store.requests());

    svc::fsx::write_atomic(&machine.path("var/lib/svc/superseded.json"), b"{}", 0o644)?;
    let result = machine.run(&["svc-db-backup"])?.expect(77);
    assert!(result.stderr.contains("superseded"), "{}", result.stderr);
    assert_eq!(machine::read_pointer(&store).await?, fenced);
    Ok(())
}

#[tokio::test]
async fn concurrent_run_is_refused_and_requested_run_waits() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    let first = machine.spawn(&["svc-db-backup"], &[("FAILPOINTS", "backup.snapshot=sleep(1500)")])?;
    wait_until("the lock", || machine.path("var/lib/svc/backup.lock").exists()).await?;
    // The lock file is created and locked in two system calls.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let second = machine.run(&["svc-db-backup"])?.expect(75);
    assert!(second.stderr.contains("another backup is running"), "{}", second.stderr);

    let before_import = machine.spawn(&["svc-db-backup", "run-before-import"], &[])?;
    let request = machine.path("var/lib/svc/requests/backup");
    svc::fsx::write_atomic(&request, b"", 0o600)?;
    machine.run(&["svc-db-backup", "run", "--request"])?.expect(0);
    assert!(!request.exists(), "a served request must be removed");
    first.wait()?.expect(0);
    before_import.wait()?.expect(0);
    assert_eq!(machine.backup_records()?.len(), 3);
    assert_eq!(machine::read_pointer(&store).await?.context("there is no pointer")?.seq, 3);
    Ok(())
}

#[tokio::test]
async fn request_is_kept_if_run_is_stopped_waiting_for_lock() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    let request = machine.path("var/lib/svc/requests/backup");
    svc::fsx::write_atomic(&request, b"", 0o600)?;
    let lock = Lock::acquire(&machine.path("var/lib/svc/backup.lock"))?;
    let running = machine.spawn(&["svc-db-backup", "run", "--request"], &[])?;
    wait_until("the signal handler", || running.handles_sigterm()).await?;
    running.signal(Signal::SIGTERM)?;
    running.wait()?.expect(75);
    assert!(request.exists());
    drop(lock);
    machine.run(&["svc-db-backup", "run", "--request"])?.expect(0);
    assert!(!request.exists());
    Ok(())
}

#[tokio::test]
async fn killed_run_leaves_a_valid_pointer_and_next_run_succeeds() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    for (n, point) in (1_u64..).zip(svc::host::snapshots::backup::FAILPOINTS) {
        machine.client().await?.execute(&format!("INSERT INTO t VALUES ({})", 10_000 + n), &[]).await?;
        let kill = format!("{point}=return(kill)");
        machine.run_with(&["svc-db-backup"], &[("FAILPOINTS", &kill)])?.expect_killed();
        assert_pointer_valid(&store).await.with_context(|| format!("after {point}"))?;
        machine.run(&["svc-db-backup"])?.expect(0);
        let latest = snapshot::find_latest(&machine::bucket(&store)?, &slot()).await?;
        let sidecar = snapshot::read_sidecar(&machine::bucket(&store)?, &slot(), &latest).await?;
        assert_eq!(sidecar.tables[0].rows, 1000 + n, "after {point}");
        assert_eq!(store.uploads(BUCKET), Vec::<String>::new(), "after {point}: the upload must be aborted");
        assert_eq!(machine.backup_records()?.pop().context("no record")?["status"], "success");
    }
    Ok(())
}

#[tokio::test]
async fn failed_step_is_recorded_and_leaves_no_partial_snapshot() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    for point in svc::host::snapshots::backup::FAILPOINTS {
        let error = format!("{point}=return(error)");
        machine.run_with(&["svc-db-backup"], &[("FAILPOINTS", &error)])?.expect(70);
        assert_eq!(store.uploads(BUCKET), Vec::<String>::new(), "{point}");
        assert_pointer_valid(&store).await.with_context(|| format!("after {point}"))?;
    }
    assert_eq!(machine.backup_records()?.len(), svc::host::snapshots::backup::FAILPOINTS.len());
    Ok(())
}

#[tokio::test]
async fn unrecorded_backup_is_reported_and_not_repeated() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_ROWS).await?;
    // Records are never appended through a symbolic link.
    let logs = machine.path("home/svc/home/system/logs");
    std::fs::create_dir_all(&logs)?;
    std::os::unix::fs::symlink("elsewhere", logs.join("backup.jsonl"))?;
    let succeeded = machine.run(&["svc-db-backup", "run", "--retry"])?.expect(0);
    assert_eq!(list_snapshot_objects(&store).len(), 2, "there must be one dump and its sidecar");
    let failed =
        machine.run_with(&["svc-db-backup"], &[("FAILPOINTS", "backup.begin=return(error)")])?.expect(70);
    for stderr in [succeeded.stderr, failed.stderr] {
        assert!(stderr.contains("could not record the result of the backup"), "{stderr}");
    }
    Ok(())
}

#[tokio::test]
async fn client_encoding_of_the_database_does_not_fail_the_dump() -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    machine
        .client()
        .await?
        .batch_execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET client_encoding = latin1', current_database()); END $$; \
             CREATE TABLE prices (text text); INSERT INTO prices VALUES ('5 €')",
        )
        .await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    machine.run(&["svc-db-backup", "drill"])?.expect(0);
    Ok(())
}

/// The database of a machine that has not been restored yet must not become the latest snapshot.
#[tokio::test]
async fn backup_refuses_to_run_before_gate_opens() -> Result<()> {
    let store = machine::start_store()?;
    let old = create_machine_with_tables(&store, CREATE_ROWS).await?;
    old.run(&["svc-db-backup"])?.expect(0);
    let good = machine::read_pointer(&store).await?;
    let new = Machine::new(&store, 2).await?;
    new.run(&["svc-db-backup"])?.expect(75);
    assert_eq!(machine::read_pointer(&store).await?, good);
    Ok(())
}

#[tokio::test]
async fn termination_aborts_the_upload() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(&store, CREATE_LARGE_TABLE).await?;
    let request = machine.path("var/lib/svc/requests/backup");
    svc::fsx::write_atomic(&request, b"", 0o600)?;
    // A terminated run must not wait ten minutes for its next retry.
    let extra = [("FAILPOINTS", "backup.streaming=sleep(200)"), ("BACKUP_RETRY_SECONDS", "600")];
    for mode in ["--retry", "--request"] {
        let running = machine.spawn(&["svc-db-backup", "run", mode], &extra)?;
        wait_until("the upload", || !store.uploads(BUCKET).is_empty()).await?;
        let stop_requested = Instant::now();
        running.signal(Signal::SIGTERM)?;
        running.wait()?.expect(75);
        assert!(stop_requested.elapsed() < Duration::from_secs(20), "{mode}");
        assert_eq!(store.uploads(BUCKET), Vec::<String>::new(), "{mode}");
        assert_eq!(list_snapshot_objects(&store), Vec::<String>::new(), "{mode}");
        assert!(request.exists(), "{mode}: the request must be kept");
    }
    Ok(())
}

/// A backup whose dump exceeds 60 MiB holds only a few of its parts in memory at a time.
#[tokio::test]
async fn memory_does_not_grow_with_the_dump() -> Result<()> {
    let store = machine::start_store()?;
    let machine = create_machine_with_tables(
        &store,
        "CREATE TABLE big AS SELECT n, string_agg(sha512((n || '-' || m)::bytea), '') AS bytes \
         FROM generate_series(1, 1000) n, generate_series(1, 1000) m GROUP BY n",
    )
    .await?;
    // The store is slower than the dump, so parts queue up.
    store.add_fault(FaultRule::new(Fault::Delay(Duration::from_millis(100))).query("partNumber=").always());
    let running = machine.spawn(&["svc-db-backup"], &[])?;
    let peak_bytes = running.measure_peak_memory_bytes().await;
    running.wait()?.expect(0);
    let size_bytes = machine::read_pointer(&store)
        .await?
        .and_then(|p| p.snapshot)
        .context("the pointer names no snapshot")?
        .size_bytes;
    assert!(size_bytes > 60 << 20, "{size_bytes} bytes");
    assert!(peak_bytes < 32 << 20, "{peak_bytes} bytes resident");
    Ok(())
}

//! Runs `svc-db-backup` with a failing store, and checks the exit code, the line in `backup.jsonl` and the pointer, and
//! that no data is lost.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;
use kit::s3::{Fault, S3Server};

use super::super::super::credentials::CredentialPlatform;
use super::super::super::machine::{self, BUCKET, Machine, USER};
use super::super::snapshot_checker::SnapshotChecker;
use super::{
    Disruption, FaultFixture, expire_without_renewal, revoke_sessions, rule, single_rule, supersede_machine,
};

/// Creates a table that is larger than one upload part.
const CREATE_LARGE_TABLE: &str = "CREATE TABLE noise AS SELECT decode(string_agg(md5(n::text || '-' || m), ''), 'hex') AS bytes \
     FROM generate_series(1, 360) n, generate_series(1, 1000) m GROUP BY n";

/// The expected result of a run.
struct ExpectedRun {
    exit_code: i32,
    /// The stage in the `backup.jsonl` line.
    stage: &'static str,
    /// Part of the line's error.
    expected_error: &'static str,
}

/// The backup succeeds, and the pointer names its snapshot.
const SUCCESS: ExpectedRun = ExpectedRun { exit_code: 0, stage: "done", expected_error: "" };

fn unavailable(stage: &'static str) -> ExpectedRun {
    ExpectedRun { exit_code: 69, stage, expected_error: "the object store request for" }
}

fn fault_cases() -> Vec<(&'static str, Disruption, ExpectedRun)> {
    let pointer = |fault: Fault| rule(fault).key("db/latest");
    let pointer_writes = |fault: Fault| pointer(fault).method("PUT");
    let claim_writes = |fault: Fault| rule(fault).method("PUT").key("db/pointer-log");
    let sidecar = |fault: Fault| rule(fault).method("PUT").key(".dump.json");
    let parts = |fault: Fault| rule(fault).query("partNumber=");
    let upload_starts = |fault: Fault| rule(fault).method("POST").query("uploads");
    let upload_completions = |fault: Fault| rule(fault).method("POST").query("uploadId=");
    let clock = Fault::Code(403, "RequestTimeTooSkewed");
    vec![
        (
            "connections are refused",
            Disruption::Action(|fixture| fixture.store.take_down()),
            unavailable("gate"),
        ),
        ("connections are cut", single_rule(rule(Fault::Disconnect).always()), unavailable("gate")),
        ("slow responses", single_rule(rule(Fault::Delay(Duration::from_millis(250))).always()), SUCCESS),
        ("500 for everything", single_rule(rule(Fault::Status(500)).always()), unavailable("gate")),
        ("503 for everything", single_rule(rule(Fault::Status(503)).always()), unavailable("gate")),
        ("503 three times", single_rule(rule(Fault::Status(503)).after(2).times(3)), SUCCESS),
        (
            "the upload does not start",
            single_rule(upload_starts(Fault::Status(503)).always()),
            unavailable("dump"),
        ),
        ("every part upload fails", single_rule(parts(Fault::Status(500)).always()), unavailable("dump")),
        (
            "the connection for every part is cut",
            single_rule(parts(Fault::Disconnect).always()),
            unavailable("dump"),
        ),
        (
            "the upload is not completed",
            single_rule(upload_completions(Fault::Status(500)).always()),
            unavailable("upload"),
        ),
        (
            "the sidecar write fails",
            single_rule(sidecar(Fault::Status(503)).always()),
            unavailable("sideRecord"),
        ),
        (
            "the pointer claim fails",
            single_rule(claim_writes(Fault::Status(500)).always()),
            unavailable("pointer"),
        ),
        (
            "the pointer write fails",
            single_rule(pointer_writes(Fault::Status(500)).always()),
            unavailable("pointer"),
        ),
        ("no response to any pointer claim", single_rule(claim_writes(Fault::LostReply).always()), SUCCESS),
        (
            "an error after each pointer claim",
            single_rule(claim_writes(Fault::StatusAfterCommit(500)).always()),
            SUCCESS,
        ),
        (
            "no response to any completion",
            single_rule(upload_completions(Fault::LostReply).always()),
            SUCCESS,
        ),
        ("no response to three sidecar writes", single_rule(sidecar(Fault::LostReply).times(3)), SUCCESS),
        (
            "no response to any sidecar write",
            single_rule(sidecar(Fault::LostReply).always()),
            unavailable("sideRecord"),
        ),
        ("no response to any pointer write", single_rule(pointer_writes(Fault::LostReply).always()), SUCCESS),
        (
            "an error after each pointer write",
            single_rule(pointer_writes(Fault::StatusAfterCommit(500)).always()),
            SUCCESS,
        ),
        (
            "the pointer is truncated once",
            single_rule(pointer(Fault::TruncateBody(10)).method("GET")),
            SUCCESS,
        ),
        (
            "the pointer is always truncated",
            single_rule(pointer(Fault::TruncateBody(10)).method("GET").always()),
            unavailable("gate"),
        ),
        (
            "a different ETag for the pointer",
            single_rule(pointer(Fault::WrongEtag).method("GET").after(1)),
            SUCCESS,
        ),
        (
            "always a different ETag for the pointer",
            single_rule(pointer(Fault::WrongEtag).method("GET").always()),
            ExpectedRun {
                exit_code: 69,
                stage: "pointer",
                expected_error: "the pointer was changed by other writers 16 times in a row",
            },
        ),
        ("a different ETag for a part", single_rule(parts(Fault::WrongEtag)), unavailable("upload")),
        (
            "a different ETag for the dump",
            single_rule(rule(Fault::WrongEtag).method("HEAD").key_suffix(".dump").always()),
            SUCCESS,
        ),
        ("an old pointer is read", single_rule(pointer(Fault::StaleRead).method("GET").after(1)), SUCCESS),
        (
            "an old pointer is always read",
            single_rule(pointer(Fault::StaleRead).method("GET").always()),
            ExpectedRun {
                exit_code: 69,
                stage: "pointer",
                expected_error: "the pointer was changed by other writers 16 times in a row",
            },
        ),
        (
            "the clock is wrong",
            single_rule(rule(clock).always()),
            ExpectedRun { exit_code: 69, stage: "gate", expected_error: "because of this machine's clock" },
        ),
        ("credentials expired", Disruption::Action(|fixture| fixture.store.expire_sessions()), SUCCESS),
        (
            "credentials expired, without renewal",
            Disruption::Action(expire_without_renewal),
            ExpectedRun { exit_code: 69, stage: "gate", expected_error: "" },
        ),
        (
            "credentials revoked at the store",
            Disruption::Action(revoke_sessions),
            ExpectedRun { exit_code: 69, stage: "gate", expected_error: "the object store refused access" },
        ),
        (
            "credentials withdrawn by the platform",
            Disruption::Action(supersede_machine),
            ExpectedRun { exit_code: 77, stage: "gate", expected_error: "this machine has been replaced" },
        ),
    ]
}

/// Asserts that the last line in `backup.jsonl` matches.
fn assert_recorded(machine: &Machine, expected: &ExpectedRun) -> Result<()> {
    let line = machine.backup_records()?.pop().context("backup.jsonl is empty")?;
    let status = if expected.exit_code == 0 { "success" } else { "error" };
    ensure!((&line["status"], &line["stage"]) == (&status.into(), &expected.stage.into()), "{line}");
    let error = line["error"].as_str().unwrap_or_default();
    ensure!(
        error.contains(expected.expected_error) && error.is_empty() == (expected.exit_code == 0),
        "{line}"
    );
    let last: serde_json::Value =
        serde_json::from_slice(&std::fs::read(machine.path("var/lib/svc/last-backup.json"))?)?;
    ensure!(last == line, "last-backup.json is {last}");
    Ok(())
}

/// Returns the last claimed `seq`.
fn last_claimed_seq(store: &S3Server) -> u64 {
    let entries = store.objects(BUCKET, &format!("{USER}/primary/system/db/pointer-log/"));
    let seq = |key: &str| key.rsplit('/').next()?.strip_suffix(".json")?.parse::<u64>().ok();
    entries.iter().filter_map(|entry| seq(&entry.key)).max().unwrap_or(0)
}

async fn fault_fixture() -> Result<FaultFixture> {
    let store = machine::start_store()?;
    let platform = CredentialPlatform::start(&store).await?;
    let machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute(CREATE_LARGE_TABLE).await?;
    let fixture = FaultFixture { store, platform, machine };
    fixture.restore_normal_operation().await?;
    Ok(fixture)
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_under_store_faults_loses_no_data() -> Result<()> {
    let fixture = fault_fixture().await?;
    fixture.machine.run(&["svc-db-backup"])?.expect(0);
    // A stale read needs an older value.
    fixture.machine.run(&["svc-db-backup"])?.expect(0);
    let mut checker = SnapshotChecker::new(&fixture.store);
    checker.check()?;
    let cases = fault_cases();
    let case_count = cases.len() as u64;
    let mut lines = fixture.machine.backup_records()?.len();
    for (name, disruption, expected) in cases {
        let before = checker.seq();
        // Earlier runs may have claimed a `seq` without writing `latest`; the next successful run does so.
        let unpublished = last_claimed_seq(&fixture.store) - before;
        let result = fixture
            .run_disrupted(disruption, || fixture.machine.spawn(&["svc-db-backup"], &[]))
            .await
            .context(name)?;
        assert_eq!(result.exit_code, Some(expected.exit_code), "{name}: {}", result.stderr);
        assert_recorded(&fixture.machine, &expected).context(name)?;
        lines += 1;
        assert_eq!(fixture.machine.backup_records()?.len(), lines, "{name}: there must be one line per run");
        checker.check().context(name)?;
        let moves = if expected.exit_code == 0 { unpublished + 1 } else { 0 };
        assert_eq!(checker.seq(), before + moves, "{name}: unexpected `seq` in the pointer");
        assert_eq!(fixture.store.uploads(BUCKET), Vec::<String>::new(), "{name}: an upload is open");
    }
    fixture.machine.run(&["svc-db-backup"])?.expect(0);
    checker.check()?;
    Figures {
        faults_injected: case_count,
        snapshots_taken: checker.complete_count(),
        ..Figures::new("store faults during backups")
    }
    .record()
}

#[tokio::test(flavor = "multi_thread")]
async fn next_run_aborts_upload_that_was_left_open() -> Result<()> {
    let fixture = fault_fixture().await?;
    let rules = vec![
        rule(Fault::Status(503)).query("partNumber=2").always(),
        rule(Fault::Status(503)).method("DELETE").always(),
    ];
    fixture
        .run_disrupted(Disruption::Rules(rules), || fixture.machine.spawn(&["svc-db-backup"], &[]))
        .await?
        .expect(69);
    assert_eq!(fixture.store.uploads_with_parts(BUCKET).len(), 1);
    fixture.machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(fixture.store.uploads(BUCKET), Vec::<String>::new());
    assert!(!fixture.machine.path("var/lib/svc/open-uploads.json").exists());
    // A record of an unknown upload, or an invalid record, has no effect.
    let upload_record_with_key =
        |key: &str| format!(r#"{{"version":1,"uploads":[{{"key":"{key}","uploadId":"none"}}]}}"#);
    for upload_record in [
        "{".to_owned(),
        upload_record_with_key("user_1/primary/system/db/snapshots/x.dump"),
        upload_record_with_key("user_2/primary/x"),
        upload_record_with_key("../x"),
    ] {
        std::fs::write(fixture.machine.path("var/lib/svc/open-uploads.json"), &upload_record)?;
        let result = fixture.machine.run(&["svc-db-backup"])?;
        assert_eq!(result.exit_code, Some(0), "{upload_record}: {}", result.stderr);
    }
    let mut checker = SnapshotChecker::new(&fixture.store);
    checker.check()?;
    assert_eq!(checker.complete_count(), 5);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn store_outage_fails_only_the_runs_during_it() -> Result<()> {
    let fixture = fault_fixture().await?;
    fixture.machine.run(&["svc-db-backup"])?.expect(0);
    let mut checker = SnapshotChecker::new(&fixture.store);
    checker.check()?;
    fixture.store.take_down();
    for _ in 0..2 {
        fixture.machine.run(&["svc-db-backup"])?.expect(69);
        assert_recorded(&fixture.machine, &unavailable("gate"))?;
    }
    fixture.store.bring_up()?;
    checker.check()?;
    assert_eq!(checker.seq(), 1);
    fixture.machine.run(&["svc-db-backup"])?.expect(0);
    assert_recorded(&fixture.machine, &SUCCESS)?;
    checker.check()?;
    assert_eq!((checker.seq(), checker.complete_count()), (2, 2));
    Ok(())
}

//! `svc-db-backup` with a failing store: the exit code, the line of `backup.jsonl`, the pointer, and no loss of data.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;
use kit::s3::{Fault, S3Server};

use super::super::super::credentials::Platform;
use super::super::super::machine::{self, BUCKET, Machine, USER};
use super::super::witness::Witness;
use super::{Disruption, FaultScene, expire_without_renewal, one, revoke, rule, supersede};

/// A table larger than one part of an upload.
const CONTENT: &str = "CREATE TABLE noise AS SELECT decode(string_agg(md5(n::text || '-' || m), ''), 'hex') AS bytes \
     FROM generate_series(1, 360) n, generate_series(1, 1000) m GROUP BY n";

/// The expected end of a run.
struct ExpectedRun {
    exit: i32,
    /// The stage in the line of `backup.jsonl`.
    stage: &'static str,
    /// Part of the line's error.
    expected_error: &'static str,
}

/// The snapshot succeeds, and the pointer names it.
const SUCCESS: ExpectedRun = ExpectedRun { exit: 0, stage: "done", expected_error: "" };

fn unavailable(stage: &'static str) -> ExpectedRun {
    ExpectedRun { exit: 69, stage, expected_error: "the object store failed at" }
}

fn table() -> Vec<(&'static str, Disruption, ExpectedRun)> {
    let pointer = |fault: Fault| rule(fault).key("db/latest");
    let moves = |fault: Fault| pointer(fault).method("PUT");
    let claims = |fault: Fault| rule(fault).method("PUT").key("db/pointer-log");
    let side = |fault: Fault| rule(fault).method("PUT").key(".dump.json");
    let parts = |fault: Fault| rule(fault).query("partNumber=");
    let begins = |fault: Fault| rule(fault).method("POST").query("uploads");
    let completes = |fault: Fault| rule(fault).method("POST").query("uploadId=");
    let clock = Fault::Code(403, "RequestTimeTooSkewed");
    vec![
        ("connections are refused", Disruption::Action(|scene| scene.store.take_down()), unavailable("gate")),
        ("connections are cut", one(rule(Fault::Refuse).always()), unavailable("gate")),
        ("slow responses", one(rule(Fault::Delay(Duration::from_millis(250))).always()), SUCCESS),
        ("500 for everything", one(rule(Fault::Status(500)).always()), unavailable("gate")),
        ("503 for everything", one(rule(Fault::Status(503)).always()), unavailable("gate")),
        ("503 three times", one(rule(Fault::Status(503)).after(2).times(3)), SUCCESS),
        ("the upload does not start", one(begins(Fault::Status(503)).always()), unavailable("dump")),
        ("every part is refused", one(parts(Fault::Status(500)).always()), unavailable("dump")),
        ("the connection of every part is cut", one(parts(Fault::Refuse).always()), unavailable("dump")),
        ("the upload is not completed", one(completes(Fault::Status(500)).always()), unavailable("upload")),
        ("the side record is refused", one(side(Fault::Status(503)).always()), unavailable("sideRecord")),
        ("the pointer's claim is refused", one(claims(Fault::Status(500)).always()), unavailable("pointer")),
        ("the pointer's move is refused", one(moves(Fault::Status(500)).always()), unavailable("pointer")),
        ("no response to any pointer claim", one(claims(Fault::LostReply).always()), SUCCESS),
        ("an error after each pointer claim", one(claims(Fault::StatusAfterCommit(500)).always()), SUCCESS),
        ("no response to any completion", one(completes(Fault::LostReply).always()), SUCCESS),
        ("no response to the side record", one(side(Fault::LostReply).times(3)), SUCCESS),
        ("no response to any side record", one(side(Fault::LostReply).always()), unavailable("sideRecord")),
        ("no response to any pointer move", one(moves(Fault::LostReply).always()), SUCCESS),
        ("an error after each pointer move", one(moves(Fault::StatusAfterCommit(500)).always()), SUCCESS),
        ("the pointer is truncated once", one(pointer(Fault::TruncateBody(10)).method("GET")), SUCCESS),
        (
            "the pointer is always truncated",
            one(pointer(Fault::TruncateBody(10)).method("GET").always()),
            unavailable("gate"),
        ),
        ("another ETag of the pointer", one(pointer(Fault::WrongEtag).method("GET").after(1)), SUCCESS),
        (
            "always another ETag of the pointer",
            one(pointer(Fault::WrongEtag).method("GET").always()),
            ExpectedRun {
                exit: 69,
                stage: "pointer",
                expected_error: "the pointer was changed by other writers 16 times in a row",
            },
        ),
        ("another ETag of a part", one(parts(Fault::WrongEtag)), unavailable("upload")),
        (
            "another ETag of the dump",
            one(rule(Fault::WrongEtag).method("HEAD").key_ending(".dump").always()),
            SUCCESS,
        ),
        ("an old pointer is read", one(pointer(Fault::StaleRead).method("GET").after(1)), SUCCESS),
        (
            "an old pointer is always read",
            one(pointer(Fault::StaleRead).method("GET").always()),
            ExpectedRun {
                exit: 69,
                stage: "pointer",
                expected_error: "the pointer was changed by other writers 16 times in a row",
            },
        ),
        (
            "the clock is wrong",
            one(rule(clock).always()),
            ExpectedRun { exit: 69, stage: "gate", expected_error: "because of this machine's clock" },
        ),
        ("credentials expired", Disruption::Action(|scene| scene.store.expire_sessions()), SUCCESS),
        (
            "credentials expired, without renewal",
            Disruption::Action(expire_without_renewal),
            ExpectedRun { exit: 69, stage: "gate", expected_error: "" },
        ),
        (
            "credentials revoked at the store",
            Disruption::Action(revoke),
            ExpectedRun { exit: 69, stage: "gate", expected_error: "the object store refused access" },
        ),
        (
            "credentials withdrawn by the platform",
            Disruption::Action(supersede),
            ExpectedRun { exit: 77, stage: "gate", expected_error: "this machine has been replaced" },
        ),
    ]
}

/// Asserts that the last line of `backup.jsonl` matches.
fn assert_recorded(machine: &Machine, end: &ExpectedRun) -> Result<()> {
    let line = machine.backup_records()?.pop().context("a record")?;
    let status = if end.exit == 0 { "success" } else { "error" };
    ensure!((&line["status"], &line["stage"]) == (&status.into(), &end.stage.into()), "{line}");
    let error = line["error"].as_str().unwrap_or_default();
    ensure!(error.contains(end.expected_error) && error.is_empty() == (end.exit == 0), "{line}");
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

async fn fault_scene() -> Result<FaultScene> {
    let store = machine::store()?;
    let platform = Platform::start(&store).await?;
    let machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute(CONTENT).await?;
    let scene = FaultScene { store, platform, machine };
    scene.heal().await?;
    Ok(scene)
}

#[tokio::test(flavor = "multi_thread")]
async fn store_faults_end_backups_as_expected_without_data_loss() -> Result<()> {
    let scene = fault_scene().await?;
    scene.machine.run(&["svc-db-backup"])?.expect(0);
    // A stale read needs an older value.
    scene.machine.run(&["svc-db-backup"])?.expect(0);
    let mut witness = Witness::new(&scene.store);
    witness.check()?;
    let table = table();
    let rows = table.len() as u64;
    let mut lines = scene.machine.backup_records()?.len();
    for (name, disruption, end) in table {
        let before = witness.seq();
        // Claimed by a run that then could not write `latest`; the next run writes it.
        let unpublished = last_claimed_seq(&scene.store) - before;
        let ended = scene
            .run_disrupted(disruption, || scene.machine.spawn(&["svc-db-backup"], &[]))
            .await
            .context(name)?;
        assert_eq!(ended.code, Some(end.exit), "{name}: {}", ended.stderr);
        assert_recorded(&scene.machine, &end).context(name)?;
        lines += 1;
        assert_eq!(scene.machine.backup_records()?.len(), lines, "{name}: one line for one run");
        witness.check().context(name)?;
        let moves = if end.exit == 0 { unpublished + 1 } else { 0 };
        assert_eq!(witness.seq(), before + moves, "{name}: the pointer");
        assert_eq!(scene.store.uploads(BUCKET), Vec::<String>::new(), "{name}: an upload is open");
    }
    scene.machine.run(&["svc-db-backup"])?.expect(0);
    witness.check()?;
    Figures { faults_tried: rows, snapshots_taken: witness.completed(), ..Figures::new("store of backups") }
        .record()
}

#[tokio::test(flavor = "multi_thread")]
async fn unabortable_upload_is_abandoned_by_the_next_run() -> Result<()> {
    let scene = fault_scene().await?;
    let rules = vec![
        rule(Fault::Status(503)).query("partNumber=2").always(),
        rule(Fault::Status(503)).method("DELETE").always(),
    ];
    scene
        .run_disrupted(Disruption::Rules(rules), || scene.machine.spawn(&["svc-db-backup"], &[]))
        .await?
        .expect(69);
    assert_eq!(scene.store.uploads_with_parts(BUCKET).len(), 1);
    scene.machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(scene.store.uploads(BUCKET), Vec::<String>::new());
    assert!(!scene.machine.path("var/lib/svc/open-uploads.json").exists());
    // A record of an unknown upload, or an invalid record, has no effect.
    let note_of = |key: &str| format!(r#"{{"version":1,"uploads":[{{"key":"{key}","uploadId":"none"}}]}}"#);
    for note in [
        "{".to_owned(),
        note_of("user_1/primary/system/db/snapshots/x.dump"),
        note_of("user_2/primary/x"),
        note_of("../x"),
    ] {
        std::fs::write(scene.machine.path("var/lib/svc/open-uploads.json"), &note)?;
        let ended = scene.machine.run(&["svc-db-backup"])?;
        assert_eq!(ended.code, Some(0), "{note}: {}", ended.stderr);
    }
    let mut witness = Witness::new(&scene.store);
    witness.check()?;
    assert_eq!(witness.completed(), 5);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn long_store_outage_fails_only_the_runs_during_it() -> Result<()> {
    let scene = fault_scene().await?;
    scene.machine.run(&["svc-db-backup"])?.expect(0);
    let mut witness = Witness::new(&scene.store);
    witness.check()?;
    scene.store.take_down();
    for _ in 0..2 {
        scene.machine.run(&["svc-db-backup"])?.expect(69);
        assert_recorded(&scene.machine, &unavailable("gate"))?;
    }
    scene.store.bring_up()?;
    witness.check()?;
    assert_eq!(witness.seq(), 1);
    scene.machine.run(&["svc-db-backup"])?.expect(0);
    assert_recorded(&scene.machine, &SUCCESS)?;
    witness.check()?;
    assert_eq!((witness.seq(), witness.completed()), (2, 2));
    Ok(())
}

//! `svc-db-backup` before a store that fails: the exit code, the line of `backup.jsonl`, the pointer, and nothing lost.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::long::Figures;
use kit::s3::{Fault, S3Server};

use super::super::super::credentials::Platform;
use super::super::super::machine::{self, BUCKET, Machine, USER};
use super::super::witness::Witness;
use super::{Break, Field, expired_and_no_others, one, replaced, revoked, rule};

/// More than one part of an upload.
const CONTENT: &str = "CREATE TABLE noise AS SELECT decode(string_agg(md5(n::text || '-' || m), ''), 'hex') AS bytes \
     FROM generate_series(1, 360) n, generate_series(1, 1000) m GROUP BY n";

/// How a run ends.
struct End {
    exit: i32,
    /// Of the line in `backup.jsonl`.
    stage: &'static str,
    /// Words of the line's error.
    says: &'static str,
}

/// A snapshot, and the pointer names it.
const GOOD: End = End { exit: 0, stage: "done", says: "" };

fn unavailable(stage: &'static str) -> End {
    End { exit: 69, stage, says: "the object store failed at" }
}

fn table() -> Vec<(&'static str, Break, End)> {
    let pointer = |fault: Fault| rule(fault).key("db/latest");
    let moves = |fault: Fault| pointer(fault).method("PUT");
    let claims = |fault: Fault| rule(fault).method("PUT").key("db/pointer-log");
    let side = |fault: Fault| rule(fault).method("PUT").key(".dump.json");
    let parts = |fault: Fault| rule(fault).query("partNumber=");
    let begins = |fault: Fault| rule(fault).method("POST").query("uploads");
    let completes = |fault: Fault| rule(fault).method("POST").query("uploadId=");
    let clock = Fault::Code(403, "RequestTimeTooSkewed");
    vec![
        ("connections are refused", Break::Done(|field| field.store.down()), unavailable("gate")),
        ("connections are cut", one(rule(Fault::Refuse).always()), unavailable("gate")),
        ("slow", one(rule(Fault::Delay(Duration::from_millis(250))).always()), GOOD),
        ("500 for everything", one(rule(Fault::Status(500)).always()), unavailable("gate")),
        ("503 for everything", one(rule(Fault::Status(503)).always()), unavailable("gate")),
        ("503 now and then", one(rule(Fault::Status(503)).after(2).times(3)), GOOD),
        ("the upload does not begin", one(begins(Fault::Status(503)).always()), unavailable("dump")),
        ("no part arrives", one(parts(Fault::Status(500)).always()), unavailable("dump")),
        ("the connection of every part is cut", one(parts(Fault::Refuse).always()), unavailable("dump")),
        ("the upload is not completed", one(completes(Fault::Status(500)).always()), unavailable("upload")),
        ("the side record is not taken", one(side(Fault::Status(503)).always()), unavailable("sideRecord")),
        (
            "the pointer's claim is not taken",
            one(claims(Fault::Status(500)).always()),
            unavailable("pointer"),
        ),
        ("the pointer is not moved", one(moves(Fault::Status(500)).always()), unavailable("pointer")),
        ("no answer to the pointer's claim, ever", one(claims(Fault::LostReply).always()), GOOD),
        (
            "an error after the pointer's claim, ever",
            one(claims(Fault::StatusAfterCommit(500)).always()),
            GOOD,
        ),
        ("no answer to the completion, ever", one(completes(Fault::LostReply).always()), GOOD),
        ("no answer to the side record", one(side(Fault::LostReply).times(3)), GOOD),
        (
            "no answer to the side record, ever",
            one(side(Fault::LostReply).always()),
            unavailable("sideRecord"),
        ),
        ("no answer to the pointer's move, ever", one(moves(Fault::LostReply).always()), GOOD),
        ("an error after the pointer's move, ever", one(moves(Fault::StatusAfterCommit(500)).always()), GOOD),
        ("the pointer breaks off", one(pointer(Fault::TruncateBody(10)).method("GET")), GOOD),
        (
            "the pointer always breaks off",
            one(pointer(Fault::TruncateBody(10)).method("GET").always()),
            unavailable("gate"),
        ),
        ("another ETag of the pointer", one(pointer(Fault::WrongEtag).method("GET").after(1)), GOOD),
        (
            "always another ETag of the pointer",
            one(pointer(Fault::WrongEtag).method("GET").always()),
            End {
                exit: 69,
                stage: "pointer",
                says: "the pointer was changed by other writers 16 times in a row",
            },
        ),
        ("another ETag of a part", one(parts(Fault::WrongEtag)), unavailable("upload")),
        (
            "another ETag of the dump",
            one(rule(Fault::WrongEtag).method("HEAD").key_ending(".dump").always()),
            GOOD,
        ),
        ("an old pointer is read", one(pointer(Fault::StaleRead).method("GET").after(1)), GOOD),
        (
            "an old pointer is always read",
            one(pointer(Fault::StaleRead).method("GET").always()),
            End {
                exit: 69,
                stage: "pointer",
                says: "the pointer was changed by other writers 16 times in a row",
            },
        ),
        (
            "the clock is wrong",
            one(rule(clock).always()),
            End { exit: 69, stage: "gate", says: "because of this machine's clock" },
        ),
        ("credentials expired", Break::Done(|field| field.store.expire_sessions()), GOOD),
        (
            "credentials expired, and no others",
            Break::Done(expired_and_no_others),
            End { exit: 69, stage: "gate", says: "" },
        ),
        (
            "credentials revoked at the store",
            Break::Done(revoked),
            End { exit: 69, stage: "gate", says: "the object store refused access" },
        ),
        (
            "credentials withdrawn by the platform",
            Break::Done(replaced),
            End { exit: 77, stage: "gate", says: "this machine has been replaced" },
        ),
    ]
}

/// The last line of `backup.jsonl` is of a run that ended so.
fn recorded(machine: &Machine, end: &End) -> Result<()> {
    let line = machine.backup_records()?.pop().context("a record")?;
    let status = if end.exit == 0 { "success" } else { "error" };
    ensure!((&line["status"], &line["stage"]) == (&status.into(), &end.stage.into()), "{line}");
    let error = line["error"].as_str().unwrap_or_default();
    ensure!(error.contains(end.says) && error.is_empty() == (end.exit == 0), "{line}");
    let last: serde_json::Value =
        serde_json::from_slice(&std::fs::read(machine.path("var/lib/svc/last-backup.json"))?)?;
    ensure!(last == line, "heartbeat and gateway are told {last}");
    Ok(())
}

/// The `seq` that was claimed last.
fn claimed(store: &S3Server) -> u64 {
    let entries = store.objects(BUCKET, &format!("{USER}/primary/system/db/pointer-log/"));
    let seq = |key: &str| key.rsplit('/').next()?.strip_suffix(".json")?.parse::<u64>().ok();
    entries.iter().filter_map(|entry| seq(&entry.key)).max().unwrap_or(0)
}

async fn field() -> Result<Field> {
    let store = machine::store()?;
    let platform = Platform::start(&store).await?;
    let machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute(CONTENT).await?;
    let field = Field { store, platform, machine };
    field.heal().await?;
    Ok(field)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_of_the_store_has_its_end_and_costs_no_snapshot() -> Result<()> {
    let field = field().await?;
    field.machine.run(&["svc-db-backup"])?.expect(0);
    // A stale read needs something older than the first.
    field.machine.run(&["svc-db-backup"])?.expect(0);
    let mut witness = Witness::of(&field.store);
    witness.look()?;
    let table = table();
    let rows = table.len() as u64;
    let mut lines = field.machine.backup_records()?.len();
    for (name, spoil, end) in table {
        let before = witness.seq();
        // Claimed by a run that could not write `latest`: the next one does.
        let unpublished = claimed(&field.store) - before;
        let ended =
            field.spoilt(spoil, || field.machine.spawn(&["svc-db-backup"], &[])).await.context(name)?;
        assert_eq!(ended.code, Some(end.exit), "{name}: {}", ended.stderr);
        recorded(&field.machine, &end).context(name)?;
        lines += 1;
        assert_eq!(field.machine.backup_records()?.len(), lines, "{name}: one line for one run");
        witness.look().context(name)?;
        let moves = if end.exit == 0 { unpublished + 1 } else { 0 };
        assert_eq!(witness.seq(), before + moves, "{name}: the pointer");
        assert_eq!(field.store.uploads(BUCKET), Vec::<String>::new(), "{name}: an upload is open");
    }
    field.machine.run(&["svc-db-backup"])?.expect(0);
    witness.look()?;
    Figures { faults_tried: rows, snapshots_taken: witness.completed(), ..Figures::of("store of backups") }
        .tell()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_could_not_be_aborted_is_given_up_by_the_next_run() -> Result<()> {
    let field = field().await?;
    let rules = vec![
        rule(Fault::Status(503)).query("partNumber=2").always(),
        rule(Fault::Status(503)).method("DELETE").always(),
    ];
    field.spoilt(Break::Rules(rules), || field.machine.spawn(&["svc-db-backup"], &[])).await?.expect(69);
    assert_eq!(field.store.uploads_with_parts(BUCKET).len(), 1);
    field.machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(field.store.uploads(BUCKET), Vec::<String>::new());
    assert!(!field.machine.path("var/lib/svc/open-uploads.json").exists());
    // A note that leads nowhere, or is none, costs nothing.
    let of = |key: &str| format!(r#"{{"version":1,"uploads":[{{"key":"{key}","uploadId":"none"}}]}}"#);
    for note in
        ["{".to_owned(), of("user_1/primary/system/db/snapshots/x.dump"), of("user_2/primary/x"), of("../x")]
    {
        std::fs::write(field.machine.path("var/lib/svc/open-uploads.json"), &note)?;
        let ended = field.machine.run(&["svc-db-backup"])?;
        assert_eq!(ended.code, Some(0), "{note}: {}", ended.stderr);
    }
    let mut witness = Witness::of(&field.store);
    witness.look()?;
    assert_eq!(witness.completed(), 5);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_for_hours_costs_the_runs_of_these_hours() -> Result<()> {
    let field = field().await?;
    field.machine.run(&["svc-db-backup"])?.expect(0);
    let mut witness = Witness::of(&field.store);
    witness.look()?;
    field.store.down();
    for _ in 0..2 {
        field.machine.run(&["svc-db-backup"])?.expect(69);
        recorded(&field.machine, &unavailable("gate"))?;
    }
    field.store.up()?;
    witness.look()?;
    assert_eq!(witness.seq(), 1);
    field.machine.run(&["svc-db-backup"])?.expect(0);
    recorded(&field.machine, &GOOD)?;
    witness.look()?;
    assert_eq!((witness.seq(), witness.completed()), (2, 2));
    Ok(())
}

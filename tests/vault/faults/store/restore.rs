//! `svc-restore` before a store that fails: it opens the gate on all of a snapshot or not at all.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::long::Figures;
use kit::s3::Fault;

use super::super::super::credentials::Platform;
use super::super::super::gate::{self, SHORT, is_restored, is_untouched};
use super::super::witness::Witness;
use super::{Break, Field, expired_and_no_others, one, replaced, revoked, rule};

/// The exit code and words of what is said.
type End = (i32, &'static str);

const OPEN: End = (0, "");
const AWAY: End = (69, "nothing is known about the snapshot");
const NO_DUMP: End = (69, "the snapshot could not be read from the object store");

fn table() -> Vec<(&'static str, Break, End)> {
    let pointer = |fault: Fault| rule(fault).method("GET").key("db/latest");
    let side = |fault: Fault| rule(fault).method("GET").key(".dump.json");
    let look = |fault: Fault| rule(fault).method("HEAD").key_ending(".dump");
    let dump = |fault: Fault| rule(fault).method("GET").key_ending(".dump");
    let clock = Fault::Code(403, "RequestTimeTooSkewed");
    vec![
        ("connections are refused", Break::Done(|field| field.store.down()), AWAY),
        ("connections are cut", one(rule(Fault::Refuse).always()), AWAY),
        ("slow", one(rule(Fault::Delay(Duration::from_millis(250))).always()), OPEN),
        ("500 for everything", one(rule(Fault::Status(500)).always()), AWAY),
        ("503 for everything", one(rule(Fault::Status(503)).always()), AWAY),
        ("503 now and then", one(rule(Fault::Status(503)).after(1).times(3)), OPEN),
        ("the pointer is not read", one(pointer(Fault::Status(500)).always()), AWAY),
        ("the side record is not read", one(side(Fault::Status(500)).always()), AWAY),
        ("the dump is not looked at", one(look(Fault::Status(503)).always()), AWAY),
        ("the dump is not read", one(dump(Fault::Status(503)).always()), NO_DUMP),
        ("the answer with the dump is lost", one(dump(Fault::LostReply).times(2)), OPEN),
        ("the pointer breaks off", one(pointer(Fault::TruncateBody(20))), OPEN),
        ("the pointer always breaks off", one(pointer(Fault::TruncateBody(20)).always()), AWAY),
        ("the side record breaks off", one(side(Fault::TruncateBody(20)).times(2)), OPEN),
        ("the dump breaks off again and again", one(dump(Fault::TruncateBody(1 << 20)).times(9)), OPEN),
        ("not a byte of the dump comes", one(dump(Fault::TruncateBody(0)).always()), NO_DUMP),
        ("the dump is damaged on its way, once", one(dump(Fault::CorruptBody)), OPEN),
        (
            "the dump is always damaged on its way",
            one(dump(Fault::CorruptBody).always()),
            (70, "the SHA-256 of"),
        ),
        ("another ETag of everything", one(rule(Fault::WrongEtag).always()), OPEN),
        ("the clock is wrong", one(rule(clock).always()), (69, "because of this machine's clock")),
        ("credentials expired", Break::Done(|field| field.store.expire_sessions()), OPEN),
        ("credentials expired, and no others", Break::Done(expired_and_no_others), (69, "")),
        ("credentials revoked at the store", Break::Done(revoked), (69, "the object store refused access")),
        (
            "credentials withdrawn by the platform",
            Break::Done(replaced),
            (77, "this machine has been replaced"),
        ),
    ]
}

async fn field() -> Result<Field> {
    let (store, machine) = gate::lost_and_new().await?;
    let platform = Platform::start(&store).await?;
    let field = Field { store, platform, machine };
    field.heal().await?;
    Ok(field)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_of_the_store_opens_the_gate_on_all_or_not_at_all() -> Result<()> {
    let field = field().await?;
    let mut witness = Witness::of(&field.store);
    witness.look()?;
    let table = table();
    let rows = table.len() as u64;
    for (name, spoil, (exit, says)) in table {
        let ended =
            field.spoilt(spoil, || field.machine.spawn(&["svc-restore"], SHORT)).await.context(name)?;
        assert_eq!(ended.code, Some(exit), "{name}: {}", ended.stderr);
        ensure!(ended.stderr.contains(says), "{name}: {}", ended.stderr);
        witness.look().context(name)?;
        if exit == 0 {
            assert!(field.machine.marker() && is_restored(&field.machine).await?, "{name}");
            gate::reset(&field.machine).await?;
        } else {
            is_untouched(&field.machine, name).await?;
        }
    }
    field.machine.run(&["svc-restore"])?.expect(0);
    assert!(is_restored(&field.machine).await?);
    assert_eq!((witness.seq(), witness.completed()), (1, 1), "a restore writes nothing");
    Figures { faults_tried: rows, ..Figures::new("store of restores") }.record()
}

/// A store that shows an old state for a while: whatever it shows is whole, and absence is not believed lightly.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_pointer_leads_to_a_whole_snapshot_or_nowhere() -> Result<()> {
    let (store, old, new) = gate::old_and_new().await?;
    // Nothing was there before the first pointer.
    store.fault(rule(Fault::StaleRead).method("GET").key("db/latest").always());
    new.run_with(&["svc-restore"], SHORT)?.expect(70);
    is_untouched(&new, "no pointer is seen yet").await?;
    store.heal();

    old.client().await?.batch_execute("INSERT INTO kept VALUES (501)").await?;
    old.run(&["svc-db-backup"])?.expect(0);
    store.fault(rule(Fault::StaleRead).method("GET").key("db/latest").always());
    new.run(&["svc-restore"])?.expect(0);
    let added = "SELECT count(*) FROM kept WHERE id = 501";
    let added: i64 = new.client().await?.query_one(added, &[]).await?.get(0);
    assert_eq!((new.marker(), added), (true, 1), "the pointer's log shows what a stale `latest` hides");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_for_hours_is_waited_for_by_the_next_boot() -> Result<()> {
    let field = field().await?;
    field.store.down();
    for _ in 0..2 {
        field.machine.run_with(&["svc-restore"], SHORT)?.expect(69);
        is_untouched(&field.machine, "away").await?;
    }
    field.store.up()?;
    field.machine.run(&["svc-restore"])?.expect(0);
    assert!(field.machine.marker() && is_restored(&field.machine).await?);
    Ok(())
}

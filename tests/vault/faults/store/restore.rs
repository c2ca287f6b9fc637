//! `svc-restore` with a failing store: it opens the gate with the complete snapshot, or not at all.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;
use kit::s3::Fault;

use super::super::super::credentials::Platform;
use super::super::super::gate::{self, SHORT_DEADLINE, assert_untouched, is_restored};
use super::super::witness::Witness;
use super::{Disruption, FaultScene, expire_without_renewal, one, revoke, rule, supersede};

/// The exit code and part of the message.
type ExpectedRestore = (i32, &'static str);

const OPEN: ExpectedRestore = (0, "");
const UNAVAILABLE: ExpectedRestore = (69, "the state of the snapshot is unknown");
const NO_DUMP: ExpectedRestore = (69, "the snapshot could not be read from the object store");

fn table() -> Vec<(&'static str, Disruption, ExpectedRestore)> {
    let pointer = |fault: Fault| rule(fault).method("GET").key("db/latest");
    let side = |fault: Fault| rule(fault).method("GET").key(".dump.json");
    let head = |fault: Fault| rule(fault).method("HEAD").key_ending(".dump");
    let dump = |fault: Fault| rule(fault).method("GET").key_ending(".dump");
    let clock = Fault::Code(403, "RequestTimeTooSkewed");
    vec![
        ("connections are refused", Disruption::Action(|scene| scene.store.take_down()), UNAVAILABLE),
        ("connections are cut", one(rule(Fault::Refuse).always()), UNAVAILABLE),
        ("slow responses", one(rule(Fault::Delay(Duration::from_millis(250))).always()), OPEN),
        ("500 for everything", one(rule(Fault::Status(500)).always()), UNAVAILABLE),
        ("503 for everything", one(rule(Fault::Status(503)).always()), UNAVAILABLE),
        ("503 three times", one(rule(Fault::Status(503)).after(1).times(3)), OPEN),
        ("the pointer cannot be read", one(pointer(Fault::Status(500)).always()), UNAVAILABLE),
        ("the side record cannot be read", one(side(Fault::Status(500)).always()), UNAVAILABLE),
        ("the HEAD of the dump fails", one(head(Fault::Status(503)).always()), UNAVAILABLE),
        ("the dump cannot be read", one(dump(Fault::Status(503)).always()), NO_DUMP),
        ("the response with the dump is lost", one(dump(Fault::LostReply).times(2)), OPEN),
        ("the pointer is truncated once", one(pointer(Fault::TruncateBody(20))), OPEN),
        ("the pointer is always truncated", one(pointer(Fault::TruncateBody(20)).always()), UNAVAILABLE),
        ("the side record is truncated twice", one(side(Fault::TruncateBody(20)).times(2)), OPEN),
        ("the dump is truncated nine times", one(dump(Fault::TruncateBody(1 << 20)).times(9)), OPEN),
        ("no byte of the dump arrives", one(dump(Fault::TruncateBody(0)).always()), NO_DUMP),
        ("the dump is damaged in transit once", one(dump(Fault::CorruptBody)), OPEN),
        (
            "the dump is always damaged in transit",
            one(dump(Fault::CorruptBody).always()),
            (70, "the SHA-256 of"),
        ),
        ("another ETag of everything", one(rule(Fault::WrongEtag).always()), OPEN),
        ("the clock is wrong", one(rule(clock).always()), (69, "because of this machine's clock")),
        ("credentials expired", Disruption::Action(|scene| scene.store.expire_sessions()), OPEN),
        ("credentials expired, without renewal", Disruption::Action(expire_without_renewal), (69, "")),
        (
            "credentials revoked at the store",
            Disruption::Action(revoke),
            (69, "the object store refused access"),
        ),
        (
            "credentials withdrawn by the platform",
            Disruption::Action(supersede),
            (77, "this machine has been replaced"),
        ),
    ]
}

async fn fault_scene() -> Result<FaultScene> {
    let (store, machine) = gate::lost_and_new().await?;
    let platform = Platform::start(&store).await?;
    let scene = FaultScene { store, platform, machine };
    scene.heal().await?;
    Ok(scene)
}

#[tokio::test(flavor = "multi_thread")]
async fn store_faults_never_open_the_gate_on_a_partial_restore() -> Result<()> {
    let scene = fault_scene().await?;
    let mut witness = Witness::new(&scene.store);
    witness.check()?;
    let table = table();
    let rows = table.len() as u64;
    for (name, disruption, (exit, expected_error)) in table {
        let ended = scene
            .run_disrupted(disruption, || scene.machine.spawn(&["svc-restore"], SHORT_DEADLINE))
            .await
            .context(name)?;
        assert_eq!(ended.code, Some(exit), "{name}: {}", ended.stderr);
        ensure!(ended.stderr.contains(expected_error), "{name}: {}", ended.stderr);
        witness.check().context(name)?;
        if exit == 0 {
            assert!(scene.machine.has_marker() && is_restored(&scene.machine).await?, "{name}");
            gate::reset(&scene.machine).await?;
        } else {
            assert_untouched(&scene.machine, name).await?;
        }
    }
    scene.machine.run(&["svc-restore"])?.expect(0);
    assert!(is_restored(&scene.machine).await?);
    assert_eq!((witness.seq(), witness.completed()), (1, 1), "a restore never writes to the store");
    Figures { faults_tried: rows, ..Figures::new("store of restores") }.record()
}

/// A store with stale reads: every visible state is consistent, and absence needs confirmation.
#[tokio::test(flavor = "multi_thread")]
async fn stale_pointer_restores_a_complete_snapshot_or_nothing() -> Result<()> {
    let (store, old, new) = gate::old_and_new().await?;
    // The state before the first pointer is empty.
    store.add_fault(rule(Fault::StaleRead).method("GET").key("db/latest").always());
    new.run_with(&["svc-restore"], SHORT_DEADLINE)?.expect(70);
    assert_untouched(&new, "no pointer is seen yet").await?;
    store.heal();

    old.client().await?.batch_execute("INSERT INTO kept VALUES (501)").await?;
    old.run(&["svc-db-backup"])?.expect(0);
    store.add_fault(rule(Fault::StaleRead).method("GET").key("db/latest").always());
    new.run(&["svc-restore"])?.expect(0);
    let added = "SELECT count(*) FROM kept WHERE id = 501";
    let added: i64 = new.client().await?.query_one(added, &[]).await?.get(0);
    assert_eq!((new.has_marker(), added), (true, 1), "the pointer's log reveals the stale `latest`");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn long_store_outage_is_retried_by_the_next_boot() -> Result<()> {
    let scene = fault_scene().await?;
    scene.store.take_down();
    for _ in 0..2 {
        scene.machine.run_with(&["svc-restore"], SHORT_DEADLINE)?.expect(69);
        assert_untouched(&scene.machine, "store down").await?;
    }
    scene.store.bring_up()?;
    scene.machine.run(&["svc-restore"])?.expect(0);
    assert!(scene.machine.has_marker() && is_restored(&scene.machine).await?);
    Ok(())
}

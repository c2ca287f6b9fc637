//! With a failing store, `svc-restore` opens the gate with the complete snapshot, or not at all.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;
use kit::s3::Fault;

use super::super::super::credentials::CredentialPlatform;
use super::super::super::gate::{self, SHORT_DEADLINE, assert_untouched, is_restored};
use super::super::snapshot_checker::SnapshotChecker;
use super::{
    Disruption, FaultFixture, expire_without_renewal, revoke_sessions, rule, single_rule, supersede_machine,
};

/// The exit code and part of the message.
type ExpectedRestore = (i32, &'static str);

const RESTORED: ExpectedRestore = (0, "");
const UNAVAILABLE: ExpectedRestore = (69, "the state of the snapshot is unknown");
const DUMP_UNREADABLE: ExpectedRestore = (69, "the snapshot could not be read from the object store");

fn fault_cases() -> Vec<(&'static str, Disruption, ExpectedRestore)> {
    let pointer = |fault: Fault| rule(fault).method("GET").key("db/latest");
    let sidecar = |fault: Fault| rule(fault).method("GET").key(".dump.json");
    let head = |fault: Fault| rule(fault).method("HEAD").key_suffix(".dump");
    let dump = |fault: Fault| rule(fault).method("GET").key_suffix(".dump");
    let clock = Fault::Code(403, "RequestTimeTooSkewed");
    vec![
        ("connections are refused", Disruption::Action(|fixture| fixture.store.take_down()), UNAVAILABLE),
        ("connections are cut", single_rule(rule(Fault::Disconnect).always()), UNAVAILABLE),
        ("slow responses", single_rule(rule(Fault::Delay(Duration::from_millis(250))).always()), RESTORED),
        ("500 for everything", single_rule(rule(Fault::Status(500)).always()), UNAVAILABLE),
        ("503 for everything", single_rule(rule(Fault::Status(503)).always()), UNAVAILABLE),
        ("503 three times", single_rule(rule(Fault::Status(503)).after(1).times(3)), RESTORED),
        ("the pointer cannot be read", single_rule(pointer(Fault::Status(500)).always()), UNAVAILABLE),
        ("the sidecar cannot be read", single_rule(sidecar(Fault::Status(500)).always()), UNAVAILABLE),
        ("a HEAD of the dump fails", single_rule(head(Fault::Status(503)).always()), UNAVAILABLE),
        ("the dump cannot be read", single_rule(dump(Fault::Status(503)).always()), DUMP_UNREADABLE),
        ("the response with the dump is lost", single_rule(dump(Fault::LostReply).times(2)), RESTORED),
        ("the pointer is truncated once", single_rule(pointer(Fault::TruncateBody(20))), RESTORED),
        (
            "the pointer is always truncated",
            single_rule(pointer(Fault::TruncateBody(20)).always()),
            UNAVAILABLE,
        ),
        ("the sidecar is truncated twice", single_rule(sidecar(Fault::TruncateBody(20)).times(2)), RESTORED),
        (
            "the dump is truncated nine times",
            single_rule(dump(Fault::TruncateBody(1 << 20)).times(9)),
            RESTORED,
        ),
        ("no byte of the dump arrives", single_rule(dump(Fault::TruncateBody(0)).always()), DUMP_UNREADABLE),
        ("the dump is corrupted in transit once", single_rule(dump(Fault::CorruptBody)), RESTORED),
        (
            "the dump is always corrupted in transit",
            single_rule(dump(Fault::CorruptBody).always()),
            (70, "the SHA-256 of"),
        ),
        ("a different ETag for everything", single_rule(rule(Fault::WrongEtag).always()), RESTORED),
        ("the clock is wrong", single_rule(rule(clock).always()), (69, "because of this machine's clock")),
        ("credentials expired", Disruption::Action(|fixture| fixture.store.expire_sessions()), RESTORED),
        ("credentials expired, without renewal", Disruption::Action(expire_without_renewal), (69, "")),
        (
            "credentials revoked at the store",
            Disruption::Action(revoke_sessions),
            (69, "the object store refused access"),
        ),
        (
            "credentials withdrawn by the platform",
            Disruption::Action(supersede_machine),
            (77, "this machine has been replaced"),
        ),
    ]
}

async fn fault_fixture() -> Result<FaultFixture> {
    let (store, machine) = gate::new_machine_after_loss().await?;
    let platform = CredentialPlatform::start(&store).await?;
    let fixture = FaultFixture { store, platform, machine };
    fixture.restore_normal_operation().await?;
    Ok(fixture)
}

#[tokio::test(flavor = "multi_thread")]
async fn store_faults_never_open_the_gate_on_a_partial_restore() -> Result<()> {
    let fixture = fault_fixture().await?;
    let mut checker = SnapshotChecker::new(&fixture.store);
    checker.check()?;
    let cases = fault_cases();
    let case_count = cases.len() as u64;
    for (name, disruption, (exit_code, expected_error)) in cases {
        let result = fixture
            .run_disrupted(disruption, || fixture.machine.spawn(&["svc-restore"], SHORT_DEADLINE))
            .await
            .context(name)?;
        assert_eq!(result.exit_code, Some(exit_code), "{name}: {}", result.stderr);
        ensure!(result.stderr.contains(expected_error), "{name}: {}", result.stderr);
        checker.check().context(name)?;
        if exit_code == 0 {
            assert!(fixture.machine.has_marker() && is_restored(&fixture.machine).await?, "{name}");
            gate::reset_machine(&fixture.machine).await?;
        } else {
            assert_untouched(&fixture.machine, name).await?;
        }
    }
    fixture.machine.run(&["svc-restore"])?.expect(0);
    assert!(is_restored(&fixture.machine).await?);
    assert_eq!((checker.seq(), checker.complete_count()), (1, 1), "a restore must never write to the store");
    Figures { faults_injected: case_count, ..Figures::new("store faults during restores") }.record()
}

/// A missing `latest` does not prove that there is no snapshot, and the pointer log shows that `latest` is stale.
#[tokio::test(flavor = "multi_thread")]
async fn restore_with_stale_pointer_is_complete_or_refused() -> Result<()> {
    let (store, old, new) = gate::old_and_new_machines().await?;
    // A stale read returns the state before the last write, when there was no pointer.
    store.add_fault(rule(Fault::StaleRead).method("GET").key("db/latest").always());
    new.run_with(&["svc-restore"], SHORT_DEADLINE)?.expect(70);
    assert_untouched(&new, "no pointer is visible").await?;
    store.heal();

    old.client().await?.batch_execute("INSERT INTO kept VALUES (501)").await?;
    old.run(&["svc-db-backup"])?.expect(0);
    store.add_fault(rule(Fault::StaleRead).method("GET").key("db/latest").always());
    new.run(&["svc-restore"])?.expect(0);
    let added = "SELECT count(*) FROM kept WHERE id = 501";
    let added: i64 = new.client().await?.query_one(added, &[]).await?.get(0);
    assert_eq!((new.has_marker(), added), (true, 1), "the pointer log must reveal the stale `latest`");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_succeeds_after_a_store_outage() -> Result<()> {
    let fixture = fault_fixture().await?;
    fixture.store.take_down();
    for _ in 0..2 {
        fixture.machine.run_with(&["svc-restore"], SHORT_DEADLINE)?.expect(69);
        assert_untouched(&fixture.machine, "store down").await?;
    }
    fixture.store.bring_up()?;
    fixture.machine.run(&["svc-restore"])?.expect(0);
    assert!(fixture.machine.has_marker() && is_restored(&fixture.machine).await?);
    Ok(())
}

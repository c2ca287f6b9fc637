//! Tests for the text views of machines, operations, accepted changes, the fleet, rollouts, backups and slots,
//! including colors and width.

use serde_json::{Value, json};

use super::test_data::{
    MACHINE, OTHER, failed_machine, from_json, operation, plain_view, running_machine, with_copies,
};
use super::*;
use svc_wire::change::{DeletedMachine, RecoveredMachine};

#[test]
fn list_shows_machines() {
    let mut stale = running_machine();
    stale["heartbeatAt"] = "2026-11-21T11:00:00Z".into();
    stale["lastBackup"] = json!({"status": "error", "error": "the store cannot be reached"});
    let page =
        from_json(json!({"machines": [running_machine(), failed_machine(), stale], "nextCursor": "abc"}));
    insta::assert_snapshot!(machine::list(&plain_view(), &page));
    assert_eq!(
        machine::list(&plain_view(), &from_json(json!({"machines": [], "nextCursor": null}))),
        "no machines\n"
    );
}

/// Text from a host or the provider may contain line breaks and control characters.
#[test]
fn multiline_text_stays_in_one_row() {
    let text = "no space left\n  next: delete\r\nsomething\u{1b}[2J";
    let mut failing = running_machine();
    failing["lastBackup"] = json!({"status": "error", "error": text});
    failing["failure"] = json!({"cause": "boot_reported", "stage": "restore", "message": text});
    failing["attention"] = json!([{"code": "snapshot_held", "detail": text}]);
    failing["operations"][0]["log"][1]["detail"] = text.into();
    failing["operations"][0]["state"] = "waiting".into();
    failing["operations"][0]["question"] = json!({"code": "last_backup_missing", "detail": text});
    let flat = "no space left; next: delete; something\u{FFFD}[2J";
    let page = from_json(json!({"machines": [failing.clone(), running_machine()], "nextCursor": null}));
    let listed = machine::list(&plain_view(), &page);
    assert_eq!(listed.lines().count(), 3, "{listed}");
    assert!(listed.contains(flat), "{listed}");
    let output = machine::details(&plain_view(), &from_json(failing));
    assert!(!output.contains('\u{1b}') && !output.contains("\n  next: delete"), "{output}");
    assert_eq!(output.matches(flat).count(), 5, "{output}");
}

#[test]
fn unreadable_pointer_shows_how_to_rebuild_it() {
    let mut machine = running_machine();
    machine["slot"] = "second".into();
    let error = "user_1/second/system/db/latest in the object store is not readable: EOF";
    machine["lastBackup"] = json!({"status": "error", "error": error});
    let output = machine::details(&plain_view(), &from_json(machine));
    assert!(
        output.contains(
            "next         the snapshot pointer cannot be used: run `svcctl pointer show user_1 --slot second`"
        ),
        "{output}"
    );
    assert!(output.contains("then run `svcctl pointer rebuild user_1 --slot second`"), "{output}");
}

#[test]
fn running_machine_shows_all_fields() {
    insta::assert_snapshot!(machine::details(&plain_view(), &from_json(running_machine())));
}

#[test]
fn rolled_back_update_shows_reason_and_advice() {
    let mut machine = running_machine();
    machine["lastUpdate"] = json!({"version": "2026.11.2", "outcome": "rolled_back", "stage": "health",
        "error": "the gateway was not ready", "at": "2026-11-21T11:55:00.000Z"});
    let output = machine::details(&plain_view(), &from_json(machine));
    for line in [
        "update       2026.11.2 rolled_back at health: the gateway was not ready; 2026-11-21 11:55:00 UTC, 5 min ago",
        "next         run `svc-update status` on its host",
    ] {
        assert!(output.contains(line), "{line}: {output}");
    }
}

#[test]
fn snapshot_checks_show_damage_and_errors() {
    let mut machine = running_machine();
    machine["checks"] = json!({
        "verify": {"status": "error", "at": "2026-11-21T11:00:00.000Z", "damaged": ["a.dump", "b.dump"],
                   "error": "a.dump has another size"},
        "drill": {"status": "success", "at": "2026-11-21T11:55:00.000Z", "key": "c.dump"}});
    let output = machine::details(&plain_view(), &from_json(machine));
    for line in [
        "verify       error: a.dump has another size; damaged: a.dump, b.dump; 2026-11-21 11:00:00 UTC, 60 min ago\n",
        "drill        success, 2026-11-21 11:55:00 UTC, 5 min ago\n",
    ] {
        assert!(output.contains(line), "{line}: {output}");
    }
}

#[test]
fn failed_machine_shows_advice() {
    insta::assert_snapshot!(machine::details(&plain_view(), &from_json(failed_machine())));
}

#[test]
fn running_operation_shows_its_log() {
    insta::assert_snapshot!(operation::details(&plain_view(), &from_json(operation("resize", "running"))));
}

#[test]
fn repeated_and_omitted_log_lines_are_counted() {
    let mut long = operation("delete", "running");
    long["log"][1]["repeats"] = 4319.into();
    long["log"][1]["repeatedAt"] = "2026-11-20T11:00:00.400Z".into();
    long["logOmitted"] = 7.into();
    let output = operation::details(&plain_view(), &from_json(long.clone()));
    assert!(output.contains("(7 older lines are not shown)"), "{output}");
    assert!(output.contains("the provider is busy  (repeated 4319 times, last at 3600.4 s)"), "{output}");

    long["log"][1]["repeats"] = 1.into();
    long["logOmitted"] = 1.into();
    let output = operation::details(&plain_view(), &from_json(long));
    assert!(
        output.contains("(1 older line is not shown)") && output.contains("(repeated 1 time, last"),
        "{output}"
    );
}

#[test]
fn lines_after_uses_positions_without_sequence_numbers() {
    let mut operation = operation("delete", "running");
    let count_and_last = |value: &Value, after| {
        let operation: svc_wire::operation::Operation = from_json(value.clone());
        let (lines, last) = operation::lines_after(&operation, after);
        (lines.len(), last)
    };
    assert_eq!(count_and_last(&operation, 2), (1, 3));
    for (index, seq) in [(0, 40), (1, 52), (2, 97)] {
        operation["log"][index]["seq"] = seq.into();
    }
    assert_eq!(count_and_last(&operation, 40), (2, 97));
    assert_eq!(count_and_last(&operation, 97), (0, 97));
}

#[test]
fn status_shows_copies_of_a_healthy_machine() {
    let machine = with_copies(
        running_machine(),
        json!({"live": {"machineId": MACHINE, "providerServerId": "4711"}, "newestSnapshotAt": "2026-11-21T11:51:00.000Z",
               "exposedSeconds": 540, "kept": [
            {"machineId": OTHER, "providerServerId": "4700", "reason": "replaced", "until": "2026-11-22T10:00:00.000Z",
             "unsavedSince": null}]}),
    );
    insta::assert_snapshot!(machine::details(&plain_view(), &machine));
}

#[test]
fn status_shows_unsaved_changes_and_expiry_of_kept_servers() {
    let kept = |reason: &str, until: Value, unsaved: Value| json!({"machineId": OTHER, "providerServerId": "4700", "reason": reason, "until": until, "unsavedSince": unsaved});
    let kept_server_line = |live: Value, kept: Value| {
        let copies = json!({"live": live, "kept": [kept], "newestSnapshotAt": null, "exposedSeconds": null});
        let slot_exit_times = serde_json::from_value(json!({OTHER: "2026-11-21T11:00:00.000Z"})).unwrap();
        let output = machine::details_with_slot_exit_times(
            &plain_view(),
            &with_copies(running_machine(), copies),
            &slot_exit_times,
        );
        output.lines().find(|line| line.starts_with("kept server")).unwrap().to_owned()
    };
    let live = json!({"machineId": MACHINE, "providerServerId": "4711"});
    let unsaved =
        kept_server_line(live.clone(), kept("replaced", Value::Null, json!("2026-11-21T10:17:00.000Z")));
    let held = "holds 43 min of changes that are in no snapshot; kept until `svcctl discard";
    assert!(unsaved.contains(held) && unsaved.ends_with("--accept-loss`"), "{unsaved}");
    let unproven = kept_server_line(Value::Null, kept("replaced", Value::Null, Value::Null));
    assert!(unproven.ends_with("kept until a new machine is healthy"), "{unproven}");
    let later = json!("2026-11-22T12:00:00.000Z");
    let deleted = kept_server_line(Value::Null, kept("deleted", later.clone(), Value::Null));
    let undo = format!("kept until 2026-11-22 12:00:00 UTC, in 24 h; `svcctl undelete {OTHER}` restores it");
    assert!(deleted.ends_with(&undo), "{deleted}");
    let superseded = kept_server_line(live, kept("deleted", later, Value::Null));
    assert!(!superseded.contains("undelete"), "{superseded}");
    let unsaved =
        kept_server_line(Value::Null, kept("deleted", Value::Null, json!("2026-11-21T10:17:00.000Z")));
    assert!(
        unsaved.ends_with(&format!("--accept-loss`; `svcctl undelete {OTHER}` restores it")),
        "{unsaved}"
    );
    let mut files = kept("replaced", Value::Null, json!("2026-11-21T10:17:00.000Z"));
    files["unsavedData"] = json!("files");
    let held = "holds the owner's files, without which a later machine started; kept until `svcctl discard";
    let files = kept_server_line(Value::Null, files);
    assert!(files.contains(held), "{files}");
    let expired =
        kept_server_line(Value::Null, kept("deleted", json!("2026-11-21T11:59:00.000Z"), Value::Null));
    assert!(expired.ends_with("being deleted"), "{expired}");
}

#[test]
fn status_without_snapshot_shows_all_data_at_risk() {
    let machine = with_copies(
        running_machine(),
        json!({"live": {"machineId": MACHINE, "providerServerId": "4711"}, "kept": [], "newestSnapshotAt": null,
               "exposedSeconds": 180}),
    );
    let output = machine::details(&plain_view(), &machine);
    for line in [
        "live server  4711\n",
        "snapshot     none known\n",
        "at risk      losing the live server now would cost all of its data (3 min old): there is no snapshot\n",
    ] {
        assert!(output.contains(line), "{line}: {output}");
    }
}

#[test]
fn status_of_recovery_shows_boot_progress_and_question() {
    let mut machine = running_machine();
    machine["status"] = "recovering".into();
    machine["registeredAt"] = Value::Null;
    machine["heartbeatAt"] = Value::Null;
    machine["health"] = Value::Null;
    machine["lastBackup"] = Value::Null;
    machine["lastUpdate"] = Value::Null;
    machine["boot"] = json!({"stage": "restore", "at": "2026-11-21T11:58:00.000Z",
        "stages": [{"stage": "bundle", "at": "2026-11-21T11:57:00.000Z"}, {"stage": "restore", "at": "2026-11-21T11:58:00.000Z"}]});
    machine["bootProgress"] = json!({"stage": "restore", "bytes": 1_288_490_188_u64, "totalBytes": 3_113_851_289_u64,
        "rows": null, "totalRows": null});
    let mut waiting = operation("recover", "running");
    waiting["state"] = "waiting".into();
    waiting["step"] = "last_backup".into();
    waiting["question"] =
        json!({"code": "last_backup_missing", "detail": "No final backup: the host returned 500."});
    machine["operations"] = json!([waiting]);
    let copies = json!({"live": null, "newestSnapshotAt": "2026-11-21T11:05:00.000Z", "exposedSeconds": null, "kept": [
        {"machineId": OTHER, "providerServerId": "4700", "reason": "replaced", "until": null, "unsavedSince": null}]});
    insta::assert_snapshot!(machine::details(&plain_view(), &with_copies(machine, copies)));
}

#[test]
fn failed_machine_advice_depends_on_the_cause() {
    let advice = |cause: &str| {
        let mut machine = running_machine();
        machine["status"] = "failed".into();
        machine["failure"] = json!({"cause": cause, "stage": null, "message": null});
        let output = machine::details(&plain_view(), &from_json(machine));
        output.lines().find(|line| line.starts_with("next")).unwrap_or_default().to_owned()
    };
    assert!(advice("operator").contains(&format!("`svcctl resume {MACHINE}`")));
    assert!(advice("reinstating").contains("wait: it runs again"));
    assert!(!advice("boot_reported").contains("svcctl resume"));
}

#[test]
fn failed_restore_advice_depends_on_the_code() {
    let next = |slot: &str, message: &str| {
        let mut machine = failed_machine();
        machine["slot"] = slot.into();
        machine["failure"]["message"] = message.into();
        let output = machine::details(&plain_view(), &from_json(machine));
        output.lines().find(|line| line.starts_with("next")).unwrap_or_default().to_owned()
    };
    let damaged =
        next("primary", "the SHA-256 of x.dump does not match the recorded one: nothing was restored");
    for command in [
        format!("`svcctl backup list {OTHER}`"),
        "`svcctl recover user_1 --snapshot KEY`".to_owned(),
        "`svcctl pointer show user_1`".to_owned(),
        "`svcctl recover user_1 --server-type TYPE`".to_owned(),
    ] {
        assert!(damaged.contains(&command), "{command}: {damaged}");
    }
    assert!(!damaged.contains("`svcctl recover user_1`"), "the advice repeats the failed command: {damaged}");
    let full = next("second", "svc-restore: code no_space: /var/lib/svc: 5 of 9 bytes");
    assert!(
        full.contains("next         run `svcctl recover user_1 --slot second --server-type TYPE`"),
        "{full}"
    );
    let newer = next("primary", "svc-restore: code newer_postgres: x was taken with PostgreSQL 17");
    assert!(newer.contains("`svcctl recover user_1 --image-version VERSION`"), "{newer}");
    let store = next("primary", "svc-restore: code store_unavailable: no response");
    assert!(store.contains("`svcctl doctor`"), "{store}");
}

#[test]
fn failed_restore_shows_advice_while_old_machine_holds_slot() {
    let mut machine = failed_machine();
    machine["replacedBy"] = MACHINE.into();
    machine["retiredAt"] = "2026-11-21T11:50:00.000Z".into();
    let copies = |live: &str| {
        json!({"live": {"machineId": live, "providerServerId": "4711"}, "kept": [],
        "newestSnapshotAt": null, "exposedSeconds": 5})
    };
    let output = machine::details(&plain_view(), &with_copies(machine.clone(), copies(MACHINE)));
    assert!(output.contains("--snapshot KEY"), "{output}");
    let later = machine::details(
        &plain_view(),
        &with_copies(machine, copies("019a0000-0000-7000-8000-000000000009")),
    );
    assert!(!later.contains("--snapshot KEY"), "{later}");
}

#[test]
fn status_shows_lost_and_reported_copies() {
    let lines = |machine: Value, copies: Value| {
        let output = machine::details(&plain_view(), &with_copies(machine, copies));
        let is_copy = |line: &&str| {
            ["live server", "kept server", "snapshot"].iter().any(|name| line.starts_with(name))
        };
        output.lines().filter(is_copy).map(str::to_owned).collect::<Vec<_>>()
    };
    let kept = json!({"machineId": OTHER, "providerServerId": "4700", "reason": "replaced", "until": null,
        "unsavedSince": null, "missingSince": "2026-11-21T11:00:00.000Z", "removalAbandonedAt": null});
    let mut abandoned = kept.clone();
    abandoned["missingSince"] = Value::Null;
    abandoned["removalAbandonedAt"] = "2026-11-21T11:00:00.000Z".into();
    let mut discarded = kept.clone();
    discarded["missingSince"] = Value::Null;
    discarded["until"] = "2026-11-21T11:59:59.000Z".into();
    let mut machine = running_machine();
    machine["status"] = "failed".into();
    machine["failure"] = json!({"cause": "server_gone", "stage": null, "message": null});
    let output = lines(
        machine,
        json!({"live": null, "kept": [kept, abandoned, discarded],
        "newestSnapshotAt": "2026-11-21T11:51:00.000Z", "exposedSeconds": null,
        "newestSnapshot": {"takenAt": "2026-11-21T11:51:00.000Z", "machineId": OTHER, "key": null, "source": "reported"},
        "snapshotProblem": "the object store is not responding"}),
    );
    for (line, part) in output.iter().zip([
        "none: the provider no longer has server 4711".to_owned(),
        format!(
            "missing at the provider, first noticed 2026-11-21 11:00:00 UTC, 60 min ago; `svcctl discard {OTHER}`"
        ),
        format!("its removal was abandoned; kept until `svcctl discard {OTHER}`"),
        "being deleted".to_owned(),
        format!("9 min ago, from machine {OTHER}, as reported by its host; the object store is not responding"),
    ]) {
        assert!(line.contains(&part), "{part}: {line}");
    }
    assert_eq!(output.len(), 5, "{output:?}");
}

#[test]
fn accepted_deletion_shows_snapshot_age_and_undo() {
    let deletion = |until: Value| {
        let deletion = json!({"machineId": MACHINE, "kind": "customer", "status": "running", "deletedAt": "2026-11-21T12:00:00.000Z",
            "newestSnapshotAt": "2026-11-21T11:51:00.000Z", "undeleteUntil": until, "operationId": OTHER});
        from_json::<DeletedMachine>(deletion).into()
    };
    insta::assert_snapshot!(accepted_change::show(
        &plain_view(),
        &deletion(json!("2026-11-22T12:00:00.000Z"))
    ));
    let current = accepted_change::show(&plain_view(), &deletion(json!("2026-11-22T12:00:00.000Z")));
    let older = json!({"machineId": MACHINE, "kind": "customer", "status": "running", "deletedAt": "2026-11-21T12:00:00.000Z",
        "newestSnapshotAt": "2026-11-21T11:51:00.000Z", "undeletableUntil": "2026-11-22T12:00:00.000Z", "operationId": OTHER});
    let older = accepted_change::show(&plain_view(), &from_json::<DeletedMachine>(older).into());
    assert_eq!(older, current, "older platforms use another name for the deadline");
    let immediate = accepted_change::show(&plain_view(), &deletion(Value::Null));
    assert!(
        immediate.contains("until its server is off; then the server is deleted permanently"),
        "{immediate}"
    );
}

#[test]
fn status_of_immediate_deletion_has_no_kept_server() {
    let copies = json!({"live": null, "newestSnapshotAt": null, "exposedSeconds": null, "kept": [
        {"machineId": MACHINE, "providerServerId": "4711", "reason": "deleted", "until": null, "unsavedSince": null,
         "deletedBy": OTHER}]});
    let mut deleted = running_machine();
    deleted["deletedAt"] = "2026-11-21T11:59:00.000Z".into();
    let output = machine::details(&plain_view(), &with_copies(deleted, copies));
    let line = output.lines().find(|line| line.starts_with("old server")).unwrap();
    assert!(line.contains(&format!("deleted as soon as operation {OTHER}")), "{line}");
    assert!(line.contains(&format!("`svcctl operation abandon {OTHER}`")), "{line}");
    assert!(!output.contains("kept"), "{output}");
}

#[test]
fn deletion_of_machine_that_never_served_has_no_undo() {
    let deletion = from_json::<DeletedMachine>(
        json!({"machineId": MACHINE, "idpUserId": "user_1", "slot": "second", "handle": "ada",
        "kind": "customer", "status": "provisioning", "registeredAt": null, "deletedAt": "2026-11-21T12:00:00.000Z",
        "newestSnapshotAt": null, "undeleteUntil": null, "operationId": OTHER, "alsoDeleted": null}),
    );
    let output = accepted_change::show(&plain_view(), &deletion.into());
    let undo = "none: it never served traffic; `svcctl provision user_1 --slot second --handle ada` creates a new machine";
    assert!(output.contains(undo), "{output}");
}

#[test]
fn deletion_of_machine_without_server_has_no_undo() {
    let deletion = from_json::<DeletedMachine>(
        json!({"machineId": MACHINE, "idpUserId": "user_1", "slot": "primary", "handle": "ada", "kind": "customer",
        "status": "failed", "registeredAt": "2026-11-20T12:00:00.000Z", "deletedAt": "2026-11-21T12:00:00.000Z",
        "newestSnapshotAt": "2026-11-21T11:51:00.000Z", "undeleteUntil": null, "operationId": OTHER}),
    );
    let mut accepted: accepted_change::AcceptedChange = deletion.into();
    assert!(accepted_change::show(&plain_view(), &accepted).contains("`svcctl operation abandon "));
    accepted.was_server_gone = true;
    let output = accepted_change::show(&plain_view(), &accepted);
    let undo = "none: the provider no longer has its server; `svcctl provision user_1 --handle ada` creates";
    assert!(output.contains(undo) && !output.contains("abandon"), "{output}");
}

#[test]
fn accepted_recovery_shows_undo() {
    let accepted = from_json::<RecoveredMachine>(
        json!({"oldMachineId": OTHER, "machineId": MACHINE, "slot": "primary", "status": "recovering",
        "epoch": 3, "operationId": OTHER}),
    );
    let output = accepted_change::show(&plain_view(), &accepted.into());
    let undo = format!("`svcctl operation abandon {OTHER}` until the new machine has registered");
    assert!(output.lines().any(|line| line.starts_with("undo") && line.ends_with(&undo)), "{output}");
}

#[test]
fn fleet_shows_machines_that_need_attention() {
    let fleet = |attention: Value| {
        from_json(json!({
            "totals": {"machines": 12, "byStatus": {"failed": 1, "provisioning": 0, "running": 11},
                       "byImageVersion": {"2026.11.1": 8, "2026.10.4": 4},
                       "byHealth": {"healthy": 10, "silent": 1, "unhealthy": 0, "unknown": 1}},
            "backups": {"maxAgeSeconds": 9000, "p50AgeSeconds": 1740, "never": 1},
            "attention": attention, "attentionTotal": 7, "asOf": "2026-11-21T12:00:00.000Z",
            "rollout": rollout("paused", None),
        }))
    };
    let attention = json!([
        {"machineId": OTHER, "idpUserId": "user_4", "slot": "primary", "handle": "eve", "status": "running", "ended": "deleted",
         "reasons": ["operation_waiting", "unsaved_changes"], "operationId": OTHER},
        {"machineId": OTHER, "idpUserId": "user_5", "slot": "primary", "handle": "dan", "status": "running", "ended": "replaced",
         "reasons": ["unsaved_changes"], "operationId": null},
        {"machineId": OTHER, "idpUserId": "user_2", "slot": "primary", "handle": "grace", "status": "failed", "reasons": ["failed:boot_reported"]},
        {"machineId": MACHINE, "idpUserId": "user_1", "slot": "primary", "handle": "ada", "status": "running", "reasons": ["heartbeat_silent", "backup_overdue"]},
        {"machineId": OTHER, "idpUserId": "user_6", "slot": "second", "handle": "fay", "status": "running", "ended": "deleted",
         "reasons": ["unsaved_changes"], "operationId": null},
        {"machineId": MACHINE, "idpUserId": "user_7", "slot": "second", "handle": "gil", "status": "running", "reasons": ["pointer_unusable"]},
        {"machineId": MACHINE, "idpUserId": "user_3", "slot": "primary", "handle": "bob", "status": "running", "reasons": ["update_rolled_back"]},
    ]);
    insta::assert_snapshot!(fleet::show(&plain_view(), &fleet(attention)));
    assert!(fleet::show(&plain_view(), &fleet(json!([]))).ends_with("no machine needs attention\n"));
}

fn rollout(state: &str, reason: Option<&str>) -> Value {
    json!({
        "rolloutId": OTHER, "imageVersion": "2026.11.2", "state": state, "why": reason, "canary": 1, "batchSize": 10,
        "maxFailures": 1, "totals": {"waiting": 10, "asked": 0, "updated": 1, "failed": 1, "skipped": 0},
        "createdAt": "2026-11-21T11:50:00.000Z", "updatedAt": "2026-11-21T11:55:00.000Z", "endedAt": null,
        "requestId": "req-1",
    })
}

#[test]
fn list_shows_rollouts() {
    let all = [rollout("running", None), rollout("stopped", Some("the canary failed"))];
    insta::assert_snapshot!(deploy::list(&plain_view(), &from_json(json!({"rollouts": all}))));
    assert_eq!(deploy::list(&plain_view(), &from_json(json!({"rollouts": []}))), "no rollouts\n");
}

#[test]
fn list_shows_backups() {
    let backup = |key: &str, latest: bool| {
        json!({"key": key, "sizeBytes": 1_363_148, "sha256": "00", "takenAt": "2026-11-21T11:05:00.000Z",
        "verifiedAt": "2026-11-21T11:05:01.000Z", "epoch": 2, "machineId": MACHINE, "latest": latest})
    };
    let page = json!({"latest": "b", "backups": [backup("system/db/snapshots/b-2.dump", true), backup("system/db/snapshots/a-1.dump", false)], "nextCursor": null});
    insta::assert_snapshot!(backup::list(&plain_view(), &from_json(page)));
}

#[test]
fn list_shows_slots() {
    let rows: Vec<svc_wire::slot::Subscription> = from_json(json!([
        {"idpUserId": "user_1", "slot": "primary", "plan": "max", "status": "active", "currentPeriodEnd": "2026-12-01T00:00:00.000Z"},
        {"idpUserId": "user_1", "slot": "second", "plan": "starter", "status": "inactive", "currentPeriodEnd": null},
    ]));
    insta::assert_snapshot!(slot::list(&plain_view(), &rows));
}

#[test]
fn view_determines_colors_and_width() {
    let page = from_json(json!({"machines": [running_machine(), failed_machine()], "nextCursor": null}));
    let narrow = View { width: Some(80), ..plain_view() };
    let output = machine::list(&narrow, &page);
    assert!(output.lines().all(|line| line.chars().count() <= 80), "{output}");
    let colored = machine::list(&View { has_colors: true, ..plain_view() }, &page);
    assert!(colored.contains("\x1b["), "{colored}");
    for output in
        [machine::list(&plain_view(), &page), machine::details(&plain_view(), &from_json(failed_machine()))]
    {
        assert!(!output.contains('\x1b'), "{output}");
    }
    assert!(
        machine::details(&View { has_colors: true, ..plain_view() }, &from_json(failed_machine()))
            .contains("\x1b[31m")
    );
}

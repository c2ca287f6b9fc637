//! Test data for the text views: a view, a running machine, a failed machine, and an operation.

use serde_json::{Value, json};

use super::View;
use svc_wire::machine::MachineDetail;

pub(super) const MACHINE: &str = "019a0000-0000-7000-8000-000000000001";
/// The id of another machine, and of every operation and rollout.
pub(super) const OTHER: &str = "019a0000-0000-7000-8000-000000000002";

pub(super) fn plain_view() -> View {
    View { now: "2026-11-21T12:00:00Z".parse().unwrap(), has_colors: false, width: None }
}

pub(super) fn from_json<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

pub(super) fn running_machine() -> Value {
    json!({
        "machineId": MACHINE, "idpUserId": "user_1", "slot": "primary", "handle": "ada", "kind": "customer",
        "status": "running", "failure": null, "epoch": 2, "restoreMode": "required", "serverType": "cpx22",
        "location": "nbg1", "imageVersion": "2026.11.1", "providerServerId": "4711", "publicIpv4": "203.0.113.9",
        "httpsPort": 443, "registeredAt": "2026-11-20T10:00:09.100Z", "heartbeatAt": "2026-11-21T11:59:48.000Z",
        "health": {"gateway": "ok", "database": "failing"},
        "lastBackup": {"status": "success", "key": "system/db/snapshots/2026-11-21T11-05-00.000Z-2.dump",
                       "takenAt": "2026-11-21T11:05:00.000Z", "sizeBytes": 1_363_148},
        "lastUpdate": {"version": "2026.11.1", "outcome": "updated", "stage": "done", "at": "2026-11-21T10:00:00.000Z"},
        "boot": {"stage": "register", "at": "2026-11-20T10:00:08.000Z", "stages": [
            {"stage": "database", "at": "2026-11-20T10:00:01.000Z"}, {"stage": "bundle", "at": "2026-11-20T10:00:04.200Z"},
            {"stage": "register", "at": "2026-11-20T10:00:08.000Z"}]},
        "replacedBy": null, "retiredAt": null, "deletedAt": null, "createdAt": "2026-11-20T10:00:00.000Z",
        "updatedAt": "2026-11-20T10:00:09.100Z",
        "operations": [operation("recover", "succeeded")],
    })
}

pub(super) fn failed_machine() -> Value {
    let mut machine = running_machine();
    machine["machineId"] = OTHER.into();
    machine["handle"] = "grace".into();
    machine["slot"] = "second".into();
    machine["status"] = "failed".into();
    machine["failure"] = json!({"cause": "boot_reported", "stage": "restore",
        "message": "svc-restore: exit status: 69: the SHA-256 of x.dump does not match the recorded one: nothing was restored"});
    machine["heartbeatAt"] = Value::Null;
    machine["health"] = Value::Null;
    machine["lastBackup"] = Value::Null;
    machine["registeredAt"] = Value::Null;
    machine["operations"] = json!([operation("provision", "failed")]);
    machine
}

pub(super) fn operation(kind: &str, state: &str) -> Value {
    let entry = |at: &str, step: &str, outcome: &str, detail: Value| json!({"at": at, "step": step, "outcome": outcome, "detail": detail});
    json!({
        "operationId": OTHER, "machineId": MACHINE, "kind": kind, "state": state, "step": "await_registration",
        "attempts": 1, "errorCode": if state == "failed" { json!("provisioning_error") } else { Value::Null },
        "createdAt": "2026-11-20T10:00:00.000Z", "updatedAt": "2026-11-20T10:00:09.100Z",
        "endedAt": if state == "running" { Value::Null } else { json!("2026-11-20T10:00:09.100Z") },
        "log": [
            entry("2026-11-20T10:00:00.050Z", "fence", "done", Value::Null),
            entry("2026-11-20T10:00:00.400Z", "create_server", "retry", json!("the provider is busy")),
            entry("2026-11-20T10:00:12.900Z", "create_server", "done", Value::Null),
        ],
    })
}

pub(super) fn with_copies(mut machine: Value, copies: Value) -> MachineDetail {
    machine["copies"] = copies;
    from_json(machine)
}

//! Older platforms omit fields added later, and every view must still show the rest of the response. Each example is a
//! response from the current platform with every field in the schema, and the tests remove one field at a time. Fields
//! without which a view is meaningless are essential, such as an identifier, a state, or the figure being shown. Each
//! example lists its essential fields.

use std::collections::BTreeSet;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::test_data::plain_view;
use super::*;
use svc_http::openapi::schema_of;
use svc_http::usage::GroupBy;
use svc_wire::alarm::Alarm;
use svc_wire::audit::AuditPage;
use svc_wire::backup::BackupPage;
use svc_wire::change::{
    DeletedMachine, PowerChange, ProvisionedMachine, RecoveredMachine, Resize, TokenRotations,
    UndeletedMachine,
};
use svc_wire::fleet::Fleet;
use svc_wire::machine::{DiscardedMachine, Machine, MachineDetail, MachinePage};
use svc_wire::operation::Operation;
use svc_wire::operator::{IssuedToken, Operator, OperatorList, WhoAmI};
use svc_wire::pointer::{PointerInspection, RebuiltPointer};
use svc_wire::rollout::{Rollout, RolloutList, RolloutSummary};
use svc_wire::slot::{Subscription, SubscriptionPage};
use svc_wire::usage::UsageReport;

const ID: &str = "019a0000-0000-7000-8000-000000000001";
const AT: &str = "2026-11-21T11:05:00.000Z";

const MACHINE_FIELDS: &[&str] = &[
    "/machineId",
    "/status",
    "/failure/cause",
    "/lastBackup/status",
    "/lastUpdate/version",
    "/lastUpdate/outcome",
    "/checks/verify/status",
    "/checks/drill/status",
    "/boot/stages/0/stage",
    "/bootProgress/stage",
    "/attention/0/code",
    "/upgradeToken/generation",
    "/health/disk/totalBytes",
    "/health/disk/freeBytes",
];
const OPERATION_FIELDS: &[&str] = &["/operationId", "/machineId", "/state", "/question/code"];
const COPIES_FIELDS: &[&str] = &[
    "/live/machineId",
    "/kept/0/machineId",
    "/newestSnapshot/takenAt",
    "/newerSnapshot/key",
    "/unrestoredSnapshot/key",
];
const ROLLOUT_FIELDS: &[&str] = &["/rolloutId", "/state", "/verification/passed"];
const POINTER_FIELDS: &[&str] = &["/seq", "/snapshot/key"];
const OPERATOR_FIELDS: &[&str] = &["/name", "/state"];
const CHANGE_FIELDS: &[&str] = &["/machineId", "/status"];

/// An example response and the paths of its essential fields.
struct Example {
    document: Value,
    essential: Vec<String>,
}

impl Example {
    fn new(document: Value) -> Self {
        Self { document, essential: Vec::new() }
    }

    fn essential(self, paths: &[&str]) -> Self {
        self.essential_within("", paths)
    }

    fn essential_within(mut self, prefix: &str, paths: &[&str]) -> Self {
        self.essential.extend(paths.iter().map(|path| format!("{prefix}{path}")));
        self
    }

    /// Asserts that `show` copes with any single non-essential field missing, and that parsing fails without an
    /// essential one.
    #[track_caller]
    fn assert_shown<T: DeserializeOwned + Serialize>(self, schema: &Value, show: impl Fn(T) -> String) {
        let Self { document, essential } = self;
        let parsed = serde_json::from_value::<T>(document.clone()).unwrap();
        assert_eq!(json!(parsed), document, "the example differs from what the platform sends");
        assert_complete(schema, &document, "");
        let essential: BTreeSet<String> = essential.into_iter().collect();
        let mut unchecked = essential.clone();
        for path in member_paths(&document, "") {
            let (parent, name) = path.rsplit_once('/').unwrap();
            let mut older = document.clone();
            older.pointer_mut(parent).unwrap().as_object_mut().unwrap().shift_remove(name);
            let parsed = serde_json::from_value::<T>(older);
            if unchecked.remove(&path) {
                assert!(parsed.is_err(), "{path} can be omitted, so it is not essential");
            } else {
                let text = show(
                    parsed.unwrap_or_else(|error| panic!("cannot parse the example without {path}: {error}")),
                );
                assert!(!text.trim().is_empty(), "the view is empty without {path}");
            }
        }
        assert!(unchecked.is_empty(), "{unchecked:?} are not in the example");
    }
}

/// Returns the paths of all object members in a value.
fn member_paths(value: &Value, parent: &str) -> Vec<String> {
    match value {
        Value::Object(object) => {
            let nested = |(name, value): (&String, &Value)| {
                let path = format!("{parent}/{name}");
                [vec![path.clone()], member_paths(value, &path)].concat()
            };
            object.iter().flat_map(nested).collect()
        }
        Value::Array(items) => {
            let nested = |(index, item): (usize, &Value)| member_paths(item, &format!("{parent}/{index}"));
            items.iter().enumerate().flat_map(nested).collect()
        }
        _ => Vec::new(),
    }
}

/// Asserts that a value has every property in its schema, so that examples can't fall behind as fields are added.
#[track_caller]
fn assert_complete(schema: &Value, value: &Value, path: &str) {
    let named_schema = |name: &str| match name {
        "Machine" => schema_of::<Machine>(),
        "Operation" => schema_of::<Operation>(),
        "Rollout" => schema_of::<Rollout>(),
        "RolloutSummary" => schema_of::<RolloutSummary>(),
        "Subscription" => schema_of::<Subscription>(),
        "Alarm" => schema_of::<Alarm>(),
        "Operator" => schema_of::<Operator>(),
        other => panic!("{other} is not a named schema"),
    };
    if let Some(name) = schema["$ref"].as_str() {
        return assert_complete(&named_schema(name.rsplit('/').next().unwrap()), value, path);
    }
    if let Some(any) = schema["anyOf"].as_array() {
        return assert_complete(&any[0], value, path);
    }
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let member = format!("{path}/{name}");
        assert!(!value[name].is_null(), "{member} is missing from the example");
        assert_complete(schema, &value[name], &member);
    }
    if schema["items"].is_object() {
        assert!(value.get(0).is_some(), "{path} has no item in the example");
        assert_complete(&schema["items"], &value[0], &format!("{path}/0"));
    }
}

fn operation() -> Value {
    json!({
        "operationId": ID, "machineId": ID, "kind": "recover", "state": "waiting",
        "question": {"code": "newer_snapshot", "detail": "which one?", "snapshotKey": "k"},
        "step": "last_backup", "attempts": 1, "errorCode": "host_unreachable", "createdAt": AT, "updatedAt": AT,
        "endedAt": AT, "requestId": "r", "log": [{"seq": 1, "at": AT, "step": "fence", "outcome": "done",
            "detail": "d", "requestId": "r", "repeats": 2, "repeatedAt": AT}],
        "logOmitted": 3,
    })
}

fn machine() -> Value {
    let check = json!({"status": "success", "at": AT, "key": "k", "damaged": ["k"], "error": "e"});
    json!({
        "machineId": ID, "idpUserId": "user_1", "slot": "primary", "handle": "ada", "kind": "customer",
        "status": "running", "failure": {"cause": "boot_reported", "stage": "restore", "message": "m"},
        "epoch": 2, "restoreMode": "required", "restoreFiles": false, "serverType": "cpx22", "location": "nbg1",
        "imageVersion": "2026.11.1", "providerServerId": "4711", "publicIpv4": "203.0.113.9", "httpsPort": 443,
        "tlsSpkiSha256": "00",
        "certificate": {"hostName": "a.hosts.example", "source": "acme", "issuedAt": AT, "expiresAt": AT,
            "isTrusted": true, "error": "e", "nextAttemptAt": AT},
        "registeredAt": AT, "heartbeatAt": AT,
        "health": {"gateway": "ok", "database": "ok", "code": "ok", "disk": {"totalBytes": 9, "freeBytes": 5}},
        "lastBackup": {"status": "success", "beganAt": AT, "key": "k", "takenAt": AT, "sizeBytes": 7, "error": "e"},
        "files": {"savedUntil": AT, "changedSince": AT, "pendingBytes": 9, "files": 7, "bytes": 8, "restoredAsOf": AT, "error": "e", "verifiedAt": AT, "drilledAt": AT, "damage": "d"},
        "lastUpdate": {"version": "2026.11.1", "outcome": "rolled_back", "stage": "health", "at": AT, "error": "e"},
        "checks": {"verify": check, "drill": check},
        "boot": {"stage": "restore", "at": AT, "stages": [{"stage": "restore", "at": AT}]},
        "bootProgress": {"stage": "restore", "bytes": 1, "totalBytes": 2, "rows": 3, "totalRows": 4},
        "provenAt": AT, "finalBackupAt": AT, "unsavedSince": AT, "unsavedData": "files", "poweredOffAt": AT,
        "attention": [{"code": "snapshot_held", "detail": "d"}], "fallbackLocations": ["fsn1"],
        "upgradeToken": {"generation": 2, "rotatedAt": AT, "requestedAt": AT}, "replacedBy": ID, "retiredAt": AT,
        "deletedAt": AT, "createdAt": AT, "updatedAt": AT,
    })
}

fn copies() -> Value {
    json!({
        "live": {"machineId": ID, "providerServerId": "4711", "missingSince": AT},
        "kept": [{"machineId": ID, "providerServerId": "4700", "reason": "replaced", "until": AT, "deletedBy": ID,
            "unsavedSince": AT, "unsavedData": "files", "missingSince": AT, "removalAbandonedAt": AT}],
        "newestSnapshotAt": AT,
        "newestSnapshot": {"takenAt": AT, "machineId": ID, "key": "k", "source": "store"},
        "snapshotProblem": "p", "exposedSeconds": 9,
        "newerSnapshot": {"takenAt": AT, "machineId": ID, "key": "k"},
        "unrestoredSnapshot": {"key": "k", "takenAt": AT},
    })
}

fn merge(mut document: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("not an object: {more}") };
    document.as_object_mut().unwrap().extend(more);
    document
}

fn rollout() -> Value {
    let finding = json!({"machineId": ID, "handle": "ada", "check": "icons", "what": "w", "next": "n"});
    json!({
        "rolloutId": ID, "imageVersion": "2026.11.2", "state": "paused", "why": "w", "canary": 1, "batchSize": 10,
        "maxFailures": 1, "totals": {"waiting": 1, "asked": 1, "updated": 1, "failed": 1, "skipped": 1},
        "createdAt": AT, "updatedAt": AT, "endedAt": AT, "requestId": "r", "verify": true,
        "verification": {"at": AT, "passed": false, "handles": ["ada"], "findings": [finding]},
    })
}

fn alarm() -> Value {
    json!({"alarm": "servers_missing", "since": AT, "seenAt": AT, "detail": {"live": 3}, "releasedUntil": AT, "next": "n"})
}

fn operator() -> Value {
    json!({
        "name": "ada", "scopes": ["read"], "state": "active", "expiresAt": AT, "lastUsedAt": AT,
        "previousTokenExpiresAt": AT, "previousTokenLastUsedAt": AT, "createdAt": AT, "createdBy": "root",
        "rotatedAt": AT, "revokedAt": AT,
    })
}

fn pointer() -> Value {
    let snapshot = json!({"key": "k", "sizeBytes": 7, "sha256": "00", "epoch": 2, "machineId": ID, "takenAt": AT,
        "verifiedAt": AT});
    json!({"seq": 4, "fenceEpoch": 2, "fenceMachineId": ID, "emptiedAt": AT, "snapshot": snapshot})
}

#[test]
fn machine_views_support_older_platforms() {
    let detail = merge(machine(), json!({"operations": [operation()], "copies": copies()}));
    Example::new(detail)
        .essential(MACHINE_FIELDS)
        .essential_within("/operations/0", OPERATION_FIELDS)
        .essential_within("/copies", COPIES_FIELDS)
        .assert_shown(&schema_of::<MachineDetail>(), |response: MachineDetail| {
            machine::details(&plain_view(), &response) + &machine::data_at_risk(&plain_view(), &response)
        });
    Example::new(json!({"machines": [machine()], "nextCursor": "c"}))
        .essential(&["/machines"])
        .essential_within("/machines/0", MACHINE_FIELDS)
        .assert_shown(&schema_of::<MachinePage>(), |response: MachinePage| {
            machine::list(&plain_view(), &response)
        });
    Example::new(merge(machine(), json!({"operationId": ID, "alreadyOrdered": true})))
        .essential(MACHINE_FIELDS)
        .assert_shown(&schema_of::<DiscardedMachine>(), |response: DiscardedMachine| {
            machine::discarded(&plain_view(), &response)
        });
    Example::new(operation())
        .essential(OPERATION_FIELDS)
        .assert_shown(&schema_of::<Operation>(), |response: Operation| {
            operation::details(&plain_view(), &response)
        });
}

#[test]
fn change_views_support_older_platforms() {
    fn show_change<T: Into<accepted_change::AcceptedChange>>(change: T) -> String {
        accepted_change::show(&plain_view(), &change.into())
    }
    let slot = json!({"machineId": ID, "slot": "primary", "kind": "customer", "status": "running", "epoch": 3,
        "operationId": ID});
    let user = json!({"idpUserId": "user_1", "handle": "ada"});
    Example::new(merge(slot.clone(), user))
        .essential(CHANGE_FIELDS)
        .assert_shown(&schema_of::<ProvisionedMachine>(), show_change::<ProvisionedMachine>);
    let recovered =
        json!({"oldMachineId": ID, "newerSnapshot": {"takenAt": AT, "machineId": ID, "key": "k"}});
    Example::new(merge(slot, recovered))
        .essential(CHANGE_FIELDS)
        .essential(&["/operationId", "/newerSnapshot/key"])
        .assert_shown(&schema_of::<RecoveredMachine>(), show_change::<RecoveredMachine>);
    let deleted = json!({"machineId": ID, "idpUserId": "user_1", "slot": "primary", "handle": "ada",
        "kind": "customer", "status": "running", "registeredAt": AT, "deletedAt": AT, "newestSnapshotAt": AT,
        "newestSnapshotSource": "reported", "snapshotProblem": "p", "undeleteUntil": AT, "undeletableUntil": AT,
        "operationId": ID,
        "alsoDeleted": {"machineId": ID, "operationId": ID, "undeleteUntil": AT, "undeletableUntil": AT}});
    Example::new(deleted)
        .essential(CHANGE_FIELDS)
        .essential(&["/alsoDeleted/machineId", "/alsoDeleted/operationId"])
        .assert_shown(&schema_of::<DeletedMachine>(), show_change::<DeletedMachine>);
    let undeleted = json!({"machineId": ID, "kind": "customer", "status": "failed", "epoch": 3, "operationId": ID,
        "alreadyUndone": true});
    Example::new(undeleted)
        .essential(CHANGE_FIELDS)
        .essential(&["/operationId"])
        .assert_shown(&schema_of::<UndeletedMachine>(), show_change::<UndeletedMachine>);
    Example::new(json!({"machineId": ID, "action": "off", "status": "running", "operationId": ID}))
        .essential(CHANGE_FIELDS)
        .essential(&["/action"])
        .assert_shown(&schema_of::<PowerChange>(), show_change::<PowerChange>);
    Example::new(json!({"machineId": ID, "serverType": "cpx32", "status": "resizing", "operationId": ID}))
        .essential(CHANGE_FIELDS)
        .assert_shown(&schema_of::<Resize>(), show_change::<Resize>);
    Example::new(json!({"requested": 3}))
        .essential(&["/requested"])
        .assert_shown(&schema_of::<TokenRotations>(), token::rotations);
}

fn exercise() -> Value {
    json!({"lastAt": AT, "machineId": ID, "isCurrent": true})
}

#[test]
fn fleet_views_support_older_platforms() {
    let keys = json!({
        "keys": [{"keyId": "00", "isConfigured": true, "trusting": 1, "trustingHandles": ["ada"], "notTrusting": 1,
            "notTrustingHandles": ["bob"]}],
        "notReporting": 1, "notReportingHandles": ["cy"], "sequence": 1, "highestSequence": 2, "ahead": 1,
        "aheadHandles": ["ada"],
    });
    let certificates = json!({"isRequired": true, "trusted": 1, "expiring": 1, "expiringHandles": ["ada"],
        "missing": 1, "missingHandles": ["bob"], "exempt": 1});
    let fleet = json!({
        "totals": {"machines": 2, "byStatus": {"running": 2}, "byImageVersion": {"1": 2}, "byHealth": {"ok": 2}},
        "backups": {"maxAgeSeconds": 9, "p50AgeSeconds": 5, "never": 1},
        "attention": [{"machineId": ID, "idpUserId": "user_1", "slot": "primary", "handle": "ada",
            "status": "running", "reasons": ["operation_waiting"], "ended": "deleted", "operationId": ID}],
        "attentionTotal": 1, "bundleKeys": keys, "certificates": certificates, "rollout": rollout(),
        "overdueOperations": [{"operationId": ID, "machineId": ID, "handle": "ada", "kind": "recover",
            "step": "fence", "attempts": 3, "errorCode": "e", "ageSeconds": 99}],
        "overdueOperationsTotal": 1, "alarms": [alarm()], "asOf": AT,
        "exercises": {"recovery": exercise(), "rollback": exercise()},
    });
    Example::new(fleet)
        .essential(&["/totals", "/totals/machines", "/totals/byStatus", "/backups", "/backups/never"])
        .essential(&["/attention/0/machineId", "/attention/0/status"])
        .essential(&["/overdueOperations/0/operationId", "/overdueOperations/0/machineId", "/alarms/0/alarm"])
        .essential(&["/bundleKeys/keys", "/bundleKeys/notReporting", "/bundleKeys/keys/0/keyId"])
        .essential(&["/bundleKeys/keys/0/isConfigured", "/bundleKeys/keys/0/trusting"])
        .essential(&["/bundleKeys/keys/0/notTrusting"])
        .essential_within("/rollout", ROLLOUT_FIELDS)
        .assert_shown(&schema_of::<Fleet>(), |response: Fleet| fleet::show(&plain_view(), &response));
    Example::new(alarm())
        .essential(&["/alarm"])
        .assert_shown(&schema_of::<Alarm>(), |response: Alarm| fleet::show_released(&response));
}

#[test]
fn rollout_views_support_older_platforms() {
    let member = json!({"machineId": ID, "handle": "ada", "slot": "primary", "batch": 1, "state": "failed",
        "error": "e", "askedAt": AT, "endedAt": AT, "imageVersion": "2026.11.1"});
    Example::new(merge(rollout(), json!({"machines": [member]})))
        .essential(ROLLOUT_FIELDS)
        .essential(&["/machines/0/machineId", "/machines/0/state"])
        .assert_shown(&schema_of::<Rollout>(), |response: Rollout| deploy::show(&plain_view(), &response));
    Example::new(json!({"rollouts": [rollout()]}))
        .essential(&["/rollouts"])
        .essential_within("/rollouts/0", ROLLOUT_FIELDS)
        .assert_shown(&schema_of::<RolloutList>(), |response: RolloutList| {
            deploy::list(&plain_view(), &response)
        });
}

#[test]
fn snapshot_views_support_older_platforms() {
    let backup = json!({"key": "k", "sizeBytes": 7, "sha256": "00", "takenAt": AT, "verifiedAt": AT, "epoch": 2,
        "machineId": ID, "latest": true});
    Example::new(json!({"latest": "k", "backups": [backup], "nextCursor": "c"}))
        .essential(&["/backups", "/backups/0/key"])
        .assert_shown(&schema_of::<BackupPage>(), |response: BackupPage| {
            backup::list(&plain_view(), &response)
                + &response
                    .backups
                    .iter()
                    .map(|backup| backup::details(&plain_view(), backup))
                    .collect::<String>()
        });
    let slot = crate::args::SlotTarget { user: "user_1".parse().unwrap(), slot: "primary".parse().unwrap() };
    let inspection = json!({"idpUserId": "user_1", "slot": "primary", "state": "unsound", "problem": "p",
        "snapshots": 3, "current": pointer(), "rebuilt": pointer()});
    Example::new(inspection)
        .essential(&["/state"])
        .essential_within("/current", POINTER_FIELDS)
        .essential_within("/rebuilt", POINTER_FIELDS)
        .assert_shown(&schema_of::<PointerInspection>(), |response: PointerInspection| {
            pointer::inspection(&plain_view(), &slot, &response)
        });
    Example::new(json!({"idpUserId": "user_1", "slot": "primary", "pointer": pointer()}))
        .essential(&["/pointer"])
        .essential_within("/pointer", POINTER_FIELDS)
        .assert_shown(&schema_of::<RebuiltPointer>(), |response: RebuiltPointer| {
            pointer::rebuilt(&plain_view(), &response)
        });
}

#[test]
fn other_views_support_older_platforms() {
    let subscription = json!({"idpUserId": "user_1", "slot": "primary", "plan": "max", "status": "active",
        "currentPeriodEnd": AT, "test": true});
    Example::new(json!({"slots": [subscription], "nextCursor": "user_1/primary"}))
        .essential(&["/slots", "/slots/0/idpUserId", "/slots/0/slot", "/slots/0/status"])
        .assert_shown(&schema_of::<SubscriptionPage>(), |response: SubscriptionPage| {
            slot::page(&plain_view(), &response)
        });
    Example::new(json!({"operators": [operator()]}))
        .essential(&["/operators"])
        .essential_within("/operators/0", OPERATOR_FIELDS)
        .assert_shown(&schema_of::<OperatorList>(), |response: OperatorList| {
            operator::list(&plain_view(), &response.operators)
        });
    Example::new(json!({"operator": operator(), "tokenId": ID, "token": "svco_x"}))
        .essential(&["/operator", "/token"])
        .essential_within("/operator", OPERATOR_FIELDS)
        .assert_shown(&schema_of::<IssuedToken>(), |response: IssuedToken| {
            operator::issued(&plain_view(), &response, None)
        });
    Example::new(json!({"name": "ada", "scopes": ["read"], "expiresAt": AT}))
        .essential(&["/name"])
        .assert_shown(&schema_of::<WhoAmI>(), |response: WhoAmI| {
            operator::who_am_i(&plain_view(), &response)
        });
    let entry = json!({"auditId": ID, "at": AT, "actor": "ada", "action": "fail", "target": "t",
        "before": {"status": "running"}, "after": {"status": "failed"}, "requestId": "r"});
    Example::new(json!({"entries": [entry], "nextCursor": "c"}))
        .essential(&["/entries", "/entries/0/auditId", "/entries/0/at"])
        .assert_shown(&schema_of::<AuditPage>(), |response: AuditPage| {
            audit::list(&plain_view(), &serde_json::from_value(json!(response)).unwrap())
        });
    let entry = json!({"date": "2026-11-01", "model": "m", "userId": "u", "cost": 1.5, "tokensIn": 1,
        "tokensOut": 2, "dispatches": 3});
    let report = json!({"totalCost": 1.5, "totalTokensIn": 1, "totalTokensOut": 2, "totalDispatches": 3,
        "entries": [entry]});
    Example::new(report)
        .essential(&["/totalCost", "/totalTokensIn", "/totalTokensOut", "/totalDispatches", "/entries"])
        .essential_within("/entries/0", &["/date", "/cost", "/tokensIn", "/tokensOut", "/dispatches"])
        .assert_shown(&schema_of::<UsageReport>(), |response: UsageReport| {
            usage::show(&plain_view(), GroupBy::User, &response)
        });
}

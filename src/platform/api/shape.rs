//! Schemas that several routes share: names, machines, operations, subscriptions.

use serde_json::{Value, json};

use crate::config::MAX_FALLBACK_LOCATIONS;
use crate::db::rollouts::RolloutState;
use svc_http::openapi::{
    any_text, array, boolean, count, fields, matching, named, nullable, object, one_of, text, time, uuid,
};
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::plan::Plan;
use svc_machine::rollout::MemberState;
use svc_machine::state::{FailureCause, Status};

pub fn status() -> Value {
    one_of(Status::NAMES)
}

pub fn kind() -> Value {
    one_of(&["customer", "preview"])
}

pub fn idp_user_id() -> Value {
    matching(IdpUserId::PATTERN)
}

pub fn slot_name() -> Value {
    matching(Slot::PATTERN)
}

pub fn handle_name() -> Value {
    matching(Handle::PATTERN)
}

pub fn image_version() -> Value {
    matching(ImageVersion::PATTERN)
}

pub fn server_type() -> Value {
    matching(ServerType::PATTERN)
}

pub fn location() -> Value {
    matching(Location::PATTERN)
}

/// Locations to try, in this order, if the provider has no capacity in the requested one.
pub fn fallback_locations() -> Value {
    json!({ "type": "array", "items": location(), "maxItems": MAX_FALLBACK_LOCATIONS })
}

pub fn sha256() -> Value {
    matching("^[0-9A-Fa-f]{64}$")
}

/// A slot's snapshot pointer.
pub fn pointer() -> Value {
    let snapshot = object(
        &[
            ("key", text()),
            ("sizeBytes", count()),
            ("sha256", text()),
            ("epoch", count()),
            ("machineId", uuid()),
            ("takenAt", time()),
            ("verifiedAt", time()),
        ],
        &[],
    );
    object(
        &[
            ("seq", count()),
            ("fenceEpoch", count()),
            ("fenceMachineId", nullable(uuid())),
            ("snapshot", nullable(snapshot)),
            ("emptiedAt", nullable(time())),
        ],
        &[],
    )
}

/// A host's report of its last backup.
pub fn last_backup_schema() -> Value {
    fields(
        &[("status", one_of(&["success", "error"]))],
        &[
            ("beganAt", time()),
            ("key", text()),
            ("takenAt", time()),
            ("sizeBytes", count()),
            ("error", text()),
        ],
    )
}

/// A host's report of its last snapshot checks, by kind.
pub fn snapshot_checks_schema() -> Value {
    let damaged = json!({ "type": "array", "items": any_text(), "maxItems": MAX_DAMAGED_KEYS });
    let check = || {
        fields(
            &[("status", one_of(&["success", "error"])), ("at", time())],
            &[("key", nullable(text())), ("damaged", damaged.clone()), ("error", nullable(text()))],
        )
    };
    fields(&[], &SNAPSHOT_CHECKS.map(|kind| (kind, check())))
}

/// A host's report of its last update.
pub fn last_update_schema() -> Value {
    fields(
        &[
            ("version", image_version()),
            ("outcome", one_of(&UPDATE_OUTCOMES)),
            ("stage", any_text()),
            ("at", time()),
        ],
        &[("error", text())],
    )
}

/// Maximum number of damaged snapshots in a report.
pub const MAX_DAMAGED_KEYS: usize = 20;
/// Kinds of snapshot checks: verification reads snapshots again, a drill restores the latest one on trial.
pub const SNAPSHOT_CHECKS: [&str; 2] = ["verify", "drill"];

/// Outcomes of a host's update.
pub const UPDATE_OUTCOMES: [&str; 4] = ["updated", "rolled_back", "refused", "failed"];

fn rollout_members() -> Vec<(&'static str, Value)> {
    let totals = object(&MemberState::ALL.map(|state| (state.as_str(), count())), &[]);
    vec![
        ("rolloutId", uuid()),
        ("imageVersion", image_version()),
        ("state", one_of(&RolloutState::ALL.map(RolloutState::as_str))),
        ("why", nullable(text())),
        ("canary", count()),
        ("batchSize", count()),
        ("maxFailures", count()),
        ("totals", totals),
        ("createdAt", time()),
        ("updatedAt", time()),
        ("endedAt", nullable(time())),
        ("requestId", text()),
    ]
}

/// A rollout without its machines.
pub fn rollout_summary() -> Value {
    object(&rollout_members(), &[])
}

/// A rollout with its machines.
pub fn rollout() -> Value {
    let machine = object(
        &[
            ("machineId", uuid()),
            ("handle", handle_name()),
            ("slot", slot_name()),
            ("batch", count()),
            ("state", one_of(&MemberState::ALL.map(MemberState::as_str))),
            ("error", nullable(text())),
            ("askedAt", nullable(time())),
            ("endedAt", nullable(time())),
            ("imageVersion", image_version()),
        ],
        &[],
    );
    let mut members = rollout_members();
    members.push(("machines", array(machine)));
    object(&members, &[])
}

fn health() -> Value {
    let status = one_of(&["ok", "failing"]);
    let disk = object(&[("totalBytes", count()), ("freeBytes", count())], &[]);
    object(&[("gateway", status.clone()), ("database", status), ("disk", disk)], &[])
}

/// A machine's token: its age, and the time of a pending rotation request.
fn upgrade_token() -> Value {
    object(&[("generation", count()), ("rotatedAt", time()), ("requestedAt", nullable(time()))], &[])
}

fn machine_members() -> Vec<(&'static str, Value)> {
    let causes: Vec<&str> = FailureCause::ALL.iter().map(|cause| cause.as_str()).collect();
    let failure = object(
        &[("cause", one_of(&causes)), ("stage", nullable(text())), ("message", nullable(text()))],
        &[],
    );
    let stage = object(&[("stage", text()), ("at", time())], &[]);
    let boot = object(&[("stage", text()), ("at", time()), ("stages", array(stage))], &[]);
    let attention = object(&[("code", text()), ("detail", text())], &[]);
    let optional_count = || nullable(count());
    let boot_progress = object(
        &[
            ("stage", text()),
            ("bytes", optional_count()),
            ("totalBytes", optional_count()),
            ("rows", optional_count()),
            ("totalRows", optional_count()),
        ],
        &[],
    );
    vec![
        ("machineId", uuid()),
        ("idpUserId", idp_user_id()),
        ("slot", slot_name()),
        ("handle", handle_name()),
        ("kind", one_of(&["customer", "preview"])),
        ("status", status()),
        ("failure", nullable(failure)),
        ("epoch", count()),
        ("restoreMode", one_of(&["required", "empty"])),
        ("serverType", server_type()),
        ("location", location()),
        ("imageVersion", image_version()),
        ("providerServerId", nullable(text())),
        ("publicIpv4", nullable(text())),
        ("httpsPort", count()),
        ("tlsSpkiSha256", nullable(text())),
        ("registeredAt", nullable(time())),
        ("heartbeatAt", nullable(time())),
        ("health", nullable(health())),
        ("lastBackup", nullable(last_backup_schema())),
        ("lastUpdate", nullable(last_update_schema())),
        ("checks", nullable(snapshot_checks_schema())),
        ("boot", nullable(boot)),
        ("bootProgress", nullable(boot_progress)),
        ("provenAt", nullable(time())),
        ("finalBackupAt", nullable(time())),
        ("unsavedSince", nullable(time())),
        ("poweredOffAt", nullable(time())),
        ("attention", array(attention)),
        ("fallbackLocations", array(location())),
        ("upgradeToken", upgrade_token()),
        ("replacedBy", nullable(uuid())),
        ("retiredAt", nullable(time())),
        ("deletedAt", nullable(time())),
        ("createdAt", time()),
        ("updatedAt", time()),
    ]
}

/// The copies of the slot's data.
fn copies() -> Value {
    let live = object(
        &[("machineId", uuid()), ("providerServerId", nullable(text())), ("missingSince", nullable(time()))],
        &[],
    );
    let kept = object(
        &[
            ("machineId", uuid()),
            ("providerServerId", nullable(text())),
            ("reason", one_of(&["replaced", "deleted"])),
            ("until", nullable(time())),
            ("unsavedSince", nullable(time())),
            ("missingSince", nullable(time())),
            ("removalAbandonedAt", nullable(time())),
            // The running deletion that deletes this server.
            ("deletedBy", nullable(uuid())),
        ],
        &[],
    );
    let snapshot = object(
        &[
            ("takenAt", time()),
            ("machineId", uuid()),
            ("key", nullable(text())),
            ("source", one_of(&["store", "reported"])),
        ],
        &[],
    );
    object(
        &[
            ("live", nullable(live)),
            ("kept", array(kept)),
            ("newestSnapshotAt", nullable(time())),
            ("newestSnapshot", nullable(snapshot)),
            // Complete, but not named by the pointer.
            ("newerSnapshot", nullable(newer_snapshot())),
            // Of the previous machine, and newer than the snapshot that the current machine was restored from.
            ("unrestoredSnapshot", nullable(object(&[("key", text()), ("takenAt", nullable(time()))], &[]))),
            ("snapshotProblem", nullable(text())),
            ("exposedSeconds", nullable(count())),
        ],
        &[],
    )
}

/// A complete snapshot that the pointer does not name.
pub fn newer_snapshot() -> Value {
    object(&[("takenAt", time()), ("machineId", uuid()), ("key", text())], &[])
}

/// A machine's record.
pub fn machine() -> Value {
    object(&machine_members(), &[])
}

/// A machine's record with its operations, newest first.
pub fn machine_with_operations() -> Value {
    let mut members = machine_members();
    members.push(("operations", array(named("Operation"))));
    members.push(("copies", copies()));
    object(&members, &[])
}

/// A machine whose server is being discarded, and the operation that deletes it.
pub fn discarded_machine() -> Value {
    let mut members = machine_members();
    members.push(("operationId", nullable(uuid())));
    members.push(("alreadyOrdered", boolean()));
    object(&members, &[])
}

/// An operation with the log of its steps.
pub fn operation() -> Value {
    let line = object(
        &[("at", time()), ("step", text()), ("outcome", text())],
        &[
            ("detail", nullable(text())),
            ("requestId", nullable(text())),
            // Increases from line to line, but not by one.
            ("seq", count()),
            ("repeats", count()),
            ("repeatedAt", time()),
        ],
    );
    let question = object(&[("code", text()), ("detail", text())], &[("snapshotKey", text())]);
    object(
        &[
            ("operationId", uuid()),
            ("machineId", uuid()),
            ("kind", text()),
            ("state", one_of(&["running", "waiting", "succeeded", "failed", "cancelled"])),
            ("question", nullable(question)),
            ("step", text()),
            ("attempts", count()),
            ("errorCode", nullable(text())),
            ("createdAt", time()),
            ("updatedAt", time()),
            ("endedAt", nullable(time())),
            ("requestId", nullable(text())),
            ("log", array(line)),
        ],
        // The number of older log lines that are omitted.
        &[("logOmitted", count())],
    )
}

pub fn plan() -> Value {
    one_of(Plan::NAMES)
}

/// The subscription of a slot.
pub fn subscription() -> Value {
    object(
        &[
            ("idpUserId", idp_user_id()),
            ("slot", slot_name()),
            ("plan", plan()),
            ("status", one_of(&["active", "inactive"])),
            ("currentPeriodEnd", nullable(time())),
        ],
        &[],
    )
}

/// The status of a component in a health route.
pub fn component_status() -> Value {
    one_of(&["ok", "failing"])
}

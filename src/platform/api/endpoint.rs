//! A route together with its description: the router and the document are made of the same list.

use std::sync::Arc;

use axum::Router;
use axum::routing::MethodRouter;
use serde_json::{Value, json};

use crate::http::openapi::{
    Answer, Content, Credential, Operation, Parameter, Place, array, boolean, count, nullable, object,
    one_of, text, time, uuid,
};
use crate::machine::state::{FailureCause, Status};
use crate::platform::context::Platform;

/// One method of one path, and what serves it.
pub struct Endpoint {
    pub operation: Operation,
    pub serve: fn() -> MethodRouter<Arc<Platform>>,
}

/// The router of these endpoints.
pub fn routes(endpoints: &[&Endpoint]) -> Router<Arc<Platform>> {
    endpoints
        .iter()
        .fold(Router::new(), |router, endpoint| router.route(endpoint.operation.path, (endpoint.serve)()))
}

pub const OPERATOR: Credential = Credential { name: "operator", about: "PLATFORM_SECRET" };
pub const HOST: Credential =
    Credential { name: "host", about: "The UPGRADE_TOKEN of one machine, while it is its slot's machine" };
pub const REGISTRATION: Credential =
    Credential { name: "registration", about: "The one-time registration token of one machine" };

pub const MACHINE_ID: Parameter =
    Parameter { name: "id", place: Place::Path, schema: uuid, about: "The machine." };
pub const IDEMPOTENCY_KEY: Parameter = Parameter {
    name: "Idempotency-Key",
    place: Place::Header,
    schema: || json!({ "type": "string", "minLength": 1, "maxLength": 255 }),
    about: "The same key with the same body gets the first answer again.",
};
pub const PREFER: Parameter = Parameter {
    name: "Prefer",
    place: Place::Header,
    schema: text,
    about: "wait=N: answer when the operation has ended, or after N seconds, at most 60 (RFC 7240).",
};
pub const CURSOR: Parameter = Parameter {
    name: "cursor",
    place: Place::Query,
    schema: text,
    about: "The nextCursor of an earlier page.",
};

/// An answer of JSON.
pub const fn told(status: u16, about: &'static str, schema: fn() -> Value) -> Answer {
    Answer { status, about, content: Content::Json(schema) }
}

pub fn status() -> Value {
    one_of(&Status::ALL.map(Status::as_str))
}

pub fn slot_name() -> Value {
    text()
}

pub fn server_type() -> Value {
    text()
}

fn last_backup() -> Value {
    object(
        &[("status", one_of(&["success", "error"]))],
        &[
            ("key", nullable(text())),
            ("takenAt", nullable(time())),
            ("sizeBytes", nullable(count())),
            ("error", nullable(text())),
        ],
    )
}

/// What a host says of its last backup.
pub fn said_last_backup() -> Value {
    last_backup()
}

fn health() -> Value {
    let word = one_of(&["ok", "failing"]);
    let disk = object(&[("totalBytes", count()), ("freeBytes", count())], &[]);
    object(&[("gateway", word.clone()), ("database", word), ("disk", disk)], &[])
}

fn machine_members() -> Vec<(&'static str, Value)> {
    let causes: Vec<&str> = FailureCause::ALL.iter().map(|cause| cause.as_str()).collect();
    let failure = object(
        &[("cause", one_of(&causes)), ("stage", nullable(text())), ("message", nullable(text()))],
        &[],
    );
    let stage = object(&[("stage", text()), ("at", time())], &[]);
    let boot = object(&[("stage", text()), ("at", time()), ("stages", array(stage))], &[]);
    vec![
        ("machineId", uuid()),
        ("idpUserId", text()),
        ("slot", slot_name()),
        ("handle", text()),
        ("kind", one_of(&["customer", "preview"])),
        ("status", status()),
        ("failure", nullable(failure)),
        ("epoch", count()),
        ("restoreMode", one_of(&["required", "empty"])),
        ("serverType", server_type()),
        ("location", text()),
        ("imageVersion", text()),
        ("providerServerId", nullable(text())),
        ("publicIpv4", nullable(text())),
        ("httpsPort", count()),
        ("tlsSpkiSha256", nullable(text())),
        ("registeredAt", nullable(time())),
        ("heartbeatAt", nullable(time())),
        ("health", nullable(health())),
        ("lastBackup", nullable(last_backup())),
        ("boot", nullable(boot)),
        ("replacedBy", nullable(uuid())),
        ("retiredAt", nullable(time())),
        ("deletedAt", nullable(time())),
        ("createdAt", time()),
        ("updatedAt", time()),
    ]
}

/// A machine's record.
pub fn machine() -> Value {
    object(&machine_members(), &[])
}

/// A machine's record with its operations, the newest first.
pub fn machine_with_operations() -> Value {
    let mut members = machine_members();
    members.push(("operations", array(crate::http::openapi::named("Operation"))));
    object(&members, &[])
}

/// An operation with the log of its steps.
pub fn operation() -> Value {
    let line = object(
        &[("at", time()), ("step", text()), ("outcome", text())],
        &[("detail", nullable(text())), ("requestId", nullable(text()))],
    );
    object(
        &[
            ("operationId", uuid()),
            ("machineId", uuid()),
            ("kind", text()),
            ("state", one_of(&["running", "succeeded", "failed", "cancelled"])),
            ("step", text()),
            ("attempts", count()),
            ("errorCode", nullable(text())),
            ("createdAt", time()),
            ("updatedAt", time()),
            ("endedAt", nullable(time())),
            ("requestId", nullable(text())),
            ("log", array(line)),
        ],
        &[],
    )
}

/// The subscription of a slot.
pub fn subscription() -> Value {
    object(
        &[
            ("idpUserId", text()),
            ("slot", slot_name()),
            ("plan", one_of(&["starter", "builder", "max"])),
            ("status", one_of(&["active", "inactive"])),
            ("currentPeriodEnd", nullable(time())),
        ],
        &[],
    )
}

/// What health routes say of a part.
pub fn well() -> Value {
    one_of(&["ok", "failing"])
}

pub fn flag() -> Value {
    boolean()
}

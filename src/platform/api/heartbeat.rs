//! POST `/vps/:id/heartbeat`: what a host says of itself, and what it is to know: its version, keys, its end.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::call::{Call, path_id};
use super::fields::Fields;
use crate::http::problem::{Code, Problem};
use crate::machine::id::MachineId;
use crate::machine::name::ImageVersion;
use crate::platform::context::Platform;
use crate::platform::db::machine_changes::{self, Heartbeat};
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self};

struct Beat {
    image_version: ImageVersion,
    health: Value,
    last_backup: Option<Value>,
    proof_kids: Vec<String>,
}

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let machine = call.host(&platform).await?;
    let id: MachineId = path_id("machineId", &id)?;
    if id != machine.id {
        return Err(Problem::new(Code::Forbidden, "This token is another machine's."));
    }
    let beat = beat(&call)?;
    let superseded = !machine.is_active() && !still_needed(&platform, &machine).await?;
    if machine.is_active() {
        let session = platform.db.session().await?;
        let beat = Heartbeat {
            image_version: &beat.image_version,
            health: &beat.health,
            last_backup: beat.last_backup.as_ref(),
            proof_kids: &beat.proof_kids,
        };
        machine_changes::heartbeat(&session, id, &beat).await?;
    }
    let keys = platform.keys.borrow().public.clone();
    let answer = json!({
        "desiredImageVersion": beat.image_version,
        "epoch": machine.epoch,
        "superseded": superseded,
        "proofKeys": keys,
    });
    Ok(Json(answer).into_response())
}

/// A replaced host that is being asked for its last backup is not sent away before it could make it.
pub(super) async fn still_needed(platform: &Platform, machine: &MachineRow) -> Result<bool, Problem> {
    let Some(successor) = machine.replaced_by.filter(|_| machine.deleted_at.is_none()) else {
        return Ok(false);
    };
    let session = platform.db.session().await?;
    let operation = db::operations::newest(&session, successor, "recover").await?;
    Ok(operation.is_some_and(|operation| !operation.has_ended() && operation.step == "last_backup"))
}

fn beat(call: &Call) -> Result<Beat, Problem> {
    let mut fields = call.fields()?;
    let image_version = fields.required("imageVersion");
    fields.required_number("epoch");
    let health = health(&mut fields);
    let disk = disk(&mut fields);
    let last_backup = last_backup(&mut fields);
    let proof_kids = fields.strings("proofKids", 16);
    let built = image_version.zip(health).zip(disk).map(|((image_version, mut health), disk)| {
        health["disk"] = disk;
        Beat { image_version, health, last_backup, proof_kids }
    });
    fields.finish(built)
}

fn health(fields: &mut Fields) -> Option<Value> {
    let mut inner = fields.nested("health")?;
    let part = |inner: &mut Fields, name: &str| {
        let text: String = inner.required(name)?;
        if !matches!(text.as_str(), "ok" | "failing") {
            inner.wrong(name, "must be ok or failing");
            return None;
        }
        Some(text)
    };
    let gateway = part(&mut inner, "gateway");
    let database = part(&mut inner, "database");
    fields.close(inner);
    Some(json!({"gateway": gateway?, "database": database?}))
}

fn disk(fields: &mut Fields) -> Option<Value> {
    let mut inner = fields.nested("disk")?;
    let total = inner.required_number("totalBytes");
    let free = inner.required_number("freeBytes");
    fields.close(inner);
    Some(json!({"totalBytes": total?, "freeBytes": free?}))
}

fn last_backup(fields: &mut Fields) -> Option<Value> {
    let mut inner = fields.optional_nested("lastBackup")?;
    let status: Option<String> = inner.required("status");
    if status.as_deref().is_some_and(|status| !matches!(status, "success" | "error")) {
        inner.wrong("status", "must be success or error");
    }
    let key: Option<String> = inner.optional("key");
    let taken_at: Option<jiff::Timestamp> = inner.optional("takenAt");
    let size = inner.optional_number("sizeBytes");
    let error: Option<String> = inner.optional("error");
    fields.close(inner);
    Some(json!({
        "status": status?,
        "key": key,
        "takenAt": taken_at.map(crate::clock::rfc3339_ms),
        "sizeBytes": size,
        "error": error,
    }))
}

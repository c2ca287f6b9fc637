//! POST `/vps/:id/boot-stage`: a booting host says which stage it is at. It changes no state; people look at it.

use std::str::FromStr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use serde_json::json;

use super::call::{Call, path_id, registration_rejected};
use super::endpoint::{Endpoint, MACHINE_ID, REGISTRATION};
use super::register;
use crate::clock::{now_ms, rfc3339_ms};
use crate::http::openapi::{Answer, Content, Operation, extensible, fields, one_of};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::db::{self, machine_changes};
use axum::routing::post;

/// A host that starts again and again says the same again and again: only the last ones are kept.
const MOST: usize = 20;

struct Stage(String);

impl FromStr for Stage {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "bundle" | "database" | "restore" | "gateway" | "register" => Ok(Self(text.to_owned())),
            _ => Err("must be bundle, database, restore, gateway or register"),
        }
    }
}

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let (claimed, token) = call.registration()?;
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let machine = register::authentic(&tx, claimed, token).await?;
    let mut fields = call.host_fields()?;
    let id: MachineId = path_id("machineId", &id)?;
    if id != machine.id {
        return Err(registration_rejected());
    }
    let stage = fields.required("stage");
    let Stage(stage) = fields.finish(stage)?;

    let mut stages = machine.boot_stages.as_array().cloned().unwrap_or_default();
    stages.push(json!({"stage": stage, "at": rfc3339_ms(now_ms())}));
    let surplus = stages.len().saturating_sub(MOST);
    stages.drain(..surplus);
    machine_changes::boot_stages(&tx, id, &stages.into()).await?;
    db::commit(tx).await?;
    tracing::info!(machine = %id, stage, "the host boots");
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    operation: Operation {
        id: "reportBootStage",
        method: Method::POST,
        path: "/vps/{id}/boot-stage",
        summary: "A booting host says which stage it is at.",
        credentials: &[REGISTRATION],
        parameters: &[MACHINE_ID],
        body: Some(|| {
            let stages = one_of(&["bundle", "database", "restore", "gateway", "register"]);
            extensible(fields(&[("stage", stages)], &[]))
        }),
        answers: &[Answer { status: 204, about: "Noted.", content: Content::Nothing }],
        problems: &[Code::RegistrationRejected, Code::DatabaseUnavailable],
    },
    serve: || post(handle),
};

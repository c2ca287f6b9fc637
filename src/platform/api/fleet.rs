//! GET `/vps/fleet`: all active machines in one look, those that need somebody, and the rollout that is open.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use super::call::Call;
use super::endpoint::{Endpoint, OPERATOR, handle_name, idp_user_id, slot_name, status, told};
use crate::clock::{now_ms, rfc3339_ms};
use crate::http::openapi::{Operation, array, count, named, nullable, object, one_of, text, time, uuid};
use crate::http::problem::{Code, Problem};
use crate::platform::context::Platform;
use crate::platform::db::{self, rollouts};
use crate::platform::{ended_machines, fleet};
use axum::routing::get;
use http::Method;
use serde_json::{Value, json};

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform)?;
    call.query().finish(Some(()))?;
    let session = platform.db.session().await?;
    let rows = db::fleet::all(&session).await?;
    let mut body = fleet::summary(&rows);
    ended_machines::add_to(&mut body, &db::ended_machines::needing_attention(&session).await?);
    let open = rollouts::open(&session).await?;
    body["rollout"] = rollouts::summaries(&session, open.as_slice()).await?.pop().into();
    body["asOf"] = rfc3339_ms(now_ms()).into();
    Ok(Json(body).into_response())
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    operation: Operation {
        id: "fleet",
        method: Method::GET,
        path: "/vps/fleet",
        summary: "All active machines in one look, those that need somebody, and the rollout that is open.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: None,
        answers: &[told(200, "The fleet.", shape)],
        problems: &[Code::InvalidRequest, Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

fn shape() -> Value {
    let counts = || json!({ "type": "object", "additionalProperties": count() });
    let totals = object(
        &[
            ("machines", count()),
            ("byStatus", counts()),
            ("byImageVersion", counts()),
            ("byHealth", counts()),
        ],
        &[],
    );
    let age = || nullable(count());
    let backups = object(&[("maxAgeSeconds", age()), ("p50AgeSeconds", age()), ("never", count())], &[]);
    let in_need = object(
        &[
            ("machineId", uuid()),
            ("idpUserId", idp_user_id()),
            ("slot", slot_name()),
            ("handle", handle_name()),
            ("status", status()),
            ("reasons", array(text())),
        ],
        &[("ended", one_of(&["deleted", "replaced"])), ("operationId", nullable(uuid()))],
    );
    object(
        &[
            ("totals", totals),
            ("backups", backups),
            ("attention", array(in_need)),
            ("attentionTotal", count()),
            ("rollout", nullable(named("RolloutSummary"))),
            ("asOf", time()),
        ],
        &[],
    )
}

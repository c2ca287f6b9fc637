//! GET `/vps/fleet`: a summary of all active machines, the machines that need attention, overdue operations, alarms, and
//! the running rollout.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use super::call::ApiCall;
use super::endpoint::{
    Access, Endpoint, OPERATOR, READ, documented_json, handle_name, idp_user_id, slot_name, status,
};
use crate::alarms;
use crate::context::Platform;
use crate::db::operations::OverdueOperation;
use crate::db::{self, rollouts};
use crate::{bundle_keys, ended_machines, fleet};
use axum::routing::get;
use http::Method;
use serde_json::{Value, json};
use svc_base::clock::{now_ms, rfc3339_ms};
use svc_http::openapi::{
    Operation, array, boolean, count, named, nullable, object, one_of, text, time, uuid,
};
use svc_http::problem::{Code, Problem};

/// An operation that has been running for longer needs attention.
const OPERATION_OVERDUE: Duration = Duration::from_secs(1800);
const MAX_LISTED: i64 = 100;

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    call.query_fields().finish(Some(()))?;
    let session = platform.report_db.session().await?;
    let rows = db::fleet::all(&session).await?;
    let mut body = fleet::summarize(&rows, platform.config.timing.tokens.rotate);
    ended_machines::add_to(&mut body, &db::ended_machines::needing_attention(&session).await?);
    body["bundleKeys"] = {
        let hosts = &platform.config.hosts;
        bundle_keys::summary(&rows, &hosts.trusted_keys(), hosts.bundle_keys_sequence)
    };
    let open = rollouts::open(&session).await?;
    body["rollout"] = rollouts::summaries(&session, open.as_slice()).await?.pop().into();
    let (overdue, total) = db::operations::overdue(&session, OPERATION_OVERDUE, MAX_LISTED).await?;
    body["overdueOperations"] = overdue.iter().map(overdue_record).collect();
    body["overdueOperationsTotal"] = total.into();
    body["alarms"] = alarms::active(&session, &platform.config.timing).await?.into();
    body["asOf"] = rfc3339_ms(now_ms()).into();
    Ok(Json(body).into_response())
}

fn overdue_record(overdue: &OverdueOperation) -> Value {
    let operation = &overdue.operation;
    json!({
        "operationId": operation.id,
        "machineId": operation.machine,
        "handle": overdue.handle,
        "kind": operation.kind,
        "step": operation.step,
        "attempts": operation.attempts,
        "errorCode": operation.error_code,
        "ageSeconds": overdue.age.max(0.0) as u64,
    })
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "fleet",
        method: Method::GET,
        path: "/vps/fleet",
        summary: "Summarizes all active machines, those that need attention, overdue operations, alarms, and the running rollout.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The fleet.", fleet_schema)],
        problems: &[Code::InvalidRequest, Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

fn fleet_schema() -> Value {
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
    let attention = object(
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
    let overdue = object(
        &[
            ("operationId", uuid()),
            ("machineId", uuid()),
            ("handle", handle_name()),
            ("kind", text()),
            ("step", text()),
            ("attempts", count()),
            ("errorCode", nullable(text())),
            ("ageSeconds", count()),
        ],
        &[],
    );
    object(
        &[
            ("bundleKeys", bundle_keys_schema()),
            ("totals", totals),
            ("backups", backups),
            ("attention", array(attention)),
            ("attentionTotal", count()),
            ("overdueOperations", array(overdue)),
            ("overdueOperationsTotal", count()),
            ("alarms", array(named("Alarm"))),
            ("rollout", nullable(named("RolloutSummary"))),
            ("asOf", time()),
        ],
        &[],
    )
}

fn bundle_keys_schema() -> Value {
    let handles = || array(handle_name());
    let bundle_key = object(
        &[
            ("keyId", text()),
            ("isConfigured", boolean()),
            ("trusting", count()),
            ("trustingHandles", handles()),
            ("notTrusting", count()),
            ("notTrustingHandles", handles()),
        ],
        &[],
    );
    object(
        &[
            ("keys", array(bundle_key)),
            ("notReporting", count()),
            ("notReportingHandles", handles()),
            ("sequence", count()),
            ("highestSequence", nullable(count())),
            ("ahead", count()),
            ("aheadHandles", handles()),
        ],
        &[],
    )
}

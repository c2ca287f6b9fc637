//! POST `/vps/fleet/alarms/:alarm/release`: releases an alarm, so that the work that it blocks can continue.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{Method, StatusCode};
use serde_json::json;

use super::call::ApiCall;
use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, documented_json};
use super::mutation::{AuditChange, Mutation, MutationEffect, MutationOutcome, Reply};
use crate::alarms::{self, Alarm};
use crate::context::Platform;
use crate::db;
use svc_http::openapi::{Operation, Parameter, ParameterLocation, request_object, schema_ref, text};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(alarm): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    call.request.json_fields()?.finish(Some(()))?;
    let not_found = || {
        let detail = format!("The alarm {alarm} is not active. `svcctl fleet` lists the active alarms.");
        Problem::new(Code::NotFound, detail)
    };
    let alarm_kind: Alarm = alarm.parse().map_err(|_| not_found())?;
    if !alarm_kind.is_blocking() {
        return Err(not_releasable(alarm_kind));
    }
    let mutation = Mutation::from_call(&call, &operator)?;
    let outcome = mutation
        .run(&platform, async |tx| {
            let count_unknown =
                async || db::unknown_servers::count(tx, platform.config.timing.orphan_grace).await;
            let before = db::alarms::find_active(tx, alarm_kind.as_str()).await?.ok_or_else(not_found)?;
            let before = alarms::to_wire_alarm(&before, &count_unknown().await?);
            let after = alarms::release(tx, alarm_kind).await?.ok_or_else(not_found)?;
            let after = alarms::to_wire_alarm(&after, &count_unknown().await?);
            let change = AuditChange {
                action: "alarm.release",
                target: alarm_kind.as_str().to_owned(),
                before: Some(json!(before)),
                after: Some(json!(after)),
            };
            Ok(MutationEffect::changed(Reply::new(StatusCode::OK, after), change))
        })
        .await?;
    if let MutationOutcome::Done(_) = outcome {
        tracing::warn!(alarm = alarm_kind.as_str(), "an operator released the alarm");
        platform.reconciler_wake.notify_one();
    }
    Ok(outcome.into_reply().into_response())
}

/// Returns the problem for an alarm that cannot be released because it blocks nothing.
fn not_releasable(alarm: Alarm) -> Problem {
    let detail = format!(
        "The alarm {} blocks no work, so it cannot be released; it ends {}. `svcctl fleet` shows what to do about it.",
        alarm.as_str(),
        alarm.ends_when()
    );
    Problem::new(Code::InvalidState, detail)
}

pub static RELEASE: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "releaseAlarm",
        method: Method::POST,
        path: "/vps/fleet/alarms/{alarm}/release",
        summary: "Releases an alarm, which allows the work that it blocks. `servers_missing`: for one hour, machines with \
                  missing servers are marked as failed. `unknown_servers`: the servers that are unknown now are deleted \
                  when their grace period ends.",
        credentials: &[OPERATOR],
        parameters: &[
            Parameter {
                name: "alarm",
                location: ParameterLocation::Path,
                schema: text,
                description: "The alarm's name, as listed by the fleet route.",
            },
            IDEMPOTENCY_KEY,
        ],
        body: Some(|| request_object(&[], &[])),
        responses: &[documented_json(200, "The alarm has been released.", || schema_ref("Alarm"))],
        problems: &[
            Code::NotFound,
            Code::InvalidState,
            Code::InvalidRequest,
            Code::IdempotencyMismatch,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || post(handle),
};

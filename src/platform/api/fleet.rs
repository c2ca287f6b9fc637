//! GET `/vps/fleet`: returns a summary of all active machines, the machines that need attention, overdue operations,
//! alarms, and the rollout that is running or paused.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use super::call::ApiCall;
use super::endpoint::{Access, Endpoint, OPERATOR, READ, documented_json};
use crate::alarms;
use crate::context::Platform;
use crate::db::operations::LongRunningOperation;
use crate::db::{self, rollouts};
use crate::{bundle_keys, certificates, exercises, fleet, former_machines, resource};
use axum::routing::get;
use http::Method;
use svc_base::clock::now_ms;
use svc_http::openapi::{Operation, schema_of};
use svc_http::problem::{Code, Problem};
use svc_wire::fleet::{self as wire, Fleet};
use svc_wire::text::WireString;

/// An operation that has been running for longer than this is overdue.
const OVERDUE_AGE: Duration = Duration::from_secs(1800);
const MAX_LISTED_OPERATIONS: i64 = 100;

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    call.request.query_fields().finish(Some(()))?;
    let session = platform.report_db.session().await?;
    let rows = db::fleet::list_active_machines(&session).await?;
    let mut summary =
        fleet::summarize(&rows, platform.config.timing.tokens.rotation_age, &platform.config.trust);
    former_machines::add_to_attention(
        &mut summary,
        &db::former_machines::list_needing_attention(&session).await?,
    );
    let hosts = &platform.config.hosts;
    let open_rollout = rollouts::find_open(&session).await?;
    let (overdue, total) =
        db::operations::list_long_running(&session, OVERDUE_AGE, MAX_LISTED_OPERATIONS).await?;
    let fleet = Fleet {
        totals: summary.totals,
        backups: summary.backups,
        attention: summary.attention,
        attention_total: summary.attention_total,
        bundle_keys: Some(bundle_keys::summarize(&rows, &hosts.trusted_keys(), hosts.bundle_keys_sequence)),
        certificates: certificates::summarize(&rows, &platform.config.trust),
        rollout: resource::rollout::load_summaries(&session, open_rollout.as_slice()).await?.pop(),
        overdue_operations: overdue.iter().map(overdue_resource).collect(),
        overdue_operations_total: total.unsigned_abs(),
        alarms: alarms::list_active(&session, &platform.config.timing).await?,
        exercises: Some(exercises::load(&session).await?),
        as_of: now_ms().into(),
    };
    Ok(Json(fleet).into_response())
}

fn overdue_resource(overdue: &LongRunningOperation) -> wire::OverdueOperation {
    let operation = &overdue.operation;
    wire::OverdueOperation {
        operation_id: operation.id.into(),
        machine_id: operation.machine.into(),
        handle: WireString::from_stored(&overdue.handle),
        kind: operation.kind.clone(),
        step: operation.step.clone(),
        attempts: operation.attempts.unsigned_abs().into(),
        error_code: operation.error_code.clone(),
        age_seconds: overdue.age_seconds.max(0.0) as u64,
    }
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "fleet",
        method: Method::GET,
        path: "/vps/fleet",
        summary: "Summarizes all active machines, those that need attention, overdue operations, alarms, and the open rollout.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The fleet.", schema_of::<Fleet>)],
        problems: &[Code::InvalidRequest, Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

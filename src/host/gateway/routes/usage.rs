//! `GET /api/usage`: cost by day, week, month, model or user. Also read by the platform, for its operators.

use std::sync::Arc;

use axum::Json;
use axum::extract::{RawQuery, State};
use http::Method;

use crate::auth::READERS_AND_PLATFORM;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use svc_host::agents::kernel::Kernel;
use svc_host::records::ledger::UsageQuery;
use svc_http::fields::Fields;
use svc_http::openapi::{Operation, schema_of};
use svc_http::problem::{Code, Problem};
use svc_http::usage as parameters;
use svc_wire::usage::UsageReport;

/// `GET /api/usage`.
pub async fn report_usage(
    State(kernel): State<Arc<Kernel>>,
    RawQuery(query): RawQuery,
) -> Result<Json<UsageReport>, Problem> {
    let mut fields = Fields::from_query(&query.unwrap_or_default());
    let query = UsageQuery::read(&mut fields);
    let query = fields.finish(Some(query))?;
    kernel.wait_for_usage_store().await?;
    // Reports over years and many users are slow.
    let report =
        tokio::task::spawn_blocking(move || kernel.usage_store().map(|store| store.report(&query))).await;
    let report = report.map_err(|error| Problem::internal(&error))??;
    Ok(Json(report.into()))
}

pub static USAGE: Endpoint = Endpoint {
    operation: Operation {
        id: "usage",
        method: Method::GET,
        path: "/api/usage",
        summary: "The cost of dispatches, aggregated.",
        credentials: READERS_AND_PLATFORM,
        parameters: &[
            parameters::USER_ID,
            parameters::START_DATE,
            parameters::END_DATE,
            parameters::GROUP_BY,
        ],
        body: None,
        responses: &[documented_json(200, "The report.", schema_of::<UsageReport>)],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

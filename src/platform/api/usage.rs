//! GET `/vps/:id/usage`: returns the cost of an owner's dispatches, as reported by the machine's host. The report is
//! the owner's data, so each read is audited, even if it fails.

use std::fmt::Display;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{Method, StatusCode, header};
use jiff::civil::Date;
use serde_json::json;

use super::call::{ApiCall, path_id};
use super::endpoint::{Access, BILLING, Endpoint, MACHINE_ID, OPERATOR, documented_json};
use super::host_files::ensure_serving;
use super::mutation::{self, AuditChange};
use super::problems;
use crate::context::Platform;
use crate::db;
use crate::operations::host_call::{self, HostCallError, UsageError};
use crate::operators::Operator;
use svc_base::untrusted_text;
use svc_http::openapi::{Operation, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::request_id;
use svc_http::usage::{self, UsageQuery};
use svc_machine::id::MachineId;
use svc_wire::usage::UsageReport;

const RETRY_AFTER_SECONDS: u64 = 5;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let id: MachineId = path_id("machineId", &id)?;
    let mut fields = call.request.query_fields();
    let query = UsageQuery::read(&mut fields);
    let query = fields.finish(Some(query))?;
    let read = async move {
        let report = fetch_report(&platform, id, &query).await;
        // If the read cannot be audited, the report is withheld.
        audit_read(&platform, &operator, id, &query, &report).await?;
        report
    };
    // The read completes even if the operator disconnects, so that it is audited.
    let read = tokio::spawn(request_id::run_with_id(request_id::current(), read));
    let report = read.await.map_err(|error| Problem::internal(&error))??;
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(report)).into_response())
}

async fn fetch_report(
    platform: &Platform,
    id: MachineId,
    query: &UsageQuery,
) -> Result<UsageReport, Problem> {
    let session = platform.report_db.session().await?;
    let machine = db::machines::get(&session, id).await?;
    // No session is held during the call to the host.
    drop(session);
    let machine = machine.ok_or_else(|| problems::machine_not_found(&id.to_string()))?;
    ensure_serving(&machine, "its usage")?;
    let response = host_call::fetch_usage(platform, &machine, query).await.map_err(|error| {
        tracing::warn!(machine = %id, error = %format_chain(&error), "cannot fetch the usage report from the host");
        host_problem(id, &error)
    })?;
    parse_report(&response).map_err(|error| {
        tracing::warn!(machine = %id, %error, "the host's response is not a valid usage report");
        let detail =
            format!("The response from machine {id} is not a valid usage report; see the platform's log.");
        Problem::new(Code::HostResponseInvalid, detail)
    })
}

/// Maps a failed call to the host to a problem for the operator.
fn host_problem(id: MachineId, error: &UsageError) -> Problem {
    match error {
        UsageError::Host(HostCallError::Unreachable(_)) => {
            Problem::new(Code::HostUnreachable, format!("The host of machine {id} could not be reached."))
        }
        UsageError::Host(HostCallError::ErrorStatus(StatusCode::UNAUTHORIZED)) => {
            Problem::new(Code::HostRefused, problems::describe_proof_rejection(id))
        }
        UsageError::Host(HostCallError::ErrorStatus(
            status @ (StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED),
        )) => {
            let detail = format!(
                "The release of machine {id} does not report usage to the platform ({}): update it with `svcctl deploy start`.",
                status.as_u16()
            );
            Problem::new(Code::HostRefused, detail)
        }
        UsageError::Host(HostCallError::ErrorStatus(StatusCode::SERVICE_UNAVAILABLE)) => {
            let detail = format!("The host of machine {id} cannot read its records right now; try again.");
            Problem::new(Code::Unavailable, detail).retry_after(RETRY_AFTER_SECONDS)
        }
        UsageError::Host(HostCallError::ErrorStatus(status)) => {
            let status = status.as_u16();
            let detail = format!(
                "The host of machine {id} returned {status}; search the host's log for this request id."
            );
            Problem::new(Code::HostRefused, detail)
        }
        UsageError::TooLarge(max) => {
            let detail = format!(
                "The usage report of machine {id} is larger than {max} bytes: request fewer days with startDate and endDate, or \
                 one user with userId."
            );
            Problem::new(Code::HostResponseInvalid, detail)
        }
    }
}

/// Audits the read and its outcome.
async fn audit_read(
    platform: &Platform,
    operator: &Operator,
    id: MachineId,
    query: &UsageQuery,
    report: &Result<UsageReport, Problem>,
) -> Result<(), Problem> {
    let mut after = json!({});
    for (name, value) in query.pairs() {
        after[name] = value.into();
    }
    after["outcome"] = report.as_ref().map_or_else(|problem| problem.code.as_str(), |_| "read").into();
    let change =
        AuditChange { action: "usage.read", target: id.to_string(), before: None, after: Some(after) };
    let mut session = platform.report_db.session().await?;
    let tx = db::begin(&mut session).await?;
    mutation::write_audit(&tx, operator.actor(), &change).await?;
    Ok(db::commit(tx).await?)
}

/// Parses a host's report. Unknown fields are dropped, strings are truncated and made printable, and negative costs and
/// invalid dates are errors.
fn parse_report(response: &[u8]) -> Result<UsageReport, String> {
    // An error may quote arbitrarily long text from the report.
    let describe = |error: &dyn Display| untrusted_text::truncate_printable(&error.to_string());
    let mut report: UsageReport = serde_json::from_slice(response).map_err(|error| describe(&error))?;
    let costs = report.entries.iter().map(|entry| entry.cost);
    if costs.chain([report.total_cost]).any(|cost| cost < 0.0) {
        return Err("a cost is negative".to_owned());
    }
    for entry in &mut report.entries {
        entry.date = entry.date.parse::<Date>().map_err(|error| describe(&error))?.into();
        for text in [&mut entry.model, &mut entry.user_id].into_iter().flatten() {
            *text = untrusted_text::truncate_printable(text);
        }
    }
    Ok(report)
}

/// Parses a host's report, for `tests/fuzz`.
///
/// # Errors
/// The reason the report is invalid.
#[cfg(feature = "fuzzing")]
pub fn read_report(response: &[u8]) -> Result<serde_json::Value, String> {
    parse_report(response).map(|report| json!(report))
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(BILLING),
    operation: Operation {
        id: "getUsage",
        method: Method::GET,
        path: "/vps/{id}/usage",
        summary: "Returns the cost of the machine's dispatches, as reported by its host. Each read is audited.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, usage::USER_ID, usage::START_DATE, usage::END_DATE, usage::GROUP_BY],
        body: None,
        responses: &[documented_json(
            200,
            "The costs, summed by the requested grouping.",
            schema_of::<UsageReport>,
        )],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::HostUnreachable,
            Code::HostRefused,
            Code::HostResponseInvalid,
            Code::Unavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || get(handle),
};

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn report(change: impl FnOnce(&mut Value)) -> Result<UsageReport, String> {
        let entry = json!({"date": "2026-11-01", "userId": "a\u{1b}[2J", "cost": 1.5, "tokensIn": 1, "tokensOut": 2,
            "dispatches": 1});
        let mut report = json!({"totalCost": 1.5, "totalTokensIn": 1, "totalTokensOut": 2, "totalDispatches": 1,
            "entries": [entry]});
        change(&mut report);
        parse_report(report.to_string().as_bytes())
    }

    #[test]
    fn parse_report_drops_unknown_fields_and_sanitizes_strings() {
        let parsed = serde_json::to_value(report(|report| report["secret"] = json!("x")).unwrap()).unwrap();
        assert_eq!(parsed["entries"][0]["userId"], "a\u{FFFD}[2J");
        assert_eq!((&parsed["totalCost"], &parsed["secret"]), (&json!(1.5), &Value::Null));
    }

    #[test]
    fn parse_report_rejects_invalid_reports() {
        assert!(report(|report| report["totalCost"] = json!(-1)).is_err());
        assert!(report(|report| report["entries"][0]["cost"] = json!(-0.1)).is_err());
        assert!(report(|report| report["entries"][0]["date"] = json!("soon")).is_err());
        assert!(report(|report| report["entries"] = json!(null)).is_err());
        assert!(parse_report(b"<html>").is_err());
    }

    #[test]
    fn parse_report_truncates_quoted_text_in_error() {
        let long = "x".repeat(2 * untrusted_text::MAX_CHARS);
        let cost = report(|report| report["totalCost"] = json!(long)).unwrap_err();
        assert_eq!(cost.chars().count(), untrusted_text::MAX_CHARS);
        let date = report(|report| report["entries"][0]["date"] = json!(long)).unwrap_err();
        assert!(date.chars().count() <= untrusted_text::MAX_CHARS);
    }

    #[test]
    fn host_problem_covers_every_failure() {
        let id = MachineId::new();
        let for_status = |status| host_problem(id, &UsageError::Host(HostCallError::ErrorStatus(status)));
        let unreachable = UsageError::Host(HostCallError::Unreachable(anyhow::anyhow!("x")));
        for (problem, code, detail) in [
            (for_status(StatusCode::UNAUTHORIZED), Code::HostRefused, "clock"),
            (for_status(StatusCode::FORBIDDEN), Code::HostRefused, "update it"),
            (for_status(StatusCode::NOT_FOUND), Code::HostRefused, "update it"),
            (for_status(StatusCode::METHOD_NOT_ALLOWED), Code::HostRefused, "update it"),
            (for_status(StatusCode::SERVICE_UNAVAILABLE), Code::Unavailable, "try again"),
            (for_status(StatusCode::INTERNAL_SERVER_ERROR), Code::HostRefused, "returned 500"),
            (host_problem(id, &UsageError::TooLarge(7)), Code::HostResponseInvalid, "fewer days"),
            (host_problem(id, &unreachable), Code::HostUnreachable, "be reached"),
        ] {
            assert_eq!(problem.code, code);
            assert!(problem.detail.contains(detail), "{problem:?}");
        }
    }
}

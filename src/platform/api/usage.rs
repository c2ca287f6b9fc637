//! GET `/vps/:id/usage`: what an owner's dispatches have cost, as the machine's host reports it. It is the owner's data, so
//! each read is on record, also one that fails.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{Method, StatusCode, header};
use jiff::civil::Date;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::call::{Call, path_id};
use super::endpoint::{Access, BILLING, Endpoint, MACHINE_ID, OPERATOR, told};
use super::fault;
use super::mutation::{self, Changed};
use crate::http::openapi::Operation;
use crate::http::problem::{Code, Problem, chain};
use crate::http::segments::Segments;
use crate::http::usage::{self, UsageQuery};
use crate::machine::id::MachineId;
use crate::machine::state::Status;
use crate::platform::context::Platform;
use crate::platform::db;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::operations::ask_host::{self, HostCallError, UsageError};
use crate::platform::operators::Operator;
use crate::untrusted_text;

const RETRY_SECONDS: u64 = 5;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    let id: MachineId = path_id("machineId", &id)?;
    let mut fields = call.query();
    let query = UsageQuery::read(&mut fields);
    let query = fields.finish(Some(query))?;
    let read = read(&platform, id, &query).await;
    // Before it is answered: what cannot be recorded is not handed out.
    record(&platform, &operator, id, &query, &read).await?;
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(read?)).into_response())
}

async fn read(platform: &Platform, id: MachineId, query: &UsageQuery) -> Result<Report, Problem> {
    let session = platform.report_db.session().await?;
    let machine = db::machines::get(&session, id).await?;
    // No connection is held while the host is called.
    drop(session);
    let machine = machine.ok_or_else(|| fault::machine_not_found(&id.to_string()))?;
    check_serves(&machine)?;
    let answer = ask_host::usage(platform, &machine, query).await.map_err(|error| {
        tracing::warn!(machine = %id, error = %chain(&error), "the host's usage cannot be read");
        refusal(id, &error)
    })?;
    Report::parse(&answer).map_err(|error| {
        tracing::warn!(machine = %id, %error, "the host's answer is not a usage report");
        let detail =
            format!("The answer of machine {id} is not a usage report; the platform's log has the reason.");
        Problem::new(Code::HostAnswerInvalid, detail)
    })
}

/// Refuses a machine whose host does not serve.
fn check_serves(machine: &MachineRow) -> Result<(), Problem> {
    let id = machine.id;
    if machine.deleted_at.is_some() {
        let detail = format!("Machine {id} has been deleted: no host reports its usage any more.");
        return Err(Problem::new(Code::MachineNotFound, detail));
    }
    if machine.retired_at.is_some() {
        let detail = format!(
            "Machine {id} has been replaced: its successor reports the usage of the slot. `svcctl list --user {}` shows it.",
            machine.user
        );
        return Err(invalid_state("retired", detail));
    }
    if machine.status != Status::Running {
        return Err(fault::invalid_state(machine.status.as_str(), &[Status::Running]));
    }
    if machine.powered_off_at.is_some() {
        let detail = format!(
            "Machine {id} is switched off: its host cannot report its usage. `svcctl power on {id} --wait` switches it on."
        );
        return Err(invalid_state(machine.status.as_str(), detail));
    }
    Ok(())
}

fn invalid_state(status: &str, detail: String) -> Problem {
    Problem::new(Code::InvalidState, detail).with("machineStatus", status.into()).with("allowed", json!([]))
}

/// Pure: what each failure of the host means to an operator.
fn refusal(id: MachineId, error: &UsageError) -> Problem {
    match error {
        UsageError::Host(HostCallError::Unreachable(_)) => {
            Problem::new(Code::HostUnreachable, format!("The host of machine {id} did not answer in time."))
        }
        UsageError::Host(HostCallError::Refused(StatusCode::UNAUTHORIZED)) => {
            let detail = format!(
                "The host of machine {id} did not accept the platform's proof (401): its clock is wrong, or it has not fetched \
                 the current keys. `svcctl status {id}` shows its last heartbeat."
            );
            Problem::new(Code::HostRefused, detail)
        }
        UsageError::Host(HostCallError::Refused(
            status @ (StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED),
        )) => {
            let detail = format!(
                "The release of machine {id} does not report usage to the platform ({}): update it with `svcctl deploy start`.",
                status.as_u16()
            );
            Problem::new(Code::HostRefused, detail)
        }
        UsageError::Host(HostCallError::Refused(StatusCode::SERVICE_UNAVAILABLE)) => {
            let detail =
                format!("The host of machine {id} cannot read its records at the moment; try again.");
            Problem::new(Code::Unavailable, detail).retry_after(RETRY_SECONDS)
        }
        UsageError::Host(HostCallError::Refused(status)) => {
            let status = status.as_u16();
            let detail = format!(
                "The host of machine {id} answered {status}; its log has the reason under this request id."
            );
            Problem::new(Code::HostRefused, detail)
        }
        UsageError::TooLarge(max) => {
            let detail = format!(
                "The usage report of machine {id} is larger than {max} bytes: name fewer days by startDate and endDate, or one \
                 user by userId."
            );
            Problem::new(Code::HostAnswerInvalid, detail)
        }
    }
}

/// Writes who read what, and how it ended.
async fn record(
    platform: &Platform,
    operator: &Operator,
    id: MachineId,
    query: &UsageQuery,
    read: &Result<Report, Problem>,
) -> Result<(), Problem> {
    let mut after = json!({});
    for (name, value) in query.pairs() {
        after[name] = value.into();
    }
    after["outcome"] = read.as_ref().map_or_else(|problem| problem.code.as_str(), |_| "read").into();
    let target = id.to_string();
    let changed = Changed { action: "usage.read", target: &target, before: None, after: Some(&after) };
    let mut session = platform.report_db.session().await?;
    let tx = db::begin(&mut session).await?;
    mutation::audit(&tx, operator.actor(), &changed).await?;
    Ok(db::commit(tx).await?)
}

/// A host's report: nothing but what its description names is passed on.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    total_cost: f64,
    total_tokens_in: u64,
    total_tokens_out: u64,
    total_dispatches: u64,
    entries: Vec<Entry>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    date: Date,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    cost: f64,
    tokens_in: u64,
    tokens_out: u64,
    dispatches: u64,
}

impl Report {
    /// Texts become bounded and printable; amounts below zero are refused.
    fn parse(answer: &[u8]) -> Result<Self, String> {
        let mut report: Self = serde_json::from_slice(answer).map_err(|error| error.to_string())?;
        let costs = report.entries.iter().map(|entry| entry.cost);
        if costs.chain([report.total_cost]).any(|cost| cost < 0.0) {
            return Err("a cost is negative".to_owned());
        }
        for entry in &mut report.entries {
            for text in [&mut entry.model, &mut entry.user_id].into_iter().flatten() {
                *text = untrusted_text::bounded(text);
            }
        }
        Ok(report)
    }
}

/// What an operator is answered of a host's report, as `tests/fuzz` reaches it.
///
/// # Errors
/// Why it is no report.
#[cfg(feature = "fuzzing")]
pub fn read_report(answer: &[u8]) -> Result<serde_json::Value, String> {
    Report::parse(answer).map(|report| json!(report))
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(BILLING),
    operation: Operation {
        id: "getUsage",
        method: Method::GET,
        path: "/vps/{id}/usage",
        summary: "What dispatches on the machine have cost, as its host reports it; each read is in the audit.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, usage::USER_ID, usage::START_DATE, usage::END_DATE, usage::GROUP_BY],
        body: None,
        answers: &[told(200, "The sums.", usage::report)],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::HostUnreachable,
            Code::HostRefused,
            Code::HostAnswerInvalid,
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

    fn report(change: impl FnOnce(&mut Value)) -> Result<Report, String> {
        let entry = json!({"date": "2026-11-01", "userId": "a\u{1b}[2J", "cost": 1.5, "tokensIn": 1, "tokensOut": 2,
            "dispatches": 1});
        let mut report = json!({"totalCost": 1.5, "totalTokensIn": 1, "totalTokensOut": 2, "totalDispatches": 1,
            "entries": [entry]});
        change(&mut report);
        Report::parse(report.to_string().as_bytes())
    }

    #[test]
    fn report_passes_on_printable_texts_and_known_members() {
        let passed = serde_json::to_value(report(|it| it["secret"] = json!("x")).unwrap()).unwrap();
        assert_eq!(passed["entries"][0]["userId"], "a\u{FFFD}[2J");
        assert_eq!((&passed["totalCost"], &passed["secret"]), (&json!(1.5), &Value::Null));
    }

    #[test]
    fn report_refuses_what_is_not_one() {
        assert!(report(|it| it["totalCost"] = json!(-1)).is_err());
        assert!(report(|it| it["entries"][0]["cost"] = json!(-0.1)).is_err());
        assert!(report(|it| it["entries"][0]["date"] = json!("soon")).is_err());
        assert!(report(|it| it["entries"] = json!(null)).is_err());
        assert!(Report::parse(b"<html>").is_err());
    }

    #[test]
    fn refusal_names_each_failure_of_a_host() {
        let id = MachineId::new();
        let refused = |status| refusal(id, &UsageError::Host(HostCallError::Refused(status)));
        let unreachable = UsageError::Host(HostCallError::Unreachable(anyhow::anyhow!("x")));
        for (problem, code, detail) in [
            (refused(StatusCode::UNAUTHORIZED), Code::HostRefused, "clock"),
            (refused(StatusCode::FORBIDDEN), Code::HostRefused, "update it"),
            (refused(StatusCode::NOT_FOUND), Code::HostRefused, "update it"),
            (refused(StatusCode::SERVICE_UNAVAILABLE), Code::Unavailable, "try again"),
            (refused(StatusCode::INTERNAL_SERVER_ERROR), Code::HostRefused, "answered 500"),
            (refusal(id, &UsageError::TooLarge(7)), Code::HostAnswerInvalid, "fewer days"),
            (refusal(id, &unreachable), Code::HostUnreachable, "in time"),
        ] {
            assert_eq!(problem.code, code);
            assert!(problem.detail.contains(detail), "{problem:?}");
        }
    }
}

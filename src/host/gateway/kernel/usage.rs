//! `GET /api/usage`: what was spent, by day, week, month, model or user.

use std::sync::Arc;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::routing::get;
use http::Method;
use jiff::civil::Date;
use serde_json::{Value, json};

use crate::host::gateway::endpoint::{Endpoint, OWN_BODY, READERS, told};
use crate::host::gateway::state::Gateway;
use crate::host::records::ledger::{Asked, GroupBy, Report};
use crate::http::fields::Fields;
use crate::http::openapi::{
    Operation, Parameter, Place, array, count, number, object, one_of, text, text_to,
};
use crate::http::problem::{Code, Problem};

/// The longest name of a user or channel.
pub const LONGEST_SENDER: usize = 256;

async fn usage(
    State(gateway): State<Arc<Gateway>>,
    RawQuery(query): RawQuery,
) -> Result<Json<Report>, Problem> {
    let asked = asked(&query.unwrap_or_default())?;
    gateway.kernel.ready().await?;
    // Years of many users take a moment.
    let kernel = Arc::clone(&gateway.kernel);
    let report = tokio::task::spawn_blocking(move || kernel.book().map(|book| book.report(&asked))).await;
    let report = report.map_err(|error| Problem::internal(&error))??;
    Ok(Json(report))
}

fn asked(query: &str) -> Result<Asked, Problem> {
    let mut query = Fields::of_query(query);
    let user_id = query.optional_text("userId", LONGEST_SENDER);
    let (start, end) = (date(&mut query, "startDate"), date(&mut query, "endDate"));
    let group_by: Option<GroupBy> = query.optional("groupBy");
    if let (Some(start), Some(end)) = (start, end)
        && start > end
    {
        query.wrong("endDate", "must not be before startDate");
    }
    query.finish(Some(Asked { user_id, start, end, group_by: group_by.unwrap_or_default() }))
}

/// A day as `2026-11-22`, and in no other form.
fn date(query: &mut Fields, name: &str) -> Option<Date> {
    let text: String = query.optional(name)?;
    let date = text.parse::<Date>().ok().filter(|date| date.to_string() == text);
    if date.is_none() {
        query.wrong(name, "must be a date such as 2026-11-22");
    }
    date
}

fn day() -> Value {
    json!({ "type": "string", "format": "date" })
}

pub static USAGE: Endpoint = Endpoint {
    operation: Operation {
        id: "usage",
        method: Method::GET,
        path: "/api/usage",
        summary: "What dispatches have cost, summed up.",
        credentials: READERS,
        parameters: &[
            Parameter {
                name: "userId",
                place: Place::Query,
                schema: || text_to(LONGEST_SENDER),
                about: "Of this user or channel alone.",
            },
            Parameter { name: "startDate", place: Place::Query, schema: day, about: "The first day." },
            Parameter {
                name: "endDate",
                place: Place::Query,
                schema: day,
                about: "The last day; it counts.",
            },
            Parameter {
                name: "groupBy",
                place: Place::Query,
                schema: || one_of(&GroupBy::WORDS),
                about: "By what it is summed up; day, where nothing is said.",
            },
        ],
        body: None,
        answers: &[told(200, "The sums.", || {
            let sums =
                [("cost", number()), ("tokensIn", count()), ("tokensOut", count()), ("dispatches", count())];
            let mut entry = vec![("date", day())];
            entry.extend(sums);
            let entry = object(&entry, &[("model", text()), ("userId", text())]);
            object(
                &[
                    ("totalCost", number()),
                    ("totalTokensIn", count()),
                    ("totalTokensOut", count()),
                    ("totalDispatches", count()),
                    ("entries", array(entry)),
                ],
                &[],
            )
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || get(usage),
};

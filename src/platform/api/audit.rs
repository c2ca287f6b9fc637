//! GET `/audit`: who changed what, the newest first, in pages by key.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::Method;
use serde_json::{Value, json};

use super::call::Call;
use super::endpoint::{Access, CURSOR, Endpoint, OPERATOR, READ_OR_ADMIN, told};
use crate::http::openapi::{Operation, Parameter, Place, array, nullable, object, text, text_to, time, uuid};
use crate::http::problem::{Code, Problem};
use crate::platform::context::Platform;
use crate::platform::db::audit::{self, AuditFilter, AuditRow};

const PAGE: usize = 100;
const MAX_PAGE: usize = 500;
const MAX_FILTER_CHARS: usize = 256;

async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform).await?;
    let mut query = call.query();
    let filter = AuditFilter {
        actor: query.optional_text("actor", MAX_FILTER_CHARS),
        action: query.optional_text("action", MAX_FILTER_CHARS),
        target: query.optional_text("target", MAX_FILTER_CHARS),
        since: query.time("since"),
        until: query.time("until"),
        before: query.optional("cursor"),
    };
    let limit = query.within("limit", 1..=MAX_PAGE, PAGE);
    query.finish(Some(()))?;

    let session = platform.report_db.session().await?;
    let one_more = i64::try_from(limit + 1).unwrap_or(i64::MAX);
    let mut found = audit::list(&session, &filter, one_more).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| more).map(|entry| entry.id.to_string());
    let entries: Vec<_> = found.iter().map(AuditRow::record).collect();
    Ok(Json(json!({"entries": entries, "nextCursor": next})).into_response())
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ_OR_ADMIN),
    operation: Operation {
        id: "listAudit",
        method: Method::GET,
        path: "/audit",
        summary: "Who changed what, and who read an owner's data; the newest first.",
        credentials: &[OPERATOR],
        parameters: &[ACTOR, ACTION, TARGET, SINCE, UNTIL, LIMIT, Parameter { schema: uuid, ..CURSOR }],
        body: None,
        answers: &[told(200, "A page.", page)],
        problems: &[Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

const fn by(name: &'static str, schema: fn() -> Value, about: &'static str) -> Parameter {
    Parameter { name, place: Place::Query, schema, about }
}

fn exact() -> Value {
    text_to(MAX_FILTER_CHARS)
}

const ACTOR: Parameter = by(
    "actor",
    exact,
    "An operator's name; `operator` for PLATFORM_SECRET, `platform` for its own work, `machine:<id>`.",
);
const ACTION: Parameter = by("action", exact, "Such as `recover` or `operator.add`.");
const TARGET: Parameter = by("target", exact, "A machine's id, USER/SLOT, or what else the action is about.");
const SINCE: Parameter = by("since", time, "Entries from this time on.");
const UNTIL: Parameter = by("until", time, "Entries before this time.");
const LIMIT: Parameter = by(
    "limit",
    || json!({ "type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE }),
    "The size of a page.",
);

fn page() -> Value {
    let any = || json!({});
    let entry = object(
        &[
            ("auditId", uuid()),
            ("at", time()),
            ("actor", text()),
            ("action", text()),
            ("target", text()),
            ("before", any()),
            ("after", any()),
            ("requestId", text()),
        ],
        &[],
    );
    object(&[("entries", array(entry)), ("nextCursor", nullable(text()))], &[])
}

//! `/api/side-database`: the owner looks at an earlier snapshot beside the database, and takes tables back from it.
//!
//! A request becomes a file that a unit consumes; what came of it is in a file that is shown here.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete as on_delete, get, post};
use http::{HeaderMap, Method, StatusCode};
use serde_json::{Value, json};

use crate::clock::rfc3339_ms;
use crate::fsx::FileError;
use crate::host::gateway::body;
use crate::host::gateway::endpoint::{Endpoint, OWN_BODY, OWNERS, told};
use crate::host::gateway::state::Gateway;
use crate::host::snapshots::side_database;
use crate::host::snapshots::side_database::{
    Action, Copy, MAX_TABLES, Mode, Request, SnapshotChoice, Status,
};
use crate::host::system::blocking::blocking;
use crate::host::system::layout::Layout;
use crate::http::openapi::{
    Operation, array, boolean, count, fields, matching, named, nullable, object, one_of, text, text_to, time,
};
use crate::http::problem::{Code, Problem};
use crate::store::key::SnapshotKey;

/// `GET /api/side-database`
pub async fn show(State(gateway): State<Arc<Gateway>>) -> Result<Json<Value>, Problem> {
    let layout = gateway.config.layout.clone();
    let known = blocking(move || known(&layout)).await?;
    Ok(Json(known))
}

/// The state, and what is asked and not done yet.
fn known(layout: &Layout) -> Result<Value, FileError> {
    // The request first: it is removed after the state has told of it.
    let request = Request::read(layout)?.and_then(Result::ok);
    let state = side_database::State::read(layout)?;
    let pending = request.map(|request| {
        let action = match request.action {
            Action::Open(_) => "open",
            Action::Copy(_) => "copy",
            Action::Close => "close",
        };
        json!({
            "action": action, "requestId": request.request_id, "requestedAt": rfc3339_ms(request.requested_at),
        })
    });
    let state = state.as_ref();
    Ok(json!({
        "status": state.map_or(Status::Closed, |state| state.status),
        "key": state.and_then(|state| state.key.as_deref()),
        "tables": state.map_or(&[][..], |state| &state.tables),
        "error": state.and_then(|state| state.error.as_deref()),
        "lastCopy": state.and_then(|state| state.last_copy.as_ref()),
        "updatedAt": state.map(|state| rfc3339_ms(state.updated_at)),
        "pending": pending,
    }))
}

/// `POST /api/side-database`: an earlier snapshot, beside the database, soon.
pub async fn open(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let mut fields = body::fields(&headers, body, OWN_BODY).await?;
    let key: Option<SnapshotKey> = fields.optional("key");
    let at = fields.time("at");
    if key.is_some() && at.is_some() {
        fields.wrong("at", "cannot be given beside key");
    }
    let chosen = SnapshotChoice { key: key.map(|key| key.as_str().to_owned()), at };
    let chosen = fields.finish(Some(chosen))?;
    ask(&gateway, Action::Open(chosen)).await
}

/// `POST /api/side-database/copy`: rows of its tables, back into the database.
pub async fn copy(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let mut fields = body::fields(&headers, body, OWN_BODY).await?;
    let given = fields.has("tables");
    let tables = fields.strings("tables", MAX_TABLES);
    if !given {
        fields.wrong("tables", "is required");
    } else if tables.is_empty() || tables.iter().any(String::is_empty) {
        fields.wrong("tables", "must name at least one table, each as schema.table");
    }
    let mode: Option<Mode> = fields.optional("mode");
    let dry_run = fields.boolean("dryRun").unwrap_or(false);
    let backup = fields.boolean("backup").unwrap_or(true);
    let wanted = Copy { tables, mode: mode.unwrap_or(Mode::Missing), dry_run, backup };
    let wanted = fields.finish(Some(wanted))?;
    let layout = gateway.config.layout.clone();
    let state = blocking(move || side_database::State::read(&layout)).await?;
    let there = state.filter(|state| matches!(state.status, Status::Open | Status::Copying));
    let Some(state) = there else {
        let detail = "No side database is open: POST /api/side-database opens one.";
        return Err(Problem::new(Code::InvalidState, detail));
    };
    let named = |table: &&String| state.tables.iter().any(|known| known.name == **table);
    if let Some(stranger) = wanted.tables.iter().find(|table| !named(table)) {
        let detail =
            format!("{stranger:?} is not a table of the side database: GET /api/side-database lists them.");
        return Err(Problem::new(Code::NotFound, detail));
    }
    ask(&gateway, Action::Copy(wanted)).await
}

/// `DELETE /api/side-database`: it is not needed any more.
pub async fn close(State(gateway): State<Arc<Gateway>>) -> Result<Response, Problem> {
    ask(&gateway, Action::Close).await
}

async fn ask(gateway: &Gateway, action: Action) -> Result<Response, Problem> {
    let layout = gateway.config.layout.clone();
    let request = Request::new(action);
    let answer = json!({ "requestId": request.request_id, "requestedAt": rfc3339_ms(request.requested_at) });
    if !blocking(move || request.submit(&layout)).await? {
        let detail =
            "Something is asked of the side database already: GET /api/side-database tells when it is done.";
        return Err(Problem::new(Code::InvalidState, detail));
    }
    Ok((StatusCode::ACCEPTED, Json(answer)).into_response())
}

fn accepted() -> Value {
    object(&[("requestId", text()), ("requestedAt", time())], &[])
}

const PROBLEMS: &[Code] = &[Code::Forbidden, Code::Unavailable, Code::InvalidState];

pub static SHOW: Endpoint = Endpoint {
    operation: Operation {
        id: "showSideDatabase",
        method: Method::GET,
        path: "/api/side-database",
        summary: "The snapshot that lies beside the database, its tables, and how the last copy out of it ended.",
        credentials: OWNERS,
        parameters: &[],
        body: None,
        answers: &[told(200, "What is known.", || named("SideDatabase"))],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || get(show),
};

pub static OPEN: Endpoint = Endpoint {
    operation: Operation {
        id: "openSideDatabase",
        method: Method::POST,
        path: "/api/side-database",
        summary: "Loads a snapshot beside the database: the one with this key, else the last one taken at this time or \
                  before, else the last one.",
        credentials: OWNERS,
        parameters: &[],
        body: Some(|| fields(&[], &[("key", matching(SnapshotKey::PATTERN)), ("at", time())])),
        answers: &[told(202, "It is asked for.", accepted)],
        problems: PROBLEMS,
    },
    largest_body: OWN_BODY,
    serve: || post(open),
};

pub static COPY: Endpoint = Endpoint {
    operation: Operation {
        id: "copyFromSideDatabase",
        method: Method::POST,
        path: "/api/side-database/copy",
        summary: "Copies rows of these tables back. Mode missing: those that are gone; overwrite: those that differ, too; \
                  replace: the table becomes what it was. A snapshot of what is there is taken first.",
        credentials: OWNERS,
        parameters: &[],
        body: Some(|| {
            let mut tables = array(text_to(200));
            tables["minItems"] = 1.into();
            tables["maxItems"] = MAX_TABLES.into();
            let options = [("mode", one_of(&Mode::NAMES)), ("dryRun", boolean()), ("backup", boolean())];
            fields(&[("tables", tables)], &options)
        }),
        answers: &[told(202, "It is asked for.", accepted)],
        problems: &[Code::Forbidden, Code::Unavailable, Code::InvalidState, Code::NotFound],
    },
    largest_body: OWN_BODY,
    serve: || post(copy),
};

pub static CLOSE: Endpoint = Endpoint {
    operation: Operation {
        id: "closeSideDatabase",
        method: Method::DELETE,
        path: "/api/side-database",
        summary: "Drops the side database.",
        credentials: OWNERS,
        parameters: &[],
        body: None,
        answers: &[told(202, "It is asked for.", accepted)],
        problems: PROBLEMS,
    },
    largest_body: OWN_BODY,
    serve: || on_delete(close),
};

/// What is known of the side database.
pub fn told_side() -> Value {
    let copied = object(
        &[
            ("name", text()),
            ("created", boolean()),
            ("inserted", count()),
            ("updated", count()),
            ("deleted", count()),
            ("skipped", count()),
        ],
        &[("leftOut", array(text())), ("recreated", array(text())), ("notRecreated", array(text()))],
    );
    let last = object(
        &[
            ("requestId", text()),
            ("at", time()),
            ("mode", one_of(&Mode::NAMES)),
            ("dryRun", boolean()),
            ("tables", array(copied)),
        ],
        &[("error", text())],
    );
    let pending = object(
        &[("action", one_of(&["open", "copy", "close"])), ("requestId", text()), ("requestedAt", time())],
        &[],
    );
    let table = object(&[("name", text()), ("rows", count())], &[]);
    object(
        &[
            ("status", one_of(&["closed", "opening", "open", "copying", "failed"])),
            ("key", nullable(text())),
            ("tables", array(table)),
            ("error", nullable(text())),
            ("lastCopy", nullable(last)),
            ("updatedAt", nullable(time())),
            ("pending", nullable(pending)),
        ],
        &[],
    )
}

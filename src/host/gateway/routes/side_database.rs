//! `/api/side-database`: opens an earlier snapshot next to the database, and copies rows back from it.
//!
//! Requests are written to a file for a systemd unit to consume; `GET` shows the unit's state file.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode};
use serde_json::{Value, json};

use crate::auth::OWNER_OR_ADMIN;
use crate::body;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use svc_base::clock::rfc3339_ms;
use svc_base::fsx::FileError;
use svc_host::snapshots::side_database;
use svc_host::snapshots::side_database::{
    CopyMode, MAX_TABLES, SideAction, SideRequest, SideStatus, SnapshotChoice, TableCopy,
};
use svc_host::system::blocking::run_blocking;
use svc_host::system::layout::Layout;
use svc_http::openapi::{
    Operation, array, boolean, count, nullable, object, request_object, schema_ref, string_enum, text,
    text_matching, text_up_to, time,
};
use svc_http::problem::{Code, Problem};
use svc_store::key::SnapshotKey;

/// `GET /api/side-database`
pub async fn show(State(layout): State<Layout>) -> Result<Json<Value>, Problem> {
    let state = run_blocking(move || describe_state(&layout)).await?;
    Ok(Json(state))
}

/// Describes the current state and any pending request.
fn describe_state(layout: &Layout) -> Result<Value, FileError> {
    // Read the request first: it's only removed once the state reflects it.
    let request = SideRequest::read(layout)?.and_then(Result::ok);
    let state = side_database::SideState::read(layout)?;
    let pending = request.map(|request| {
        let action = match request.action {
            SideAction::Open(_) => "open",
            SideAction::Copy(_) => "copy",
            SideAction::Close => "close",
        };
        json!({
            "action": action, "requestId": request.request_id, "requestedAt": rfc3339_ms(request.requested_at),
        })
    });
    let state = state.as_ref();
    Ok(json!({
        "status": state.map_or(SideStatus::Closed, |state| state.status),
        "key": state.and_then(|state| state.key.as_deref()),
        "tables": state.map_or(&[][..], |state| &state.tables),
        "error": state.and_then(|state| state.error.as_deref()),
        "lastCopy": state.and_then(|state| state.last_copy.as_ref()),
        "updatedAt": state.map(|state| rfc3339_ms(state.updated_at)),
        "pending": pending,
    }))
}

/// `POST /api/side-database`: requests that an earlier snapshot be opened next to the database.
pub async fn open(State(layout): State<Layout>, headers: HeaderMap, body: Body) -> Result<Response, Problem> {
    let mut fields = body::read_fields(&headers, body, DEFAULT_MAX_BODY_BYTES).await?;
    let key: Option<SnapshotKey> = fields.optional("key");
    let at = fields.optional_time("at");
    if key.is_some() && at.is_some() {
        fields.add_error("at", "must not be combined with key");
    }
    let choice = SnapshotChoice { key: key.map(|key| key.as_str().to_owned()), at };
    let choice = fields.finish(Some(choice))?;
    submit(layout, SideAction::Open(choice)).await
}

/// `POST /api/side-database/copy`: requests that rows be copied back from the side database.
pub async fn copy(State(layout): State<Layout>, headers: HeaderMap, body: Body) -> Result<Response, Problem> {
    let mut fields = body::read_fields(&headers, body, DEFAULT_MAX_BODY_BYTES).await?;
    let has_tables = fields.has("tables");
    let tables = fields.strings("tables", MAX_TABLES);
    if !has_tables {
        fields.add_error("tables", "is required");
    } else if tables.is_empty() || tables.iter().any(String::is_empty) {
        fields.add_error("tables", "must name at least one table, each as schema.table");
    }
    let mode: Option<CopyMode> = fields.optional("mode");
    let dry_run = fields.boolean("dryRun").unwrap_or(false);
    let backup = fields.boolean("backup").unwrap_or(true);
    let copy = TableCopy { tables, mode: mode.unwrap_or(CopyMode::Missing), dry_run, backup };
    let copy = fields.finish(Some(copy))?;
    let state_layout = layout.clone();
    let state = run_blocking(move || side_database::SideState::read(&state_layout)).await?;
    let open_state = state.filter(|state| matches!(state.status, SideStatus::Open | SideStatus::Copying));
    let Some(state) = open_state else {
        let detail = "No side database is open: open one with POST /api/side-database.";
        return Err(Problem::new(Code::InvalidState, detail));
    };
    let exists = |table: &&String| state.tables.iter().any(|existing| existing.name == **table);
    if let Some(unknown) = copy.tables.iter().find(|table| !exists(table)) {
        let detail = format!(
            "{unknown:?} is not a table of the side database: list its tables with GET /api/side-database."
        );
        return Err(Problem::new(Code::NotFound, detail));
    }
    submit(layout, SideAction::Copy(copy)).await
}

/// `DELETE /api/side-database`: requests that the side database be closed.
pub async fn close(State(layout): State<Layout>) -> Result<Response, Problem> {
    submit(layout, SideAction::Close).await
}

async fn submit(layout: Layout, action: SideAction) -> Result<Response, Problem> {
    let request = SideRequest::new(action);
    let response =
        json!({ "requestId": request.request_id, "requestedAt": rfc3339_ms(request.requested_at) });
    if !run_blocking(move || request.submit(&layout)).await? {
        let detail = "Another request for the side database is pending: wait until `pending` is null in \
                      GET /api/side-database.";
        return Err(Problem::new(Code::InvalidState, detail));
    }
    Ok((StatusCode::ACCEPTED, Json(response)).into_response())
}

fn accepted_schema() -> Value {
    object(&[("requestId", text()), ("requestedAt", time())], &[])
}

const PROBLEMS: &[Code] = &[Code::Forbidden, Code::Unavailable, Code::InvalidState];

pub static SHOW: Endpoint = Endpoint {
    operation: Operation {
        id: "showSideDatabase",
        method: Method::GET,
        path: "/api/side-database",
        summary: "The snapshot open next to the database, its tables, and the result of the last copy.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The state.", || schema_ref("SideDatabase"))],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static OPEN: Endpoint = Endpoint {
    operation: Operation {
        id: "openSideDatabase",
        method: Method::POST,
        path: "/api/side-database",
        summary: "Loads a snapshot next to the database: the one with this key, else the last one taken at or \
                  before this time, else the latest.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[],
        body: Some(|| request_object(&[], &[("key", text_matching(SnapshotKey::PATTERN)), ("at", time())])),
        responses: &[documented_json(202, "The request is accepted.", accepted_schema)],
        problems: PROBLEMS,
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static COPY: Endpoint = Endpoint {
    operation: Operation {
        id: "copyFromSideDatabase",
        method: Method::POST,
        path: "/api/side-database/copy",
        summary: "Copies rows from these tables back. Mode `missing` restores missing rows; `overwrite` also restores \
                  rows that differ; `replace` restores the whole table. A snapshot of the current data is taken first, \
                  unless `backup` is false or `dryRun` is true.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[],
        body: Some(|| {
            let mut tables = array(text_up_to(200));
            tables["minItems"] = 1.into();
            tables["maxItems"] = MAX_TABLES.into();
            let options =
                [("mode", string_enum(CopyMode::NAMES)), ("dryRun", boolean()), ("backup", boolean())];
            request_object(&[("tables", tables)], &options)
        }),
        responses: &[documented_json(202, "The request is accepted.", accepted_schema)],
        problems: &[Code::Forbidden, Code::Unavailable, Code::InvalidState, Code::NotFound],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static CLOSE: Endpoint = Endpoint {
    operation: Operation {
        id: "closeSideDatabase",
        method: Method::DELETE,
        path: "/api/side-database",
        summary: "Drops the side database.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[],
        body: None,
        responses: &[documented_json(202, "The request is accepted.", accepted_schema)],
        problems: PROBLEMS,
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

/// Returns the JSON schema for the side database state.
pub fn side_database_schema() -> Value {
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
            ("mode", string_enum(CopyMode::NAMES)),
            ("dryRun", boolean()),
            ("tables", array(copied)),
        ],
        &[("error", text())],
    );
    let pending = object(
        &[
            ("action", string_enum(&["open", "copy", "close"])),
            ("requestId", text()),
            ("requestedAt", time()),
        ],
        &[],
    );
    let table = object(&[("name", text()), ("rows", count())], &[]);
    object(
        &[
            ("status", string_enum(&["closed", "opening", "open", "copying", "failed"])),
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

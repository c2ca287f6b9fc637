//! Routes for reading records.

use axum::extract::{RawQuery, State};
use axum::response::Response;
use http::{HeaderMap, Method};
use serde_json::{Value, json};
use std::sync::Arc;

use super::log_lines;
use super::log_lines::{DEFAULT_LIMIT, LogView, MAX_FILTER_CHARS, MAX_LIMIT};
use crate::auth::READERS;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use svc_host::agents::dispatch::Dispatcher;
use svc_host::agents::kernel::Kernel;
use svc_host::records::files::LogKind;
use svc_http::openapi::{
    Content, DocumentedResponse, Operation, Parameter, ParameterLocation, array, boolean, count, nullable,
    number, object, schema_ref, string_enum, text, text_matching, text_up_to, time,
};
use svc_http::problem::{Code, Problem};

const fn filter_parameter(name: &'static str, description: &'static str) -> Parameter {
    Parameter {
        name,
        location: ParameterLocation::Query,
        schema: || text_up_to(MAX_FILTER_CHARS),
        description,
    }
}

const OUTCOME_FILTER: Parameter =
    Parameter { schema: || string_enum(&OUTCOMES), ..filter_parameter("status", "`success` or `error`.") };

const SINCE: Parameter = Parameter {
    name: "since",
    location: ParameterLocation::Query,
    schema: time,
    description: "Lines at or after this time.",
};
const UNTIL: Parameter = Parameter {
    name: "until",
    location: ParameterLocation::Query,
    schema: time,
    description: "Lines before this time.",
};
const LIMIT: Parameter = Parameter {
    name: "limit",
    location: ParameterLocation::Query,
    schema: || json!({ "type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT }),
    description: "Maximum number of lines.",
};
const CURSOR: Parameter = Parameter {
    name: "cursor",
    location: ParameterLocation::Query,
    schema: || text_matching(LINE_POSITION_PATTERN),
    description: "The `nextCursor` of the previous page.",
};
const LAST_EVENT_ID: Parameter = Parameter {
    name: "Last-Event-ID",
    location: ParameterLocation::Header,
    schema: || text_matching(TAIL_POSITION_PATTERN),
    description: "Resumes after this event.",
};
const LINE_POSITION_PATTERN: &str = "^(0|[1-9][0-9]{0,18})(-(0|[1-9][0-9]{0,18})){2}$";
/// Empty, or the one or two positions of a `TailPosition`.
const TAIL_POSITION_PATTERN: &str =
    "^((0|[1-9][0-9]{0,18})(-(0|[1-9][0-9]{0,18})){2}(_(0|[1-9][0-9]{0,18})(-(0|[1-9][0-9]{0,18})){2})?)?$";

const EVENTS: DocumentedResponse = DocumentedResponse {
    status: 200,
    description: "Server-sent events, one for each line.",
    content: Content::Other("text/event-stream"),
};

/// Defines a log's two routes: paged and streaming.
macro_rules! log_routes {
    ($list:ident, $list_handler:ident, $follow:ident, $follow_handler:ident, $view:expr, $id:literal, $follow_id:literal, $path:literal, $summary:literal,
     [$($filter:expr),* $(,)?], $member:literal, $line_schema:literal) => {
        pub static $list: Endpoint = Endpoint {
            operation: Operation {
                id: $id,
                method: Method::GET,
                path: $path,
                summary: concat!($summary, ", newest first."),
                credentials: READERS,
                parameters: &[LIMIT, CURSOR, SINCE, UNTIL $(, $filter)*],
                body: None,
                responses: &[documented_json(200, "A page. It may have fewer lines than the limit even if there is a next page.", || {
                    object(&[($member, array(schema_ref($line_schema))), ("nextCursor", nullable(text()))], &[])
                })],
                problems: &[Code::Forbidden, Code::Unavailable, Code::Gone],
            },
            max_body_bytes: DEFAULT_MAX_BODY_BYTES,
        };

        pub async fn $list_handler(
            State(kernel): State<Arc<Kernel>>,
            RawQuery(query): RawQuery,
        ) -> Result<Response, Problem> {
            log_lines::list(&kernel, &$view, query.as_deref()).await
        }

        pub static $follow: Endpoint = Endpoint {
            operation: Operation {
                id: $follow_id,
                method: Method::GET,
                path: concat!($path, "/changes"),
                summary: concat!($summary, ", as a stream."),
                credentials: READERS,
                parameters: &[SINCE, UNTIL $(, $filter)*, LAST_EVENT_ID],
                body: None,
                responses: &[EVENTS],
                problems: &[Code::Forbidden, Code::Unavailable, Code::Gone],
            },
            max_body_bytes: DEFAULT_MAX_BODY_BYTES,
        };

        pub async fn $follow_handler(
            State(kernel): State<Arc<Kernel>>,
            State(dispatcher): State<Arc<Dispatcher>>,
            headers: HeaderMap,
            RawQuery(query): RawQuery,
        ) -> Result<Response, Problem> {
            let closing = dispatcher.closed.clone();
            log_lines::follow(&kernel, &$view, &headers, query.as_deref(), closing).await
        }
    };
}

const OUTCOMES: [&str; 2] = ["success", "error"];
const BACKUP_KINDS: [&str; 2] = ["database", "files"];

static INTERACTIONS_VIEW: LogView = LogView {
    kind: LogKind::Interactions,
    member: "interactions",
    exact_members: &["id", "senderId", "conversationId", "model", "agentName", "status", "batchId"],
    values: &[("status", &OUTCOMES)],
    path_member: None,
    defaults: &[],
    is_text: false,
};
static AUDIT_VIEW: LogView = LogView {
    kind: LogKind::Audit,
    member: "entries",
    exact_members: &["op", "actor", "agentName"],
    values: &[],
    path_member: Some("path"),
    defaults: &[],
    is_text: false,
};
static ACTIVITY_VIEW: LogView = LogView {
    kind: LogKind::Activity,
    member: "lines",
    exact_members: &[],
    values: &[],
    path_member: None,
    defaults: &[],
    is_text: true,
};
static STORAGE_VIEW: LogView = LogView {
    kind: LogKind::Storage,
    member: "days",
    exact_members: &[],
    values: &[],
    path_member: None,
    defaults: &[],
    is_text: false,
};
static BACKUPS_VIEW: LogView = LogView {
    kind: LogKind::Backups,
    member: "backups",
    exact_members: &["kind", "status"],
    values: &[("kind", &BACKUP_KINDS), ("status", &OUTCOMES)],
    path_member: None,
    defaults: &[("kind", "database")],
    is_text: false,
};

log_routes!(
    INTERACTIONS,
    list_interactions,
    FOLLOW_INTERACTIONS,
    follow_interactions,
    INTERACTIONS_VIEW,
    "listInteractions",
    "followInteractions",
    "/api/interactions",
    "Ended dispatches",
    [
        filter_parameter("id", "The dispatch with this id."),
        filter_parameter("senderId", "Dispatches from this user or channel."),
        filter_parameter("conversationId", "Dispatches in this conversation."),
        filter_parameter("model", "Dispatches that used this model."),
        filter_parameter("agentName", "Dispatches to this agent."),
        OUTCOME_FILTER,
        filter_parameter("batchId", "Dispatches in this batch.")
    ],
    "interactions",
    "Interaction"
);
log_routes!(
    AUDIT,
    list_audit,
    FOLLOW_AUDIT,
    follow_audit,
    AUDIT_VIEW,
    "listAudit",
    "followAudit",
    "/api/audit",
    "Changes by agents to files in the owner's home directory",
    [
        filter_parameter("op", "`write`, `delete` or `mkdir`."),
        filter_parameter(
            "actor",
            "Changes that this agent or part of the system made or, if they are ambiguous, may have made."
        ),
        filter_parameter(
            "agentName",
            "Changes that this agent made or, if they are ambiguous, may have made."
        ),
        filter_parameter("path", "Changes to this path and everything below it.")
    ],
    "entries",
    "AuditEntry"
);
log_routes!(
    ACTIVITY,
    list_activity,
    FOLLOW_ACTIVITY,
    follow_activity,
    ACTIVITY_VIEW,
    "listActivity",
    "followActivity",
    "/api/activity",
    "Events on the machine",
    [filter_parameter("contains", "Lines that contain this text.")],
    "lines",
    "ActivityLine"
);
log_routes!(
    STORAGE,
    list_storage,
    FOLLOW_STORAGE,
    follow_storage,
    STORAGE_VIEW,
    "listStorage",
    "followStorage",
    "/api/storage",
    "Daily measurements of storage",
    [],
    "days",
    "StorageDay"
);
log_routes!(
    BACKUPS,
    list_backups,
    FOLLOW_BACKUPS,
    follow_backups,
    BACKUPS_VIEW,
    "listBackups",
    "followBackups",
    "/api/backups",
    "Backups of the database, and the hourly results of the file backup",
    [
        Parameter {
            schema: || string_enum(&BACKUP_KINDS),
            ..filter_parameter("kind", "`database` or `files`.")
        },
        OUTCOME_FILTER,
    ],
    "backups",
    "Backup"
);

/// Returns a line schema. Additional members are allowed, since later releases may add some.
fn line_schema(required: &[(&str, Value)], optional: &[(&str, Value)]) -> Value {
    let mut line_schema = object(required, optional);
    line_schema["additionalProperties"] = true.into();
    line_schema
}

fn gap_schema() -> Value {
    line_schema(
        &[
            ("version", count()),
            ("timestamp", time()),
            ("gap", line_schema(&[("lost", count()), ("since", time())], &[("why", text())])),
        ],
        &[],
    )
}

fn with_gap(entry: &Value) -> Value {
    json!({ "anyOf": [entry, gap_schema()] })
}

pub fn interaction_schema() -> Value {
    let status = || string_enum(&OUTCOMES);
    let tool = line_schema(
        &[("name", text()), ("durationMs", count()), ("inputPreview", text()), ("status", status())],
        &[("error", text())],
    );
    let error = line_schema(
        &[("name", text()), ("message", text())],
        &[("stack", text()), ("tool", text()), ("turn", count())],
    );
    with_gap(&line_schema(
        &[
            ("version", count()),
            ("id", text()),
            ("timestamp", time()),
            ("senderId", text()),
            ("conversationId", text()),
            ("model", text()),
            ("agentName", text()),
            ("tokensIn", count()),
            ("tokensOut", count()),
            ("cost", number()),
            ("durationMs", count()),
            ("tools", array(tool)),
            ("status", status()),
            ("batch", boolean()),
        ],
        &[
            ("acceptedAt", time()),
            ("startedAt", time()),
            ("costEstimated", boolean()),
            ("error", error),
            ("batchId", text()),
            ("batchSize", count()),
            ("fingerprint", text()),
        ],
    ))
}

pub fn audit_schema() -> Value {
    with_gap(&line_schema(
        &[
            ("timestamp", time()),
            ("op", string_enum(&["write", "delete", "mkdir"])),
            ("path", text()),
            ("actor", text()),
        ],
        &[
            ("version", count()),
            ("sizeBytes", count()),
            ("agentName", text()),
            ("dispatchId", text()),
            ("tool", text()),
            ("escaped", boolean()),
            ("ambiguous", boolean()),
        ],
    ))
}

pub fn activity_schema() -> Value {
    object(&[("timestamp", time()), ("text", text())], &[])
}

pub fn storage_schema() -> Value {
    line_schema(
        &[
            ("timestamp", time()),
            ("date", json!({ "type": "string", "format": "date" })),
            ("homeBytes", count()),
            ("appsBytes", count()),
            ("logsBytes", count()),
            ("databaseBytes", count()),
        ],
        // Missing from lines written by earlier releases; `unreadable` is also omitted if zero.
        &[
            ("diskBytes", count()),
            ("diskFreeBytes", count()),
            (
                "apps",
                array(line_schema(
                    &[("slug", text()), ("filesBytes", count()), ("databaseBytes", count())],
                    &[],
                )),
            ),
            ("unreadable", count()),
        ],
    )
}

/// Returns the schema for `backup.jsonl` lines.
pub fn backup_schema() -> Value {
    line_schema(
        &[
            ("timestamp", time()),
            ("kind", string_enum(&BACKUP_KINDS)),
            ("status", string_enum(&OUTCOMES)),
            ("stage", text()),
        ],
        &[
            ("key", nullable(text())),
            ("sizeBytes", nullable(count())),
            ("sha256", nullable(text())),
            ("snapshots", count()),
            ("uploadedBytes", count()),
            ("durationMs", count()),
            ("error", text()),
        ],
    )
}

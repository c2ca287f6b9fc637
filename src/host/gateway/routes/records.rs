//! The routes of the records, and how each of them is described.

use axum::extract::{RawQuery, State};
use axum::routing::get;
use http::{HeaderMap, Method};
use serde_json::{Value, json};
use std::sync::Arc;

use super::record_lines;
use super::record_lines::{DEFAULT_LIMIT, LARGEST_LIMIT, LONGEST_FILTER, Shown};
use crate::host::gateway::endpoint::{Endpoint, OWN_BODY, READERS, told};
use crate::host::gateway::state::Gateway;
use crate::host::records::files::RecordKind;
use crate::http::openapi::{
    Answer, Content, Operation, Parameter, Place, array, boolean, count, matching, named, nullable, number,
    object, one_of, text, text_to, time,
};
use crate::http::problem::Code;

const fn filter(name: &'static str, about: &'static str) -> Parameter {
    Parameter { name, place: Place::Query, schema: || text_to(LONGEST_FILTER), about }
}

const SINCE: Parameter =
    Parameter { name: "since", place: Place::Query, schema: time, about: "Of this time or later." };
const UNTIL: Parameter =
    Parameter { name: "until", place: Place::Query, schema: time, about: "Before this time." };
const LIMIT: Parameter = Parameter {
    name: "limit",
    place: Place::Query,
    schema: || json!({ "type": "integer", "minimum": 1, "maximum": LARGEST_LIMIT, "default": DEFAULT_LIMIT }),
    about: "How many.",
};
const CURSOR: Parameter = Parameter {
    name: "cursor",
    place: Place::Query,
    schema: || matching(PLACE),
    about: "The page after the one whose `nextCursor` this was.",
};
const AFTER: Parameter = Parameter {
    name: "Last-Event-ID",
    place: Place::Header,
    schema: || matching(PLACES),
    about: "Go on after this event.",
};
const PLACE: &str = "^(0|[1-9][0-9]{0,18})(-(0|[1-9][0-9]{0,18})){2}$";
/// One or two of them, or none.
const PLACES: &str =
    "^((0|[1-9][0-9]{0,18})(-(0|[1-9][0-9]{0,18})){2}(_(0|[1-9][0-9]{0,18})(-(0|[1-9][0-9]{0,18})){2})?)?$";

const EVENTS: Answer = Answer {
    status: 200,
    about: "Server-sent events, each a line.",
    content: Content::Other("text/event-stream"),
};

/// The two routes of a record: its pages, and what comes.
macro_rules! record {
    ($list:ident, $follow:ident, $shown:expr, $id:literal, $follow_id:literal, $path:literal, $what:literal,
     [$($filter:expr),*], $member:literal, $line:literal) => {
        pub static $list: Endpoint = Endpoint {
            operation: Operation {
                id: $id,
                method: Method::GET,
                path: $path,
                summary: concat!($what, ", the newest first."),
                credentials: READERS,
                parameters: &[LIMIT, CURSOR, SINCE, UNTIL $(, $filter)*],
                body: None,
                answers: &[told(200, "A page. Few lines with a cursor are what was found so far.", || {
                    object(&[($member, array(named($line))), ("nextCursor", nullable(text()))], &[])
                })],
                problems: &[Code::Forbidden, Code::Unavailable, Code::Gone],
            },
            largest_body: OWN_BODY,
            serve: || {
                get(|State(gateway): State<Arc<Gateway>>, RawQuery(query): RawQuery| async move {
                    record_lines::list(&gateway.kernel, &$shown, query.as_deref()).await
                })
            },
        };

        pub static $follow: Endpoint = Endpoint {
            operation: Operation {
                id: $follow_id,
                method: Method::GET,
                path: concat!($path, "/changes"),
                summary: concat!($what, ", as they come."),
                credentials: READERS,
                parameters: &[SINCE, UNTIL $(, $filter)*, AFTER],
                body: None,
                answers: &[EVENTS],
                problems: &[Code::Forbidden, Code::Unavailable, Code::Gone],
            },
            largest_body: OWN_BODY,
            serve: || {
                get(|State(gateway): State<Arc<Gateway>>, headers: HeaderMap, RawQuery(query): RawQuery| async move {
                    record_lines::follow(&gateway.kernel, &$shown, &headers, query.as_deref()).await
                })
            },
        };
    };
}

static OF_INTERACTIONS: Shown = Shown {
    kind: RecordKind::Interactions,
    member: "interactions",
    equal: &["id", "senderId", "conversationId", "model", "agentName", "status", "batchId"],
    below: None,
    text: false,
};
static OF_AUDIT: Shown = Shown {
    kind: RecordKind::Audit,
    member: "entries",
    equal: &["op", "actor", "agentName"],
    below: Some("path"),
    text: false,
};
static OF_ACTIVITY: Shown =
    Shown { kind: RecordKind::Activity, member: "lines", equal: &[], below: None, text: true };
static OF_STORAGE: Shown =
    Shown { kind: RecordKind::Storage, member: "days", equal: &[], below: None, text: false };
static OF_BACKUPS: Shown =
    Shown { kind: RecordKind::Backups, member: "backups", equal: &["status"], below: None, text: false };

record!(
    INTERACTIONS,
    FOLLOW_INTERACTIONS,
    OF_INTERACTIONS,
    "listInteractions",
    "followInteractions",
    "/api/interactions",
    "Dispatches that have ended",
    [
        filter("id", "The dispatch of this id."),
        filter("senderId", "Of this user or channel."),
        filter("conversationId", "Of this conversation."),
        filter("model", "By this model."),
        filter("agentName", "By this agent."),
        filter("status", "success or error."),
        filter("batchId", "Of this batch.")
    ],
    "interactions",
    "Interaction"
);
record!(
    AUDIT,
    FOLLOW_AUDIT,
    OF_AUDIT,
    "listAudit",
    "followAudit",
    "/api/audit",
    "Changes of the home's files by agents",
    [
        filter("op", "write, delete or mkdir."),
        filter("actor", "By this agent or part of the system."),
        filter("agentName", "By this agent."),
        filter("path", "Of this path, or below it.")
    ],
    "entries",
    "AuditEntry"
);
record!(
    ACTIVITY,
    FOLLOW_ACTIVITY,
    OF_ACTIVITY,
    "listActivity",
    "followActivity",
    "/api/activity",
    "What happened on the machine",
    [filter("contains", "With this in its text.")],
    "lines",
    "ActivityLine"
);
record!(
    STORAGE,
    FOLLOW_STORAGE,
    OF_STORAGE,
    "listStorage",
    "followStorage",
    "/api/storage",
    "Daily measurements of storage",
    [],
    "days",
    "StorageDay"
);
record!(
    BACKUPS,
    FOLLOW_BACKUPS,
    OF_BACKUPS,
    "listBackups",
    "followBackups",
    "/api/backups",
    "The runs of the backup",
    [filter("status", "success or error.")],
    "backups",
    "Backup"
);

/// Later releases may say more in a line.
fn line(required: &[(&str, Value)], optional: &[(&str, Value)]) -> Value {
    let mut line = object(required, optional);
    line["additionalProperties"] = true.into();
    line
}

fn gap() -> Value {
    line(
        &[
            ("version", count()),
            ("timestamp", time()),
            ("gap", line(&[("lost", count()), ("since", time())], &[("why", text())])),
        ],
        &[],
    )
}

fn or_gap(entry: &Value) -> Value {
    json!({ "anyOf": [entry, gap()] })
}

pub fn told_interaction() -> Value {
    let status = || one_of(&["success", "error"]);
    let tool = line(
        &[("name", text()), ("durationMs", count()), ("inputPreview", text()), ("status", status())],
        &[],
    );
    let error = line(
        &[("name", text()), ("message", text())],
        &[("stack", text()), ("tool", text()), ("turn", count())],
    );
    or_gap(&line(
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
        &[("error", error), ("batchId", text())],
    ))
}

pub fn told_audit() -> Value {
    or_gap(&line(
        &[
            ("timestamp", time()),
            ("op", one_of(&["write", "delete", "mkdir"])),
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

pub fn told_activity() -> Value {
    object(&[("timestamp", time()), ("text", text())], &[])
}

pub fn told_storage() -> Value {
    line(
        &[
            ("timestamp", time()),
            ("date", json!({ "type": "string", "format": "date" })),
            ("homeBytes", count()),
            ("appsBytes", count()),
            ("logsBytes", count()),
            ("databaseBytes", count()),
        ],
        // Of lines of an earlier release there are neither.
        &[
            ("diskBytes", count()),
            ("diskFreeBytes", count()),
            (
                "apps",
                array(line(&[("slug", text()), ("filesBytes", count()), ("databaseBytes", count())], &[])),
            ),
            ("unreadable", count()),
        ],
    )
}

/// A line of `backup.jsonl`.
pub fn told_backup() -> Value {
    line(
        &[("timestamp", time()), ("status", one_of(&["success", "error"])), ("stage", text())],
        &[
            ("key", nullable(text())),
            ("sizeBytes", nullable(count())),
            ("sha256", nullable(text())),
            ("durationMs", count()),
            ("error", text()),
        ],
    )
}

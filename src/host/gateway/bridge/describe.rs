//! The bridge's routes and their descriptions. The schema of a query is derived from the list of actions that the
//! request parser uses.

use http::Method;
use serde_json::{Value, json};

use super::request::{ACTIONS, ActionShape, MAX_OPERATIONS};
use crate::auth::ALL_EXCEPT_PLATFORM;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use svc_http::openapi::{
    Content, DocumentedResponse, Operation, Parameter, ParameterLocation, array, boolean, count,
    nul_free_text, nullable, object, schema_ref, string_enum, text, text_matching,
};
use svc_http::problem::Code;

/// Maximum body size of a query, in bytes.
pub const MAX_QUERY_BYTES: usize = 1024 * 1024;

pub static QUERY: Endpoint = Endpoint {
    operation: Operation {
        id: "query",
        method: Method::POST,
        path: "/api/bridge/query",
        summary: "Reads or writes the tables of an app.",
        credentials: ALL_EXCEPT_PLATFORM,
        parameters: &[],
        body: Some(|| json!({ "oneOf": ACTIONS.iter().map(request_schema).collect::<Vec<_>>() })),
        responses: &[
            documented_json(200, "The result.", result_schema),
            documented_json(201, "The inserted row or rows.", created_schema),
        ],
        problems: &[
            Code::Forbidden,
            Code::NotFound,
            Code::Conflict,
            Code::StorageQuotaReached,
            Code::DatabaseUnavailable,
            Code::Unavailable,
            Code::DeadlineExceeded,
        ],
    },
    max_body_bytes: MAX_QUERY_BYTES,
};

pub static SCHEMAS: Endpoint = Endpoint {
    operation: Operation {
        id: "listSchemas",
        method: Method::GET,
        path: "/api/bridge/schemas",
        summary: "Lists the tables and columns of all apps; an app gets only its own, and an agent those of its \
                  apps.",
        credentials: ALL_EXCEPT_PLATFORM,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The apps' schemas.", || {
            object(&[("data", array(schema_ref("AppSchema")))], &[])
        })],
        problems: &[Code::Forbidden, Code::NotFound, Code::DatabaseUnavailable, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static CHANGES: Endpoint = Endpoint {
    operation: Operation {
        id: "listenToChanges",
        method: Method::GET,
        path: "/api/bridge/changes",
        summary: "A stream of the changes in the tables of one app or of all apps.",
        credentials: ALL_EXCEPT_PLATFORM,
        parameters: &[
            Parameter {
                name: "app",
                location: ParameterLocation::Query,
                schema: nul_free_text,
                description: "Limits the stream to this app. An app always gets only its own changes; an agent with \
                              several apps must name one.",
            },
            Parameter {
                name: "Last-Event-ID",
                location: ParameterLocation::Header,
                schema: || text_matching("^([0-9]+-[0-9A-Za-z_-]+)?$"),
                description: "Resumes after this event.",
            },
        ],
        body: None,
        responses: &[DocumentedResponse {
            status: 200,
            description: "Server-sent events, one for each transaction.",
            content: Content::Other("text/event-stream"),
        }],
        problems: &[
            Code::Forbidden,
            Code::NotFound,
            Code::Gone,
            Code::DatabaseUnavailable,
            Code::Unavailable,
        ],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

/// The JSON schema of an app's tables and columns.
pub fn app_schema() -> Value {
    let column =
        object(&[("column", text()), ("type", text()), ("builtIn", boolean()), ("nullable", boolean())], &[]);
    let lists = || array(array(text()));
    let table = object(
        &[("table", text()), ("columns", array(column)), ("indexes", lists()), ("unique", lists())],
        &[],
    );
    object(&[("app", text()), ("name", text()), ("schema", text()), ("tables", array(table))], &[])
}

fn request_schema(shape: &ActionShape) -> Value {
    match shape.action {
        "schemas" => action_schema(shape, &[], &["app"]),
        "transaction" => action_schema(shape, &["app"], &[]),
        _ => action_schema(shape, &["app", "table"], &[]),
    }
}

fn action_schema(shape: &ActionShape, required: &[&'static str], optional: &[&'static str]) -> Value {
    let member = |name: &&'static str| (*name, field_schema(name));
    let mut required_members = vec![("action", json!({ "const": shape.action }))];
    required_members.extend(required.iter().chain(shape.required).map(member));
    let optional: Vec<_> = optional.iter().chain(shape.optional).map(member).collect();
    let mut schema = object(&required_members, &optional);
    schema["title"] = shape.action.into();
    if shape.optional.contains(&"id") {
        schema["oneOf"] = json!([{ "required": ["id"] }, { "required": ["filter"] }]);
    }
    schema
}

/// The JSON schema of a request field. The values in rows and filters are not described: they depend on the table.
fn field_schema(name: &str) -> Value {
    let row = || json!({ "type": "object", "description": "Values by column." });
    let bounded = |items: Value, min: usize, max: usize| json!({ "type": "array", "items": items, "minItems": min, "maxItems": max });
    match name {
        "app" | "table" | "after" => text(),
        "data" => row(),
        "rows" => bounded(row(), 1, 1000),
        "onConflict" | "columns" => json!({ "type": "array", "items": text() }),
        "resolution" => string_enum(&["merge", "ignore"]),
        "filter" => json!({
            "type": "object",
            "description": "{column: value}, {column: {operator: value}}, and, or, not; nested at most 5 levels deep.",
        }),
        "orderBy" => {
            let entry = object(&[("column", text())], &[("direction", string_enum(&["asc", "desc"]))]);
            bounded(json!({ "anyOf": [text(), entry] }), 0, 8)
        }
        "limit" => json!({ "type": "integer", "minimum": 1, "maximum": 1000, "default": 100 }),
        "count" => json!({ "const": "exact" }),
        "id" => json!({ "type": "string", "format": "uuid" }),
        "maxAffected" => count(),
        "returning" => boolean(),
        "operations" => {
            let is_allowed = |shape: &&ActionShape| !matches!(shape.action, "transaction" | "schemas");
            let shapes = ACTIONS.iter().filter(is_allowed).map(|shape| action_schema(shape, &["table"], &[]));
            bounded(json!({ "oneOf": shapes.collect::<Vec<_>>() }), 1, MAX_OPERATIONS)
        }
        _ => json!({}),
    }
}

/// The result depends on the action: a row, rows with a cursor and an optional count, an object with a count, or a
/// transaction's responses.
fn result_schema() -> Value {
    object(
        &[("data", json!({ "type": ["object", "array"] }))],
        &[("nextCursor", nullable(text())), ("count", count())],
    )
}

fn created_schema() -> Value {
    object(&[("data", json!({ "type": ["object", "array"] }))], &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_schema_covers_every_action_field() {
        for shape in &ACTIONS {
            for name in shape.required.iter().chain(shape.optional) {
                assert_ne!(field_schema(name), json!({}), "{name}");
            }
        }
    }
}

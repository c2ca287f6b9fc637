//! The bridge's routes with their descriptions; what a query may hold is made of the table that requests are read by.

use axum::routing::{get, post};
use http::Method;
use serde_json::{Value, json};

use super::request::{ACTIONS, MOST_OPERATIONS, Shape};
use super::{changes, list_schemas, query};
use crate::host::gateway::endpoint::{CALLERS, Endpoint, OWN_BODY, told};
use crate::http::openapi::{
    Answer, Content, Operation, Parameter, Place, any_text, array, boolean, count, matching, named, nullable,
    object, one_of, text,
};
use crate::http::problem::Code;

/// The largest body of a query, in bytes.
pub const QUERY_BODY: usize = 1024 * 1024;

pub static QUERY: Endpoint = Endpoint {
    operation: Operation {
        id: "query",
        method: Method::POST,
        path: "/api/bridge/query",
        summary: "Reads or writes the tables of an app.",
        credentials: CALLERS,
        parameters: &[],
        body: Some(|| json!({ "oneOf": ACTIONS.iter().map(request).collect::<Vec<_>>() })),
        answers: &[
            told(200, "What was asked for.", found),
            told(201, "The row or rows that were made.", made),
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
    largest_body: QUERY_BODY,
    serve: || post(query),
};

pub static SCHEMAS: Endpoint = Endpoint {
    operation: Operation {
        id: "listSchemas",
        method: Method::GET,
        path: "/api/bridge/schemas",
        summary: "The tables and columns of all apps; of an app, its own.",
        credentials: CALLERS,
        parameters: &[],
        body: None,
        answers: &[told(200, "The apps' schemas.", || object(&[("data", array(named("AppSchema")))], &[]))],
        problems: &[Code::Forbidden, Code::NotFound, Code::DatabaseUnavailable, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || get(list_schemas),
};

pub static CHANGES: Endpoint = Endpoint {
    operation: Operation {
        id: "listenToChanges",
        method: Method::GET,
        path: "/api/bridge/changes",
        summary: "A stream of what changes in the tables of one app, or of all.",
        credentials: CALLERS,
        parameters: &[
            Parameter {
                name: "app",
                place: Place::Query,
                schema: any_text,
                about: "Only of this app; an app hears of itself alone.",
            },
            Parameter {
                name: "Last-Event-ID",
                place: Place::Header,
                schema: || matching("^([0-9]+-[0-9]+)?$"),
                about: "Go on after this event.",
            },
        ],
        body: None,
        answers: &[Answer {
            status: 200,
            about: "Server-sent events, each a transaction.",
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
    largest_body: OWN_BODY,
    serve: || get(changes),
};

/// What one app's schema is told as.
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

fn request(shape: &Shape) -> Value {
    match shape.action {
        "schemas" => action(shape, &[], &["app"]),
        "transaction" => action(shape, &["app"], &[]),
        _ => action(shape, &["app", "table"], &[]),
    }
}

fn action(shape: &Shape, required: &[&'static str], optional: &[&'static str]) -> Value {
    let member = |name: &&'static str| (*name, field(name));
    let mut needed = vec![("action", json!({ "const": shape.action }))];
    needed.extend(required.iter().chain(shape.required).map(member));
    let optional: Vec<_> = optional.iter().chain(shape.optional).map(member).collect();
    let mut schema = object(&needed, &optional);
    schema["title"] = shape.action.into();
    if shape.optional.contains(&"id") {
        schema["oneOf"] = json!([{ "required": ["id"] }, { "required": ["filter"] }]);
    }
    schema
}

/// A member of a request; what its values mean for a table is said by the table's schema.
fn field(name: &str) -> Value {
    let row = || json!({ "type": "object", "description": "Values by column." });
    let bounded = |items: Value, least: usize, most: usize| json!({ "type": "array", "items": items, "minItems": least, "maxItems": most });
    match name {
        "app" | "table" | "after" => text(),
        "data" => row(),
        "rows" => bounded(row(), 1, 1000),
        "onConflict" | "columns" => json!({ "type": "array", "items": text() }),
        "resolution" => one_of(&["merge", "ignore"]),
        "filter" => json!({
            "type": "object",
            "description": "{column: value}, {column: {operator: value}}, and, or, not; at most 5 deep.",
        }),
        "orderBy" => {
            let entry = object(&[("column", text())], &[("direction", one_of(&["asc", "desc"]))]);
            bounded(json!({ "anyOf": [text(), entry] }), 0, 8)
        }
        "limit" => json!({ "type": "integer", "minimum": 1, "maximum": 1000, "default": 100 }),
        "count" => json!({ "const": "exact" }),
        "id" => json!({ "type": "string", "format": "uuid" }),
        "maxAffected" => count(),
        "returning" => boolean(),
        "operations" => {
            let inside = |shape: &&Shape| !matches!(shape.action, "transaction" | "schemas");
            let shapes = ACTIONS.iter().filter(inside).map(|shape| action(shape, &["table"], &[]));
            bounded(json!({ "oneOf": shapes.collect::<Vec<_>>() }), 1, MOST_OPERATIONS)
        }
        _ => json!({}),
    }
}

/// By action: a row, rows with a cursor and perhaps their number, a number, or the answers of a transaction.
fn found() -> Value {
    object(
        &[("data", json!({ "type": ["object", "array"] }))],
        &[("nextCursor", nullable(text())), ("count", count())],
    )
}

fn made() -> Value {
    object(&[("data", json!({ "type": ["object", "array"] }))], &[])
}

/// The fields that an action takes, for people.
pub fn fields_of(shape: &Shape, always: &[&'static str]) -> String {
    let all = ["action"].iter().chain(always).chain(shape.required).chain(shape.optional);
    all.copied().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_of_every_action_is_described() {
        for shape in &ACTIONS {
            for name in shape.required.iter().chain(shape.optional) {
                assert_ne!(field(name), json!({}), "{name}");
            }
        }
    }
}

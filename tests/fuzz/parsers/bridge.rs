//! The bridge: for any input, the generated SQL contains only known names and placeholders, and never a value.

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Value, json};
use svc::gateway::bridge_fuzzing::{
    ORDERS, Statement, columns, read_cursor, read_filter, read_request, write_cursor,
};

use super::Target;

/// Names in statements that are not columns.
const FIXED_NAMES: [&str; 7] = ["t", "app_n", "hit", "done", "h", "d", "count"];
/// Maximum size of a statement's text, which contains no values.
const MAX_STATEMENT_BYTES: usize = 256 * 1024;
const MAX_OPERATIONS: usize = 50;

/// Checks that the statement uses only known names, that placeholders match parameters, and that nothing terminates the
/// statement early.
fn check_statement(statement: &Statement) -> Result<(), String> {
    let Statement { text, param_count, .. } = statement;
    if text.len() > MAX_STATEMENT_BYTES {
        return Err(format!(
            "the statement is {} bytes long, over the limit of {MAX_STATEMENT_BYTES}",
            text.len()
        ));
    }
    let columns = columns();
    let mut unquoted = String::new();
    for (index, part) in text.split('"').enumerate() {
        // Every second part is a name: no statement contains other double quotes.
        if index % 2 == 0 {
            unquoted.push_str(part);
        } else if !FIXED_NAMES.contains(&part) && !columns.iter().any(|column| column == part) {
            return Err(format!("{part:?} is not a known name, in {text}"));
        }
    }
    if [";", "--", "/*"].iter().any(|terminator| unquoted.contains(terminator)) {
        return Err(format!("a statement terminator or a comment outside quotes: {text}"));
    }
    let mut placeholders = BTreeSet::new();
    for after in unquoted.split('$').skip(1) {
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        let number = digits
            .parse::<usize>()
            .map_err(|_| format!("the statement has a placeholder without a number: {text}"))?;
        placeholders.insert(number);
    }
    if placeholders.iter().copied().eq(1..=*param_count) {
        Ok(())
    } else {
        Err(format!("{param_count} parameters do not match the placeholders in {text}"))
    }
}

pub fn request() -> Target {
    Target {
        name: "bridge-request",
        valid: requests().boxed(),
        check_any: check_any_request,
        check_valid: check_valid_request,
        cases: 1500,
    }
}

/// Generates a column of the table and a valid value for it.
fn field() -> impl Strategy<Value = (String, Value)> {
    prop_oneof![
        "\\PC{0,12}".prop_map(|text| ("c_text".to_owned(), json!(text))),
        any::<i32>().prop_map(|number| ("c_integer".to_owned(), json!(number))),
        any::<i64>().prop_map(|number| ("c_bigint".to_owned(), json!(number.to_string()))),
        any::<bool>().prop_map(|flag| ("c_boolean".to_owned(), json!(flag))),
        "-?[1-9][0-9]{0,20}(\\.[0-9]{1,9})?".prop_map(|number| ("c_numeric".to_owned(), json!(number))),
        Just(("c_double".to_owned(), json!("NaN"))),
        Just(("c_date".to_owned(), json!("2026-02-28"))),
        Just(("c_timestamptz".to_owned(), json!("2026-01-02T03:04:05.678Z"))),
        "[a-z]{0,5}".prop_map(|text| ("c_jsonb".to_owned(), json!({ "a": [text, 1.5] }))),
        any::<u128>().prop_map(|id| ("c_uuid".to_owned(), json!(uuid::Uuid::from_u128(id)))),
        Just(("c_bytea".to_owned(), json!("AAE="))),
    ]
}

fn filters() -> impl Strategy<Value = Value> {
    let operator = prop_oneof![Just("eq"), Just("ne"), Just("in"), Just("isNull")];
    let term = (field(), operator).prop_map(|((name, value), operator)| match operator {
        "in" => json!({ name: { "in": [value.clone(), value] } }),
        "isNull" => json!({ name: { "isNull": true } }),
        // An object would be parsed as operators.
        "eq" if !value.is_object() => json!({ name: value }),
        other => json!({ name: { other: value } }),
    });
    term.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..3).prop_map(|parts| json!({ "and": parts })),
            prop::collection::vec(inner.clone(), 1..3).prop_map(|parts| json!({ "or": parts })),
            inner.prop_map(|part| json!({ "not": part })),
        ]
    })
}

fn operations() -> impl Strategy<Value = Value> {
    let row = || {
        prop::collection::vec(field(), 1..4).prop_map(|fields| Value::Object(fields.into_iter().collect()))
    };
    let id = || any::<u128>().prop_map(|id| json!(uuid::Uuid::from_u128(id)));
    prop_oneof![
        row().prop_map(|data| json!({ "action": "insert", "table": "t", "data": data })),
        prop::collection::vec(row(), 1..3)
            .prop_map(|rows| json!({ "action": "insertMany", "table": "t", "rows": rows })),
        filters().prop_map(|filter| json!({ "action": "find", "table": "t", "filter": filter, "limit": 5,
            "columns": ["c_text", "id"], "orderBy": [{ "column": "c_date", "direction": "desc" }],
            "count": "exact" })),
        filters().prop_map(|filter| json!({ "action": "count", "table": "t", "filter": filter })),
        id().prop_map(|id| json!({ "action": "get", "table": "t", "id": id })),
        (row(), filters()).prop_map(|(data, filter)| json!({ "action": "update", "table": "t", "data": data,
            "filter": filter, "maxAffected": 3, "returning": true })),
        id().prop_map(|id| json!({ "action": "delete", "table": "t", "id": id })),
    ]
}

fn requests() -> impl Strategy<Value = Vec<u8>> {
    let single = operations().prop_map(|mut operation| {
        operation["app"] = json!("n");
        operation
    });
    let transaction = prop::collection::vec(operations(), 1..4)
        .prop_map(|list| json!({ "action": "transaction", "app": "n", "operations": list }));
    prop_oneof![3 => single, 1 => transaction, 1 => Just(json!({ "action": "schemas" }))]
        .prop_map(|request| request.to_string().into_bytes())
}

fn check_any_request(bytes: &[u8]) -> Result<(), String> {
    let request = match read_request(bytes) {
        Ok(request) => request,
        Err(response) => {
            // Each unknown field is reported, truncated to 64 characters, with the accepted ones.
            let limit = 4096 + 64 * bytes.len();
            return if response.len() <= limit {
                Ok(())
            } else {
                Err(format!("the error response is {} bytes long, over the limit of {limit}", response.len()))
            };
        }
    };
    if request.operation_count > MAX_OPERATIONS {
        return Err(format!("accepted {} operations, more than {MAX_OPERATIONS}", request.operation_count));
    }
    for statement in &request.statements {
        check_statement(statement)?;
        let Some(encoded) = statement.encoded_bytes else {
            return Err(format!("a parameter cannot be encoded: {}", statement.text));
        };
        // The parameters are about as large as the input: base64 and numbers shrink, times and UUIDs have a fixed
        // length.
        if encoded > 1024 + 16 * bytes.len() {
            return Err(format!("the parameters take {encoded} bytes for an input of {} bytes", bytes.len()));
        }
    }
    Ok(())
}

fn check_valid_request(bytes: &[u8]) -> Result<(), String> {
    let request = read_request(bytes)?;
    let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let is_complete = match request.action {
        "schemas" => request.statements.is_empty(),
        "transaction" => Some(request.operation_count) == value["operations"].as_array().map(Vec::len),
        _ => !request.statements.is_empty(),
    };
    let has_same_action = value["action"] == request.action;
    let has_statements = request.statements.len() >= request.operation_count;
    if is_complete && has_same_action && has_statements {
        Ok(())
    } else {
        Err(format!("parsed as {request:?}"))
    }
}

pub fn filter() -> Target {
    Target {
        name: "bridge-filter",
        valid: filters().prop_map(|filter| filter.to_string().into_bytes()).boxed(),
        check_any: check_any_filter,
        check_valid: |bytes| match read_filter(&String::from_utf8_lossy(bytes)) {
            Some(Ok((statement, _))) if statement.text != "TRUE" => Ok(()),
            other => Err(format!("{other:?}")),
        },
        cases: 1500,
    }
}

fn check_any_filter(bytes: &[u8]) -> Result<(), String> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Ok(()) };
    let Some(Ok((statement, fingerprint))) = read_filter(text) else { return Ok(()) };
    check_statement(&statement)?;
    if statement.encoded_bytes.is_none() {
        return Err(format!("a parameter cannot be encoded: {}", statement.text));
    }
    // A filter has at most 50 terms, and a list is one parameter.
    if statement.param_count > 50 {
        return Err(format!("the statement has {} parameters, more than 50", statement.param_count));
    }
    let is_empty = statement.text == "TRUE";
    if is_empty != fingerprint.is_empty() {
        return Err("only an empty filter has no fingerprint".to_owned());
    }
    let reparsed = read_filter(&format!(" {text}\n"));
    if reparsed != Some(Ok((statement.clone(), fingerprint))) {
        return Err(format!("with surrounding whitespace, the filter parses as {reparsed:?}"));
    }
    if is_empty {
        return Ok(());
    }
    // Nested in another filter, it has the same meaning or is rejected as too deep.
    for (outer, expected) in [
        (format!("{{\"not\":{text}}}"), format!("NOT ({})", statement.text)),
        (format!("{{\"and\":[{text}]}}"), format!("({})", statement.text)),
        (format!("{{\"or\":[{text}]}}"), format!("({})", statement.text)),
    ] {
        match read_filter(&outer) {
            Some(Ok((nested, _)))
                if nested.text == expected && nested.param_count == statement.param_count => {}
            Some(Err(reason)) if reason.contains("levels deep") => {}
            other => return Err(format!("within {outer}, the filter parses as {other:?}")),
        }
    }
    Ok(())
}

pub fn cursor() -> Target {
    Target {
        name: "bridge-cursor",
        valid: cursors().boxed(),
        check_any: check_any_cursor,
        check_valid: |bytes| {
            let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
            let accepted = (0..ORDERS.len()).filter(|order| read_cursor(*order, FINGERPRINT, text).is_ok());
            if accepted.count() == 1 {
                Ok(())
            } else {
                Err("the cursor is accepted for no order, or for several orders".to_owned())
            }
        },
        cases: 1500,
    }
}

/// Fingerprint of the filter that the valid cursors belong to.
const FINGERPRINT: &str = "0123456789abcdef";

fn cursors() -> impl Strategy<Value = Vec<u8>> {
    let id = || any::<u128>().prop_map(|id| Some(uuid::Uuid::from_u128(id).to_string()));
    let nullable = || prop::option::of("[^\\x00]{0,20}");
    prop_oneof![
        (nullable(), nullable(), id()).prop_map(|(first, second, id)| (0, vec![first, second, id])),
        id().prop_map(|id| (1, vec![id])),
    ]
    .prop_map(|(order, keys)| {
        write_cursor(order, FINGERPRINT, keys).expect("the cursor is short enough").into_bytes()
    })
}

/// Checks that a cursor is valid only for its own order and filter, and that its values are always bound.
fn check_any_cursor(bytes: &[u8]) -> Result<(), String> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Ok(()) };
    let mut accepted = 0;
    for order in 0..ORDERS.len() {
        for filter in ["", "fedcba9876543210"] {
            if read_cursor(order, filter, text).is_ok() && read_cursor(order, FINGERPRINT, text).is_ok() {
                return Err("the cursor is accepted with a different filter".to_owned());
            }
        }
        let Ok((keys, condition)) = read_cursor(order, FINGERPRINT, text) else { continue };
        accepted += 1;
        check_statement(&condition)?;
        if condition.encoded_bytes.is_none() || keys.iter().flatten().any(|key| key.contains('\0')) {
            return Err("accepted a value that PostgreSQL rejects".to_owned());
        }
        let encoded =
            write_cursor(order, FINGERPRINT, keys.clone()).ok_or("the cursor cannot be encoded again")?;
        let decoded = read_cursor(order, FINGERPRINT, &encoded)?;
        if decoded != (keys, condition) {
            return Err(format!("the re-encoded cursor is decoded as {decoded:?}"));
        }
    }
    if accepted > 1 { Err("the cursor is accepted for more than one order".to_owned()) } else { Ok(()) }
}

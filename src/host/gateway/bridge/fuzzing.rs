//! Exposes the bridge's parsers and planner to `tests/fuzz`, with plain data as results. Requests, filters and cursors
//! are for one table with a column of each type. This module is not compiled into release builds.

use std::sync::LazyLock;

use bytes::BytesMut;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use tokio_postgres::types::ToSql;

use super::changes::{EventId, EventIdFormat, EventIdSecret};
use super::cursor::{self, Cursor};
use super::filter::Filter;
use super::order::Order;
use super::plan::plan;
use super::request::{Action, BridgeRequest};
use super::sql::Sql;
pub use crate::apps::path_in_app;
use crate::apps::{ColumnType, Manifest, Table, registration_sql};
use crate::name::SqlIdentifier;
use svc_machine::epoch::Epoch;

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let columns: Map<String, Value> =
        ColumnType::ALL.iter().map(|kind| (format!("c_{}", kind.name()), json!(kind.name()))).collect();
    let manifest = json!({ "name": "n", "slug": "n", "version": "1", "runtime": "static",
        "storage": { "tables": { "t": { "columns": columns } } } });
    Manifest::from_value(&manifest).expect("the manifest is valid").tables.remove(0)
});

/// A generated statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    pub text: String,
    pub param_count: usize,
    /// Encoded size of the parameters; `None` if one cannot be encoded.
    pub encoded_bytes: Option<usize>,
}

impl Statement {
    fn from_sql(sql: &Sql) -> Self {
        let mut bytes = BytesMut::new();
        let can_encode = sql.params.iter().all(|param| param.to_sql(&param.sql_type(), &mut bytes).is_ok());
        Self {
            text: sql.text.clone(),
            param_count: sql.params.len(),
            encoded_bytes: can_encode.then_some(bytes.len()),
        }
    }
}

/// The names of the table's columns.
pub fn columns() -> Vec<String> {
    TABLE.columns.iter().map(|column| column.name.to_string()).collect()
}

/// A valid request.
#[derive(Debug, Clone)]
pub struct AcceptedRequest {
    pub action: &'static str,
    pub operation_count: usize,
    /// The statements for the operations that are valid for the table.
    pub statements: Vec<Statement>,
}

/// Parses a request and plans its operations.
///
/// # Errors
/// The message for the client, if the request is invalid.
pub fn read_request(body: &[u8]) -> Result<AcceptedRequest, String> {
    let request = BridgeRequest::parse(body).map_err(|problem| problem.body().to_string())?;
    let calls = match &request.action {
        Action::Table(call) => std::slice::from_ref(call),
        Action::Transaction(calls) => calls,
        Action::Schemas => &[],
    };
    let schema: SqlIdentifier = "app_n".parse().expect("app_n is a valid name");
    let mut statements = Vec::new();
    for call in calls {
        if let Ok(plan) = plan(&schema, &TABLE, &call.operation) {
            statements.extend(plan.statements().map(Statement::from_sql));
        }
    }
    Ok(AcceptedRequest { action: request.action.name(), operation_count: calls.len(), statements })
}

/// A filter's SQL and its fingerprint; `None` if the text is not JSON.
///
/// # Errors
/// The JSON pointer and the message, if the filter is invalid.
pub fn read_filter(text: &str) -> Option<Result<(Statement, String), String>> {
    let raw: &RawValue = serde_json::from_str(text).ok()?;
    let filter = Filter::parse(&TABLE, raw, "/filter");
    Some(filter.map_err(|error| format!("{}: {}", error.pointer, error.detail)).map(|filter| {
        let mut sql = Sql::default();
        filter.write(&mut sql);
        (Statement::from_sql(&sql), cursor::fingerprint(&filter))
    }))
}

/// The orders for which cursors are created: by nullable columns, and only by the id.
pub const ORDERS: [&str; 2] = [r#"["c_text",{"column":"c_numeric","direction":"desc"}]"#, "[]"];

fn with_order<T>(index: usize, work: impl FnOnce(&Order<'_>) -> T) -> T {
    let raw: &RawValue = serde_json::from_str(ORDERS[index]).expect("each order is valid JSON");
    work(&Order::parse(&TABLE, Some(raw)).expect("each order names columns of the table"))
}

/// Creates a cursor for an order from [`ORDERS`] and a filter's fingerprint.
pub fn write_cursor(order: usize, filter: &str, keys: Vec<Option<String>>) -> Option<String> {
    with_order(order, |order| Cursor::new(order, filter, keys).encode())
}

/// The cursor's keys, and the condition for the page after it.
///
/// # Errors
/// The message for the client, if the cursor is invalid.
pub fn read_cursor(
    order: usize,
    filter: &str,
    text: &str,
) -> Result<(Vec<Option<String>>, Statement), &'static str> {
    with_order(order, |order| {
        let cursor = Cursor::decode(text, order, filter)?;
        let mut sql = Sql::default();
        order.write_after(&cursor.keys, &mut sql);
        Ok((cursor.keys, Statement::from_sql(&sql)))
    })
}

fn id_format(app: Option<&str>) -> EventIdFormat {
    app.map_or(EventIdFormat::Plain, |app| {
        EventIdFormat::for_app(&EventIdSecret::derive(b"of a machine"), app)
    })
}

/// The id of a change event, for an app or the owner.
pub fn write_event_id(app: Option<&str>, epoch: u32, position: i64) -> String {
    id_format(app).format(EventId { epoch: Epoch(epoch), position })
}

/// The epoch and position of an id that was presented in epoch `current`; `None` if it is invalid.
pub fn read_event_id(app: Option<&str>, text: &str, current: u32) -> Option<(u32, i64)> {
    id_format(app).parse(text, Epoch(current)).ok().map(|id| (id.epoch.0, id.position))
}

/// An app's manifest in its normalized form, and the SQL that registers it in an empty schema.
///
/// # Errors
/// All errors in the manifest.
pub fn read_manifest(text: &[u8]) -> Result<(Value, Vec<String>), Vec<String>> {
    let manifest = Manifest::parse(text).map_err(|error| error.errors)?;
    let sql = registration_sql(&manifest.slug.schema(), &manifest.tables);
    Ok((manifest.to_value(), sql))
}

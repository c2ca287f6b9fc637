//! The shape of a request: its action, table and fields. Unknown and missing fields are rejected here; the planner
//! checks values against the table.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::fields::{Fields, array_elements, string_value};
use super::filter::escape_segment;
use svc_http::problem::{FieldError, Problem};

/// Maximum number of operations in a transaction.
pub const MAX_OPERATIONS: usize = 50;

#[derive(Debug)]
pub struct BridgeRequest<'a> {
    /// `None` only for `schemas`.
    pub app: Option<Cow<'a, str>>,
    pub action: Action<'a>,
}

#[derive(Debug)]
pub enum Action<'a> {
    Table(TableCall<'a>),
    /// Applies all operations or none.
    Transaction(Vec<TableCall<'a>>),
    Schemas,
}

impl Action<'_> {
    /// The name used in requests.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Transaction(_) => "transaction",
            Self::Schemas => "schemas",
            Self::Table(call) => match call.operation {
                Operation::Insert { .. } => "insert",
                Operation::InsertMany { .. } => "insertMany",
                Operation::Upsert { .. } => "upsert",
                Operation::Find(_) => "find",
                Operation::Get { .. } => "get",
                Operation::Count { .. } => "count",
                Operation::Update { .. } => "update",
                Operation::Delete { .. } => "delete",
            },
        }
    }
}

/// One operation and its table.
#[derive(Debug)]
pub struct TableCall<'a> {
    pub table: Cow<'a, str>,
    pub operation: Operation<'a>,
}

#[derive(Debug)]
pub enum Operation<'a> {
    Insert { data: &'a RawValue },
    InsertMany { rows: &'a RawValue },
    Upsert { data: &'a RawValue, on_conflict: &'a RawValue, resolution: Resolution },
    Find(FindRequest<'a>),
    Get { id: &'a RawValue },
    Count { filter: Option<&'a RawValue> },
    Update { mutation: MutationRequest<'a>, data: &'a RawValue },
    Delete { mutation: MutationRequest<'a> },
}

impl Operation<'_> {
    /// Whether the operation adds or changes rows.
    pub fn writes_values(&self) -> bool {
        match self {
            Self::Insert { .. } | Self::InsertMany { .. } | Self::Upsert { .. } | Self::Update { .. } => true,
            Self::Find(_) | Self::Get { .. } | Self::Count { .. } | Self::Delete { .. } => false,
        }
    }
}

/// How an upsert resolves a conflict with an existing row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Resolution {
    /// Updates the columns that `data` names.
    #[default]
    Merge,
    /// Leaves the row unchanged.
    Ignore,
}

/// The unparsed fields of a `find`.
#[derive(Debug, Default)]
pub struct FindRequest<'a> {
    pub filter: Option<&'a RawValue>,
    pub columns: Option<&'a RawValue>,
    pub order_by: Option<&'a RawValue>,
    pub limit: Option<&'a RawValue>,
    pub after: Option<Cow<'a, str>>,
    pub count: CountMode,
}

/// Whether a `find` also returns the number of all matching rows.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum CountMode {
    #[default]
    None,
    Exact,
}

/// The rows that an `update` or `delete` changes, and the bound on their number.
#[derive(Debug)]
pub struct MutationRequest<'a> {
    pub rows: RowSelector<'a>,
    pub max_affected: Option<&'a RawValue>,
    /// Whether to return the changed rows or only their number.
    pub returning: Returning,
}

#[derive(Debug, Clone, Copy)]
pub enum RowSelector<'a> {
    Id(&'a RawValue),
    Filter(&'a RawValue),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Returning {
    Count,
    Rows,
}

/// An action and its fields, except `action`, `app` and `table` (`transaction` and `schemas` have no `table`). In a
/// transaction, an operation has the same fields without `app`.
pub struct ActionShape {
    pub action: &'static str,
    pub required: &'static [&'static str],
    pub optional: &'static [&'static str],
}

const fn shape(
    action: &'static str,
    required: &'static [&'static str],
    optional: &'static [&'static str],
) -> ActionShape {
    ActionShape { action, required, optional }
}

pub const ACTIONS: [ActionShape; 10] = [
    shape("insert", &["data"], &[]),
    shape("insertMany", &["rows"], &[]),
    shape("upsert", &["data", "onConflict"], &["resolution"]),
    shape("find", &[], &["filter", "columns", "orderBy", "limit", "after", "count"]),
    shape("get", &["id"], &[]),
    shape("count", &[], &["filter"]),
    shape("update", &["data"], &["id", "filter", "maxAffected", "returning"]),
    shape("delete", &[], &["id", "filter", "maxAffected", "returning"]),
    shape("transaction", &["operations"], &[]),
    shape("schemas", &[], &[]),
];

impl<'a> BridgeRequest<'a> {
    /// Parses a request's body.
    ///
    /// # Errors
    /// If the body is not JSON, or if a field is unknown, missing or invalid. The problem names all such fields.
    pub fn parse(body: &'a [u8]) -> Result<Self, Problem> {
        let raw: &RawValue = serde_json::from_slice(body).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            Problem::field("", format!("is not JSON: syntax error at line {line}, column {column}"))
        })?;
        let mut errors = Vec::new();
        let request =
            ObjectReader::open(raw, String::new(), &mut errors).and_then(|mut reader| reader.read_request());
        match request {
            Some(request) if errors.is_empty() => Ok(request),
            _ => Err(Problem::invalid(&errors)),
        }
    }
}

/// Reads one object; the errors of all objects in a request are collected in one list.
struct ObjectReader<'a, 'w> {
    fields: Fields<'a>,
    pointer: String,
    errors: &'w mut Vec<FieldError>,
}

impl<'a, 'w> ObjectReader<'a, 'w> {
    fn open(raw: &'a RawValue, pointer: String, errors: &'w mut Vec<FieldError>) -> Option<Self> {
        match Fields::parse(raw) {
            Ok(fields) => Some(Self { fields, pointer, errors }),
            Err(reason) => {
                errors.push(FieldError { pointer, detail: reason.to_owned() });
                None
            }
        }
    }

    fn read_request(&mut self) -> Option<BridgeRequest<'a>> {
        let shape = self.read_shape(|_| true)?;
        match shape.action {
            "schemas" => {
                self.reject_unknown_fields(shape, &["app"]);
                Some(BridgeRequest { app: self.optional_text("app"), action: Action::Schemas })
            }
            "transaction" => {
                self.reject_unknown_fields(shape, &["app"]);
                let app = self.require_text("app");
                let operations = self.read_operations()?;
                Some(BridgeRequest { app: Some(app?), action: Action::Transaction(operations) })
            }
            _ => {
                self.reject_unknown_fields(shape, &["app", "table"]);
                let app = self.require_text("app");
                let call = self.read_call(shape);
                Some(BridgeRequest { app: Some(app?), action: Action::Table(call?) })
            }
        }
    }

    /// Reads `action` and returns its shape. An action for which `is_allowed` returns false is rejected.
    fn read_shape(&mut self, is_allowed: impl Fn(&str) -> bool) -> Option<&'static ActionShape> {
        let action = self.require_text("action")?;
        let mut shapes = ACTIONS.iter().filter(|shape| is_allowed(shape.action));
        if let Some(shape) = shapes.clone().find(|shape| shape.action == action) {
            return Some(shape);
        }
        let first = shapes.next().map_or("", |shape| shape.action);
        let names = shapes.fold(first.to_owned(), |names, shape| names + ", " + shape.action);
        self.reject("action", format!("must be one of {names}"))
    }

    fn read_operations(&mut self) -> Option<Vec<TableCall<'a>>> {
        let raw = self.require("operations")?;
        let elements = array_elements(raw).filter(|elements| (1..=MAX_OPERATIONS).contains(&elements.len()));
        let Some(elements) = elements else {
            return self
                .reject("operations", format!("must be an array of 1 to {MAX_OPERATIONS} operations"));
        };
        let pointer = format!("{}/operations", self.pointer);
        let mut calls = Vec::with_capacity(elements.len());
        for (index, raw) in elements.into_iter().enumerate() {
            let Some(mut reader) = ObjectReader::open(raw, format!("{pointer}/{index}"), self.errors) else {
                continue;
            };
            let Some(shape) = reader.read_shape(|action| !matches!(action, "transaction" | "schemas")) else {
                continue;
            };
            reader.reject_unknown_fields(shape, &["table"]);
            calls.extend(reader.read_call(shape));
        }
        Some(calls)
    }

    fn read_call(&mut self, shape: &ActionShape) -> Option<TableCall<'a>> {
        let table = self.require_text("table");
        let operation = match shape.action {
            "insert" => self.require("data").map(|data| Operation::Insert { data }),
            "insertMany" => self.require("rows").map(|rows| Operation::InsertMany { rows }),
            "upsert" => self.read_upsert(),
            "get" => self.require("id").map(|id| Operation::Get { id }),
            "count" => Some(Operation::Count { filter: self.field("filter") }),
            "update" => {
                let (data, mutation) = (self.require("data"), self.read_mutation());
                Some(Operation::Update { data: data?, mutation: mutation? })
            }
            "delete" => Some(Operation::Delete { mutation: self.read_mutation()? }),
            _ => Some(Operation::Find(self.read_find())),
        };
        Some(TableCall { table: table?, operation: operation? })
    }

    fn read_upsert(&mut self) -> Option<Operation<'a>> {
        let (data, on_conflict) = (self.require("data"), self.require("onConflict"));
        let resolution = match self.optional_text("resolution").as_deref() {
            None | Some("merge") => Resolution::Merge,
            Some("ignore") => Resolution::Ignore,
            Some(_) => self.reject("resolution", "must be \"merge\" or \"ignore\"").unwrap_or_default(),
        };
        Some(Operation::Upsert { data: data?, on_conflict: on_conflict?, resolution })
    }

    fn read_mutation(&mut self) -> Option<MutationRequest<'a>> {
        let rows = match (self.field("id"), self.field("filter")) {
            (Some(id), None) => Some(RowSelector::Id(id)),
            (None, Some(filter)) => Some(RowSelector::Filter(filter)),
            (None, None) => self.reject("filter", "is required unless id is given"),
            (Some(_), Some(_)) => self.reject("filter", "must not be combined with id"),
        };
        let returning = match self.field("returning").map(RawValue::get) {
            None | Some("false") => Some(Returning::Count),
            Some("true") => Some(Returning::Rows),
            Some(_) => self.reject("returning", "must be true or false"),
        };
        Some(MutationRequest { rows: rows?, max_affected: self.field("maxAffected"), returning: returning? })
    }

    fn read_find(&mut self) -> FindRequest<'a> {
        let count = match self.optional_text("count").as_deref() {
            None => CountMode::None,
            Some("exact") => CountMode::Exact,
            Some(_) => self.reject("count", "must be \"exact\"").unwrap_or_default(),
        };
        FindRequest {
            filter: self.field("filter"),
            columns: self.field("columns"),
            order_by: self.field("orderBy"),
            limit: self.field("limit"),
            after: self.optional_text("after"),
            count,
        }
    }

    /// Reports an error in a field; always returns `None`.
    fn reject<T>(&mut self, field: &str, detail: impl Into<String>) -> Option<T> {
        self.errors.push(FieldError { pointer: format!("{}/{field}", self.pointer), detail: detail.into() });
        None
    }

    fn field(&self, name: &str) -> Option<&'a RawValue> {
        self.fields.0.iter().find(|(field, _)| field == name).map(|(_, value)| *value)
    }

    fn require(&mut self, name: &str) -> Option<&'a RawValue> {
        self.field(name).or_else(|| self.reject(name, "is required"))
    }

    fn require_text(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let raw = self.require(name)?;
        string_value(raw).or_else(|| self.reject(name, "must be a string"))
    }

    fn optional_text(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let raw = self.field(name)?;
        string_value(raw).or_else(|| self.reject(name, "must be a string"))
    }

    /// Rejects every field except `action`, those of the shape, and `common`.
    fn reject_unknown_fields(&mut self, shape: &ActionShape, common: &[&'static str]) {
        let is_known = |name: &str| {
            name == "action"
                || [common, shape.required, shape.optional].iter().any(|list| list.contains(&name))
        };
        for (name, _) in self.fields.0.iter().filter(|(name, _)| !is_known(name)) {
            let pointer = format!("{}/{}", self.pointer, escape_segment(name));
            let detail =
                format!("is not a field of this action; it takes {}", join_field_names(shape, common));
            self.errors.push(FieldError { pointer, detail });
        }
    }
}

fn join_field_names(shape: &ActionShape, common: &[&'static str]) -> String {
    let names = ["action"].iter().chain(common).chain(shape.required).chain(shape.optional);
    names.copied().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors_of(body: &str) -> String {
        BridgeRequest::parse(body.as_bytes()).expect_err(body).detail
    }

    #[test]
    fn parse_reads_action_app_and_table() {
        let body = br#"{"action":"insert","app":"notes","table":"pages","data":{"title":"x"}}"#;
        let request = BridgeRequest::parse(body).unwrap();
        assert_eq!(request.app.as_deref(), Some("notes"));
        assert!(matches!(
            request.action,
            Action::Table(TableCall { table, operation: Operation::Insert { .. } }) if table == "pages"
        ));
    }

    #[test]
    fn parse_reports_unknown_and_missing_fields() {
        let text = errors_of(r#"{"action":"get","app":"a","filter":{},"x/y":1}"#);
        for part in ["/filter", "/x~1y", "/table", "/id"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(errors_of(r#"{"action":"drop"}"#).contains("/action"));
        assert!(errors_of("{").contains("not JSON"));
        assert!(errors_of("[]").contains("object"));
        assert!(errors_of(r#"{"action":"get","action":"find"}"#).contains("duplicates"));
    }

    #[test]
    fn parse_requires_either_id_or_filter() {
        let delete_request = |fields: &str| format!(r#"{{"action":"delete","app":"a","table":"t"{fields}}}"#);
        assert!(errors_of(&delete_request("")).contains("/filter: is required"));
        assert!(errors_of(&delete_request(r#","id":"x","filter":{}"#)).contains("combined with id"));
        assert!(errors_of(&delete_request(r#","id":"x","returning":1"#)).contains("/returning"));
        assert!(errors_of(&delete_request(r#","id":"x","data":{}"#)).contains("/data"));
        assert!(BridgeRequest::parse(delete_request(r#","id":"x","maxAffected":1"#).as_bytes()).is_ok());
    }

    #[test]
    fn parse_locates_errors_in_transaction_operations() {
        let text = errors_of(
            r#"{"action":"transaction","app":"a","operations":[
                {"action":"get","table":"t","id":1}, {"action":"get","table":"t"}, 5,
                {"action":"transaction","operations":[]}, {"action":"insert","app":"b","table":"t","data":{}}]}"#,
        );
        for part in ["/operations/1/id", "/operations/2:", "/operations/3/action", "/operations/4/app"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let many = vec![r#"{"action":"count","table":"t"}"#; 51].join(",");
        let transaction =
            |operations: &str| format!(r#"{{"action":"transaction","app":"a","operations":[{operations}]}}"#);
        assert!(errors_of(&transaction(&many)).contains("1 to 50"));
        assert!(errors_of(&transaction("")).contains("1 to 50"));
    }

    #[test]
    fn errors_never_quote_values() {
        for body in [r#"{"action":"s3cret"}"#, r#"{"action":"find","app":5,"table":"t","count":"s3cret"}"#] {
            assert!(!errors_of(body).contains("s3cret"));
        }
    }
}

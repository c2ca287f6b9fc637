//! A request's shape: which action, on which table, with which fields. Unknown and missing fields are refused here;
//! what they mean for a table is the planner's to say.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::describe::fields_of;
use super::fields::{Fields, elements, text};
use super::filter::escaped;
use crate::http::problem::{FieldError, Problem};

pub const MOST_OPERATIONS: usize = 50;

/// A request to the bridge.
#[derive(Debug)]
pub struct Request<'a> {
    /// Absent only where the action allows it.
    pub app: Option<Cow<'a, str>>,
    pub action: Action<'a>,
}

#[derive(Debug)]
pub enum Action<'a> {
    Table(Call<'a>),
    /// All of them, or nothing.
    Transaction(Vec<Call<'a>>),
    Schemas,
}

impl Action<'_> {
    /// As requests call it.
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

/// One operation and the table that it is on.
#[derive(Debug)]
pub struct Call<'a> {
    pub table: Cow<'a, str>,
    pub operation: Operation<'a>,
}

/// What to do with one table.
#[derive(Debug)]
pub enum Operation<'a> {
    Insert { data: &'a RawValue },
    InsertMany { rows: &'a RawValue },
    Upsert { data: &'a RawValue, on_conflict: &'a RawValue, resolution: Resolution },
    Find(Find<'a>),
    Get { id: &'a RawValue },
    Count { filter: Option<&'a RawValue> },
    Update { change: Change<'a>, data: &'a RawValue },
    Delete { change: Change<'a> },
}

impl Operation<'_> {
    /// Whether it adds or changes rows.
    pub fn adds_data(&self) -> bool {
        match self {
            Self::Insert { .. } | Self::InsertMany { .. } | Self::Upsert { .. } | Self::Update { .. } => true,
            Self::Find(_) | Self::Get { .. } | Self::Count { .. } | Self::Delete { .. } => false,
        }
    }
}

/// What an upsert does with a row that is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Resolution {
    /// It takes the values of `data`, and keeps those that `data` does not name.
    #[default]
    Merge,
    /// It stays as it is.
    Ignore,
}

#[derive(Debug, Default)]
pub struct Find<'a> {
    pub filter: Option<&'a RawValue>,
    pub columns: Option<&'a RawValue>,
    pub order_by: Option<&'a RawValue>,
    pub limit: Option<&'a RawValue>,
    pub after: Option<Cow<'a, str>>,
    pub count: Count,
}

/// Whether a `find` also counts all rows of its filter.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    #[default]
    No,
    Exact,
}

/// Which rows an `update` or `delete` is about, and within which bound.
#[derive(Debug)]
pub struct Change<'a> {
    pub which: Which<'a>,
    pub max_affected: Option<&'a RawValue>,
    /// Whether the rows are asked for, and not only their number.
    pub returning: Returning,
}

#[derive(Debug, Clone, Copy)]
pub enum Which<'a> {
    Id(&'a RawValue),
    Filter(&'a RawValue),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Returning {
    Number,
    Rows,
}

/// An action and the fields that it takes beside `action`, `app` and, but for `transaction` and `schemas`, `table`.
/// Inside a transaction an operation takes the same without `app`.
pub struct Shape {
    pub action: &'static str,
    pub required: &'static [&'static str],
    pub optional: &'static [&'static str],
}

const fn shape(
    action: &'static str,
    required: &'static [&'static str],
    optional: &'static [&'static str],
) -> Shape {
    Shape { action, required, optional }
}

/// Every action of the bridge.
pub const ACTIONS: [Shape; 10] = [
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

impl<'a> Request<'a> {
    /// # Errors
    /// A problem that names each field that is wrong.
    pub fn parse(body: &'a [u8]) -> Result<Self, Problem> {
        let raw: &RawValue = serde_json::from_slice(body).map_err(|error| {
            Problem::field("", format!("is not JSON: line {} column {}", error.line(), error.column()))
        })?;
        let mut wrong = Vec::new();
        let request = Reader::open(raw, String::new(), &mut wrong).and_then(|mut reader| reader.request());
        match request {
            Some(request) if wrong.is_empty() => Ok(request),
            _ => Err(Problem::invalid(&wrong)),
        }
    }
}

/// Reads one object; mistakes of all objects of a request gather in one list.
struct Reader<'a, 'w> {
    fields: Fields<'a>,
    place: String,
    wrong: &'w mut Vec<FieldError>,
}

impl<'a, 'w> Reader<'a, 'w> {
    fn open(raw: &'a RawValue, place: String, wrong: &'w mut Vec<FieldError>) -> Option<Self> {
        match Fields::of(raw) {
            Ok(fields) => Some(Self { fields, place, wrong }),
            Err(why) => {
                wrong.push(FieldError { pointer: place, detail: why.to_owned() });
                None
            }
        }
    }

    fn request(&mut self) -> Option<Request<'a>> {
        let shape = self.shape(|_| true)?;
        match shape.action {
            "schemas" => {
                self.refuse_others(shape, &["app"]);
                Some(Request { app: self.optional_text("app"), action: Action::Schemas })
            }
            "transaction" => {
                self.refuse_others(shape, &["app"]);
                let app = self.required_text("app");
                let operations = self.operations()?;
                Some(Request { app: Some(app?), action: Action::Transaction(operations) })
            }
            _ => {
                self.refuse_others(shape, &["app", "table"]);
                let app = self.required_text("app");
                let call = self.call(shape);
                Some(Request { app: Some(app?), action: Action::Table(call?) })
            }
        }
    }

    /// The shape of the action that is named, if it is `allowed` here.
    fn shape(&mut self, allowed: impl Fn(&str) -> bool) -> Option<&'static Shape> {
        let action = self.required_text("action")?;
        let mut known = ACTIONS.iter().filter(|shape| allowed(shape.action));
        if let Some(shape) = known.clone().find(|shape| shape.action == action) {
            return Some(shape);
        }
        let first = known.next().map_or("", |shape| shape.action);
        let names = known.fold(first.to_owned(), |names, shape| names + ", " + shape.action);
        self.say("action", format!("is not an action; known here are {names}"))
    }

    fn operations(&mut self) -> Option<Vec<Call<'a>>> {
        let raw = self.required("operations")?;
        let Some(all) = elements(raw).filter(|all| (1..=MOST_OPERATIONS).contains(&all.len())) else {
            return self.say("operations", format!("must be an array of 1 to {MOST_OPERATIONS} operations"));
        };
        let place = format!("{}/operations", self.place);
        let mut calls = Vec::with_capacity(all.len());
        for (index, raw) in all.into_iter().enumerate() {
            let Some(mut reader) = Reader::open(raw, format!("{place}/{index}"), self.wrong) else {
                continue;
            };
            let Some(shape) = reader.shape(|action| !matches!(action, "transaction" | "schemas")) else {
                continue;
            };
            reader.refuse_others(shape, &["table"]);
            calls.extend(reader.call(shape));
        }
        Some(calls)
    }

    fn call(&mut self, shape: &Shape) -> Option<Call<'a>> {
        let table = self.required_text("table");
        let operation = match shape.action {
            "insert" => self.required("data").map(|data| Operation::Insert { data }),
            "insertMany" => self.required("rows").map(|rows| Operation::InsertMany { rows }),
            "upsert" => self.upsert(),
            "get" => self.required("id").map(|id| Operation::Get { id }),
            "count" => Some(Operation::Count { filter: self.field("filter") }),
            "update" => {
                let (data, change) = (self.required("data"), self.change());
                Some(Operation::Update { data: data?, change: change? })
            }
            "delete" => Some(Operation::Delete { change: self.change()? }),
            _ => Some(Operation::Find(self.find())),
        };
        Some(Call { table: table?, operation: operation? })
    }

    fn upsert(&mut self) -> Option<Operation<'a>> {
        let (data, on_conflict) = (self.required("data"), self.required("onConflict"));
        let resolution = match self.optional_text("resolution").as_deref() {
            None | Some("merge") => Resolution::Merge,
            Some("ignore") => Resolution::Ignore,
            Some(_) => self.say("resolution", "must be \"merge\" or \"ignore\"").unwrap_or_default(),
        };
        Some(Operation::Upsert { data: data?, on_conflict: on_conflict?, resolution })
    }

    fn change(&mut self) -> Option<Change<'a>> {
        let which = match (self.field("id"), self.field("filter")) {
            (Some(id), None) => Some(Which::Id(id)),
            (None, Some(filter)) => Some(Which::Filter(filter)),
            (None, None) => self.say("filter", "is required, or else id"),
            (Some(_), Some(_)) => self.say("filter", "must not stand beside id"),
        };
        let returning = match self.field("returning").map(RawValue::get) {
            None | Some("false") => Some(Returning::Number),
            Some("true") => Some(Returning::Rows),
            Some(_) => self.say("returning", "must be true or false"),
        };
        Some(Change { which: which?, max_affected: self.field("maxAffected"), returning: returning? })
    }

    fn find(&mut self) -> Find<'a> {
        let count = match self.optional_text("count").as_deref() {
            None => Count::No,
            Some("exact") => Count::Exact,
            Some(_) => self.say("count", "must be \"exact\"").unwrap_or_default(),
        };
        Find {
            filter: self.field("filter"),
            columns: self.field("columns"),
            order_by: self.field("orderBy"),
            limit: self.field("limit"),
            after: self.optional_text("after"),
            count,
        }
    }

    fn say<T>(&mut self, field: &str, detail: impl Into<String>) -> Option<T> {
        self.wrong.push(FieldError { pointer: format!("{}/{field}", self.place), detail: detail.into() });
        None
    }

    fn field(&self, name: &str) -> Option<&'a RawValue> {
        self.fields.0.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    fn required(&mut self, name: &str) -> Option<&'a RawValue> {
        self.field(name).or_else(|| self.say(name, "is required"))
    }

    fn required_text(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let raw = self.required(name)?;
        text(raw).or_else(|| self.say(name, "must be a string"))
    }

    fn optional_text(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let raw = self.field(name)?;
        text(raw).or_else(|| self.say(name, "must be a string"))
    }

    fn refuse_others(&mut self, shape: &Shape, always: &[&'static str]) {
        let known = |name: &str| {
            name == "action"
                || [always, shape.required, shape.optional].iter().any(|list| list.contains(&name))
        };
        for (name, _) in self.fields.0.iter().filter(|(name, _)| !known(name)) {
            let pointer = format!("{}/{}", self.place, escaped(name));
            let detail = format!("is not a field of this action; it takes {}", fields_of(shape, always));
            self.wrong.push(FieldError { pointer, detail });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes(body: &str) -> String {
        Request::parse(body.as_bytes()).expect_err(body).detail
    }

    #[test]
    fn a_request_names_its_action_app_and_table() {
        let body = br#"{"action":"insert","app":"notes","table":"notes","data":{"title":"x"}}"#;
        let request = Request::parse(body).unwrap();
        assert_eq!(request.app.as_deref(), Some("notes"));
        assert!(matches!(request.action, Action::Table(Call { operation: Operation::Insert { .. }, .. })));
    }

    #[test]
    fn unknown_and_missing_fields_are_named_together() {
        let text = mistakes(r#"{"action":"get","app":"a","filter":{},"x/y":1}"#);
        for part in ["/filter", "/x~1y", "/table", "/id"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(mistakes(r#"{"action":"drop"}"#).contains("/action"));
        assert!(mistakes("{").contains("not JSON"));
        assert!(mistakes("[]").contains("object"));
        assert!(mistakes(r#"{"action":"get","action":"find"}"#).contains("twice"));
    }

    #[test]
    fn a_change_is_by_id_or_by_filter() {
        let of = |more: &str| format!(r#"{{"action":"delete","app":"a","table":"t"{more}}}"#);
        assert!(mistakes(&of("")).contains("/filter is required") || mistakes(&of("")).contains("/filter:"));
        assert!(mistakes(&of(r#","id":"x","filter":{}"#)).contains("beside id"));
        assert!(mistakes(&of(r#","id":"x","returning":1"#)).contains("/returning"));
        assert!(mistakes(&of(r#","id":"x","data":{}"#)).contains("/data"));
        assert!(Request::parse(of(r#","id":"x","maxAffected":1"#).as_bytes()).is_ok());
    }

    #[test]
    fn a_transaction_s_mistakes_are_named_at_their_operation() {
        let text = mistakes(
            r#"{"action":"transaction","app":"a","operations":[
                {"action":"get","table":"t","id":1}, {"action":"get","table":"t"}, 5,
                {"action":"transaction","operations":[]}, {"action":"insert","app":"b","table":"t","data":{}}]}"#,
        );
        for part in ["/operations/1/id", "/operations/2:", "/operations/3/action", "/operations/4/app"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let many = vec![r#"{"action":"count","table":"t"}"#; 51].join(",");
        let of =
            |operations: &str| format!(r#"{{"action":"transaction","app":"a","operations":[{operations}]}}"#);
        assert!(mistakes(&of(&many)).contains("1 to 50"));
        assert!(mistakes(&of("")).contains("1 to 50"));
    }

    #[test]
    fn no_value_is_quoted_back() {
        for body in [r#"{"action":"s3cret"}"#, r#"{"action":"find","app":5,"table":"t","count":"s3cret"}"#] {
            assert!(!mistakes(body).contains("s3cret"));
        }
    }
}

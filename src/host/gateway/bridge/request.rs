//! A request's shape: which action, on which table, with which fields. Unknown and missing fields are refused here;
//! what they mean for a table is the planner's to say.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::fields::{Fields, text};
use super::filter::escaped;
use crate::http::problem::{FieldError, Problem};

/// A request to the bridge.
#[derive(Debug)]
pub struct Request<'a> {
    /// Absent only where the action allows it.
    pub app: Option<Cow<'a, str>>,
    pub action: Action<'a>,
}

#[derive(Debug)]
pub enum Action<'a> {
    Table { table: Cow<'a, str>, operation: Operation<'a> },
    Schemas,
}

/// What to do with one table.
#[derive(Debug)]
pub enum Operation<'a> {
    Insert { data: &'a RawValue },
    Find(Find<'a>),
    Get { id: &'a RawValue },
    Count { filter: Option<&'a RawValue> },
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

/// The fields that each action takes beside `action`.
const ACTIONS: [(&str, &[&str]); 5] = [
    ("insert", &["app", "table", "data"]),
    ("find", &["app", "table", "filter", "columns", "orderBy", "limit", "after", "count"]),
    ("get", &["app", "table", "id"]),
    ("count", &["app", "table", "filter"]),
    ("schemas", &["app"]),
];

impl<'a> Request<'a> {
    /// # Errors
    /// A problem that names each field that is wrong.
    pub fn parse(body: &'a [u8]) -> Result<Self, Problem> {
        let raw: &RawValue = serde_json::from_slice(body).map_err(|error| {
            Problem::field("", format!("is not JSON: line {} column {}", error.line(), error.column()))
        })?;
        let fields = Fields::of(raw).map_err(|why| Problem::field("", why))?;
        let mut reader = Reader { fields, wrong: Vec::new() };
        let request = reader.request();
        match request {
            Some(request) if reader.wrong.is_empty() => Ok(request),
            _ => Err(Problem::invalid(&reader.wrong)),
        }
    }
}

struct Reader<'a> {
    fields: Fields<'a>,
    wrong: Vec<FieldError>,
}

impl<'a> Reader<'a> {
    fn request(&mut self) -> Option<Request<'a>> {
        let action = self.required_text("action")?;
        let Some((name, known)) = ACTIONS.iter().find(|(name, _)| *name == action) else {
            let names = ACTIONS.map(|(name, _)| name).join(", ");
            return self.say("/action", format!("is not an action; known are {names}"));
        };
        self.refuse_others(known);
        if *name == "schemas" {
            return Some(Request { app: self.optional_text("app"), action: Action::Schemas });
        }
        let app = self.required_text("app");
        let table = self.required_text("table");
        let operation = match *name {
            "insert" => self.required("data").map(|data| Operation::Insert { data }),
            "get" => self.required("id").map(|id| Operation::Get { id }),
            "count" => Some(Operation::Count { filter: self.field("filter") }),
            _ => Some(Operation::Find(self.find())),
        };
        Some(Request { app: Some(app?), action: Action::Table { table: table?, operation: operation? } })
    }

    fn find(&mut self) -> Find<'a> {
        let count = match self.optional_text("count").as_deref() {
            None => Count::No,
            Some("exact") => Count::Exact,
            Some(_) => self.say("/count", "must be \"exact\"").unwrap_or_default(),
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

    fn say<T>(&mut self, pointer: &str, detail: impl Into<String>) -> Option<T> {
        self.wrong.push(FieldError { pointer: pointer.to_owned(), detail: detail.into() });
        None
    }

    fn field(&self, name: &str) -> Option<&'a RawValue> {
        self.fields.0.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    fn required(&mut self, name: &str) -> Option<&'a RawValue> {
        self.field(name).or_else(|| self.say(&format!("/{name}"), "is required"))
    }

    fn required_text(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let raw = self.required(name)?;
        text(raw).or_else(|| self.say(&format!("/{name}"), "must be a string"))
    }

    fn optional_text(&mut self, name: &str) -> Option<Cow<'a, str>> {
        let raw = self.field(name)?;
        text(raw).or_else(|| self.say(&format!("/{name}"), "must be a string"))
    }

    fn refuse_others(&mut self, known: &[&str]) {
        let unknown = self.fields.0.iter().filter(|(name, _)| name != "action" && !known.contains(&&**name));
        let wrong: Vec<FieldError> = unknown
            .map(|(name, _)| FieldError {
                pointer: format!("/{}", escaped(name)),
                detail: "is not a field of this action".to_owned(),
            })
            .collect();
        self.wrong.extend(wrong);
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
        assert!(matches!(request.action, Action::Table { operation: Operation::Insert { .. }, .. }));
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
    fn no_value_is_quoted_back() {
        for body in [r#"{"action":"s3cret"}"#, r#"{"action":"find","app":5,"table":"t","count":"s3cret"}"#] {
            assert!(!mistakes(body).contains("s3cret"));
        }
    }
}

//! Parses the fields of a body or query one by one, and reports all missing, invalid and unknown fields together.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use jiff::Timestamp;
use serde_json::{Map, Value};

use super::openapi::MAX_SAFE_INTEGER;
use super::problem::{FieldError, Problem};
use svc_base::untrusted_text;

pub struct Fields {
    left: Map<String, Value>,
    /// `/` or `/outer/` in a body (RFC 6901), `?` in a query.
    prefix: String,
    errors: Vec<FieldError>,
    /// All names that were requested.
    known: Vec<String>,
    unknown: Unknown,
}

/// How to treat unknown fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Unknown {
    #[default]
    Refused,
    Ignored,
}

impl Fields {
    pub fn of_body(map: Map<String, Value>) -> Self {
        Self::new(map, "/".to_owned(), Unknown::Refused)
    }

    fn new(left: Map<String, Value>, prefix: String, unknown: Unknown) -> Self {
        Self { left, prefix, errors: Vec::new(), known: Vec::new(), unknown }
    }

    /// Ignores unknown fields, here and in nested objects: for bodies from programs that may be newer.
    pub fn ignoring_unknown(mut self) -> Self {
        self.unknown = Unknown::Ignored;
        self
    }

    pub fn of_query(query: &str) -> Self {
        Self::of_pairs(query, "?")
    }

    pub fn of_form(form: &str) -> Self {
        Self::of_pairs(form, "/")
    }

    fn of_pairs(text: &str, prefix: &str) -> Self {
        let mut fields = Self::new(Map::new(), prefix.to_owned(), Unknown::Refused);
        for (name, value) in url::form_urlencoded::parse(text.as_bytes()) {
            if fields.left.insert(name.to_string(), value.into_owned().into()).is_some() {
                fields.wrong(&name, "is given twice");
            }
        }
        fields
    }

    fn pointer(&self, name: &str) -> String {
        format!("{}{}", self.prefix, name.replace('~', "~0").replace('/', "~1"))
    }

    pub fn wrong(&mut self, name: &str, detail: impl Display) {
        let pointer = self.pointer(name);
        self.errors.push(FieldError { pointer, detail: detail.to_string() });
    }

    /// The value, unless it is absent or null.
    fn take_value(&mut self, name: &str) -> Option<Value> {
        self.known.push(name.to_owned());
        self.left.shift_remove(name).filter(|value| !value.is_null())
    }

    fn required_value(&mut self, name: &str) -> Option<Value> {
        let value = self.take_value(name);
        if value.is_none() {
            self.wrong(name, "is required");
        }
        value
    }

    fn parsed<T: FromStr<Err: Display>>(&mut self, name: &str, value: &Value) -> Option<T> {
        let Some(text) = value.as_str() else {
            self.wrong(name, "must be a string");
            return None;
        };
        // PostgreSQL cannot store NUL in text or JSON.
        if text.contains('\0') {
            self.wrong(name, "must not contain NUL");
            return None;
        }
        text.parse().map_err(|why| self.wrong(name, why)).ok()
    }

    pub fn required<T: FromStr<Err: Display>>(&mut self, name: &str) -> Option<T> {
        let value = self.required_value(name)?;
        self.parsed(name, &value)
    }

    pub fn optional<T: FromStr<Err: Display>>(&mut self, name: &str) -> Option<T> {
        let value = self.take_value(name)?;
        self.parsed(name, &value)
    }

    /// A whole number in a query.
    pub fn within(&mut self, name: &str, range: RangeInclusive<usize>, default: usize) -> usize {
        let Some(value) = self.take_value(name) else { return default };
        let number = value.as_str().and_then(|text| text.parse().ok()).filter(|n| range.contains(n));
        number.unwrap_or_else(|| {
            self.wrong(name, format!("must be a whole number from {} to {}", range.start(), range.end()));
            default
        })
    }

    /// `true` or `false` in a query.
    pub fn flag(&mut self, name: &str) -> Option<bool> {
        match self.take_value(name)?.as_str() {
            Some("true") => Some(true),
            Some("false") => Some(false),
            _ => {
                self.wrong(name, "must be true or false");
                None
            }
        }
    }

    pub fn time(&mut self, name: &str) -> Option<Timestamp> {
        let text: String = self.optional(name)?;
        self.parsed_time(name, &text)
    }

    pub fn required_time(&mut self, name: &str) -> Option<Timestamp> {
        let text: String = self.required(name)?;
        self.parsed_time(name, &text)
    }

    fn parsed_time(&mut self, name: &str, text: &str) -> Option<Timestamp> {
        let time = text.parse().ok().filter(|_| is_rfc3339(text));
        if time.is_none() {
            self.wrong(name, "must be an RFC 3339 time such as 2026-01-02T03:04:05.678Z");
        }
        time
    }

    /// Text of 1 to `max_chars` characters.
    pub fn text(&mut self, name: &str, max_chars: usize) -> Option<String> {
        let text: String = self.required(name)?;
        self.check_length(name, text, max_chars)
    }

    /// The same, if it is present.
    pub fn optional_text(&mut self, name: &str, max_chars: usize) -> Option<String> {
        let text: String = self.optional(name)?;
        self.check_length(name, text, max_chars)
    }

    /// Text from a host: truncated and made printable instead of refused.
    pub fn reported(&mut self, name: &str) -> Option<String> {
        let value = self.take_value(name)?;
        self.bounded(name, &value)
    }

    /// [`Self::reported`] for a required, non-empty field.
    pub fn required_reported(&mut self, name: &str) -> Option<String> {
        let value = self.required_value(name)?;
        let text = self.bounded(name, &value)?;
        self.check_length(name, text, untrusted_text::MAX_CHARS)
    }

    fn bounded(&mut self, name: &str, value: &Value) -> Option<String> {
        let text = value.as_str().map(untrusted_text::bounded);
        if text.is_none() {
            self.wrong(name, "must be a string");
        }
        text
    }

    fn check_length(&mut self, name: &str, text: String, max_chars: usize) -> Option<String> {
        if !(1..=max_chars).contains(&text.chars().count()) {
            self.wrong(name, format!("must have 1 to {max_chars} characters"));
            return None;
        }
        Some(text)
    }

    pub fn boolean(&mut self, name: &str) -> Option<bool> {
        let value = self.take_value(name)?;
        if value.as_bool().is_none() {
            self.wrong(name, "must be true or false");
        }
        value.as_bool()
    }

    pub fn required_number(&mut self, name: &str) -> Option<u64> {
        let value = self.required_value(name)?;
        self.number(name, &value)
    }

    pub fn optional_number(&mut self, name: &str) -> Option<u64> {
        let value = self.take_value(name)?;
        self.number(name, &value)
    }

    /// Any finite number.
    pub fn decimal(&mut self, name: &str) -> Option<f64> {
        let number = self.take_value(name)?.as_f64();
        if number.is_none() {
            self.wrong(name, "must be a number");
        }
        number
    }

    fn number(&mut self, name: &str, value: &Value) -> Option<u64> {
        // In JSON, 1.0 and 1 are the same number.
        let whole = value.as_f64().filter(|number| number.fract() == 0.0 && *number >= 0.0);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole, and not negative")]
        let number = value.as_u64().or(whole.map(|number| number as u64));
        let number = number.filter(|number| *number <= MAX_SAFE_INTEGER);
        if number.is_none() {
            self.wrong(name, format!("must be a whole number from 0 to {MAX_SAFE_INTEGER}"));
        }
        number
    }

    /// Whether it is present and not `null`.
    pub fn has(&self, name: &str) -> bool {
        self.left.get(name).is_some_and(|value| !value.is_null())
    }

    pub fn strings(&mut self, name: &str, max_items: usize) -> Vec<String> {
        let Some(value) = self.take_value(name) else { return Vec::new() };
        let texts = value.as_array().filter(|items| items.len() <= max_items).and_then(|items| {
            let text = |item: &Value| item.as_str().filter(|text| !text.contains('\0')).map(str::to_owned);
            items.iter().map(text).collect::<Option<Vec<_>>>()
        });
        if texts.is_none() {
            self.wrong(name, format!("must be an array of at most {max_items} strings without NUL"));
        }
        texts.unwrap_or_default()
    }

    /// The fields of a nested object; the caller must pass them to [`Self::close`].
    pub fn nested(&mut self, name: &str) -> Option<Self> {
        let value = self.required_value(name)?;
        self.open(name, value)
    }

    pub fn optional_nested(&mut self, name: &str) -> Option<Self> {
        let value = self.take_value(name)?;
        self.open(name, value)
    }

    fn open(&mut self, name: &str, value: Value) -> Option<Self> {
        let prefix = format!("{}/", self.pointer(name));
        let Value::Object(left) = value else {
            self.wrong(name, "must be an object");
            return None;
        };
        Some(Self::new(left, prefix, self.unknown))
    }

    /// The objects of an array; the caller must pass each to [`Self::close`].
    pub fn each(&mut self, name: &str, range: RangeInclusive<usize>) -> Option<Vec<Self>> {
        let value = self.required_value(name)?;
        let Value::Array(items) = value else {
            self.wrong_array(name, &range);
            return None;
        };
        if !range.contains(&items.len()) {
            self.wrong_array(name, &range);
            return None;
        }
        let mut opened = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let Value::Object(left) = item else {
                self.wrong_array(name, &range);
                return None;
            };
            let prefix = format!("{}/{index}/", self.pointer(name));
            opened.push(Self::new(left, prefix, self.unknown));
        }
        Some(opened)
    }

    fn wrong_array(&mut self, name: &str, range: &RangeInclusive<usize>) {
        self.wrong(name, format!("must be an array of {} to {} objects", range.start(), range.end()));
    }

    pub fn close(&mut self, nested: Self) {
        self.errors.extend(nested.all_errors());
    }

    fn all_errors(mut self) -> Vec<FieldError> {
        if self.unknown == Unknown::Ignored {
            return self.errors;
        }
        let unknown: Vec<String> = self.left.keys().cloned().collect();
        let why = match self.known.join(", ") {
            none if none.is_empty() => "is not a field of this request, which has none".to_owned(),
            known => format!("is not a field of this request; it takes {known}"),
        };
        for name in unknown {
            self.wrong(&name, &why);
        }
        self.errors
    }

    /// Accepts unknown parameters: for URLs that a browser is redirected to, to which others add parameters.
    pub fn allow_unknown(mut self) -> Self {
        self.left.clear();
        self
    }

    /// Returns the built value, or all mistakes. `build` is `None` only after a mistake was recorded.
    pub fn finish<T>(self, build: Option<T>) -> Result<T, Problem> {
        let errors = self.all_errors();
        match build {
            Some(value) if errors.is_empty() => Ok(value),
            _ => Err(Problem::invalid(&errors)),
        }
    }
}

/// Whether a time has the form of RFC 3339; the parser accepts other forms as well.
fn is_rfc3339(text: &str) -> bool {
    let upper = text.to_ascii_uppercase();
    let shape = upper.replace(|c: char| c.is_ascii_digit(), "0");
    let Some(rest) = shape.strip_prefix("0000-00-00T00:00:00") else { return false };
    let zone = match rest.strip_prefix('.') {
        Some(fraction) if fraction.starts_with('0') => fraction.trim_start_matches('0'),
        Some(_) => return false,
        None => rest,
    };
    matches!(zone, "Z" | "+00:00" | "-00:00")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        match value {
            Value::Object(map) => Fields::of_body(map),
            _ => unreachable!(),
        }
    }

    #[test]
    fn finish_names_every_mistake_by_its_pointer() {
        let mut body = fields(json!({"port": "x", "flag": 1, "inner": {"a/b": 1}, "more": null, "what": 2}));
        let port: Option<u16> = body.required("port");
        let name: Option<String> = body.required("name");
        body.boolean("flag");
        let inner = body.nested("inner").unwrap();
        body.close(inner);
        assert_eq!(body.optional::<String>("more"), None);
        let problem = body.finish(port.zip(name)).unwrap_err();
        let named: Vec<_> =
            problem.members["errors"].as_array().unwrap().iter().map(|e| &e["pointer"]).collect();
        assert_eq!(named, ["/port", "/name", "/flag", "/inner/a~1b", "/what"]);
    }

    #[test]
    fn time_accepts_only_rfc3339() {
        for (text, good) in [
            ("2026-01-02T03:04:05Z", true),
            ("2026-01-02t03:04:05.678901z", true),
            ("2026-01-02T03:04:05+01:30", true),
            ("2026-01-02 03:04:05Z", false),
            ("2026-01-02T03:04:05.Z", false),
            ("2026-01-02T03:04Z", false),
            ("2026-01-02T03:04:05Z[UTC]", false),
            ("2026-13-02T03:04:05Z", false),
            ("+002026-01-02T03:04:05Z", false),
        ] {
            let mut body = fields(json!({ "at": text }));
            assert_eq!(body.time("at").is_some(), good, "{text}");
        }
    }

    #[test]
    fn query_mistakes_are_named_by_parameter() {
        let mut query = Fields::of_query("limit=5&x=1&limit=6");
        assert_eq!(query.optional::<u32>("limit"), Some(6));
        let problem = query.finish(Some(())).unwrap_err();
        assert_eq!(problem.members["errors"][0]["pointer"], "?limit");
        assert_eq!(problem.members["errors"][1]["pointer"], "?x");
    }
}

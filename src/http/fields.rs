//! Parses the fields in a body or query one by one, and reports all missing, invalid and unknown fields together.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use jiff::Timestamp;
use serde_json::{Map, Value};

use super::openapi::MAX_SAFE_INTEGER;
use super::problem::{FieldError, Problem};
use svc_base::untrusted_text;

/// The fields of a request or of an object in it: those that the caller has not parsed yet, and the errors so far.
pub struct Fields {
    remaining: Map<String, Value>,
    /// The prefix of error pointers: `/` or `/outer/` in a body (RFC 6901), `?` in a query.
    prefix: String,
    errors: Vec<FieldError>,
    /// The names of all fields that the request takes: those that the caller has parsed or tried to parse.
    expected_names: Vec<String>,
    unknown_fields: UnknownFields,
}

/// How to treat unknown fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum UnknownFields {
    #[default]
    Refuse,
    Ignore,
}

impl Fields {
    pub fn from_body(map: Map<String, Value>) -> Self {
        Self::new(map, "/".to_owned(), UnknownFields::Refuse)
    }

    fn new(remaining: Map<String, Value>, prefix: String, unknown_fields: UnknownFields) -> Self {
        Self { remaining, prefix, errors: Vec::new(), expected_names: Vec::new(), unknown_fields }
    }

    /// Ignores unknown fields, here and in nested objects; for bodies from programs that may be newer than this one.
    pub fn ignoring_unknown(mut self) -> Self {
        self.unknown_fields = UnknownFields::Ignore;
        self
    }

    pub fn from_query(query: &str) -> Self {
        Self::from_pairs(query, "?")
    }

    pub fn from_form(form: &str) -> Self {
        Self::from_pairs(form, "/")
    }

    fn from_pairs(text: &str, prefix: &str) -> Self {
        let mut fields = Self::new(Map::new(), prefix.to_owned(), UnknownFields::Refuse);
        for (name, value) in url::form_urlencoded::parse(text.as_bytes()) {
            if fields.remaining.insert(name.to_string(), value.into_owned().into()).is_some() {
                fields.add_error(&name, "is given more than once");
            }
        }
        fields
    }

    fn pointer(&self, name: &str) -> String {
        format!("{}{}", self.prefix, name.replace('~', "~0").replace('/', "~1"))
    }

    pub fn add_error(&mut self, name: &str, detail: impl Display) {
        let pointer = self.pointer(name);
        self.errors.push(FieldError { pointer, detail: detail.to_string() });
    }

    /// Takes the value, unless it is absent or null.
    fn take_value(&mut self, name: &str) -> Option<Value> {
        self.expected_names.push(name.to_owned());
        self.remaining.shift_remove(name).filter(|value| !value.is_null())
    }

    fn required_value(&mut self, name: &str) -> Option<Value> {
        let value = self.take_value(name);
        if value.is_none() {
            self.add_error(name, "is required");
        }
        value
    }

    fn parse_text<T: FromStr<Err: Display>>(&mut self, name: &str, value: &Value) -> Option<T> {
        let Some(text) = value.as_str() else {
            self.add_error(name, "must be a string");
            return None;
        };
        // PostgreSQL cannot store NUL in text or JSON.
        if text.contains('\0') {
            self.add_error(name, "must not contain NUL");
            return None;
        }
        text.parse().map_err(|error| self.add_error(name, error)).ok()
    }

    pub fn required<T: FromStr<Err: Display>>(&mut self, name: &str) -> Option<T> {
        let value = self.required_value(name)?;
        self.parse_text(name, &value)
    }

    pub fn optional<T: FromStr<Err: Display>>(&mut self, name: &str) -> Option<T> {
        let value = self.take_value(name)?;
        self.parse_text(name, &value)
    }

    /// Parses a whole number in a query. Returns `default` if it is absent, or, after recording an error, if it is
    /// invalid.
    pub fn number_in_range(&mut self, name: &str, range: RangeInclusive<usize>, default: usize) -> usize {
        let Some(value) = self.take_value(name) else { return default };
        let number = value.as_str().and_then(|text| text.parse().ok()).filter(|n| range.contains(n));
        number.unwrap_or_else(|| {
            self.add_error(name, format!("must be a whole number from {} to {}", range.start(), range.end()));
            default
        })
    }

    /// Parses `true` or `false` in a query.
    pub fn flag(&mut self, name: &str) -> Option<bool> {
        match self.take_value(name)?.as_str() {
            Some("true") => Some(true),
            Some("false") => Some(false),
            _ => {
                self.add_error(name, "must be true or false");
                None
            }
        }
    }

    pub fn optional_time(&mut self, name: &str) -> Option<Timestamp> {
        let text: String = self.optional(name)?;
        self.parse_time(name, &text)
    }

    pub fn required_time(&mut self, name: &str) -> Option<Timestamp> {
        let text: String = self.required(name)?;
        self.parse_time(name, &text)
    }

    fn parse_time(&mut self, name: &str, text: &str) -> Option<Timestamp> {
        let time = text.parse().ok().filter(|_| is_rfc3339(text));
        if time.is_none() {
            self.add_error(name, "must be an RFC 3339 time such as 2026-01-02T03:04:05.678Z");
        }
        time
    }

    /// Parses text of 1 to `max_chars` characters.
    pub fn required_text(&mut self, name: &str, max_chars: usize) -> Option<String> {
        let text: String = self.required(name)?;
        self.check_length(name, text, max_chars)
    }

    /// Like [`Self::required_text`], for an optional field.
    pub fn optional_text(&mut self, name: &str, max_chars: usize) -> Option<String> {
        let text: String = self.optional(name)?;
        self.check_length(name, text, max_chars)
    }

    /// Parses text from a host. Text that is too long or not printable is truncated or made printable, not rejected.
    pub fn optional_host_text(&mut self, name: &str) -> Option<String> {
        let value = self.take_value(name)?;
        self.truncate_text(name, &value)
    }

    /// Like [`Self::optional_host_text`], for a required, non-empty field.
    pub fn required_host_text(&mut self, name: &str) -> Option<String> {
        let value = self.required_value(name)?;
        let text = self.truncate_text(name, &value)?;
        self.check_length(name, text, untrusted_text::MAX_CHARS)
    }

    fn truncate_text(&mut self, name: &str, value: &Value) -> Option<String> {
        let text = value.as_str().map(untrusted_text::truncate_printable);
        if text.is_none() {
            self.add_error(name, "must be a string");
        }
        text
    }

    fn check_length(&mut self, name: &str, text: String, max_chars: usize) -> Option<String> {
        if !(1..=max_chars).contains(&text.chars().count()) {
            self.add_error(name, format!("must have 1 to {max_chars} characters"));
            return None;
        }
        Some(text)
    }

    pub fn boolean(&mut self, name: &str) -> Option<bool> {
        let value = self.take_value(name)?;
        if value.as_bool().is_none() {
            self.add_error(name, "must be true or false");
        }
        value.as_bool()
    }

    pub fn required_number(&mut self, name: &str) -> Option<u64> {
        let value = self.required_value(name)?;
        self.parse_number(name, &value)
    }

    pub fn optional_number(&mut self, name: &str) -> Option<u64> {
        let value = self.take_value(name)?;
        self.parse_number(name, &value)
    }

    /// Parses any finite number.
    pub fn decimal(&mut self, name: &str) -> Option<f64> {
        let number = self.take_value(name)?.as_f64();
        if number.is_none() {
            self.add_error(name, "must be a number");
        }
        number
    }

    fn parse_number(&mut self, name: &str, value: &Value) -> Option<u64> {
        // In JSON, 1.0 and 1 are the same number.
        let whole = value.as_f64().filter(|number| number.fract() == 0.0 && *number >= 0.0);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole and not negative")]
        let number = value.as_u64().or(whole.map(|number| number as u64));
        let number = number.filter(|number| *number <= MAX_SAFE_INTEGER);
        if number.is_none() {
            self.add_error(name, format!("must be a whole number from 0 to {MAX_SAFE_INTEGER}"));
        }
        number
    }

    /// Returns whether the field is present, not `null` and not parsed yet.
    pub fn has(&self, name: &str) -> bool {
        self.remaining.get(name).is_some_and(|value| !value.is_null())
    }

    /// Discards a field that this variant of the request does not use, so that it is not reported as unknown.
    pub fn discard(&mut self, name: &str) {
        self.remaining.shift_remove(name);
    }

    /// Parses an optional array of strings; empty if it is absent or invalid.
    pub fn strings(&mut self, name: &str, max_items: usize) -> Vec<String> {
        let Some(value) = self.take_value(name) else { return Vec::new() };
        let texts = value.as_array().filter(|items| items.len() <= max_items).and_then(|items| {
            let text = |item: &Value| item.as_str().filter(|text| !text.contains('\0')).map(str::to_owned);
            items.iter().map(text).collect::<Option<Vec<_>>>()
        });
        if texts.is_none() {
            self.add_error(name, format!("must be an array of at most {max_items} strings without NUL"));
        }
        texts.unwrap_or_default()
    }

    /// Returns the fields of a required nested object; the caller must pass them to [`Self::close`].
    pub fn required_nested(&mut self, name: &str) -> Option<Self> {
        let value = self.required_value(name)?;
        self.parse_nested(name, value)
    }

    /// Like [`Self::required_nested`], for an optional object.
    pub fn optional_nested(&mut self, name: &str) -> Option<Self> {
        let value = self.take_value(name)?;
        self.parse_nested(name, value)
    }

    fn parse_nested(&mut self, name: &str, value: Value) -> Option<Self> {
        let prefix = format!("{}/", self.pointer(name));
        let Value::Object(remaining) = value else {
            self.add_error(name, "must be an object");
            return None;
        };
        Some(Self::new(remaining, prefix, self.unknown_fields))
    }

    /// Returns the objects in a required array, whose length must be in `range`; the caller must pass each object to
    /// [`Self::close`].
    pub fn nested_array(&mut self, name: &str, range: RangeInclusive<usize>) -> Option<Vec<Self>> {
        let value = self.required_value(name)?;
        let Value::Array(items) = value else {
            self.add_array_error(name, &range);
            return None;
        };
        if !range.contains(&items.len()) {
            self.add_array_error(name, &range);
            return None;
        }
        let mut objects = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let Value::Object(remaining) = item else {
                self.add_array_error(name, &range);
                return None;
            };
            let prefix = format!("{}/{index}/", self.pointer(name));
            objects.push(Self::new(remaining, prefix, self.unknown_fields));
        }
        Some(objects)
    }

    fn add_array_error(&mut self, name: &str, range: &RangeInclusive<usize>) {
        self.add_error(name, format!("must be an array of {} to {} objects", range.start(), range.end()));
    }

    /// Adds the errors from a nested object, including those for its unknown fields.
    pub fn close(&mut self, nested: Self) {
        self.errors.extend(nested.all_errors());
    }

    fn all_errors(mut self) -> Vec<FieldError> {
        if self.unknown_fields == UnknownFields::Ignore {
            return self.errors;
        }
        let unknown: Vec<String> = self.remaining.keys().cloned().collect();
        let detail = match self.expected_names.join(", ") {
            names if names.is_empty() => "is not a field of this request, which has none".to_owned(),
            names => format!("is not a field of this request; it takes {names}"),
        };
        for name in unknown {
            self.add_error(&name, &detail);
        }
        self.errors
    }

    /// Ignores parameters that the caller has not parsed: a service that redirects a browser here may add its own
    /// parameters to the URL.
    pub fn discard_remaining(mut self) -> Self {
        self.remaining.clear();
        self
    }

    /// Returns the parsed value, or a problem with all errors. `parsed` may be `None` only if an error has been
    /// recorded.
    pub fn finish<T>(self, parsed: Option<T>) -> Result<T, Problem> {
        let errors = self.all_errors();
        match parsed {
            Some(value) if errors.is_empty() => Ok(value),
            _ => Err(Problem::invalid(&errors)),
        }
    }
}

/// Returns whether a time is in RFC 3339 format, with any offset; the parser accepts other formats as well.
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
            Value::Object(map) => Fields::from_body(map),
            _ => unreachable!(),
        }
    }

    #[test]
    fn finish_lists_every_error_by_its_pointer() {
        let mut body = fields(json!({"port": "x", "flag": 1, "inner": {"a/b": 1}, "more": null, "extra": 2}));
        let port: Option<u16> = body.required("port");
        let name: Option<String> = body.required("name");
        body.boolean("flag");
        let inner = body.required_nested("inner").unwrap();
        body.close(inner);
        assert_eq!(body.optional::<String>("more"), None);
        let problem = body.finish(port.zip(name)).unwrap_err();
        let pointers: Vec<_> =
            problem.members["errors"].as_array().unwrap().iter().map(|e| &e["pointer"]).collect();
        assert_eq!(pointers, ["/port", "/name", "/flag", "/inner/a~1b", "/extra"]);
    }

    #[test]
    fn optional_time_accepts_only_rfc3339() {
        for (text, is_accepted) in [
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
            assert_eq!(body.optional_time("at").is_some(), is_accepted, "{text}");
        }
    }

    #[test]
    fn finish_lists_query_errors_by_parameter() {
        let mut query = Fields::from_query("limit=5&x=1&limit=6");
        assert_eq!(query.optional::<u32>("limit"), Some(6));
        let problem = query.finish(Some(())).unwrap_err();
        assert_eq!(problem.members["errors"][0]["pointer"], "?limit");
        assert_eq!(problem.members["errors"][1]["pointer"], "?x");
    }
}

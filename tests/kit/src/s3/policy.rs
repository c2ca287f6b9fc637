//! Session policies: a subset of IAM's policy language.
//!
//! Unsupported elements, such as unknown operators or condition keys, are rejected, never ignored.

use serde_json::{Map, Value};

/// An action on a resource, to be authorized.
#[derive(Clone, Debug)]
pub(super) struct AccessRequest<'a> {
    /// For example, `s3:GetObject`.
    pub(super) action: &'a str,
    /// For example, `arn:aws:s3:::bucket/key`.
    pub(super) resource: String,
    /// `s3:prefix` for a listing.
    pub(super) prefix: Option<String>,
    pub(super) write_properties: WriteProperties,
}

/// Properties of a write request that conditions can test.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteProperties {
    /// `s3:ObjectCreationOperation`.
    pub(super) creates: bool,
    /// `s3:if-none-match`: the header, if present.
    pub(super) if_none_match: Option<String>,
}

impl<'a> AccessRequest<'a> {
    pub(super) fn new(action: &'a str, resource: String) -> Self {
        Self { action, resource, prefix: None, write_properties: WriteProperties::default() }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Policy(Vec<Statement>);

#[derive(Clone, Debug)]
struct Statement {
    allows: bool,
    actions: Vec<String>,
    resources: Vec<String>,
    /// The patterns for each condition on `s3:prefix`; all conditions must be met.
    prefixes: Vec<Vec<String>>,
    /// `Null` on `s3:if-none-match`: whether the header must be missing.
    if_none_match_is_null: Option<bool>,
    /// `Bool` on `s3:ObjectCreationOperation`.
    creates: Option<bool>,
}

impl Policy {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let mut fields = parse_object(value, "the policy")?;
        let version = fields.remove("Version");
        if version.as_ref().and_then(Value::as_str) != Some("2012-10-17") {
            return Err(format!("unsupported Version {version:?}"));
        }
        let statements = match fields.remove("Statement") {
            Some(Value::Array(statements)) => statements,
            Some(statement @ Value::Object(_)) => vec![statement],
            other => return Err(format!("invalid Statement {other:?}")),
        };
        reject_unknown_fields(&fields)?;
        statements.into_iter().map(parse_statement).collect::<Result<_, _>>().map(Self)
    }

    /// An explicit deny wins; without an allow, access is denied.
    pub(super) fn allows(&self, access_request: &AccessRequest<'_>) -> bool {
        let matching = || self.0.iter().filter(|statement| statement.matches(access_request));
        matching().any(|statement| statement.allows) && !matching().any(|statement| !statement.allows)
    }
}

impl Statement {
    fn matches(&self, access_request: &AccessRequest<'_>) -> bool {
        let action = access_request.action.to_ascii_lowercase();
        self.actions.iter().any(|pattern| matches_pattern(&pattern.to_ascii_lowercase(), &action))
            && self.resources.iter().any(|pattern| matches_pattern(pattern, &access_request.resource))
            && self.prefixes.iter().all(|patterns| {
                // A condition on a missing key is not met.
                access_request
                    .prefix
                    .as_ref()
                    .is_some_and(|prefix| patterns.iter().any(|pattern| matches_pattern(pattern, prefix)))
            })
            && self
                .if_none_match_is_null
                .is_none_or(|null| null == access_request.write_properties.if_none_match.is_none())
            && self.creates.is_none_or(|creates| creates == access_request.write_properties.creates)
    }
}

fn parse_statement(value: Value) -> Result<Statement, String> {
    let mut fields = parse_object(value, "a statement")?;
    fields.remove("Sid");
    let allows = match fields.remove("Effect").as_ref().and_then(Value::as_str) {
        Some("Allow") => true,
        Some("Deny") => false,
        other => return Err(format!("invalid Effect {other:?}")),
    };
    let actions = parse_strings(fields.remove("Action"), "Action")?;
    let resources = parse_strings(fields.remove("Resource"), "Resource")?;
    let (mut prefixes, mut if_none_match_is_null, mut creates) = (Vec::new(), None, None);
    for (operator, tests) in
        fields.remove("Condition").map_or(Ok(Map::new()), |c| parse_object(c, "Condition"))?
    {
        for (key, patterns) in parse_object(tests, &operator)? {
            match (operator.as_str(), key.as_str()) {
                ("Null", "s3:if-none-match") => {
                    if_none_match_is_null = Some(parse_bool(&patterns)?);
                    continue;
                }
                ("Bool", "s3:ObjectCreationOperation") => {
                    creates = Some(parse_bool(&patterns)?);
                    continue;
                }
                _ => {}
            }
            if operator != "StringLike" && operator != "StringEquals" || key != "s3:prefix" {
                return Err(format!("unsupported condition {operator} on {key}"));
            }
            let patterns = parse_strings(Some(patterns), &key)?;
            if operator == "StringEquals" && patterns.iter().any(|pattern| pattern.contains(['*', '?'])) {
                return Err("StringEquals does not support wildcards".to_owned());
            }
            prefixes.push(patterns);
        }
    }
    reject_unknown_fields(&fields)?;
    Ok(Statement { allows, actions, resources, prefixes, if_none_match_is_null, creates })
}

fn parse_bool(value: &Value) -> Result<bool, String> {
    match value.as_str() {
        Some("true") => Ok(true),
        Some("false") => Ok(false),
        _ => Err(format!("{value} is neither \"true\" nor \"false\"")),
    }
}

fn parse_object(value: Value, name: &str) -> Result<Map<String, Value>, String> {
    match value {
        Value::Object(map) => Ok(map),
        other => Err(format!("{name} must be an object, not {other}")),
    }
}

fn reject_unknown_fields(map: &Map<String, Value>) -> Result<(), String> {
    map.keys().next().map_or(Ok(()), |key| Err(format!("unsupported field {key}")))
}

fn parse_strings(value: Option<Value>, name: &str) -> Result<Vec<String>, String> {
    let values = match value {
        Some(Value::Array(values)) => values,
        Some(value) => vec![value],
        None => return Err(format!("{name} is missing")),
    };
    let text = |value: Value| {
        value.as_str().map(str::to_owned).ok_or_else(|| format!("{name} must contain strings, not {value}"))
    };
    values.into_iter().map(text).collect()
}

/// `*` matches any text, `?` one character.
fn matches_pattern(pattern: &str, text: &str) -> bool {
    match pattern.chars().next() {
        None => text.is_empty(),
        Some('*') => {
            let rest = &pattern[1..];
            text.char_indices()
                .map(|(index, _)| index)
                .chain([text.len()])
                .any(|index| matches_pattern(rest, &text[index..]))
        }
        Some(first) => {
            let mut chars = text.chars();
            chars.next().is_some_and(|c| first == '?' || first == c)
                && matches_pattern(&pattern[first.len_utf8()..], chars.as_str())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access_request<'a>(action: &'a str, resource: &str, prefix: Option<&str>) -> AccessRequest<'a> {
        let prefix = prefix.map(str::to_owned);
        AccessRequest { prefix, ..AccessRequest::new(action, format!("arn:aws:s3:::{resource}")) }
    }

    #[test]
    fn policy_can_require_create_only_writes() {
        let policy = Policy::parse(
            r#"{"Version": "2012-10-17", "Statement": [
                {"Effect": "Allow", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::b/u/s/*"},
                {"Effect": "Deny", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::b/u/s/once/*",
                 "Condition": {"Null": {"s3:if-none-match": "true"}, "Bool": {"s3:ObjectCreationOperation": "true"}}}]}"#,
        )
        .expect("the policy is valid");
        let put = |key: &str, creates: bool, header: Option<&str>| {
            let write_properties = WriteProperties { creates, if_none_match: header.map(str::to_owned) };
            policy.allows(&AccessRequest { write_properties, ..access_request("s3:PutObject", key, None) })
        };
        assert!(put("b/u/s/x", true, None));
        assert!(!put("b/u/s/once/x", true, None));
        assert!(put("b/u/s/once/x", true, Some("*")));
        assert!(put("b/u/s/once/x", false, None), "a part of an upload does not create an object");
    }

    #[test]
    fn access_requires_allow_and_deny_wins() {
        let policy = Policy::parse(
            r#"{"Version": "2012-10-17", "Statement": [
                {"Effect": "Allow", "Action": ["s3:Get*", "s3:PutObject"], "Resource": "arn:aws:s3:::b/u/s/*"},
                {"Effect": "Deny", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::b/u/s/fixed"},
                {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::b",
                 "Condition": {"StringLike": {"s3:prefix": ["u/s/*"]}}}]}"#,
        )
        .expect("the policy is valid");
        assert!(policy.allows(&access_request("s3:GetObject", "b/u/s/x/y", None)));
        assert!(policy.allows(&access_request("s3:PutObject", "b/u/s/x", None)));
        assert!(!policy.allows(&access_request("s3:PutObject", "b/u/s/fixed", None)));
        assert!(!policy.allows(&access_request("s3:GetObject", "b/u/s2/x", None)));
        assert!(!policy.allows(&access_request("s3:DeleteObject", "b/u/s/x", None)));
        assert!(policy.allows(&access_request("s3:ListBucket", "b", Some("u/s/"))));
        for prefix in [None, Some(""), Some("u/"), Some("u/s"), Some("u/s2/")] {
            assert!(!policy.allows(&access_request("s3:ListBucket", "b", prefix)), "{prefix:?}");
        }
    }

    #[test]
    fn parse_rejects_unsupported_elements() {
        let parse = |statement: &str| {
            Policy::parse(&format!(r#"{{"Version": "2012-10-17", "Statement": [{statement}]}}"#))
        };
        for statement in [
            r#"{"Effect": "Allow", "Action": "s3:GetObject"}"#,
            r#"{"Effect": "Perhaps", "Action": "s3:*", "Resource": "*"}"#,
            r#"{"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"}"#,
            r#"{"Effect": "Allow", "Action": "s3:*", "Resource": "*", "Condition": {"IpAddress": {"aws:SourceIp": "::1"}}}"#,
        ] {
            assert!(parse(statement).is_err(), "{statement}");
        }
        assert!(Policy::parse("{}").is_err());
    }
}

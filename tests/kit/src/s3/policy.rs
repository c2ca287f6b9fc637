//! Session policies: the part of IAM's policy language that such policies use, parsed strictly and evaluated.
//!
//! What is not known here (another operator, another condition key) is refused when it is given, never ignored.

use serde_json::{Map, Value};

/// What a request wants to do to what.
#[derive(Clone, Debug)]
pub(super) struct Wish<'a> {
    /// `s3:GetObject`.
    pub(super) action: &'a str,
    /// `arn:aws:s3:::bucket/key`.
    pub(super) resource: String,
    /// `s3:prefix` of a listing.
    pub(super) prefix: Option<String>,
    pub(super) creation: Creation,
}

/// What conditions can ask of a write.
#[derive(Clone, Debug, Default)]
pub(super) struct Creation {
    /// `s3:ObjectCreationOperation`.
    pub(super) creates: bool,
    /// `s3:if-none-match`: the header, where there is one.
    pub(super) if_none_match: Option<String>,
}

impl<'a> Wish<'a> {
    pub(super) fn new(action: &'a str, resource: String) -> Self {
        Self { action, resource, prefix: None, creation: Creation::default() }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Policy(Vec<Statement>);

#[derive(Clone, Debug)]
struct Statement {
    allows: bool,
    actions: Vec<String>,
    resources: Vec<String>,
    /// Patterns of `s3:prefix`; each condition has to hold.
    prefixes: Vec<Vec<String>>,
    /// `Null` of `s3:if-none-match`: whether the header has to be missing.
    if_none_match_is_null: Option<bool>,
    /// `Bool` of `s3:ObjectCreationOperation`.
    creates: Option<bool>,
}

impl Policy {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let mut whole = object(value, "the policy")?;
        let version = whole.remove("Version");
        if version.as_ref().and_then(Value::as_str) != Some("2012-10-17") {
            return Err(format!("Version {version:?}"));
        }
        let statements = match whole.remove("Statement") {
            Some(Value::Array(all)) => all,
            Some(one @ Value::Object(_)) => vec![one],
            other => return Err(format!("Statement {other:?}")),
        };
        nothing_else(&whole)?;
        statements.into_iter().map(statement).collect::<Result<_, _>>().map(Self)
    }

    /// An explicit deny wins; without an allow there is none.
    pub(super) fn allows(&self, wish: &Wish<'_>) -> bool {
        let concerned = || self.0.iter().filter(|statement| statement.concerns(wish));
        concerned().any(|statement| statement.allows) && !concerned().any(|statement| !statement.allows)
    }
}

impl Statement {
    fn concerns(&self, wish: &Wish<'_>) -> bool {
        let action = wish.action.to_ascii_lowercase();
        self.actions.iter().any(|pattern| like(&pattern.to_ascii_lowercase(), &action))
            && self.resources.iter().any(|pattern| like(pattern, &wish.resource))
            && self.prefixes.iter().all(|patterns| {
                // A key that the request does not have fulfils no condition.
                wish.prefix
                    .as_ref()
                    .is_some_and(|prefix| patterns.iter().any(|pattern| like(pattern, prefix)))
            })
            && self.if_none_match_is_null.is_none_or(|null| null == wish.creation.if_none_match.is_none())
            && self.creates.is_none_or(|creates| creates == wish.creation.creates)
    }
}

fn statement(value: Value) -> Result<Statement, String> {
    let mut fields = object(value, "a statement")?;
    fields.remove("Sid");
    let allows = match fields.remove("Effect").as_ref().and_then(Value::as_str) {
        Some("Allow") => true,
        Some("Deny") => false,
        other => return Err(format!("Effect {other:?}")),
    };
    let actions = texts(fields.remove("Action"), "Action")?;
    let resources = texts(fields.remove("Resource"), "Resource")?;
    let (mut prefixes, mut if_none_match_is_null, mut creates) = (Vec::new(), None, None);
    for (operator, tests) in fields.remove("Condition").map_or(Ok(Map::new()), |c| object(c, "Condition"))? {
        for (key, patterns) in object(tests, &operator)? {
            match (operator.as_str(), key.as_str()) {
                ("Null", "s3:if-none-match") => {
                    if_none_match_is_null = Some(truth(&patterns)?);
                    continue;
                }
                ("Bool", "s3:ObjectCreationOperation") => {
                    creates = Some(truth(&patterns)?);
                    continue;
                }
                _ => {}
            }
            if operator != "StringLike" && operator != "StringEquals" || key != "s3:prefix" {
                return Err(format!("the condition {operator} of {key} is not known"));
            }
            let patterns = texts(Some(patterns), &key)?;
            if operator == "StringEquals" && patterns.iter().any(|pattern| pattern.contains(['*', '?'])) {
                return Err("StringEquals has no wildcards".to_owned());
            }
            prefixes.push(patterns);
        }
    }
    nothing_else(&fields)?;
    Ok(Statement { allows, actions, resources, prefixes, if_none_match_is_null, creates })
}

fn truth(value: &Value) -> Result<bool, String> {
    match value.as_str() {
        Some("true") => Ok(true),
        Some("false") => Ok(false),
        _ => Err(format!("{value} is neither \"true\" nor \"false\"")),
    }
}

fn object(value: Value, what: &str) -> Result<Map<String, Value>, String> {
    match value {
        Value::Object(map) => Ok(map),
        other => Err(format!("{what} is {other}")),
    }
}

fn nothing_else(map: &Map<String, Value>) -> Result<(), String> {
    map.keys().next().map_or(Ok(()), |key| Err(format!("{key} is not known")))
}

fn texts(value: Option<Value>, what: &str) -> Result<Vec<String>, String> {
    let all = match value {
        Some(Value::Array(all)) => all,
        Some(one) => vec![one],
        None => return Err(format!("{what} is missing")),
    };
    let text = |value: Value| value.as_str().map(str::to_owned).ok_or_else(|| format!("{what} has {value}"));
    all.into_iter().map(text).collect()
}

/// `*` is any text, `?` one character.
fn like(pattern: &str, text: &str) -> bool {
    match pattern.chars().next() {
        None => text.is_empty(),
        Some('*') => {
            let rest = &pattern[1..];
            text.char_indices().map(|(at, _)| at).chain([text.len()]).any(|at| like(rest, &text[at..]))
        }
        Some(first) => {
            let mut chars = text.chars();
            chars.next().is_some_and(|c| first == '?' || first == c)
                && like(&pattern[first.len_utf8()..], chars.as_str())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish<'a>(action: &'a str, resource: &str, prefix: Option<&str>) -> Wish<'a> {
        let prefix = prefix.map(str::to_owned);
        Wish { prefix, ..Wish::new(action, format!("arn:aws:s3:::{resource}")) }
    }

    #[test]
    fn policy_can_ask_that_objects_are_created_once() {
        let policy = Policy::parse(
            r#"{"Version": "2012-10-17", "Statement": [
                {"Effect": "Allow", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::b/u/s/*"},
                {"Effect": "Deny", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::b/u/s/once/*",
                 "Condition": {"Null": {"s3:if-none-match": "true"}, "Bool": {"s3:ObjectCreationOperation": "true"}}}]}"#,
        )
        .expect("a policy");
        let put = |key: &str, creates: bool, header: Option<&str>| {
            let creation = Creation { creates, if_none_match: header.map(str::to_owned) };
            policy.allows(&Wish { creation, ..wish("s3:PutObject", key, None) })
        };
        assert!(put("b/u/s/x", true, None));
        assert!(!put("b/u/s/once/x", true, None));
        assert!(put("b/u/s/once/x", true, Some("*")));
        assert!(put("b/u/s/once/x", false, None), "a part of an upload makes no object");
    }

    #[test]
    fn an_allow_is_needed_and_a_deny_wins() {
        let policy = Policy::parse(
            r#"{"Version": "2012-10-17", "Statement": [
                {"Effect": "Allow", "Action": ["s3:Get*", "s3:PutObject"], "Resource": "arn:aws:s3:::b/u/s/*"},
                {"Effect": "Deny", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::b/u/s/fixed"},
                {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::b",
                 "Condition": {"StringLike": {"s3:prefix": ["u/s/*"]}}}]}"#,
        )
        .expect("a policy");
        assert!(policy.allows(&wish("s3:GetObject", "b/u/s/x/y", None)));
        assert!(policy.allows(&wish("s3:PutObject", "b/u/s/x", None)));
        assert!(!policy.allows(&wish("s3:PutObject", "b/u/s/fixed", None)));
        assert!(!policy.allows(&wish("s3:GetObject", "b/u/s2/x", None)));
        assert!(!policy.allows(&wish("s3:DeleteObject", "b/u/s/x", None)));
        assert!(policy.allows(&wish("s3:ListBucket", "b", Some("u/s/"))));
        for other in [None, Some(""), Some("u/"), Some("u/s"), Some("u/s2/")] {
            assert!(!policy.allows(&wish("s3:ListBucket", "b", other)), "{other:?}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let with = |statement: &str| {
            Policy::parse(&format!(r#"{{"Version": "2012-10-17", "Statement": [{statement}]}}"#))
        };
        for bad in [
            r#"{"Effect": "Allow", "Action": "s3:GetObject"}"#,
            r#"{"Effect": "Perhaps", "Action": "s3:*", "Resource": "*"}"#,
            r#"{"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"}"#,
            r#"{"Effect": "Allow", "Action": "s3:*", "Resource": "*", "Condition": {"IpAddress": {"aws:SourceIp": "::1"}}}"#,
        ] {
            assert!(with(bad).is_err(), "{bad}");
        }
        assert!(Policy::parse("{}").is_err());
    }
}

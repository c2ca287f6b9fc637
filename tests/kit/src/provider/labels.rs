//! Server label syntax and label selectors.

use std::collections::BTreeMap;

use super::error_response::ErrorResponse;

pub(super) type Labels = BTreeMap<String, String>;

/// Checks the syntax: keys may have a DNS prefix; values are empty or at most 63 characters.
pub(super) fn validate(labels: &Labels) -> Result<(), ErrorResponse> {
    let is_name = |text: &str| {
        let is_alphanumeric = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        text.len() <= 63
            && is_alphanumeric(text.chars().next())
            && is_alphanumeric(text.chars().last())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let is_prefix = |text: &str| {
        let is_dns_label = |part: &str| {
            is_name(part) && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        };
        // The provider reserves its own prefix.
        text.len() <= 253 && text != "hetzner.cloud" && text.split('.').all(is_dns_label)
    };
    let is_valid = labels.iter().all(|(key, value)| {
        let (is_prefix_valid, name) =
            key.split_once('/').map_or((true, key.as_str()), |(prefix, name)| (is_prefix(prefix), name));
        is_prefix_valid && is_name(name) && (value.is_empty() || is_name(value))
    });
    if is_valid {
        Ok(())
    } else {
        Err(ErrorResponse::invalid("labels", "keys or values are not valid labels"))
    }
}

/// Whether the labels match every term of the selector: `k`, `!k`, `k=v`, `k==v`, `k!=v`, `k in (v,w)`,
/// `k notin (v,w)`, separated by commas.
pub(super) fn selects(selector: &str, labels: &Labels) -> Result<bool, ErrorResponse> {
    let mut matches_all = true;
    for term in split_terms(selector)? {
        matches_all &= if let Some((key, values)) = term.split_once(" notin ") {
            !is_in(labels, key, values)?
        } else if let Some((key, values)) = term.split_once(" in ") {
            is_in(labels, key, values)?
        } else if term.contains(['(', ')', ' ']) {
            return Err(syntax_error());
        } else if let Some((key, value)) = term.split_once("!=") {
            labels.get(key).is_none_or(|actual| actual != value)
        } else if let Some((key, value)) = term.split_once('=') {
            labels.get(key).is_some_and(|actual| actual == value.trim_start_matches('='))
        } else if let Some(key) = term.strip_prefix('!') {
            !labels.contains_key(key)
        } else {
            labels.contains_key(term)
        };
    }
    Ok(matches_all)
}

/// Splits a selector at the commas outside parentheses.
fn split_terms(selector: &str) -> Result<Vec<&str>, ErrorResponse> {
    let (mut terms, mut start, mut depth) = (Vec::new(), 0, 0_u32);
    for (index, c) in selector.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1).ok_or_else(syntax_error)?,
            ',' if depth == 0 => {
                terms.push(&selector[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    terms.push(&selector[start..]);
    let terms = terms.into_iter().map(str::trim).filter(|term| !term.is_empty());
    if depth == 0 { Ok(terms.collect()) } else { Err(syntax_error()) }
}

fn is_in(labels: &Labels, key: &str, values: &str) -> Result<bool, ErrorResponse> {
    let values = values.trim().strip_prefix('(').and_then(|values| values.strip_suffix(')'));
    let values = values.ok_or_else(syntax_error)?;
    Ok(labels.get(key.trim()).is_some_and(|actual| values.split(',').any(|value| value.trim() == actual)))
}

fn syntax_error() -> ErrorResponse {
    ErrorResponse::invalid("label_selector", "is not a valid label selector")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn selects_requires_all_terms() {
        let labels = labels(&[("a", "1"), ("b", "")]);
        for (selector, expected) in [
            ("", true),
            ("a", true),
            ("a=1,b", true),
            ("a==1", true),
            ("a=2", false),
            ("a=1,c", false),
            ("!c", true),
            ("!a", false),
            ("a!=2", true),
            ("c!=2", true),
            ("a in (2,1)", true),
            ("a in (2, 3),b", false),
            ("a notin (2,3),!c", true),
            ("c notin (1)", true),
            ("a notin (1)", false),
        ] {
            assert_eq!(selects(selector, &labels).unwrap(), expected, "{selector}");
        }
        for invalid in ["a in 1", "a in (1", "a)", "a b"] {
            assert!(selects(invalid, &labels).is_err(), "{invalid}");
        }
    }

    #[test]
    fn validate_rejects_invalid_labels() {
        assert!(validate(&labels(&[("machine", "0190-x"), ("svc.example/slot", "a_b.c")])).is_ok());
        for (key, value) in [
            ("hetzner.cloud/a", "x"),
            ("Svc.example/a", "x"),
            ("/a", "x"),
            ("", "x"),
            ("a", "b c"),
            ("a", "-b"),
            ("a", "user:1"),
            ("a", &"x".repeat(64)),
        ] {
            assert!(validate(&labels(&[(key, value)])).is_err(), "{key}={value}");
        }
    }
}

//! Labels of servers: syntax and selectors.

use std::collections::BTreeMap;

use super::refusal::Refusal;

pub(super) type Labels = BTreeMap<String, String>;

/// Checks the syntax: keys may have a DNS prefix; values are empty or at most 63 characters.
pub(super) fn validate(labels: &Labels) -> Result<(), Refusal> {
    let name = |text: &str| {
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        text.len() <= 63
            && ends(text.chars().next())
            && ends(text.chars().last())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let is_valid = labels.iter().all(|(key, value)| {
        let bare = key.split_once('/').map_or(key.as_str(), |(_, bare)| bare);
        name(bare) && (value.is_empty() || name(value))
    });
    if is_valid { Ok(()) } else { Err(Refusal::invalid("labels", "keys or values are not valid labels")) }
}

/// Whether the labels match every term of `k`, `!k`, `k=v`, `k==v`, `k!=v`, separated by commas.
pub(super) fn selects(selector: &str, labels: &Labels) -> Result<bool, Refusal> {
    let mut matches_all = true;
    for term in selector.split(',').map(str::trim).filter(|term| !term.is_empty()) {
        if term.contains(['(', ')', ' ']) {
            return Err(Refusal::invalid("label_selector", "this simulator does not support set terms"));
        }
        matches_all &= if let Some((key, value)) = term.split_once("!=") {
            labels.get(key).is_none_or(|has| has != value)
        } else if let Some((key, value)) = term.split_once('=') {
            labels.get(key).is_some_and(|has| has == value.trim_start_matches('='))
        } else if let Some(key) = term.strip_prefix('!') {
            !labels.contains_key(key)
        } else {
            labels.contains_key(term)
        };
    }
    Ok(matches_all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn selects_requires_all_terms() {
        let has = labels(&[("a", "1"), ("b", "")]);
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
        ] {
            assert_eq!(selects(selector, &has).unwrap(), expected, "{selector}");
        }
        assert!(selects("a in (1,2)", &has).is_err());
    }

    #[test]
    fn validate_refuses_invalid_labels() {
        assert!(validate(&labels(&[("machine", "0190-x"), ("svc.example/slot", "a_b.c")])).is_ok());
        for (key, value) in [("", "x"), ("a", "b c"), ("a", "-b"), ("a", "user:1"), ("a", &"x".repeat(64))] {
            assert!(validate(&labels(&[(key, value)])).is_err(), "{key}={value}");
        }
    }
}

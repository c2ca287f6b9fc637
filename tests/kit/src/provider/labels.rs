//! Labels of servers: their syntax, and the selectors that choose by them.

use std::collections::BTreeMap;

use super::refusal::Refusal;

pub(super) type Labels = BTreeMap<String, String>;

/// Keys may have a DNS prefix; values are empty or 63 characters at most.
pub(super) fn check(labels: &Labels) -> Result<(), Refusal> {
    let name = |text: &str| {
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        text.len() <= 63
            && ends(text.chars().next())
            && ends(text.chars().last())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let sound = labels.iter().all(|(key, value)| {
        let bare = key.split_once('/').map_or(key.as_str(), |(_, bare)| bare);
        name(bare) && (value.is_empty() || name(value))
    });
    if sound { Ok(()) } else { Err(Refusal::invalid("labels", "keys or values are not valid labels")) }
}

/// Whether the labels satisfy every term of `k`, `!k`, `k=v`, `k==v`, `k!=v`, joined by commas.
pub(super) fn selects(selector: &str, labels: &Labels) -> Result<bool, Refusal> {
    let mut all = true;
    for term in selector.split(',').map(str::trim).filter(|term| !term.is_empty()) {
        if term.contains(['(', ')', ' ']) {
            return Err(Refusal::invalid("label_selector", "this simulator knows no set terms"));
        }
        all &= if let Some((key, value)) = term.split_once("!=") {
            labels.get(key).is_none_or(|has| has != value)
        } else if let Some((key, value)) = term.split_once('=') {
            labels.get(key).is_some_and(|has| has == value.trim_start_matches('='))
        } else if let Some(key) = term.strip_prefix('!') {
            !labels.contains_key(key)
        } else {
            labels.contains_key(term)
        };
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn every_term_must_hold() {
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
    fn labels_that_the_provider_refuses_are_refused() {
        assert!(check(&labels(&[("machine", "0190-x"), ("svc.example/slot", "a_b.c")])).is_ok());
        for (key, value) in [("", "x"), ("a", "b c"), ("a", "-b"), ("a", "user:1"), ("a", &"x".repeat(64))] {
            assert!(check(&labels(&[(key, value)])).is_err(), "{key}={value}");
        }
    }
}

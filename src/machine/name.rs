//! Names from external input, validated once on entry: users, slots, handles, image versions, operators, server types
//! and locations.
//!
//! Each name is safe as a segment of an object key or path: it contains no `/`, control characters or spaces, and it is
//! never `.` or `..`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name that violates its type's rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("must be {rule}")]
pub struct NameError {
    pub rule: &'static str,
}

macro_rules! checked_name {
    ($(#[$doc:meta])* $name:ident, $rule:literal, $pattern:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The rule as a regular expression, for API descriptions.
            pub const PATTERN: &'static str = $pattern;

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                let check: fn(&str) -> bool = $check;
                if check(text) { Ok(Self(text.to_owned())) } else { Err(NameError { rule: $rule }) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

checked_name!(
    /// The identity provider's id for a user (`sub` in its tokens).
    IdpUserId,
    "1 to 128 characters from A-Z, a-z, 0-9 and `._|:@+-`, starting with a letter or digit",
    "^[A-Za-z0-9][A-Za-z0-9._|:@+-]{0,127}$",
    |text| has_shape(text, 128, |c| c.is_ascii_alphanumeric(), |c| c.is_ascii_alphanumeric() || "._|:@+-".contains(c))
);
checked_name!(
    /// A user's billed runtime slot; `primary` by default.
    Slot,
    "1 to 32 characters from a-z, 0-9 and `-`, starting with a letter",
    "^[a-z][a-z0-9-]{0,31}$",
    |text| has_shape(text, 32, |c| c.is_ascii_lowercase(), is_slug_char)
);
checked_name!(
    /// An owner's public handle. It belongs to one user, permanently.
    Handle,
    "2 to 39 characters from a-z, 0-9 and `-`, starting with a letter",
    "^[a-z][a-z0-9-]{1,38}$",
    |text| text.len() >= 2 && has_shape(text, 39, |c| c.is_ascii_lowercase(), is_slug_char)
);
checked_name!(
    /// A host bundle version; a segment of its object key and of the release's path.
    ImageVersion,
    "1 to 64 characters from A-Z, a-z, 0-9 and `._+-`, starting with a letter or digit, without `..`",
    "^(?!.*\\.\\.)[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$",
    |text| !text.contains("..")
        && has_shape(text, 64, |c| c.is_ascii_alphanumeric(), |c| c.is_ascii_alphanumeric() || "._+-".contains(c))
);
checked_name!(
    /// An operator of the control API, as named in the audit log.
    OperatorName,
    "1 to 39 characters from a-z, 0-9 and `-`, starting with a letter, and neither `operator` nor `platform`",
    "^(?!(operator|platform)$)[a-z][a-z0-9-]{0,38}$",
    |text| !["operator", "platform"].contains(&text)
        && has_shape(text, 39, |c| c.is_ascii_lowercase(), is_slug_char)
);
checked_name!(
    /// A provider's server type, e.g. `cpx22`.
    ServerType,
    "1 to 32 characters from a-z, 0-9 and `-`, starting with a letter",
    "^[a-z][a-z0-9-]{0,31}$",
    |text| has_shape(text, 32, |c| c.is_ascii_lowercase(), is_slug_char)
);
checked_name!(
    /// A provider's location, e.g. `nbg1`.
    Location,
    "1 to 32 characters from a-z, 0-9 and `-`, starting with a letter",
    "^[a-z][a-z0-9-]{0,31}$",
    |text| has_shape(text, 32, |c| c.is_ascii_lowercase(), is_slug_char)
);

impl ImageVersion {
    /// Compares in natural version order: runs of digits as numbers, everything else by character.
    pub fn cmp_natural(&self, other: &Self) -> std::cmp::Ordering {
        let (mut own_parts, mut other_parts) = (VersionPart::split(&self.0), VersionPart::split(&other.0));
        loop {
            match (own_parts.next(), other_parts.next()) {
                (None, None) => return self.0.cmp(&other.0),
                (a, b) if a == b => {}
                (a, b) => return a.cmp(&b),
            }
        }
    }
}

/// A run of digits without leading zeros, or of other characters. Numbers sort before words, and a number with fewer
/// digits before one with more.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum VersionPart<'a> {
    Number { digits: usize, text: &'a str },
    Word(&'a str),
}

impl<'a> VersionPart<'a> {
    fn split(text: &'a str) -> impl Iterator<Item = Self> {
        let mut rest = text;
        std::iter::from_fn(move || {
            let is_number = rest.chars().next()?.is_ascii_digit();
            let end = rest.find(|c: char| c.is_ascii_digit() != is_number).unwrap_or(rest.len());
            let (part, remaining) = rest.split_at(end);
            rest = remaining;
            if !is_number {
                return Some(Self::Word(part));
            }
            let text = part.trim_start_matches('0');
            Some(Self::Number { digits: text.len(), text })
        })
    }
}

impl Slot {
    pub fn primary() -> Self {
        Self("primary".to_owned())
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self::primary()
    }
}

fn is_slug_char(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'
}

fn has_shape(text: &str, max_len: usize, first: fn(char) -> bool, rest: fn(char) -> bool) -> bool {
    text.len() <= max_len && text.starts_with(first) && text.chars().all(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_rejects_unsafe_names() {
        for name in ["", "..", "a/b", "a b", "a\n", "/a", "é", "a\0"] {
            assert!(name.parse::<IdpUserId>().is_err(), "{name:?}");
            assert!(name.parse::<ImageVersion>().is_err(), "{name:?}");
            assert!(name.parse::<Slot>().is_err(), "{name:?}");
        }
        assert!("1..2".parse::<ImageVersion>().is_err());
        assert!("user_2abc".parse::<IdpUserId>().is_ok());
        assert!("auth0|123".parse::<IdpUserId>().is_ok());
        assert!("2026.11.21-1".parse::<ImageVersion>().is_ok());
    }

    #[test]
    fn cmp_natural_orders_numbers_by_value() {
        let order = ["1.2", "1.9", "1.10", "1.10-rc1", "2026.1.0", "2026.11.21-1", "demo-2", "demo-10"];
        for (index, lower) in order.iter().enumerate() {
            for higher in &order[index + 1..] {
                let (lower, higher): (ImageVersion, ImageVersion) =
                    (lower.parse().unwrap(), higher.parse().unwrap());
                assert_eq!(lower.cmp_natural(&higher), std::cmp::Ordering::Less, "{lower} {higher}");
                assert_eq!(higher.cmp_natural(&lower), std::cmp::Ordering::Greater);
                assert_eq!(lower.cmp_natural(&lower), std::cmp::Ordering::Equal);
            }
        }
    }

    #[test]
    fn deserialize_validates_names() {
        assert!(serde_json::from_str::<Handle>("\"ada\"").is_ok());
        let error = serde_json::from_str::<Handle>("\"Ada\"").unwrap_err().to_string();
        assert!(error.contains("a-z"), "{error}");
    }
}

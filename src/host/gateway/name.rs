//! App, table and column names: validated once, safe in paths, and quoted wherever they are interpolated into SQL.

use std::fmt;
use std::str::FromStr;

/// App name as used in paths and requests: `^[a-z][a-z0-9-]{0,40}$`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slug(String);

impl Slug {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Name of both the schema that holds the app's tables and the role with access to it.
    pub fn schema(&self) -> SqlIdentifier {
        SqlIdentifier(format!("app_{}", self.0.replace('-', "_")))
    }
}

impl FromStr for Slug {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let is_valid = text.len() <= 41
            && text.starts_with(|c: char| c.is_ascii_lowercase())
            && text.chars().all(is_allowed);
        if is_valid {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidName("must be 1 to 41 characters from `a-z`, `0-9` and `-`, starting with a letter"))
        }
    }
}

impl fmt::Display for Slug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Table, column, schema or role name: letters, digits and `_`, not starting with a digit, up to PostgreSQL's limit of
/// 63 bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SqlIdentifier(String);

/// PostgreSQL system columns and bridge filter keywords.
const RESERVED_NAMES: [&str; 9] = ["tableoid", "ctid", "xmin", "xmax", "cmin", "cmax", "and", "or", "not"];

impl SqlIdentifier {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the identifier in double quotes. Names can't contain quotes, so nothing needs escaping.
    pub fn quoted(&self) -> Quoted<'_> {
        Quoted(&self.0)
    }
}

impl FromStr for SqlIdentifier {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let can_start = |c: char| c.is_ascii_alphabetic() || c == '_';
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if text.len() > 63 || !text.starts_with(can_start) || !text.chars().all(is_allowed) {
            return Err(InvalidName(
                "must be 1 to 63 characters from `A-Z`, `a-z`, `0-9` and `_`, starting with a letter or `_`",
            ));
        }
        if RESERVED_NAMES.contains(&text) {
            return Err(InvalidName("is a reserved word"));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for SqlIdentifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A double-quoted identifier.
#[derive(Debug, Clone, Copy)]
pub struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0)
    }
}

/// The rule violated by an invalid name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidName(&'static str);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_rejects_names_unsafe_in_sql_or_paths() {
        for bad in ["", "a\"b", "a b", "a;b", "é", "a\0", "../a", "1a", "a.b", "ctid", "and"] {
            assert!(bad.parse::<SqlIdentifier>().is_err(), "{bad:?}");
            assert!(bad == "ctid" || bad == "and" || bad.parse::<Slug>().is_err(), "{bad:?}");
        }
        assert!("a_b".parse::<Slug>().is_err(), "a_b was accepted, but would share its schema with a-b");
        assert!("dueAt".parse::<SqlIdentifier>().is_ok());
        assert_eq!("my-notes".parse::<Slug>().unwrap().schema().quoted().to_string(), "\"app_my_notes\"");
    }
}

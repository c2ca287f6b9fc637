//! Names of apps, tables and columns: validated once, safe in a path, and quoted wherever they are inserted into SQL.

use std::fmt;
use std::str::FromStr;

/// An app's name in paths and requests: `^[a-z][a-z0-9-]{0,40}$`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slug(String);

impl Slug {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of the schema that holds the app's tables, and of the role that may use it.
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

/// The name of a table, column, schema or role: letters, digits and `_`, not starting with a digit, and at most 63
/// bytes, PostgreSQL's limit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SqlIdentifier(String);

/// PostgreSQL's system columns, and the keywords in the bridge's filters.
const RESERVED_NAMES: [&str; 9] = ["tableoid", "ctid", "xmin", "xmax", "cmin", "cmax", "and", "or", "not"];

impl SqlIdentifier {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The identifier in double quotes. A name cannot contain a quote, so nothing needs escaping.
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

/// An identifier in double quotes.
#[derive(Debug, Clone, Copy)]
pub struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0)
    }
}

/// The rule that an invalid name violates.
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

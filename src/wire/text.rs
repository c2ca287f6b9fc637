//! Strings on the wire whose values are those of a type.

use std::borrow::{Borrow, Cow};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use jiff::Timestamp;
use jiff::civil::Date;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use svc_base::clock::rfc3339_ms;
use svc_machine::event::RestoreMode;
use svc_machine::id::{AuditId, MachineId, OperationId, OperatorTokenId, RolloutId};
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, OperatorName, ServerType, Slot};
use svc_machine::plan::Plan;
use svc_machine::state::{FailureCause, Status};

/// A string that writers create from a `T`, and that the API description describes as a `T`.
///
/// A reader accepts any string, because a writer from a newer release may use unknown words.
#[derive(PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Text<T> {
    text: String,
    #[serde(skip)]
    value: PhantomData<fn() -> T>,
}

/// A time: RFC 3339, UTC, with milliseconds.
pub type Time = Text<Timestamp>;

/// A type with exactly one string representation.
pub trait TextForm {
    fn to_text(&self) -> String;

    /// Returns the JSON schema of the string.
    fn text_schema() -> Schema;
}

impl<T> Text<T> {
    /// Creates a text from a stored string, possibly from a newer release.
    pub fn from_stored(text: impl Into<String>) -> Self {
        Self { text: text.into(), value: PhantomData }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the writer sent the field.
    pub fn is_known(&self) -> bool {
        self.text != UNKNOWN
    }

    pub fn is(&self, value: impl Borrow<T>) -> bool
    where
        T: TextForm,
    {
        self.text == value.borrow().to_text()
    }
}

/// The value that a reader uses for a field that an older platform omits.
pub const UNKNOWN: &str = "unknown";

/// Returns [`UNKNOWN`], for texts without a type.
pub fn unknown() -> String {
    UNKNOWN.to_owned()
}

/// [`UNKNOWN`], which only a reader uses.
impl<T> Default for Text<T> {
    fn default() -> Self {
        Self::from_stored(UNKNOWN)
    }
}

impl<T> Deref for Text<T> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl<T> AsRef<str> for Text<T> {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

impl<T> PartialEq<str> for Text<T> {
    fn eq(&self, other: &str) -> bool {
        self.text == other
    }
}

impl<T> PartialEq<&str> for Text<T> {
    fn eq(&self, other: &&str) -> bool {
        self.text == *other
    }
}

impl<T> Clone for Text<T> {
    fn clone(&self) -> Self {
        Self { text: self.text.clone(), value: PhantomData }
    }
}

impl<T> fmt::Debug for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl<T> fmt::Display for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl<T: TextForm> From<T> for Text<T> {
    fn from(value: T) -> Self {
        Self::from(&value)
    }
}

impl<T: TextForm> From<&T> for Text<T> {
    fn from(value: &T) -> Self {
        Self { text: value.to_text(), value: PhantomData }
    }
}

impl<T> From<Text<T>> for String {
    fn from(text: Text<T>) -> Self {
        text.text
    }
}

impl<T: TextForm> JsonSchema for Text<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Text".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        T::text_schema()
    }
}

impl TextForm for Date {
    fn to_text(&self) -> String {
        self.to_string()
    }

    fn text_schema() -> Schema {
        json_schema!({ "type": "string", "format": "date" })
    }
}

impl TextForm for Timestamp {
    fn to_text(&self) -> String {
        rfc3339_ms(*self)
    }

    fn text_schema() -> Schema {
        json_schema!({ "type": "string", "format": "date-time" })
    }
}

macro_rules! id_form {
    ($($id:ty),*) => {$(
        impl TextForm for $id {
            fn to_text(&self) -> String {
                self.to_string()
            }

            fn text_schema() -> Schema {
                json_schema!({ "type": "string", "format": "uuid" })
            }
        }
    )*};
}

macro_rules! name_form {
    ($($name:ty),*) => {$(
        impl TextForm for $name {
            fn to_text(&self) -> String {
                self.to_string()
            }

            fn text_schema() -> Schema {
                json_schema!({ "type": "string", "pattern": <$name>::PATTERN })
            }
        }
    )*};
}

macro_rules! word_form {
    ($($word:ty),*) => {$(
        impl $crate::text::TextForm for $word {
            fn to_text(&self) -> String {
                self.as_str().to_owned()
            }

            fn text_schema() -> schemars::Schema {
                schemars::json_schema!({ "type": "string", "enum": <$word>::ALL.iter().map(|word| word.as_str()).collect::<Vec<_>>() })
            }
        }
    )*};
}

id_form!(AuditId, MachineId, OperationId, OperatorTokenId, RolloutId);
name_form!(Handle, IdpUserId, ImageVersion, Location, OperatorName, ServerType, Slot);
word_form!(FailureCause, Plan, RestoreMode, Status);

/// The error for a text that is not one of the listed words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be {}", join_words(.words))]
pub struct UnknownWord {
    pub words: &'static [&'static str],
}

/// Joins words as `a, b or c`.
fn join_words(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// An enum whose variants are words on the wire.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            pub const ALL: [Self; [$($word),+].len()] = [$(Self::$variant),+];

            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
                out.serialize_str(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::text::UnknownWord;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL
                    .into_iter()
                    .find(|word| word.as_str() == text)
                    .ok_or($crate::text::UnknownWord { words: &[$($word),+] })
            }
        }

        $crate::text::word_form!($name);
    };
}

pub(crate) use {word_form, words};

#[cfg(test)]
mod tests {
    use super::*;

    words!(
        /// Colours.
        Colour { Red = "red", LightBlue = "light_blue", Green = "green" }
    );

    #[test]
    fn times_have_milliseconds() {
        let at: Timestamp = "2026-01-02T03:04:05.6789Z".parse().unwrap();
        assert_eq!(serde_json::to_string(&Time::from(at)).unwrap(), r#""2026-01-02T03:04:05.678Z""#);
    }

    #[test]
    fn text_accepts_words_from_a_newer_release() {
        let read: Text<Colour> = serde_json::from_str(r#""ultraviolet""#).unwrap();
        assert_eq!(read.as_str(), "ultraviolet");
        assert!("ultraviolet".parse::<Colour>().is_err());
    }

    #[test]
    fn unknown_word_error_lists_the_words() {
        let error = "blue".parse::<Colour>().unwrap_err();
        assert_eq!(error.to_string(), "must be red, light_blue or green");
        assert_eq!(Colour::LightBlue.to_string().parse(), Ok(Colour::LightBlue));
    }
}

//! Strings on the wire that represent values of a Rust type.

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

/// A string that writers create from a `T`. The OpenAPI document gives it the schema of a `T`.
///
/// A reader accepts any string, because a writer from a newer release may use unknown values.
#[derive(PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WireString<T> {
    text: String,
    #[serde(skip)]
    value: PhantomData<fn() -> T>,
}

/// A time: RFC 3339, UTC, with milliseconds.
pub type Time = WireString<Timestamp>;

/// A type with exactly one string representation.
pub trait WireFormat {
    fn to_text(&self) -> String;

    /// Returns the JSON schema of the string.
    fn text_schema() -> Schema;
}

impl<T> WireString<T> {
    /// Creates a `WireString` from a stored string, which may come from a newer release.
    pub fn from_stored(text: impl Into<String>) -> Self {
        Self { text: text.into(), value: PhantomData }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the writer sent the field: a reader sets a missing one to [`UNKNOWN`].
    pub fn is_present(&self) -> bool {
        self.text != UNKNOWN
    }

    /// Whether the string represents this value.
    pub fn is(&self, value: impl Borrow<T>) -> bool
    where
        T: WireFormat,
    {
        self.text == value.borrow().to_text()
    }
}

/// The value that a reader uses for a field that an older platform omits.
pub const UNKNOWN: &str = "unknown";

/// Returns [`UNKNOWN`], as the default for fields that are plain strings.
pub fn default_unknown() -> String {
    UNKNOWN.to_owned()
}

/// The default is [`UNKNOWN`], which only readers use, for fields that are missing.
impl<T> Default for WireString<T> {
    fn default() -> Self {
        Self::from_stored(UNKNOWN)
    }
}

impl<T> Deref for WireString<T> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl<T> AsRef<str> for WireString<T> {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

impl<T> PartialEq<str> for WireString<T> {
    fn eq(&self, other: &str) -> bool {
        self.text == other
    }
}

impl<T> PartialEq<&str> for WireString<T> {
    fn eq(&self, other: &&str) -> bool {
        self.text == *other
    }
}

impl<T> Clone for WireString<T> {
    fn clone(&self) -> Self {
        Self { text: self.text.clone(), value: PhantomData }
    }
}

impl<T> fmt::Debug for WireString<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl<T> fmt::Display for WireString<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl<T: WireFormat> From<T> for WireString<T> {
    fn from(value: T) -> Self {
        Self::from(&value)
    }
}

impl<T: WireFormat> From<&T> for WireString<T> {
    fn from(value: &T) -> Self {
        Self { text: value.to_text(), value: PhantomData }
    }
}

impl<T> From<WireString<T>> for String {
    fn from(text: WireString<T>) -> Self {
        text.text
    }
}

impl<T: WireFormat> JsonSchema for WireString<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "WireString".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        T::text_schema()
    }
}

impl WireFormat for Date {
    fn to_text(&self) -> String {
        self.to_string()
    }

    fn text_schema() -> Schema {
        json_schema!({ "type": "string", "format": "date" })
    }
}

impl WireFormat for Timestamp {
    fn to_text(&self) -> String {
        rfc3339_ms(*self)
    }

    fn text_schema() -> Schema {
        json_schema!({ "type": "string", "format": "date-time" })
    }
}

macro_rules! impl_id {
    ($($id:ty),*) => {$(
        impl WireFormat for $id {
            fn to_text(&self) -> String {
                self.to_string()
            }

            fn text_schema() -> Schema {
                json_schema!({ "type": "string", "format": "uuid" })
            }
        }
    )*};
}

macro_rules! impl_name {
    ($($name:ty),*) => {$(
        impl WireFormat for $name {
            fn to_text(&self) -> String {
                self.to_string()
            }

            fn text_schema() -> Schema {
                json_schema!({ "type": "string", "pattern": <$name>::PATTERN })
            }
        }
    )*};
}

macro_rules! impl_string_enum {
    ($($enum:ty),*) => {$(
        impl $crate::text::WireFormat for $enum {
            fn to_text(&self) -> String {
                self.as_str().to_owned()
            }

            fn text_schema() -> schemars::Schema {
                schemars::json_schema!({ "type": "string", "enum": <$enum>::ALL.iter().map(|variant| variant.as_str()).collect::<Vec<_>>() })
            }
        }
    )*};
}

impl_id!(AuditId, MachineId, OperationId, OperatorTokenId, RolloutId);
impl_name!(Handle, IdpUserId, ImageVersion, Location, OperatorName, ServerType, Slot);
impl_string_enum!(FailureCause, Plan, RestoreMode, Status);

/// The error for a string that represents no variant of an enum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be {}", join_alternatives(.expected))]
pub struct UnknownVariant {
    /// The strings of all variants.
    pub expected: &'static [&'static str],
}

/// Joins alternatives as `a, b or c`.
fn join_alternatives(alternatives: &[&str]) -> String {
    match alternatives {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// Defines an enum whose variants are strings on the wire.
macro_rules! string_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $value:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            pub const ALL: [Self; [$($value),+].len()] = [$(Self::$variant),+];

            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $value),+
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
            type Err = $crate::text::UnknownVariant;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL
                    .into_iter()
                    .find(|variant| variant.as_str() == text)
                    .ok_or($crate::text::UnknownVariant { expected: &[$($value),+] })
            }
        }

        $crate::text::impl_string_enum!($name);
    };
}

pub(crate) use {impl_string_enum, string_enum};

#[cfg(test)]
mod tests {
    use super::*;

    string_enum!(
        /// Colors.
        Color { Red = "red", LightBlue = "light_blue", Green = "green" }
    );

    #[test]
    fn times_have_milliseconds() {
        let at: Timestamp = "2026-01-02T03:04:05.6789Z".parse().unwrap();
        assert_eq!(serde_json::to_string(&Time::from(at)).unwrap(), r#""2026-01-02T03:04:05.678Z""#);
    }

    #[test]
    fn wire_string_accepts_values_from_a_newer_release() {
        let parsed: WireString<Color> = serde_json::from_str(r#""ultraviolet""#).unwrap();
        assert_eq!(parsed.as_str(), "ultraviolet");
        assert!("ultraviolet".parse::<Color>().is_err());
    }

    #[test]
    fn unknown_variant_error_lists_all_variants() {
        let error = "blue".parse::<Color>().unwrap_err();
        assert_eq!(error.to_string(), "must be red, light_blue or green");
        assert_eq!(Color::LightBlue.to_string().parse(), Ok(Color::LightBlue));
    }
}

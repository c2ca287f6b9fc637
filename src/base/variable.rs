//! Environment variable declarations, the single source of each name, default and description: code takes a
//! [`Variable`] instead of a name, and `docs/reference/configuration.md` is generated from the same declarations.

use std::ffi::OsString;
use std::fmt::Display;
use std::str::FromStr;

/// A declared environment variable.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    pub name: &'static str,
    /// Value format: type, unit or choices.
    pub format: &'static str,
    pub default: DefaultValue,
    /// The declaration's doc comment.
    pub meaning: &'static str,
    /// Where it's set, if not the section's `source`.
    pub source: Option<&'static str>,
    /// Programs that read it, if not the section's `readers`.
    pub readers: Option<&'static [&'static str]>,
}

/// Behavior if a variable isn't set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultValue {
    /// The program refuses to start.
    Required,
    /// The program runs without a value.
    Unset,
    /// The program uses this value.
    Value(&'static str),
    /// The value is derived, or required in some cases, as this text explains.
    Derived(&'static str),
}

impl Variable {
    /// Parses the default as `T`.
    ///
    /// # Panics
    /// If the declaration has no default of this type, which is a bug.
    pub fn default_value<T: FromStr<Err: Display>>(&self) -> T {
        let DefaultValue::Value(text) = self.default else {
            panic!("{} is declared without a default", self.name)
        };
        text.parse().unwrap_or_else(|error| panic!("invalid default of {}: {error}", self.name))
    }

    /// Returns the value from the process environment. Empty variables are treated as unset.
    pub fn env_value(&self) -> Option<OsString> {
        std::env::var_os(self.name).filter(|value| !value.is_empty())
    }
}

/// Variables documented together, in one table.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// Name of the marker on the page where the table goes.
    pub id: &'static str,
    /// Where the variables are set.
    pub source: &'static str,
    /// Programs that read them.
    pub readers: &'static [&'static str],
    pub variables: &'static [Variable],
}

/// Declares variables by section: a constant for each variable, plus the `SECTIONS` list. A variable's doc comment
/// becomes its description in the reference. Its default is a string, `required`, `unset`, or `derived` with an
/// explanation. `in` and `by` override the section's source and readers.
///
/// ```
/// svc_base::variables! {
///     "listeners", in "process environment", by ["svc-example"] {
///         /// Address of the API.
///         EXAMPLE_LISTEN: "address:port" = "127.0.0.1:8080";
///         /// Token of the provider.
///         EXAMPLE_TOKEN: "text" = required, in "`token.env`";
///     }
/// }
/// assert_eq!(EXAMPLE_LISTEN.default_value::<std::net::SocketAddr>().port(), 8080);
/// assert_eq!(SECTIONS[0].variables.len(), 2);
/// ```
#[macro_export]
macro_rules! variables {
    ($($id:literal, in $source:literal, by [$($reader:literal),*] {
        $(
            $(#[doc = $line:literal])+
            $name:ident: $format:literal = $default:tt $($text:literal)?
                $(, in $own_source:literal)? $(, by [$($own_reader:literal),*])?;
        )+
    })+) => {
        $($(
            $(#[doc = $line])+
            pub const $name: $crate::variable::Variable = $crate::variable::Variable {
                name: stringify!($name),
                format: $format,
                default: $crate::variables!(@default $default $($text)?),
                meaning: concat!($($line, "\n"),+),
                source: $crate::variables!(@optional $($own_source)?),
                readers: $crate::variables!(@optional $(&[$($own_reader),*])?),
            };
        )+)+

        /// All variables declared by this package.
        pub const SECTIONS: &[$crate::variable::Section] = &[$($crate::variable::Section {
            id: $id,
            source: $source,
            readers: &[$($reader),*],
            variables: &[$($name),+],
        }),+];
    };
    (@default required) => { $crate::variable::DefaultValue::Required };
    (@default unset) => { $crate::variable::DefaultValue::Unset };
    (@default derived $text:literal) => { $crate::variable::DefaultValue::Derived($text) };
    (@default $value:literal) => { $crate::variable::DefaultValue::Value($value) };
    (@optional) => { None };
    (@optional $value:expr) => { Some($value) };
}

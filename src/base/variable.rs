//! Declarations of environment variables. Each name, default and meaning is written once: code takes a [`Variable`]
//! instead of a name, and `docs/reference/configuration.md` is generated from the same declarations.

use std::ffi::OsString;
use std::fmt::Display;
use std::str::FromStr;

/// A declared environment variable.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    pub name: &'static str,
    /// The value's format: its type, unit or choices.
    pub format: &'static str,
    pub default: DefaultValue,
    /// The declaration's doc comment.
    pub meaning: &'static str,
    /// Where it is set, if different from its section's `source`.
    pub source: Option<&'static str>,
    /// The programs that read it, if different from its section's `readers`.
    pub readers: Option<&'static [&'static str]>,
}

/// A program's behavior if a variable is not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultValue {
    /// The program does not start.
    Required,
    /// The program runs without a value.
    Unset,
    /// The program uses this value.
    Value(&'static str),
    /// The program derives a value, or requires the variable in some cases, as this text explains.
    Derived(&'static str),
}

impl Variable {
    /// Parses the default as `T`.
    ///
    /// # Panics
    /// If the declaration has no default of this type, which is a bug in the program.
    pub fn default_value<T: FromStr<Err: Display>>(&self) -> T {
        let DefaultValue::Value(text) = self.default else {
            panic!("{} is declared without a default", self.name)
        };
        text.parse().unwrap_or_else(|error| panic!("invalid default of {}: {error}", self.name))
    }

    /// The value in the process environment. An empty variable counts as unset.
    pub fn env_value(&self) -> Option<OsString> {
        std::env::var_os(self.name).filter(|value| !value.is_empty())
    }
}

/// Variables that are documented together, as one table.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// The name of the marker on the page where the table is inserted.
    pub id: &'static str,
    /// Where its variables are set.
    pub source: &'static str,
    /// The programs that read them.
    pub readers: &'static [&'static str],
    pub variables: &'static [Variable],
}

/// Declares sections of variables: a constant for each variable, and the list `SECTIONS`. A variable's doc comment is
/// its meaning in the reference. Its default is a string, or `required`, `unset`, or `derived` with an explanation.
/// `in` and `by` override the section's source and readers.
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

        /// Every variable that this package declares.
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

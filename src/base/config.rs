//! Configuration from environment variables and env files, with all errors reported at once.
//!
//! Callers read declared [`Variable`]s from an [`Env`], then call [`Env::finish`]. Until then, invalid values read as
//! `None` or the default, so a single run reports every error. Values may be secrets, so they never appear in errors.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use secrecy::SecretString;
use url::Url;

use crate::variable::Variable;
use crate::vars;

/// Maximum env file size, above the limit of the cloud-init user-data that carries the file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Minimum length of an operator secret, to make it unguessable.
pub const MIN_SECRET_CHARS: usize = 32;

/// All configuration errors, one per line; exit code 78.
#[derive(Debug, thiserror::Error)]
#[error("invalid configuration:\n  {}", .errors.join("\n  "))]
pub struct ConfigError {
    pub errors: Vec<String>,
}

/// Returns the platform env file: `option` if given, otherwise the path in `PLATFORM_ENV_FILE`.
pub fn platform_env_file(option: Option<PathBuf>) -> Option<PathBuf> {
    option.or_else(|| vars::PLATFORM_ENV_FILE.env_value().map(PathBuf::from))
}

/// Variables from the process environment and env files, plus any errors so far.
#[derive(Default)]
pub struct Env {
    vars: BTreeMap<String, String>,
    /// Variables with non-UTF-8 values.
    non_utf8: BTreeSet<String>,
    errors: Vec<String>,
}

impl Env {
    /// Loads the process environment. Empty variables are treated as unset. A non-UTF-8 value is an error only if it's
    /// read, since the environment also holds other programs' variables.
    pub fn from_process() -> Self {
        Self::from_os_pairs(std::env::vars_os())
    }

    fn from_os_pairs(pairs: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let mut env = Self::default();
        for (name, value) in pairs {
            // Declared names are ASCII.
            let Ok(name) = name.into_string() else { continue };
            match value.into_string() {
                Ok(value) if value.is_empty() => {}
                Ok(value) => {
                    env.vars.insert(name, value);
                }
                Err(_) => {
                    env.non_utf8.insert(name);
                }
            }
        }
        env
    }

    /// Loads the process environment and, if given, an env file. The environment takes precedence.
    pub fn from_process_and_file(file: Option<&Path>) -> Self {
        let env = Self::from_process();
        if let Some(file) = file { env.with_file(file) } else { env }
    }

    /// A fixed set of variables, for tests.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let vars = pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Self { vars, ..Self::default() }
    }

    /// Adds variables from an env file unless they're already set. A missing file is ignored.
    pub fn with_file(self, path: &Path) -> Self {
        self.with_file_where(path, |_, _| true)
    }

    /// Like [`Self::with_file`], but only for accepted names and values.
    pub fn with_file_where(mut self, path: &Path, is_accepted: impl Fn(&str, &str) -> bool) -> Self {
        match read_bounded(path) {
            Ok(text) => match parse_env_file(&text) {
                Ok(pairs) => pairs.into_iter().for_each(|(name, value)| {
                    if !value.is_empty() && is_accepted(&name, &value) {
                        self.vars.entry(name).or_insert(value);
                    }
                }),
                Err(line) => {
                    self.errors
                        .push(format!("{}: line {line}: must be KEY=value on one line", path.display()));
                }
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => self.errors.push(format!("{}: {error}", path.display())),
        }
        self
    }

    /// Records an error for a variable.
    pub fn add_error(&mut self, variable: &Variable, reason: impl Display) {
        self.errors.push(format!("{}: {reason}", variable.name));
    }

    /// Records an error for a command-line option.
    pub fn add_option_error(&mut self, option: &str, reason: impl Display) {
        self.errors.push(format!("{option}: {reason}"));
    }

    pub fn is_set(&self, variable: &Variable) -> bool {
        self.vars.contains_key(variable.name) || self.non_utf8.contains(variable.name)
    }

    /// Returns a variable's raw text, if set.
    pub fn text(&mut self, variable: &Variable) -> Option<String> {
        if self.non_utf8.contains(variable.name) {
            let error = format!("{}: must be UTF-8", variable.name);
            // Variables may be read more than once.
            if !self.errors.contains(&error) {
                self.errors.push(error);
            }
            return None;
        }
        self.vars.get(variable.name).cloned()
    }

    pub fn optional<T: FromStr<Err: Display>>(&mut self, variable: &Variable) -> Option<T> {
        let parsed = self.text(variable)?.parse();
        parsed.map_err(|error| self.add_error(variable, error)).ok()
    }

    pub fn required<T: FromStr<Err: Display>>(&mut self, variable: &Variable) -> Option<T> {
        self.require(variable);
        self.optional(variable)
    }

    /// The value, or the declared default.
    pub fn or_default<T: FromStr<Err: Display>>(&mut self, variable: &Variable) -> T {
        self.optional(variable).unwrap_or_else(|| variable.default_value())
    }

    /// Reads an `http` or `https` URL.
    pub fn web_url(&mut self, variable: &Variable) -> Option<Url> {
        let url: Url = self.optional(variable)?;
        if !matches!(url.scheme(), "http" | "https") {
            self.add_error(variable, "must be an http or https URL");
            return None;
        }
        Some(url)
    }

    pub fn secret(&mut self, variable: &Variable) -> Option<SecretString> {
        self.text(variable).map(SecretString::from)
    }

    pub fn required_secret(&mut self, variable: &Variable) -> Option<SecretString> {
        self.require(variable);
        self.secret(variable)
    }

    /// The value, or the declared default.
    pub fn flag(&mut self, variable: &Variable) -> Flag {
        self.or_default(variable)
    }

    pub fn path(&mut self, variable: &Variable) -> Option<PathBuf> {
        self.text(variable).map(PathBuf::from)
    }

    /// Records an error if a variable isn't set.
    pub fn require(&mut self, variable: &Variable) {
        if !self.is_set(variable) {
            self.add_error(variable, "is required but not set");
        }
    }

    /// Returns the value, or all errors. `value` may be `None` only if an error has been recorded.
    pub fn finish<T>(self, value: Option<T>) -> Result<T, ConfigError> {
        match value {
            Some(value) if self.errors.is_empty() => Ok(value),
            _ => Err(ConfigError { errors: self.errors }),
        }
    }
}

/// Validates a secret that operators send as a bearer token.
///
/// # Errors
/// If the secret is shorter than [`MIN_SECRET_CHARS`], contains anything but printable ASCII, or has leading or
/// trailing spaces. The message completes "the secret …" and never includes the secret.
pub fn check_operator_secret(secret: &str) -> Result<(), String> {
    if secret.chars().count() < MIN_SECRET_CHARS {
        return Err(format!(
            "must have at least {MIN_SECRET_CHARS} characters, for example from `openssl rand -hex 32`"
        ));
    }
    // Servers reject other characters in a header value, and strip leading and trailing spaces.
    let is_printable = secret.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    if !is_printable || secret.trim() != secret {
        return Err("must be printable ASCII characters, without a space at either end".to_owned());
    }
    Ok(())
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let size = File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)? as u64;
    if size > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("larger than {MAX_FILE_BYTES} bytes")));
    }
    Ok(text)
}

/// An on/off setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flag {
    On,
    Off,
}

/// `true`/`false` (also `1`/`0`, `on`/`off`).
impl FromStr for Flag {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "true" | "1" | "on" => Ok(Self::On),
            "false" | "0" | "off" => Ok(Self::Off),
            _ => Err("must be true or false"),
        }
    }
}

impl Flag {
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

/// Parses an env file the way systemd reads `EnvironmentFile=`, except that an assignment can't span lines.
///
/// # Errors
/// Returns the number of the first line that isn't an assignment, a comment or blank, contains NUL or a carriage return
/// before its end, has an unterminated quote, or ends with a continuation backslash.
pub fn parse_env_file(text: &str) -> Result<Vec<(String, String)>, usize> {
    let mut pairs = Vec::new();
    for (index, line) in text.split_terminator('\n').enumerate() {
        let number = index + 1;
        let line = line.strip_suffix('\r').unwrap_or(line).trim_start_matches(is_blank);
        if line.contains(['\r', '\0']) {
            return Err(number);
        }
        if line.starts_with(['#', ';']) {
            // Before v254, systemd continues such a comment on the next line.
            if ends_with_continuation(line) {
                return Err(number);
            }
            continue;
        }
        if line.is_empty() {
            continue;
        }
        let (name, value) = line.split_once('=').ok_or(number)?;
        let is_name_char = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if name.is_empty()
            || !name.chars().all(is_name_char)
            || name.starts_with(|c: char| c.is_ascii_digit())
        {
            return Err(number);
        }
        pairs.push((name.to_owned(), unquote(value).ok_or(number)?));
    }
    Ok(pairs)
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t')
}

/// Removes quotes and escapes. Returns `None` on an unterminated quote or a dangling backslash.
fn unquote(value: &str) -> Option<String> {
    let mut out = String::new();
    let mut chars = value.chars();
    // Concatenate quoted parts separated only by spaces and tabs.
    let first = loop {
        match chars.next() {
            None => return Some(out),
            Some(c) if is_blank(c) => {}
            Some('\'') => loop {
                match chars.next()? {
                    '\'' => break,
                    c => out.push(c),
                }
            },
            Some('"') => loop {
                match chars.next()? {
                    '"' => break,
                    '\\' => match chars.next()? {
                        c @ ('"' | '\\' | '`' | '$') => out.push(c),
                        c => out.extend(['\\', c]),
                    },
                    c => out.push(c),
                }
            },
            Some(c) => break c,
        }
    };
    // Quotes are literal after the first unquoted character.
    let mut next = Some(first);
    let mut trimmed_len = out.len();
    while let Some(c) = next {
        let escaped = if c == '\\' { Some(chars.next()?) } else { None };
        out.push(escaped.unwrap_or(c));
        if escaped.is_some() || !is_blank(c) {
            trimmed_len = out.len();
        }
        next = chars.next();
    }
    out.truncate(trimmed_len);
    Some(out)
}

/// Whether the line ends with an unescaped backslash.
fn ends_with_continuation(line: &str) -> bool {
    line.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1
}

/// Formats an env file line, quoted so that [`parse_env_file`] and systemd read the same value. `value` must not
/// contain LF, CR or NUL.
pub fn format_env_line(name: &str, value: &str) -> String {
    let escaped = value.replace('\\', "\\\\").replace('"', "\\\"");
    format!("{name}=\"{escaped}\"\n")
}

/// Sets variables in the text of an env file, removing existing assignments and appending the new ones.
pub fn set_env_lines(text: &str, pairs: &[(&str, &str)]) -> String {
    let is_kept = |line: &&str| {
        let name = line.trim_start_matches(is_blank).split('=').next().unwrap_or_default();
        !pairs.iter().any(|(replaced, _)| *replaced == name)
    };
    let kept_lines = text.lines().filter(is_kept).map(|line| format!("{line}\n"));
    kept_lines.chain(pairs.iter().map(|(name, value)| format_env_line(name, value))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;
    use crate::variable::DefaultValue;
    use proptest::prelude::*;

    const fn variable(name: &'static str, default: DefaultValue) -> Variable {
        Variable { name, format: "text", default, meaning: "", source: None, readers: None }
    }

    const PORT: Variable = variable("PORT", DefaultValue::Required);
    const ABSENT: Variable = variable("ABSENT", DefaultValue::Required);
    const FLAG: Variable = variable("FLAG", DefaultValue::Value("false"));

    #[test]
    fn finish_reports_all_errors_without_values() {
        let mut env = Env::from_pairs([("PORT", "hunter2"), ("FLAG", "perhaps")]);
        let port = env.required::<u16>(&PORT);
        let absent = env.required::<u16>(&ABSENT);
        assert_eq!(env.flag(&FLAG), Flag::Off);
        let error = env.finish(port.zip(absent)).unwrap_err().to_string();
        for name in ["PORT", "ABSENT", "FLAG"] {
            assert!(error.contains(name), "{error}");
        }
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn finish_reports_non_utf8_variable_only_if_read() {
        let os = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("host.env");
        std::fs::write(&file, "PORT=1\n").unwrap();
        let read_env = || {
            let foreign = [(os(b"\xff"), os(b"1")), (os(b"LS_COLORS"), os(b"\xff")), (os(b"EMPTY"), os(b""))];
            let own = [(os(b"PORT"), os(b"1\xff")), (os(b"FLAG"), os(b"true"))];
            Env::from_os_pairs(foreign.into_iter().chain(own)).with_file(&file)
        };
        let mut env = read_env();
        assert_eq!(env.flag(&FLAG), Flag::On);
        assert!(!env.is_set(&variable("EMPTY", DefaultValue::Unset)));
        assert!(env.finish(Some(())).is_ok());

        let mut env = read_env();
        assert_eq!(env.text(&PORT), None, "the file took precedence over the process");
        let port = env.required::<u16>(&PORT);
        assert_eq!(env.finish(port).unwrap_err().errors, ["PORT: must be UTF-8"]);
    }

    #[test]
    fn process_takes_precedence_over_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("host.env");
        std::fs::write(&file, "A=file\nB=\"two words\"\n# C=no\n").unwrap();
        let mut env = Env::from_pairs([("A", "process")]).with_file(&file);
        assert_eq!(env.text(&variable("A", DefaultValue::Unset)).as_deref(), Some("process"));
        assert_eq!(env.text(&variable("B", DefaultValue::Unset)).as_deref(), Some("two words"));
        assert!(!env.is_set(&variable("C", DefaultValue::Unset)));
    }

    #[test]
    fn parse_env_file_reads_values_like_systemd() {
        for (line, value) in [
            (r"A=a\\b", r"a\b"),
            (r#"A="a\b\$""#, r"a\b$"),
            (r#"A='a"\b'"#, r#"a"\b"#),
            (r#"A="a" 'b'c"d""#, r#"abc"d""#),
            ("A= b \t", "b"),
            (r"A=b\ ", "b "),
            ("A=", ""),
            (" \tA=b\r", "b"),
            ("A=\u{a0}b\u{a0}", "\u{a0}b\u{a0}"),
        ] {
            let expected = vec![("A".to_owned(), value.to_owned())];
            assert_eq!(parse_env_file(&format!("# c\n{line}\n")), Ok(expected), "{line}");
        }
    }

    #[test]
    fn parse_env_file_refuses_line_that_systemd_reads_differently() {
        for line in [r"A=b\", r#"A="b"#, "A='b", r"# c\", "A=b\rB=c", "A=b\0c"] {
            assert_eq!(parse_env_file(&format!("B=c\n{line}\nC=d\n")), Err(2), "{line}");
        }
    }

    proptest! {
        #[test]
        fn env_line_round_trips(value in "[^\\n\\r\\x00]*") {
            let read = parse_env_file(&format_env_line("NAME", &value)).unwrap();
            prop_assert_eq!(read, vec![("NAME".to_owned(), value)]);
        }

        #[test]
        fn parse_env_file_never_panics(text in ".*") {
            let _ = parse_env_file(&text);
        }
    }
}

//! Short, redacted previews of tool inputs and messages.
//!
//! Secrets are recognized by format, by a telltale name in front of them, or by value if they are in the agent's
//! environment. Pattern matching can't catch everything, so previews are short and show only the start of a tool error.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex_lite::Regex;
use serde_json::Value;

/// Maximum preview length, in characters.
pub const MAX_PREVIEW_CHARS: usize = 200;
/// Maximum number of input or error characters scanned for secrets.
const MAX_SCANNED_CHARS: usize = 4000;

const REDACTED: &str = "***";

/// Secret patterns and their replacements.
static SECRET_PATTERNS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    [
        (r"-----BEGIN [A-Z0-9 ]+-----[\s\S]*?(-----END [A-Z0-9 ]+-----|$)", REDACTED),
        // Credentials in a URL.
        (r"(://)[^/\s:@]*:[^/\s@]+@", "$1***@"),
        (r"\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?", REDACTED),
        (r"\b(sk|pk|rk|gsk|xai)[-_][A-Za-z0-9_-]{8,}", REDACTED),
        (r"\b(gh[pousr]_|github_pat_|glpat-|npm_|pypi-|hf_|xox[a-z]-)[A-Za-z0-9_-]{8,}", REDACTED),
        (r"\b(AKIA|ASIA)[A-Z0-9]{12,}", REDACTED),
        (r"\bsvc[a-z]_[A-Za-z0-9_-]{8,}", REDACTED),
        (r#"(?i)(authorization\\?["']?\s*[:=]\s*\\?["']?)[^"'\r\n]+"#, "$1***"),
        (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{6,}", "$1 ***"),
        // curl's `-u`, `--user` and `--proxy-user` options.
        (r"(\s(?:-u\s*|--(?:proxy-)?user[\s=]+))[^\s:]+:\S+", "$1***"),
        // A secret-like name followed by a value: assignment, header, flag or JSON.
        (
            r#"(?i)([A-Za-z0-9_-]*(password|passwd|passphrase|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credentials?)[A-Za-z0-9_-]*\\?["']?\s*(=|:|\s)\s*)(\\?"[^"]+"?|'[^']+'?|[^\s"'\\]{4,})"#,
            "$1***",
        ),
    ]
    .into_iter()
    .map(|(pattern, replacement)| (Regex::new(pattern).expect("constant pattern is valid"), replacement))
    .collect()
});

/// Redacts anything that looks like a secret.
pub fn scrub(text: &str) -> String {
    let mut text = text.to_owned();
    for (pattern, replacement) in SECRET_PATTERNS.iter() {
        if pattern.is_match(&text) {
            text = pattern.replace_all(&text, *replacement).into_owned();
        }
    }
    text
}

/// Matches names of variables likely to hold secrets.
static SECRET_VARIABLE_NAMES: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        "(?i)passw|passphrase|pwd|secret|token($|_)|key(s?$|_|[0-9])|credential|(^|_)auth($|_)|dsn$|cookie",
    )
    .expect("constant pattern is valid")
});

/// Secrets from an agent's environment, selected by variable name.
#[derive(Default)]
pub struct Secrets(Vec<String>);

impl Secrets {
    /// Shorter values could be ordinary words.
    const MIN_BYTES: usize = 6;

    pub fn from_environment(environment: &BTreeMap<String, String>) -> Self {
        let is_secret = |(name, value): &(&String, &String)| {
            SECRET_VARIABLE_NAMES.is_match(name) && value.len() >= Self::MIN_BYTES
        };
        let mut secrets: Vec<String> =
            environment.iter().filter(is_secret).map(|(_, value)| value.clone()).collect();
        // Longest first: one secret may contain another.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self(secrets)
    }

    /// Length of the longest secret, in bytes.
    pub fn max_bytes(&self) -> usize {
        self.0.first().map_or(0, String::len)
    }

    /// Redacts secrets in place and returns whether any were found. Call this before truncating or flattening the text.
    pub fn redact(&self, text: &mut String) -> bool {
        let mut is_changed = false;
        for secret in &self.0 {
            if text.contains(secret) {
                *text = text.replace(secret, REDACTED);
                is_changed = true;
            }
        }
        is_changed
    }

    /// Redacts secrets in the string values of a JSON line. Any other line is treated as plain text.
    pub fn redact_line<'l>(&self, line: &'l str) -> Cow<'l, str> {
        if self.0.is_empty() {
            return Cow::Borrowed(line);
        }
        let Ok(mut value) = serde_json::from_str::<Value>(line) else {
            let mut line = line.to_owned();
            self.redact(&mut line);
            return Cow::Owned(line);
        };
        if self.redact_value(&mut value) { Cow::Owned(value.to_string()) } else { Cow::Borrowed(line) }
    }

    /// Redacts secrets in all string values, recursively, and returns whether any were found.
    fn redact_value(&self, value: &mut Value) -> bool {
        match value {
            Value::String(text) => self.redact(text),
            Value::Array(values) => {
                values.iter_mut().fold(false, |any, value| self.redact_value(value) | any)
            }
            Value::Object(members) => {
                members.values_mut().fold(false, |any, value| self.redact_value(value) | any)
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }
}

/// Replaces control characters with spaces and truncates the text to at most `max_chars` characters.
pub fn flatten_and_truncate(text: &str, max_chars: usize) -> String {
    let mut flat: String =
        text.chars().take(max_chars + 1).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if flat.chars().count() > max_chars {
        flat = flat.chars().take(max_chars - 1).collect();
        flat.push('…');
    }
    flat
}

/// Previews a tool error on a single line of at most `max_bytes`, with secrets redacted.
pub fn preview_error(error: &str, max_bytes: usize) -> String {
    // Scan more than we show, so a secret straddling the cut is still recognized.
    let scanned: String = error.trim().chars().take(MAX_SCANNED_CHARS).collect();
    let mut text = flatten_and_truncate(&scrub(&scanned), max_bytes);
    if text.len() > max_bytes {
        let end = text.floor_char_boundary(max_bytes - '…'.len_utf8());
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Previews a tool's most informative input field, such as its command, path or query, on a single line with secrets
/// redacted. Falls back to the whole input as JSON.
pub fn preview_input(input: &Value) -> String {
    const PREVIEWED_FIELDS: [&str; 9] =
        ["command", "file_path", "notebook_path", "path", "pattern", "url", "query", "description", "prompt"];
    let field = PREVIEWED_FIELDS.iter().find_map(|name| input.get(name)?.as_str());
    let text = field.map_or_else(|| input.to_string(), str::to_owned);
    // Scan more than we show, so a secret straddling the cut is still recognized.
    let scanned: String = text.chars().take(MAX_SCANNED_CHARS).collect();
    flatten_and_truncate(&scrub(&scanned), MAX_PREVIEW_CHARS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn scrub_removes_only_secrets() {
        for (text, expected) in [
            (
                "curl -H 'Authorization: Bearer abc.def-123456' https://x.example",
                "curl -H 'Authorization: ***' https://x.example",
            ),
            ("psql postgres://me:hunter2@db/x", "psql postgres://***@db/x"),
            ("export API_KEY=hunter2hunter2 && run", "export API_KEY=*** && run"),
            ("PASSPHRASE=\"correct horse battery\" run", "PASSPHRASE=*** run"),
            ("x password='ab;longsecret' y", "x password=*** y"),
            ("curl -u ada:hunter2 https://x.example", "curl -u *** https://x.example"),
            ("curl --user ada:hunter2 https://x.example", "curl --user *** https://x.example"),
            ("curl --proxy-user='ada:hunter2' x", "curl --proxy-user=*** x"),
            ("curl -H 'Authorization: Token 0123456' x", "curl -H 'Authorization: ***' x"),
            (
                r#"{"headers":{"Authorization":"lin_api_0123456789abcdef"}}"#,
                r#"{"headers":{"Authorization":"***"}}"#,
            ),
            ("headers={'Authorization': 'Bot MTk4.Cl2FMQ'}", "headers={'Authorization': '***'}"),
            ("mysql --password hunter2hunter2 -e 1", "mysql --password *** -e 1"),
            (r#"{"password":"hunter2hunter2","user":"ada"}"#, r#"{"password":***,"user":"ada"}"#),
            (r#"echo "{\"clientSecret\": \"hunter2hunter2\"}""#, r#"echo "{\"clientSecret\": ***}""#),
            (
                "git clone https://ghp_abcdefgh12345678:x@github.com/a/b",
                "git clone https://***@github.com/a/b",
            ),
            ("use sk-ant-api03-hunter2hunter2", "use ***"),
            ("AWS AKIAABCDEFGHIJKLMNOP now", "AWS *** now"),
            ("ls -la src && cat token.rs", "ls -la src && cat token.rs"),
            ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\nrest", "***\nrest"),
            ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc", "***"),
            ("jwt eyJhbGciOi.eyJzdWIi.c2ln x", "jwt *** x"),
        ] {
            assert_eq!(scrub(text), expected, "{text}");
        }
    }

    #[test]
    fn environment_secrets_are_redacted_in_text_and_json() {
        let environment = [
            ("LLM_KEY", "plain words"),
            ("DB_PASSWORD_RO", "plain words, and \"more\"\nof it"),
            ("HOST_NAME", "example"),
            ("MAX_TOKENS", "100000"),
            ("GIT_AUTHOR_NAME", "Ada Lovelace"),
            ("A_TOKEN", "x"),
        ];
        let secrets = Secrets::from_environment(
            &environment.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        );
        assert_eq!(secrets.0.len(), 2, "{:?}", secrets.0);
        for (text, expected) in [
            ("say plain words, and \"more\"\nof it to example x", "say *** to example x"),
            ("say plain words as Ada Lovelace", "say *** as Ada Lovelace"),
        ] {
            let mut redacted = text.to_owned();
            secrets.redact(&mut redacted);
            assert_eq!(redacted, expected);
            let line = json!({"input": [{"command": text}], "n": 100_000}).to_string();
            let expected_line = json!({"input": [{"command": expected}], "n": 100_000}).to_string();
            assert_eq!(secrets.redact_line(&line), expected_line);
        }
        assert_eq!(secrets.redact_line("not JSON: plain words"), "not JSON: ***");
        assert!(matches!(secrets.redact_line("{\"a\": 1}"), Cow::Borrowed(_)));
    }

    #[test]
    fn preview_shows_the_most_informative_field() {
        assert_eq!(preview_input(&json!({"command": "ls -la", "description": "List"})), "ls -la");
        assert_eq!(preview_input(&json!({"file_path": "/a/b", "content": "x".repeat(9000)})), "/a/b");
        assert_eq!(preview_input(&json!({"n": 3})), "{\"n\":3}");
        let long = preview_input(&json!({"command": format!("echo {}\nls", "ä".repeat(500))}));
        assert!(
            long.chars().count() == MAX_PREVIEW_CHARS && long.ends_with('…') && !long.contains('\n'),
            "{long}"
        );
    }

    proptest! {
        #[test]
        fn preview_is_one_bounded_line(text in ".{0,400}") {
            let preview = preview_input(&json!({"command": text}));
            prop_assert!(preview.chars().count() <= MAX_PREVIEW_CHARS && !preview.chars().any(char::is_control));
        }

        #[test]
        fn value_after_secret_name_is_scrubbed(
            name in "(password|API_KEY|clientSecret|x-auth-token)", separator in "(=|: |=\"|\": \")", value in "[a-zA-Z0-9]{8,40}",
        ) {
            let scrubbed = scrub(&format!("run {name}{separator}{value} end"));
            prop_assert!(!scrubbed.contains(&value), "{}", scrubbed);
        }
    }
}

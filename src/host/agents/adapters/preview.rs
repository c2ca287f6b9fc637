//! What is shown of a tool's input, and of messages: their beginning, without secrets.
//!
//! What looks like a secret is taken out by its form and by the name before it, and those that an agent is given are
//! known. That finds what is usual and cannot find all; so little is shown, and nothing of what a tool answered.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex_lite::Regex;
use serde_json::Value;

/// A preview has at most this many characters.
pub const LONGEST: usize = 200;
/// So much of an input is looked at.
const LOOKED_AT: usize = 4000;

const HIDDEN: &str = "***";

/// Forms of secrets, and what is written in their place.
static FORMS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    [
        (r"-----BEGIN [A-Z0-9 ]+-----[\s\S]*?(-----END [A-Z0-9 ]+-----|$)", HIDDEN),
        // In a URL, before the host.
        (r"(://)[^/\s:@]*:[^/\s@]+@", "$1***@"),
        (r"\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?", HIDDEN),
        (r"\b(sk|pk|rk|gsk|xai)[-_][A-Za-z0-9_-]{8,}", HIDDEN),
        (r"\b(gh[pousr]_|github_pat_|glpat-|npm_|pypi-|hf_|xox[a-z]-)[A-Za-z0-9_-]{8,}", HIDDEN),
        (r"\b(AKIA|ASIA)[A-Z0-9]{12,}", HIDDEN),
        (r"\bsvc[a-z]_[A-Za-z0-9_-]{8,}", HIDDEN),
        (r#"(?i)(authorization\\?["']?\s*[:=]\s*)[^"'\r\n]+"#, "$1***"),
        (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{6,}", "$1 ***"),
        // curl's
        (r"(\s-u\s*)[^\s:]+:\S+", "$1***"),
        // A name that says so, then a value: as an assignment, a header, a flag, or JSON.
        (
            r#"(?i)([A-Za-z0-9_-]*(password|passwd|passphrase|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credentials?)[A-Za-z0-9_-]*\\?["']?\s*(=|:|\s)\s*)(\\?"[^"]+"?|'[^']+'?|[^\s"'\\]{4,})"#,
            "$1***",
        ),
    ]
    .into_iter()
    .map(|(form, instead)| (Regex::new(form).expect("a form of ours"), instead))
    .collect()
});

/// Without what looks like a secret.
pub fn scrubbed(text: &str) -> String {
    let mut text = text.to_owned();
    for (form, instead) in FORMS.iter() {
        if form.is_match(&text) {
            text = form.replace_all(&text, *instead).into_owned();
        }
    }
    text
}

/// Names of variables that have a secret.
static NAMES: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        "(?i)passw|passphrase|pwd|secret|token($|_)|key(s?$|_|[0-9])|credential|(^|_)auth($|_)|dsn$|cookie",
    )
    .expect("a form of ours")
});

/// The secrets that an agent is given in its environment, by the names of their variables, whatever form they have.
#[derive(Default)]
pub struct Secrets(Vec<String>);

impl Secrets {
    /// Shorter ones could be any word.
    const SHORTEST: usize = 6;

    pub fn of(environment: &BTreeMap<String, String>) -> Self {
        let is_secret =
            |(name, value): &(&String, &String)| NAMES.is_match(name) && value.len() >= Self::SHORTEST;
        let mut secrets: Vec<String> =
            environment.iter().filter(is_secret).map(|(_, value)| value.clone()).collect();
        // One may hold another.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self(secrets)
    }

    /// Before anything is cut or flattened. Whether there was any.
    pub fn hide(&self, text: &mut String) -> bool {
        let mut is_there = false;
        for secret in &self.0 {
            if text.contains(secret) {
                *text = text.replace(secret, HIDDEN);
                is_there = true;
            }
        }
        is_there
    }

    /// A line of JSON, whose strings alone are looked at; any other is looked at as it is.
    pub fn hide_in_line<'l>(&self, line: &'l str) -> Cow<'l, str> {
        if self.0.is_empty() {
            return Cow::Borrowed(line);
        }
        let Ok(mut value) = serde_json::from_str::<Value>(line) else {
            let mut line = line.to_owned();
            self.hide(&mut line);
            return Cow::Owned(line);
        };
        if self.hide_in(&mut value) { Cow::Owned(value.to_string()) } else { Cow::Borrowed(line) }
    }

    /// Whether there was any.
    fn hide_in(&self, value: &mut Value) -> bool {
        match value {
            Value::String(text) => self.hide(text),
            Value::Array(values) => values.iter_mut().fold(false, |any, value| self.hide_in(value) | any),
            Value::Object(members) => {
                members.values_mut().fold(false, |any, value| self.hide_in(value) | any)
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }
}

/// At most `longest` characters, on one line.
pub fn cut(text: &str, longest: usize) -> String {
    let mut flat: String =
        text.chars().take(longest + 1).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if flat.chars().count() > longest {
        flat = flat.chars().take(longest - 1).collect();
        flat.push('…');
    }
    flat
}

/// What says most of a tool's input: a command, a path, a question; else all of it as JSON.
pub fn of_input(input: &Value) -> String {
    const TELLING: [&str; 9] =
        ["command", "file_path", "notebook_path", "path", "pattern", "url", "query", "description", "prompt"];
    let telling = TELLING.iter().find_map(|name| input.get(name)?.as_str());
    let text = telling.map_or_else(|| input.to_string(), str::to_owned);
    // A secret that the end cuts in two is looked at whole.
    let looked_at: String = text.chars().take(LOOKED_AT).collect();
    cut(&scrubbed(&looked_at), LONGEST)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_are_taken_out_and_the_rest_stays() {
        for (text, shown) in [
            (
                "curl -H 'Authorization: Bearer abc.def-123456' https://x.example",
                "curl -H 'Authorization: ***' https://x.example",
            ),
            ("psql postgres://me:hunter2@db/x", "psql postgres://***@db/x"),
            ("export API_KEY=hunter2hunter2 && run", "export API_KEY=*** && run"),
            ("PASSPHRASE=\"correct horse battery\" run", "PASSPHRASE=*** run"),
            ("x password='ab;longsecret' y", "x password=*** y"),
            ("curl -u ada:hunter2 https://x.example", "curl -u *** https://x.example"),
            ("curl -H 'Authorization: Token 0123456' x", "curl -H 'Authorization: ***' x"),
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
            assert_eq!(scrubbed(text), shown, "{text}");
        }
    }

    #[test]
    fn what_an_agent_is_given_is_shown_nowhere() {
        let given = [
            ("LLM_KEY", "plain words"),
            ("DB_PASSWORD_RO", "plain words, and \"more\"\nof it"),
            ("HOST_NAME", "example"),
            ("MAX_TOKENS", "100000"),
            ("GIT_AUTHOR_NAME", "Ada Lovelace"),
            ("A_TOKEN", "x"),
        ];
        let secrets = Secrets::of(
            &given.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        );
        assert_eq!(secrets.0.len(), 2, "{:?}", secrets.0);
        for (text, shown) in [
            ("say plain words, and \"more\"\nof it to example x", "say *** to example x"),
            ("say plain words as Ada Lovelace", "say *** as Ada Lovelace"),
        ] {
            let mut hidden = text.to_owned();
            secrets.hide(&mut hidden);
            assert_eq!(hidden, shown);
            let line = json!({"input": [{"command": text}], "n": 100_000}).to_string();
            let expected = json!({"input": [{"command": shown}], "n": 100_000}).to_string();
            assert_eq!(secrets.hide_in_line(&line), expected);
        }
        assert_eq!(secrets.hide_in_line("no JSON: plain words"), "no JSON: ***");
        assert!(matches!(secrets.hide_in_line("{\"a\": 1}"), Cow::Borrowed(_)));
    }

    #[test]
    fn what_says_most_of_an_input_is_shown() {
        assert_eq!(of_input(&json!({"command": "ls -la", "description": "List"})), "ls -la");
        assert_eq!(of_input(&json!({"file_path": "/a/b", "content": "x".repeat(9000)})), "/a/b");
        assert_eq!(of_input(&json!({"n": 3})), "{\"n\":3}");
        let long = of_input(&json!({"command": format!("echo {}\nls", "ä".repeat(500))}));
        assert!(long.chars().count() == LONGEST && long.ends_with('…') && !long.contains('\n'), "{long}");
    }

    proptest! {
        #[test]
        fn a_preview_is_one_line_within_its_bounds(text in ".{0,400}") {
            let shown = of_input(&json!({"command": text}));
            prop_assert!(shown.chars().count() <= LONGEST && !shown.chars().any(char::is_control));
        }

        #[test]
        fn a_value_after_a_telling_name_is_never_shown(
            name in "(password|API_KEY|clientSecret|x-auth-token)", between in "(=|: |=\"|\": \")", value in "[a-zA-Z0-9]{8,40}",
        ) {
            let shown = scrubbed(&format!("run {name}{between}{value} end"));
            prop_assert!(!shown.contains(&value), "{}", shown);
        }
    }
}

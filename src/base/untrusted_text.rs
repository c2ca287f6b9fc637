//! Sanitizes untrusted text for terminals and browsers, e.g. from hosts, archives and stored objects.

use std::borrow::Cow;

use serde_json::Value;

/// Maximum length of reported text, in characters. Longer text is truncated.
pub const MAX_CHARS: usize = 2000;

/// Replaces characters that could move the cursor, change colors or reorder text with U+FFFD. Newlines are kept.
pub fn replace_unprintable(text: &str) -> Cow<'_, str> {
    if text.contains(is_unsafe) { text.replace(is_unsafe, "\u{FFFD}").into() } else { text.into() }
}

/// Like [`replace_unprintable`], but truncated to [`MAX_CHARS`].
pub fn truncate_printable(text: &str) -> String {
    replace_unprintable(text).chars().take(MAX_CHARS).collect()
}

/// Like [`replace_unprintable`], but on one line: lines are trimmed and joined with `; `, empty lines are dropped, and
/// tabs become spaces.
pub fn one_line(text: &str) -> Cow<'_, str> {
    if !text.contains(|c| is_line_break(c) || is_unsafe(c)) {
        return text.into();
    }
    let lines = text.split(is_line_break).map(str::trim).filter(|line| !line.is_empty());
    replace_unprintable(&lines.collect::<Vec<_>>().join("; ").replace('\t', " ")).into_owned().into()
}

fn is_line_break(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\u{0B}' | '\u{0C}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Applies [`replace_unprintable`] to every string in a JSON value, but not to object keys.
pub fn make_printable(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(clean) = replace_unprintable(text) {
                *text = clean;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(make_printable),
        Value::Object(members) => members.values_mut().for_each(make_printable),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Whether `c` is a control character (C0, DEL or C1) other than newline, or a bidirectional embedding, override or
/// isolate. Marks such as U+200E are allowed, as they occur in Arabic and Hebrew names.
fn is_unsafe(c: char) -> bool {
    (c.is_control() && c != '\n') || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn replace_unprintable_keeps_letters_and_newlines() {
        assert_eq!(
            replace_unprintable("a\u{1b}[31m\tb\nc\u{9b}d\u{7f}"),
            "a\u{FFFD}[31m\u{FFFD}b\nc\u{FFFD}d\u{FFFD}"
        );
        assert_eq!(
            replace_unprintable("\u{202a}x\u{202e}y\u{2066}z\u{2069}\u{200f}\0"),
            "\u{FFFD}x\u{FFFD}y\u{FFFD}z\u{FFFD}\u{200f}\u{FFFD}"
        );
        assert_eq!(replace_unprintable("größer – 日本 🙂"), "größer – 日本 🙂");
    }

    #[test]
    fn one_line_joins_lines_and_replaces_controls() {
        assert_eq!(
            one_line("no room\n  next: \tdelete\r\n\nit\u{1b}[2J"),
            "no room; next: \tdelete; it\u{FFFD}[2J".replace('\t', " ")
        );
        assert_eq!(one_line("a\u{2028}b"), "a; b");
        assert!(matches!(one_line("größer"), Cow::Borrowed("größer")));
    }

    #[test]
    fn truncate_printable_counts_characters() {
        assert_eq!(truncate_printable(&"ä".repeat(MAX_CHARS + 5)).chars().count(), MAX_CHARS);
    }

    #[test]
    fn make_printable_cleans_nested_strings() {
        let mut value = json!({"a": ["\u{1b}x", 1, null], "b": {"c": "\u{202e}"}});
        make_printable(&mut value);
        assert_eq!(value, json!({"a": ["\u{FFFD}x", 1, null], "b": {"c": "\u{FFFD}"}}));
    }
}

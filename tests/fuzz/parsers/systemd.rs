//! systemd's env-file parser: a port of the state machine in `parse_env_file_internal` (src/basic/env-file.c, v252).

fn is_newline(c: char) -> bool {
    matches!(c, '\n' | '\r')
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t') || is_newline(c)
}

#[derive(Clone, Copy)]
enum State {
    PreKey,
    Key,
    PreValue,
    Value,
    ValueEscape,
    SingleQuote,
    DoubleQuote,
    DoubleQuoteEscape,
    Comment,
    CommentEscape,
}

/// Returns a file's assignments, in order. Lines without `=` are ignored.
pub fn parse_env_file(text: &str) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    let (mut key, mut value) = (String::new(), String::new());
    // The length of the value without trailing spaces.
    let mut trimmed_length = 0;
    let mut state = State::PreKey;
    for c in text.chars() {
        state = match state {
            State::PreKey if matches!(c, '#' | ';') => State::Comment,
            State::PreKey if is_space(c) => State::PreKey,
            State::PreKey => {
                key.push(c);
                State::Key
            }
            State::Key if is_newline(c) => {
                key.clear();
                State::PreKey
            }
            State::Key if c == '=' => State::PreValue,
            State::Key => {
                key.push(c);
                State::Key
            }
            State::PreValue | State::Value if is_newline(c) => {
                if matches!(state, State::Value) {
                    value.truncate(trimmed_length);
                }
                pairs.push((std::mem::take(&mut key).trim_end_matches(is_space).to_owned(), value));
                value = String::new();
                trimmed_length = 0;
                State::PreKey
            }
            State::PreValue if c == '\'' => State::SingleQuote,
            State::PreValue if c == '"' => State::DoubleQuote,
            State::PreValue | State::Value if c == '\\' => State::ValueEscape,
            State::PreValue if is_space(c) => State::PreValue,
            State::PreValue | State::Value => {
                value.push(c);
                if !is_space(c) {
                    trimmed_length = value.len();
                }
                State::Value
            }
            State::ValueEscape => {
                if !is_newline(c) {
                    value.push(c);
                }
                trimmed_length = value.len();
                State::Value
            }
            State::SingleQuote if c == '\'' => State::PreValue,
            State::DoubleQuote if c == '"' => State::PreValue,
            State::DoubleQuote if c == '\\' => State::DoubleQuoteEscape,
            State::SingleQuote | State::DoubleQuote => {
                value.push(c);
                trimmed_length = value.len();
                state
            }
            State::DoubleQuoteEscape => {
                if !"\"\\`$".contains(c) && c != '\n' {
                    value.push('\\');
                }
                if c != '\n' {
                    value.push(c);
                }
                trimmed_length = value.len();
                State::DoubleQuote
            }
            State::Comment if c == '\\' => State::CommentEscape,
            State::Comment if is_newline(c) => State::PreKey,
            State::Comment | State::CommentEscape => State::Comment,
        };
    }
    if matches!(state, State::Value) {
        value.truncate(trimmed_length);
    }
    let has_value = !matches!(state, State::PreKey | State::Key | State::Comment | State::CommentEscape);
    if has_value {
        pairs.push((key.trim_end_matches(is_space).to_owned(), value));
    }
    pairs
}

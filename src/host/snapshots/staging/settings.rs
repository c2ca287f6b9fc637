//! Formats recorded database and role settings as SQL.

use crate::system::postgres::{quote_ident, quote_literal};

/// Settings that PostgreSQL stores as a list of quoted names (`GUC_LIST_QUOTE`); extensions can't define these. Quoting
/// the whole list as one literal would turn it into a single name.
const LIST_QUOTE_SETTINGS: [&str; 6] = [
    "local_preload_libraries",
    "search_path",
    "session_preload_libraries",
    "shared_preload_libraries",
    "temp_tablespaces",
    "unix_socket_directories",
];

/// Formats `name TO value`, for `ALTER DATABASE … SET` and `ALTER ROLE … SET`. `value` is in its stored form.
pub fn format_assignment(name: &str, value: &str) -> String {
    let literals = if LIST_QUOTE_SETTINGS.iter().any(|list| list.eq_ignore_ascii_case(name)) {
        split_names(value).iter().map(|name| quote_literal(name)).collect::<Vec<_>>().join(", ")
    } else {
        quote_literal(value)
    };
    // Custom setting names are two identifiers joined by a dot.
    let name = name.split('.').map(quote_ident).collect::<Vec<_>>().join(".");
    format!("{name} TO {literals}")
}

/// Splits a list of names, double-quoted where needed.
fn split_names(list: &str) -> Vec<String> {
    let (mut names, mut name, mut is_quoted) = (Vec::new(), String::new(), false);
    let mut chars = list.chars().peekable();
    while let Some(character) = chars.next() {
        match character {
            '"' if is_quoted && chars.next_if_eq(&'"').is_some() => name.push('"'),
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => names.push(std::mem::take(&mut name)),
            _ if !is_quoted && character.is_ascii_whitespace() => {}
            _ => name.push(character),
        }
    }
    names.push(name);
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_assignment_quotes_list_names_separately() {
        let path = r#"app_notes, "app_To do","$user", "a"", b", "it's""#;
        let expected = r#""search_path" TO 'app_notes', 'app_To do', '$user', 'a", b', 'it''s'"#;
        assert_eq!(format_assignment("search_path", path), expected);
        let libraries = format_assignment("Session_preload_libraries", r#"auto_explain, "a b""#);
        assert_eq!(libraries, r#""Session_preload_libraries" TO 'auto_explain', 'a b'"#);
        for empty in ["", r#""""#] {
            assert_eq!(format_assignment("temp_tablespaces", empty), r#""temp_tablespaces" TO ''"#);
        }
    }

    #[test]
    fn format_assignment_quotes_other_values_as_one_literal() {
        assert_eq!(format_assignment("DateStyle", "German, DMY"), r#""DateStyle" TO 'German, DMY'"#);
        assert_eq!(format_assignment("app.name", r"it's \ here"), r#""app"."name" TO  E'it''s \\ here'"#);
    }
}

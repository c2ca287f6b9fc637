//! Text view of operators and their tokens.

use std::path::Path;

use super::human::format_time;
use super::table::{self, Cell};
use super::{Color, View, or_empty};
use svc_wire::operator::{IssuedToken, Operator, Scope, WhoAmI};
use svc_wire::text::WireString;

pub fn list(view: &View, operators: &[Operator]) -> String {
    if operators.is_empty() {
        return "no named operators; PLATFORM_SECRET is the only credential\n".to_owned();
    }
    let row = |o: &Operator| {
        let color = match o.state.as_str() {
            "active" => Color::Good,
            _ => Color::Faint,
        };
        vec![
            o.name.clone().into(),
            join_scopes(&o.scopes, ",").into(),
            Cell::colored(Some(color), o.state.as_str()),
            format_time(view.now, &o.expires_at).into(),
            o.last_used_at.as_deref().map(|at| format_time(view.now, at)).unwrap_or_default().into(),
            o.created_by.clone().into(),
        ]
    };
    let rows: Vec<_> = operators.iter().map(row).collect();
    table::render(view, &["NAME", "SCOPES", "STATE", "EXPIRES", "LAST USED", "ADDED BY"], &rows)
}

/// Shows a new token, or the file it was written to.
pub fn issued(view: &View, issued: &IssuedToken, file: Option<&Path>) -> String {
    let (operator, token) = (&issued.issue.operator, &issued.token);
    let shown = file.map_or_else(|| token.clone(), |file| format!("written to {}", file.display()));
    let previous = operator.previous_token_expires_at.as_deref();
    let mut output = table::render_pairs(
        view,
        &[
            ("operator", operator.name.clone().into()),
            ("scopes", join_scopes(&operator.scopes, ", ").into()),
            ("expires", format_time(view.now, &operator.expires_at).into()),
            (
                "old token",
                previous
                    .map(|at| format!("valid until {}", format_time(view.now, at)))
                    .unwrap_or_default()
                    .into(),
            ),
            ("token", shown.into()),
        ],
    );
    if file.is_none() {
        output.push_str(
            "\nThe token is shown only once. Save it to a file, and pass the file to svcctl with --secret-file.\n",
        );
    }
    output
}

pub fn who_am_i(view: &View, me: &WhoAmI) -> String {
    let expires = me.expires_at.as_ref().map(|at| format_time(view.now, at));
    table::render_pairs(
        view,
        &[
            ("operator", me.name.clone().into()),
            ("scopes", join_scopes(&me.scopes, ", ").into()),
            ("expires", or_empty(expires.as_ref()).into()),
        ],
    )
}

pub fn join_scopes(scopes: &[WireString<Scope>], separator: &str) -> String {
    scopes.iter().map(WireString::as_str).collect::<Vec<_>>().join(separator)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIEW: View = View { now: jiff::Timestamp::UNIX_EPOCH, has_colors: false, width: None };

    fn issued_token() -> IssuedToken {
        serde_json::from_str(
            r#"{"token": "svco_secret", "tokenId": "t", "operator": {"name": "ada", "scopes": ["read", "operate"], "state": "active",
                "expiresAt": "1970-01-03T00:00:00.000Z", "lastUsedAt": null, "createdBy": "operator", "createdAt": "1970-01-01T00:00:00.000Z",
                "previousTokenExpiresAt": "1970-01-01T01:00:00.000Z"}}"#,
        )
        .unwrap()
    }

    #[test]
    fn issued_hides_token_written_to_file() {
        let shown = issued(&VIEW, &issued_token(), None);
        for part in
            ["ada", "read, operate", "svco_secret", "shown only once", "valid until 1970-01-01 01:00:00 UTC"]
        {
            assert!(shown.contains(part), "no {part:?} in {shown}");
        }
        let written = issued(&VIEW, &issued_token(), Some(Path::new("ada.token")));
        assert!(written.contains("written to ada.token") && !written.contains("svco_"), "{written}");
    }

    #[test]
    fn list_shows_state_scopes_and_origin() {
        let shown = list(&VIEW, &[issued_token().issue.operator]);
        for part in ["NAME", "ada", "read,operate", "active", "in 2 d", "operator"] {
            assert!(shown.contains(part), "no {part:?} in {shown}");
        }
        assert!(list(&VIEW, &[]).contains("no named operators"));
    }
}

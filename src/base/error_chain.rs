//! Formats an error chain as a single string, omitting row values quoted by database errors.

use std::error::Error;

use tokio_postgres::error::DbError;

/// Formats an error and its causes. PostgreSQL messages that may quote row values are reduced to the SQLSTATE and
/// constraint. The `DETAIL` field is never included.
pub fn format_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = format_cause(error);
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = format_cause(error);
        if !text.ends_with(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}

fn format_cause(error: &(dyn Error + 'static)) -> String {
    error.downcast_ref::<DbError>().map_or_else(|| error.to_string(), format_db_error)
}

fn format_db_error(error: &DbError) -> String {
    let code = error.code().code();
    // Data exceptions (class 22), constraint violations (23) and PL/pgSQL errors (P0), e.g. from triggers, quote
    // values.
    if !["22", "23", "P0"].iter().any(|class| code.starts_with(class)) {
        return format!("{}: {} (SQLSTATE {code})", error.severity(), error.message());
    }
    match error.constraint() {
        Some(constraint) => format!("SQLSTATE {code} (constraint {constraint})"),
        None => format!("SQLSTATE {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn chain_appends_causes_without_repeating_them() {
        assert_eq!(format_chain(&Outer(std::io::Error::other("inner"))), "outer: inner");
        assert_eq!(
            format_chain(&std::io::Error::other(Outer(std::io::Error::other("inner")))),
            "outer: inner"
        );
    }
}

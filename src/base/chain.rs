//! Formats an error and its causes in one line, without the row values that they quote.

use std::error::Error;

use tokio_postgres::error::DbError;

/// An error and its causes. PostgreSQL's details, and its messages about values, quote rows; of those only the
/// SQLSTATE and the constraint are printed.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = message(error);
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = message(error);
        if !text.ends_with(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}

fn message(error: &(dyn Error + 'static)) -> String {
    error.downcast_ref::<DbError>().map_or_else(|| error.to_string(), db_error_message)
}

fn db_error_message(refusal: &DbError) -> String {
    let code = refusal.code().code();
    // Classes 22 and 23 concern values; P0 is raised by triggers.
    if !["22", "23", "P0"].iter().any(|class| code.starts_with(class)) {
        return format!("{}: {} (SQLSTATE {code})", refusal.severity(), refusal.message());
    }
    match refusal.constraint() {
        Some(constraint) => format!("SQLSTATE {code} by {constraint}"),
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
        assert_eq!(chain(&Outer(std::io::Error::other("inner"))), "outer: inner");
        assert_eq!(chain(&std::io::Error::other(Outer(std::io::Error::other("inner")))), "outer: inner");
    }
}

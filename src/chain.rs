//! An error and its causes in one line, without what they quote of somebody's rows.

use std::error::Error;

use tokio_postgres::error::DbError;

/// An error and its causes. PostgreSQL's details, and its messages about values, quote rows: of those only the
/// SQLSTATE and the constraint are told.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = said(error);
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = said(error);
        if !text.ends_with(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}

fn said(error: &(dyn Error + 'static)) -> String {
    error.downcast_ref::<DbError>().map_or_else(|| error.to_string(), refused)
}

fn refused(refusal: &DbError) -> String {
    let code = refusal.code().code();
    // Classes 22 and 23 are about values, P0 is what a trigger says.
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
    fn causes_follow_and_are_not_said_twice() {
        assert_eq!(chain(&Outer(std::io::Error::other("inner"))), "outer: inner");
        assert_eq!(chain(&std::io::Error::other(Outer(std::io::Error::other("inner")))), "outer: inner");
    }
}

//! What PostgreSQL refuses, as the caller may know it.
//!
//! Its messages quote row values, so none of their text leaves this place: an answer carries the constraint's or the
//! column's name, a log line the SQLSTATE.

use serde_json::json;
use tokio_postgres::error::{DbError, SqlState};

use super::filter::escaped;
use crate::host::gateway::database::PoolError;
use crate::http::problem::{Code, FieldError, Problem};

/// When a client may try again, in seconds.
const RETRY_AFTER: u64 = 2;

pub fn of_pool(error: &PoolError) -> Problem {
    match error {
        PoolError::Wait => tracing::warn!("no database connection came free in time"),
        PoolError::Database(_) => tracing::warn!("the database cannot be reached"),
    }
    unavailable()
}

/// The database is away, or has no room.
pub fn unavailable() -> Problem {
    Problem::new(Code::DatabaseUnavailable, "The database cannot take this now.").retry_after(RETRY_AFTER)
}

pub fn too_slow() -> Problem {
    Problem::new(Code::DeadlineExceeded, "The statement ran longer than it may.")
}

pub fn of_error(error: &tokio_postgres::Error) -> Problem {
    let Some(refusal) = error.as_db_error() else {
        tracing::warn!(closed = error.is_closed(), "the database did not answer");
        return unavailable();
    };
    let code = refusal.code();
    tracing::info!(sqlstate = code.code(), constraint = refusal.constraint(), "refused by the database");
    match code.code() {
        "23505" => conflict(refusal, "Another row has the same value where it must be unique."),
        "23503" => {
            conflict(refusal, "Another row refers to this one, or the one that this refers to is absent.")
        }
        "23P01" => conflict(refusal, "Another row excludes this one."),
        "40001" | "40P01" => Problem::new(Code::Conflict, "Another change came between; try again.")
            .with("retryable", json!(true))
            .retry_after(1),
        "42501" => Problem::new(Code::Forbidden, "The app may not do this."),
        "57014" => too_slow(),
        text if text.starts_with("23") || text.starts_with("22") || text.starts_with("54") => {
            invalid(refusal)
        }
        text if text.starts_with("53") || text.starts_with("08") || text.starts_with("57P") => unavailable(),
        text => {
            tracing::error!(sqlstate = text, "the database refused what we asked");
            Problem::new(Code::Internal, "The failure is logged under this request id.")
        }
    }
}

fn conflict(refusal: &DbError, detail: &str) -> Problem {
    let problem = Problem::new(Code::Conflict, detail).with("retryable", json!(false));
    match refusal.constraint() {
        Some(name) => problem.with("constraint", json!(name)),
        None => problem,
    }
}

fn invalid(refusal: &DbError) -> Problem {
    let detail = match refusal.code() {
        code if *code == SqlState::NOT_NULL_VIOLATION => "must not be null",
        code if *code == SqlState::CHECK_VIOLATION => "breaks a constraint of the table",
        code if *code == SqlState::NUMERIC_VALUE_OUT_OF_RANGE => "is out of range",
        _ => "is not accepted by the database",
    };
    let pointer = refusal.column().map_or_else(String::new, |column| format!("/data/{}", escaped(column)));
    Problem::invalid(&[FieldError { pointer, detail: detail.to_owned() }])
}

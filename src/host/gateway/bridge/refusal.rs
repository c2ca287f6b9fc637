//! What PostgreSQL refuses, as the caller may know it.
//!
//! Its messages quote row values, so none of their text leaves this place: an answer carries the constraint's or the
//! column's name, a log line the SQLSTATE.

use serde_json::{Value, json};
use tokio_postgres::error::{DbError, SqlState};

use super::filter::escaped;
use super::plan::Plan;
use crate::host::gateway::database::PoolError;
use crate::http::problem::{Code, FieldError, Problem};
use crate::metrics::{BRIDGE_SQLSTATES, label};

/// When a client may try again, in seconds.
const RETRY_AFTER: u64 = 2;

/// What was asked for when something went wrong.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// Where in the request the values stand.
    data: &'static str,
    is_write: bool,
}

impl Asked {
    pub fn by(plan: &Plan<'_>) -> Self {
        Self { data: plan.data(), is_write: plan.is_write() }
    }

    pub fn commit() -> Self {
        Self { data: "", is_write: true }
    }
}

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

/// The answers of a transaction have no room for this one.
pub fn too_much() -> Problem {
    Problem::field("", "the answers up to this one are larger than 8 MiB: send fewer operations at a time")
}

/// More rows match than may be changed.
pub fn too_many(most: i64) -> Problem {
    let detail = "More rows match than maxAffected allows; nothing was changed.";
    Problem::new(Code::Conflict, detail).with("retryable", json!(false)).with("maxAffected", json!(most))
}

/// Another change came between, and once more would do.
pub fn overtaken() -> Problem {
    Problem::new(Code::Conflict, "Another change came between; try again.")
        .with("retryable", json!(true))
        .retry_after(1)
}

/// A statement that always answers with a row did not.
pub fn lost() -> Problem {
    tracing::error!("a statement gave no row");
    Problem::new(Code::Internal, "The failure is logged under this request id.")
}

/// Names the operation of a transaction that failed; its fields are named from the request's root.
pub fn at_operation(mut problem: Problem, index: usize) -> Problem {
    if let Some(Value::Array(errors)) = problem.members.get("errors") {
        let errors: Vec<FieldError> = errors
            .iter()
            .map(|error| FieldError {
                pointer: format!("/operations/{index}{}", error["pointer"].as_str().unwrap_or_default()),
                detail: error["detail"].as_str().unwrap_or_default().to_owned(),
            })
            .collect();
        problem = Problem::invalid(&errors);
    }
    problem.with("operation", json!(index))
}

pub fn of_error(error: &tokio_postgres::Error, asked: Asked) -> Problem {
    let Some(refusal) = error.as_db_error() else {
        tracing::warn!(closed = error.is_closed(), "the database did not answer");
        let mut problem = unavailable();
        if asked.is_write {
            problem.detail =
                "The connection to the database broke: the change may have been made or not.".into();
        }
        return problem;
    };
    let code = refusal.code();
    if *code == SqlState::IN_FAILED_SQL_TRANSACTION {
        // Another statement of the transaction was refused, and is told of.
        return Problem::new(Code::Conflict, "An operation before this one failed.");
    }
    BRIDGE_SQLSTATES.add_one([label(code.code().get(..2).unwrap_or_default())]);
    tracing::info!(sqlstate = code.code(), constraint = refusal.constraint(), "refused by the database");
    match code.code() {
        "23505" => conflict(refusal, "Another row has the same value where it must be unique."),
        "23503" | "23001" => {
            conflict(refusal, "Another row refers to this one, or the one that this refers to is absent.")
        }
        "23P01" => conflict(refusal, "Another row excludes this one."),
        "40001" | "40P01" | "55P03" => overtaken(),
        "42501" => Problem::new(Code::Forbidden, "The app may not do this."),
        "42P10" => {
            Problem::field("/onConflict", "must be the columns of the primary key or of a unique index")
        }
        "21000" => Problem::field(asked.data, "names the same row twice"),
        "57014" => too_slow(),
        text if text.starts_with("23") || text.starts_with("22") || text.starts_with("54") => {
            invalid(refusal, asked)
        }
        // What the owner's own triggers raise.
        text if text.starts_with("P0") => invalid(refusal, asked),
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

fn invalid(refusal: &DbError, asked: Asked) -> Problem {
    let detail = match refusal.code() {
        code if *code == SqlState::NOT_NULL_VIOLATION => "must not be null",
        code if *code == SqlState::CHECK_VIOLATION => "breaks a constraint of the table",
        code if *code == SqlState::NUMERIC_VALUE_OUT_OF_RANGE => "is out of range",
        code if *code == SqlState::PROGRAM_LIMIT_EXCEEDED => match refusal.constraint() {
            Some(_) => "is too long for an index of the table",
            None if asked.is_write => "makes the row larger than 8 MiB",
            None => "a row is larger than 8 MiB: find it with fewer columns",
        },
        _ => "is not accepted by the database",
    };
    let pointer = match refusal.column() {
        Some(column) if asked.data == "/data" => format!("/data/{}", escaped(column)),
        _ if asked.is_write => asked.data.to_owned(),
        _ => String::new(),
    };
    let problem = Problem::invalid(&[FieldError { pointer, detail: detail.to_owned() }]);
    match refusal.constraint() {
        Some(name) => problem.with("constraint", json!(name)),
        None => problem,
    }
}

//! Translates PostgreSQL errors and other failures into problems for the caller.
//!
//! PostgreSQL's messages quote row values, so their text is never passed on. The response contains the name of the
//! constraint or column, and the log line contains the SQLSTATE and the constraint.

use serde_json::{Value, json};
use tokio_postgres::error::{DbError, SqlState};

use super::filter::escape_segment;
use super::plan::Plan;
use crate::database::PoolError;
use svc_base::metrics::{BRIDGE_SQLSTATES, intern_label};
use svc_http::problem::{Code, FieldError, Problem, format_chain};

const ROW_TOO_LARGE: &str = "a row is larger than 8 MiB: read it with fewer `columns`";
/// Delay before a client should retry if the database is unavailable, in seconds.
const RETRY_AFTER_SECONDS: u64 = 2;

/// The part of the request that was being executed when the error occurred.
#[derive(Debug, Clone, Copy)]
pub struct ErrorContext {
    /// JSON pointer to the written values in the request.
    data_pointer: &'static str,
    is_write: bool,
}

impl ErrorContext {
    pub fn for_plan(plan: &Plan<'_>) -> Self {
        Self { data_pointer: plan.data_pointer(), is_write: plan.is_write() }
    }

    pub fn for_insert() -> Self {
        Self { data_pointer: "/data", is_write: true }
    }

    pub fn for_transaction_control() -> Self {
        Self { data_pointer: "", is_write: true }
    }
}

pub fn from_pool_error(error: &PoolError) -> Problem {
    match error {
        PoolError::Timeout => tracing::warn!("timeout waiting for a database connection"),
        PoolError::Database(error) => {
            tracing::warn!(error = %format_chain(error), "cannot open a database connection");
        }
    }
    database_unavailable()
}

/// Returns the problem for a database that is unreachable or overloaded.
pub fn database_unavailable() -> Problem {
    Problem::new(Code::DatabaseUnavailable, "The database is unreachable or overloaded; try again.")
        .retry_after(RETRY_AFTER_SECONDS)
}

pub fn statement_timed_out() -> Problem {
    Problem::new(Code::DeadlineExceeded, "The statement timed out.")
}

/// Returns the problem for a transaction whose responses exceed 8 MiB.
pub fn response_too_large() -> Problem {
    Problem::field("", "the responses of this transaction exceed 8 MiB: send fewer operations")
}

/// Returns the problem for a statement that matches more rows than `maxAffected` allows.
pub fn too_many_rows(max_affected: i64) -> Problem {
    let detail = "More rows match than maxAffected allows; nothing was changed.";
    Problem::new(Code::Conflict, detail)
        .with("retryable", json!(false))
        .with("maxAffected", json!(max_affected))
}

/// Returns the problem for a statement whose result did not arrive in time. A write may have been applied, because
/// PostgreSQL's own timeout does not apply to a commit.
pub fn no_result_in_time(is_write: bool) -> Problem {
    let mut problem = statement_timed_out();
    if is_write {
        problem.detail =
            "The database did not respond in time: the change may or may not have been applied.".into();
    }
    problem
}

/// Returns the problem for a statement with which a concurrent change interfered. A retry can succeed.
pub fn concurrent_change() -> Problem {
    Problem::new(Code::Conflict, "A concurrent change interfered; try again.")
        .with("retryable", json!(true))
        .retry_after(1)
}

/// Returns the problem for a row whose JSON is larger than [`super::sql::MAX_ROW_BYTES`].
pub fn row_too_large() -> Problem {
    Problem::invalid(&[FieldError { pointer: String::new(), detail: ROW_TOO_LARGE.to_owned() }])
}

/// Logs that a statement that should always return a row returned none, and returns its problem.
pub fn missing_row() -> Problem {
    bridge_defect("statement returned no row")
}

/// Logs a failure that only a bug in the bridge can cause, and returns its problem.
pub fn bridge_defect(message: &'static str) -> Problem {
    tracing::error!("{message}");
    Problem::new(Code::Internal, "The failure is logged under this request id.")
}

/// Adds the index of a transaction's failed operation, and makes the pointers in its errors absolute.
pub fn with_operation_index(mut problem: Problem, index: usize) -> Problem {
    if let Some(Value::Array(errors)) = problem.members.get("errors") {
        let errors: Vec<FieldError> = errors
            .iter()
            .map(|error| FieldError {
                pointer: format!("/operations/{index}{}", error["pointer"].as_str().unwrap_or_default()),
                detail: error["detail"].as_str().unwrap_or_default().to_owned(),
            })
            .collect();
        let constraint = problem.members.remove("constraint");
        problem = Problem::invalid(&errors);
        if let Some(constraint) = constraint {
            problem = problem.with("constraint", constraint);
        }
    }
    problem.with("operation", json!(index))
}

pub fn from_database_error(error: &tokio_postgres::Error, context: ErrorContext) -> Problem {
    let Some(db_error) = error.as_db_error() else {
        tracing::warn!(closed = error.is_closed(), "database connection lost");
        let mut problem = database_unavailable();
        if context.is_write {
            problem.detail =
                "The database connection was lost: the change may or may not have been applied.".into();
        }
        return problem;
    };
    let code = db_error.code();
    if *code == SqlState::IN_FAILED_SQL_TRANSACTION {
        // The problem of the statement that failed first is returned instead of this one.
        return Problem::new(Code::Conflict, "An earlier operation of the transaction failed.");
    }
    BRIDGE_SQLSTATES.add_one([intern_label(code.code().get(..2).unwrap_or_default())]);
    tracing::info!(
        sqlstate = code.code(),
        constraint = db_error.constraint(),
        "the database rejected a statement"
    );
    match code.code() {
        "23505" => conflict(db_error, "Another row has the same value in a unique column."),
        "23503" | "23001" => {
            conflict(db_error, "Another row references this one, or the referenced row does not exist.")
        }
        "23P01" => conflict(db_error, "The row conflicts with another row under an exclusion constraint."),
        "40001" | "40P01" | "55P03" => concurrent_change(),
        "42501" => Problem::new(Code::Forbidden, "The app lacks the permission for this statement."),
        "42P10" => {
            Problem::field("/onConflict", "must be the columns of the primary key or of a unique index")
        }
        "21000" => Problem::field(context.data_pointer, "contains the same row more than once"),
        "57014" => statement_timed_out(),
        state if state.starts_with("23") || state.starts_with("22") || state.starts_with("54") => {
            invalid(db_error, context)
        }
        // Raised by the owner's own triggers.
        state if state.starts_with("P0") => invalid(db_error, context),
        state if state.starts_with("53") || state.starts_with("08") || state.starts_with("57P") => {
            database_unavailable()
        }
        state => {
            tracing::error!(sqlstate = state, "unexpected database error");
            Problem::new(Code::Internal, "The failure is logged under this request id.")
        }
    }
}

fn conflict(db_error: &DbError, detail: &str) -> Problem {
    let problem = Problem::new(Code::Conflict, detail).with("retryable", json!(false));
    match db_error.constraint() {
        Some(name) => problem.with("constraint", json!(name)),
        None => problem,
    }
}

fn invalid(db_error: &DbError, context: ErrorContext) -> Problem {
    let detail = match db_error.code() {
        code if *code == SqlState::NOT_NULL_VIOLATION => "must not be null",
        code if *code == SqlState::CHECK_VIOLATION => "violates a constraint of the table",
        code if *code == SqlState::NUMERIC_VALUE_OUT_OF_RANGE => "is out of range",
        code if *code == SqlState::PROGRAM_LIMIT_EXCEEDED => match db_error.constraint() {
            Some(_) => "is too long for an index of the table",
            None if context.is_write => "makes the row larger than 8 MiB",
            None => ROW_TOO_LARGE,
        },
        _ => "was rejected by the database",
    };
    let pointer = match db_error.column() {
        Some(column) if context.data_pointer == "/data" => format!("/data/{}", escape_segment(column)),
        _ if context.is_write => context.data_pointer.to_owned(),
        _ => String::new(),
    };
    let problem = Problem::invalid(&[FieldError { pointer, detail: detail.to_owned() }]);
    match db_error.constraint() {
        Some(name) => problem.with("constraint", json!(name)),
        None => problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_operation_index_keeps_constraint() {
        let problem =
            Problem::field("/data", "violates a constraint of the table").with("constraint", json!("c"));
        let problem = with_operation_index(problem, 3);
        assert_eq!(problem.members["errors"][0]["pointer"], "/operations/3/data");
        assert_eq!(problem.members["operation"], 3);
        assert_eq!(problem.members["constraint"], "c");
    }
}

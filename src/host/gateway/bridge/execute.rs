//! Executes plans with the app's role: a single plan usually in one round trip on a shared connection, a transaction
//! usually in two on an exclusive connection. A statement that the connection has not cached takes one more round trip
//! to prepare.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::FutureExt;

use super::plan::Plan;
use super::problems::{self, ErrorContext};
use super::response::{BridgeResponse, ExecutionMode, PreparedPlan, ResponseBudget, execute};
use crate::apps::ChangedRows;
use crate::database::{Connection, Lease, Pool};
use svc_http::problem::{Code, Problem};

/// Maximum number of statements with possibly large results in flight per transaction.
const MAX_LARGE_IN_FLIGHT: usize = 2;
/// Extra time after the statement timeout before the connection is abandoned.
pub const TIMEOUT_GRACE: Duration = Duration::from_secs(5);

/// Why a transaction failed, and the index of the failed plan; `None` if no single plan failed.
#[derive(Debug)]
pub struct ExecutionError {
    pub index: Option<usize>,
    pub problem: Box<Problem>,
}

impl ExecutionError {
    fn new(index: Option<usize>, problem: Problem) -> Self {
        Self { index, problem: Box::new(problem) }
    }
}

/// Executes one plan; `statement_timeout` is the role's.
///
/// # Errors
/// If no connection is available, the plan does not fit the schema, a statement fails or times out, or the response is
/// too large.
pub async fn execute_plan(
    pool: &Arc<Pool>,
    plan: Plan<'_>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Result<BridgeResponse, Problem> {
    if plan.needs_transaction() {
        // The request is not a transaction, so the limit on a transaction's responses does not apply.
        let budget = ResponseBudget::unlimited(changed);
        let responses = execute_transaction(pool, vec![plan], statement_timeout, &budget).await;
        let mut responses = responses.map_err(|error| *error.problem)?;
        return responses.pop().ok_or_else(|| problems::bridge_defect("transaction without a response"));
    }
    let started = Instant::now();
    loop {
        match try_execute(pool, &plan, statement_timeout, changed).await {
            StatementAttempt::Ended(response) => return response,
            StatementAttempt::Interrupted if started.elapsed() < statement_timeout => {}
            StatementAttempt::Interrupted => return Err(problems::statement_timed_out()),
        }
    }
}

enum StatementAttempt {
    Ended(Result<BridgeResponse, Problem>),
    /// The statement was cancelled together with another request's statement on the same connection, and had no effect.
    Interrupted,
}

async fn try_execute(
    pool: &Arc<Pool>,
    plan: &Plan<'_>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> StatementAttempt {
    let mut lease = match pool.lease().await {
        Ok(lease) => lease,
        Err(error) => return StatementAttempt::Ended(Err(problems::from_pool_error(&error))),
    };
    lease.start_work();
    let budget = ResponseBudget::new(changed);
    let execution = async {
        let prepared = PreparedPlan::prepare(&lease, plan).await?;
        execute(&lease, prepared, ExecutionMode::Single, &budget).await
    };
    // A lease that is dropped before `finish_work`, here or because the client disconnects, cancels the statement and
    // abandons the connection.
    let Ok(response) = tokio::time::timeout(statement_timeout + TIMEOUT_GRACE, execution).await else {
        return StatementAttempt::Ended(Err(problems::no_result_in_time(plan.is_write())));
    };
    if response.as_ref().map_or(!budget.has_unread_results(), |response| response.is_fully_read) {
        lease.finish_work();
    }
    match response {
        Err(problem) if problem.code == Code::DeadlineExceeded && lease.is_abandoned() => {
            StatementAttempt::Interrupted
        }
        response => StatementAttempt::Ended(response),
    }
}

/// Executes plans in order, all or nothing. The whole transaction must end within `statement_timeout` plus
/// [`TIMEOUT_GRACE`].
///
/// # Errors
/// See [`ExecutionError`]. Nothing has changed, unless `COMMIT` was sent and its result was lost.
pub async fn execute_transaction(
    pool: &Arc<Pool>,
    plans: Vec<Plan<'_>>,
    statement_timeout: Duration,
    budget: &ResponseBudget<'_>,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    let without_index = |problem| ExecutionError::new(None, problem);
    let mut lease =
        pool.lease_exclusive().await.map_err(|error| without_index(problems::from_pool_error(&error)))?;
    let execution = execute_transaction_with_lease(&mut lease, &plans, budget);
    let result = tokio::time::timeout(statement_timeout + TIMEOUT_GRACE, execution).await;
    let is_write = plans.iter().any(Plan::is_write);
    result.unwrap_or_else(|_| Err(without_index(problems::no_result_in_time(is_write))))
}

async fn execute_transaction_with_lease(
    lease: &mut Lease,
    plans: &[Plan<'_>],
    budget: &ResponseBudget<'_>,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    lease.start_work();
    let prepared = match prepare_all(lease, plans).await {
        Ok(prepared) => prepared,
        Err(error) => {
            // No transaction was started.
            lease.finish_work();
            return Err(error);
        }
    };
    let result = send_pipelined(lease, prepared, budget).await;
    if budget.has_unread_results() {
        // Ending the connection, and with it the transaction, is faster than reading the remaining results.
        return result;
    }
    let end = if result.is_ok() { "COMMIT" } else { "ROLLBACK" };
    // PostgreSQL acknowledges the COMMIT of a failed transaction without an error, so each statement's own result
    // counts.
    let ended = lease.client.batch_execute(end).await;
    if ended.is_ok() || ended.as_ref().is_err_and(|error| error.as_db_error().is_some()) {
        lease.finish_work();
    }
    let responses = result?;
    let to_execution_error = |error| {
        ExecutionError::new(
            None,
            problems::from_database_error(&error, ErrorContext::for_transaction_control()),
        )
    };
    ended.map_err(to_execution_error)?;
    Ok(responses)
}

async fn prepare_all<'p, 't>(
    connection: &Connection,
    plans: &'p [Plan<'t>],
) -> Result<Vec<PreparedPlan<'p, 't>>, ExecutionError> {
    let mut prepared_plans = Vec::with_capacity(plans.len());
    for (index, plan) in plans.iter().enumerate() {
        let prepared = PreparedPlan::prepare(connection, plan).await;
        prepared_plans.push(prepared.map_err(|problem| ExecutionError::new(Some(index), problem))?);
    }
    Ok(prepared_plans)
}

/// Sends `BEGIN` and the statements without waiting for each result. Returns early when an operation is refused and
/// results may be unread.
async fn send_pipelined(
    connection: &Connection,
    prepared_plans: Vec<PreparedPlan<'_, '_>>,
    budget: &ResponseBudget<'_>,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    let begin = async {
        let started = connection.client.batch_execute("BEGIN").await;
        started
            .map(|()| None)
            .map_err(|error| problems::from_database_error(&error, ErrorContext::for_transaction_control()))
    };
    let begin =
        PipelinedStatement { future: begin.boxed(), may_be_large: false, result: None, is_started: false };
    let statements = prepared_plans.into_iter().map(|prepared| {
        let may_be_large = prepared.plan().returns_stored_rows();
        let response = execute(connection, prepared, ExecutionMode::InTransaction, budget);
        let future = response.map(|response| response.map(Some)).boxed();
        PipelinedStatement { future, may_be_large, result: None, is_started: false }
    });
    let results =
        run_pipelined(std::iter::once(begin).chain(statements).collect(), || budget.has_unread_results())
            .await;
    let mut responses = Vec::with_capacity(results.len());
    // The first result is that of `BEGIN`.
    for (index, result) in results {
        let response = result.map_err(|problem| ExecutionError::new(index.checked_sub(1), problem))?;
        responses.extend(response);
    }
    Ok(responses)
}

/// One statement of a pipeline. It is sent when its future is polled for the first time.
struct PipelinedStatement<'f, T> {
    future: Pin<Box<dyn Future<Output = T> + Send + 'f>>,
    may_be_large: bool,
    is_started: bool,
    result: Option<T>,
}

/// Runs the statements, which are sent in order. Results that arrive before they can be processed are held in memory,
/// so only a few with large results are in flight at a time. When `should_stop` returns true after a result, no further
/// results are awaited. Returns the results with the statements' indexes.
async fn run_pipelined<T>(
    mut statements: Vec<PipelinedStatement<'_, T>>,
    should_stop: impl Fn() -> bool,
) -> Vec<(usize, T)> {
    std::future::poll_fn(|cx| {
        let (mut is_pending, mut large_in_flight) = (false, 0);
        for statement in statements.iter_mut().filter(|statement| statement.result.is_none()) {
            if statement.may_be_large && !statement.is_started && large_in_flight == MAX_LARGE_IN_FLIGHT {
                break;
            }
            statement.is_started = true;
            match statement.future.as_mut().poll(cx) {
                Poll::Ready(value) => {
                    statement.result = Some(value);
                    if should_stop() {
                        return Poll::Ready(());
                    }
                }
                Poll::Pending => {
                    is_pending = true;
                    large_in_flight += usize::from(statement.may_be_large);
                }
            }
        }
        if is_pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    statements
        .into_iter()
        .enumerate()
        .filter_map(|(index, statement)| Some((index, statement.result?)))
        .collect()
}

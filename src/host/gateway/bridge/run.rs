//! Executes plans with the app's role: a single statement in one round trip on a shared connection, several statements
//! as one transaction in two round trips on an exclusive connection.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::FutureExt;

use super::plan::Plan;
use super::refusal::{self, ErrorContext};
use super::response::{BridgeResponse, ExecutionMode, PreparedPlan, ResponseBudget, execute};
use crate::gateway::apps::ChangedRows;
use crate::gateway::database::{Connection, Lease, Pool};
use svc_http::problem::{Code, Problem};

/// Extra time after `statement_timeout` before the connection is abandoned.
const TIMEOUT_GRACE: Duration = Duration::from_secs(5);

/// The reason that a transaction failed, and the index of the failed plan, if one failed.
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
/// The problem to return to the caller.
pub async fn run_plan(
    pool: &Arc<Pool>,
    plan: Plan<'_>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Result<BridgeResponse, Problem> {
    if plan.needs_transaction() {
        let responses = run_transaction(pool, vec![plan], statement_timeout, changed).await;
        let mut responses = responses.map_err(|failed| *failed.problem)?;
        return responses.pop().ok_or_else(|| refusal::bridge_defect("transaction without a response"));
    }
    let started = Instant::now();
    loop {
        match try_run(pool, &plan, statement_timeout, changed).await {
            Attempt::Ended(response) => return response,
            Attempt::Interrupted if started.elapsed() < statement_timeout => {}
            Attempt::Interrupted => return Err(refusal::statement_timed_out()),
        }
    }
}

enum Attempt {
    Ended(Result<BridgeResponse, Problem>),
    /// Cancelled together with another request's statement on the same connection, without effect.
    Interrupted,
}

async fn try_run(
    pool: &Arc<Pool>,
    plan: &Plan<'_>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Attempt {
    let mut lease = match pool.lease().await {
        Ok(lease) => lease,
        Err(error) => return Attempt::Ended(Err(refusal::from_pool_error(&error))),
    };
    lease.begin();
    let single = async {
        let prepared = PreparedPlan::prepare(&lease, plan).await?;
        execute(&lease, prepared, ExecutionMode::Single, &ResponseBudget::new(changed)).await
    };
    // A lease that is dropped before it is settled, here or because the client disconnects, cancels its statement.
    let Ok(response) = tokio::time::timeout(statement_timeout + TIMEOUT_GRACE, single).await else {
        return Attempt::Ended(Err(refusal::statement_timed_out()));
    };
    if response.as_ref().map_or(true, |response| response.is_fully_read) {
        lease.settle();
    }
    match response {
        Err(problem) if problem.code == Code::DeadlineExceeded && lease.is_abandoned() => {
            Attempt::Interrupted
        }
        response => Attempt::Ended(response),
    }
}

/// Executes plans in order, all or nothing, within one statement timeout.
///
/// # Errors
/// See [`ExecutionError`]. Nothing has changed, unless `COMMIT` was sent and its result was lost.
pub async fn run_transaction(
    pool: &Arc<Pool>,
    plans: Vec<Plan<'_>>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    let without_index = |problem| ExecutionError::new(None, problem);
    let mut lease =
        pool.lease_exclusive().await.map_err(|error| without_index(refusal::from_pool_error(&error)))?;
    let all = execute_transaction(&mut lease, &plans, changed);
    let result = tokio::time::timeout(statement_timeout + TIMEOUT_GRACE, all).await;
    result.unwrap_or_else(|_| Err(without_index(refusal::statement_timed_out())))
}

async fn execute_transaction(
    lease: &mut Lease,
    plans: &[Plan<'_>],
    changed: &ChangedRows,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    lease.begin();
    let prepared = match prepare_all(lease, plans).await {
        Ok(prepared) => prepared,
        Err(failed) => {
            // No transaction was started.
            lease.settle();
            return Err(failed);
        }
    };
    let result = send_pipelined(lease, prepared, changed).await;
    let end = if result.is_ok() { "COMMIT" } else { "ROLLBACK" };
    // A failed transaction acknowledges COMMIT without an error, so each statement's own result counts.
    let ended = lease.client.batch_execute(end).await;
    if ended.is_ok() || ended.as_ref().is_err_and(|error| error.as_db_error().is_some()) {
        lease.settle();
    }
    let responses = result?;
    let to_execution_error =
        |error| ExecutionError::new(None, refusal::from_database_error(&error, ErrorContext::for_commit()));
    ended.map_err(to_execution_error)?;
    Ok(responses)
}

async fn prepare_all<'p, 't>(
    connection: &Connection,
    plans: &'p [Plan<'t>],
) -> Result<Vec<PreparedPlan<'p, 't>>, ExecutionError> {
    let mut all = Vec::with_capacity(plans.len());
    for (index, plan) in plans.iter().enumerate() {
        let prepared = PreparedPlan::prepare(connection, plan).await;
        all.push(prepared.map_err(|problem| ExecutionError::new(Some(index), problem))?);
    }
    Ok(all)
}

/// Sends `BEGIN` and all statements before the first result is read.
async fn send_pipelined(
    connection: &Connection,
    all: Vec<PreparedPlan<'_, '_>>,
    changed: &ChangedRows,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    let budget = ResponseBudget::new(changed);
    let begin = async {
        let started = connection.client.batch_execute("BEGIN").await;
        started
            .map(|()| None)
            .map_err(|error| refusal::from_database_error(&error, ErrorContext::for_commit()))
    };
    let steps = all.into_iter().map(|prepared| {
        let step = execute(connection, prepared, ExecutionMode::InTransaction, &budget);
        step.map(|response| response.map(Some)).boxed()
    });
    let results = poll_in_order(std::iter::once(begin.boxed()).chain(steps).collect()).await;
    let mut responses = Vec::with_capacity(results.len());
    for (index, result) in results.into_iter().enumerate() {
        let response = result.map_err(|problem| ExecutionError::new(index.checked_sub(1), problem))?;
        responses.extend(response);
    }
    Ok(responses)
}

/// Polls the futures in order. Each sends on its first poll, so this is also the order on the wire.
async fn poll_in_order<T>(futures: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Vec<T> {
    let mut all: Vec<_> = futures.into_iter().map(|future| (future, None)).collect();
    std::future::poll_fn(|cx| {
        let mut are_all_ready = true;
        for (future, result) in all.iter_mut().filter(|(_, result)| result.is_none()) {
            match future.as_mut().poll(cx) {
                Poll::Ready(value) => *result = Some(value),
                Poll::Pending => are_all_ready = false,
            }
        }
        if are_all_ready { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    all.into_iter().filter_map(|(_, result)| result).collect()
}

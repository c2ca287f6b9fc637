//! Executes plans with the app's role: a single statement in one round trip on a shared connection, several as one
//! transaction in two round trips on an exclusive connection.

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

/// Why nothing was changed, and the index of the plan that failed.
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
pub async fn run(
    pool: &Arc<Pool>,
    plan: Plan<'_>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Result<BridgeResponse, Problem> {
    if !plan.is_one_statement() {
        let responses = run_transaction(pool, vec![plan], statement_timeout, changed).await;
        let mut responses = responses.map_err(|failed| *failed.problem)?;
        return responses.pop().ok_or_else(refusal::missing_row);
    }
    let started = Instant::now();
    loop {
        match attempt(pool, &plan, statement_timeout, changed).await {
            Attempt::Ended(response) => return response,
            Attempt::Interrupted if started.elapsed() < statement_timeout => {}
            Attempt::Interrupted => return Err(refusal::too_slow()),
        }
    }
}

enum Attempt {
    Ended(Result<BridgeResponse, Problem>),
    /// Cancelled together with another request's statement on the same connection, without effect.
    Interrupted,
}

async fn attempt(
    pool: &Arc<Pool>,
    plan: &Plan<'_>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Attempt {
    let mut lease = match pool.lease().await {
        Ok(lease) => lease,
        Err(error) => return Attempt::Ended(Err(refusal::from_pool(&error))),
    };
    lease.begin();
    let single = async {
        let ready = PreparedPlan::prepare(&lease, plan).await?;
        execute(&lease, ready, ExecutionMode::Single, &ResponseBudget::new(changed)).await
    };
    // A lease dropped unsettled, here or by a disconnected client, cancels its statement.
    let Ok(response) = tokio::time::timeout(statement_timeout + TIMEOUT_GRACE, single).await else {
        return Attempt::Ended(Err(refusal::too_slow()));
    };
    if response.as_ref().map_or(true, |response| response.is_whole) {
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
/// [`ExecutionError`]; nothing was changed then.
pub async fn run_transaction(
    pool: &Arc<Pool>,
    plans: Vec<Plan<'_>>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    let whole = |problem| ExecutionError::new(None, problem);
    let mut lease = pool.lease_exclusive().await.map_err(|error| whole(refusal::from_pool(&error)))?;
    let all = execute_transaction(&mut lease, &plans, changed);
    let ran = tokio::time::timeout(statement_timeout + TIMEOUT_GRACE, all).await;
    ran.unwrap_or_else(|_| Err(whole(refusal::too_slow())))
}

async fn execute_transaction(
    lease: &mut Lease,
    plans: &[Plan<'_>],
    changed: &ChangedRows,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    lease.begin();
    let ready = match prepare_all(lease, plans).await {
        Ok(ready) => ready,
        Err(failed) => {
            // No transaction was started.
            lease.settle();
            return Err(failed);
        }
    };
    let ran = pipeline(lease, ready, changed).await;
    let end = if ran.is_ok() { "COMMIT" } else { "ROLLBACK" };
    // A failed transaction acknowledges COMMIT without an error, so each statement's own result counts.
    let ended = lease.client.batch_execute(end).await;
    if ended.is_ok() || ended.as_ref().is_err_and(|error| error.as_db_error().is_some()) {
        lease.settle();
    }
    let responses = ran?;
    let refused = |error| ExecutionError::new(None, refusal::from_error(&error, ErrorContext::for_commit()));
    ended.map_err(refused)?;
    Ok(responses)
}

async fn prepare_all<'p, 't>(
    connection: &Connection,
    plans: &'p [Plan<'t>],
) -> Result<Vec<PreparedPlan<'p, 't>>, ExecutionError> {
    let mut all = Vec::with_capacity(plans.len());
    for (index, plan) in plans.iter().enumerate() {
        let ready = PreparedPlan::prepare(connection, plan).await;
        all.push(ready.map_err(|problem| ExecutionError::new(Some(index), problem))?);
    }
    Ok(all)
}

/// Sends `BEGIN` and all statements before the first result is read.
async fn pipeline(
    connection: &Connection,
    all: Vec<PreparedPlan<'_, '_>>,
    changed: &ChangedRows,
) -> Result<Vec<BridgeResponse>, ExecutionError> {
    let budget = ResponseBudget::new(changed);
    let begin = async {
        let started = connection.client.batch_execute("BEGIN").await;
        started.map(|()| None).map_err(|error| refusal::from_error(&error, ErrorContext::for_commit()))
    };
    let steps = all.into_iter().map(|ready| {
        let step = execute(connection, ready, ExecutionMode::InTransaction, &budget);
        step.map(|response| response.map(Some)).boxed()
    });
    let ran = poll_in_order(std::iter::once(begin.boxed()).chain(steps).collect()).await;
    let mut responses = Vec::with_capacity(ran.len());
    for (index, result) in ran.into_iter().enumerate() {
        let response = result.map_err(|problem| ExecutionError::new(index.checked_sub(1), problem))?;
        responses.extend(response);
    }
    Ok(responses)
}

/// Polls the futures in order. Each sends on its first poll, so this is also the order on the wire.
async fn poll_in_order<T>(futures: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Vec<T> {
    let mut all: Vec<_> = futures.into_iter().map(|future| (future, None)).collect();
    std::future::poll_fn(|cx| {
        let mut is_ready = true;
        for (future, result) in all.iter_mut().filter(|(_, result)| result.is_none()) {
            match future.as_mut().poll(cx) {
                Poll::Ready(value) => *result = Some(value),
                Poll::Pending => is_ready = false,
            }
        }
        if is_ready { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    all.into_iter().filter_map(|(_, result)| result).collect()
}

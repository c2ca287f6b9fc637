//! Runs plans through the app's role: one statement in one round trip, on a connection that others use too; several as
//! one transaction, on a connection of its own, in two round trips.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::FutureExt;

use super::answer::{Answer, Ready, Room, Way, execute};
use super::plan::Plan;
use super::refusal::{self, Asked};
use crate::host::gateway::apps::ChangedRows;
use crate::host::gateway::database::{Connection, Lease, Pool};
use crate::http::problem::{Code, Problem};

/// How long after its own time limit a statement may still be silent before its connection is given up.
const GRACE: Duration = Duration::from_secs(5);

/// Why nothing was done, and at which of the plans that showed.
#[derive(Debug)]
pub struct Failed {
    pub index: Option<usize>,
    pub problem: Box<Problem>,
}

impl Failed {
    fn new(index: Option<usize>, problem: Problem) -> Self {
        Self { index, problem: Box::new(problem) }
    }
}

/// Runs one plan; `statement_timeout` is the role's.
///
/// # Errors
/// The refusal as the caller may know it.
pub async fn run(
    pool: &Arc<Pool>,
    plan: Plan<'_>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Result<Answer, Problem> {
    if !plan.is_one_statement() {
        let answers = run_together(pool, vec![plan], statement_timeout, changed).await;
        let mut answers = answers.map_err(|failed| *failed.problem)?;
        return answers.pop().ok_or_else(refusal::lost);
    }
    let began = Instant::now();
    loop {
        match attempt(pool, &plan, statement_timeout, changed).await {
            Attempt::Ended(answer) => return answer,
            Attempt::CutOff if began.elapsed() < statement_timeout => {}
            Attempt::CutOff => return Err(refusal::too_slow()),
        }
    }
}

enum Attempt {
    Ended(Result<Answer, Problem>),
    /// Cancelled with another's statement on the same connection, and so without effect.
    CutOff,
}

async fn attempt(
    pool: &Arc<Pool>,
    plan: &Plan<'_>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Attempt {
    let mut lease = match pool.lease().await {
        Ok(lease) => lease,
        Err(error) => return Attempt::Ended(Err(refusal::of_pool(&error))),
    };
    lease.begin();
    let alone = async {
        let ready = Ready::prepare(&lease, plan).await?;
        execute(&lease, ready, Way::ByItself, &Room::new(changed)).await
    };
    // What is dropped unsettled, here or by a client that goes away, is cancelled.
    let Ok(answer) = tokio::time::timeout(statement_timeout + GRACE, alone).await else {
        return Attempt::Ended(Err(refusal::too_slow()));
    };
    if answer.as_ref().map_or(true, |answer| answer.is_whole) {
        lease.settle();
    }
    match answer {
        Err(problem) if problem.code == Code::DeadlineExceeded && lease.is_given_up() => Attempt::CutOff,
        answer => Attempt::Ended(answer),
    }
}

/// Runs plans in their order, all or nothing, within the time that one statement has.
///
/// # Errors
/// [`Failed`]; then nothing was changed.
pub async fn run_together(
    pool: &Arc<Pool>,
    plans: Vec<Plan<'_>>,
    statement_timeout: Duration,
    changed: &ChangedRows,
) -> Result<Vec<Answer>, Failed> {
    let of_all = |problem| Failed::new(None, problem);
    let mut lease = pool.lease_alone().await.map_err(|error| of_all(refusal::of_pool(&error)))?;
    let all = together(&mut lease, &plans, changed);
    let ran = tokio::time::timeout(statement_timeout + GRACE, all).await;
    ran.unwrap_or_else(|_| Err(of_all(refusal::too_slow())))
}

async fn together(
    lease: &mut Lease,
    plans: &[Plan<'_>],
    changed: &ChangedRows,
) -> Result<Vec<Answer>, Failed> {
    lease.begin();
    let ready = match prepare_all(lease, plans).await {
        Ok(ready) => ready,
        Err(failed) => {
            // No transaction was begun.
            lease.settle();
            return Err(failed);
        }
    };
    let ran = pipelined(lease, ready, changed).await;
    let end = if ran.is_ok() { "COMMIT" } else { "ROLLBACK" };
    // A failed transaction answers a COMMIT like a good one, so what counts is each statement's own answer.
    let ended = lease.client.batch_execute(end).await;
    if ended.is_ok() || ended.as_ref().is_err_and(|error| error.as_db_error().is_some()) {
        lease.settle();
    }
    let answers = ran?;
    let refused = |error| Failed::new(None, refusal::of_error(&error, Asked::commit()));
    ended.map_err(refused)?;
    Ok(answers)
}

async fn prepare_all<'p, 't>(
    connection: &Connection,
    plans: &'p [Plan<'t>],
) -> Result<Vec<Ready<'p, 't>>, Failed> {
    let mut all = Vec::with_capacity(plans.len());
    for (index, plan) in plans.iter().enumerate() {
        let ready = Ready::prepare(connection, plan).await;
        all.push(ready.map_err(|problem| Failed::new(Some(index), problem))?);
    }
    Ok(all)
}

/// Sends `BEGIN` and all statements before the first answer is read.
async fn pipelined(
    connection: &Connection,
    all: Vec<Ready<'_, '_>>,
    changed: &ChangedRows,
) -> Result<Vec<Answer>, Failed> {
    let room = Room::new(changed);
    let begin = async {
        let begun = connection.client.batch_execute("BEGIN").await;
        begun.map(|()| None).map_err(|error| refusal::of_error(&error, Asked::commit()))
    };
    let steps = all.into_iter().map(|ready| {
        let step = execute(connection, ready, Way::InTransaction, &room);
        step.map(|answer| answer.map(Some)).boxed()
    });
    let ran = in_order(std::iter::once(begin.boxed()).chain(steps).collect()).await;
    let mut answers = Vec::with_capacity(ran.len());
    for (index, result) in ran.into_iter().enumerate() {
        let answer = result.map_err(|problem| Failed::new(index.checked_sub(1), problem))?;
        answers.extend(answer);
    }
    Ok(answers)
}

/// Polls the futures in their order: each sends when it is polled first, so that is the order on the wire.
async fn in_order<T>(futures: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Vec<T> {
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

//! Combines concurrent single-row inserts into one statement.
//!
//! A statement costs PostgreSQL several times as much as a row: messages, wake-ups, executor setup, commit. Inserts into
//! the same columns of a table therefore share a statement if many run at the same time. Few concurrent inserts are
//! executed immediately, as are those into tables that have just been slow or rejected a batch.
//!
//! Invariants:
//! - An insert is executed exactly once. A batch is split up only after PostgreSQL has reported an error, which means
//!   that the statement had no effect.
//! - A batch runs in a task of its own, so a client that disconnects doesn't cancel the others' rows. Its own row is
//!   dropped if the statement hasn't been sent yet, and committed otherwise.
//! - A slow row delays the rest of its batch by little more than [`BATCH_TIMEOUT`], unless it can't be cancelled.

use std::collections::HashMap;
use std::fmt::Write;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use tokio::sync::oneshot;
use tokio_postgres::Row;
use tracing::Span;
use uuid::Uuid;

use super::execute::{self, TIMEOUT_GRACE};
use super::insert_queue::{Admission, InsertQueue, MAX_LINGER, Ticket};
use super::param::Param;
use super::plan::{self, NewRow, RowQuery};
use super::problems::{self, ErrorContext};
use super::response::{BridgeResponse, Executor};
use crate::apps::{App, ChangedRows, Column, Table};
use crate::database::Connection;
use svc_http::problem::Problem;

/// Bodies above this size are inserted on their own: they'd delay their neighbors, and gain little from sharing.
const MAX_BODY_BYTES: usize = 16 << 10;
/// How long an insert waits for running statements before it's executed on its own.
const MAX_WAIT: Duration = Duration::from_millis(50);
/// How long a batch may take before it's cancelled and split up. One of its rows probably waits for a lock.
const BATCH_TIMEOUT: Duration = Duration::from_millis(250);
/// When there are more queues than this, idle ones are dropped.
const MAX_IDLE_QUEUES: usize = 256;

pub struct InsertBatcher {
    /// The role's statement timeout.
    statement_timeout: Duration,
    /// By [`InsertRequest::key`].
    queues: Mutex<HashMap<Arc<str>, InsertQueue<WaitingInsert>>>,
}

/// A single-row insert.
pub struct InsertRequest<'r> {
    pub app: &'r Arc<App>,
    pub table: &'r Table,
    pub row: NewRow,
    pub body_bytes: usize,
}

impl InsertRequest<'_> {
    /// The schema, the table and the positions of the columns: inserts with the same key can share a statement.
    fn key(&self) -> String {
        let mut key = format!("{}.{}", self.app.schema.as_str(), self.table.name.as_str());
        for position in &self.row.columns {
            let _ = write!(key, " {position}");
        }
        key
    }

    fn id_index(&self) -> Option<usize> {
        let position = self.table.columns.iter().position(|column| column.name.as_str() == "id")?;
        self.row.columns.iter().position(|column| *column == position)
    }
}

struct WaitingInsert {
    app: Arc<App>,
    table: String,
    row: NewRow,
    /// Index of the id in the row's values.
    id_index: Option<usize>,
    turn: oneshot::Sender<Turn>,
    /// The request's log span.
    span: Span,
}

/// What a waiting insert does next.
enum Turn {
    /// Execute the statement on its own.
    Execute(Slot),
    /// The row was part of a batch.
    Ended(Result<BridgeResponse, Problem>),
}

/// A statement in flight. Dropping it starts the next batch.
struct Slot {
    batcher: Arc<InsertBatcher>,
    key: Arc<str>,
    rows: usize,
}

impl InsertBatcher {
    pub fn new(statement_timeout: Duration) -> Arc<Self> {
        Arc::new(Self { statement_timeout, queues: Mutex::default() })
    }

    /// Inserts a row, possibly together with those of concurrent requests.
    ///
    /// # Errors
    /// See [`execute::execute_plan`].
    pub async fn execute(
        self: &Arc<Self>,
        request: InsertRequest<'_>,
        changed: &ChangedRows,
    ) -> Result<BridgeResponse, Problem> {
        let (pool, timeout) = (&request.app.pool, self.statement_timeout);
        let _slot = match self.wait_for_turn(&request).await {
            Some(Turn::Ended(result)) => return result,
            Some(Turn::Execute(slot)) => Some(slot),
            None => None,
        };
        let plan = request.row.plan(&request.app.schema, request.table);
        execute::execute_plan(pool, plan, timeout, changed).await
    }

    /// `None` if the insert is executed without a slot.
    async fn wait_for_turn(self: &Arc<Self>, request: &InsertRequest<'_>) -> Option<Turn> {
        if request.body_bytes > MAX_BODY_BYTES || request.id_index().is_none() {
            return None;
        }
        let (sender, mut turn) = oneshot::channel();
        let (key, admission) = self.admit(request, sender);
        let ticket = match admission {
            Admission::Execute => return Some(Turn::Execute(self.slot(key, 1))),
            Admission::Wait(ticket, batch) => {
                self.start(&key, batch);
                ticket
            }
        };
        // If the client disconnects, the insert must not stay in the queue.
        let _removal = RemovalGuard { batcher: self, key: &key, ticket };
        let received = match tokio::time::timeout(MAX_LINGER, &mut turn).await {
            Ok(received) => received,
            Err(_) => {
                self.flush(&key, ticket);
                match tokio::time::timeout(MAX_WAIT, &mut turn).await {
                    Ok(received) => received,
                    Err(_) if self.withdraw(&key, ticket) => return None,
                    Err(_) => turn.await,
                }
            }
        };
        // The sender is dropped only if the batch's task panics or the runtime shuts down.
        Some(received.unwrap_or_else(|_| Turn::Ended(Err(problems::no_result_in_time(true)))))
    }

    fn admit(
        &self,
        request: &InsertRequest<'_>,
        turn: oneshot::Sender<Turn>,
    ) -> (Arc<str>, Admission<WaitingInsert>) {
        let now = Instant::now();
        let key = request.key();
        let mut queues = self.lock();
        let key = match queues.get_key_value(&*key) {
            Some((key, _)) => key.clone(),
            None => {
                if queues.len() >= MAX_IDLE_QUEUES {
                    queues.retain(|_, queue| !queue.is_idle(now));
                }
                Arc::from(key)
            }
        };
        let queue = queues.entry(key.clone()).or_default();
        let entry = || WaitingInsert {
            app: request.app.clone(),
            table: request.table.name.as_str().to_owned(),
            row: request.row.clone(),
            id_index: request.id_index(),
            turn,
            span: Span::current(),
        };
        let admission = queue.admit(now, entry, WaitingInsert::can_share);
        (key, admission)
    }

    fn slot(self: &Arc<Self>, key: Arc<str>, rows: usize) -> Slot {
        Slot { batcher: self.clone(), key, rows }
    }

    /// Starts a batch that its queue counts as in flight.
    fn start(self: &Arc<Self>, key: &Arc<str>, mut batch: Vec<WaitingInsert>) {
        if batch.is_empty() {
            return;
        }
        let slot = self.slot(key.clone(), batch.len());
        if batch.len() > 1 {
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                runtime.spawn(execute_batch(slot, batch));
            }
        } else if let Some(insert) = batch.pop() {
            insert.execute_alone(slot);
        }
    }

    fn flush(self: &Arc<Self>, key: &Arc<str>, ticket: Ticket) {
        let batch = self.lock().get_mut(&**key).map(|queue| queue.flush(ticket, WaitingInsert::can_share));
        self.start(key, batch.unwrap_or_default());
    }

    fn withdraw(&self, key: &str, ticket: Ticket) -> bool {
        let now = Instant::now();
        self.lock().get_mut(key).is_some_and(|queue| queue.withdraw(ticket, now, MAX_WAIT))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Arc<str>, InsertQueue<WaitingInsert>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes an insert from its queue on drop, if it's still waiting.
struct RemovalGuard<'b> {
    batcher: &'b InsertBatcher,
    key: &'b str,
    ticket: Ticket,
}

impl Drop for RemovalGuard<'_> {
    fn drop(&mut self) {
        let mut queues = self.batcher.lock();
        queues.get_mut(self.key).map(|queue| queue.remove(self.ticket));
    }
}

impl Slot {
    fn accept_batch(&self) {
        let mut queues = self.batcher.lock();
        queues.get_mut(&*self.key).map(InsertQueue::accept_batch);
    }

    /// Stops batching for this statement for a while. The inserts of a rejected batch and those still waiting are
    /// executed on their own.
    fn suspend_batching(&self, rejected: Vec<WaitingInsert>) {
        let now = Instant::now();
        let waiting =
            self.batcher.lock().get_mut(&*self.key).map(|queue| queue.reject_batch(now, rejected.len()));
        for insert in rejected.into_iter().chain(waiting.unwrap_or_default()) {
            insert.execute_alone(self.batcher.slot(self.key.clone(), 1));
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let now = Instant::now();
        let queue_finish =
            |queue: &mut InsertQueue<_>| queue.finish(now, self.rows, WaitingInsert::can_share);
        let next = self.batcher.lock().get_mut(&*self.key).map(queue_finish);
        self.batcher.start(&self.key, next.unwrap_or_default());
    }
}

impl WaitingInsert {
    /// Whether both inserts were planned for the same version of the app's tables.
    fn can_share(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.app, &other.app)
    }

    fn id(&self) -> Option<Uuid> {
        match self.row.values.get(self.id_index?)? {
            Param::Uuid(id) => Some(*id),
            _ => None,
        }
    }

    fn execute_alone(self, slot: Slot) {
        // If the client has disconnected, dropping the slot starts the next batch.
        let _ = self.turn.send(Turn::Execute(slot));
    }

    fn end(self, result: Result<BridgeResponse, Problem>) {
        let _ = self.turn.send(Turn::Ended(result));
    }
}

/// Why a batch has no result.
enum BatchError {
    /// PostgreSQL rejected the statement, which had no effect.
    Rejected,
    /// The statement wasn't sent, or its result was lost.
    Failed(Box<Problem>),
}

impl BatchError {
    fn failed(problem: Problem) -> Self {
        Self::Failed(Box::new(problem))
    }
}

async fn execute_batch(slot: Slot, mut batch: Vec<WaitingInsert>) {
    match try_execute_batch(&mut batch, slot.batcher.statement_timeout).await {
        Ok(()) => slot.accept_batch(),
        Err(BatchError::Rejected) => slot.suspend_batching(batch),
        Err(BatchError::Failed(problem)) => {
            for insert in batch {
                insert.end(Err((*problem).clone()));
            }
        }
    }
}

/// Executes a batch and responds to its inserts. Those of clients that have disconnected are dropped before the
/// statement is sent.
async fn try_execute_batch(
    batch: &mut Vec<WaitingInsert>,
    statement_timeout: Duration,
) -> Result<(), BatchError> {
    let Some(first) = batch.first() else { return Ok(()) };
    let app = first.app.clone();
    let table = app.tables.get(&*first.table).ok_or(BatchError::Rejected)?;
    let target = BatchTarget { app: &app, table };
    let lease = app.pool.lease().await;
    let mut lease = lease.map_err(|error| BatchError::failed(problems::from_pool_error(&error)))?;
    // Behind another request's statement, the batch may take longer through no fault of its own.
    let is_cancellable = lease.is_alone();
    lease.start_work();
    let result = {
        let execution = tokio::time::timeout(statement_timeout + TIMEOUT_GRACE, target.insert(&lease, batch));
        let mut execution = pin!(execution);
        match tokio::time::timeout(BATCH_TIMEOUT, &mut execution).await {
            Ok(result) => result,
            Err(_) => {
                if is_cancellable {
                    lease.cancel();
                }
                execution.await
            }
        }
    };
    let result = result.map_err(|_| BatchError::failed(problems::no_result_in_time(true)))?;
    lease.finish_work();
    match result {
        Ok(inserted) => {
            inserted.respond(&lease, batch.drain(..));
            Ok(())
        }
        Err(error) => match error.code() {
            Some(sqlstate) => {
                let sqlstate = sqlstate.code();
                tracing::debug!(
                    sqlstate,
                    rows = batch.len(),
                    "batch rejected; inserting its rows one by one"
                );
                Err(BatchError::Rejected)
            }
            None => {
                Err(BatchError::failed(problems::from_database_error(&error, ErrorContext::for_insert())))
            }
        },
    }
}

struct BatchTarget<'a> {
    app: &'a App,
    table: &'a Table,
}

impl<'a> BatchTarget<'a> {
    async fn insert(
        &self,
        connection: &Connection,
        batch: &mut Vec<WaitingInsert>,
    ) -> Result<InsertedRows<'a>, tokio_postgres::Error> {
        batch.retain(|insert| !insert.turn.is_closed());
        if batch.is_empty() {
            return Ok(InsertedRows::default());
        }
        let mut query = self.query(batch);
        let statement =
            connection.prepare_cached(&query.sql.text, &query.sql.params, Param::sql_type).await?;
        // Preparing may have taken a round trip.
        if batch.iter().any(|insert| insert.turn.is_closed()) {
            batch.retain(|insert| !insert.turn.is_closed());
            if batch.is_empty() {
                return Ok(InsertedRows::default());
            }
            query = self.query(batch);
        }
        let rows = connection.client.query_raw(&statement, &query.sql.params).await?;
        Ok(InsertedRows { rows: rows.try_collect().await?, columns: query.columns })
    }

    fn query(&self, batch: &[WaitingInsert]) -> RowQuery<'a> {
        let rows: Vec<&NewRow> = batch.iter().map(|insert| &insert.row).collect();
        plan::insert_rows(&self.app.schema, self.table, &rows)
    }
}

/// The result rows of a batch.
#[derive(Default)]
struct InsertedRows<'a> {
    rows: Vec<Row>,
    columns: Vec<&'a Column>,
}

impl InsertedRows<'_> {
    /// Responds to each insert. If triggers have skipped rows, the others are found by id. A row whose id a trigger has
    /// changed, too, is then missing from the responses.
    fn respond(&self, connection: &Connection, batch: impl ExactSizeIterator<Item = WaitingInsert>) {
        let executor = Executor { connection, context: ErrorContext::for_insert() };
        let id_position = self.columns.iter().position(|column| column.name.as_str() == "id");
        let row_id = |row: &Row| id_position.and_then(|position| row.try_get::<_, Uuid>(position).ok());
        let mut rows_by_id: Option<HashMap<_, _>> = (self.rows.len() != batch.len())
            .then(|| self.rows.iter().filter_map(|row| Some((row_id(row)?, row))).collect());
        for (index, insert) in batch.enumerate() {
            let row = match &mut rows_by_id {
                None => self.rows.get(index),
                Some(rows) => insert.id().and_then(|id| rows.remove(&id)),
            };
            let response = insert.span.in_scope(|| executor.created_row(row, &self.columns));
            insert.end(response);
        }
    }
}

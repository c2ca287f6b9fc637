//! Combines concurrent single-row inserts into one statement.
//!
//! A statement costs PostgreSQL several times as much as a row: messages, wake-ups, executor setup, commit. Inserts into
//! the same columns of a table therefore share a statement while others are running. An insert that meets no such
//! traffic is executed immediately, as are all inserts into tables that turned out to be slow or to reject rows.
//!
//! Invariants:
//! - An insert is executed exactly once. A batch is split up only after PostgreSQL has reported an error, which means
//!   that the statement had no effect.
//! - A batch runs in a task of its own, so a client that disconnects doesn't cancel the others' rows.
//! - An insert that waits for a slow neighbor is released after [`BATCH_TIMEOUT`] at the latest.

use std::collections::HashMap;
use std::fmt::Write;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use tokio::sync::oneshot;
use tokio_postgres::Row;
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
}

struct WaitingInsert {
    app: Arc<App>,
    table: String,
    row: NewRow,
    turn: oneshot::Sender<Turn>,
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
        if request.body_bytes > MAX_BODY_BYTES {
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
            turn,
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

impl Slot {
    /// Stops batching for this statement for a while. The inserts of a rejected batch and those still waiting are
    /// executed on their own.
    fn suspend_batching(&self, rejected: Vec<WaitingInsert>) {
        let now = Instant::now();
        let waiting = self.batcher.lock().get_mut(&*self.key).map(|queue| queue.suspend(now, rejected.len()));
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

    fn execute_alone(self, slot: Slot) {
        // If the client has disconnected, dropping the slot starts the next batch.
        let _ = self.turn.send(Turn::Execute(slot));
    }

    fn end(self, result: Result<BridgeResponse, Problem>) {
        let _ = self.turn.send(Turn::Ended(result));
    }
}

/// The outcome of a batch's statement.
enum BatchOutcome {
    Inserted(Vec<Result<BridgeResponse, Problem>>),
    /// The statement had no effect.
    Rejected,
    /// The statement wasn't sent, or its result was lost.
    Failed(Box<Problem>),
}

async fn execute_batch(slot: Slot, mut batch: Vec<WaitingInsert>) {
    match try_execute_batch(&mut batch, slot.batcher.statement_timeout).await {
        BatchOutcome::Inserted(responses) => {
            for (insert, response) in batch.into_iter().zip(responses) {
                insert.end(response);
            }
        }
        BatchOutcome::Rejected => slot.suspend_batching(batch),
        BatchOutcome::Failed(problem) => {
            for insert in batch {
                insert.end(Err((*problem).clone()));
            }
        }
    }
}

/// Executes a batch. Inserts of clients that have disconnected are removed from it.
async fn try_execute_batch(batch: &mut Vec<WaitingInsert>, statement_timeout: Duration) -> BatchOutcome {
    let Some(first) = batch.first() else { return BatchOutcome::Inserted(Vec::new()) };
    let app = first.app.clone();
    let Some(table) = app.tables.get(&*first.table) else { return BatchOutcome::Rejected };
    let target = BatchTarget { app: &app, table };
    let mut lease = match app.pool.lease().await {
        Ok(lease) => lease,
        Err(error) => return BatchOutcome::Failed(Box::new(problems::from_pool_error(&error))),
    };
    lease.start_work();
    let result = {
        let execution = tokio::time::timeout(statement_timeout + TIMEOUT_GRACE, target.insert(&lease, batch));
        let mut execution = pin!(execution);
        match tokio::time::timeout(BATCH_TIMEOUT, &mut execution).await {
            Ok(result) => result,
            Err(_) => {
                lease.cancel();
                execution.await
            }
        }
    };
    let Ok(result) = result else {
        return BatchOutcome::Failed(Box::new(problems::no_result_in_time(true)));
    };
    lease.finish_work();
    match result {
        Ok(inserted) => BatchOutcome::Inserted(inserted.responses(&lease)),
        Err(error) if error.as_db_error().is_some() => BatchOutcome::Rejected,
        Err(error) => {
            let problem = problems::from_database_error(&error, ErrorContext::for_insert());
            BatchOutcome::Failed(Box::new(problem))
        }
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
        let mut query = self.query(batch);
        let statement =
            connection.prepare_cached(&query.sql.text, &query.sql.params, Param::sql_type).await?;
        // Preparing may have taken a round trip.
        if batch.iter().any(|insert| insert.turn.is_closed()) {
            batch.retain(|insert| !insert.turn.is_closed());
            query = self.query(batch);
        }
        if batch.is_empty() {
            return Ok(InsertedRows { rows: Vec::new(), columns: query.columns, ids: Vec::new() });
        }
        let rows = connection.client.query_raw(&statement, &query.sql.params).await?;
        let rows = rows.try_collect().await?;
        let id_column = self.table.columns.iter().position(|column| column.name.as_str() == "id");
        let id = |insert: &WaitingInsert| {
            let position = insert.row.columns.iter().position(|column| Some(*column) == id_column)?;
            insert.row.values.get(position).cloned()
        };
        Ok(InsertedRows { rows, columns: query.columns, ids: batch.iter().map(id).collect() })
    }

    fn query(&self, batch: &[WaitingInsert]) -> RowQuery<'a> {
        let rows: Vec<&NewRow> = batch.iter().map(|insert| &insert.row).collect();
        plan::insert_rows(&self.app.schema, self.table, &rows)
    }
}

/// The result rows of a batch.
struct InsertedRows<'a> {
    rows: Vec<Row>,
    columns: Vec<&'a Column>,
    /// Each insert's id, as sent to PostgreSQL.
    ids: Vec<Option<Param>>,
}

impl InsertedRows<'_> {
    /// Returns the response to each insert. If triggers have skipped rows, the others are found by id.
    fn responses(&self, connection: &Connection) -> Vec<Result<BridgeResponse, Problem>> {
        let executor = Executor { connection, context: ErrorContext::for_insert() };
        let response = |row| executor.created_row(row, &self.columns);
        if self.rows.len() == self.ids.len() {
            return self.rows.iter().map(|row| response(Some(row))).collect();
        }
        let id_position = self.columns.iter().position(|column| column.name.as_str() == "id");
        let row_id = |row: &Row| id_position.and_then(|position| row.try_get::<_, Uuid>(position).ok());
        let by_id: HashMap<_, _> = self.rows.iter().filter_map(|row| Some((row_id(row)?, row))).collect();
        let find_row = |id: &Option<Param>| match id {
            Some(Param::Uuid(id)) => by_id.get(id).copied(),
            _ => None,
        };
        self.ids.iter().map(|id| response(find_row(id))).collect()
    }
}

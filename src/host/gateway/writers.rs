//! The write gate: admits operations on app tables and cost-limit changes, except while writers are stopped for this
//! machine's final backup. While they are stopped, it rejects all of these, even table reads.
//!
//! Invariant: once `quiescedAt` is set, neither bridge requests nor dispatches modify the owner's data until writers
//! are resumed. The file managed by `host::system::quiesce` is authoritative, so the state survives restarts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::database::{Database, DatabaseError};
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};
use svc_host::agents::dispatch::Dispatcher;
use svc_host::agents::kernel::Kernel;
use svc_host::snapshots::side_database;
use svc_host::system::blocking::run_blocking;
use svc_host::system::layout::Layout;
use svc_host::system::quiesce;
use svc_host::system::quiesce::Quiesce;
use svc_http::problem::{Code, Problem};
use svc_machine::id::OperationId;

/// Poll interval for `quiesce.json`, which the sync agent may remove.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Timeout for the query that counts active sessions.
const SESSIONS_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for flushing the records of finished dispatches.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Retry delay for rejected clients, in seconds. The final backup and the steps after it take minutes.
const RETRY_AFTER_SECONDS: u64 = 15;

/// Counts app sessions that are executing a statement or holding a transaction open, even if their client is gone.
const COUNT_ACTIVE_SESSIONS: &str = "SELECT count(*) FROM pg_stat_activity \
    WHERE datname = current_database() AND backend_type = 'client backend' \
      AND starts_with(usename, 'app_') AND state <> 'idle'";

/// The gate for all writers.
pub struct Writers {
    layout: Layout,
    dispatcher: Arc<Dispatcher>,
    kernel: Arc<Kernel>,
    database: Arc<Database>,
    state: Mutex<WritersState>,
    /// Serializes changes to the quiesce state, so that `watch` doesn't undo a concurrent `quiesce`.
    change_lock: tokio::sync::Mutex<()>,
}

struct WritersState {
    quiesce: Option<Quiesce>,
    in_flight: usize,
}

/// A write permit. Writers are considered stopped only once every permit has been dropped.
pub struct WritePermit(Arc<Writers>);

impl Drop for WritePermit {
    fn drop(&mut self) {
        self.0.lock().in_flight -= 1;
    }
}

/// Quiesce progress.
pub struct QuiesceProgress {
    pub quiesce: Quiesce,
    pub running_dispatches: usize,
}

impl Writers {
    /// Creates the gate. Writers stopped before a restart remain stopped, and the dispatcher is paused.
    ///
    /// # Errors
    /// [`FileError`] if `quiesce.json` cannot be read: the gateway must not start without knowing whether writers are
    /// stopped.
    pub fn open(
        layout: &Layout,
        dispatcher: Arc<Dispatcher>,
        kernel: Arc<Kernel>,
        database: Arc<Database>,
    ) -> Result<Arc<Self>, FileError> {
        let quiesce = Quiesce::read(layout)?;
        if let Some(quiesce) = &quiesce {
            tracing::warn!(operation = %quiesce.operation_id, "writers remain stopped after restart");
            dispatcher.pause();
        }
        let state = Mutex::new(WritersState { quiesce, in_flight: 0 });
        let change_lock = tokio::sync::Mutex::default();
        Ok(Arc::new(Self { layout: layout.clone(), dispatcher, kernel, database, state, change_lock }))
    }

    fn lock(&self) -> MutexGuard<'_, WritersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_quiesced(&self) -> bool {
        self.lock().quiesce.is_some()
    }

    /// Admits a request that may write.
    ///
    /// # Errors
    /// 503 while writers are stopped.
    pub fn admit(self: &Arc<Self>) -> Result<WritePermit, Problem> {
        let mut state = self.lock();
        if state.quiesce.is_some() {
            return Err(quiesced_problem());
        }
        state.in_flight += 1;
        Ok(WritePermit(Arc::clone(self)))
    }

    /// Stops all writers for an operation and returns the progress. Idempotent for the same operation; a different
    /// operation replaces the current one.
    ///
    /// # Errors
    /// 500 if the state cannot be read or persisted. If the operation itself cannot be persisted, no writers are
    /// stopped, since a restart would lose the state.
    pub async fn quiesce(&self, operation: OperationId) -> Result<QuiesceProgress, Problem> {
        let _guard = self.change_lock.lock().await;
        let mut quiesce = self.record_quiesce(operation).await?;
        self.dispatcher.pause();
        let running_dispatches = self.dispatcher.running_count();
        if quiesce.quiesced_at.is_none() && running_dispatches == 0 && self.flush_and_check_idle().await {
            quiesce.quiesced_at = Some(clock::now_ms());
            self.store(&quiesce).await?;
            tracing::info!(%operation, "all writers have stopped");
        }
        Ok(QuiesceProgress { quiesce, running_dispatches })
    }

    async fn record_quiesce(&self, operation: OperationId) -> Result<Quiesce, Problem> {
        let layout = self.layout.clone();
        let current = run_blocking(move || Quiesce::read(&layout)).await?;
        if let Some(current) = current.filter(|current| current.operation_id == operation) {
            self.lock().quiesce = Some(current.clone());
            return Ok(current);
        }
        let quiesce = Quiesce::new(operation);
        self.store(&quiesce).await?;
        tracing::warn!(%operation, "stopping writers at the platform's request");
        Ok(quiesce)
    }

    async fn store(&self, quiesce: &Quiesce) -> Result<(), Problem> {
        let lock = quiesce::acquire_lock(&self.layout).await.map_err(|error| Problem::internal(&error))?;
        let (layout, stored) = (self.layout.clone(), quiesce.clone());
        run_blocking(move || stored.write(&layout, &lock)).await?;
        self.lock().quiesce = Some(quiesce.clone());
        Ok(())
    }

    /// Returns whether all writes have finished: requests, statements abandoned by their clients, and copies from the
    /// side database. A database that doesn't accept connections is assumed to be idle. If no request is in flight,
    /// also flushes the records of finished dispatches; a failed flush doesn't prevent the backup.
    async fn flush_and_check_idle(&self) -> bool {
        if self.lock().in_flight > 0 {
            return false;
        }
        let kernel = Arc::clone(&self.kernel);
        let is_flushed = tokio::task::spawn_blocking(move || kernel.flush(FLUSH_TIMEOUT)).await;
        if !is_flushed.unwrap_or_default() {
            tracing::warn!("cannot flush finished dispatch records; the final backup may be missing them");
        }
        let layout = self.layout.clone();
        let side_database_state = run_blocking(move || side_database::SideState::read(&layout)).await;
        if !side_database_state
            .is_ok_and(|state| state.is_none_or(|state| state.status != side_database::SideStatus::Copying))
        {
            return false;
        }
        let session_count = tokio::time::timeout(SESSIONS_TIMEOUT, async {
            let client = self.database.shared_client().await?;
            let row = client.query_one(COUNT_ACTIVE_SESSIONS, &[]).await?;
            Ok::<i64, DatabaseError>(row.try_get(0)?)
        });
        match session_count.await {
            Ok(Ok(sessions)) => sessions == 0,
            // A server that responds, even with "too many connections", may still be executing statements, as may one
            // that has closed a connection.
            Ok(Err(DatabaseError::Connect(error))) => error.as_db_error().is_none(),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Resumes writers stopped for this operation.
    ///
    /// # Errors
    /// 409 if writers are stopped for another operation; 500 if the state cannot be read or removed.
    pub async fn resume(&self, operation: OperationId) -> Result<(), Problem> {
        let _guard = self.change_lock.lock().await;
        let resumed = quiesce::resume(&self.layout, operation).await;
        if resumed.map_err(|error| Problem::internal(&error))? {
            self.reopen();
            return Ok(());
        }
        let layout = self.layout.clone();
        match run_blocking(move || Quiesce::read(&layout)).await? {
            None => {
                self.reopen();
                Ok(())
            }
            Some(current) => {
                let detail = format!("Writers are stopped for another operation, {}.", current.operation_id);
                Err(Problem::new(Code::InvalidState, detail))
            }
        }
    }

    fn reopen(&self) {
        if self.lock().quiesce.take().is_some() {
            tracing::info!("writers resumed");
        }
        self.dispatcher.resume();
    }

    /// Watches `quiesce.json` until `stop` is cancelled, resuming writers once the file has been removed. The sync
    /// agent removes it when the platform's heartbeat responses no longer reference the operation.
    pub async fn watch(self: Arc<Self>, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_some() {
            if !self.is_quiesced() {
                continue;
            }
            let _guard = self.change_lock.lock().await;
            match fsx::exists(&self.layout.quiesce()) {
                Ok(false) => self.reopen(),
                Ok(true) => {}
                Err(error) => {
                    tracing::warn!(error = %format_chain(&error), "cannot check whether quiesce.json exists");
                }
            }
        }
    }
}

fn quiesced_problem() -> Problem {
    let detail = "A final backup is being taken before this machine is replaced or deleted: try again later.";
    Problem::new(Code::Unavailable, detail).retry_after(RETRY_AFTER_SECONDS)
}

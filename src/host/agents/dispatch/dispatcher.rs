//! Dispatch lookup, scheduling and shutdown.
//!
//! Invariants:
//! - An accepted dispatch is in the journal until its record is durable, unless the journal write failed.
//! - An id identifies one dispatch or batch.
//! - At most the configured number of dispatches run concurrently.
//! - Every dispatch reserves part of the budget before it starts.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::event_log::EventLog;
use super::journal::{Journal, JournalEntry, JournalFile};
use super::queue::{Queue, QueueDecision};
use super::request::DispatchId;
use super::run::{self, RunContext};
use super::state::{Batch, Dispatch, DispatchResult, Phase, parse_entry_index};
use crate::agents::bridge_tokens::BridgeTokens;
use crate::agents::budget::LimitWarning;
use crate::agents::kernel::{Kernel, LimitReached};
use crate::agents::owner_config::OwnerSettings;
use crate::agents::protocol;
use crate::audit::protocol as audit_protocol;
use crate::audit::protocol::Message;
use crate::records::entry::Interaction;
use crate::records::limits::Period;
use crate::system::blocking::run_blocking;
use crate::system::layout::{BRIDGE_SOCKET, Layout};
use svc_base::clock;
use svc_base::metrics::{DISPATCHES, DISPATCHES_QUEUED, DISPATCHES_RUNNING};
use svc_http::problem::{Code, Problem};

/// Interval between journal prunes, and between attempts to start queued dispatches.
pub(super) const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time a request waits for the previous process's dispatches to be restored.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for stopping runs at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(25);

/// The dispatch or batch identified by an id.
#[derive(Clone)]
pub enum DispatchTarget {
    Dispatch(Arc<Dispatch>),
    Batch(Arc<Batch>),
    /// A batch restored from records, along with its recorded entries.
    Recorded(Arc<Batch>, Vec<Arc<Dispatch>>),
}

impl DispatchTarget {
    pub fn id(&self) -> &str {
        match self {
            Self::Dispatch(dispatch) => dispatch.id(),
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.id,
        }
    }

    pub fn log(&self) -> &EventLog {
        match self {
            Self::Dispatch(dispatch) => &dispatch.log,
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.log,
        }
    }

    /// Number of accepted dispatches, including unrecorded batch entries.
    pub fn entry_count(&self) -> usize {
        match self {
            Self::Dispatch(_) => 1,
            Self::Batch(batch) | Self::Recorded(batch, _) => batch.entry_ids.len(),
        }
    }

    /// Waits for the target's journal write to succeed or fail.
    pub async fn wait_until_journaled(&self) {
        match self {
            Self::Dispatch(dispatch) => dispatch.journaled.cancelled().await,
            Self::Batch(batch) => batch.journaled.cancelled().await,
            Self::Recorded(..) => {}
        }
    }

    pub fn fingerprint(&self) -> &str {
        match self {
            Self::Dispatch(dispatch) => &dispatch.accepted.fingerprint,
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.fingerprint,
        }
    }
}

/// State guarded by the dispatcher's lock.
#[derive(Default)]
pub(super) struct DispatchTable {
    pub(super) targets: HashMap<String, DispatchTarget>,
    /// Dispatches being written to the journal, to be queued next.
    pub(super) unjournaled: Vec<Arc<Dispatch>>,
    pub(super) queue: Queue<Arc<Dispatch>>,
    /// At most one per conversation, since two would both start or resume it.
    running: Vec<Arc<Dispatch>>,
    /// Cancelled while dispatches are paused for a final backup: nothing starts, and running dispatches are stopped.
    pause: CancellationToken,
    /// Ended dispatches, oldest first.
    pub(super) ended: VecDeque<Arc<Dispatch>>,
    pub(super) ended_bytes: usize,
    /// Journal files of recorded or refused dispatches and ended batches, removed once the records are durable.
    pub(super) prunable_files: Vec<JournalFile>,
    /// Number of failed log file syncs as of the last time such a failure cleared `prunable_files`.
    pub(super) failed_syncs: u64,
    /// Batches whose files stay in the journal until the next start: an entry's record was dropped or may not be on
    /// disk, and the batch file may be its only copy.
    pub(super) kept_batches: BTreeSet<String>,
}

pub struct Dispatcher {
    pub(super) kernel: Arc<Kernel>,
    bridge_tokens: Arc<BridgeTokens>,
    /// The bridge socket for agents.
    bridge_socket: PathBuf,
    pub(super) journal: Journal,
    /// The svc-agent socket.
    agent_socket: PathBuf,
    /// The svc-watch socket.
    pub(super) watcher_socket: PathBuf,
    table: Mutex<DispatchTable>,
    pub(super) runs: TaskTracker,
    /// Cancelled at shutdown: nothing starts, and running dispatches are stopped.
    stop: CancellationToken,
    /// Cancelled at shutdown to end event streams, once the runs have ended or `SHUTDOWN_TIMEOUT` has elapsed.
    pub closed: CancellationToken,
    /// Cancelled once the previous process's dispatches have been restored.
    pub(super) recovered: CancellationToken,
}

impl Dispatcher {
    pub fn new(layout: &Layout, kernel: &Arc<Kernel>, bridge_tokens: &Arc<BridgeTokens>) -> Arc<Self> {
        Arc::new(Self {
            kernel: Arc::clone(kernel),
            bridge_tokens: Arc::clone(bridge_tokens),
            bridge_socket: layout.bridge_sockets().join(BRIDGE_SOCKET),
            journal: Journal::new(layout.dispatches()),
            agent_socket: layout.owner_sockets().join(protocol::SOCKET),
            watcher_socket: layout.watch_sockets().join(audit_protocol::SOCKET),
            table: Mutex::default(),
            runs: TaskTracker::new(),
            stop: CancellationToken::new(),
            closed: CancellationToken::new(),
            recovered: CancellationToken::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, DispatchTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until dispatches can be accepted and looked up.
    ///
    /// # Errors
    /// The records or the journal are still being read, or the gateway is shutting down.
    pub async fn wait_until_ready(&self) -> Result<(), Problem> {
        self.kernel.wait_for_usage_store().await?;
        let detail = "Dispatches are unavailable while the gateway starts or shuts down.";
        let unavailable = || Problem::new(Code::Unavailable, detail).retry_after(2);
        let recovered = tokio::time::timeout(RECOVERY_TIMEOUT, self.recovered.cancelled()).await;
        if recovered.is_err() || self.stop.is_cancelled() {
            return Err(unavailable());
        }
        Ok(())
    }

    /// Looks up an id in memory, then in the newest records.
    ///
    /// # Errors
    /// The records cannot be read; the failure is logged.
    pub async fn find(&self, id: &DispatchId) -> Result<Option<DispatchTarget>, Problem> {
        if let Some(found) = self.lock().targets.get(id.as_str()).cloned() {
            return Ok(Some(found));
        }
        let (kernel, ids) = (Arc::clone(&self.kernel), BTreeSet::from([id.to_string()]));
        let found = run_blocking(move || kernel.find_interactions(&ids, None)).await?;
        if let Some(interaction) = found.get(id.as_str()) {
            return Ok(Some(DispatchTarget::Dispatch(Dispatch::from_record(interaction.clone(), None))));
        }
        Ok((!found.is_empty()).then(|| {
            let mut entries: Vec<Interaction> = found.into_values().collect();
            entries.sort_by_key(|entry| parse_entry_index(&entry.id));
            let batch = Batch::from_records(id, &entries);
            let restore = |entry| Dispatch::from_record(entry, Some(Arc::clone(&batch)));
            let entries = entries.into_iter().map(restore).collect();
            DispatchTarget::Recorded(batch, entries)
        }))
    }

    /// A target's dispatches, in order.
    pub fn entries(&self, target: &DispatchTarget) -> Vec<Arc<Dispatch>> {
        match target {
            DispatchTarget::Dispatch(dispatch) => vec![Arc::clone(dispatch)],
            DispatchTarget::Batch(batch) => batch.entry_ids.iter().filter_map(|id| self.entry(id)).collect(),
            DispatchTarget::Recorded(_, entries) => entries.clone(),
        }
    }

    fn entry(&self, id: &str) -> Option<Arc<Dispatch>> {
        match self.lock().targets.get(id) {
            Some(DispatchTarget::Dispatch(dispatch)) => Some(Arc::clone(dispatch)),
            _ => None,
        }
    }

    /// All queued, running and retained dispatches, newest first.
    pub fn list(&self) -> Vec<Arc<Dispatch>> {
        let table = self.lock();
        let mut dispatches: Vec<Arc<Dispatch>> = table
            .targets
            .values()
            .filter_map(|target| match target {
                DispatchTarget::Dispatch(dispatch) => Some(Arc::clone(dispatch)),
                DispatchTarget::Batch(_) | DispatchTarget::Recorded(..) => None,
            })
            .collect();
        dispatches.sort_by(|a, b| (b.accepted.accepted_at, b.id()).cmp(&(a.accepted.accepted_at, a.id())));
        dispatches
    }

    /// Cancels a target's dispatches. Queued ones have ended by the time this returns; running ones and those still
    /// being journaled end later.
    pub async fn cancel(self: &Arc<Self>, target: &DispatchTarget) {
        let mut tasks = Vec::new();
        for dispatch in self.entries(target) {
            dispatch.cancel.cancel();
            let queued = self.lock().queue.remove(|other| other.id() == dispatch.id());
            if let Some(dispatch) = queued {
                let dispatcher = Arc::clone(self);
                tasks.push(self.runs.spawn(async move {
                    let interaction = run::interaction_without_run(
                        &dispatch,
                        "Cancelled",
                        "the dispatch was cancelled before it started",
                    );
                    dispatcher.end(&dispatch, interaction, None).await;
                }));
            }
        }
        for task in tasks {
            // If the task panicked, the panic hook has logged it.
            let _ = task.await;
        }
    }

    /// Starts all dispatches that can run now.
    pub(super) fn start_ready(self: &Arc<Self>) {
        while let Some(dispatch) = self.take_next() {
            let dispatcher = Arc::clone(self);
            self.runs.spawn(async move {
                let (runner, running) = (Arc::clone(&dispatcher), Arc::clone(&dispatch));
                if tokio::spawn(async move { runner.run(&running).await }).await.is_err() {
                    // The panic hook has logged the panic.
                    let reserved = dispatch.reserved_amount();
                    let interaction = run::interrupted_interaction(
                        &dispatch,
                        "Internal",
                        "internal gateway error",
                        reserved,
                    );
                    dispatcher.end(&dispatch, interaction, None).await;
                }
                let mut table = dispatcher.lock();
                table.running.retain(|other| !Arc::ptr_eq(other, &dispatch));
                drop(table);
                dispatcher.start_ready();
            });
        }
        let table = self.lock();
        DISPATCHES_RUNNING.set([], table.running.len() as f64);
        DISPATCHES_QUEUED.set([], table.queue.len() as f64);
    }

    fn take_next(self: &Arc<Self>) -> Option<Arc<Dispatch>> {
        let settings = self.kernel.settings();
        let mut table = self.lock();
        if self.stop.is_cancelled()
            || table.pause.is_cancelled()
            || table.running.len() >= settings.agents.concurrency
        {
            return None;
        }
        let DispatchTable { queue, running, .. } = &mut *table;
        let is_conversation_free =
            |dispatch: &Dispatch| !running.iter().any(|other| other.is_in_conversation_of(dispatch));
        let decide = |dispatch: &Arc<Dispatch>| {
            if is_conversation_free(dispatch) {
                self.decide_start(dispatch, &settings)
            } else {
                QueueDecision::Wait
            }
        };
        let dispatch =
            queue.pop(decide, |dispatch| dispatch.has_reservation() && is_conversation_free(dispatch))?;
        table.running.push(Arc::clone(&dispatch));
        Some(dispatch)
    }

    fn decide_start(&self, dispatch: &Dispatch, settings: &OwnerSettings) -> QueueDecision {
        if dispatch.has_reservation() {
            return QueueDecision::Take;
        }
        match self.kernel.reserve(&dispatch.accepted.sender_id, settings) {
            Ok(Ok(reservation)) => {
                dispatch.set_reservation(reservation);
                QueueDecision::Take
            }
            // This user's in-flight dispatches may cost less than reserved.
            Ok(Err(reached)) if reached.can_retry_in_period() => QueueDecision::Wait,
            // `run` refuses the dispatch.
            Ok(Err(_)) => QueueDecision::Take,
            Err(_) => QueueDecision::Wait,
        }
    }

    async fn run(&self, dispatch: &Arc<Dispatch>) {
        let settings = self.kernel.settings();
        if !dispatch.has_reservation() {
            match self.kernel.reserve(&dispatch.accepted.sender_id, &settings) {
                Ok(Ok(reservation)) => dispatch.set_reservation(reservation),
                Ok(Err(reached)) => return self.refuse(dispatch, &reached).await,
                // Unreachable: nothing is accepted before the usage store is open.
                Err(_) => {}
            }
        }
        let started_at = clock::now_ms();
        dispatch.mark_running(started_at);
        dispatch.publish("running", &dispatch.to_json());
        let started = JournalEntry { started_at: Some(started_at), ..dispatch.accepted.clone() };
        if !self.write_journal(vec![started]).await && !self.mark_started(dispatch).await {
            let message = "the agent did not run, because its start could not be recorded; if the disk is full, \
                           free up space (for example in the terminal) and resend the dispatch";
            let interaction = run::interaction_without_run(dispatch, "NoRoom", message);
            return self.end(dispatch, interaction, None).await;
        }
        let context = RunContext {
            kernel: &self.kernel,
            agent_socket: &self.agent_socket,
            bridge_tokens: &self.bridge_tokens,
            bridge_socket: &self.bridge_socket,
            watcher_socket: &self.watcher_socket,
            stop: &self.stop,
            pause: &self.pause_token(),
            settings: &settings.agents,
        };
        let (interaction, text) = run::run(&context, dispatch).await;
        self.end(dispatch, interaction, text).await;
    }

    /// Reports the end to svc-watch, which closes any tool calls the agent left open. Does nothing if svc-watch isn't
    /// running.
    async fn report_end_to_watcher(&self, dispatch: &Dispatch) {
        let message = Message::dispatch_end(dispatch.id(), dispatch.take_seen_calls());
        audit_protocol::send_from_dispatcher(&self.watcher_socket, message).await;
    }

    /// Ends a dispatch whose sender reached a cost limit while it was queued. Like any refused dispatch, it has no
    /// interaction.
    async fn refuse(&self, dispatch: &Arc<Dispatch>, reached: &LimitReached) {
        DISPATCHES.add_one(["limited"]);
        // Without this entry, a crash would requeue the dispatch: its batch stays in the journal until all entries have
        // ended.
        let refused = JournalEntry { refused: Some(reached.period), ..dispatch.accepted.clone() };
        if !self.write_journal(vec![refused]).await {
            // A dispatch marked as started is recorded as interrupted after a crash. That's inaccurate, but keeps it
            // from running.
            self.mark_started(dispatch).await;
        }
        self.end_refused(dispatch, reached.period);
    }

    /// Ends a refused dispatch, which doesn't need a record.
    pub(super) fn end_refused(&self, dispatch: &Arc<Dispatch>, period: Period) {
        let refused = Some(period.reached_message());
        self.lock().prunable_files.push(dispatch.accepted.file());
        dispatch.end(DispatchResult { phase: Phase::Refused, interaction: None, text: None, refused });
        dispatch.mark_durable();
        self.retain_ended(dispatch);
    }

    /// Journals, records and publishes the end of a dispatch.
    async fn end(&self, dispatch: &Arc<Dispatch>, interaction: Interaction, text: Option<String>) {
        let started_at = dispatch.started_at();
        let ended = Some(interaction.clone());
        let entry = JournalEntry { started_at, ended, ..dispatch.accepted.clone() };
        if !self.write_journal(vec![entry]).await && started_at.is_none() {
            // Otherwise, a crash that also lost the record would requeue the cancelled dispatch.
            self.mark_started(dispatch).await;
        }
        self.report_end_to_watcher(dispatch).await;
        let warnings = self.record_interaction(dispatch, &interaction);
        warnings.iter().for_each(|warning| dispatch.publish("warning", &warning.to_json()));
        let phase = interaction.status.into();
        DISPATCHES.add_one([if phase == Phase::Success { "success" } else { "error" }]);
        dispatch.end(DispatchResult { phase, interaction: Some(interaction), text, refused: None });
        self.retain_ended(dispatch);
    }

    /// Records a dispatch's interaction and returns any cost-limit warnings. If the record is dropped, the dispatch
    /// stays in the journal and is recorded at the next start.
    pub(super) fn record_interaction(
        &self,
        dispatch: &Dispatch,
        interaction: &Interaction,
    ) -> Vec<LimitWarning> {
        let warnings = self.kernel.record(interaction);
        if warnings.is_some() {
            self.lock().prunable_files.push(dispatch.accepted.file());
        } else {
            tracing::warn!(
                id = dispatch.id(),
                "cannot queue the record of a dispatch; keeping the dispatch in the journal"
            );
            if let Some(batch) = &dispatch.batch {
                self.lock().kept_batches.insert(batch.id.clone());
            }
        }
        warnings.unwrap_or_default()
    }

    /// Writes entries to the journal and returns whether that succeeded. A failed write doesn't prevent acceptance: the
    /// dispatch may be the one that frees up disk space.
    pub(super) async fn write_journal(&self, entries: Vec<JournalEntry>) -> bool {
        let journal = self.journal.clone();
        let written = run_blocking(move || journal.write(&entries)).await;
        if written.is_err() {
            tracing::warn!("cannot write a dispatch to the journal; a gateway crash would lose its state");
        }
        written.is_ok()
    }

    /// Marks a dispatch as started when its journal entry can't be written. Returns `false` if a crash could make it
    /// start again.
    async fn mark_started(&self, dispatch: &Dispatch) -> bool {
        let (journal, accepted) = (self.journal.clone(), dispatch.accepted.clone());
        let marked = tokio::task::spawn_blocking(move || journal.mark_started(&accepted)).await;
        marked.unwrap_or_default()
    }

    fn pause_token(&self) -> CancellationToken {
        self.lock().pause.clone()
    }

    /// Pauses dispatches until [`Self::resume`]: new ones are refused, queued ones stay queued, and running ones are
    /// stopped and recorded. Doesn't wait for those: see [`Self::running_count`].
    pub fn pause(&self) {
        self.lock().pause.cancel();
    }

    /// Ends the pause: accepts new dispatches and starts queued ones.
    pub fn resume(self: &Arc<Self>) {
        let mut table = self.lock();
        if !table.pause.is_cancelled() {
            return;
        }
        table.pause = CancellationToken::new();
        drop(table);
        self.start_ready();
    }

    /// # Errors
    /// 503 while dispatches are paused.
    pub(super) fn refuse_while_paused(&self) -> Result<(), Problem> {
        if !self.pause_token().is_cancelled() {
            return Ok(());
        }
        let detail = "Dispatches are paused: a final backup of this machine is being taken.";
        Err(Problem::new(Code::Unavailable, detail).retry_after(15))
    }

    /// Number of dispatches running or being recorded.
    pub fn running_count(&self) -> usize {
        self.lock().running.len()
    }

    /// Shuts down: starts no more dispatches, then stops and records the running ones.
    pub async fn close(&self) {
        self.stop.cancel();
        self.runs.close();
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.runs.wait()).await.is_err() {
            tracing::warn!(
                "dispatches did not stop within {} s of shutdown; they will be recorded at the next start",
                SHUTDOWN_TIMEOUT.as_secs()
            );
        }
        self.closed.cancel();
        self.prune_journal().await;
    }
}

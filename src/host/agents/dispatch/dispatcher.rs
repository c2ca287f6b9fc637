//! The table of dispatches: looks them up, starts the next ones, and ends them at shutdown.
//!
//! Invariants: an accepted dispatch is in the journal until its record is durable; an ID names one dispatch; at most
//! the configured number run concurrently; the cost of each is reserved before it starts.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::event_log::EventLog;
use super::journal::{Journal, JournalEntry, JournalFile};
use super::queue::{Queue, Turn};
use super::request::DispatchId;
use super::run::{self, RunContext};
use super::state::{Batch, Dispatch, DispatchResult, Phase, entry_index};
use crate::agents::bridge_tokens::AgentTokens;
use crate::agents::kernel::{Kernel, LimitReached};
use crate::agents::owner_config::Settings;
use crate::agents::protocol;
use crate::audit::protocol as audit_protocol;
use crate::audit::protocol::Message;
use crate::records::entry::Interaction;
use crate::records::limits::Period;
use crate::system::blocking::blocking;
use crate::system::layout::{BRIDGE_SOCKET, Layout};
use svc_base::clock;
use svc_base::metrics::{DISPATCHES, DISPATCHES_QUEUED, DISPATCHES_RUNNING};
use svc_http::problem::{Code, Problem};

/// Maximum ended dispatches kept in memory with their text and events.
const MAX_ENDED: usize = 1000;
const MAX_ENDED_BYTES: usize = 32 << 20;
/// Multiple of those limits that applies while a full disk takes no records: the ID of a dispatch that is not durable
/// must stay known.
const MAX_NOT_DURABLE_FACTOR: usize = 8;
/// Interval of pruning the journal and of retrying to start queued dispatches.
pub(super) const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of ending the runs at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(25);

/// The dispatch or batch that an ID names.
#[derive(Clone)]
pub enum DispatchTarget {
    One(Arc<Dispatch>),
    Batch(Arc<Batch>),
    /// A batch restored from its records.
    Recorded(Arc<Batch>, Vec<Arc<Dispatch>>),
}

impl DispatchTarget {
    pub fn id(&self) -> &str {
        match self {
            Self::One(one) => one.id(),
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.id,
        }
    }

    pub fn log(&self) -> &EventLog {
        match self {
            Self::One(one) => &one.log,
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.log,
        }
    }

    /// Waits until it is in the journal.
    pub async fn wait_until_journaled(&self) {
        match self {
            Self::One(one) => one.is_journaled.cancelled().await,
            Self::Batch(batch) => batch.is_journaled.cancelled().await,
            Self::Recorded(..) => {}
        }
    }

    pub fn fingerprint(&self) -> &str {
        match self {
            Self::One(one) => &one.accepted.fingerprint,
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.fingerprint,
        }
    }
}

/// The state behind the dispatcher's lock.
#[derive(Default)]
pub(super) struct DispatchTable {
    pub(super) all: HashMap<String, DispatchTarget>,
    /// Being written to the journal; queued afterwards.
    pub(super) arriving: Vec<Arc<Dispatch>>,
    pub(super) queue: Queue<Arc<Dispatch>>,
    /// A conversation has at most one running dispatch; two would both start or resume it.
    running: Vec<Arc<Dispatch>>,
    /// Cancelled while writers are stopped: nothing starts, and running dispatches are ended.
    pause: CancellationToken,
    /// Ended dispatches, oldest first.
    ended: VecDeque<Arc<Dispatch>>,
    ended_bytes: usize,
    /// Recorded, but still in the journal until the record is durable.
    pub(super) recorded: Vec<JournalFile>,
}

pub struct Dispatcher {
    pub(super) kernel: Arc<Kernel>,
    agent_tokens: Arc<AgentTokens>,
    /// The bridge socket for agents.
    bridge: PathBuf,
    pub(super) journal: Journal,
    socket: PathBuf,
    /// The socket of svc-watch.
    pub(super) watcher: PathBuf,
    table: Mutex<DispatchTable>,
    pub(super) runs: TaskTracker,
    /// Cancelled at shutdown: nothing starts, and running dispatches are ended.
    stop: CancellationToken,
    /// Cancelled when all runs have ended: event streams end.
    pub closed: CancellationToken,
    /// Cancelled when the dispatches of the previous process are restored.
    pub(super) recovered: CancellationToken,
}

impl Dispatcher {
    pub fn new(layout: &Layout, kernel: &Arc<Kernel>, agent_tokens: &Arc<AgentTokens>) -> Arc<Self> {
        Arc::new(Self {
            kernel: Arc::clone(kernel),
            agent_tokens: Arc::clone(agent_tokens),
            bridge: layout.bridge_sockets().join(BRIDGE_SOCKET),
            journal: Journal::new(layout.dispatches()),
            socket: layout.owner_sockets().join(protocol::SOCKET),
            watcher: layout.watch_sockets().join(audit_protocol::SOCKET),
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

    /// # Errors
    /// The records are still being read, or the gateway is shutting down.
    pub async fn ready(&self) -> Result<(), Problem> {
        self.kernel.ready().await?;
        let unavailable =
            || Problem::new(Code::Unavailable, "Dispatches are not accepted at the moment.").retry_after(2);
        let recovered = tokio::time::timeout(MAINTENANCE_INTERVAL, self.recovered.cancelled()).await;
        if recovered.is_err() || self.stop.is_cancelled() {
            return Err(unavailable());
        }
        Ok(())
    }

    /// Looks up an ID, in memory and then in the records of the last days.
    ///
    /// # Errors
    /// The records cannot be read; logged.
    pub async fn find(&self, id: &DispatchId) -> Result<Option<DispatchTarget>, Problem> {
        if let Some(found) = self.lock().all.get(id.as_str()).cloned() {
            return Ok(Some(found));
        }
        let (kernel, ids) = (Arc::clone(&self.kernel), BTreeSet::from([id.to_string()]));
        let found = blocking(move || kernel.find(&ids)).await?;
        if let Some(one) = found.get(id.as_str()) {
            return Ok(Some(DispatchTarget::One(Dispatch::from_record(one.clone(), None))));
        }
        Ok((!found.is_empty()).then(|| {
            let mut entries: Vec<Interaction> = found.into_values().collect();
            entries.sort_by_key(|one| entry_index(&one.id));
            let ids: Vec<String> = entries.iter().map(|one| one.id.clone()).collect();
            let fingerprint = entries.iter().find_map(|one| one.fingerprint.clone()).unwrap_or_default();
            let batch = Batch::new(id.to_string(), fingerprint, ids, entries.len());
            let restore = |one| Dispatch::from_record(one, Some(Arc::clone(&batch)));
            let entries = entries.into_iter().map(restore).collect();
            DispatchTarget::Recorded(batch, entries)
        }))
    }

    /// The dispatches of a target, in order.
    pub fn entries(&self, found: &DispatchTarget) -> Vec<Arc<Dispatch>> {
        match found {
            DispatchTarget::One(one) => vec![Arc::clone(one)],
            DispatchTarget::Batch(batch) => batch.entries.iter().filter_map(|id| self.entry(id)).collect(),
            DispatchTarget::Recorded(_, entries) => entries.clone(),
        }
    }

    fn entry(&self, id: &str) -> Option<Arc<Dispatch>> {
        match self.lock().all.get(id) {
            Some(DispatchTarget::One(one)) => Some(Arc::clone(one)),
            _ => None,
        }
    }

    /// All queued, running and retained dispatches, newest first.
    pub fn list(&self) -> Vec<Arc<Dispatch>> {
        let table = self.lock();
        let mut all: Vec<Arc<Dispatch>> = table
            .all
            .values()
            .filter_map(|found| match found {
                DispatchTarget::One(one) => Some(Arc::clone(one)),
                DispatchTarget::Batch(_) | DispatchTarget::Recorded(..) => None,
            })
            .collect();
        all.sort_by(|a, b| (b.accepted.accepted_at, b.id()).cmp(&(a.accepted.accepted_at, a.id())));
        all
    }

    /// Cancels it in any phase; queued dispatches have ended when this returns.
    pub async fn cancel(self: &Arc<Self>, found: &DispatchTarget) {
        let mut ending = Vec::new();
        for one in self.entries(found) {
            one.cancel.cancel();
            let waited = self.lock().queue.remove(|other| other.id() == one.id());
            if let Some(one) = waited {
                let dispatcher = Arc::clone(self);
                ending.push(self.runs.spawn(async move {
                    let interaction = run::without_run(&one, "Cancelled", "it was cancelled before it ran");
                    dispatcher.end(&one, interaction, None).await;
                }));
            }
        }
        for ended in ending {
            // The panic hook has logged a panic.
            let _ = ended.await;
        }
    }

    /// Starts the dispatches that may run now.
    pub(super) fn start_ready(self: &Arc<Self>) {
        while let Some(one) = self.next() {
            let dispatcher = Arc::clone(self);
            self.runs.spawn(async move {
                let (runner, running) = (Arc::clone(&dispatcher), Arc::clone(&one));
                if tokio::spawn(async move { runner.run(&running).await }).await.is_err() {
                    // The panic hook has logged the panic.
                    let interaction =
                        run::cut_off(&one, "Internal", "the gateway failed at it", one.reserved());
                    dispatcher.end(&one, interaction, None).await;
                }
                let mut table = dispatcher.lock();
                table.running.retain(|other| !Arc::ptr_eq(other, &one));
                drop(table);
                dispatcher.start_ready();
            });
        }
        let table = self.lock();
        DISPATCHES_RUNNING.set([], table.running.len() as f64);
        DISPATCHES_QUEUED.set([], table.queue.len() as f64);
    }

    fn next(self: &Arc<Self>) -> Option<Arc<Dispatch>> {
        let settings = self.kernel.settings();
        let mut table = self.lock();
        if self.stop.is_cancelled()
            || table.pause.is_cancelled()
            || table.running.len() >= settings.agents.concurrency
        {
            return None;
        }
        let DispatchTable { queue, running, .. } = &mut *table;
        let is_idle = |one: &Dispatch| !running.iter().any(|other| other.is_in_conversation_of(one));
        let turn = |one: &Arc<Dispatch>| {
            if is_idle(one) { self.turn(one, &settings) } else { Turn::Wait }
        };
        let one = queue.pop(turn, |one| one.has_reservation() && is_idle(one))?;
        table.running.push(Arc::clone(&one));
        Some(one)
    }

    fn turn(&self, one: &Dispatch, settings: &Settings) -> Turn {
        if one.has_reservation() {
            return Turn::Take;
        }
        match self.kernel.reserve(&one.accepted.sender_id, settings) {
            Ok(Ok(reservation)) => {
                one.set_reservation(reservation);
                Turn::Take
            }
            // Other dispatches of this user are in flight and may cost less than reserved.
            Ok(Err(reached)) if reached.can_retry_in_period() => Turn::Wait,
            // `run` refuses it.
            Ok(Err(_)) => Turn::Take,
            Err(_) => Turn::Wait,
        }
    }

    async fn run(&self, one: &Arc<Dispatch>) {
        let settings = self.kernel.settings();
        if !one.has_reservation() {
            let refused = self.kernel.reserve(&one.accepted.sender_id, &settings);
            match refused {
                Ok(Ok(reservation)) => one.set_reservation(reservation),
                Ok(Err(reached)) => return self.refuse(one, &reached).await,
                // Unreachable: nothing is accepted before the book is open.
                Err(_) => {}
            }
        }
        let started_at = clock::now_ms();
        one.mark_running(started_at);
        one.publish("running", &one.to_json());
        if !self
            .write_journal(vec![JournalEntry { started_at: Some(started_at), ..one.accepted.clone() }])
            .await
        {
            let (journal, accepted) = (self.journal.clone(), one.accepted.clone());
            let marked = tokio::task::spawn_blocking(move || journal.mark_begun(&accepted)).await;
            if !marked.unwrap_or_default() {
                let message = "the disk has no room to note that its agent is started, so nothing ran: make room \
                               first, for instance in the terminal";
                return self.end(one, run::without_run(one, "NoRoom", message), None).await;
            }
        }
        let context = RunContext {
            kernel: &self.kernel,
            socket: &self.socket,
            agent_tokens: &self.agent_tokens,
            bridge: &self.bridge,
            watcher: &self.watcher,
            stop: &self.stop,
            pause: &self.pause_token(),
            settings: &settings.agents,
        };
        let (interaction, text) = run::run(&context, one).await;
        self.end(one, interaction, text).await;
    }

    /// Closes tool calls that the agent left open. Does nothing without a watcher.
    async fn end_for_watcher(&self, one: &Dispatch) {
        audit_protocol::send_from_dispatcher(&self.watcher, Message::dispatch_end(one.id(), one.take_seen()))
            .await;
    }

    /// Ends a dispatch whose limit was reached before its turn. Like any refused dispatch, it has no interaction.
    async fn refuse(&self, one: &Arc<Dispatch>, reached: &LimitReached) {
        DISPATCHES.add_one(["limited"]);
        // Its batch stays in the journal until all entries have ended: a crash must not queue this one again.
        let refused = JournalEntry { refused: Some(reached.period), ..one.accepted.clone() };
        if !self.write_journal(vec![refused]).await {
            let (journal, accepted) = (self.journal.clone(), one.accepted.clone());
            // After a crash it is then recorded as interrupted, which is wrong, but does not run it.
            let _ = tokio::task::spawn_blocking(move || journal.mark_begun(&accepted)).await;
        }
        self.end_refused(one, reached.period);
    }

    /// Ends a refused dispatch that is in the journal.
    pub(super) fn end_refused(&self, one: &Arc<Dispatch>, period: Period) {
        let refused = Some(period.reached_message());
        one.end(DispatchResult { phase: Phase::Refused, interaction: None, text: None, refused });
        one.mark_durable();
        if one.batch.is_none() {
            self.journal.remove(&JournalFile::One(one.id().to_owned()));
        }
        self.retain_ended(one);
    }

    async fn end(&self, one: &Arc<Dispatch>, interaction: Interaction, text: Option<String>) {
        self.write_journal(vec![JournalEntry { ended: Some(interaction.clone()), ..one.accepted.clone() }])
            .await;
        self.end_for_watcher(one).await;
        match self.kernel.record(&interaction) {
            Some(warnings) => {
                warnings.iter().for_each(|warning| one.publish("warning", &warning.to_json()));
                self.lock().recorded.push(JournalFile::One(one.id().to_owned()));
            }
            // The journal keeps it for the next start.
            None => tracing::warn!(id = one.id(), "a dispatch stays in the journal: its record was dropped"),
        }
        let phase = interaction.status.into();
        DISPATCHES.add_one([if phase == Phase::Success { "success" } else { "error" }]);
        one.end(DispatchResult { phase, interaction: Some(interaction), text, refused: None });
        self.retain_ended(one);
    }

    /// Keeps an ended dispatch for later requests, and evicts the oldest.
    pub(super) fn retain_ended(&self, one: &Arc<Dispatch>) {
        let mut table = self.lock();
        if let Some(batch) = one.batch.as_ref().filter(|batch| batch.is_over()) {
            // A refused entry stays refused only while its own file exists, so that the batch is removed first.
            let is_refused = |id: &&String| match table.all.get(*id) {
                Some(DispatchTarget::One(one)) => one.phase() == Phase::Refused,
                _ => false,
            };
            let refused = batch.entries.iter().filter(is_refused).cloned().map(JournalFile::One);
            let files: Vec<JournalFile> =
                std::iter::once(JournalFile::Batch(batch.id.clone())).chain(refused).collect();
            table.recorded.extend(files);
        }
        table.ended_bytes += one.bytes();
        table.ended.push_back(Arc::clone(one));
        let is_over_limit = |table: &DispatchTable, factor: usize| {
            table.ended.len() > MAX_ENDED * factor || table.ended_bytes > MAX_ENDED_BYTES * factor
        };
        while is_over_limit(&table, 1) {
            let is_far_over = is_over_limit(&table, MAX_NOT_DURABLE_FACTOR);
            // The entries of a batch are kept until all of them have ended.
            let can_evict = |one: &Arc<Dispatch>| {
                one.batch.as_ref().is_none_or(|batch| batch.is_over()) && (one.is_durable() || is_far_over)
            };
            let Some(at) = table.ended.iter().position(can_evict) else { break };
            let Some(oldest) = table.ended.remove(at) else { break };
            table.ended_bytes = table.ended_bytes.saturating_sub(oldest.bytes());
            table.all.remove(oldest.id());
            if let Some(batch) = &oldest.batch
                && !batch.entries.iter().any(|id| table.all.contains_key(id))
            {
                table.all.remove(&batch.id);
            }
        }
    }

    /// A failed write does not refuse the dispatch: it may be the one that frees disk space.
    pub(super) async fn write_journal(&self, all: Vec<JournalEntry>) -> bool {
        let journal = self.journal.clone();
        let written = blocking(move || journal.write(&all)).await;
        if written.is_err() {
            tracing::warn!("cannot write a dispatch to the journal; a crash would lose it");
        }
        written.is_ok()
    }

    fn pause_token(&self) -> CancellationToken {
        self.lock().pause.clone()
    }

    /// Ends and records running dispatches; queued ones stay queued. New ones are refused until [`Self::resume`].
    pub fn pause(&self) {
        self.lock().pause.cancel();
    }

    /// Starts queued dispatches again.
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
    /// 503 while writers are stopped.
    pub(super) fn refuse_while_paused(&self) -> Result<(), Problem> {
        if !self.pause_token().is_cancelled() {
            return Ok(());
        }
        let detail = "No dispatch is started now: a final backup is taken before this machine is replaced.";
        Err(Problem::new(Code::Unavailable, detail).retry_after(15))
    }

    /// The number of dispatches that run or are being recorded.
    pub fn running(&self) -> usize {
        self.lock().running.len()
    }

    /// Shuts down: starts nothing more, and ends and records running dispatches.
    pub async fn close(&self) {
        self.stop.cancel();
        self.runs.close();
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.runs.wait()).await.is_err() {
            tracing::warn!("dispatches did not end in time; they are recorded at the next start");
        }
        self.closed.cancel();
        self.prune_journal().await;
    }
}

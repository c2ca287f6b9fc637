//! Which dispatches there are, who is next, and what becomes of them when this process ends, well or not.
//!
//! Invariants: what is accepted is in the journal until its record is durable; an id means one dispatch; no more run at
//! once than the settings say; what one of them may cost is set aside before it starts.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::event_log::Log;
use super::journal::{Journal, Kept, Of};
use super::queue::{Queue, Turn};
use super::recover::recorded;
use super::request::DispatchId;
use super::run::{self, Surroundings};
use super::state::{Batch, Dispatch, End, Phase};
use crate::clock;
use crate::host::agents::bridge_tokens::AgentTokens;
use crate::host::agents::kernel::{Kernel, Reached};
use crate::host::agents::owner_config::Settings;
use crate::host::agents::protocol;
use crate::host::audit::protocol as audit_protocol;
use crate::host::audit::protocol::Message;
use crate::host::records::entry::Interaction;
use crate::host::system::blocking::blocking;
use crate::host::system::layout::{BRIDGE_SOCKET, Layout};
use crate::http::problem::{Code, Problem};
use crate::metrics::{DISPATCHES, DISPATCHES_QUEUED, DISPATCHES_RUNNING};

/// Dispatches that are over and can still be asked for with their text and events.
const MOST_ENDED: usize = 1000;
const MOST_ENDED_BYTES: usize = 32 << 20;
/// So many times of these are there where a full disk takes no record: of what is not durable an id would be new again.
const MOST_UNSAFE: usize = 8;
/// How often the journal is rid of what is durable, and it is looked whether a limit has gone.
pub(super) const LOOK: Duration = Duration::from_secs(1);
/// How long runs have to end when the gateway does.
const ENDING: Duration = Duration::from_secs(25);

/// What an id means.
#[derive(Clone)]
pub enum Found {
    One(Arc<Dispatch>),
    Batch(Arc<Batch>),
    /// A batch that is known by its records alone.
    Recorded(Arc<Batch>, Vec<Arc<Dispatch>>),
}

impl Found {
    pub fn id(&self) -> &str {
        match self {
            Self::One(one) => one.id(),
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.id,
        }
    }

    pub fn log(&self) -> &Log {
        match self {
            Self::One(one) => &one.log,
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.log,
        }
    }

    /// Waits until the journal has it.
    pub async fn kept(&self) {
        match self {
            Self::One(one) => one.is_kept.cancelled().await,
            Self::Batch(batch) => batch.is_kept.cancelled().await,
            Self::Recorded(..) => {}
        }
    }

    pub fn fingerprint(&self) -> &str {
        match self {
            Self::One(one) => &one.kept.fingerprint,
            Self::Batch(batch) | Self::Recorded(batch, _) => &batch.fingerprint,
        }
    }
}

/// All that is known, behind one lock.
#[derive(Default)]
pub(super) struct Known {
    pub(super) all: HashMap<String, Found>,
    /// On their way to the journal, and then to the queue.
    pub(super) arriving: Vec<Arc<Dispatch>>,
    pub(super) queue: Queue<Arc<Dispatch>>,
    /// Those that run: in a conversation one at a time, or two would each begin it, or go on with it.
    running: Vec<Arc<Dispatch>>,
    /// Cancelled while writers are stopped: nothing starts, and what runs is ended.
    pause: CancellationToken,
    /// Those that are over, the oldest first.
    ended: VecDeque<Arc<Dispatch>>,
    ended_bytes: usize,
    /// Recorded, and in the journal until that is durable.
    pub(super) recorded: Vec<Of>,
}

pub struct Dispatcher {
    pub(super) kernel: Arc<Kernel>,
    agent_tokens: Arc<AgentTokens>,
    /// Where agents use the bridge.
    bridge: PathBuf,
    pub(super) journal: Journal,
    socket: PathBuf,
    /// Where svc-watch listens.
    pub(super) watcher: PathBuf,
    known: Mutex<Known>,
    pub(super) runs: TaskTracker,
    /// The gateway ends: nothing is started any more, and what runs is told to end.
    stop: CancellationToken,
    /// All that ran has ended: nothing is told any more.
    pub closed: CancellationToken,
    /// What an earlier process left is known.
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
            known: Mutex::default(),
            runs: TaskTracker::new(),
            stop: CancellationToken::new(),
            closed: CancellationToken::new(),
            recovered: CancellationToken::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// While records are read, and when the gateway ends.
    pub async fn ready(&self) -> Result<(), Problem> {
        self.kernel.ready().await?;
        let come_again =
            || Problem::new(Code::Unavailable, "Dispatches are not taken at the moment.").retry_after(2);
        let recovered = tokio::time::timeout(LOOK, self.recovered.cancelled()).await;
        if recovered.is_err() || self.stop.is_cancelled() {
            return Err(come_again());
        }
        Ok(())
    }

    /// What this id means: in memory, else by the record of the last days.
    ///
    /// # Errors
    /// The records', logged.
    pub async fn find(&self, id: &DispatchId) -> Result<Option<Found>, Problem> {
        if let Some(found) = self.lock().all.get(id.as_str()).cloned() {
            return Ok(Some(found));
        }
        let (kernel, ids) = (Arc::clone(&self.kernel), BTreeSet::from([id.to_string()]));
        let found = blocking(move || kernel.find(&ids)).await?;
        if let Some(one) = found.get(id.as_str()) {
            return Ok(Some(Found::One(recorded(one.clone(), None))));
        }
        Ok((!found.is_empty()).then(|| {
            let mut entries: Vec<Interaction> = found.into_values().collect();
            entries.sort_by_key(|one| super::recover::index(&one.id));
            let ids: Vec<String> = entries.iter().map(|one| one.id.clone()).collect();
            let batch = Batch::new(id.to_string(), String::new(), ids, entries.len());
            let again = |one| recorded(one, Some(Arc::clone(&batch)));
            let entries = entries.into_iter().map(again).collect();
            Found::Recorded(batch, entries)
        }))
    }

    /// The dispatches that it means, in their order.
    pub fn entries(&self, found: &Found) -> Vec<Arc<Dispatch>> {
        match found {
            Found::One(one) => vec![Arc::clone(one)],
            Found::Batch(batch) => batch.entries.iter().filter_map(|id| self.entry(id)).collect(),
            Found::Recorded(_, entries) => entries.clone(),
        }
    }

    fn entry(&self, id: &str) -> Option<Arc<Dispatch>> {
        match self.lock().all.get(id) {
            Some(Found::One(one)) => Some(Arc::clone(one)),
            _ => None,
        }
    }

    /// All that wait, run, or are remembered; the newest first.
    pub fn list(&self) -> Vec<Arc<Dispatch>> {
        let known = self.lock();
        let mut all: Vec<Arc<Dispatch>> = known
            .all
            .values()
            .filter_map(|found| match found {
                Found::One(one) => Some(Arc::clone(one)),
                Found::Batch(_) | Found::Recorded(..) => None,
            })
            .collect();
        all.sort_by(|a, b| (b.kept.accepted_at, b.id()).cmp(&(a.kept.accepted_at, a.id())));
        all
    }

    /// Ends it, wherever it is; one that waits has ended when this returns.
    pub async fn cancel(self: &Arc<Self>, found: &Found) {
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
            // A panic in it has been told by its own message.
            let _ = ended.await;
        }
    }

    /// Starts whoever may go.
    pub(super) fn go_on(self: &Arc<Self>) {
        while let Some(one) = self.next() {
            let dispatcher = Arc::clone(self);
            self.runs.spawn(async move {
                let (runs, running) = (Arc::clone(&dispatcher), Arc::clone(&one));
                if tokio::spawn(async move { runs.run(&running).await }).await.is_err() {
                    // Its panic has been told by its own message.
                    let interaction = run::without_run(&one, "Internal", "the gateway failed at it");
                    dispatcher.end(&one, interaction, None).await;
                }
                let mut known = dispatcher.lock();
                known.running.retain(|other| !Arc::ptr_eq(other, &one));
                drop(known);
                dispatcher.go_on();
            });
        }
        let known = self.lock();
        DISPATCHES_RUNNING.set([], known.running.len() as f64);
        DISPATCHES_QUEUED.set([], known.queue.len() as f64);
    }

    fn next(self: &Arc<Self>) -> Option<Arc<Dispatch>> {
        let settings = self.kernel.settings();
        let mut known = self.lock();
        if self.stop.is_cancelled()
            || known.pause.is_cancelled()
            || known.running.len() >= settings.agents.concurrency
        {
            return None;
        }
        let Known { queue, running, .. } = &mut *known;
        let is_silent = |one: &Dispatch| !running.iter().any(|other| other.is_in_conversation_of(one));
        let turn = |one: &Arc<Dispatch>| {
            if is_silent(one) { self.turn(one, &settings) } else { Turn::Wait }
        };
        let one = queue.pop(turn, |one| one.has_reservation() && is_silent(one))?;
        known.running.push(Arc::clone(&one));
        Some(one)
    }

    fn turn(&self, one: &Dispatch, settings: &Settings) -> Turn {
        if one.has_reservation() {
            return Turn::Take;
        }
        let is_free = settings.agents.is_free(one.kept.entry.model.as_deref());
        match self.kernel.reserve(&one.kept.sender_id, settings, is_free) {
            Ok(Ok(reservation)) => {
                one.set_aside(reservation);
                Turn::Take
            }
            // Others of this user's run: what they do not spend may be enough.
            Ok(Err(reached)) if reached.may_pass() => Turn::Wait,
            // It is told so where it would run.
            Ok(Err(_)) => Turn::Take,
            Err(_) => Turn::Wait,
        }
    }

    async fn run(&self, one: &Arc<Dispatch>) {
        let settings = self.kernel.settings();
        if !one.has_reservation() {
            let refused = self.kernel.reserve(&one.kept.sender_id, &settings, false);
            match refused {
                Ok(Ok(reservation)) => one.set_aside(reservation),
                Ok(Err(reached)) => return self.refused(one, &reached),
                // The book is there: nothing was accepted before.
                Err(_) => {}
            }
        }
        let started_at = clock::now_ms();
        one.begin(started_at);
        one.tell("running", &one.shown());
        if !self.keep(vec![Kept { started_at: Some(started_at), ..one.kept.clone() }]).await {
            let (journal, kept) = (self.journal.clone(), one.kept.clone());
            let marked = tokio::task::spawn_blocking(move || journal.mark_begun(&kept)).await;
            if !marked.unwrap_or_default() {
                let message = "the disk has no room to note that its agent is started, so nothing ran: make room \
                               first, for instance in the terminal";
                return self.end(one, run::without_run(one, "NoRoom", message), None).await;
            }
        }
        let around = Surroundings {
            kernel: &self.kernel,
            socket: &self.socket,
            agent_tokens: &self.agent_tokens,
            bridge: &self.bridge,
            watcher: &self.watcher,
            stop: &self.stop,
            pause: &self.pause_token(),
            settings: &settings.agents,
        };
        let (interaction, text) = run::run(&around, one).await;
        self.end(one, interaction, text).await;
    }

    /// Tool calls that its agent left open are over. Without a watcher there are none.
    async fn tell_watcher(&self, one: &Dispatch) {
        audit_protocol::tell_of_dispatch(&self.watcher, Message::dispatch_end(one.id(), one.take_seen()))
            .await;
    }

    /// Its turn came, and the limit had been reached: there is no interaction, as with any dispatch that is refused.
    fn refused(&self, one: &Arc<Dispatch>, reached: &Reached) {
        DISPATCHES.add_one(["limited"]);
        let refused = Some(reached.period.reached());
        one.end(End { phase: Phase::Refused, interaction: None, text: None, refused });
        one.make_safe();
        self.journal.remove(&Of::One(one.id().to_owned()));
        self.remember(one);
    }

    async fn end(&self, one: &Arc<Dispatch>, interaction: Interaction, text: Option<String>) {
        self.keep(vec![Kept { ended: Some(interaction.clone()), ..one.kept.clone() }]).await;
        self.tell_watcher(one).await;
        match self.kernel.record(&interaction) {
            Some(warnings) => {
                warnings.iter().for_each(|warning| one.tell("warning", &warning.shown()));
                self.lock().recorded.push(Of::One(one.id().to_owned()));
            }
            // The journal has it whole, for the next start.
            None => tracing::warn!(id = one.id(), "a dispatch stays in the journal"),
        }
        let phase = interaction.status.into();
        DISPATCHES.add_one([if phase == Phase::Success { "success" } else { "error" }]);
        one.end(End { phase, interaction: Some(interaction), text, refused: None });
        self.remember(one);
    }

    /// For whoever asks later; the oldest are forgotten.
    pub(super) fn remember(&self, one: &Arc<Dispatch>) {
        let mut known = self.lock();
        if let Some(batch) = one.batch.as_ref().filter(|batch| batch.is_over()) {
            known.recorded.push(Of::Batch(batch.id.clone()));
        }
        known.ended_bytes += one.bytes();
        known.ended.push_back(Arc::clone(one));
        let is_more = |known: &Known, times: usize| {
            known.ended.len() > MOST_ENDED * times || known.ended_bytes > MOST_ENDED_BYTES * times
        };
        while is_more(&known, 1) {
            let is_far_more = is_more(&known, MOST_UNSAFE);
            // What a batch has come to is told until all of it is over.
            let may_go = |one: &Arc<Dispatch>| {
                one.batch.as_ref().is_none_or(|batch| batch.is_over()) && (one.is_safe() || is_far_more)
            };
            let Some(at) = known.ended.iter().position(may_go) else { break };
            let Some(oldest) = known.ended.remove(at) else { break };
            known.ended_bytes = known.ended_bytes.saturating_sub(oldest.bytes());
            known.all.remove(oldest.id());
            if let Some(batch) = &oldest.batch
                && !batch.entries.iter().any(|id| known.all.contains_key(id))
            {
                known.all.remove(&batch.id);
            }
        }
    }

    /// A disk that is full is no reason to take no dispatch: one may be what makes room on it.
    pub(super) async fn keep(&self, all: Vec<Kept>) -> bool {
        let journal = self.journal.clone();
        let written = blocking(move || journal.write(&all)).await;
        if written.is_err() {
            tracing::warn!("a dispatch is not in the journal: after a crash it would be forgotten");
        }
        written.is_ok()
    }

    fn pause_token(&self) -> CancellationToken {
        self.lock().pause.clone()
    }

    /// Ends and records what runs; what waits stays in the queue. New dispatches are refused until [`Self::resume`].
    pub fn pause(&self) {
        self.lock().pause.cancel();
    }

    /// Starts again what waits.
    pub fn resume(self: &Arc<Self>) {
        let mut known = self.lock();
        if !known.pause.is_cancelled() {
            return;
        }
        known.pause = CancellationToken::new();
        drop(known);
        self.go_on();
    }

    /// # Errors
    /// 503 while writers are stopped.
    pub(super) fn refuse_while_paused(&self) -> Result<(), Problem> {
        if !self.pause_token().is_cancelled() {
            return Ok(());
        }
        let detail = "No dispatch is started now: a last backup is taken before this machine is replaced.";
        Err(Problem::new(Code::Unavailable, detail).retry_after(15))
    }

    /// How many run, or are being recorded.
    pub fn running(&self) -> usize {
        self.lock().running.len()
    }

    /// Nothing is started any more; what runs is ended and recorded.
    pub async fn close(&self) {
        self.stop.cancel();
        self.runs.close();
        if tokio::time::timeout(ENDING, self.runs.wait()).await.is_err() {
            tracing::warn!("dispatches did not end in time; they are recorded at the next start");
        }
        self.closed.cancel();
        self.tidy().await;
    }
}

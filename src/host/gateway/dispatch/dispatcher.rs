//! Which dispatches there are, who is next, and what becomes of them when this process ends, well or not.
//!
//! Invariants: what is accepted is in the journal until its record is durable; an id means one dispatch; no more run at
//! once than the settings say; what one of them may cost is set aside before it starts.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::journal::{Journal, Kept, Place};
use super::log::Log;
use super::one::{Batch, Dispatch, End, Phase};
use super::queue::{Queue, Turn};
use super::recover::recorded;
use super::request::{Asked, DispatchId, Entry};
use super::run::{self, Surroundings};
use crate::clock;
use crate::host::gateway::blocking::blocking;
use crate::host::gateway::kernel::{Kernel, Reached};
use crate::host::layout::Layout;
use crate::host::records::entry::Interaction;
use crate::host::runner;
use crate::host::settings::Settings;
use crate::host::watched::{self, Message};
use crate::http::problem::{Code, Problem};
use crate::metrics::{DISPATCHES, DISPATCHES_QUEUED, DISPATCHES_RUNNING};

/// Dispatches that wait at most, and those of one sender.
const MOST_QUEUED: usize = 500;
const MOST_QUEUED_OF_ONE: usize = 200;
/// Dispatches that are over and can still be asked for with their text and events.
const MOST_ENDED: usize = 1000;
const MOST_ENDED_BYTES: usize = 32 << 20;
/// How often the journal is rid of what is durable, and it is looked whether a limit has gone.
pub(super) const LOOK: Duration = Duration::from_secs(1);
/// How long the watcher of files may take to hear that a dispatch has ended.
const WATCHING: Duration = Duration::from_secs(2);
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

    fn fingerprint(&self) -> &str {
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
    pub(super) queue: Queue<Arc<Dispatch>>,
    running: usize,
    /// Those that are over, the oldest first.
    ended: VecDeque<Arc<Dispatch>>,
    ended_bytes: usize,
    /// Recorded, and in the journal until that is durable.
    pub(super) recorded: Vec<String>,
}

pub struct Dispatcher {
    pub(super) kernel: Arc<Kernel>,
    pub(super) journal: Journal,
    socket: PathBuf,
    /// Where svc-watch listens.
    watcher: PathBuf,
    known: Mutex<Known>,
    runs: TaskTracker,
    /// The gateway ends: nothing is started any more, and what runs is told to end.
    stop: CancellationToken,
    /// What an earlier process left is known.
    pub(super) recovered: CancellationToken,
}

impl Dispatcher {
    pub fn new(layout: &Layout, kernel: &Arc<Kernel>) -> Arc<Self> {
        Arc::new(Self {
            kernel: Arc::clone(kernel),
            journal: Journal::new(layout.dispatches()),
            socket: layout.owner_sockets().join(runner::SOCKET),
            watcher: layout.gateway_sockets().join(watched::SOCKET),
            known: Mutex::default(),
            runs: TaskTracker::new(),
            stop: CancellationToken::new(),
            recovered: CancellationToken::new(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// 503 while records are read, and when the gateway ends; 429 where a limit is reached or too many wait; 422 where the
    /// id is another request's.
    pub async fn accept(self: &Arc<Self>, asked: Asked) -> Result<Found, Problem> {
        self.ready().await?;
        if let Some(id) = &asked.id
            && let Some(found) = self.find(id).await?
        {
            return same(found, &asked);
        }
        let settings = self.kernel.settings();
        let now = Timestamp::now();
        let first = &asked.entries[0];
        let is_free = settings.agents.is_free(first.model.as_deref());
        let reserved = self.kernel.reserve(&asked.sender_id, &settings, is_free)?;
        let reservation = reserved.map_err(|reached| self.refuse(&asked.sender_id, &reached, now))?;
        let id = asked.id.clone().unwrap_or_else(DispatchId::new);
        let mut reservation = Some(reservation);
        let accepted_at = clock::now_ms();
        let kept = |id: String, entry: &Entry, batch: Option<Place>| Kept {
            version: Kept::VERSION,
            id,
            sender_id: asked.sender_id.clone(),
            entry: entry.clone(),
            batch,
            fingerprint: asked.fingerprint.clone(),
            accepted_at,
            started_at: None,
            ended: None,
        };
        let (found, all) = if asked.is_batch {
            let of = asked.entries.len();
            let ids = (0..of).map(|index| id.of_entry(index)).collect();
            let batch = Batch::new(id.to_string(), asked.fingerprint.clone(), ids);
            // Only the first has its place for certain; the others wait until theirs is known.
            let entry = |(index, entry)| {
                let place = Place { id: id.to_string(), index, of };
                let kept = kept(id.of_entry(index), entry, Some(place));
                Dispatch::new(kept, Some(Arc::clone(&batch)), reservation.take())
            };
            let all: Vec<_> = asked.entries.iter().enumerate().map(entry).collect();
            (Found::Batch(batch), all)
        } else {
            let one = Dispatch::new(kept(id.to_string(), first, None), None, reservation.take());
            (Found::One(Arc::clone(&one)), vec![one])
        };
        {
            let mut known = self.lock();
            if let Some(found) = known.all.get(id.as_str()).cloned() {
                drop(known);
                return same(found, &asked);
            }
            let fits = known.queue.len() + all.len() <= MOST_QUEUED
                && known.queue.len_of(&asked.sender_id) + all.len() <= MOST_QUEUED_OF_ONE;
            if !fits {
                let detail = "Too many dispatches wait already; ask again when some have ended.";
                return Err(Problem::new(Code::RateLimited, detail).retry_after(10));
            }
            known.all.insert(id.to_string(), found.clone());
            for one in &all {
                known.all.insert(one.id().to_owned(), Found::One(Arc::clone(one)));
            }
        }
        self.keep(all.iter().map(|one| one.kept.clone()).collect()).await;
        let mut known = self.lock();
        for one in all {
            known.queue.push(&asked.sender_id, one);
        }
        drop(known);
        self.go_on();
        Ok(found)
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

    fn refuse(&self, sender: &str, reached: &Reached, now: Timestamp) -> Problem {
        tracing::info!(
            sender,
            period = reached.period.word(),
            "a dispatch is refused: a cost limit is reached"
        );
        DISPATCHES.add_one(["limited"]);
        reached.problem(now)
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
            let entries: Vec<Interaction> = found.into_values().collect();
            let ids = entries.iter().map(|one| one.id.clone()).collect();
            let batch = Batch::new(id.to_string(), String::new(), ids);
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

    /// Ends it, wherever it is.
    pub fn cancel(self: &Arc<Self>, found: &Found) {
        for one in self.entries(found) {
            let waited = self.lock().queue.remove(|other| other.id() == one.id());
            one.cancel.cancel();
            if let Some(one) = waited {
                let dispatcher = Arc::clone(self);
                self.runs.spawn(async move {
                    let interaction = run::without_run(&one, "Cancelled", "it was cancelled before it ran");
                    dispatcher.end(&one, interaction, None).await;
                });
            }
        }
    }

    /// Starts whoever may go.
    pub(super) fn go_on(self: &Arc<Self>) {
        while let Some(one) = self.next() {
            let dispatcher = Arc::clone(self);
            self.runs.spawn(async move {
                dispatcher.run(&one).await;
                dispatcher.lock().running -= 1;
                dispatcher.go_on();
            });
        }
        let known = self.lock();
        DISPATCHES_RUNNING.set([], known.running as f64);
        DISPATCHES_QUEUED.set([], known.queue.len() as f64);
    }

    fn next(self: &Arc<Self>) -> Option<Arc<Dispatch>> {
        let settings = self.kernel.settings();
        let mut known = self.lock();
        if self.stop.is_cancelled() || known.running >= settings.agents.concurrency {
            return None;
        }
        let one = known.queue.pop(|one| self.turn(one, &settings))?;
        known.running += 1;
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
        self.keep(vec![Kept { started_at: Some(started_at), ..one.kept.clone() }]).await;
        let around = Surroundings {
            kernel: &self.kernel,
            socket: &self.socket,
            stop: &self.stop,
            settings: &settings.agents,
        };
        let (interaction, text) = run::run(&around, one).await;
        self.tell_watcher(one).await;
        self.end(one, interaction, text).await;
    }

    /// Tool calls that its agent left open are over. Without a watcher there are none.
    async fn tell_watcher(&self, one: &Dispatch) {
        let (socket, message) = (self.watcher.clone(), Message::dispatch_end(one.id()));
        let told = tokio::task::spawn_blocking(move || watched::tell(&socket, &message, WATCHING));
        if let Ok(Err(error)) = told.await {
            tracing::debug!(%error, "svc-watch did not hear that a dispatch has ended");
        }
    }

    /// Its turn came, and the limit had been reached: there is no interaction, as with any dispatch that is refused.
    fn refused(&self, one: &Arc<Dispatch>, reached: &Reached) {
        DISPATCHES.add_one(["limited"]);
        let refused = Some(reached.period.reached());
        one.end(End { phase: Phase::Refused, interaction: None, text: None, refused });
        self.journal.remove(one.id());
        self.remember(one);
    }

    async fn end(&self, one: &Arc<Dispatch>, interaction: Interaction, text: Option<String>) {
        self.keep(vec![Kept { ended: Some(interaction.clone()), ..one.kept.clone() }]).await;
        for warning in self.kernel.record(&interaction) {
            one.tell("warning", &warning.shown());
        }
        self.lock().recorded.push(one.id().to_owned());
        let phase = interaction.status.into();
        DISPATCHES.add_one([if phase == Phase::Success { "success" } else { "error" }]);
        one.end(End { phase, interaction: Some(interaction), text, refused: None });
        self.remember(one);
    }

    /// For whoever asks later; the oldest are forgotten.
    pub(super) fn remember(&self, one: &Arc<Dispatch>) {
        let mut known = self.lock();
        known.ended_bytes += one.bytes();
        known.ended.push_back(Arc::clone(one));
        while known.ended.len() > MOST_ENDED || known.ended_bytes > MOST_ENDED_BYTES {
            let Some(oldest) = known.ended.pop_front() else { break };
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
    async fn keep(&self, all: Vec<Kept>) {
        let journal = self.journal.clone();
        let written = blocking(move || all.iter().try_for_each(|kept| journal.write(kept))).await;
        if written.is_err() {
            tracing::warn!("a dispatch is not in the journal: after a crash it would be forgotten");
        }
    }

    /// Nothing is started any more; what runs is ended and recorded.
    pub async fn close(&self) {
        self.stop.cancel();
        self.runs.close();
        if tokio::time::timeout(ENDING, self.runs.wait()).await.is_err() {
            tracing::warn!("dispatches did not end in time; they are recorded at the next start");
        }
        self.tidy().await;
    }
}

fn same(found: Found, asked: &Asked) -> Result<Found, Problem> {
    // Of one that is known by its record alone, the request is not.
    if found.fingerprint().is_empty() || found.fingerprint() == asked.fingerprint {
        return Ok(found);
    }
    let detail = "This id is another dispatch's; a new one needs an id of its own.";
    Err(Problem::new(Code::IdempotencyMismatch, detail))
}

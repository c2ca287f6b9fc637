//! One dispatch and one batch, as they are known while they wait and run, and for a while after.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::event_log::Log;
use super::journal::{Kept, Place};
use crate::clock::rfc3339_ms;
use crate::host::agents::kernel::Reservation;
use crate::host::audit::protocol::SeenCalls;
use crate::host::records::entry::{Interaction, Status};

/// How far it has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Queued,
    Running,
    Success,
    Error,
    /// An entry of a batch that found a limit reached when its turn came: it never ran.
    Refused,
}

impl Phase {
    pub const WORDS: [&str; 5] = ["queued", "running", "success", "error", "refused"];

    fn word(self) -> &'static str {
        Self::WORDS[self as usize]
    }

    pub fn is_over(self) -> bool {
        !matches!(self, Self::Queued | Self::Running)
    }
}

impl From<Status> for Phase {
    fn from(status: Status) -> Self {
        match status {
            Status::Success => Self::Success,
            Status::Error => Self::Error,
        }
    }
}

/// What it came to.
#[derive(Debug, Clone)]
pub struct End {
    pub phase: Phase,
    pub interaction: Option<Interaction>,
    /// What the agent said last.
    pub text: Option<String>,
    /// Why it never ran.
    pub refused: Option<&'static str>,
}

struct State {
    phase: Phase,
    started_at: Option<Timestamp>,
    /// As its agent names it.
    conversation: Option<String>,
    end: Option<End>,
    /// Its tool calls that may have changed files.
    seen: SeenCalls,
    /// Kept until it is recorded.
    reservation: Option<Reservation>,
}

/// A dispatch.
pub struct Dispatch {
    pub kept: Kept,
    pub log: Log,
    pub batch: Option<Arc<Batch>>,
    pub cancel: CancellationToken,
    /// Cancelled when the journal has it.
    pub is_kept: CancellationToken,
    state: Mutex<State>,
    is_safe: AtomicBool,
}

/// Dispatches that were asked for together.
pub struct Batch {
    pub id: String,
    pub fingerprint: String,
    pub entries: Vec<String>,
    pub log: Log,
    /// Cancelled when the journal has it.
    pub is_kept: CancellationToken,
    left: AtomicUsize,
}

impl Dispatch {
    pub fn new(kept: Kept, batch: Option<Arc<Batch>>, reservation: Option<Reservation>) -> Arc<Self> {
        let state = State {
            phase: Phase::Queued,
            started_at: None,
            conversation: None,
            end: None,
            seen: SeenCalls::default(),
            reservation,
        };
        let dispatch = Arc::new(Self {
            kept,
            log: Log::default(),
            batch,
            cancel: CancellationToken::new(),
            is_kept: CancellationToken::new(),
            state: Mutex::new(state),
            is_safe: AtomicBool::new(false),
        });
        dispatch.tell("accepted", &dispatch.shown());
        dispatch
    }

    /// One that is known by its record alone.
    pub fn ended(interaction: Interaction, kept: Kept, batch: Option<Arc<Batch>>) -> Arc<Self> {
        let dispatch = Self::new(kept, batch, None);
        dispatch.is_kept.cancel();
        let phase = interaction.status.into();
        dispatch.end(End { phase, interaction: Some(interaction), text: None, refused: None });
        dispatch.make_safe();
        dispatch
    }

    /// Its record is durable, or there is none to come.
    pub fn make_safe(&self) {
        self.is_safe.store(true, Ordering::Release);
    }

    pub fn is_safe(&self) -> bool {
        self.is_safe.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn id(&self) -> &str {
        &self.kept.id
    }

    pub fn phase(&self) -> Phase {
        self.lock().phase
    }

    pub fn has_reservation(&self) -> bool {
        self.lock().reservation.is_some()
    }

    pub fn set_aside(&self, reservation: Reservation) {
        self.lock().reservation = Some(reservation);
    }

    /// Its agent has a conversation by this name.
    pub fn converse(&self, conversation: &str) {
        self.lock().conversation = Some(conversation.to_owned());
    }

    /// Its agent's output has a tool call that may change files; `is_by_id` where the program's hooks have the same ids.
    pub fn saw(&self, call: &str, is_by_id: bool) {
        let mut state = self.lock();
        state.seen.is_by_id = is_by_id;
        state.seen.add(call);
    }

    pub fn take_seen(&self) -> SeenCalls {
        std::mem::take(&mut self.lock().seen)
    }

    /// Whether it is in the conversation that another is to be in.
    pub fn is_in_conversation_of(&self, other: &Self) -> bool {
        let Some(wanted) = &other.kept.entry.conversation_id else { return false };
        self.kept.entry.conversation_id.as_ref() == Some(wanted)
            || self.lock().conversation.as_ref() == Some(wanted)
    }

    pub fn begin(&self, at: Timestamp) {
        let mut state = self.lock();
        (state.phase, state.started_at) = (Phase::Running, Some(at));
    }

    /// It is over and recorded; what was set aside for it is free again.
    pub fn end(&self, end: End) {
        let mut state = self.lock();
        state.phase = end.phase;
        state.end = Some(end);
        let reservation = state.reservation.take();
        drop(state);
        drop(reservation);
        self.push("result", &self.shown(), true);
        if let Some(batch) = &self.batch
            && batch.left.fetch_sub(1, Ordering::AcqRel) == 1
        {
            batch.log.push("done", &json!({ "batchId": batch.id, "entries": batch.entries.len() }), true);
        }
    }

    /// An event, for its own listeners and for those of its batch.
    pub fn tell(&self, kind: &str, data: &Value) {
        self.push(kind, data, false);
    }

    fn push(&self, kind: &str, data: &Value, is_last: bool) {
        self.log.push(kind, data, is_last);
        if let (Some(batch), Some(Place { index, .. })) = (&self.batch, &self.kept.batch) {
            let mut data = data.clone();
            if let Value::Object(members) = &mut data {
                members.insert("index".to_owned(), (*index).into());
            }
            batch.log.push(kind, &data, false);
        }
    }

    /// As it is told to its owner.
    pub fn shown(&self) -> Value {
        let state = self.lock();
        let end = state.end.as_ref();
        let entry = &self.kept.entry;
        let interaction = end.and_then(|end| end.interaction.as_ref());
        json!({
            "id": self.kept.id,
            "status": state.phase.word(),
            "senderId": self.kept.sender_id,
            "agentName": entry.agent_name,
            "model": interaction.map(|one| &one.model).or(entry.model.as_ref()),
            "conversationId": interaction.map(|one| &one.conversation_id).or(entry.conversation_id.as_ref()),
            "batchId": self.kept.batch.as_ref().map(|batch| &batch.id),
            "acceptedAt": rfc3339_ms(self.kept.accepted_at),
            "startedAt": state.started_at.map(rfc3339_ms),
            "text": end.and_then(|end| end.text.as_ref()),
            "refused": end.and_then(|end| end.refused),
            "interaction": interaction,
        })
    }

    /// What is kept of it in memory, about.
    pub fn bytes(&self) -> usize {
        self.log.bytes() + self.kept.entry.prompt.len()
    }
}

impl Batch {
    /// `left` of its entries are not over yet, as far as this process has to do with them.
    pub fn new(id: String, fingerprint: String, entries: Vec<String>, left: usize) -> Arc<Self> {
        let (log, is_kept, left) = (Log::default(), CancellationToken::new(), AtomicUsize::new(left));
        Arc::new(Self { id, fingerprint, entries, log, is_kept, left })
    }

    pub fn is_over(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
}

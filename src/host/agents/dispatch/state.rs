//! In-memory dispatch and batch state.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::event_log::EventLog;
use super::journal::{BatchPosition, JournalEntry};
use super::request::{DispatchId, MAX_BATCH_ENTRIES, PromptEntry};
use crate::agents::adapters::launch::to_session_id;
use crate::agents::kernel::Reservation;
use crate::audit::protocol::SeenCalls;
use crate::records::entry::{Interaction, ResultStatus};
use crate::records::money::Dollars;
use svc_base::clock::rfc3339_ms;

/// Dispatch phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum Phase {
    Queued,
    Running,
    Success,
    Error,
    /// A batch entry that never ran because a cost limit was reached first.
    Refused,
}

impl Phase {
    pub const NAMES: &'static [&'static str] = <Self as strum::VariantNames>::VARIANTS;

    fn as_str(self) -> &'static str {
        self.into()
    }

    pub fn has_ended(self) -> bool {
        !matches!(self, Self::Queued | Self::Running)
    }
}

impl From<ResultStatus> for Phase {
    fn from(status: ResultStatus) -> Self {
        match status {
            ResultStatus::Success => Self::Success,
            ResultStatus::Error => Self::Error,
        }
    }
}

/// How a dispatch ended.
#[derive(Debug, Clone)]
pub struct DispatchResult {
    pub phase: Phase,
    pub interaction: Option<Interaction>,
    /// The agent's final text.
    pub text: Option<String>,
    /// The reason for [`Phase::Refused`].
    pub refused: Option<&'static str>,
}

struct DispatchState {
    phase: Phase,
    started_at: Option<Timestamp>,
    /// Session id of the agent-reported conversation.
    session_id: Option<String>,
    result: Option<DispatchResult>,
    /// Tool calls that may have changed files.
    seen: SeenCalls,
    /// Held until the dispatch is recorded.
    reservation: Option<Reservation>,
}

/// A prompt for an agent, from acceptance to result, with its event log.
pub struct Dispatch {
    /// The journal entry written on acceptance, without a start time, result or refusal.
    pub accepted: JournalEntry,
    pub log: EventLog,
    pub batch: Option<Arc<Batch>>,
    /// Session id of the requested conversation. We match conversations by session id because several conversation ids
    /// can map to the same Claude Code session. For other agents, these are separate conversations that end up waiting
    /// for each other unnecessarily.
    session_id: Option<String>,
    pub cancel: CancellationToken,
    /// Cancelled once the dispatch's journal write has succeeded or failed.
    pub journaled: CancellationToken,
    state: Mutex<DispatchState>,
    is_durable: AtomicBool,
}

/// Dispatches submitted in one request.
pub struct Batch {
    pub id: String,
    pub fingerprint: String,
    /// Ids of the batch's dispatches.
    pub entry_ids: Vec<String>,
    pub log: EventLog,
    /// Cancelled once the batch's journal write has succeeded or failed.
    pub journaled: CancellationToken,
    remaining: AtomicUsize,
}

impl Dispatch {
    pub fn new(
        accepted: JournalEntry,
        batch: Option<Arc<Batch>>,
        reservation: Option<Reservation>,
    ) -> Arc<Self> {
        Self::with_log(accepted, batch, reservation, EventLog::default())
    }

    fn with_log(
        accepted: JournalEntry,
        batch: Option<Arc<Batch>>,
        reservation: Option<Reservation>,
        log: EventLog,
    ) -> Arc<Self> {
        let state = DispatchState {
            phase: Phase::Queued,
            started_at: None,
            session_id: None,
            result: None,
            seen: SeenCalls::default(),
            reservation,
        };
        let session_id = accepted.entry.conversation_id.as_deref().map(to_session_id);
        let dispatch = Arc::new(Self {
            accepted,
            log,
            batch,
            session_id,
            cancel: CancellationToken::new(),
            journaled: CancellationToken::new(),
            state: Mutex::new(state),
            is_durable: AtomicBool::new(false),
        });
        dispatch.publish("accepted", &dispatch.to_json());
        dispatch
    }

    /// Restores a dispatch from its record.
    pub fn from_record(interaction: Interaction, batch: Option<Arc<Batch>>) -> Arc<Self> {
        let position = interaction.batch_id.clone().map(|id| {
            let index = parse_entry_index(&interaction.id);
            BatchPosition { id, index, size: interaction.batch_size.unwrap_or_default() }
        });
        // Older records lack acceptance and start times. Estimate both as the end time minus the duration.
        let duration =
            SignedDuration::from_millis(i64::try_from(interaction.duration_ms).unwrap_or(i64::MAX));
        let run_start = interaction.timestamp.checked_sub(duration).unwrap_or(interaction.timestamp);
        let is_older_run = interaction.accepted_at.is_none() && interaction.duration_ms > 0;
        let started_at = interaction.started_at.or(is_older_run.then_some(run_start));
        let accepted = JournalEntry {
            version: JournalEntry::FORMAT_VERSION,
            id: interaction.id.clone(),
            sender_id: interaction.sender_id.clone(),
            entry: PromptEntry {
                agent_name: interaction.agent_name.clone(),
                model: Some(interaction.model.clone()),
                conversation_id: Some(interaction.conversation_id.clone()),
                prompt: String::new(),
                deadline_seconds: 0,
            },
            batch: position,
            fingerprint: interaction.fingerprint.clone().unwrap_or_default(),
            accepted_at: interaction.accepted_at.unwrap_or(run_start),
            started_at: None,
            ended: None,
            refused: None,
        };
        let dispatch = Self::with_log(accepted, batch, None, EventLog::restored());
        dispatch.journaled.cancel();
        if let Some(at) = started_at {
            dispatch.mark_running(at);
        }
        let phase = interaction.status.into();
        dispatch.end(DispatchResult { phase, interaction: Some(interaction), text: None, refused: None });
        dispatch.mark_durable();
        dispatch
    }

    /// Marks the dispatch as durable: its record is on disk, or it needs none.
    pub fn mark_durable(&self) {
        self.is_durable.store(true, Ordering::Release);
    }

    pub fn is_durable(&self) -> bool {
        self.is_durable.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, DispatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn id(&self) -> &str {
        &self.accepted.id
    }

    pub fn phase(&self) -> Phase {
        self.lock().phase
    }

    pub fn has_reservation(&self) -> bool {
        self.lock().reservation.is_some()
    }

    /// The amount reserved for this dispatch.
    pub fn reserved_amount(&self) -> Dollars {
        self.lock().reservation.as_ref().map_or(Dollars::ZERO, Reservation::amount)
    }

    pub fn set_reservation(&self, reservation: Reservation) {
        self.lock().reservation = Some(reservation);
    }

    /// Sets the conversation id reported by the agent.
    pub fn set_conversation(&self, conversation: &str) {
        self.lock().session_id = Some(to_session_id(conversation));
    }

    /// Adds a tool call that may change files. `has_shared_call_ids` is set if the agent's hooks use the same call ids.
    pub fn add_seen_call(&self, call: &str, has_shared_call_ids: bool) {
        let mut state = self.lock();
        state.seen.has_shared_call_ids = has_shared_call_ids;
        state.seen.add(call);
    }

    pub fn take_seen_calls(&self) -> SeenCalls {
        std::mem::take(&mut self.lock().seen)
    }

    /// Whether this dispatch belongs to the conversation requested by `other`.
    pub fn is_in_conversation_of(&self, other: &Self) -> bool {
        let Some(requested) = &other.session_id else { return false };
        self.session_id.as_ref() == Some(requested) || self.lock().session_id.as_ref() == Some(requested)
    }

    /// When the run began; set even if the agent failed to start.
    pub fn started_at(&self) -> Option<Timestamp> {
        self.lock().started_at
    }

    pub fn mark_running(&self, at: Timestamp) {
        let mut state = self.lock();
        (state.phase, state.started_at) = (Phase::Running, Some(at));
    }

    /// Stores the result, releases the reservation, and closes the event log.
    pub fn end(&self, result: DispatchResult) {
        let mut state = self.lock();
        state.phase = result.phase;
        state.result = Some(result);
        let reservation = state.reservation.take();
        drop(state);
        drop(reservation);
        self.push("result", &self.to_json(), true);
        if let Some(batch) = &self.batch
            && batch.remaining.fetch_sub(1, Ordering::AcqRel) == 1
        {
            batch.log.push("done", &json!({ "batchId": batch.id, "entries": batch.entry_ids.len() }), true);
        }
    }

    /// Publishes an event to listeners of the dispatch and its batch.
    pub fn publish(&self, kind: &str, data: &Value) {
        self.push(kind, data, false);
    }

    fn push(&self, kind: &str, data: &Value, is_last: bool) {
        self.log.push(kind, data, is_last);
        if let (Some(batch), Some(BatchPosition { index, .. })) = (&self.batch, &self.accepted.batch) {
            let mut data = data.clone();
            if let Value::Object(members) = &mut data {
                members.insert("index".to_owned(), (*index).into());
            }
            batch.log.push(kind, &data, false);
        }
    }

    /// API representation of the dispatch.
    pub fn to_json(&self) -> Value {
        let state = self.lock();
        let result = state.result.as_ref();
        let entry = &self.accepted.entry;
        let interaction = result.and_then(|result| result.interaction.as_ref());
        json!({
            "id": self.accepted.id,
            "status": state.phase.as_str(),
            "senderId": self.accepted.sender_id,
            "agentName": entry.agent_name,
            "model": interaction.map(|interaction| &interaction.model).or(entry.model.as_ref()),
            "conversationId": interaction.map(|interaction| &interaction.conversation_id).or(entry.conversation_id.as_ref()),
            "batchId": self.accepted.batch.as_ref().map(|batch| &batch.id),
            "acceptedAt": rfc3339_ms(self.accepted.accepted_at),
            "startedAt": state.started_at.map(rfc3339_ms),
            "text": result.and_then(|result| result.text.as_ref()),
            "refused": result.and_then(|result| result.refused),
            "interaction": interaction,
        })
    }

    /// Estimates the dispatch's memory use from its events and prompt.
    pub fn bytes(&self) -> usize {
        self.log.bytes() + self.accepted.entry.prompt.len()
    }
}

impl Batch {
    /// Creates a batch with `remaining` unfinished entries.
    pub fn new(id: String, fingerprint: String, entry_ids: Vec<String>, remaining: usize) -> Arc<Self> {
        Self::with_log(id, fingerprint, entry_ids, remaining, EventLog::default())
    }

    fn with_log(
        id: String,
        fingerprint: String,
        entry_ids: Vec<String>,
        remaining: usize,
        log: EventLog,
    ) -> Arc<Self> {
        let (journaled, remaining) = (CancellationToken::new(), AtomicUsize::new(remaining));
        Arc::new(Self { id, fingerprint, entry_ids, log, journaled, remaining })
    }

    /// Restores a batch from its entries' records. Some entries, such as refused ones, may not have one.
    pub fn from_records(id: &DispatchId, interactions: &[Interaction]) -> Arc<Self> {
        let recorded_size = interactions.iter().find_map(|interaction| interaction.batch_size);
        // Owners can edit their records, so don't trust the stored size.
        let size = recorded_size.map_or(interactions.len(), |size| size.min(MAX_BATCH_ENTRIES));
        let ids = (0..size).map(|index| id.entry_id(index)).collect();
        let fingerprint = interactions.iter().find_map(|interaction| interaction.fingerprint.clone());
        let fingerprint = fingerprint.unwrap_or_default();
        Self::with_log(id.to_string(), fingerprint, ids, interactions.len(), EventLog::restored())
    }

    pub fn has_ended(&self) -> bool {
        self.remaining.load(Ordering::Acquire) == 0
    }
}

/// Parses the index from a batch entry id; 0 if there is none.
pub fn parse_entry_index(id: &str) -> usize {
    id.rsplit_once('.').and_then(|(_, index)| index.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dispatch(conversation_id: Option<&str>) -> Arc<Dispatch> {
        let mut accepted = JournalEntry::example("d");
        accepted.entry.conversation_id = conversation_id.map(str::to_owned);
        Dispatch::new(accepted, None, None)
    }

    #[test]
    fn restored_dispatch_uses_recorded_times() {
        let restore = |times: Value| {
            let mut record = json!({
                "version": 1, "id": "d", "timestamp": "2026-11-22T10:00:09.000Z", "senderId": "u",
                "conversationId": "c", "model": "m", "agentName": "a", "tokensIn": 0, "tokensOut": 0, "cost": 0,
                "durationMs": 4000, "tools": [], "status": "success", "batch": false,
            });
            record.as_object_mut().unwrap().extend(times.as_object().unwrap().clone());
            Dispatch::from_record(serde_json::from_value(record).unwrap(), None).to_json()
        };
        let (accepted, started) = ("2026-11-22T10:00:01.000Z", "2026-11-22T10:00:05.000Z");
        for (times, expected_accepted, expected_started) in [
            (json!({ "acceptedAt": accepted, "startedAt": started }), accepted, json!(started)),
            (json!({ "acceptedAt": accepted }), accepted, Value::Null),
            (json!({}), started, json!(started)),
        ] {
            let restored = restore(times);
            assert_eq!(restored["acceptedAt"], expected_accepted, "{restored}");
            assert_eq!(restored["startedAt"], expected_started, "{restored}");
            assert_eq!(restored["status"], "success");
        }
    }

    #[test]
    fn conversations_are_compared_by_session_id() {
        let session = to_session_id("telegram:7");
        for (running, requested, is_same) in [
            ("telegram:7", &*session, true),
            (&*session.to_uppercase(), "telegram:7", true),
            ("telegram:7", "telegram:8", false),
        ] {
            let other = dispatch(Some(requested));
            assert_eq!(dispatch(Some(running)).is_in_conversation_of(&other), is_same, "{requested}");
            let reported = dispatch(None);
            reported.set_conversation(running);
            assert_eq!(reported.is_in_conversation_of(&other), is_same, "{requested}");
        }
        assert!(!dispatch(None).is_in_conversation_of(&dispatch(None)));
    }
}

//! Request admission: checks the id, cost limits and queue capacity, then writes the dispatches to the journal.
//!
//! Once registered, a dispatch is queued even if the caller disconnects.

use std::sync::Arc;

use jiff::Timestamp;

use super::dispatcher::{DispatchTarget, Dispatcher};
use super::journal::{BatchPosition, JournalEntry};
use super::request::{DispatchId, DispatchRequest, PromptEntry};
use super::state::{Batch, Dispatch};
use crate::agents::kernel::{LimitReached, Reservation};
use svc_base::clock;
use svc_base::metrics::DISPATCHES;
use svc_http::problem::{Code, Problem};

/// Maximum number of queued dispatches.
const MAX_QUEUED_DISPATCHES: usize = 500;
/// Maximum number of queued dispatches per sender.
const MAX_QUEUED_PER_SENDER: usize = 200;
/// Maximum total size of queued prompts, in bytes.
const MAX_QUEUED_BYTES: usize = 64 << 20;

impl Dispatcher {
    /// Accepts a request. Returns once the journal write has succeeded or failed.
    ///
    /// # Errors
    /// 503 while the records or the journal are being read, while dispatches are paused for a final backup, and at
    /// shutdown; 429 when a limit is reached or the queue is full; 422 when the id belongs to a different request; 500
    /// when the records cannot be read.
    pub async fn accept(self: &Arc<Self>, request: DispatchRequest) -> Result<DispatchTarget, Problem> {
        self.wait_until_ready().await?;
        if let Some(id) = &request.id
            && let Some(original) = self.find(id).await?
        {
            return resolve_retried_request(original, &request).await;
        }
        self.refuse_while_paused()?;
        let settings = self.kernel.settings();
        let reserved = self.kernel.reserve(&request.sender_id, &settings)?;
        let reservation = reserved.map_err(|reached| refuse_over_cost_limit(&request.sender_id, &reached))?;
        let id = request.id.clone().unwrap_or_else(DispatchId::generate);
        let (target, dispatches) = build_dispatches(&id, &request, reservation);
        let existing = self.register(&id, &target, &dispatches, &request.sender_id)?;
        if let Some(existing) = existing {
            return resolve_retried_request(existing, &request).await;
        }
        // Journal and queue the dispatches in a separate task, which finishes even if the caller disconnects.
        let (dispatcher, sender) = (Arc::clone(self), request.sender_id.clone());
        let queued = self.runs.spawn(async move {
            let entries = dispatches.iter().map(|dispatch| dispatch.accepted.clone()).collect();
            dispatcher.write_journal(entries).await;
            dispatcher.enqueue(&sender, dispatches);
        });
        queued.await.map_err(|error| Problem::internal(&error))?;
        Ok(target)
    }

    /// Registers the dispatches, or returns the existing target if the id is already taken.
    ///
    /// # Errors
    /// 429 if the queue is full.
    fn register(
        &self,
        id: &DispatchId,
        target: &DispatchTarget,
        dispatches: &[Arc<Dispatch>],
        sender: &str,
    ) -> Result<Option<DispatchTarget>, Problem> {
        let mut table = self.lock();
        if let Some(existing) = table.targets.get(id.as_str()) {
            return Ok(Some(existing.clone()));
        }
        let (mut count, mut sender_count) = (dispatches.len(), dispatches.len());
        let mut bytes: usize = dispatches.iter().map(|dispatch| dispatch.accepted.entry.prompt.len()).sum();
        for queued in table.queue.iter().chain(&table.unjournaled) {
            count += 1;
            sender_count += usize::from(queued.accepted.sender_id == sender);
            bytes += queued.accepted.entry.prompt.len();
        }
        if count > MAX_QUEUED_DISPATCHES || sender_count > MAX_QUEUED_PER_SENDER || bytes > MAX_QUEUED_BYTES {
            let detail = "Too many dispatches are queued; retry when some of them have started.";
            return Err(Problem::new(Code::RateLimited, detail).retry_after(10));
        }
        table.targets.insert(id.to_string(), target.clone());
        for dispatch in dispatches {
            table.targets.insert(dispatch.id().to_owned(), DispatchTarget::Dispatch(Arc::clone(dispatch)));
        }
        table.unjournaled.extend(dispatches.iter().cloned());
        Ok(None)
    }

    /// Queues dispatches after their journal write, whether or not it succeeded.
    fn enqueue(self: &Arc<Self>, sender: &str, dispatches: Vec<Arc<Dispatch>>) {
        let mut table = self.lock();
        table.unjournaled.retain(|dispatch| !dispatches.iter().any(|other| Arc::ptr_eq(dispatch, other)));
        for dispatch in dispatches {
            dispatch.journaled.cancel();
            if let Some(batch) = &dispatch.batch {
                batch.journaled.cancel();
            }
            table.queue.push(sender, dispatch);
        }
        drop(table);
        self.start_ready();
    }
}

fn build_dispatches(
    id: &DispatchId,
    request: &DispatchRequest,
    reservation: Reservation,
) -> (DispatchTarget, Vec<Arc<Dispatch>>) {
    let accepted_at = clock::now_ms();
    let journal_entry = |id: String, entry: &PromptEntry, batch: Option<BatchPosition>| JournalEntry {
        version: JournalEntry::FORMAT_VERSION,
        id,
        sender_id: request.sender_id.clone(),
        entry: entry.clone(),
        batch,
        fingerprint: request.fingerprint.clone(),
        accepted_at,
        started_at: None,
        ended: None,
        refused: None,
    };
    if !request.is_batch {
        let dispatch =
            Dispatch::new(journal_entry(id.to_string(), &request.entries[0], None), None, Some(reservation));
        return (DispatchTarget::Dispatch(Arc::clone(&dispatch)), vec![dispatch]);
    }
    let size = request.entries.len();
    let ids = (0..size).map(|index| id.entry_id(index)).collect();
    let batch = Batch::new(id.to_string(), request.fingerprint.clone(), ids, size);
    // Only the first entry has a reservation; the others acquire theirs while queued.
    let mut reservation = Some(reservation);
    let build_dispatch = |(index, entry)| {
        let position = BatchPosition { id: id.to_string(), index, size };
        Dispatch::new(
            journal_entry(id.entry_id(index), entry, Some(position)),
            Some(Arc::clone(&batch)),
            reservation.take(),
        )
    };
    let dispatches = request.entries.iter().enumerate().map(build_dispatch).collect();
    (DispatchTarget::Batch(batch), dispatches)
}

/// Logs and counts a request refused by a cost limit, and returns the problem.
fn refuse_over_cost_limit(sender: &str, reached: &LimitReached) -> Problem {
    tracing::info!(sender, period = reached.period.as_str(), "dispatch refused: cost limit reached");
    DISPATCHES.add_one(["limited"]);
    reached.problem(Timestamp::now())
}

/// Waits for the original request to be accepted and returns its target.
///
/// # Errors
/// 422 if the original request was different.
async fn resolve_retried_request(
    original: DispatchTarget,
    request: &DispatchRequest,
) -> Result<DispatchTarget, Problem> {
    // Records from earlier releases have no fingerprint.
    if !original.fingerprint().is_empty() && original.fingerprint() != request.fingerprint {
        let detail = "This id belongs to another dispatch; use a new id.";
        return Err(Problem::new(Code::IdempotencyMismatch, detail));
    }
    original.wait_until_journaled().await;
    Ok(original)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agents::bridge_tokens::BridgeTokens;
    use crate::agents::kernel::Kernel;
    use crate::system::layout::Layout;

    #[test]
    fn register_counts_new_prompt_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let kernel = Arc::new(Kernel::new(&layout).unwrap());
        let dispatcher = Dispatcher::new(&layout, &kernel, &Arc::new(BridgeTokens::default()));
        let register = |id: &str, prompt_bytes: usize| {
            let entry = PromptEntry {
                agent_name: "a".to_owned(),
                model: None,
                conversation_id: None,
                prompt: "x".repeat(prompt_bytes),
                deadline_seconds: 60,
            };
            let accepted = JournalEntry {
                version: JournalEntry::FORMAT_VERSION,
                id: id.to_owned(),
                sender_id: "u".to_owned(),
                entry,
                batch: None,
                fingerprint: "f".to_owned(),
                accepted_at: clock::now_ms(),
                started_at: None,
                ended: None,
                refused: None,
            };
            let dispatch = Dispatch::new(accepted, None, None);
            let target = DispatchTarget::Dispatch(Arc::clone(&dispatch));
            dispatcher.register(&id.parse().unwrap(), &target, &[dispatch], "u").is_ok()
        };
        assert!(register("first", MAX_QUEUED_BYTES - 1));
        assert!(!register("second", 2), "the second prompt exceeds the limit, but was accepted");
        assert!(register("third", 1));
        kernel.close();
    }
}

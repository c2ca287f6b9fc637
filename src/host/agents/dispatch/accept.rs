//! How a request becomes dispatches that wait: its id, its place below the limits, its room, and the journal.
//!
//! Once it is known, it is brought into the queue whatever becomes of the caller.

use std::sync::Arc;

use jiff::Timestamp;

use super::dispatcher::{Dispatcher, Found};
use super::journal::{Kept, Place};
use super::request::{Asked, DispatchId, Entry};
use super::state::{Batch, Dispatch};
use crate::clock;
use crate::host::agents::kernel::{Reached, Reservation};
use crate::http::problem::{Code, Problem};
use crate::metrics::DISPATCHES;

/// Dispatches that wait at most, those of one sender, and bytes of their prompts.
const MOST_QUEUED: usize = 500;
const MOST_QUEUED_OF_ONE: usize = 200;
const MOST_QUEUED_BYTES: usize = 64 << 20;

impl Dispatcher {
    /// # Errors
    /// 503 while records are read, and when the gateway ends; 429 where a limit is reached or too many wait; 422 where the
    /// id is another request's.
    pub async fn accept(self: &Arc<Self>, asked: Asked) -> Result<Found, Problem> {
        self.ready().await?;
        if let Some(id) = &asked.id
            && let Some(found) = self.find(id).await?
        {
            return same(found, &asked).await;
        }
        self.refuse_while_paused()?;
        let settings = self.kernel.settings();
        let is_free = settings.agents.is_free(asked.entries[0].model.as_deref());
        let reserved = self.kernel.reserve(&asked.sender_id, &settings, is_free)?;
        let reservation = reserved.map_err(|reached| refused(&asked.sender_id, &reached))?;
        let id = asked.id.clone().unwrap_or_else(DispatchId::generate);
        let (found, all) = made(&id, &asked, reservation);
        let known = self.enter(&id, &found, &all, &asked.sender_id)?;
        if let Some(known) = known {
            return same(known, &asked).await;
        }
        // In a task of its own: a caller that hangs up would leave it half-way.
        let (dispatcher, sender) = (Arc::clone(self), asked.sender_id.clone());
        let entered = self.runs.spawn(async move {
            dispatcher.keep(all.iter().map(|one| one.kept.clone()).collect()).await;
            dispatcher.line_up(&sender, all);
        });
        entered.await.map_err(|error| Problem::internal(&error))?;
        Ok(found)
    }

    /// It is known from now on; what was known by this id already comes back.
    fn enter(
        &self,
        id: &DispatchId,
        found: &Found,
        all: &[Arc<Dispatch>],
        sender: &str,
    ) -> Result<Option<Found>, Problem> {
        let mut known = self.lock();
        if let Some(found) = known.all.get(id.as_str()) {
            return Ok(Some(found.clone()));
        }
        let (mut count, mut of_one, mut bytes) = (all.len(), all.len(), 0);
        for waiting in known.queue.iter().chain(&known.arriving) {
            count += 1;
            of_one += usize::from(waiting.kept.sender_id == sender);
            bytes += waiting.kept.entry.prompt.len();
        }
        if count > MOST_QUEUED || of_one > MOST_QUEUED_OF_ONE || bytes > MOST_QUEUED_BYTES {
            let detail = "Too many dispatches wait already; ask again when some have ended.";
            return Err(Problem::new(Code::RateLimited, detail).retry_after(10));
        }
        known.all.insert(id.to_string(), found.clone());
        for one in all {
            known.all.insert(one.id().to_owned(), Found::One(Arc::clone(one)));
        }
        known.arriving.extend(all.iter().cloned());
        Ok(None)
    }

    /// They are in the journal, and wait.
    fn line_up(self: &Arc<Self>, sender: &str, all: Vec<Arc<Dispatch>>) {
        let mut known = self.lock();
        known.arriving.retain(|one| !all.iter().any(|other| Arc::ptr_eq(one, other)));
        for one in all {
            one.is_kept.cancel();
            if let Some(batch) = &one.batch {
                batch.is_kept.cancel();
            }
            known.queue.push(sender, one);
        }
        drop(known);
        self.go_on();
    }
}

fn made(id: &DispatchId, asked: &Asked, reservation: Reservation) -> (Found, Vec<Arc<Dispatch>>) {
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
    if !asked.is_batch {
        let one = Dispatch::new(kept(id.to_string(), &asked.entries[0], None), None, Some(reservation));
        return (Found::One(Arc::clone(&one)), vec![one]);
    }
    let of = asked.entries.len();
    let ids = (0..of).map(|index| id.of_entry(index)).collect();
    let batch = Batch::new(id.to_string(), asked.fingerprint.clone(), ids, of);
    // Only the first has its place for certain; the others wait until theirs is known.
    let mut reservation = Some(reservation);
    let entry = |(index, entry)| {
        let place = Place { id: id.to_string(), index, of };
        Dispatch::new(
            kept(id.of_entry(index), entry, Some(place)),
            Some(Arc::clone(&batch)),
            reservation.take(),
        )
    };
    let all = asked.entries.iter().enumerate().map(entry).collect();
    (Found::Batch(batch), all)
}

fn refused(sender: &str, reached: &Reached) -> Problem {
    tracing::info!(sender, period = reached.period.word(), "a dispatch is refused: a cost limit is reached");
    DISPATCHES.add_one(["limited"]);
    reached.problem(Timestamp::now())
}

/// The same request again, once it is certain that it is not forgotten.
async fn same(found: Found, asked: &Asked) -> Result<Found, Problem> {
    // Of one that is known by its record alone, the request is not.
    if !found.fingerprint().is_empty() && found.fingerprint() != asked.fingerprint {
        let detail = "This id is another dispatch's; a new one needs an id of its own.";
        return Err(Problem::new(Code::IdempotencyMismatch, detail));
    }
    found.kept().await;
    Ok(found)
}

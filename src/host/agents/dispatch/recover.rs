//! Restores the dispatches of the previous process: queues those that waited, records those that ran, and prunes the
//! journal.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::dispatcher::{DispatchTarget, Dispatcher, MAINTENANCE_INTERVAL};
use super::journal::{JournalEntry, JournalFile};
use super::run;
use super::state::{Batch, Dispatch, DispatchResult};
use crate::audit::protocol;
use crate::audit::protocol::{Message, SeenCalls};
use crate::records::entry::Interaction;
use crate::system::blocking::blocking;
use svc_base::chain::chain;
use svc_base::fsx::FileError;

/// Timeout of making records durable.
const FLUSH_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

impl Dispatcher {
    /// Restores the previous process's dispatches, then prunes the journal and starts queued ones until `stop`.
    pub async fn maintain(self: Arc<Self>, stop: CancellationToken) {
        while self.kernel.ready().await.is_err() {
            if stop.is_cancelled() {
                return;
            }
        }
        let (journal, kernel) = (self.journal.clone(), Arc::clone(&self.kernel));
        let left = blocking(move || {
            let left = journal.read()?;
            let ids: BTreeSet<String> = left
                .iter()
                .flat_map(|accepted| [Some(&accepted.id), accepted.batch.as_ref().map(|b| &b.id)])
                .flatten()
                .cloned()
                .collect();
            let found = if ids.is_empty() { Ok(BTreeMap::new()) } else { kernel.find(&ids) };
            Ok::<_, FileError>((left, found))
        });
        match left.await {
            Ok((left, Ok(found))) => {
                tokio::spawn(end_for_watcher(self.watcher.clone(), started_ids(&left)));
                self.restore(left, &found);
            }
            // It is unknown which of them are recorded: they stay, so that none is recorded twice, until the next
            // start.
            Ok((left, Err(error))) => {
                tracing::error!(left = left.len(), error = %chain(&error), "cannot restore dispatches; they stay in the journal");
            }
            Err(_) => tracing::error!("cannot read the journal of dispatches; its files stay"),
        }
        self.recovered.cancel();
        self.start_ready();
        while stop.run_until_cancelled(tokio::time::sleep(MAINTENANCE_INTERVAL)).await.is_some() {
            self.prune_journal().await;
            self.start_ready();
        }
    }

    fn restore(self: &Arc<Self>, left: Vec<JournalEntry>, found: &BTreeMap<String, Interaction>) {
        let (recorded, left): (Vec<JournalEntry>, Vec<JournalEntry>) =
            left.into_iter().partition(|accepted| found.contains_key(&accepted.id));
        let batches = self.restore_batches(&left, found);
        for accepted in recorded {
            self.journal.remove(&JournalFile::One(accepted.id));
            if let Some(position) = accepted.batch.filter(|position| !batches.contains_key(&position.id)) {
                self.journal.remove(&JournalFile::Batch(position.id));
            }
        }
        let settings = self.kernel.settings();
        for accepted in left {
            let batch = accepted.batch.as_ref().and_then(|position| batches.get(&position.id).cloned());
            let is_first = accepted.batch.as_ref().is_none_or(|position| position.index == 0);
            // It was accepted: the current limits do not apply.
            let waits =
                accepted.started_at.is_none() && accepted.ended.is_none() && accepted.refused.is_none();
            let reservation =
                (waits && is_first).then(|| self.kernel.restore_reservation(&accepted.sender_id, &settings));
            let (started_at, ended, refused) =
                (accepted.started_at, accepted.ended.clone(), accepted.refused);
            let accepted = JournalEntry { started_at: None, ended: None, refused: None, ..accepted };
            let one = Dispatch::new(accepted, batch, reservation);
            one.is_journaled.cancel();
            self.lock().all.insert(one.id().to_owned(), DispatchTarget::One(Arc::clone(&one)));
            if let Some(period) = refused {
                self.end_refused(&one, period);
                continue;
            }
            let interaction = match (ended, started_at) {
                (Some(ended), _) => ended,
                (None, Some(_)) => {
                    let message = "it was cut off: the gateway was killed, or the machine lost its power";
                    let duration_ms = run::elapsed_ms(started_at, Timestamp::now());
                    let reserved = settings.limits.reservation;
                    Interaction { duration_ms, ..run::cut_off(&one, "Interrupted", message, reserved) }
                }
                (None, None) => {
                    self.kernel.note(&format!("dispatch {}: it waits on, after a new start", one.id()));
                    self.lock().queue.push(&one.accepted.sender_id, Arc::clone(&one));
                    continue;
                }
            };
            self.kernel.note(&format!("dispatch {}: recorded after a new start", one.id()));
            if self.kernel.record(&interaction).is_some() {
                self.lock().recorded.push(JournalFile::One(one.id().to_owned()));
            }
            let phase = interaction.status.into();
            one.end(DispatchResult { phase, interaction: Some(interaction), text: None, refused: None });
            self.retain_ended(&one);
        }
    }

    /// Restores the batches of remaining entries; their recorded entries have ended.
    fn restore_batches(
        &self,
        left: &[JournalEntry],
        found: &BTreeMap<String, Interaction>,
    ) -> HashMap<String, Arc<Batch>> {
        let mut batches: HashMap<String, Arc<Batch>> = HashMap::new();
        for (position, accepted) in
            left.iter().filter_map(|accepted| Some((accepted.batch.as_ref()?, accepted)))
        {
            if batches.contains_key(&position.id) {
                continue;
            }
            let ids: Vec<String> =
                (0..position.size).map(|index| format!("{}.{index}", position.id)).collect();
            let ended: Vec<&Interaction> = ids.iter().filter_map(|id| found.get(id)).collect();
            let is_in_batch = |accepted: &&JournalEntry| {
                accepted.batch.as_ref().is_some_and(|other| other.id == position.id)
            };
            let count = ended.len() + left.iter().filter(is_in_batch).count();
            let batch = Batch::new(position.id.clone(), accepted.fingerprint.clone(), ids, count);
            batch.is_journaled.cancel();
            batches.insert(position.id.clone(), Arc::clone(&batch));
            self.lock().all.insert(position.id.clone(), DispatchTarget::Batch(Arc::clone(&batch)));
            for one in ended {
                let one = Dispatch::from_record(one.clone(), Some(Arc::clone(&batch)));
                self.lock().all.insert(one.id().to_owned(), DispatchTarget::One(Arc::clone(&one)));
                self.retain_ended(&one);
            }
        }
        batches
    }

    /// Removes durable dispatches from the journal.
    pub(super) async fn prune_journal(&self) {
        let recorded = std::mem::take(&mut self.lock().recorded);
        if recorded.is_empty() {
            return;
        }
        let (kernel, journal) = (Arc::clone(&self.kernel), self.journal.clone());
        let tidied = tokio::task::spawn_blocking(move || {
            let is_durable = kernel.flush(FLUSH_TIMEOUT);
            if is_durable {
                recorded.iter().for_each(|file| journal.remove(file));
            }
            (is_durable, recorded)
        });
        let Ok((is_durable, recorded)) = tidied.await else { return };
        let mut table = self.lock();
        if !is_durable {
            return table.recorded.extend(recorded);
        }
        for file in recorded {
            if let JournalFile::One(id) = file
                && let Some(DispatchTarget::One(one)) = table.all.get(&id)
            {
                one.mark_durable();
            }
        }
    }
}

/// IDs of the dispatches whose agents were started.
fn started_ids(left: &[JournalEntry]) -> Vec<String> {
    left.iter()
        .filter(|accepted| accepted.started_at.is_some() || accepted.ended.is_some())
        .map(|accepted| accepted.id.clone())
        .collect()
}

/// The process that started them was killed, so that svc-watch still has their tool calls open. The calls in their
/// agents' output are unknown.
async fn end_for_watcher(watcher: PathBuf, ids: Vec<String>) {
    for id in ids {
        protocol::send_from_dispatcher(&watcher, Message::dispatch_end(&id, SeenCalls::default())).await;
    }
}

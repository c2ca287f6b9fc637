//! Restores the previous process's dispatches: requeues the waiting ones, records those that were running, and prunes
//! the journal.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::dispatcher::{DispatchTable, DispatchTarget, Dispatcher, MAINTENANCE_INTERVAL};
use super::journal::{JournalEntry, JournalFile};
use super::run;
use super::state::{Batch, Dispatch, DispatchResult};
use crate::audit::protocol;
use crate::audit::protocol::{Message, SeenCalls};
use crate::records::entry::Interaction;
use crate::records::page::PageError;
use crate::system::blocking::run_blocking;
use svc_http::problem::Problem;

/// Timeout for flushing records to disk.
const FLUSH_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
/// Delay before retrying a failed read of the journal or records.
const RETRY_INTERVAL: std::time::Duration = std::time::Duration::from_secs(2);

impl Dispatcher {
    /// Restores the previous process's dispatches, then periodically prunes the journal and starts queued ones until
    /// `stop`.
    pub async fn maintain(self: Arc<Self>, stop: CancellationToken) {
        while self.kernel.wait_for_usage_store().await.is_err() {
            if stop.is_cancelled() {
                return;
            }
        }
        // Don't accept requests before the restore: a retried request for a dispatch that isn't restored yet would run
        // it again.
        let (journaled, recorded_interactions) = loop {
            match self.read_journal().await {
                Ok(previous) => break previous,
                Err(_) => tracing::error!("cannot restore the previous process's dispatches; retrying"),
            }
            if stop.run_until_cancelled(tokio::time::sleep(RETRY_INTERVAL)).await.is_none() {
                return;
            }
        };
        tokio::spawn(report_ends_to_watcher(self.watcher_socket.clone(), started_or_ended_ids(&journaled)));
        self.restore(journaled, &recorded_interactions);
        self.recovered.cancel();
        self.start_ready();
        while stop.run_until_cancelled(tokio::time::sleep(MAINTENANCE_INTERVAL)).await.is_some() {
            self.prune_journal().await;
            self.start_ready();
        }
    }

    /// Reads the previous process's dispatches, and the interactions of those already recorded.
    ///
    /// # Errors
    /// The journal or the records cannot be read; the failure is logged.
    async fn read_journal(&self) -> Result<(Vec<JournalEntry>, BTreeMap<String, Interaction>), Problem> {
        let (journal, kernel) = (self.journal.clone(), Arc::clone(&self.kernel));
        run_blocking(move || {
            let journaled = journal.read()?;
            let ids: BTreeSet<String> = journaled
                .iter()
                .flat_map(|entry| [Some(&entry.id), entry.batch.as_ref().map(|b| &b.id)])
                .flatten()
                .cloned()
                .collect();
            // Journal files can be weeks old, so search back to the oldest dispatch.
            let recorded_interactions = match journaled.first() {
                Some(oldest) => kernel.find_interactions(&ids, Some(oldest.accepted_at))?,
                None => BTreeMap::new(),
            };
            Ok::<_, PageError>((journaled, recorded_interactions))
        })
        .await
    }

    fn restore(
        self: &Arc<Self>,
        journaled: Vec<JournalEntry>,
        recorded_interactions: &BTreeMap<String, Interaction>,
    ) {
        let (recorded, unfinished): (Vec<JournalEntry>, Vec<JournalEntry>) =
            journaled.into_iter().partition(|entry| recorded_interactions.contains_key(&entry.id));
        let batches = self.restore_batches(&unfinished, recorded_interactions);
        for entry in recorded {
            let mut table = self.lock();
            table.prunable_files.push(entry.file());
            if let Some(position) = entry.batch.filter(|position| !batches.contains_key(&position.id)) {
                table.prunable_files.push(JournalFile::Batch(position.id));
            }
        }
        let settings = self.kernel.settings();
        for entry in unfinished {
            let batch = entry.batch.as_ref().and_then(|position| batches.get(&position.id).cloned());
            let is_first = entry.batch.as_ref().is_none_or(|position| position.index == 0);
            let is_queued = entry.started_at.is_none() && entry.ended.is_none() && entry.refused.is_none();
            // The dispatch was already accepted, so current limits don't apply.
            let reservation =
                (is_queued && is_first).then(|| self.kernel.restore_reservation(&entry.sender_id, &settings));
            let (started_at, ended, refused) = (entry.started_at, entry.ended.clone(), entry.refused);
            let entry = JournalEntry { started_at: None, ended: None, refused: None, ..entry };
            let dispatch = Dispatch::new(entry, batch, reservation);
            dispatch.journaled.cancel();
            self.lock()
                .targets
                .insert(dispatch.id().to_owned(), DispatchTarget::Dispatch(Arc::clone(&dispatch)));
            if let Some(period) = refused {
                self.end_refused(&dispatch, period);
                continue;
            }
            if let Some(at) = started_at {
                dispatch.mark_running(at);
            }
            let interaction = match (ended, started_at) {
                (Some(ended), _) => ended,
                (None, Some(_)) => {
                    let message =
                        "the dispatch was interrupted: the gateway was killed, or the machine lost power";
                    let duration_ms = run::elapsed_ms(started_at, Timestamp::now());
                    let reserved = settings.limits.reservation;
                    let interrupted =
                        run::interrupted_interaction(&dispatch, "Interrupted", message, reserved);
                    Interaction { duration_ms, ..interrupted }
                }
                (None, None) => {
                    self.kernel
                        .note(&format!("dispatch {}: queued again after a gateway restart", dispatch.id()));
                    self.lock().queue.push(&dispatch.accepted.sender_id, Arc::clone(&dispatch));
                    continue;
                }
            };
            self.kernel.note(&format!("dispatch {}: recorded after a gateway restart", dispatch.id()));
            self.record_interaction(&dispatch, &interaction);
            let phase = interaction.status.into();
            dispatch.end(DispatchResult { phase, interaction: Some(interaction), text: None, refused: None });
            self.retain_ended(&dispatch);
        }
    }

    /// Restores the batches of unfinished entries, treating recorded entries as ended.
    fn restore_batches(
        &self,
        unfinished: &[JournalEntry],
        recorded_interactions: &BTreeMap<String, Interaction>,
    ) -> HashMap<String, Arc<Batch>> {
        let mut batches: HashMap<String, Arc<Batch>> = HashMap::new();
        for (position, entry) in unfinished.iter().filter_map(|entry| Some((entry.batch.as_ref()?, entry))) {
            if batches.contains_key(&position.id) {
                continue;
            }
            let ids: Vec<String> =
                (0..position.size).map(|index| format!("{}.{index}", position.id)).collect();
            let ended: Vec<&Interaction> =
                ids.iter().filter_map(|id| recorded_interactions.get(id)).collect();
            let is_in_batch =
                |entry: &&JournalEntry| entry.batch.as_ref().is_some_and(|other| other.id == position.id);
            let remaining = ended.len() + unfinished.iter().filter(is_in_batch).count();
            let batch = Batch::new(position.id.clone(), entry.fingerprint.clone(), ids, remaining);
            batch.journaled.cancel();
            batches.insert(position.id.clone(), Arc::clone(&batch));
            self.lock().targets.insert(position.id.clone(), DispatchTarget::Batch(Arc::clone(&batch)));
            for interaction in ended {
                let dispatch = Dispatch::from_record(interaction.clone(), Some(Arc::clone(&batch)));
                self.lock()
                    .targets
                    .insert(dispatch.id().to_owned(), DispatchTarget::Dispatch(Arc::clone(&dispatch)));
                self.retain_ended(&dispatch);
            }
        }
        batches
    }

    /// Removes dispatches with durable records from the journal.
    pub(super) async fn prune_journal(&self) {
        let (removable, earlier_failed_syncs) = {
            let mut table = self.lock();
            (JournalFile::take_removable(&mut table.prunable_files), table.failed_syncs)
        };
        if removable.is_empty() {
            return;
        }
        let (kernel, journal) = (Arc::clone(&self.kernel), self.journal.clone());
        let pruned = tokio::task::spawn_blocking(move || {
            let is_flushed = kernel.flush(FLUSH_TIMEOUT);
            let is_durable = is_flushed && kernel.records().failed_syncs() == earlier_failed_syncs;
            if is_durable {
                journal.remove_all(&removable);
            }
            (is_durable, removable)
        });
        let Ok((is_durable, removable)) = pruned.await else { return };
        let mut table = self.lock();
        if !is_durable {
            return table.defer_removal(removable, self.kernel.records().failed_syncs());
        }
        for file in removable {
            if let JournalFile::Dispatch(id) | JournalFile::Entry { id, .. } = file
                && let Some(DispatchTarget::Dispatch(dispatch)) = table.targets.get(&id)
            {
                dispatch.mark_durable();
            }
        }
    }
}

impl DispatchTable {
    /// Defers the removal of files whose records aren't durable yet. After another failed sync, these and all others in
    /// `prunable_files` stay in the journal until the next start: a later successful flush doesn't prove that the
    /// interactions are on disk. The next start records any dispatches with missing interactions.
    fn defer_removal(&mut self, files: Vec<JournalFile>, failed_syncs: u64) {
        self.prunable_files.extend(files);
        if failed_syncs != self.failed_syncs {
            let retained = std::mem::take(&mut self.prunable_files);
            let files = retained.len();
            tracing::error!(files, "log sync failed; keeping dispatches in the journal until the next start");
            self.failed_syncs = failed_syncs;
            for file in retained {
                if let JournalFile::Entry { batch, .. } = file {
                    self.kept_batches.insert(batch);
                }
            }
        }
    }
}

/// Ids of dispatches that have started or ended.
fn started_or_ended_ids(journaled: &[JournalEntry]) -> Vec<String> {
    journaled
        .iter()
        .filter(|entry| entry.started_at.is_some() || entry.ended.is_some())
        .map(|entry| entry.id.clone())
        .collect()
}

/// Reports ended dispatches to svc-watch, which may still have their tool calls open if the previous gateway was killed
/// before reporting the end. The calls in their agents' output are unknown.
async fn report_ends_to_watcher(watcher: PathBuf, ids: Vec<String>) {
    for id in ids {
        protocol::send_from_dispatcher(&watcher, Message::dispatch_end(&id, SeenCalls::default())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agents::bridge_tokens::BridgeTokens;
    use crate::agents::kernel::Kernel;
    use crate::system::layout::Layout;

    #[tokio::test]
    async fn failed_journal_read_is_retried_before_requests() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let kernel = Arc::new(Kernel::new(&layout).unwrap());
        assert!(kernel.open_usage_store());
        let dispatcher = Dispatcher::new(&layout, &kernel, &Arc::new(BridgeTokens::default()));
        let accepted_at: Timestamp = "2026-11-22T10:00:00.000Z".parse().unwrap();
        let interrupted =
            JournalEntry { accepted_at, started_at: Some(accepted_at), ..JournalEntry::example("d") };
        dispatcher.journal.write(&[interrupted]).unwrap();
        // Reading the journal removes temporary files, which fails if one of them is a directory.
        let obstacle = layout.dispatches().join(format!(".d.json.{}.tmp", "0".repeat(32)));
        std::fs::create_dir(&obstacle).unwrap();
        let stop = CancellationToken::new();
        let maintenance = tokio::spawn(Arc::clone(&dispatcher).maintain(stop.clone()));
        assert!(dispatcher.wait_until_ready().await.is_err());
        std::fs::remove_dir(&obstacle).unwrap();
        let recovered = tokio::time::timeout(RETRY_INTERVAL * 10, dispatcher.recovered.cancelled()).await;
        assert!(recovered.is_ok(), "the failed read was not retried");
        assert!(dispatcher.lock().targets.contains_key("d"));
        stop.cancel();
        maintenance.await.unwrap();
        kernel.close();
    }

    #[test]
    fn failed_sync_keeps_journal_files_until_the_next_start() {
        let file = |id: &str| JournalFile::Dispatch(id.to_owned());
        let mut table = DispatchTable::default();
        table.defer_removal(vec![file("timed-out")], 0);
        assert_eq!(table.prunable_files, [file("timed-out")]);
        table.prunable_files.push(file("recorded-before-the-failure"));
        table.prunable_files.push(JournalFile::Entry { batch: "b".to_owned(), id: "b.0".to_owned() });
        table.defer_removal(vec![file("not-synced")], 1);
        assert!(table.prunable_files.is_empty());
        assert!(
            table.kept_batches.contains("b"),
            "the batch's file, perhaps the only copy of its entry, is not kept"
        );
        table.defer_removal(vec![file("recorded-later")], 1);
        assert_eq!(table.prunable_files, [file("recorded-later")]);
    }
}

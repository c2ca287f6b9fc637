//! What an earlier process left: dispatches that waited wait on, those that ran are recorded; and the journal is rid of
//! what is durable.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::dispatcher::{Dispatcher, Found, LOOK};
use super::journal::{Kept, Place};
use super::one::{Batch, Dispatch, End};
use super::request::Entry;
use super::run;
use crate::chain::chain;
use crate::fsx::FileError;
use crate::host::gateway::blocking::blocking;
use crate::host::records::entry::Interaction;

/// How long a disk has to make records durable.
const DISK: std::time::Duration = std::time::Duration::from_secs(10);

impl Dispatcher {
    /// Takes up what an earlier process left, then sees to the journal and to whoever waits, until it is told to end.
    pub async fn tend(self: Arc<Self>, stop: CancellationToken) {
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
                .flat_map(|kept| [Some(&kept.id), kept.batch.as_ref().map(|b| &b.id)])
                .flatten()
                .cloned()
                .collect();
            let found = if ids.is_empty() { Ok(BTreeMap::new()) } else { kernel.find(&ids) };
            Ok::<_, FileError>((left, found))
        });
        match left.await {
            Ok((left, Ok(found))) => self.take_up(left, &found),
            // Which of them are recorded is not known: they are not recorded twice, and are looked at again next time.
            Ok((left, Err(error))) => {
                tracing::error!(left = left.len(), error = %chain(&error), "what an earlier process left stays");
            }
            Err(_) => tracing::error!("the journal of dispatches cannot be read; what it has stays"),
        }
        self.recovered.cancel();
        self.go_on();
        while stop.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
            self.tidy().await;
            self.go_on();
        }
    }

    fn take_up(self: &Arc<Self>, left: Vec<Kept>, found: &BTreeMap<String, Interaction>) {
        let mut batches: HashMap<String, Arc<Batch>> = HashMap::new();
        for kept in left {
            if found.contains_key(&kept.id) {
                self.journal.remove(&kept.id);
                continue;
            }
            let batch = kept.batch.as_ref().map(|place| {
                let begin = || self.batch_again(place, &kept, found);
                Arc::clone(batches.entry(place.id.clone()).or_insert_with(begin))
            });
            let (started_at, ended) = (kept.started_at, kept.ended.clone());
            let one = Dispatch::new(Kept { started_at: None, ended: None, ..kept }, batch, None);
            self.lock().all.insert(one.id().to_owned(), Found::One(Arc::clone(&one)));
            let interaction = match (ended, started_at) {
                (Some(ended), _) => ended,
                (None, Some(_)) => {
                    let message = "it was cut off: the gateway was killed, or the machine lost its power";
                    let duration_ms = run::since(started_at, Timestamp::now());
                    Interaction { duration_ms, ..run::without_run(&one, "Interrupted", message) }
                }
                (None, None) => {
                    self.kernel.note(&format!("dispatch {}: it waits on, after a new start", one.id()));
                    self.lock().queue.push(&one.kept.sender_id, Arc::clone(&one));
                    continue;
                }
            };
            self.kernel.note(&format!("dispatch {}: recorded after a new start", one.id()));
            self.kernel.record(&interaction);
            self.lock().recorded.push(one.id().to_owned());
            let phase = interaction.status.into();
            one.end(End { phase, interaction: Some(interaction), text: None, refused: None });
            self.remember(&one);
        }
    }

    /// The batch of an entry that is left; those of its entries that are recorded have ended.
    fn batch_again(&self, place: &Place, kept: &Kept, found: &BTreeMap<String, Interaction>) -> Arc<Batch> {
        let name = |index| format!("{}.{index}", place.id);
        let ids = (0..place.of).map(name).collect();
        let batch = Batch::new(place.id.clone(), kept.fingerprint.clone(), ids);
        self.lock().all.insert(place.id.clone(), Found::Batch(Arc::clone(&batch)));
        for id in &batch.entries {
            if let Some(one) = found.get(id) {
                let one = recorded(one.clone(), Some(Arc::clone(&batch)));
                self.lock().all.insert(id.clone(), Found::One(Arc::clone(&one)));
                self.remember(&one);
            }
        }
        batch
    }

    /// Takes out of the journal what is durable elsewhere.
    pub(super) async fn tidy(&self) {
        let recorded = std::mem::take(&mut self.lock().recorded);
        if recorded.is_empty() {
            return;
        }
        let (kernel, journal) = (Arc::clone(&self.kernel), self.journal.clone());
        let tidied = tokio::task::spawn_blocking(move || {
            if !kernel.flush(DISK) {
                return recorded;
            }
            recorded.iter().for_each(|id| journal.remove(id));
            Vec::new()
        });
        let left = tidied.await.unwrap_or_default();
        self.lock().recorded.extend(left);
    }
}

/// A dispatch of which there is the record alone.
pub(super) fn recorded(one: Interaction, batch: Option<Arc<Batch>>) -> Arc<Dispatch> {
    let place = one.batch_id.clone().map(|id| {
        let index = one.id.rsplit_once('.').and_then(|(_, index)| index.parse().ok()).unwrap_or_default();
        Place { id, index, of: 0 }
    });
    let kept = Kept {
        version: Kept::VERSION,
        id: one.id.clone(),
        sender_id: one.sender_id.clone(),
        entry: Entry {
            agent_name: one.agent_name.clone(),
            model: Some(one.model.clone()),
            conversation_id: Some(one.conversation_id.clone()),
            prompt: String::new(),
            deadline_seconds: 0,
        },
        batch: place,
        fingerprint: String::new(),
        accepted_at: one.timestamp,
        started_at: None,
        ended: None,
    };
    Dispatch::ended(one, kept, batch)
}

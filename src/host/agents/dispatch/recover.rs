//! What an earlier process left: dispatches that waited wait on, those that ran are recorded; and the journal is rid of
//! what is durable.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::dispatcher::{Dispatcher, Found, LOOK};
use super::journal::{Kept, Of, Place};
use super::request::Entry;
use super::run;
use super::state::{Batch, Dispatch, End};
use crate::chain::chain;
use crate::fsx::FileError;
use crate::host::audit::protocol;
use crate::host::audit::protocol::{Message, SeenCalls};
use crate::host::records::entry::Interaction;
use crate::host::system::blocking::blocking;

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
            Ok((left, Ok(found))) => {
                tokio::spawn(end_for_watcher(self.watcher.clone(), begun(&left)));
                self.take_up(left, &found);
            }
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
        let (recorded, left): (Vec<Kept>, Vec<Kept>) =
            left.into_iter().partition(|kept| found.contains_key(&kept.id));
        let batches = self.batches_again(&left, found);
        for kept in recorded {
            self.journal.remove(&Of::One(kept.id));
            if let Some(place) = kept.batch.filter(|place| !batches.contains_key(&place.id)) {
                self.journal.remove(&Of::Batch(place.id));
            }
        }
        let settings = self.kernel.settings();
        for kept in left {
            let batch = kept.batch.as_ref().and_then(|place| batches.get(&place.id).cloned());
            let is_first = kept.batch.as_ref().is_none_or(|place| place.index == 0);
            let is_free = settings.agents.is_free(kept.entry.model.as_deref());
            // It was accepted: what is spent meanwhile is no reason against it.
            let waits = kept.started_at.is_none() && kept.ended.is_none();
            let reservation =
                (waits && is_first).then(|| self.kernel.reserve_again(&kept.sender_id, &settings, is_free));
            let (started_at, ended) = (kept.started_at, kept.ended.clone());
            let one = Dispatch::new(Kept { started_at: None, ended: None, ..kept }, batch, reservation);
            one.is_kept.cancel();
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
            if self.kernel.record(&interaction).is_some() {
                self.lock().recorded.push(Of::One(one.id().to_owned()));
            }
            let phase = interaction.status.into();
            one.end(End { phase, interaction: Some(interaction), text: None, refused: None });
            self.remember(&one);
        }
    }

    /// The batches of entries that are left; those of their entries that are recorded have ended.
    fn batches_again(
        &self,
        left: &[Kept],
        found: &BTreeMap<String, Interaction>,
    ) -> HashMap<String, Arc<Batch>> {
        let mut batches: HashMap<String, Arc<Batch>> = HashMap::new();
        for (place, kept) in left.iter().filter_map(|kept| Some((kept.batch.as_ref()?, kept))) {
            if batches.contains_key(&place.id) {
                continue;
            }
            let ids: Vec<String> = (0..place.of).map(|index| format!("{}.{index}", place.id)).collect();
            let ended: Vec<&Interaction> = ids.iter().filter_map(|id| found.get(id)).collect();
            let of_it = |kept: &&Kept| kept.batch.as_ref().is_some_and(|other| other.id == place.id);
            let count = ended.len() + left.iter().filter(of_it).count();
            let batch = Batch::new(place.id.clone(), kept.fingerprint.clone(), ids, count);
            batch.is_kept.cancel();
            batches.insert(place.id.clone(), Arc::clone(&batch));
            self.lock().all.insert(place.id.clone(), Found::Batch(Arc::clone(&batch)));
            for one in ended {
                let one = recorded(one.clone(), Some(Arc::clone(&batch)));
                self.lock().all.insert(one.id().to_owned(), Found::One(Arc::clone(&one)));
                self.remember(&one);
            }
        }
        batches
    }

    /// Takes out of the journal what is durable elsewhere.
    pub(super) async fn tidy(&self) {
        let recorded = std::mem::take(&mut self.lock().recorded);
        if recorded.is_empty() {
            return;
        }
        let (kernel, journal) = (Arc::clone(&self.kernel), self.journal.clone());
        let tidied = tokio::task::spawn_blocking(move || {
            let is_durable = kernel.flush(DISK);
            if is_durable {
                recorded.iter().for_each(|of| journal.remove(of));
            }
            (is_durable, recorded)
        });
        let Ok((is_durable, recorded)) = tidied.await else { return };
        let mut known = self.lock();
        if !is_durable {
            return known.recorded.extend(recorded);
        }
        for of in recorded {
            if let Of::One(id) = of
                && let Some(Found::One(one)) = known.all.get(&id)
            {
                one.make_safe();
            }
        }
    }
}

/// The dispatches whose agents were started.
fn begun(left: &[Kept]) -> Vec<String> {
    left.iter()
        .filter(|kept| kept.started_at.is_some() || kept.ended.is_some())
        .map(|kept| kept.id.clone())
        .collect()
}

/// The process that began them was killed, so that svc-watch still takes their tool calls for open. Which calls their agents'
/// output had is not known.
async fn end_for_watcher(watcher: PathBuf, begun: Vec<String>) {
    for id in begun {
        protocol::tell_of_dispatch(&watcher, Message::dispatch_end(&id, SeenCalls::default())).await;
    }
}

/// A dispatch of which there is the record alone.
pub(super) fn recorded(one: Interaction, batch: Option<Arc<Batch>>) -> Arc<Dispatch> {
    let place = one.batch_id.clone().map(|id| {
        let index = index(&one.id);
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

/// The number of an entry of a batch, by its id.
pub(super) fn index(id: &str) -> usize {
    id.rsplit_once('.').and_then(|(_, index)| index.parse().ok()).unwrap_or_default()
}

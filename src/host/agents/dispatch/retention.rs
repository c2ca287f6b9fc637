//! Retains ended dispatches in memory for later requests, evicting the oldest ones when over the limits.

use std::sync::Arc;

use super::dispatcher::{DispatchTable, DispatchTarget, Dispatcher};
use super::journal::JournalFile;
use super::state::Dispatch;

/// Maximum number and total size of ended dispatches retained in memory, including their text and events.
const MAX_ENDED_DISPATCHES: usize = 1000;
const MAX_ENDED_BYTES: usize = 32 << 20;
/// Raises both limits for dispatches without a durable record, for example on a full disk: they must remain findable by
/// id.
const NON_DURABLE_LIMIT_FACTOR: usize = 8;

impl Dispatcher {
    /// Retains an ended dispatch for later requests, evicting the oldest ones when over the limits.
    pub(super) fn retain_ended(&self, dispatch: &Arc<Dispatch>) {
        let mut table = self.lock();
        let ended_batch = dispatch.batch.as_ref().filter(|batch| batch.has_ended());
        if let Some(batch) = ended_batch
            && !table.kept_batches.contains(&batch.id)
        {
            table.prunable_files.push(JournalFile::Batch(batch.id.clone()));
        }
        table.ended_bytes += dispatch.bytes();
        table.ended.push_back(Arc::clone(dispatch));
        while table.exceeds_limits(1) {
            let is_over_hard_limits = table.exceeds_limits(NON_DURABLE_LIMIT_FACTOR);
            let oldest =
                table.ended.iter().find(|dispatch| table.can_evict(dispatch, is_over_hard_limits)).cloned();
            let Some(oldest) = oldest else { break };
            table.evict(&oldest);
        }
    }
}

impl DispatchTable {
    fn exceeds_limits(&self, factor: usize) -> bool {
        self.ended.len() > MAX_ENDED_DISPATCHES * factor || self.ended_bytes > MAX_ENDED_BYTES * factor
    }

    /// Whether an ended dispatch can be evicted. A batch is evicted as a whole, so all its entries must have ended.
    fn can_evict(&self, dispatch: &Dispatch, is_over_hard_limits: bool) -> bool {
        let is_durable = |id: &String| match self.targets.get(id) {
            Some(DispatchTarget::Dispatch(entry)) => entry.is_durable(),
            _ => true,
        };
        match &dispatch.batch {
            Some(batch) => {
                batch.has_ended() && (is_over_hard_limits || batch.entry_ids.iter().all(is_durable))
            }
            None => is_over_hard_limits || dispatch.is_durable(),
        }
    }

    /// Removes an ended dispatch along with the rest of its batch: a partial batch would be reported as failed.
    fn evict(&mut self, dispatch: &Arc<Dispatch>) {
        let is_evicted = |other: &Arc<Dispatch>| match (&dispatch.batch, &other.batch) {
            (Some(batch), Some(other_batch)) => Arc::ptr_eq(batch, other_batch),
            _ => Arc::ptr_eq(dispatch, other),
        };
        let bytes: usize =
            self.ended.iter().filter(|other| is_evicted(other)).map(|other| other.bytes()).sum();
        self.ended_bytes = self.ended_bytes.saturating_sub(bytes);
        self.ended.retain(|other| !is_evicted(other));
        self.targets.remove(dispatch.id());
        if let Some(batch) = &dispatch.batch {
            for id in batch.entry_ids.iter().chain([&batch.id]) {
                self.targets.remove(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::agents::bridge_tokens::BridgeTokens;
    use crate::agents::dispatch::event_log::EventLog;
    use crate::agents::dispatch::state::Batch;
    use crate::agents::kernel::Kernel;
    use crate::records::entry::{Interaction, ResultStatus};
    use crate::records::money::Dollars;
    use crate::system::layout::Layout;

    fn interaction(id: &str, batch: Option<&Arc<Batch>>) -> Interaction {
        Interaction {
            version: Interaction::FORMAT_VERSION,
            id: id.to_owned(),
            timestamp: "2026-11-22T10:00:00.000Z".parse().unwrap(),
            accepted_at: None,
            started_at: None,
            sender_id: "u".to_owned(),
            conversation_id: "c".to_owned(),
            model: "m".to_owned(),
            agent_name: "a".to_owned(),
            tokens_in: 0,
            tokens_out: 0,
            cost: Dollars::ZERO,
            cost_estimated: false,
            duration_ms: 0,
            tools: Vec::new(),
            status: ResultStatus::Success,
            error: None,
            batch: batch.is_some(),
            batch_id: batch.map(|batch| batch.id.clone()),
            batch_size: batch.map(|batch| batch.entry_ids.len()),
            fingerprint: None,
        }
    }

    fn recorded_dispatch(id: &str, batch: Option<&Arc<Batch>>) -> Arc<Dispatch> {
        Dispatch::from_record(interaction(id, batch), batch.cloned())
    }

    #[test]
    fn batch_is_evicted_with_all_its_entries() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let kernel = Arc::new(Kernel::new(&layout).unwrap());
        let dispatcher = Dispatcher::new(&layout, &kernel, &Arc::new(BridgeTokens::default()));
        let add = |target: DispatchTarget| {
            dispatcher.lock().targets.insert(target.id().to_owned(), target);
        };
        let ids: Vec<String> = (0..100).map(|index| format!("b.{index}")).collect();
        let batch = Batch::new("b".to_owned(), String::new(), ids.clone(), ids.len());
        add(DispatchTarget::Batch(Arc::clone(&batch)));
        let single_ids = (ids.len()..MAX_ENDED_DISPATCHES).map(|number| format!("s{number}"));
        let single = single_ids.map(|id| recorded_dispatch(&id, None));
        let entries = ids.iter().map(|id| recorded_dispatch(id, Some(&batch)));
        for dispatch in entries.chain(single) {
            add(DispatchTarget::Dispatch(Arc::clone(&dispatch)));
            dispatcher.retain_ended(&dispatch);
        }
        let batch = DispatchTarget::Batch(batch);
        assert_eq!(dispatcher.entries(&batch).len(), 100);
        dispatcher.retain_ended(&recorded_dispatch("last", None));
        assert_eq!(dispatcher.entries(&batch).len(), 0);
        let table = dispatcher.lock();
        assert!(!table.targets.contains_key("b"));
        assert_eq!(table.ended.len(), MAX_ENDED_DISPATCHES - 99);
        assert_eq!(table.ended_bytes, table.ended.iter().map(|dispatch| dispatch.bytes()).sum::<usize>());
        drop(table);
        kernel.close();
    }

    #[test]
    fn dropped_record_retains_its_batch_file() {
        for is_dropped in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let layout = Layout::new(dir.path());
            let kernel = Arc::new(Kernel::new(&layout).unwrap());
            assert!(kernel.open_usage_store());
            let dispatcher = Dispatcher::new(&layout, &kernel, &Arc::new(BridgeTokens::default()));
            let ids = ["b.0".to_owned(), "b.1".to_owned()];
            let batch = Batch::new("b".to_owned(), String::new(), ids.to_vec(), ids.len());
            for id in &ids {
                if is_dropped && *id == ids[1] {
                    // Without a writer, records are dropped, as they are when the queue is full.
                    kernel.close();
                }
                let dispatch = recorded_dispatch(id, Some(&batch));
                dispatcher.record_interaction(&dispatch, &interaction(id, Some(&batch)));
                dispatcher.retain_ended(&dispatch);
            }
            let entry = |id: &String| JournalFile::Entry { batch: "b".to_owned(), id: id.clone() };
            let expected = if is_dropped {
                vec![entry(&ids[0])]
            } else {
                vec![entry(&ids[0]), entry(&ids[1]), JournalFile::Batch("b".to_owned())]
            };
            assert_eq!(dispatcher.lock().prunable_files, expected);
            kernel.close();
        }
    }

    #[tokio::test]
    async fn restored_batch_keeps_size_but_not_sequence_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let kernel = Arc::new(Kernel::new(&layout).unwrap());
        let dispatcher = Dispatcher::new(&layout, &kernel, &Arc::new(BridgeTokens::default()));
        let ids: Vec<String> = (0..3).map(|index| format!("b.{index}")).collect();
        let batch = Batch::new("b".to_owned(), String::new(), ids.clone(), ids.len());
        // The last entry was refused.
        let line = |id: &String| serde_json::to_string(&interaction(id, Some(&batch))).unwrap();
        let lines = format!("{}\n{}\n", line(&ids[0]), line(&ids[1]));
        std::fs::create_dir_all(layout.logs()).unwrap();
        std::fs::write(layout.logs().join("interactions-2026-11-22.jsonl"), lines).unwrap();
        let restored = dispatcher.find(&"b".parse().unwrap()).await.unwrap().unwrap();
        assert_eq!((dispatcher.entries(&restored).len(), restored.entry_count()), (2, 3));
        let events = restored.log().read(0).events;
        let last_event = String::from_utf8_lossy(events.last().unwrap());
        assert!(last_event.contains("event: done") && last_event.contains("\"entries\":3"), "{last_event}");
        batch.log.push("accepted", &json!({}), false);
        let next = batch.log.read(0).next;
        assert_eq!(restored.log().read(next).events.len(), 5);
        kernel.close();
    }

    #[test]
    fn restored_dispatch_does_not_reuse_sequence_numbers() {
        let original = EventLog::default();
        for kind in ["accepted", "running"] {
            original.push(kind, &json!({}), false);
        }
        let restore = || recorded_dispatch("d", None);
        let restored = restore().log.read(original.read(0).next);
        assert_eq!(restored.events.len(), 2, "the result was not sent after a reconnection");
        let repeated = restore().log.read(restored.next);
        assert!(repeated.events.is_empty() && repeated.is_closed, "the result was sent again");
    }
}

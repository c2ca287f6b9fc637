//! A store whose calls wait for their turn; the schedule determines how each call ends.

use std::fmt;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryFutureExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use svc::store::Bucket;
use svc::store::key::SlotPrefix;
use svc::store::pointer::Pointer;
use tokio::sync::{mpsc, oneshot};

use super::history::History;

/// A waiting call: its actor and its kind.
pub struct Turn {
    pub actor: usize,
    pub call: Call,
    /// Ends the call with this outcome.
    pub reply: oneshot::Sender<CallOutcome>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Get,
    List,
    Put,
}

/// How a call ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallOutcome {
    Done,
    /// The request is lost; the caller gets an error.
    Lost,
    /// The write happens; the response is lost.
    NoResponse,
    /// The write happens; the client's own retry of it is refused.
    RefusedRetry,
    /// The caller gets an error; the write happens later.
    Late,
    /// The read returns the state before the last write.
    Stale,
}

impl CallOutcome {
    pub const GET_FAULTS: [Self; 2] = [Self::Lost, Self::Stale];
    pub const LIST_FAULTS: [Self; 1] = [Self::Lost];
    pub const PUT_FAULTS: [Self; 4] = [Self::Lost, Self::NoResponse, Self::RefusedRetry, Self::Late];
}

/// The write conditions that the server enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conditions {
    Honored,
    /// Objects are created only once, but `If-Match` never rejects a write: the weakest store that the protocol
    /// supports.
    CreateOnly,
    /// Neither condition is enforced; no protocol is correct on such a store.
    Ignored,
}

type LatePut = (Path, PutPayload, PutOptions);

/// The server behind all actors' stores.
#[derive(Debug)]
pub struct Server {
    inner: InMemory,
    /// The state before the last write to `latest`.
    previous: Mutex<InMemory>,
    late_puts: Mutex<Vec<LatePut>>,
    turns: mpsc::UnboundedSender<Turn>,
    slot: SlotPrefix,
    conditions: Conditions,
    pub history: Mutex<History>,
}

impl Server {
    pub fn new(slot: SlotPrefix, conditions: Conditions) -> (Arc<Self>, mpsc::UnboundedReceiver<Turn>) {
        let (turns, waiting) = mpsc::unbounded_channel();
        let (inner, previous) = (InMemory::new(), Mutex::new(InMemory::new()));
        let (late_puts, history) = (Mutex::default(), Mutex::default());
        (Arc::new(Self { inner, previous, late_puts, turns, slot, conditions, history }), waiting)
    }

    pub fn late_put_count(&self) -> usize {
        self.late_puts.lock().unwrap().len()
    }

    /// Applies a late write; its result is discarded.
    pub async fn apply_late(&self, index: usize) {
        let (location, payload, options) = self.late_puts.lock().unwrap().remove(index);
        let _ = self.apply(&location, payload, options).await;
    }

    /// Stores the initial state, before any actor starts.
    pub async fn prepare(&self, setup: impl AsyncFnOnce(Bucket)) {
        setup(Bucket::new(Arc::new(self.inner.clone()))).await;
    }

    async fn apply(
        &self,
        location: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        let is_enforced = match options.mode {
            PutMode::Create => self.conditions != Conditions::Ignored,
            PutMode::Update(_) | PutMode::Overwrite => self.conditions == Conditions::Honored,
        };
        if !is_enforced {
            options.mode = PutMode::Overwrite;
        }
        let previous = self.inner.fork();
        let bytes: bytes::Bytes = payload.clone().into();
        let put = self.inner.put_opts(location, payload, options).await?;
        let pointer =
            || serde_json::from_slice::<Pointer>(&bytes).expect("only a pointer is written to this key");
        if *location == self.slot.pointer() {
            *self.previous.lock().unwrap() = previous;
            self.history.lock().unwrap().record_publication(&pointer());
        } else if location.prefix_matches(&self.slot.pointer_log()) {
            let is_complete = self.is_complete(&pointer()).await;
            self.history.lock().unwrap().record_claim(pointer(), is_complete);
        }
        Ok(put)
    }

    async fn is_complete(&self, pointer: &Pointer) -> bool {
        let Some(named) = &pointer.snapshot else { return true };
        let object = self.slot.snapshot(&named.key).expect("the pointer's key must be a snapshot key");
        let sidecar = self.slot.sidecar(&named.key).expect("the pointer's key must be a snapshot key");
        let Ok(meta) = self.inner.head(&object).await else { return false };
        let Ok(sidecar) = self.inner.get(&sidecar).await else { return false };
        let sidecar: serde_json::Value = serde_json::from_slice(&sidecar.bytes().await.unwrap()).unwrap();
        meta.size == named.size_bytes && sidecar["sha256"] == named.sha256.as_str()
    }
}

/// One actor's connection to the server.
#[derive(Debug, Clone)]
pub struct ScheduledStore {
    pub actor: usize,
    pub server: Arc<Server>,
}

impl ScheduledStore {
    async fn take_turn(&self, call: Call) -> CallOutcome {
        let (reply, outcome) = oneshot::channel();
        match self.server.turns.send(Turn { actor: self.actor, call, reply }) {
            Ok(()) => outcome.await.unwrap_or(CallOutcome::Lost),
            Err(_) => CallOutcome::Lost,
        }
    }
}

fn lost_error() -> Error {
    Error::Generic { store: "scheduled", source: "the connection was lost".into() }
}

impl fmt::Display for ScheduledStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("scheduled")
    }
}

#[async_trait]
impl ObjectStore for ScheduledStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        match self.take_turn(Call::Put).await {
            CallOutcome::Done | CallOutcome::Stale => self.server.apply(location, payload, options).await,
            CallOutcome::Lost => Err(lost_error()),
            CallOutcome::NoResponse => {
                let _ = self.server.apply(location, payload, options).await;
                Err(lost_error())
            }
            CallOutcome::RefusedRetry => {
                let is_conditional = !matches!(options.mode, PutMode::Overwrite);
                let put = self.server.apply(location, payload, options).await?;
                if !is_conditional {
                    return Ok(put);
                }
                Err(Error::Precondition {
                    path: location.to_string(),
                    source: "changed by the client's own first attempt".into(),
                })
            }
            CallOutcome::Late => {
                self.server.late_puts.lock().unwrap().push((location.clone(), payload, options));
                Err(lost_error())
            }
        }
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        // A log entry is written once, so the time of the read does not matter.
        if location.prefix_matches(&self.server.slot.pointer_log()) {
            return self.server.inner.get_opts(location, options).await;
        }
        match self.take_turn(Call::Get).await {
            CallOutcome::Lost => Err(lost_error()),
            // Only `latest` is ever overwritten.
            CallOutcome::Stale if *location == self.server.slot.pointer() => {
                let previous = self.server.previous.lock().unwrap().fork();
                previous.get_opts(location, options).await
            }
            _ => self.server.inner.get_opts(location, options).await,
        }
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(Error::NotImplemented { operation: "multipart".into(), implementer: "scheduled".into() })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.server.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, prefix) = (self.clone(), prefix.cloned());
        let listing = async move {
            match store.take_turn(Call::List).await {
                CallOutcome::Lost => Err(lost_error()),
                _ => {
                    let objects: Vec<_> = store.server.inner.list(prefix.as_ref()).collect().await;
                    Ok(stream::iter(objects))
                }
            }
        };
        listing.try_flatten_stream().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.server.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.server.inner.copy_opts(from, to, options).await
    }
}

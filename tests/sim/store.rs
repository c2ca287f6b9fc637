//! A run's object store. Every writer goes through it, so it observes all changes to pointers and snapshots.
//!
//! Behind it is the in-memory store of `object_store`, which enforces conditions atomically, or the kit's S3 server.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use sha2::{Digest, Sha256};
use svc::store::pointer::{Pointer, SnapshotRef};
use svc::store::snapshot::Sidecar;

use super::kill_switch::KillSwitch;
use super::plan::{KillPoint, StoreFault};
use super::violation::{BrokenRule, Violation};

const SLOW_DELAY: Duration = Duration::from_millis(60);
const POINTER: &str = "/system/db/latest";

/// The author of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writer {
    Platform,
    Host,
}

#[derive(Debug)]
pub struct Store {
    inner: Arc<dyn ObjectStore>,
    broken_rule: Option<BrokenRule>,
    /// Pending faults: whether the fault applies to writes or to reads, the fault, and how often it still occurs.
    faults: Mutex<Vec<(bool, StoreFault, u8)>>,
    violations: Mutex<BTreeSet<Violation>>,
    /// The last value of each pointer. Locked during each pointer write, so values are recorded in write order.
    pointers: tokio::sync::Mutex<BTreeMap<String, Pointer>>,
    /// The writer of each claim, by pointer and `seq`: another writer may advance `latest` to the claim.
    claims: Mutex<BTreeMap<(String, u64), Writer>>,
    /// The keys of all dumps that were ever listed.
    dumps: Mutex<BTreeSet<String>>,
    /// Pointers that a plan broke: their next value need not follow from the previous value.
    broken_pointers: Mutex<BTreeSet<String>>,
}

impl Store {
    pub fn new(inner: Arc<dyn ObjectStore>, broken_rule: Option<BrokenRule>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            broken_rule,
            faults: Mutex::default(),
            violations: Mutex::default(),
            pointers: tokio::sync::Mutex::default(),
            claims: Mutex::default(),
            dumps: Mutex::default(),
            broken_pointers: Mutex::default(),
        })
    }

    pub fn add_fault(&self, is_write: bool, fault: StoreFault, times: u8) {
        lock(&self.faults).push((is_write, fault, times));
    }

    pub fn clear_faults(&self) {
        lock(&self.faults).clear();
    }

    /// Returns the violations so far. Also checks that every snapshot still exists.
    pub async fn violations(&self) -> BTreeSet<Violation> {
        let listed: Result<Vec<ObjectMeta>> = self.inner.list(None).try_collect().await;
        if let Ok(listed) = listed {
            let keys: BTreeSet<String> = listed.into_iter().map(|meta| meta.location.to_string()).collect();
            let mut dumps = lock(&self.dumps);
            if dumps.iter().any(|dump| !keys.contains(dump)) {
                lock(&self.violations).insert(Violation::SnapshotRemoved);
            }
            dumps.extend(keys.into_iter().filter(|key| key.ends_with(".dump")));
        }
        lock(&self.violations).clone()
    }

    /// Deletes a pointer, or overwrites it with invalid JSON.
    pub async fn break_pointer(&self, slot: &str, is_lost: bool) {
        let path = Path::from(format!("{slot}{POINTER}"));
        let _pointers = self.pointers.lock().await;
        if self.inner.head(&path).await.is_err() {
            return;
        }
        lock(&self.broken_pointers).insert(path.to_string());
        let result = if is_lost {
            self.inner.delete(&path).await
        } else {
            self.inner.put(&path, "{not json".into()).await.map(drop)
        };
        result.expect("the underlying store should work");
    }

    /// Returns the prefixes of the slots whose broken pointers have not been rewritten yet.
    pub fn broken_pointers(&self) -> Vec<String> {
        lock(&self.broken_pointers)
            .iter()
            .filter_map(|key| key.strip_suffix(POINTER))
            .map(str::to_owned)
            .collect()
    }

    /// Returns each slot's fence epoch, by slot prefix.
    pub async fn fences(&self) -> BTreeMap<String, u32> {
        let pointers = self.pointers.lock().await;
        let slot = |key: &str| key.strip_suffix(POINTER).unwrap_or(key).to_owned();
        pointers.iter().map(|(key, pointer)| (slot(key), pointer.fence_epoch.0)).collect()
    }

    /// Returns the next fault for a write or a read, and counts it as used.
    fn take_fault(&self, is_write: bool) -> Option<StoreFault> {
        let mut faults = lock(&self.faults);
        let index = faults.iter().position(|(fault_is_write, _, _)| *fault_is_write == is_write)?;
        let fault = faults[index].1;
        faults[index].2 -= 1;
        if faults[index].2 == 0 {
            faults.remove(index);
        }
        Some(fault)
    }

    async fn put(
        &self,
        path: &Path,
        payload: PutPayload,
        mut options: PutOptions,
        writer: Writer,
    ) -> Result<PutResult> {
        let Some(pointer) = pointer_key(path) else {
            return self.inner.put_opts(path, payload, options).await;
        };
        let mut pointers = self.pointers.lock().await;
        let next: Option<Pointer> = serde_json::from_slice(&Bytes::from(payload.clone())).ok();
        let before = pointers.get(&pointer).cloned();
        if self.broken_rule == Some(BrokenRule::StoreIgnoresConditions) {
            options.mode = PutMode::Overwrite;
        }
        let is_fence = next.as_ref().is_some_and(|next| {
            before.as_ref().map_or(0, |before| before.fence_epoch.0) < next.fence_epoch.0
        });
        if is_fence && self.broken_rule == Some(BrokenRule::StoreLosesFences) {
            return Ok(PutResult { e_tag: None, version: None, extensions: Default::default() });
        }
        let put = self.inner.put_opts(path, payload, options).await?;
        let Some(next) = next else { return Ok(put) };
        let claim = (pointer.clone(), next.seq);
        // A claim in the log is checked when `latest` follows it.
        if pointer != path.as_ref() {
            lock(&self.claims).insert(claim, writer);
        } else {
            let writer = lock(&self.claims).get(&claim).copied().unwrap_or(writer);
            self.check_pointer(path, before.as_ref(), &next, writer).await;
            if self.broken_rule == Some(BrokenRule::StoreRemovesSnapshots) {
                self.prune(path, &next).await;
            }
            pointers.insert(path.to_string(), next);
        }
        Ok(put)
    }

    /// Checks a new value of a pointer. The platform may write fences, and the snapshot chosen by a rebuild, which may
    /// be below the fence if no other snapshot is complete. A host may move the pointer only at or above the fence.
    async fn check_pointer(&self, path: &Path, before: Option<&Pointer>, next: &Pointer, writer: Writer) {
        let mut violations = BTreeSet::new();
        if let Some(before) = before {
            let epoch = |pointer: &Pointer| pointer.snapshot.as_ref().map_or(0, |snapshot| snapshot.epoch.0);
            let is_older = next.seq <= before.seq || next.fence_epoch < before.fence_epoch;
            let is_of_other_machine = |snapshot: &SnapshotRef| {
                snapshot.epoch == before.fence_epoch
                    && before.fence_holder().is_some_and(|holder| holder != snapshot.machine_id)
            };
            let is_new = next.snapshot != before.snapshot;
            if lock(&self.broken_pointers).remove(path.as_ref()) {
                // The pointer was restored from the log, or rebuilt from snapshots.
                if next.seq < before.seq || next.fence_epoch < before.fence_epoch {
                    violations.insert(Violation::PointerMovedBackward);
                }
            } else if writer == Writer::Host
                && is_new
                && (next.snapshot.as_ref().is_some_and(is_of_other_machine)
                    || (epoch(next) < before.fence_epoch.0 && !is_older))
            {
                violations.insert(Violation::PointerMovedByFencedHost);
            } else if is_older || epoch(next) < epoch(before) {
                violations.insert(Violation::PointerMovedBackward);
            }
        }
        if !self.names_complete_snapshot(path, next).await {
            violations.insert(Violation::PointerToUnverifiedSnapshot);
        }
        lock(&self.violations).extend(violations);
    }

    async fn names_complete_snapshot(&self, path: &Path, pointer: &Pointer) -> bool {
        let Some(snapshot) = &pointer.snapshot else { return true };
        let slot = path.as_ref().strip_suffix("system/db/latest").unwrap_or_default();
        let read = async |key: String| self.inner.get(&Path::from(key)).await.ok()?.bytes().await.ok();
        let (dump, sidecar) =
            (read(format!("{slot}{}", snapshot.key)), read(format!("{slot}{}.json", snapshot.key)));
        let (Some(dump), Some(sidecar)) = (dump.await, sidecar.await) else { return false };
        let Ok(sidecar) = serde_json::from_slice::<Sidecar>(&sidecar) else { return false };
        let digest = hex::encode(Sha256::digest(&dump));
        digest == snapshot.sha256
            && sidecar.sha256 == snapshot.sha256
            && dump.len() as u64 == snapshot.size_bytes
    }

    /// Removes all of the slot's snapshots except the one that the pointer names.
    async fn prune(&self, path: &Path, pointer: &Pointer) {
        let Some(snapshot) = &pointer.snapshot else { return };
        let db_dir = path.as_ref().strip_suffix("/latest").unwrap_or_default();
        let listed = self.inner.list(Some(&Path::from(format!("{db_dir}/snapshots"))));
        let listed: Vec<ObjectMeta> = listed.try_collect().await.unwrap_or_default();
        for meta in listed.iter().filter(|meta| !meta.location.as_ref().contains(snapshot.key.as_str())) {
            let _ = self.inner.delete(&meta.location).await;
        }
    }
}

/// Returns the key of the slot's `latest`, for `latest` itself or an entry in the pointer log.
fn pointer_key(path: &Path) -> Option<String> {
    let path = path.as_ref();
    if path.ends_with(POINTER) {
        return Some(path.to_owned());
    }
    let (slot, _) = path.split_once("system/db/pointer-log/")?;
    Some(format!("{slot}system/db/latest"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One process's or host's connection to the store.
#[derive(Debug)]
pub struct StoreConnection {
    pub store: Arc<Store>,
    /// The process's kill switch; hosts have none.
    pub switch: Option<Arc<KillSwitch>>,
}

impl StoreConnection {
    async fn reach(&self, kill_point: KillPoint) {
        if let Some(switch) = &self.switch {
            switch.reach(kill_point).await;
        }
    }

    async fn write<T>(&self, operation: impl Future<Output = Result<T>>) -> Result<T> {
        self.reach(KillPoint::BeforeStore).await;
        let fault = self.store.take_fault(true);
        if fault == Some(StoreFault::Unavailable) {
            return Err(planned_error());
        }
        let result = operation.await;
        if fault == Some(StoreFault::Slow) {
            tokio::time::sleep(SLOW_DELAY).await;
        }
        self.reach(KillPoint::AfterStore).await;
        if fault == Some(StoreFault::LostResponse) { Err(planned_error()) } else { result }
    }
}

fn planned_error() -> Error {
    Error::Generic { store: "simulated", source: "a planned fault".into() }
}

impl fmt::Display for StoreConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store of a simulation")
    }
}

#[async_trait]
impl ObjectStore for StoreConnection {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let writer = if self.switch.is_some() { Writer::Platform } else { Writer::Host };
        self.write(self.store.put(path, payload, options, writer)).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.write(self.store.inner.put_multipart_opts(path, options)).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        match self.store.take_fault(false) {
            Some(StoreFault::Unavailable | StoreFault::LostResponse) => return Err(planned_error()),
            Some(StoreFault::Slow) => tokio::time::sleep(SLOW_DELAY).await,
            None => {}
        }
        let result = self.store.inner.get_opts(path, options).await;
        // Without conditions, a slow read makes lost updates likely.
        if self.store.broken_rule == Some(BrokenRule::StoreIgnoresConditions)
            && path.as_ref().ends_with(POINTER)
        {
            tokio::time::sleep(SLOW_DELAY).await;
        }
        result
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = Arc::clone(&self.store);
        let recorded = paths.inspect_ok(move |path| {
            if path.as_ref().contains("/snapshots/") {
                lock(&store.violations).insert(Violation::SnapshotRemoved);
            }
        });
        self.store.inner.delete_stream(recorded.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.inner.copy_opts(from, to, options).await
    }
}

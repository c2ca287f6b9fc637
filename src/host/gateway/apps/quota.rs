//! How much of the disk each app's rows may take.
//!
//! The sizes of the apps' schemas are measured while apps write. In between, each write that is sent to the database counts
//! by an estimate, whatever its end: PostgreSQL frees nothing when a transaction is rolled back. A tenth of the quota in
//! estimates asks for a measurement. At its quota an app, an agent or a process of the owner's user adds and changes no
//! rows; the owner does, and rows can always be deleted. Files are not counted: an app writes none.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::host::agents::owner_config::{Settings, StorageQuotas};
use crate::host::gateway::auth::Principal;
use crate::host::gateway::database::{Database, DatabaseError};
use crate::host::gateway::state::Gateway;
use crate::host::system::app_sizes;
use crate::host::system::app_sizes::AppSize;
use crate::host::system::layout::Layout;
use crate::http::problem::{Code, Problem, chain};

/// Between two measurements of a database that is written to.
const INTERVAL: Duration = Duration::from_secs(30);
/// At least, also where writes or a refused app ask for one.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Measurements take at most about a tenth of the time.
const MIN_INTERVAL_IN_DURATIONS: u32 = 10;
/// After a measurement that failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
const MEASURE_TIMEOUT: Duration = Duration::from_secs(20);
/// The age of settings that a write is admitted by; only a refusal needs them as they are now.
const MAX_SETTINGS_AGE: Duration = Duration::from_secs(1);
/// The part of the disk that is an app's where the settings give no number.
const DEFAULT_PART_OF_DISK: u64 = 5;
const MIN_DEFAULT: u64 = 1 << 30;
/// Indexes and row headers: rows take about so many times the bytes of their request.
const EXPANSION: u64 = 2;
/// A row's header and its entries in indexes, beside the bytes of its request.
const ROW_OVERHEAD_BYTES: u64 = 64;
/// A changed row is written whole, without its large values; a page of PostgreSQL has 8 KiB.
const MIN_ROW_BYTES: u64 = 256;
const MAX_ROW_BYTES: u64 = 8 << 10;
/// This part of the quota, written by estimate, asks for a measurement.
const UNMEASURED_PART: u64 = 10;

/// Rows that statements changed, also where their transaction is rolled back later.
#[derive(Debug, Default)]
pub struct ChangedRows(AtomicU64);

impl ChangedRows {
    pub fn add(&self, rows: u64) {
        self.0.fetch_add(rows, Ordering::Relaxed);
    }
}

/// The size of a write, as estimated before it is sent.
#[derive(Debug, Clone, Copy)]
pub struct WriteSize {
    pub body_bytes: usize,
    /// Rows whose values the body has.
    pub rows: usize,
    /// Whether it changes as many rows as a filter matches.
    pub is_by_filter: bool,
}

/// A write that is sent to the database: the rows that it changes count when this is dropped, whatever its end.
#[derive(Debug)]
pub struct SentWrite<'q> {
    quotas: &'q Quotas,
    slug: &'q str,
    quota: u64,
    pub changed: ChangedRows,
    /// Whether rows may have been changed that no statement reports.
    is_open: bool,
}

impl SentWrite<'_> {
    /// Every statement has reported its rows.
    pub fn settle(mut self) {
        self.is_open = false;
    }
}

impl Drop for SentWrite<'_> {
    fn drop(&mut self) {
        let rows = self.changed.0.load(Ordering::Relaxed);
        self.quotas.count(self.slug, rows.saturating_mul(self.quotas.row_bytes(self.slug)), self.quota);
        if self.is_open {
            self.quotas.due.notify_one();
        }
    }
}

/// Sizes of the apps' schemas, by slug, and what has been written since they were measured.
#[derive(Debug)]
pub struct Quotas {
    /// Bytes.
    default: u64,
    /// `None` until the first measurement.
    measured: RwLock<Option<Arc<BTreeMap<String, AppSize>>>>,
    /// Bytes by estimate.
    written: Mutex<HashMap<String, u64>>,
    /// Asks for a measurement now.
    due: Notify,
    /// The settings as last loaded: loading them takes a system call, and every write needs them.
    settings: Mutex<Option<(Instant, Arc<Settings>)>>,
}

impl Quotas {
    pub fn new(layout: &Layout) -> Self {
        let disk = fs4::statvfs(layout.home()).map_or(0, |disk| disk.total_space());
        Self {
            default: (disk / DEFAULT_PART_OF_DISK).max(MIN_DEFAULT),
            measured: RwLock::default(),
            written: Mutex::default(),
            due: Notify::new(),
            settings: Mutex::default(),
        }
    }

    /// Settings of at most [`MAX_SETTINGS_AGE`].
    fn recent(&self, load: impl FnOnce() -> Arc<Settings>) -> Arc<Settings> {
        let now = Instant::now();
        let mut recent = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        match &*recent {
            Some((loaded, settings)) if now.duration_since(*loaded) < MAX_SETTINGS_AGE => {
                Arc::clone(settings)
            }
            _ => Arc::clone(&recent.insert((now, load())).1),
        }
    }

    /// The quota of an app in bytes.
    pub fn of(&self, settings: &StorageQuotas, slug: &str) -> u64 {
        settings.of(slug).unwrap_or(self.default)
    }

    /// The bytes of an app's tables with their indexes, as last measured; `None` before the first measurement.
    pub fn measured(&self, slug: &str) -> Option<u64> {
        self.size(slug).map(|size| size.bytes)
    }

    fn size(&self, slug: &str) -> Option<AppSize> {
        let measured = self.measured.read().unwrap_or_else(PoisonError::into_inner);
        measured.as_ref().map(|sizes| sizes.get(slug).copied().unwrap_or_default())
    }

    /// What a changed row of an app writes, about.
    fn row_bytes(&self, slug: &str) -> u64 {
        let size = self.size(slug).unwrap_or_default();
        size.bytes.checked_div(size.rows).unwrap_or(0).clamp(MIN_ROW_BYTES, MAX_ROW_BYTES)
    }

    /// Admits a request that adds or changes rows; `load` gives the owner's settings as they are now.
    ///
    /// # Errors
    /// `storage_quota_reached`.
    pub fn admit(
        &self,
        load: impl Fn() -> Arc<Settings>,
        principal: &Principal,
        slug: &str,
    ) -> Result<(), Problem> {
        if matches!(principal, Principal::Owner { .. } | Principal::Admin) {
            return Ok(());
        }
        let Some(measured) = self.measured(slug) else { return Ok(()) };
        let written = self.written().get(slug).copied().unwrap_or(0);
        let used = measured.saturating_add(written);
        if used < self.of(&self.recent(&load).storage, slug) {
            return Ok(());
        }
        let quota = self.of(&load().storage, slug);
        if used < quota {
            return Ok(());
        }
        self.due.notify_one();
        let detail = format!(
            "The tables of {slug} have reached their quota of {quota} bytes: delete rows, or have the owner raise \
             storage.apps.{slug} in system/config.json."
        );
        Err(Problem::new(Code::StorageQuotaReached, detail))
    }

    /// Counts a write that is about to be sent.
    pub fn send<'q>(
        &'q self,
        load: impl FnOnce() -> Arc<Settings>,
        slug: &'q str,
        size: WriteSize,
    ) -> SentWrite<'q> {
        let natural = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let rows = natural(size.rows).saturating_mul(ROW_OVERHEAD_BYTES);
        let bytes = natural(size.body_bytes).saturating_mul(EXPANSION).saturating_add(rows);
        let quota = self.of(&self.recent(load).storage, slug);
        self.count(slug, bytes, quota);
        SentWrite { quotas: self, slug, quota, changed: ChangedRows::default(), is_open: size.is_by_filter }
    }

    /// Adds an estimate, and asks for a measurement where the sum has become too large a part of the quota.
    fn count(&self, slug: &str, bytes: u64, quota: u64) {
        if self.add(slug, bytes) >= quota / UNMEASURED_PART {
            self.due.notify_one();
        }
    }

    fn add(&self, slug: &str, bytes: u64) -> u64 {
        let mut written = self.written();
        if let Some(sum) = written.get_mut(slug) {
            *sum = sum.saturating_add(bytes);
            return *sum;
        }
        written.insert(slug.to_owned(), bytes);
        bytes
    }

    fn written(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn measure(&self, database: &Database) -> Result<(), DatabaseError> {
        // What is written from here on may be in the sizes as well: it counts twice until the next measurement.
        let before = std::mem::take(&mut *self.written());
        let sizes = tokio::time::timeout(MEASURE_TIMEOUT, sizes(database)).await;
        match sizes.unwrap_or(Err(DatabaseError::Deadline)) {
            Ok(sizes) => {
                *self.measured.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(sizes));
                Ok(())
            }
            Err(error) => {
                for (slug, bytes) in before {
                    self.add(&slug, bytes);
                }
                Err(error)
            }
        }
    }

    /// Returns once a measurement is asked for, not before `earliest`.
    async fn asked(&self, earliest: Instant) {
        self.due.notified().await;
        tokio::time::sleep_until(earliest).await;
    }

    fn is_due(&self) -> bool {
        let is_measured = self.measured.read().unwrap_or_else(PoisonError::into_inner).is_some();
        !is_measured || !self.written().is_empty()
    }
}

/// Measures until `stop`.
pub async fn measure(gateway: Arc<Gateway>, stop: CancellationToken) {
    let quotas = &gateway.quotas;
    let mut is_asked = false;
    let mut earliest = Instant::now();
    loop {
        let mut wait = INTERVAL;
        if is_asked || quotas.is_due() {
            let began = Instant::now();
            if let Err(error) = quotas.measure(&gateway.database).await {
                tracing::debug!(error = %chain(&error), "the apps' sizes are not measured; trying again");
                wait = RETRY_INTERVAL;
            }
            earliest = Instant::now() + pause(began.elapsed());
        }
        let next = earliest.max(Instant::now() + wait);
        is_asked = tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(next) => false,
            () = quotas.asked(earliest) => true,
        };
    }
}

/// The least time between two measurements, after one that took `duration`.
fn pause(duration: Duration) -> Duration {
    MIN_INTERVAL.max(duration.saturating_mul(MIN_INTERVAL_IN_DURATIONS))
}

async fn sizes(database: &Database) -> Result<BTreeMap<String, AppSize>, DatabaseError> {
    let client = database.connect().await?;
    Ok(app_sizes::measure(&client).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUOTA: u64 = 1_000_000;

    fn quotas(bytes: u64, rows: u64) -> Quotas {
        let sizes = BTreeMap::from([("notes".to_owned(), AppSize { bytes, rows })]);
        Quotas {
            default: QUOTA,
            measured: RwLock::new(Some(Arc::new(sizes))),
            written: Mutex::default(),
            due: Notify::new(),
            settings: Mutex::default(),
        }
    }

    fn settings(quota: u64) -> Arc<Settings> {
        let text = format!(r#"{{"storage": {{"appBytes": {quota}}}}}"#);
        Arc::new(Settings::parse(text.as_bytes()).unwrap())
    }

    fn send(quotas: &Quotas, size: WriteSize) -> SentWrite<'_> {
        quotas.send(|| settings(QUOTA), "notes", size)
    }

    async fn is_asked(quotas: &Quotas) -> bool {
        tokio::time::timeout(Duration::from_millis(10), quotas.due.notified()).await.is_ok()
    }

    #[tokio::test]
    async fn quota_counts_a_write_that_is_dropped_unanswered() {
        let quotas = quotas(0, 0);
        let size = WriteSize { body_bytes: 1000, rows: 1, is_by_filter: false };
        drop(send(&quotas, size));
        assert_eq!(quotas.written()["notes"], 2064);
        assert!(!is_asked(&quotas).await);
        let size = WriteSize { body_bytes: 50_000, ..size };
        drop(send(&quotas, size));
        assert!(is_asked(&quotas).await, "a tenth of the quota");
    }

    #[tokio::test]
    async fn quota_counts_changed_rows_by_their_average_size() {
        let size = WriteSize { body_bytes: 0, rows: 0, is_by_filter: true };
        for ((bytes, rows), expected) in
            [((0, 0), 256), ((300_000, 300), 1000), ((300_000, 3), 8192), ((300, 300), 256)]
        {
            let quotas = quotas(bytes, rows);
            let sent = send(&quotas, size);
            sent.changed.add(7);
            sent.settle();
            assert_eq!(quotas.written()["notes"], 7 * expected);
            assert!(!is_asked(&quotas).await);
            drop(send(&quotas, size));
            assert!(is_asked(&quotas).await, "nobody knows how many rows it changed");
        }
    }

    #[test]
    fn quota_refusal_needs_the_settings_of_now() {
        let quotas = quotas(500, 1);
        let app = Principal::App { slug: "notes".to_owned() };
        assert!(quotas.admit(|| settings(100), &app, "notes").is_err());
        assert!(quotas.admit(|| settings(1000), &app, "notes").is_ok(), "raised a moment ago");
        let loads = std::cell::Cell::new(0);
        let load = || {
            loads.set(loads.get() + 1);
            settings(1000)
        };
        for _ in 0..100 {
            drop(quotas.send(load, "notes", WriteSize { body_bytes: 1, rows: 1, is_by_filter: false }));
        }
        assert_eq!(loads.get(), 0, "loaded a moment ago");
    }

    #[test]
    fn quota_measurements_follow_what_the_last_one_took() {
        assert_eq!(pause(Duration::from_millis(3)), MIN_INTERVAL);
        assert_eq!(pause(Duration::from_secs(2)), Duration::from_secs(20));
    }
}

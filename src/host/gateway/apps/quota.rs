//! Storage quotas for app tables.
//!
//! Schema sizes are measured while apps write. Between measurements, each write adds an estimate when it's sent, even
//! if it fails: PostgreSQL doesn't free space on rollback. Estimates reaching a tenth of the quota trigger a
//! measurement. Once the quota is reached, apps, agents and processes of the owner's user can't add or change rows; the
//! owner and administrators can. Deleting rows is always allowed. Files aren't counted, because apps don't write any.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::auth::Principal;
use crate::database::{Database, DatabaseError};
use svc_host::agents::owner_config::{OwnerSettings, StorageQuotas};
use svc_host::system::app_sizes;
use svc_host::system::app_sizes::AppSize;
use svc_host::system::layout::Layout;
use svc_http::problem::{Code, Problem, format_chain};

/// Interval between measurements while app tables are written to, by any caller.
const MEASURE_INTERVAL: Duration = Duration::from_secs(30);
/// Minimum delay between measurements, including requested ones.
const MIN_MEASURE_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum delay as a multiple of the last measurement's duration: caps measuring at about a tenth of the time.
const MIN_MEASURE_INTERVAL_FACTOR: u32 = 10;
/// Delay before retrying a failed measurement.
const RETRY_DELAY: Duration = Duration::from_secs(5);
const MEASURE_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum age of cached settings for admitting a write. Refusals always use current settings.
const MAX_SETTINGS_AGE: Duration = Duration::from_secs(1);
/// The default quota is the disk size divided by this.
const DEFAULT_QUOTA_DISK_DIVISOR: u64 = 5;
const MIN_DEFAULT_QUOTA_BYTES: u64 = 1 << 30;
/// Estimated ratio of stored bytes to request bytes, to account for indexes and row headers.
const STORAGE_FACTOR: u64 = 2;
/// Estimated size of a row's header and index entries.
const ROW_OVERHEAD_BYTES: u64 = 64;
/// Bounds on the estimated size of a changed row: updates don't rewrite large values, and a PostgreSQL page is 8 KiB.
const MIN_ROW_BYTES: u64 = 256;
const MAX_ROW_BYTES: u64 = 8 << 10;
/// Estimates that reach the quota divided by this trigger a measurement.
const UNMEASURED_SHARE_DIVISOR: u64 = 10;

/// Rows changed by upserts, updates and deletes, including changes rolled back later. Inserts aren't counted: the
/// estimate from the request size covers them.
#[derive(Debug, Default)]
pub struct ChangedRows(AtomicU64);

impl ChangedRows {
    pub fn add(&self, rows: u64) {
        self.0.fetch_add(rows, Ordering::Relaxed);
    }
}

/// Write size, estimated before sending.
#[derive(Debug, Clone, Copy)]
pub struct WriteSize {
    pub body_bytes: usize,
    /// Rows with values in the body.
    pub rows: usize,
    /// Whether a filter selects the rows to change, so their count isn't known in advance.
    pub is_filtered_mutation: bool,
}

/// An in-flight write. Its changed rows are counted on drop, even if it fails.
#[derive(Debug)]
pub struct InFlightWrite<'q> {
    quotas: &'q Quotas,
    slug: &'q str,
    quota_bytes: u64,
    pub changed_rows: ChangedRows,
    /// Whether the write may have changed rows not included in `changed_rows`.
    may_have_uncounted_rows: bool,
}

impl InFlightWrite<'_> {
    /// Completes a write whose `changed_rows` includes all changed rows.
    pub fn complete(mut self) {
        self.may_have_uncounted_rows = false;
    }
}

impl Drop for InFlightWrite<'_> {
    fn drop(&mut self) {
        let rows = self.changed_rows.0.load(Ordering::Relaxed);
        self.quotas.add_estimate(
            self.slug,
            rows.saturating_mul(self.quotas.row_bytes(self.slug)),
            self.quota_bytes,
        );
        if self.may_have_uncounted_rows {
            self.quotas.measure_requested.notify_one();
        }
    }
}

/// App schema sizes by slug, and the estimated writes since the last measurement.
#[derive(Debug)]
pub struct Quotas {
    default_quota_bytes: u64,
    /// `None` until the first measurement.
    measured: RwLock<Option<Arc<BTreeMap<String, AppSize>>>>,
    /// Estimated bytes written, by slug.
    written: Mutex<HashMap<String, u64>>,
    /// Notified to request a measurement.
    measure_requested: Notify,
    /// Cached settings: every write needs them, and loading takes a system call.
    settings: Mutex<Option<(Instant, Arc<OwnerSettings>)>>,
}

impl Quotas {
    pub fn new(layout: &Layout) -> Self {
        let disk = fs4::statvfs(layout.home()).map_or(0, |disk| disk.total_space());
        Self {
            default_quota_bytes: (disk / DEFAULT_QUOTA_DISK_DIVISOR).max(MIN_DEFAULT_QUOTA_BYTES),
            measured: RwLock::default(),
            written: Mutex::default(),
            measure_requested: Notify::new(),
            settings: Mutex::default(),
        }
    }

    /// Returns settings at most [`MAX_SETTINGS_AGE`] old, calling `load` if the cached ones are older.
    fn recent_settings(&self, load: impl FnOnce() -> Arc<OwnerSettings>) -> Arc<OwnerSettings> {
        let now = Instant::now();
        let mut cached = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some((loaded, settings)) if now.duration_since(*loaded) < MAX_SETTINGS_AGE => {
                Arc::clone(settings)
            }
            _ => Arc::clone(&cached.insert((now, load())).1),
        }
    }

    /// An app's quota, in bytes.
    pub fn quota_bytes(&self, settings: &StorageQuotas, slug: &str) -> u64 {
        settings.quota_for(slug).unwrap_or(self.default_quota_bytes)
    }

    /// Last measured size of an app's tables and indexes, in bytes. `None` before the first measurement.
    pub fn measured_bytes(&self, slug: &str) -> Option<u64> {
        self.size(slug).map(|size| size.bytes)
    }

    fn size(&self, slug: &str) -> Option<AppSize> {
        let measured = self.measured.read().unwrap_or_else(PoisonError::into_inner);
        measured.as_ref().map(|sizes| sizes.get(slug).copied().unwrap_or_default())
    }

    /// Estimated size of a changed row.
    fn row_bytes(&self, slug: &str) -> u64 {
        let size = self.size(slug).unwrap_or_default();
        size.bytes.checked_div(size.rows).unwrap_or(0).clamp(MIN_ROW_BYTES, MAX_ROW_BYTES)
    }

    /// Admits a request that adds or changes rows; `load` returns the owner's current settings.
    ///
    /// # Errors
    /// `storage_quota_reached` if the app's tables have reached their quota, unless the principal is the owner or an
    /// administrator.
    pub fn admit(
        &self,
        load: impl Fn() -> Arc<OwnerSettings>,
        principal: &Principal,
        slug: &str,
    ) -> Result<(), Problem> {
        if matches!(principal, Principal::Owner { .. } | Principal::Admin) {
            return Ok(());
        }
        let Some(measured) = self.measured_bytes(slug) else { return Ok(()) };
        let written = self.written().get(slug).copied().unwrap_or(0);
        let used = measured.saturating_add(written);
        if used < self.quota_bytes(&self.recent_settings(&load).storage, slug) {
            return Ok(());
        }
        let quota = self.quota_bytes(&load().storage, slug);
        if used < quota {
            return Ok(());
        }
        self.measure_requested.notify_one();
        let detail = format!(
            "The tables of {slug} have reached their quota of {quota} bytes: delete rows, or ask the owner to raise \
             storage.apps.{slug} in system/config.json."
        );
        Err(Problem::new(Code::StorageQuotaReached, detail))
    }

    /// Counts a write before it's sent.
    pub fn begin_write<'q>(
        &'q self,
        load: impl FnOnce() -> Arc<OwnerSettings>,
        slug: &'q str,
        size: WriteSize,
    ) -> InFlightWrite<'q> {
        let saturating_u64 = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let rows = saturating_u64(size.rows).saturating_mul(ROW_OVERHEAD_BYTES);
        let bytes = saturating_u64(size.body_bytes).saturating_mul(STORAGE_FACTOR).saturating_add(rows);
        let quota_bytes = self.quota_bytes(&self.recent_settings(load).storage, slug);
        self.add_estimate(slug, bytes, quota_bytes);
        InFlightWrite {
            quotas: self,
            slug,
            quota_bytes,
            changed_rows: ChangedRows::default(),
            may_have_uncounted_rows: size.is_filtered_mutation,
        }
    }

    /// Adds an estimate, and requests a measurement once the sum reaches the quota divided by
    /// [`UNMEASURED_SHARE_DIVISOR`].
    fn add_estimate(&self, slug: &str, bytes: u64, quota_bytes: u64) {
        if self.add_written(slug, bytes) >= quota_bytes / UNMEASURED_SHARE_DIVISOR {
            self.measure_requested.notify_one();
        }
    }

    /// Returns the new sum.
    fn add_written(&self, slug: &str, bytes: u64) -> u64 {
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
        // Writes from here on may already be included in the measured sizes; those are double-counted until the next
        // measurement.
        let estimates = std::mem::take(&mut *self.written());
        let sizes = tokio::time::timeout(MEASURE_TIMEOUT, measure_sizes(database)).await;
        match sizes.unwrap_or(Err(DatabaseError::Timeout)) {
            Ok(sizes) => {
                *self.measured.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(sizes));
                Ok(())
            }
            Err(error) => {
                for (slug, bytes) in estimates {
                    self.add_written(&slug, bytes);
                }
                Err(error)
            }
        }
    }

    /// Waits until a measurement is requested, but at least until `earliest`.
    async fn wait_for_request(&self, earliest: Instant) {
        self.measure_requested.notified().await;
        tokio::time::sleep_until(earliest).await;
    }

    fn is_due(&self) -> bool {
        let is_measured = self.measured.read().unwrap_or_else(PoisonError::into_inner).is_some();
        !is_measured || !self.written().is_empty()
    }
}

/// Measures app schema sizes, periodically and on request, until `stop` is cancelled.
pub async fn measure_periodically(quotas: Arc<Quotas>, database: Arc<Database>, stop: CancellationToken) {
    let mut is_requested = false;
    let mut earliest = Instant::now();
    loop {
        let mut wait = MEASURE_INTERVAL;
        if is_requested || quotas.is_due() {
            let started = Instant::now();
            if let Err(error) = quotas.measure(&database).await {
                tracing::debug!(error = %format_chain(&error), "cannot measure app sizes; retrying");
                wait = RETRY_DELAY;
            }
            earliest = Instant::now() + min_delay(started.elapsed());
        }
        let next = earliest.max(Instant::now() + wait);
        is_requested = tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(next) => false,
            () = quotas.wait_for_request(earliest) => true,
        };
    }
}

/// Minimum delay after a measurement that took `duration`.
fn min_delay(duration: Duration) -> Duration {
    MIN_MEASURE_INTERVAL.max(duration.saturating_mul(MIN_MEASURE_INTERVAL_FACTOR))
}

async fn measure_sizes(database: &Database) -> Result<BTreeMap<String, AppSize>, DatabaseError> {
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
            default_quota_bytes: QUOTA,
            measured: RwLock::new(Some(Arc::new(sizes))),
            written: Mutex::default(),
            measure_requested: Notify::new(),
            settings: Mutex::default(),
        }
    }

    fn settings(quota: u64) -> Arc<OwnerSettings> {
        let text = format!(r#"{{"storage": {{"appBytes": {quota}}}}}"#);
        Arc::new(OwnerSettings::parse(text.as_bytes()).unwrap())
    }

    fn begin_write(quotas: &Quotas, size: WriteSize) -> InFlightWrite<'_> {
        quotas.begin_write(|| settings(QUOTA), "notes", size)
    }

    async fn is_measurement_requested(quotas: &Quotas) -> bool {
        tokio::time::timeout(Duration::from_millis(10), quotas.measure_requested.notified()).await.is_ok()
    }

    #[tokio::test]
    async fn quota_counts_write_dropped_without_response() {
        let quotas = quotas(0, 0);
        let size = WriteSize { body_bytes: 1000, rows: 1, is_filtered_mutation: false };
        drop(begin_write(&quotas, size));
        assert_eq!(quotas.written()["notes"], 2064);
        assert!(!is_measurement_requested(&quotas).await);
        let size = WriteSize { body_bytes: 50_000, ..size };
        drop(begin_write(&quotas, size));
        assert!(
            is_measurement_requested(&quotas).await,
            "estimates above a tenth of the quota did not request a measurement"
        );
    }

    #[tokio::test]
    async fn quota_counts_changed_rows_by_their_average_size() {
        let size = WriteSize { body_bytes: 0, rows: 0, is_filtered_mutation: true };
        for ((bytes, rows), expected) in
            [((0, 0), 256), ((300_000, 300), 1000), ((300_000, 3), 8192), ((300, 300), 256)]
        {
            let quotas = quotas(bytes, rows);
            let write = begin_write(&quotas, size);
            write.changed_rows.add(7);
            write.complete();
            assert_eq!(quotas.written()["notes"], 7 * expected);
            assert!(!is_measurement_requested(&quotas).await);
            drop(begin_write(&quotas, size));
            assert!(
                is_measurement_requested(&quotas).await,
                "an unknown number of changed rows did not request a measurement"
            );
        }
    }

    #[test]
    fn quota_refusal_uses_current_settings() {
        let quotas = quotas(500, 1);
        let app = Principal::App { slug: "notes".to_owned() };
        assert!(quotas.admit(|| settings(100), &app, "notes").is_err());
        assert!(quotas.admit(|| settings(1000), &app, "notes").is_ok(), "the raised quota was not used");
        let loads = std::cell::Cell::new(0);
        let load = || {
            loads.set(loads.get() + 1);
            settings(1000)
        };
        for _ in 0..100 {
            drop(quotas.begin_write(
                load,
                "notes",
                WriteSize { body_bytes: 1, rows: 1, is_filtered_mutation: false },
            ));
        }
        assert_eq!(loads.get(), 0, "recent settings were loaded again");
    }

    #[test]
    fn measurement_delay_grows_with_duration() {
        assert_eq!(min_delay(Duration::from_millis(3)), MIN_MEASURE_INTERVAL);
        assert_eq!(min_delay(Duration::from_secs(2)), Duration::from_secs(20));
    }
}

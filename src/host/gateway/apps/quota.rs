//! How much of the disk each app's rows may take.
//!
//! The sizes of the apps' schemas are measured while apps write; in between, the bytes of accepted requests count. At its
//! quota an app, an agent or a process of the owner's user adds and changes no rows; the owner does, and rows can always be
//! deleted. Files are not counted: an app writes none.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::host::app_sizes;
use crate::host::gateway::auth::Principal;
use crate::host::gateway::database::{Database, DatabaseError};
use crate::host::gateway::state::Gateway;
use crate::host::layout::Layout;
use crate::host::settings::{Settings, StorageQuotas};
use crate::http::problem::{Code, Problem, chain};

/// Between two measurements of a database that is written to.
const INTERVAL: Duration = Duration::from_secs(30);
/// At least, also where a refused app asks for one.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MEASURE_TIMEOUT: Duration = Duration::from_secs(20);
/// The part of the disk that is an app's where the settings give no number.
const DEFAULT_PART_OF_DISK: u64 = 5;
const MIN_DEFAULT: u64 = 1 << 30;
/// Indexes and row headers: rows take about so many times the bytes of their request.
const EXPANSION: u64 = 2;

/// Sizes of the apps' schemas, by slug, and what has been written since they were measured.
#[derive(Debug)]
pub struct Quotas {
    /// Bytes.
    default: u64,
    /// `None` until the first measurement.
    measured: RwLock<Option<Arc<BTreeMap<String, u64>>>>,
    written: Mutex<HashMap<String, u64>>,
    /// Asks for a measurement now.
    due: Notify,
}

impl Quotas {
    pub fn new(layout: &Layout) -> Self {
        let disk = fs4::statvfs(layout.home()).map_or(0, |disk| disk.total_space());
        Self {
            default: (disk / DEFAULT_PART_OF_DISK).max(MIN_DEFAULT),
            measured: RwLock::default(),
            written: Mutex::default(),
            due: Notify::new(),
        }
    }

    /// The quota of an app in bytes.
    pub fn of(&self, settings: &StorageQuotas, slug: &str) -> u64 {
        settings.of(slug).unwrap_or(self.default)
    }

    /// The bytes of an app's tables with their indexes, as last measured; `None` before the first measurement.
    pub fn measured(&self, slug: &str) -> Option<u64> {
        let measured = self.measured.read().unwrap_or_else(PoisonError::into_inner);
        measured.as_ref().map(|sizes| sizes.get(slug).copied().unwrap_or(0))
    }

    /// Admits a request that adds or changes rows; `settings` are read only where they matter.
    ///
    /// # Errors
    /// `storage_quota_reached`.
    pub fn admit(
        &self,
        settings: impl FnOnce() -> Arc<Settings>,
        principal: &Principal,
        slug: &str,
    ) -> Result<(), Problem> {
        if matches!(principal, Principal::Owner { .. } | Principal::Admin) {
            return Ok(());
        }
        let Some(measured) = self.measured(slug) else { return Ok(()) };
        let written = self.written().get(slug).copied().unwrap_or(0);
        let quota = self.of(&settings().storage, slug);
        if measured.saturating_add(written.saturating_mul(EXPANSION)) < quota {
            return Ok(());
        }
        self.due.notify_one();
        let detail = format!(
            "The tables of {slug} have reached their quota of {quota} bytes: delete rows, or have the owner raise \
             storage.apps.{slug} in system/config.json."
        );
        Err(Problem::new(Code::StorageQuotaReached, detail))
    }

    /// Counts a request that was carried out, in bytes of its body.
    pub fn count(&self, slug: &str, bytes: usize) {
        let mut written = self.written();
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        match written.get_mut(slug) {
            Some(sum) => *sum = sum.saturating_add(bytes),
            None => {
                written.insert(slug.to_owned(), bytes);
            }
        }
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
                    self.count(&slug, usize::try_from(bytes).unwrap_or(usize::MAX));
                }
                Err(error)
            }
        }
    }

    fn is_due(&self) -> bool {
        let is_measured = self.measured.read().unwrap_or_else(PoisonError::into_inner).is_some();
        !is_measured || !self.written().is_empty()
    }
}

/// Measures until `stop`.
pub async fn measure(gateway: Arc<Gateway>, stop: CancellationToken) {
    let quotas = &gateway.quotas;
    loop {
        let mut wait = INTERVAL;
        if quotas.is_due()
            && let Err(error) = quotas.measure(&gateway.database).await
        {
            tracing::debug!(error = %chain(&error), "the apps' sizes are not measured; trying again");
            wait = Duration::from_secs(5);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
            () = quotas.due.notified() => {
                // A refused app asks for it again and again.
                tokio::time::sleep(MIN_INTERVAL).await;
                if let Err(error) = quotas.measure(&gateway.database).await {
                    tracing::debug!(error = %chain(&error), "the apps' sizes are not measured");
                }
            }
        }
    }
}

async fn sizes(database: &Database) -> Result<BTreeMap<String, u64>, DatabaseError> {
    let client = database.connect().await?;
    Ok(app_sizes::measure(&client).await?)
}

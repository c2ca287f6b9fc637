//! The kernel holds the owner's settings, the records, and each user's spending and reservations.
//!
//! The usage store is loaded in the background so the gateway can already accept connections. Until then, requests that
//! need the store get a 503 with `Retry-After`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::Date;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

pub use super::budget::{LimitReached, Reservation};

use super::live_settings::LiveSettings;
use super::owner_config::OwnerSettings;
use crate::records::entry::Interaction;
use crate::records::find_interactions::find_interactions;
use crate::records::money::Dollars;
use crate::records::page::PageError;
use crate::records::usage_store::{RestoreDetector, UsageStore};
use crate::records::writer::{Records, Writer};
use crate::system::layout::Layout;
use svc_base::error_chain::format_chain;
use svc_http::problem::{Code, Problem};
use svc_http::rate_limit::RateLimit;

/// Interval between writes to `usage.jsonl`.
const USAGE_WRITE_INTERVAL: Duration = Duration::from_secs(300);
/// Interval between checks for a new day and for changed settings.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum time a request waits for the usage store.
const USAGE_STORE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of concurrent log streams.
const MAX_LOG_STREAMS: usize = 32;
/// Delay before retrying a failed read of the records.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum interval between refusal notes per user.
const REFUSAL_NOTE_INTERVAL: Duration = Duration::from_secs(60);

pub struct Kernel {
    layout: Layout,
    settings: LiveSettings,
    /// Serializes settings changes.
    settings_lock: Arc<Mutex<()>>,
    records: Records,
    /// `None` after [`Self::close`].
    writer: Mutex<Option<Writer>>,
    usage_store: OnceLock<UsageStore>,
    /// Amounts reserved for active dispatches, by user.
    pub(super) reserved: Mutex<HashMap<String, Dollars>>,
    /// Limits concurrent log streams.
    log_streams: Arc<Semaphore>,
    /// Cancelled once the usage store is open.
    usage_store_opened: CancellationToken,
    /// Per-user rate limit for refusal notes.
    refusal_notes: RateLimit<String>,
}

impl Kernel {
    /// # Errors
    /// A writer thread can't be started.
    pub fn new(layout: &Layout) -> std::io::Result<Self> {
        let writer = Writer::start(layout.logs())?;
        let records = writer.records();
        Ok(Self {
            layout: layout.clone(),
            settings: LiveSettings::new(layout.settings(), layout.last_good_settings(), records.clone()),
            settings_lock: Arc::default(),
            records,
            writer: Mutex::new(Some(writer)),
            usage_store: OnceLock::new(),
            reserved: Mutex::default(),
            log_streams: Arc::new(Semaphore::new(MAX_LOG_STREAMS)),
            usage_store_opened: CancellationToken::new(),
            refusal_notes: RateLimit::every(REFUSAL_NOTE_INTERVAL, 1),
        })
    }

    pub fn records(&self) -> &Records {
        &self.records
    }

    /// Returns the log file directory.
    pub fn logs(&self) -> PathBuf {
        self.layout.logs()
    }

    /// Returns the lock to hold while changing the owner's settings.
    pub fn settings_lock(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.settings_lock)
    }

    /// Reserves a slot for one log stream; dropping the permit frees it. Returns `None` if all slots are taken.
    pub fn admit_log_stream(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.log_streams).try_acquire_owned().ok()
    }

    /// The owner's current settings.
    pub fn settings(&self) -> Arc<OwnerSettings> {
        self.settings.current(|settings, period| self.describe_spending(settings, period))
    }

    /// Writes a line to `activity.log`. A dropped line is reported as a gap.
    pub fn note(&self, text: &str) {
        let _ = self.records.note(text);
    }

    /// Notes in `activity.log` that a cost limit refused a dispatch, at most once a minute per user.
    pub fn note_refusal(&self, user: &str, reason: &str) {
        if self.refusal_notes.check(&user.to_owned()).is_ok() {
            self.note(&format!("a dispatch from {user} was refused: {reason}"));
        }
    }

    /// Waits until all earlier records are durable, as [`Records::flush`] does.
    pub fn flush(&self, timeout: Duration) -> bool {
        self.records.flush(timeout)
    }

    /// Finds interactions by id or batch id: see [`find_interactions`].
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn find_interactions(
        &self,
        ids: &BTreeSet<String>,
        since: Option<Timestamp>,
    ) -> Result<BTreeMap<String, Interaction>, PageError> {
        find_interactions(&self.layout.logs(), ids, since)
    }

    /// Waits up to `USAGE_STORE_TIMEOUT` for the usage store to be read, and returns it.
    ///
    /// # Errors
    /// The records are still being read after `USAGE_STORE_TIMEOUT`.
    pub async fn wait_for_usage_store(&self) -> Result<&UsageStore, Problem> {
        // A timeout shows up in the result below.
        let _ = tokio::time::timeout(USAGE_STORE_TIMEOUT, self.usage_store_opened.cancelled()).await;
        self.usage_store()
    }

    /// # Errors
    /// The records are still being read.
    pub fn usage_store(&self) -> Result<&UsageStore, Problem> {
        self.usage_store.get().ok_or_else(|| {
            Problem::new(Code::Unavailable, "The records are still being read.").retry_after(1)
        })
    }

    /// Opens the store, then writes it periodically and seals it at the end of each day, until `stop`.
    pub async fn maintain(self: Arc<Self>, stop: CancellationToken) {
        while self.usage_store.get().is_none() {
            let kernel = Arc::clone(&self);
            let opened = tokio::task::spawn_blocking(move || kernel.open_usage_store()).await;
            if !matches!(opened, Ok(true))
                && stop.run_until_cancelled(tokio::time::sleep(RETRY_INTERVAL)).await.is_none()
            {
                return;
            }
        }
        let mut last_write = tokio::time::Instant::now();
        let mut day = self.today();
        while stop.run_until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await.is_some() {
            // After a restore, reread the store before the settings, because the changed-limit note includes the
            // spending.
            let is_outdated = self.usage_store.get().is_some_and(UsageStore::is_outdated);
            // Reading the settings reports a changed limit now rather than at the next dispatch.
            let today = if is_outdated { day } else { self.today() };
            if is_outdated || today != day || last_write.elapsed() >= USAGE_WRITE_INTERVAL {
                let kernel = Arc::clone(&self);
                let is_new_day = today != day;
                let work = move || {
                    let store = kernel.usage_store.get();
                    store.map(|store| if is_new_day { store.seal() } else { store.write() })
                };
                // If the task panicked, the panic hook has already logged it.
                let _ = tokio::task::spawn_blocking(work).await;
                (last_write, day) = (tokio::time::Instant::now(), today);
            }
        }
    }

    fn today(&self) -> Date {
        self.settings().calendar.day(Timestamp::now())
    }

    /// Opens the store; logs failures. Returns whether this call opened it.
    pub(super) fn open_usage_store(&self) -> bool {
        let (logs, seals) = (self.layout.logs(), self.layout.usage_seals());
        let detector = RestoreDetector::new(self.layout.files_restore_outcome());
        match UsageStore::open(self.records.clone(), logs, seals) {
            Ok(store) => {
                let store = store.with_restore_detector(detector);
                let is_first = self.usage_store.set(store).is_ok();
                self.usage_store_opened.cancel();
                is_first
            }
            Err(error) => {
                tracing::error!(error = %format_chain(&error), "cannot read the records; retrying");
                false
            }
        }
    }

    /// Seals the store and stops the writer at shutdown.
    pub fn close(&self) {
        if let Some(store) = self.usage_store.get() {
            store.seal();
        }
        drop(self.writer.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

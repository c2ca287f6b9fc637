//! The kernel: agent runs, their cost and their records.
//!
//! The usage book is read in the background, since the port listens earlier; until then, its users get a 503 with
//! `Retry-After`.

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
use super::owner_config::Settings;
use crate::records::entry::Interaction;
use crate::records::find;
use crate::records::money::Dollars;
use crate::records::page::PageError;
use crate::records::usage_book::Book;
use crate::records::writer::{Records, Writer};
use crate::system::layout::Layout;
use svc_base::chain::chain;
use svc_http::problem::{Code, Problem};
use svc_http::rate::RateLimit;

/// Interval of writing `usage.jsonl`.
const USAGE_WRITE_INTERVAL: Duration = Duration::from_secs(300);
/// Interval of checks for a new day and changed settings.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum time that a request waits for the book.
const BOOK_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_LISTENERS: usize = 32;
/// Interval of retries to read the records.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of the notes that a limit has refused a user's dispatches.
const REFUSAL_NOTE_INTERVAL: Duration = Duration::from_secs(60);

pub struct Kernel {
    layout: Layout,
    settings: LiveSettings,
    /// Serializes changes of the settings.
    changing: Arc<Mutex<()>>,
    records: Records,
    /// `None` after [`Self::close`].
    writer: Mutex<Option<Writer>>,
    book: OnceLock<Book>,
    /// Reserved amounts of active dispatches, by user.
    pub(super) reserved: Mutex<HashMap<String, Dollars>>,
    /// Limits concurrent streams of records.
    listeners: Arc<Semaphore>,
    /// Cancelled when the book is open.
    opened: CancellationToken,
    /// Limits the notes of refused dispatches, by user.
    refusal_notes: RateLimit<String>,
}

impl Kernel {
    /// # Errors
    /// The writer's thread cannot be started.
    pub fn new(layout: &Layout) -> std::io::Result<Self> {
        let writer = Writer::start(layout.logs())?;
        let records = writer.records();
        Ok(Self {
            layout: layout.clone(),
            settings: LiveSettings::new(layout.settings(), layout.good_settings(), records.clone()),
            changing: Arc::default(),
            records,
            writer: Mutex::new(Some(writer)),
            book: OnceLock::new(),
            reserved: Mutex::default(),
            listeners: Arc::new(Semaphore::new(MAX_LISTENERS)),
            opened: CancellationToken::new(),
            refusal_notes: RateLimit::every(REFUSAL_NOTE_INTERVAL, 1),
        })
    }

    pub fn records(&self) -> &Records {
        &self.records
    }

    /// The directory of the records.
    pub fn logs(&self) -> PathBuf {
        self.layout.logs()
    }

    /// Held while the owner's settings are changed, so that changes are serialized.
    pub fn settings_lock(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.changing)
    }

    /// Admits one more stream of records, until the permit is dropped.
    pub fn admit_listener(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.listeners).try_acquire_owned().ok()
    }

    /// The owner's current settings.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.current(|settings, period| self.describe_spent(settings, period))
    }

    /// Writes a line of `activity.log`. A dropped line is reported as a gap.
    pub fn note(&self, what: &str) {
        let _ = self.records.note(what);
    }

    /// Writes a line of `activity.log` that a cost limit has refused a dispatch, at most once a minute for each user.
    pub fn note_refusal(&self, user: &str, why: &str) {
        if self.refusal_notes.check(&user.to_owned()).is_ok() {
            self.note(&format!("a dispatch of {user} was refused: {why}"));
        }
    }

    /// Waits until all earlier records are durable; `false` on timeout.
    pub fn flush(&self, within: Duration) -> bool {
        self.records.flush(within)
    }

    /// Finds interactions by their IDs, or their batches' IDs.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn find(&self, ids: &BTreeSet<String>) -> Result<BTreeMap<String, Interaction>, PageError> {
        find::interactions(&self.layout.logs(), ids)
    }

    /// The book; waits for it for a short time while it is being read.
    ///
    /// # Errors
    /// The records are still being read after `BOOK_TIMEOUT`.
    pub async fn ready(&self) -> Result<&Book, Problem> {
        // The result below shows whether it was opened in time.
        let _ = tokio::time::timeout(BOOK_TIMEOUT, self.opened.cancelled()).await;
        self.book()
    }

    pub fn book(&self) -> Result<&Book, Problem> {
        self.book.get().ok_or_else(|| {
            Problem::new(Code::Unavailable, "The records are still being read.").retry_after(1)
        })
    }

    /// Opens the book, then seals and writes it periodically until `stop`.
    pub async fn maintain(self: Arc<Self>, stop: CancellationToken) {
        while self.book.get().is_none() {
            let kernel = Arc::clone(&self);
            let opened = tokio::task::spawn_blocking(move || kernel.open()).await;
            if !matches!(opened, Ok(true))
                && stop.run_until_cancelled(tokio::time::sleep(RETRY_INTERVAL)).await.is_none()
            {
                return;
            }
        }
        let mut written = tokio::time::Instant::now();
        let mut day = self.today();
        while stop.run_until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await.is_some() {
            // Reading the settings reports a changed limit now rather than at the next dispatch.
            let today = self.today();
            if today != day || written.elapsed() >= USAGE_WRITE_INTERVAL {
                let kernel = Arc::clone(&self);
                let seal = today != day;
                let work =
                    move || kernel.book.get().map(|book| if seal { book.seal() } else { book.write() });
                // The panic hook has logged a panic.
                let _ = tokio::task::spawn_blocking(work).await;
                (written, day) = (tokio::time::Instant::now(), today);
            }
        }
    }

    fn today(&self) -> Date {
        self.settings().calendar.day(Timestamp::now())
    }

    pub(super) fn open(&self) -> bool {
        let (logs, seals) = (self.layout.logs(), self.layout.usage_seals());
        match Book::open(self.records.clone(), logs, seals) {
            Ok(book) => {
                let is_first = self.book.set(book).is_ok();
                self.opened.cancel();
                is_first
            }
            Err(error) => {
                tracing::error!(error = %chain(&error), "cannot read the records; retrying");
                false
            }
        }
    }

    /// Seals the book and stops the writer, at shutdown.
    pub fn close(&self) {
        if let Some(book) = self.book.get() {
            book.seal();
        }
        drop(self.writer.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

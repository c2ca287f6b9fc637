//! The kernel: what agents do for the owner, what it costs, and the records of it.
//!
//! The book of usage is read behind the start, for the port listens before it: until then, whoever needs it is told to
//! come again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::Date;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

pub use super::budget::{Reached, Reservation};

use super::live_settings::Live;
use super::owner_config::Settings;
use crate::chain::chain;
use crate::host::records::book::Book;
use crate::host::records::entry::Interaction;
use crate::host::records::find;
use crate::host::records::money::Dollars;
use crate::host::records::page::PageError;
use crate::host::records::writer::{Records, Writer};
use crate::host::system::layout::Layout;
use crate::http::problem::{Code, Problem};

/// How often `usage.jsonl` gets what it lacks.
const WRITE_USAGE: Duration = Duration::from_secs(300);
/// How often it is looked whether a day has begun, and whether the settings have changed.
const LOOK: Duration = Duration::from_secs(5);
/// How long a request waits for the book.
const READING: Duration = Duration::from_secs(2);
const MOST_LISTENERS: usize = 32;
/// Records that could not be read are tried again after this.
const AGAIN: Duration = Duration::from_secs(5);

pub struct Kernel {
    layout: Layout,
    settings: Live,
    /// One at a time changes the settings.
    changing: Arc<Mutex<()>>,
    records: Records,
    /// `None` once it has ended.
    writer: Mutex<Option<Writer>>,
    book: OnceLock<Book>,
    /// What is set aside for the dispatches that run or wait, by user.
    pub(super) reserved: Mutex<HashMap<String, Dollars>>,
    /// Streams of records that may be open at once.
    listeners: Arc<Semaphore>,
    /// Cancelled when the book is there.
    opened: CancellationToken,
}

impl Kernel {
    /// # Errors
    /// When there can be no thread for the records.
    pub fn new(layout: &Layout) -> std::io::Result<Self> {
        let writer = Writer::start(layout.logs())?;
        let records = writer.records();
        Ok(Self {
            layout: layout.clone(),
            settings: Live::new(layout.settings(), layout.good_settings(), records.clone()),
            changing: Arc::default(),
            records,
            writer: Mutex::new(Some(writer)),
            book: OnceLock::new(),
            reserved: Mutex::default(),
            listeners: Arc::new(Semaphore::new(MOST_LISTENERS)),
            opened: CancellationToken::new(),
        })
    }

    pub fn records(&self) -> &Records {
        &self.records
    }

    /// The directory of the records.
    pub fn logs(&self) -> PathBuf {
        self.layout.logs()
    }

    /// Held while the owner's settings are changed: one change at a time.
    pub fn settings_lock(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.changing)
    }

    /// Room for one more stream of records, until the permit is dropped.
    pub fn admit_listener(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.listeners).try_acquire_owned().ok()
    }

    /// What is known of the owner's settings now.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.current(|settings, period| self.already(settings, period))
    }

    /// A line of `activity.log`. One that has no room is told by its gap.
    pub fn note(&self, what: &str) {
        let _ = self.records.note(what);
    }

    /// Waits until all that was recorded before is durable; `false` where the disk does not take it in time.
    pub fn flush(&self, within: Duration) -> bool {
        self.records.flush(within)
    }

    /// Interactions by their ids, or their batches' ids.
    ///
    /// # Errors
    /// The file system's.
    pub fn find(&self, ids: &BTreeSet<String>) -> Result<BTreeMap<String, Interaction>, PageError> {
        find::interactions(&self.layout.logs(), ids)
    }

    /// The book, which is waited for where it is just being read.
    ///
    /// # Errors
    /// While the records are read for longer.
    pub async fn ready(&self) -> Result<&Book, Problem> {
        // Whether it came in time is seen below.
        let _ = tokio::time::timeout(READING, self.opened.cancelled()).await;
        self.book()
    }

    pub fn book(&self) -> Result<&Book, Problem> {
        self.book.get().ok_or_else(|| {
            Problem::new(Code::Unavailable, "The records are still being read.").retry_after(1)
        })
    }

    /// Reads the records, then sees to what happens by the clock, until it is told to end.
    pub async fn tend(self: Arc<Self>, stop: CancellationToken) {
        while self.book.get().is_none() {
            let kernel = Arc::clone(&self);
            let opened = tokio::task::spawn_blocking(move || kernel.open()).await;
            if !matches!(opened, Ok(true))
                && stop.run_until_cancelled(tokio::time::sleep(AGAIN)).await.is_none()
            {
                return;
            }
        }
        let mut written = tokio::time::Instant::now();
        let mut day = self.today();
        while stop.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
            // A limit that is armed is told when it is, not at the next dispatch.
            let today = self.today();
            if today != day || written.elapsed() >= WRITE_USAGE {
                let kernel = Arc::clone(&self);
                let seal = today != day;
                let work =
                    move || kernel.book.get().map(|book| if seal { book.seal() } else { book.write() });
                // A panic in there has been told by its own message.
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
                tracing::error!(error = %chain(&error), "the records cannot be read; trying again");
                false
            }
        }
    }

    /// All that is recorded is written, for this process ends.
    pub fn close(&self) {
        if let Some(book) = self.book.get() {
            book.seal();
        }
        drop(self.writer.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

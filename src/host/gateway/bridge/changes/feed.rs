//! State shared by all change streams: the position up to which no transaction is still running, which is polled once
//! for all of them. The feed also cleans up the outbox.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::read::{self, FeedHead};
use super::shared_read::SharedReads;
use crate::apps::Registry;
use crate::database::outbox::{self, OutboxRetention};
use crate::database::{Database, DatabaseError};
use crate::name::SqlIdentifier;
use svc_http::problem::format_chain;

/// Poll interval for changes that no notification announces, such as those settled by the end of a long transaction.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const POLL_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay that batches the notifications of concurrent writes.
const BATCH_DELAY: Duration = Duration::from_millis(10);
const CLEANUP_INTERVAL: Duration = Duration::from_secs(60);
const MAX_OUTBOX_ROWS: i64 = 100_000;
/// Days without a stream after which an app's tables lose their triggers.
const UNWATCH_AFTER_DAYS: i32 = 7;

/// Maximum numbers of open streams.
#[derive(Debug, Clone, Copy)]
pub struct StreamLimits {
    /// For all clients together.
    total: usize,
    /// For all apps and their agents together; the rest is reserved for the other clients, such as the owner.
    all_apps: usize,
    /// For one app and its agents.
    per_app: usize,
}

impl StreamLimits {
    /// Derives the limits from the listener's maximum number of connections. The platform's router can use three
    /// quarters of the connections, and streams at most five eighths, so that some remain for other requests. No app
    /// can use more than half of the streams.
    pub fn from_connections(max_connections: usize) -> Self {
        let total = max_connections / 8 * 5;
        Self { total, all_apps: total / 8 * 7, per_app: total / 2 }
    }
}

/// The state of the change feed.
pub struct ChangeFeed {
    limits: StreamLimits,
    wakeup: Arc<Notify>,
    head: watch::Sender<FeedHead>,
    open_streams: AtomicUsize,
    /// Number of open streams by app.
    streams_by_app: Mutex<HashMap<String, usize>>,
    /// Number of open streams that follow a schema, by schema.
    streams_by_schema: Mutex<HashMap<String, usize>>,
    reads: SharedReads,
    /// Cancelled when the feed has stopped: all streams then end.
    pub closing: CancellationToken,
}

/// An open stream; counted until it is dropped.
pub struct ChangeStream {
    feed: Arc<ChangeFeed>,
    /// The app that opened the stream, or whose agent did; `None` for other clients, such as the owner.
    app: Option<String>,
    schemas: Vec<String>,
    pub head: watch::Receiver<FeedHead>,
}

impl ChangeFeed {
    pub fn new(limits: StreamLimits) -> Self {
        Self {
            limits,
            wakeup: Arc::default(),
            head: watch::Sender::default(),
            open_streams: AtomicUsize::new(0),
            streams_by_app: Mutex::default(),
            streams_by_schema: Mutex::default(),
            reads: SharedReads::default(),
            closing: CancellationToken::new(),
        }
    }

    /// Starts a poll after a write, if any stream is open.
    pub fn wake(&self) {
        if self.open_streams.load(Ordering::Relaxed) > 0 {
            self.wakeup.notify_one();
        }
    }

    /// Number of open streams.
    pub fn open_streams(&self) -> usize {
        self.open_streams.load(Ordering::Relaxed)
    }

    /// Opens a stream for an app or its agent or, with `None`, for another client; returns `None` at the limit.
    pub fn open_stream(self: &Arc<Self>, app: Option<&str>) -> Option<ChangeStream> {
        let mut streams_by_app = self.streams_by_app();
        if let Some(app) = app {
            let all_app_streams: usize = streams_by_app.values().sum();
            let app_streams = streams_by_app.get(app).copied().unwrap_or(0);
            if all_app_streams >= self.limits.all_apps || app_streams >= self.limits.per_app {
                return None;
            }
        }
        let increment = |streams| (streams < self.limits.total).then_some(streams + 1);
        self.open_streams.fetch_update(Ordering::AcqRel, Ordering::Acquire, increment).ok()?;
        if let Some(app) = app {
            *streams_by_app.entry(app.to_owned()).or_default() += 1;
        }
        let (app, head) = (app.map(str::to_owned), self.head.subscribe());
        Some(ChangeStream { feed: self.clone(), app, schemas: Vec::new(), head })
    }

    fn streams_by_app(&self) -> std::sync::MutexGuard<'_, HashMap<String, usize>> {
        self.streams_by_app.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn streams_by_schema(&self) -> std::sync::MutexGuard<'_, HashMap<String, usize>> {
        self.streams_by_schema.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChangeStream {
    pub fn schemas(&self) -> &[String] {
        &self.schemas
    }

    pub fn shared_reads(&self) -> &SharedReads {
        &self.feed.reads
    }

    /// Follows one more app, and creates its table triggers if necessary. All changes to the app's tables that commit
    /// after this function has returned are recorded.
    ///
    /// # Errors
    /// A database error, such as a lock timeout while a long write locks a table.
    pub async fn follow(&mut self, database: &Database, schema: &SqlIdentifier) -> Result<(), DatabaseError> {
        if self.schemas.iter().any(|followed| followed == schema.as_str()) {
            return Ok(());
        }
        let is_new = !self.feed.streams_by_schema().contains_key(schema.as_str());
        if is_new {
            let mut client = database.connect().await?;
            outbox::start_watching(&mut client, schema).await?;
        }
        *self.feed.streams_by_schema().entry(schema.to_string()).or_default() += 1;
        self.schemas.push(schema.to_string());
        Ok(())
    }

    pub fn closing(&self) -> CancellationToken {
        self.feed.closing.clone()
    }

    /// Reads the current head of the feed and publishes it to all streams.
    pub async fn refresh_head(&self, client: &Client) -> Result<FeedHead, DatabaseError> {
        let head = read::fetch_head(client).await?;
        self.feed.publish(head);
        Ok(head)
    }
}

impl Drop for ChangeStream {
    fn drop(&mut self) {
        self.feed.open_streams.fetch_sub(1, Ordering::AcqRel);
        if let Some(app) = &self.app {
            decrement(&mut self.feed.streams_by_app(), app);
        }
        let mut streams_by_schema = self.feed.streams_by_schema();
        self.schemas.iter().for_each(|schema| decrement(&mut streams_by_schema, schema));
        if self.schemas.iter().any(|schema| !streams_by_schema.contains_key(schema)) {
            self.feed.reads.retain(|schema| streams_by_schema.contains_key(schema));
        }
    }
}

fn decrement(counts: &mut HashMap<String, usize>, name: &str) {
    if let Some(count) = counts.get_mut(name) {
        *count -= 1;
        if *count == 0 {
            counts.remove(name);
        }
    }
}

impl ChangeFeed {
    fn publish(&self, new: FeedHead) {
        self.head.send_if_modified(|head| {
            let is_newer = new.newest > head.newest;
            // Concurrent reads may finish out of order.
            *head = FeedHead { settled: head.settled.max(new.settled), newest: head.newest.max(new.newest) };
            is_newer
        });
    }

    /// Polls the feed while streams are open, and deletes outbox events older than `max_event_age` or beyond
    /// [`MAX_OUTBOX_ROWS`], until `stop` is cancelled. Then ends all streams.
    pub async fn run(
        self: Arc<Self>,
        database: Arc<Database>,
        apps: Arc<Registry>,
        max_event_age: Duration,
        stop: CancellationToken,
    ) {
        let retention = OutboxRetention {
            max_age_seconds: max_event_age.as_secs_f64(),
            max_rows: MAX_OUTBOX_ROWS,
            unwatch_after_days: UNWATCH_AFTER_DAYS,
        };
        let interval = CLEANUP_INTERVAL.min(max_event_age);
        // A cleanup may wait for locks, and must delay neither the polls nor the shutdown.
        let cleanups = self.clean_up_repeatedly(&database, &apps, retention, interval);
        let polls = self.poll_repeatedly(&database);
        stop.run_until_cancelled(async { tokio::join!(cleanups, polls) }).await;
        self.closing.cancel();
    }

    async fn poll_repeatedly(&self, database: &Database) {
        let mut listener: Option<Client> = None;
        loop {
            let has_streams = self.open_streams.load(Ordering::Acquire) > 0;
            tokio::select! {
                () = self.wakeup.notified() => tokio::time::sleep(BATCH_DELAY).await,
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
            if !has_streams {
                listener = None;
                continue;
            }
            if let Err(error) = self.poll_head(database, &mut listener).await {
                tracing::debug!(error = %format_chain(&error), "cannot poll the change feed");
            }
        }
    }

    async fn poll_head(
        &self,
        database: &Database,
        listener: &mut Option<Client>,
    ) -> Result<(), DatabaseError> {
        if listener.as_ref().is_none_or(Client::is_closed) {
            *listener = Some(database.listen(outbox::NOTIFY_CHANNEL, self.wakeup.clone()).await?);
        }
        let polled = tokio::time::timeout(POLL_TIMEOUT, async {
            let client = database.shared_client().await?;
            read::fetch_head(&client).await
        });
        self.publish(polled.await.unwrap_or(Err(DatabaseError::Timeout))?);
        Ok(())
    }

    async fn clean_up_repeatedly(
        &self,
        database: &Database,
        apps: &Registry,
        retention: OutboxRetention,
        interval: Duration,
    ) {
        loop {
            if apps.snapshot().is_loaded {
                self.clean_up(database, retention).await;
                tokio::time::sleep(interval).await;
            } else {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
    }

    async fn clean_up(&self, database: &Database, retention: OutboxRetention) {
        let followed: Vec<String> = self.streams_by_schema().keys().cloned().collect();
        let clean_up = tokio::time::timeout(CLEANUP_INTERVAL, async {
            let mut client = database.connect().await?;
            outbox::clean_up(&mut client, retention, &followed).await
        });
        if let Err(error) = clean_up.await.unwrap_or(Err(DatabaseError::Timeout)) {
            tracing::warn!(error = %format_chain(&error), "cannot clean up the outbox");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_stream_limits_apps_and_reserves_owner_share() {
        let feed = Arc::new(ChangeFeed::new(StreamLimits { total: 128, all_apps: 96, per_app: 16 }));
        let open_all = |app: &str| std::iter::from_fn(|| feed.open_stream(Some(app))).collect::<Vec<_>>();
        let greedy = open_all("greedy");
        assert_eq!(greedy.len(), 16);
        let other_apps: Vec<_> = (0..10).flat_map(|n| open_all(&format!("app-{n}"))).collect();
        assert_eq!(greedy.len() + other_apps.len(), 96);
        let owners: Vec<_> = std::iter::from_fn(|| feed.open_stream(None)).collect();
        assert_eq!(owners.len(), 32);
        drop(greedy);
        assert!(feed.open_stream(Some("greedy")).is_some());
        drop((other_apps, owners));
        assert_eq!((feed.open_streams(), feed.streams_by_app().len()), (0, 0));
    }
}

//! What all streams of changes share: how far the outbox is settled, looked up once for all of them while there is one,
//! and the outbox's upkeep.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::read::{self, Head};
use crate::host::gateway::apps::Name;
use crate::host::gateway::database::outbox::{self, Keep};
use crate::host::gateway::database::{Database, DatabaseError};
use crate::host::gateway::state::Gateway;
use crate::http::problem::chain;

/// Streams at one time, of the owner and all apps.
const MAX_STREAMS: usize = 128;
/// Of all apps together: what is left is the owner's.
const MAX_APPS_STREAMS: usize = 96;
/// Of one app.
const MAX_APP_STREAMS: usize = 16;
/// What nobody told of, such as the end of a long transaction, shows within this time.
const LOOK_EACH: Duration = Duration::from_millis(500);
/// Many writes at once are looked up together.
const GATHER: Duration = Duration::from_millis(10);
const TIDY_EACH: Duration = Duration::from_secs(60);
const KEEP_ROWS: i64 = 100_000;
const KEEP_WATCHING_DAYS: i32 = 7;

/// The gateway's side of the feed.
pub struct Changes {
    woken: Arc<Notify>,
    head: watch::Sender<Head>,
    streams: AtomicUsize,
    /// How many streams each app has.
    of_apps: Mutex<HashMap<String, usize>>,
    /// How many streams follow each schema.
    followed: Mutex<HashMap<String, usize>>,
    pub closing: CancellationToken,
}

impl Default for Changes {
    fn default() -> Self {
        Self {
            woken: Arc::default(),
            head: watch::Sender::default(),
            streams: AtomicUsize::new(0),
            of_apps: Mutex::default(),
            followed: Mutex::default(),
            closing: CancellationToken::new(),
        }
    }
}

/// One of the streams; counted until it is dropped.
pub struct Stream {
    changes: Arc<Changes>,
    /// The app that listens, where it is one.
    app: Option<String>,
    schemas: Vec<String>,
    pub head: watch::Receiver<Head>,
}

impl Changes {
    /// Something was written.
    pub fn wake(&self) {
        if self.streams.load(Ordering::Relaxed) > 0 {
            self.woken.notify_one();
        }
    }

    /// How many streams are open.
    pub fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// A place for one more stream of the owner, or of an app, if there is one.
    pub fn join(self: &Arc<Self>, app: Option<&str>) -> Option<Stream> {
        let mut of_apps = self.of_apps();
        if let Some(app) = app {
            let of_all: usize = of_apps.values().sum();
            let of_this = of_apps.get(app).copied().unwrap_or(0);
            if of_all >= MAX_APPS_STREAMS || of_this >= MAX_APP_STREAMS {
                return None;
            }
        }
        let one_more = |streams| (streams < MAX_STREAMS).then_some(streams + 1);
        self.streams.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        if let Some(app) = app {
            *of_apps.entry(app.to_owned()).or_default() += 1;
        }
        let (app, head) = (app.map(str::to_owned), self.head.subscribe());
        Some(Stream { changes: self.clone(), app, schemas: Vec::new(), head })
    }

    fn of_apps(&self) -> std::sync::MutexGuard<'_, HashMap<String, usize>> {
        self.of_apps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn followed(&self) -> std::sync::MutexGuard<'_, HashMap<String, usize>> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stream {
    pub fn schemas(&self) -> &[String] {
        &self.schemas
    }

    /// Follows one more app, whose changes are complete from now on if they were not before. What it is that a stream
    /// follows is only told then.
    ///
    /// # Errors
    /// When the database is away, or a table is kept for itself by a long write.
    pub async fn follow(&mut self, database: &Database, schema: &Name) -> Result<(), DatabaseError> {
        if self.schemas.iter().any(|known| known == schema.as_str()) {
            return Ok(());
        }
        let is_new = !self.changes.followed().contains_key(schema.as_str());
        if is_new {
            let mut client = database.connect().await?;
            outbox::begin(&mut client, schema).await?;
        }
        *self.changes.followed().entry(schema.to_string()).or_default() += 1;
        self.schemas.push(schema.to_string());
        Ok(())
    }

    pub fn closing(&self) -> CancellationToken {
        self.changes.closing.clone()
    }

    /// Looks how far the outbox is settled, and tells the other streams, too.
    ///
    /// # Errors
    /// The database's.
    pub async fn look(&self, client: &Client) -> Result<Head, DatabaseError> {
        let head = read::head(client).await?;
        self.changes.publish(head);
        Ok(head)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.changes.streams.fetch_sub(1, Ordering::AcqRel);
        if let Some(app) = &self.app {
            count_down(&mut self.changes.of_apps(), app);
        }
        let mut followed = self.changes.followed();
        self.schemas.iter().for_each(|schema| count_down(&mut followed, schema));
    }
}

fn count_down(counts: &mut HashMap<String, usize>, name: &str) {
    if let Some(count) = counts.get_mut(name) {
        *count -= 1;
        if *count == 0 {
            counts.remove(name);
        }
    }
}

impl Changes {
    fn publish(&self, new: Head) {
        self.head.send_if_modified(|head| {
            let is_news = new.newest > head.newest;
            // Two looks may end in another order than they began.
            *head = Head { settled: head.settled.max(new.settled), newest: head.newest.max(new.newest) };
            is_news
        });
    }
}

/// Looks while somebody listens, and tidies up, until `stop`.
pub async fn tend(gateway: Arc<Gateway>, stop: CancellationToken) {
    let keep = Keep {
        seconds: gateway.config.changes_keep.as_secs_f64(),
        rows: KEEP_ROWS,
        days: KEEP_WATCHING_DAYS,
    };
    let mut tidy = tokio::time::interval(TIDY_EACH.min(gateway.config.changes_keep));
    tidy.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut listening: Option<Client> = None;
    loop {
        let is_followed = gateway.changes.streams.load(Ordering::Acquire) > 0;
        tokio::select! {
            () = stop.cancelled() => break,
            _ = tidy.tick(), if gateway.apps.known().loaded => tidied(&gateway, keep).await,
            () = gateway.changes.woken.notified() => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(LOOK_EACH) => {}
        }
        if !is_followed {
            listening = None;
            continue;
        }
        if let Err(error) = look(&gateway, &mut listening).await {
            tracing::debug!(error = %chain(&error), "no look at the changes");
        }
    }
    gateway.changes.closing.cancel();
}

async fn look(gateway: &Gateway, listening: &mut Option<Client>) -> Result<(), DatabaseError> {
    if listening.as_ref().is_none_or(Client::is_closed) {
        let woken = gateway.changes.woken.clone();
        *listening = Some(gateway.database.listen(outbox::CHANNEL, woken).await?);
    }
    let looked = tokio::time::timeout(LOOK_EACH * 4, async {
        let client = gateway.database.shared().await?;
        read::head(&client).await
    });
    gateway.changes.publish(looked.await.unwrap_or(Err(DatabaseError::Deadline))?);
    Ok(())
}

async fn tidied(gateway: &Gateway, keep: Keep) {
    let live: Vec<String> = gateway.changes.followed().keys().cloned().collect();
    let tidied = tokio::time::timeout(TIDY_EACH, async {
        let mut client = gateway.database.connect().await?;
        outbox::tidy(&mut client, keep, &live).await
    });
    if let Err(error) = tidied.await.unwrap_or(Err(DatabaseError::Deadline)) {
        tracing::warn!(error = %chain(&error), "the outbox of changes was not tidied up");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_app_takes_its_share_and_all_apps_leave_the_owners() {
        let changes = Arc::new(Changes::default());
        let take = |app: &str| std::iter::from_fn(|| changes.join(Some(app))).collect::<Vec<_>>();
        let greedy = take("greedy");
        assert_eq!(greedy.len(), 16);
        let others: Vec<_> = (0..10).flat_map(|n| take(&format!("app-{n}"))).collect();
        assert_eq!(greedy.len() + others.len(), 96);
        let owners: Vec<_> = std::iter::from_fn(|| changes.join(None)).collect();
        assert_eq!(owners.len(), 32);
        drop(greedy);
        assert!(changes.join(Some("greedy")).is_some());
        drop((others, owners));
        assert_eq!((changes.streams(), changes.of_apps().len()), (0, 0));
    }
}

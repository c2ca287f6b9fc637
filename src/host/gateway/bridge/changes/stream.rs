//! One listener's change stream. It starts after `Last-Event-ID` or at the current position. It ends when the listener
//! disconnects, its agent's dispatch ends, the database fails, changes were deleted before they were read or were not
//! recorded, the gateway stops, or the time limit is reached.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{RawQuery, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use http::HeaderMap;
use tokio::time::Instant;

use super::feed::ChangeStream;
use super::position::{EventId, EventIdFormat};
use super::read;
use super::shared_read::{ChangeBatch, ReadRange};
use crate::auth::{Caller, Principal};
use crate::bridge::handler::{default_app, require_access};
use crate::bridge::problems;
use crate::bridge::service::Bridge;
use crate::database::DatabaseError;
use crate::events::{self, HEARTBEAT_INTERVAL, MAX_STREAM_DURATION, RETRY_DELAY_MS};
use crate::name::SqlIdentifier;
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::epoch::Epoch;

/// Timeout for opening a stream, and for each read from the outbox.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(15);

/// `GET /api/bridge/changes?app=`: an app listens to its own changes, an agent to those of one of its apps, and the
/// owner to those of one or all apps.
///
/// # Errors
/// 400 for an invalid query or `Last-Event-ID`, or if an agent with several apps names none; 403 if the caller may
/// not use the app; 404 if it does not exist; 410 if the changes after `Last-Event-ID` are no longer available; 503 if
/// the database is unreachable or too many streams are open.
pub async fn stream_changes(
    State(bridge): State<Arc<Bridge>>,
    caller: Caller,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let mut query = Fields::from_query(query.as_deref().unwrap_or_default());
    let requested_app: Option<String> = query.optional("app");
    query.finish(Some(()))?;
    let Caller(principal) = caller;
    let app = match &requested_app {
        Some(app) => Some(app.as_str()),
        None => default_app(&principal)?,
    };
    let scope = resolve_scope(&bridge, &principal, app)?;
    // An agent's stream counts as its app's. Plain ids reveal the write volume of all apps, so apps and agents do not
    // get them.
    let client_app = app.filter(|_| matches!(*principal, Principal::App { .. } | Principal::Agent { .. }));
    let ids =
        client_app.map_or(EventIdFormat::Plain, |app| EventIdFormat::for_app(&bridge.event_id_secret, app));
    let last_event_id = parse_last_event_id(&headers, &ids, bridge.epoch)?;
    let client_app = client_app.map(str::to_owned);
    let open =
        ChangeListener::open(bridge.clone(), principal, client_app.as_deref(), scope, ids, last_event_id);
    let opened = tokio::time::timeout(DATABASE_TIMEOUT, open);
    let listener = opened.await.unwrap_or_else(|_| Err(problems::database_unavailable()))?;
    Ok(events::stream_response(stream::unfold(listener, |mut listener| async move {
        let chunk = listener.next().await?;
        Some((Ok::<_, Infallible>(chunk), listener))
    })))
}

/// One app by its schema, or all present and future apps.
enum Scope {
    One(SqlIdentifier),
    All,
}

fn resolve_scope(bridge: &Bridge, principal: &Principal, app: Option<&str>) -> Result<Scope, Problem> {
    match app {
        Some(slug) => {
            require_access(principal, slug)?;
            Ok(Scope::One(bridge.find_app(slug)?.schema.clone()))
        }
        None if bridge.apps.snapshot().is_loaded => Ok(Scope::All),
        None => Err(problems::database_unavailable()),
    }
}

fn parse_last_event_id(
    headers: &HeaderMap,
    ids: &EventIdFormat,
    current: Epoch,
) -> Result<Option<EventId>, Problem> {
    let Some(value) = headers.get("last-event-id").filter(|value| !value.is_empty()) else { return Ok(None) };
    let id = value.to_str().ok().and_then(|text| ids.parse(text, current).ok());
    let invalid_id = || Problem::field("Last-Event-ID", "must be the id of an event from this stream");
    id.map(Some).ok_or_else(invalid_id)
}

/// The state of one change stream.
struct ChangeListener {
    bridge: Arc<Bridge>,
    principal: Arc<Principal>,
    stream: ChangeStream,
    scope: Scope,
    ids: EventIdFormat,
    /// The position in the next id to be sent: the listener would resume after it.
    position: i64,
    /// All events up to this position have been read. It is the same for all idle streams, so they share reads.
    read_position: i64,
    /// The floor when the stream was opened. It can be above the first position while an older transaction is running.
    initial_floor: i64,
    /// The events that were read, and the index of the next one to send.
    batch: Option<(Arc<ChangeBatch>, usize)>,
    /// A `ready` event or a heartbeat, to be sent before the next event.
    queued: Option<Bytes>,
    next_heartbeat: Instant,
    deadline: Instant,
}

impl ChangeListener {
    async fn open(
        bridge: Arc<Bridge>,
        principal: Arc<Principal>,
        app: Option<&str>,
        scope: Scope,
        ids: EventIdFormat,
        last_event_id: Option<EventId>,
    ) -> Result<Self, Problem> {
        let detail = "Too many streams are open: close one, or try again later.";
        let too_many = || Problem::new(Code::Unavailable, detail).retry_after(5);
        let stream = bridge.changes.open_stream(app).ok_or_else(too_many)?;
        let now = Instant::now();
        let mut listener = Self {
            bridge,
            principal,
            stream,
            scope,
            ids,
            position: 0,
            read_position: 0,
            initial_floor: 0,
            batch: None,
            queued: None,
            next_heartbeat: now + HEARTBEAT_INTERVAL,
            deadline: now + MAX_STREAM_DURATION,
        };
        let started = listener.start(last_event_id).await;
        started.map_err(|error| {
            tracing::warn!(error = %format_chain(&error), "cannot open a change stream");
            problems::database_unavailable()
        })??;
        let id = listener.event_id();
        let ready_event = format!("retry: {RETRY_DELAY_MS}\nid: {id}\nevent: ready\ndata: {{}}\n\n");
        listener.queued = Some(Bytes::from(ready_event));
        Ok(listener)
    }

    /// Follows the apps and sets the positions. The inner result is 410 if the changes after `last_event_id` are no
    /// longer available.
    async fn start(&mut self, last_event_id: Option<EventId>) -> Result<Result<(), Problem>, DatabaseError> {
        self.follow_all().await?;
        let client = self.bridge.database.shared_client().await?;
        let head = self.stream.refresh_head(&client).await?;
        let floor = read::fetch_floor(&client, self.stream.schemas()).await?;
        self.initial_floor = floor.unwrap_or_default();
        let Some(id) = last_event_id else {
            self.position = head.settled;
            self.read_position = head.newest;
            return Ok(Ok(()));
        };
        let is_available = id.epoch == self.bridge.epoch
            && id.position <= head.settled
            && floor.is_some_and(|floor| id.position >= floor);
        self.position = id.position;
        self.read_position = id.position;
        let detail =
            "The changes after this event are no longer available; read the tables, and open a new stream.";
        Ok(if is_available { Ok(()) } else { Err(Problem::new(Code::Gone, detail)) })
    }

    /// Follows all apps in the scope, including those registered after the stream was opened. Returns whether it
    /// followed another app.
    async fn follow_all(&mut self) -> Result<bool, DatabaseError> {
        let Self { bridge, stream, scope, .. } = self;
        let followed_count = stream.schemas().len();
        match scope {
            Scope::One(schema) => stream.follow(&bridge.database, schema).await?,
            Scope::All => {
                for app in bridge.apps.snapshot().apps.values() {
                    stream.follow(&bridge.database, &app.schema).await?;
                }
            }
        }
        Ok(stream.schemas().len() > followed_count)
    }

    /// Follows the apps that were registered after the stream was opened. Returns `false` if earlier changes to one of
    /// them may not have been recorded; the listener then gets 410 when it resumes.
    async fn follow_new_apps(&mut self) -> Result<bool, DatabaseError> {
        if !self.follow_all().await? {
            return Ok(true);
        }
        let client = self.bridge.database.shared_client().await?;
        let floor = read::fetch_floor(&client, self.stream.schemas()).await?;
        // `position` may already be after the changes that were not recorded.
        Ok(floor.is_some_and(|floor| floor <= self.read_position.max(self.initial_floor)))
    }

    /// Whether the stream belongs to an agent whose token was revoked because its dispatch has ended. The stream's
    /// client may still be running.
    fn has_agent_ended(&self) -> bool {
        let Principal::Agent { dispatch, .. } = &*self.principal else { return false };
        !self.bridge.bridge_tokens.has_token_for(dispatch)
    }

    fn event_id(&self) -> String {
        self.ids.format(EventId { epoch: self.bridge.epoch, position: self.position })
    }

    /// Returns the next chunk; `None` ends the stream, and the client reconnects.
    async fn next(&mut self) -> Option<Bytes> {
        let closing = self.stream.closing();
        loop {
            if let Some(chunk) = self.queued.take().or_else(|| self.next_event()) {
                return Some(chunk);
            }
            if Instant::now() >= self.deadline || self.has_agent_ended() {
                return None;
            }
            let head = *self.stream.head.borrow_and_update();
            if head.newest > self.read_position {
                match self.fetch_changes(head.newest).await {
                    Ok(true) => continue,
                    Ok(false) => {
                        tracing::debug!("unread changes were deleted or not recorded; ending the stream");
                        return None;
                    }
                    Err(error) => {
                        tracing::debug!(error = %format_chain(&error), "cannot read changes; ending the stream");
                        return None;
                    }
                }
            }
            self.position = self.position.max(head.settled);
            tokio::select! {
                () = closing.cancelled() => return None,
                changed = self.stream.head.changed() => changed.ok()?,
                () = tokio::time::sleep_until(self.next_heartbeat) => {
                    self.next_heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
                    if self.has_agent_ended() {
                        return None;
                    }
                    let following = tokio::time::timeout(DATABASE_TIMEOUT, self.follow_new_apps());
                    if !following.await.ok()?.ok()? {
                        return None;
                    }
                    // An id without data moves the resume position without creating an event.
                    self.queued = Some(Bytes::from(format!(": heartbeat\nid: {}\n\n", self.event_id())));
                }
                () = tokio::time::sleep_until(self.deadline) => return None,
            }
        }
    }

    /// Returns the next event of the batch.
    fn next_event(&mut self) -> Option<Bytes> {
        let (batch, index) = self.batch.take()?;
        let event = batch.events.get(index)?;
        self.position = event.position;
        let chunk = Bytes::from(format!("id: {}\ndata: {}\n\n", self.event_id(), event.json));
        self.batch = Some((batch, index + 1));
        Some(chunk)
    }

    /// Reads the next events. Returns `false` if some may have been deleted before they were read, or never recorded;
    /// the listener then gets 410 when it resumes.
    async fn fetch_changes(&mut self, newest: i64) -> Result<bool, DatabaseError> {
        let following = tokio::time::timeout(DATABASE_TIMEOUT, self.follow_new_apps());
        if !following.await.unwrap_or(Err(DatabaseError::Timeout))? {
            return Ok(false);
        }
        let (database, schemas) = (&self.bridge.database, self.stream.schemas());
        let range = ReadRange { position: self.read_position, newest };
        let reading = self.stream.shared_reads().get_or_read(schemas, range, async {
            read::fetch_after(&*database.shared_client().await?, range.position, schemas).await
        });
        let batch =
            tokio::time::timeout(DATABASE_TIMEOUT, reading).await.unwrap_or(Err(DatabaseError::Timeout))?;
        if batch.floor > self.position.max(self.read_position).max(self.initial_floor) {
            return Ok(false);
        }
        let last = batch.events.last().map_or(self.read_position, |event| event.position);
        self.read_position = if batch.has_more { last } else { last.max(newest) };
        self.batch = Some((batch, 0));
        Ok(true)
    }
}

//! One listener's stream: from where it left off, or from now, until it goes away or its time is over.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, RawQuery, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use http::HeaderMap;
use tokio::time::Instant;

use super::feed::Stream;
use super::position::{EventId, IdForm};
use super::read::{self, Change};
use crate::host::gateway::apps::Name;
use crate::host::gateway::auth::{Caller, Principal};
use crate::host::gateway::bridge::handler::{allow, find_app, only_app};
use crate::host::gateway::bridge::refusal;
use crate::host::gateway::database::DatabaseError;
use crate::host::gateway::events::{self, HEARTBEAT, LONGEST, RETRY_MS};
use crate::host::gateway::state::Gateway;
use crate::http::fields::Fields;
use crate::http::problem::{Code, Problem, chain};
use crate::machine::epoch::Epoch;

const SET_UP: Duration = Duration::from_secs(15);

/// `GET /api/bridge/changes?app=`: an app hears of itself; the owner of one app, or of all.
///
/// # Errors
/// 410 when changes after `Last-Event-ID` are not known any more.
pub async fn changes(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let mut query = Fields::of_query(query.as_deref().unwrap_or_default());
    let asked: Option<String> = query.optional("app");
    query.finish(Some(()))?;
    let Caller(principal) = caller;
    let app = match &asked {
        Some(app) => Some(app.as_str()),
        None => only_app(&principal)?,
    };
    let scope = scope(&gateway, &principal, app)?;
    // Ids that the owner gets tell how much happens in all apps.
    let app = app.filter(|_| matches!(principal, Principal::App { .. } | Principal::Agent { .. }));
    let ids = app.map_or(IdForm::Plain, |app| IdForm::of_app(&gateway.change_ids, app));
    let resumed = resumed(&headers, &ids, gateway.config.epoch())?;
    let app = app.map(str::to_owned);
    let open = Listener::open(gateway.clone(), principal, app.as_deref(), scope, ids, resumed);
    let opened = tokio::time::timeout(SET_UP, open);
    let listener = opened.await.unwrap_or_else(|_| Err(refusal::unavailable()))?;
    Ok(events::response(stream::unfold(listener, |mut listener| async move {
        let chunk = listener.next().await?;
        Some((Ok::<_, Infallible>(chunk), listener))
    })))
}

/// One app, by its slug; or all that there are and will be.
enum Scope {
    One(Name),
    All,
}

fn scope(gateway: &Gateway, principal: &Principal, app: Option<&str>) -> Result<Scope, Problem> {
    match app {
        Some(slug) => {
            allow(principal, slug)?;
            Ok(Scope::One(find_app(gateway, slug)?.schema.clone()))
        }
        None if gateway.apps.known().loaded => Ok(Scope::All),
        None => Err(refusal::unavailable()),
    }
}

fn resumed(headers: &HeaderMap, ids: &IdForm, current: Epoch) -> Result<Option<EventId>, Problem> {
    let Some(value) = headers.get("last-event-id").filter(|value| !value.is_empty()) else { return Ok(None) };
    let id = value.to_str().ok().and_then(|text| ids.read(text, current).ok());
    let wrong = || Problem::field("Last-Event-ID", "must be the id of an event of this stream");
    id.map(Some).ok_or_else(wrong)
}

struct Listener {
    gateway: Arc<Gateway>,
    principal: Principal,
    stream: Stream,
    scope: Scope,
    ids: IdForm,
    position: i64,
    ready: VecDeque<Bytes>,
    heartbeat: Instant,
    end: Instant,
}

impl Listener {
    async fn open(
        gateway: Arc<Gateway>,
        principal: Principal,
        app: Option<&str>,
        scope: Scope,
        ids: IdForm,
        resumed: Option<EventId>,
    ) -> Result<Self, Problem> {
        let busy = || Problem::new(Code::Unavailable, "Too many listeners at once.").retry_after(5);
        let stream = gateway.changes.join(app).ok_or_else(busy)?;
        let now = Instant::now();
        let mut listener = Self {
            gateway,
            principal,
            stream,
            scope,
            ids,
            position: 0,
            ready: VecDeque::new(),
            heartbeat: now + HEARTBEAT,
            end: now + LONGEST,
        };
        let began = listener.begin(resumed).await;
        began.map_err(|error| {
            tracing::warn!(error = %chain(&error), "the changes cannot be listened to");
            refusal::unavailable()
        })??;
        let id = listener.id();
        let greeting = format!("retry: {RETRY_MS}\nid: {id}\nevent: ready\ndata: {{}}\n\n");
        listener.ready.push_back(Bytes::from(greeting));
        Ok(listener)
    }

    async fn begin(&mut self, resumed: Option<EventId>) -> Result<Result<(), Problem>, DatabaseError> {
        self.follow_all().await?;
        let client = self.gateway.database.shared().await?;
        let head = self.stream.look(&client).await?;
        let Some(id) = resumed else {
            self.position = head.settled;
            return Ok(Ok(()));
        };
        let floor = read::floor(&client, self.stream.schemas()).await?;
        let is_known = id.epoch == self.gateway.config.epoch()
            && id.position <= head.settled
            && floor.is_some_and(|floor| id.position >= floor);
        self.position = id.position;
        let gone = "The changes after this event are not known any more; read the tables again.";
        Ok(if is_known { Ok(()) } else { Err(Problem::new(Code::Gone, gone)) })
    }

    /// Apps that are registered while an owner listens to all are listened to, too.
    async fn follow_all(&mut self) -> Result<(), DatabaseError> {
        let Self { gateway, stream, scope, .. } = self;
        match scope {
            Scope::One(schema) => stream.follow(&gateway.database, schema).await,
            Scope::All => {
                for app in gateway.apps.known().apps.values() {
                    stream.follow(&gateway.database, &app.schema).await?;
                }
                Ok(())
            }
        }
    }

    /// Something that an agent started may have outlived its dispatch.
    fn is_of_ended_agent(&self) -> bool {
        let Principal::Agent { dispatch, .. } = &self.principal else { return false };
        !self.gateway.agent_tokens.has_dispatch(dispatch)
    }

    fn id(&self) -> String {
        self.ids.write(EventId { epoch: self.gateway.config.epoch(), position: self.position })
    }

    /// What to send next; `None` ends the stream, and the listener comes again.
    async fn next(&mut self) -> Option<Bytes> {
        let closing = self.stream.closing();
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Some(chunk);
            }
            if Instant::now() >= self.end || self.is_of_ended_agent() {
                return None;
            }
            let head = *self.stream.head.borrow_and_update();
            if head.newest > self.position {
                if let Err(error) = self.take(head.newest).await {
                    tracing::debug!(error = %chain(&error), "a stream of changes ends");
                    return None;
                }
                continue;
            }
            self.position = self.position.max(head.settled);
            tokio::select! {
                () = closing.cancelled() => return None,
                changed = self.stream.head.changed() => changed.ok()?,
                () = tokio::time::sleep_until(self.heartbeat) => {
                    self.heartbeat = Instant::now() + HEARTBEAT;
                    if self.is_of_ended_agent() {
                        return None;
                    }
                    self.follow_all().await.ok()?;
                    // An id without data: what is resumed from keeps up, and no event is seen.
                    self.ready.push_back(Bytes::from(format!(": heartbeat\nid: {}\n\n", self.id())));
                }
                () = tokio::time::sleep_until(self.end) => return None,
            }
        }
    }

    async fn take(&mut self, newest: i64) -> Result<(), DatabaseError> {
        self.follow_all().await?;
        let client = self.gateway.database.shared().await?;
        let reading = read::after(&client, self.position, self.stream.schemas());
        let (changes, more) =
            tokio::time::timeout(SET_UP, reading).await.unwrap_or(Err(DatabaseError::Deadline))?;
        for Change { position, json } in changes {
            self.position = position;
            self.ready.push_back(Bytes::from(format!("id: {}\ndata: {json}\n\n", self.id())));
        }
        if !more {
            self.position = self.position.max(newest);
        }
        Ok(())
    }
}

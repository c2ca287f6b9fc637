//! `/api/dispatch`: prompts are handed in, listened to, looked up and cancelled.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, Method, StatusCode, header};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::limits::sender;
use crate::host::agents::adapters::settings::{MAX_AGENT_NAME_CHARS, MAX_DEADLINE_SECONDS};
use crate::host::agents::dispatch::event_log::EventLog;
use crate::host::agents::dispatch::request::{
    DispatchId, DispatchRequest, MAX_BATCH_ENTRIES, MAX_BODY_BYTES, MAX_CONVERSATION_CHARS, MAX_MODEL_CHARS,
    MAX_PROMPT_CHARS, MAX_SENDER_CHARS,
};
use crate::host::agents::dispatch::state::{Dispatch, Phase};
use crate::host::agents::dispatch::{DispatchTarget, Dispatcher};
use crate::host::gateway::auth::Caller;
use crate::host::gateway::body;
use crate::host::gateway::endpoint::{Endpoint, OWN_BODY, OWNERS, told};
use crate::host::gateway::events::{self, HEARTBEAT, LONGEST, RETRY_MS};
use crate::host::gateway::state::Gateway;
use crate::http::openapi::{
    Answer, Content, Operation, Parameter, Place, array, boolean, fields, matching, named, nullable, object,
    one_of, text, text_to, time,
};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;

/// So many are listed.
const MOST_LISTED: usize = 200;

async fn dispatch(
    State(gateway): State<Arc<Gateway>>,
    Extension(Caller(caller)): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let mut fields = body::fields(&headers, body, MAX_BODY_BYTES).await?;
    let settings = gateway.kernel.settings();
    let asked = DispatchRequest::read(&mut fields, &sender(&gateway, &caller), &settings.agents);
    let asked = fields.finish(asked)?;
    let found = gateway.dispatcher.accept(asked).await?;
    if wants_json(&headers) {
        return Ok((StatusCode::ACCEPTED, Json(shown(&gateway.dispatcher, &found))).into_response());
    }
    Ok(listen(&gateway.dispatcher, found, 0))
}

/// Who asks for JSON and for no events comes again to see what became of it.
fn wants_json(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let accepted: String = accepted.collect::<Vec<_>>().join(",");
    accepted.contains("application/json") && !accepted.contains("text/event-stream")
}

async fn list(State(gateway): State<Arc<Gateway>>) -> Result<Json<Value>, Problem> {
    gateway.dispatcher.ready().await?;
    let all = gateway.dispatcher.list();
    let all: Vec<Value> = all.iter().take(MOST_LISTED).map(|one| one.to_json()).collect();
    Ok(Json(json!({ "dispatches": all })))
}

async fn show(
    State(gateway): State<Arc<Gateway>>,
    Segments(id): Segments<String>,
) -> Result<Json<Value>, Problem> {
    let found = found(&gateway, &id).await?;
    Ok(Json(shown(&gateway.dispatcher, &found)))
}

async fn follow(
    State(gateway): State<Arc<Gateway>>,
    Segments(id): Segments<String>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let last = headers.get("last-event-id").filter(|value| !value.is_empty());
    let last: Option<u64> = match last {
        Some(value) => {
            let number = value.to_str().ok().and_then(|text| text.parse().ok());
            Some(
                number
                    .ok_or_else(|| Problem::field("Last-Event-ID", "must be the id of an event, a number"))?,
            )
        }
        None => None,
    };
    let found = found(&gateway, &id).await?;
    let from = last.map_or(0, |last| last.saturating_add(1));
    let read = found.log().read(from);
    if last.is_some() && read.is_over && read.events.is_empty() {
        // By which a browser's EventSource comes no more.
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok(listen(&gateway.dispatcher, found, from))
}

async fn cancel(
    State(gateway): State<Arc<Gateway>>,
    Segments(id): Segments<String>,
) -> Result<Response, Problem> {
    let found = found(&gateway, &id).await?;
    gateway.dispatcher.cancel(&found).await;
    Ok((StatusCode::ACCEPTED, Json(shown(&gateway.dispatcher, &found))).into_response())
}

async fn found(gateway: &Gateway, id: &str) -> Result<DispatchTarget, Problem> {
    gateway.dispatcher.ready().await?;
    let unknown = || Problem::new(Code::NotFound, "There is no dispatch of this id, or it was long ago.");
    let id: DispatchId = id.parse().map_err(|_| unknown())?;
    gateway.dispatcher.find(&id).await?.ok_or_else(unknown)
}

fn shown(dispatcher: &Dispatcher, found: &DispatchTarget) -> Value {
    let all = dispatcher.entries(found);
    json!({
        "id": found.id(),
        "batch": !matches!(found, DispatchTarget::One(_)),
        "status": status(&all),
        "dispatches": all.iter().map(|one| one.to_json()).collect::<Vec<_>>(),
    })
}

/// Of all together: over when the last is, and well when all are.
fn status(all: &[Arc<Dispatch>]) -> &'static str {
    let phases: Vec<Phase> = all.iter().map(|one| one.phase()).collect();
    let all_are = |phase| phases.iter().all(|one| *one == phase);
    if all_are(Phase::Queued) {
        "queued"
    } else if !phases.iter().all(|phase| phase.is_over()) {
        "running"
    } else if all_are(Phase::Success) {
        "success"
    } else {
        "error"
    }
}

/// The events from a number on, to the last.
fn listen(dispatcher: &Arc<Dispatcher>, found: DispatchTarget, from: u64) -> Response {
    // What is known by its record alone has no end of its own.
    let state = (found, from, Instant::now() + LONGEST, Arc::clone(dispatcher));
    let greeting = Bytes::from(format!("retry: {RETRY_MS}\n\n"));
    let first = stream::iter([Ok::<_, Infallible>(greeting)]);
    let rest = stream::unfold(Some(state), |state| async move {
        let (found, from, end, dispatcher) = state?;
        // Whoever listens comes again to the next gateway.
        let next = dispatcher.closed.run_until_cancelled(next(found.log(), from, end)).await;
        let (chunk, next) = next.unwrap_or_else(|| rest(found.log(), from))?;
        Some((Ok(chunk), next.map(|from| (found, from, end, dispatcher))))
    });
    events::response(first.chain(rest))
}

/// What there is already from a number on, and nothing after it.
fn rest(log: &EventLog, from: u64) -> Option<(Bytes, Option<u64>)> {
    let events = log.read(from).events.concat();
    (!events.is_empty()).then(|| (Bytes::from(events), None))
}

/// What there is from a number on, and with which number it goes on; no number after the last.
async fn next(log: &EventLog, from: u64, end: Instant) -> Option<(Bytes, Option<u64>)> {
    let mut grown = log.watch();
    grown.mark_unchanged();
    let read = log.read(from);
    if !read.events.is_empty() || read.is_over {
        let mut chunk = Vec::new();
        if read.missed > 0 {
            chunk.extend_from_slice(
                format!("event: missed\ndata: {{\"events\":{}}}\n\n", read.missed).as_bytes(),
            );
        }
        read.events.iter().for_each(|event| chunk.extend_from_slice(event));
        let is_more = !read.is_over;
        return (!chunk.is_empty()).then(|| (Bytes::from(chunk), is_more.then_some(read.next)));
    }
    if Instant::now() >= end {
        return None;
    }
    let wait = HEARTBEAT.min(end.saturating_duration_since(Instant::now()));
    match tokio::time::timeout(wait, grown.changed()).await {
        Ok(Ok(())) => Some((Bytes::new(), Some(from))),
        // Nobody can tell any more.
        Ok(Err(_)) => None,
        Err(_) => Some((Bytes::from_static(b": heartbeat\n\n"), Some(from))),
    }
}

pub fn told_dispatch() -> Value {
    object(
        &[
            ("id", text()),
            ("status", one_of(&Phase::WORDS)),
            ("senderId", text()),
            ("agentName", text()),
            ("model", nullable(text())),
            ("conversationId", nullable(text())),
            ("batchId", nullable(text())),
            ("acceptedAt", time()),
            ("startedAt", nullable(time())),
            ("text", nullable(text())),
            ("refused", nullable(text())),
            ("interaction", nullable(named("Interaction"))),
        ],
        &[("index", crate::http::openapi::count())],
    )
}

fn told_all() -> Value {
    object(
        &[
            ("id", text()),
            ("batch", boolean()),
            ("status", one_of(&["queued", "running", "success", "error"])),
            ("dispatches", array(named("Dispatch"))),
        ],
        &[],
    )
}

fn asked() -> Value {
    let choice = || {
        vec![
            ("agentName", text_to(MAX_AGENT_NAME_CHARS)),
            ("model", text_to(MAX_MODEL_CHARS)),
            ("conversationId", text_to(MAX_CONVERSATION_CHARS)),
            ("deadlineSeconds", json!({ "type": "integer", "minimum": 1, "maximum": MAX_DEADLINE_SECONDS })),
        ]
    };
    let mut batch = array(fields(&[("prompt", text_to(MAX_PROMPT_CHARS))], &choice()));
    batch["minItems"] = 1.into();
    batch["maxItems"] = MAX_BATCH_ENTRIES.into();
    let mut whole = choice();
    whole.extend([
        ("id", matching("^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")),
        ("senderId", text_to(MAX_SENDER_CHARS)),
    ]);
    json!({ "oneOf": [
        fields(&[("prompt", text_to(MAX_PROMPT_CHARS))], &whole),
        fields(&[("batch", batch)], &whole),
    ] })
}

const EVENTS: Answer = Answer {
    status: 200,
    about: "Server-sent events: accepted, running, started, text, toolStarted, toolEnded, warning, and at last result, \
            which has the dispatch whole. Those of a batch have the index of their entry, and done is the last.",
    content: Content::Other("text/event-stream"),
};

const ID: Parameter = Parameter {
    name: "id",
    place: Place::Path,
    schema: || matching(DispatchId::PATTERN),
    about: "The id of a dispatch, of a batch, or of an entry of one, which is the batch's with a dot and its index.",
};

pub static DISPATCH: Endpoint = Endpoint {
    operation: Operation {
        id: "dispatch",
        method: Method::POST,
        path: "/api/dispatch",
        summary: "Hands a prompt, or several, to a coding agent of system/config.json, which works in the owner's home. \
                  The same id again is the same dispatch. It goes on when nobody listens.",
        credentials: OWNERS,
        parameters: &[],
        body: Some(asked),
        answers: &[
            EVENTS,
            told(202, "Where application/json is accepted and events are not: it is taken.", told_all),
        ],
        problems: &[
            Code::Forbidden,
            Code::Unavailable,
            Code::IdempotencyMismatch,
            Code::CostLimitReached,
            Code::RateLimited,
        ],
    },
    largest_body: MAX_BODY_BYTES,
    serve: || post(dispatch),
};

pub static LIST: Endpoint = Endpoint {
    operation: Operation {
        id: "listDispatches",
        method: Method::GET,
        path: "/api/dispatch",
        summary: "Dispatches that wait, run, or have ended lately, the newest first.",
        credentials: OWNERS,
        parameters: &[],
        body: None,
        answers: &[told(200, "At most 200.", || object(&[("dispatches", array(named("Dispatch")))], &[]))],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || get(list),
};

pub static SHOW: Endpoint = Endpoint {
    operation: Operation {
        id: "showDispatch",
        method: Method::GET,
        path: "/api/dispatch/{id}",
        summary: "A dispatch or a batch, and what became of it. The agent's text is known for a while.",
        credentials: OWNERS,
        parameters: &[ID],
        body: None,
        answers: &[told(200, "What is known.", told_all)],
        problems: &[Code::Forbidden, Code::Unavailable, Code::NotFound],
    },
    largest_body: OWN_BODY,
    serve: || get(show),
};

pub static FOLLOW: Endpoint = Endpoint {
    operation: Operation {
        id: "followDispatch",
        method: Method::GET,
        path: "/api/dispatch/{id}/events",
        summary: "The events of a dispatch or a batch, from the first on, to the last.",
        credentials: OWNERS,
        parameters: &[
            ID,
            Parameter {
                name: "Last-Event-ID",
                place: Place::Header,
                schema: || matching("^[0-9]{0,18}$"),
                about: "Go on after this event.",
            },
        ],
        body: None,
        answers: &[
            EVENTS,
            Answer { status: 204, about: "That event was the last.", content: Content::Nothing },
        ],
        problems: &[Code::Forbidden, Code::Unavailable, Code::NotFound],
    },
    largest_body: OWN_BODY,
    serve: || get(follow),
};

pub static CANCEL: Endpoint = Endpoint {
    operation: Operation {
        id: "cancelDispatch",
        method: Method::DELETE,
        path: "/api/dispatch/{id}",
        summary: "Ends a dispatch, or all of a batch, wherever it is; what it cost until then counts.",
        credentials: OWNERS,
        parameters: &[ID],
        body: None,
        answers: &[told(202, "It is told to end; one that is over stays as it is.", told_all)],
        problems: &[Code::Forbidden, Code::Unavailable, Code::NotFound],
    },
    largest_body: OWN_BODY,
    serve: || delete(cancel),
};

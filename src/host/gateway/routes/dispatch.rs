//! `/api/dispatch`: submit, list, show, follow and cancel dispatches.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, Method, StatusCode, header};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::limits::default_sender_id;
use crate::auth::{Caller, OWNER_OR_ADMIN, PrincipalResolver};
use crate::body;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, PathParameter, documented_json};
use crate::events::{self, HEARTBEAT_INTERVAL, MAX_STREAM_DURATION, RETRY_DELAY_MS};
use svc_host::agents::adapters::settings::{MAX_AGENT_NAME_CHARS, MAX_DEADLINE_SECONDS};
use svc_host::agents::dispatch::event_log::EventLog;
use svc_host::agents::dispatch::request::{
    DispatchId, DispatchRequest, MAX_BATCH_ENTRIES, MAX_BODY_BYTES, MAX_CONVERSATION_CHARS, MAX_MODEL_CHARS,
    MAX_PROMPT_CHARS, MAX_SENDER_CHARS,
};
use svc_host::agents::dispatch::state::{Dispatch, Phase};
use svc_host::agents::dispatch::{DispatchTarget, Dispatcher};
use svc_host::agents::kernel::Kernel;
use svc_http::openapi::{
    Content, DocumentedResponse, Operation, Parameter, ParameterLocation, array, boolean, nullable, object,
    request_object, schema_ref, string_enum, text, text_matching, text_up_to, time,
};
use svc_http::problem::{Code, Problem};

/// Maximum number of dispatches in a list response.
const MAX_LISTED_DISPATCHES: usize = 200;

/// `POST /api/dispatch`.
pub async fn submit(
    State(dispatcher): State<Arc<Dispatcher>>,
    State(kernel): State<Arc<Kernel>>,
    State(resolver): State<Arc<PrincipalResolver>>,
    Caller(caller): Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let mut fields = body::read_fields(&headers, body, MAX_BODY_BYTES).await?;
    let settings = kernel.settings();
    let request =
        DispatchRequest::read(&mut fields, &default_sender_id(&resolver, &caller), &settings.agents);
    let request = fields.finish(request)?;
    let sender_id = request.sender_id.clone();
    let accepted = dispatcher.accept(request).await;
    let target = accepted.inspect_err(|problem| {
        if problem.code == Code::CostLimitReached {
            kernel.note_refusal(&sender_id, &problem.detail);
        }
    })?;
    if wants_json(&headers) {
        return Ok((StatusCode::ACCEPTED, Json(dispatch_json(&dispatcher, &target))).into_response());
    }
    Ok(stream_events(&dispatcher, target, 0))
}

/// Whether the client accepts JSON but not events. Such clients poll for the result.
fn wants_json(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let accepted: String = accepted.collect::<Vec<_>>().join(",");
    accepted.contains("application/json") && !accepted.contains("text/event-stream")
}

/// `GET /api/dispatch`.
pub async fn list(State(dispatcher): State<Arc<Dispatcher>>) -> Result<Json<Value>, Problem> {
    dispatcher.wait_until_ready().await?;
    let dispatches = dispatcher.list();
    let newest: Vec<Value> =
        dispatches.iter().take(MAX_LISTED_DISPATCHES).map(|dispatch| dispatch.to_json()).collect();
    Ok(Json(json!({ "dispatches": newest })))
}

/// `GET /api/dispatch/{id}`.
pub async fn show(
    State(dispatcher): State<Arc<Dispatcher>>,
    PathParameter(id): PathParameter,
) -> Result<Json<Value>, Problem> {
    let target = find_dispatch(&dispatcher, &id).await?;
    Ok(Json(dispatch_json(&dispatcher, &target)))
}

/// `GET /api/dispatch/{id}/events`: streams events, resuming after `Last-Event-ID` if given.
pub async fn follow(
    State(dispatcher): State<Arc<Dispatcher>>,
    PathParameter(id): PathParameter,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let last_event_id = headers.get("last-event-id").filter(|value| !value.is_empty());
    let last_event: Option<u64> = match last_event_id {
        Some(value) => {
            // `parse` accepts a leading plus sign, but ids never have one.
            let text = value.to_str().ok().filter(|text| !text.starts_with('+'));
            let number = text.and_then(|text| text.parse().ok());
            let invalid_id =
                || Problem::field("Last-Event-ID", "must be the id of an event, which is a number");
            Some(number.ok_or_else(invalid_id)?)
        }
        None => None,
    };
    let target = find_dispatch(&dispatcher, &id).await?;
    let from = last_event.map_or(0, |number| number.saturating_add(1));
    let read = target.log().read(from);
    if last_event.is_some() && read.is_closed && read.events.is_empty() {
        // 204 stops a browser's EventSource from reconnecting.
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    Ok(stream_events(&dispatcher, target, from))
}

/// `DELETE /api/dispatch/{id}`.
pub async fn cancel(
    State(dispatcher): State<Arc<Dispatcher>>,
    PathParameter(id): PathParameter,
) -> Result<Response, Problem> {
    let target = find_dispatch(&dispatcher, &id).await?;
    dispatcher.cancel(&target).await;
    Ok((StatusCode::ACCEPTED, Json(dispatch_json(&dispatcher, &target))).into_response())
}

async fn find_dispatch(dispatcher: &Dispatcher, id: &str) -> Result<DispatchTarget, Problem> {
    dispatcher.wait_until_ready().await?;
    let not_found = || Problem::new(Code::NotFound, "There is no dispatch with this id, or it has expired.");
    let id: DispatchId = id.parse().map_err(|_| not_found())?;
    dispatcher.find(&id).await?.ok_or_else(not_found)
}

fn dispatch_json(dispatcher: &Dispatcher, target: &DispatchTarget) -> Value {
    let dispatches = dispatcher.entries(target);
    json!({
        "id": target.id(),
        "batch": !matches!(target, DispatchTarget::Dispatch(_)),
        "status": overall_status(&dispatches, target.entry_count()),
        "dispatches": dispatches.iter().map(|dispatch| dispatch.to_json()).collect::<Vec<_>>(),
    })
}

/// Aggregate status of a batch: finished once all entries have finished, and successful if all of them succeeded.
/// Entries missing from `dispatches` have no record: they were refused, or their record was deleted.
fn overall_status(dispatches: &[Arc<Dispatch>], entry_count: usize) -> &'static str {
    let phases: Vec<Phase> = dispatches.iter().map(|dispatch| dispatch.phase()).collect();
    let all_are = |phase| phases.iter().all(|each| *each == phase);
    if !phases.is_empty() && all_are(Phase::Queued) {
        "queued"
    } else if !phases.iter().all(|phase| phase.has_ended()) {
        "running"
    } else if all_are(Phase::Success) && phases.len() >= entry_count {
        "success"
    } else {
        "error"
    }
}

/// Streams events from sequence number `from` through the last.
fn stream_events(dispatcher: &Arc<Dispatcher>, target: DispatchTarget, from: u64) -> Response {
    let state = (target, from, Instant::now() + MAX_STREAM_DURATION, Arc::clone(dispatcher));
    let retry_field = Bytes::from(format!("retry: {RETRY_DELAY_MS}\n\n"));
    let first = stream::iter([Ok::<_, Infallible>(retry_field)]);
    let event_chunks = stream::unfold(Some(state), |state| async move {
        let (target, from, deadline, dispatcher) = state?;
        // The stream ends on shutdown; the client then reconnects to the restarted gateway.
        let next = dispatcher.closed.run_until_cancelled(next_events(target.log(), from, deadline)).await;
        let (chunk, next) = next.unwrap_or_else(|| remaining_events(target.log(), from))?;
        Some((Ok(chunk), next.map(|from| (target, from, deadline, dispatcher))))
    });
    events::stream_response(first.chain(event_chunks))
}

/// Returns the existing events from sequence number `from` as the final chunk, or `None` if there are none.
fn remaining_events(log: &EventLog, from: u64) -> Option<(Bytes, Option<u64>)> {
    let events = log.read(from).events.concat();
    (!events.is_empty()).then(|| (Bytes::from(events), None))
}

/// Waits for events from sequence number `from`, at most until the next heartbeat. Returns a chunk and the sequence
/// number to continue from (`None` after the last event), or `None` past `deadline` or if no event can follow.
async fn next_events(log: &EventLog, from: u64, deadline: Instant) -> Option<(Bytes, Option<u64>)> {
    let mut updates = log.subscribe();
    updates.mark_unchanged();
    let read = log.read(from);
    if !read.events.is_empty() || read.is_closed {
        let mut chunk = Vec::new();
        if read.missed > 0 {
            chunk.extend_from_slice(
                format!("event: missed\ndata: {{\"events\":{}}}\n\n", read.missed).as_bytes(),
            );
        }
        read.events.iter().for_each(|event| chunk.extend_from_slice(event));
        let has_more = !read.is_closed;
        return (!chunk.is_empty()).then(|| (Bytes::from(chunk), has_more.then_some(read.next)));
    }
    if Instant::now() >= deadline {
        return None;
    }
    let wait = HEARTBEAT_INTERVAL.min(deadline.saturating_duration_since(Instant::now()));
    match tokio::time::timeout(wait, updates.changed()).await {
        Ok(Ok(())) => Some((Bytes::new(), Some(from))),
        // The log was dropped.
        Ok(Err(_)) => None,
        Err(_) => Some((Bytes::from_static(b": heartbeat\n\n"), Some(from))),
    }
}

pub fn dispatch_schema() -> Value {
    object(
        &[
            ("id", text()),
            ("status", string_enum(Phase::NAMES)),
            ("senderId", text()),
            ("agentName", text()),
            ("model", nullable(text())),
            ("conversationId", nullable(text())),
            ("batchId", nullable(text())),
            ("acceptedAt", time()),
            ("startedAt", nullable(time())),
            ("text", nullable(text())),
            ("refused", nullable(text())),
            ("interaction", nullable(schema_ref("Interaction"))),
        ],
        &[("index", svc_http::openapi::count())],
    )
}

fn response_schema() -> Value {
    object(
        &[
            ("id", text()),
            ("batch", boolean()),
            ("status", string_enum(&["queued", "running", "success", "error"])),
            ("dispatches", array(schema_ref("Dispatch"))),
        ],
        &[],
    )
}

fn request_schema() -> Value {
    let agent_options = || {
        vec![
            ("agentName", text_up_to(MAX_AGENT_NAME_CHARS)),
            ("model", text_up_to(MAX_MODEL_CHARS)),
            ("conversationId", text_up_to(MAX_CONVERSATION_CHARS)),
            ("deadlineSeconds", json!({ "type": "integer", "minimum": 1, "maximum": MAX_DEADLINE_SECONDS })),
        ]
    };
    let mut batch = array(request_object(&[("prompt", text_up_to(MAX_PROMPT_CHARS))], &agent_options()));
    batch["minItems"] = 1.into();
    batch["maxItems"] = MAX_BATCH_ENTRIES.into();
    let mut request_options = agent_options();
    request_options.extend([
        ("id", text_matching("^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")),
        ("senderId", text_up_to(MAX_SENDER_CHARS)),
    ]);
    json!({ "oneOf": [
        request_object(&[("prompt", text_up_to(MAX_PROMPT_CHARS))], &request_options),
        request_object(&[("batch", batch)], &request_options),
    ] })
}

const EVENTS: DocumentedResponse = DocumentedResponse {
    status: 200,
    description: "Server-sent events: `accepted`, `running`, `started`, `text`, `toolStarted`, `toolEnded`, `warning`, \
                  and finally `result`, which contains the complete dispatch. In the stream of a batch, these events \
                  contain the index of their entry, and the last event is `done`. `missed` contains the number of \
                  earlier events that were dropped to limit memory.",
    content: Content::Other("text/event-stream"),
};

const ID: Parameter = Parameter {
    name: "id",
    location: ParameterLocation::Path,
    schema: || text_matching(DispatchId::PATTERN),
    description: "The id of a dispatch, a batch, or a batch entry: the batch's id, a dot and the entry's index.",
};

pub static DISPATCH: Endpoint = Endpoint {
    operation: Operation {
        id: "dispatch",
        method: Method::POST,
        path: "/api/dispatch",
        summary: "Submits one or more prompts to a coding agent that is configured in system/config.json and works in \
                  the owner's home directory. Requests with an id are idempotent. The dispatch continues if the \
                  client disconnects.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[],
        body: Some(request_schema),
        responses: &[
            EVENTS,
            documented_json(
                202,
                "Accepted. Sent if the client accepts application/json but not text/event-stream.",
                response_schema,
            ),
        ],
        problems: &[
            Code::Forbidden,
            Code::Unavailable,
            Code::IdempotencyMismatch,
            Code::CostLimitReached,
            Code::RateLimited,
        ],
    },
    max_body_bytes: MAX_BODY_BYTES,
};

pub static LIST: Endpoint = Endpoint {
    operation: Operation {
        id: "listDispatches",
        method: Method::GET,
        path: "/api/dispatch",
        summary: "Queued, running and recently ended dispatches, newest first.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "At most 200.", || {
            object(&[("dispatches", array(schema_ref("Dispatch")))], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static SHOW: Endpoint = Endpoint {
    operation: Operation {
        id: "showDispatch",
        method: Method::GET,
        path: "/api/dispatch/{id}",
        summary: "A dispatch or a batch, and its result. The agent's text is kept for a limited time.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[ID],
        body: None,
        responses: &[documented_json(200, "The dispatch.", response_schema)],
        problems: &[Code::Forbidden, Code::Unavailable, Code::NotFound],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static FOLLOW: Endpoint = Endpoint {
    operation: Operation {
        id: "followDispatch",
        method: Method::GET,
        path: "/api/dispatch/{id}/events",
        summary: "The events of a dispatch or a batch, from the first to the last.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[
            ID,
            Parameter {
                name: "Last-Event-ID",
                location: ParameterLocation::Header,
                schema: || text_matching("^[0-9]{0,18}$"),
                description: "Resumes after this event.",
            },
        ],
        body: None,
        responses: &[
            EVENTS,
            DocumentedResponse {
                status: 204,
                description: "The event in `Last-Event-ID` was the last one.",
                content: Content::Nothing,
            },
        ],
        problems: &[Code::Forbidden, Code::Unavailable, Code::NotFound],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static CANCEL: Endpoint = Endpoint {
    operation: Operation {
        id: "cancelDispatch",
        method: Method::DELETE,
        path: "/api/dispatch/{id}",
        summary: "Cancels a dispatch or a whole batch in any phase; costs incurred until then still count.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[ID],
        body: None,
        responses: &[documented_json(
            202,
            "Cancellation is requested; an ended dispatch is unchanged.",
            response_schema,
        )],
        problems: &[Code::Forbidden, Code::Unavailable, Code::NotFound],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

//! POST `/vps/fleet/alarms/:alarm/release`: an operator lets through what a fuse holds back.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::Call;
use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, told};
use super::mutation::{Changed, Mutation, Reply};
use crate::http::openapi::{Operation, Parameter, Place, fields, named, nullable, object, text, time};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::platform::alarms::{self, Alarm};
use crate::platform::context::Platform;
use crate::platform::db::{self};

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(alarm): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    call.fields()?.finish(Some(()))?;
    let not_found = || {
        let detail = format!("No alarm {alarm} is raised. `svcctl fleet` lists the alarms.");
        Problem::new(Code::NotFound, detail)
    };
    let known: Alarm = alarm.parse().map_err(|_| not_found())?;
    if !known.is_fuse() {
        return Err(informs_only(known));
    }
    let mutation = Mutation::of(&call, &operator)?;
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply.into_response());
    }
    let unknown = async || db::unknown_servers::count(&tx, platform.config.timing.orphan_grace).await;
    let before = db::alarms::get(&tx, known.as_str()).await?.ok_or_else(not_found)?;
    let before = alarms::record(&before, &unknown().await?);
    let after = alarms::release(&tx, known).await?.ok_or_else(not_found)?;
    let after = alarms::record(&after, &unknown().await?);
    let reply = Reply::new(StatusCode::OK, after.clone());
    let changed = Changed {
        action: "alarm.release",
        target: known.as_str(),
        before: Some(&before),
        after: Some(&after),
    };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    tracing::warn!(alarm = known.as_str(), "an operator released the alarm");
    platform.reconcile.notify_one();
    Ok(reply.into_response())
}

/// The refusal where an alarm holds nothing back.
fn informs_only(alarm: Alarm) -> Problem {
    let detail = format!(
        "The alarm {} holds nothing back, so there is nothing to release: it ends {}. `svcctl fleet` says what to do about it.",
        alarm.as_str(),
        alarm.end()
    );
    Problem::new(Code::InvalidState, detail)
}

/// The route and its description.
pub static RELEASE: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "releaseAlarm",
        method: Method::POST,
        path: "/vps/fleet/alarms/{alarm}/release",
        summary: "Lets through what a fuse holds back: for an hour, machines whose servers are missing fail; the unknown \
                  servers of this moment are deleted as their grace ends.",
        credentials: &[OPERATOR],
        parameters: &[
            Parameter {
                name: "alarm",
                place: Place::Path,
                schema: text,
                about: "Its name, as the fleet shows it.",
            },
            IDEMPOTENCY_KEY,
        ],
        body: Some(|| fields(&[], &[])),
        answers: &[told(200, "It is released.", || named("Alarm"))],
        problems: &[
            Code::NotFound,
            Code::InvalidState,
            Code::InvalidRequest,
            Code::IdempotencyMismatch,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || post(handle),
};

/// One alarm of the fleet.
pub fn shape() -> Value {
    object(
        &[
            ("alarm", text()),
            ("since", time()),
            ("seenAt", time()),
            ("detail", json!({ "type": "object" })),
            ("releasedUntil", nullable(time())),
            ("next", text()),
        ],
        &[],
    )
}

//! What every mutating call of an operator has in common: replay by `Idempotency-Key`, the audit row, `Prefer: wait`.
//!
//! The invariant: audit row, stored answer and change are one transaction.

use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use deadpool_postgres::{GenericClient, Transaction};
use http::{HeaderValue, StatusCode};
use serde_json::Value;
use tokio::time::Instant;

use super::call::Call;
use crate::http::problem::{Code, Problem};
use crate::http::request_id;
use crate::machine::id::{MachineId, OperationId};
use crate::platform::context::Platform;
use crate::platform::db::idempotency::StoredResponse;
use crate::platform::db::{self, DbError};
use crate::platform::operators::{Operator, PLATFORM_SECRET_ACTOR};

const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// An answer that can be stored and given again.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: StatusCode,
    pub body: Value,
}

impl Reply {
    pub fn new(status: StatusCode, body: Value) -> Self {
        Self { status, body }
    }
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

/// One mutating call.
pub struct Mutation {
    /// Who makes it. Keys of one operator are nothing to another.
    actor: String,
    key: Option<String>,
    route: String,
    body_hash: Vec<u8>,
}

/// What changed, for the audit.
pub struct Changed<'a> {
    pub action: &'a str,
    pub target: &'a str,
    pub before: Option<&'a Value>,
    pub after: Option<&'a Value>,
}

impl Mutation {
    /// # Errors
    /// `invalid_request` where the key is not one.
    pub fn of(call: &Call, operator: &Operator) -> Result<Self, Problem> {
        let key = match call.headers.get("idempotency-key") {
            None => None,
            Some(value) => match value.to_str() {
                Ok(text) if (1..=255).contains(&text.len()) && !text.contains('\t') => Some(text.to_owned()),
                _ => return Err(Problem::field("Idempotency-Key", "must be 1 to 255 printable characters")),
            },
        };
        // Options in the query are part of what is asked.
        let asked = call.uri.path_and_query().map_or_else(|| call.uri.path(), |whole| whole.as_str());
        let route = format!("{} {asked}", call.method);
        Ok(Self { actor: operator.actor().to_owned(), key, route, body_hash: call.body_hash() })
    }

    /// Who makes it, as the audit names them.
    pub fn actor(&self) -> &str {
        &self.actor
    }

    /// The answer that this key got before.
    ///
    /// # Errors
    /// `idempotency_mismatch` where it was another request.
    pub async fn replay(&self, client: &impl GenericClient) -> Result<Option<Reply>, Problem> {
        let Some(key) = &self.key else { return Ok(None) };
        let Some(stored) = db::idempotency::get(client, &self.actor, key).await? else { return Ok(None) };
        if stored.route != self.route || stored.body_hash != self.body_hash {
            return Err(Problem::new(
                Code::IdempotencyMismatch,
                "This Idempotency-Key was used with another request.",
            ));
        }
        let status = StatusCode::from_u16(stored.status).unwrap_or(StatusCode::OK);
        Ok(Some(Reply::new(status, stored.response)))
    }

    /// [`Self::replay`] in the transaction of the change; requests with the same key take turns.
    ///
    /// # Errors
    /// As [`Self::replay`].
    pub async fn begin(&self, tx: &Transaction<'_>) -> Result<Option<Reply>, Problem> {
        if let Some(key) = &self.key {
            db::lock(tx, &self.lock_subject(key)).await?;
        }
        self.replay(tx).await
    }

    /// Of [`PLATFORM_SECRET_ACTOR`] the name that earlier releases lock, which may run beside this one.
    fn lock_subject(&self, key: &str) -> String {
        if self.actor == PLATFORM_SECRET_ACTOR {
            format!("idempotency {key}")
        } else {
            format!("idempotency {} {key}", self.actor)
        }
    }

    /// Writes the audit row and the answer, before the commit.
    ///
    /// # Errors
    /// `database_unavailable`.
    pub async fn record(
        &self,
        tx: &Transaction<'_>,
        reply: &Reply,
        changed: &Changed<'_>,
    ) -> Result<(), DbError> {
        audit(tx, &self.actor, changed).await?;
        self.store(tx, reply).await
    }

    /// Writes the answer of a call that changed nothing.
    ///
    /// # Errors
    /// `database_unavailable`.
    pub async fn store(&self, tx: &Transaction<'_>, reply: &Reply) -> Result<(), DbError> {
        let Some(key) = &self.key else { return Ok(()) };
        let stored = StoredResponse {
            route: self.route.clone(),
            body_hash: self.body_hash.clone(),
            status: reply.status.as_u16(),
            response: reply.body.clone(),
        };
        db::idempotency::put(tx, &self.actor, key, &stored).await
    }
}

/// The audit row of a change.
///
/// # Errors
/// [`DbError`].
pub async fn audit(tx: &Transaction<'_>, actor: &str, changed: &Changed<'_>) -> Result<(), DbError> {
    let request_id = request_id::current();
    let Changed { action, target, before, after } = *changed;
    let entry = db::audit::AuditEntry { actor, action, target, before, after, request_id: &request_id };
    db::audit::write(tx, &entry).await
}

/// Sends the answer; with `Prefer: wait=N`, when the operation has ended or N seconds are over, with the status of then.
pub async fn answer(platform: &Platform, call: &Call, mut reply: Reply) -> Result<Response, Problem> {
    let named = |name: &str| reply.body.get(name).and_then(Value::as_str).map(str::to_owned);
    let operation: Option<OperationId> = named("operationId").and_then(|id| id.parse().ok());
    let machine: Option<MachineId> = named("machineId").and_then(|id| id.parse().ok());
    let (Some(seconds), Some(operation), Some(machine)) = (call.wait_seconds(), operation, machine) else {
        return Ok(reply.into_response());
    };
    wait(platform, operation, Duration::from_secs(seconds)).await?;
    let session = platform.db.session().await?;
    if let Some(row) = db::machines::get(&session, machine).await? {
        reply.body["status"] = serde_json::json!(row.status);
        // A resize answers with the type that was asked for; one that did not come about is told as it is.
        if reply.body.get("serverType").is_some() && row.resize_to.is_none() {
            reply.body["serverType"] = serde_json::json!(row.server_type);
        }
    }
    let mut response = reply.into_response();
    if let Ok(applied) = HeaderValue::from_str(&format!("wait={seconds}")) {
        response.headers_mut().insert("preference-applied", applied);
    }
    Ok(response)
}

/// Until the operation has ended, the time is over, or the platform stops.
async fn wait(platform: &Platform, operation: OperationId, longest: Duration) -> Result<(), Problem> {
    let deadline = Instant::now() + longest;
    loop {
        let session = platform.db.session().await?;
        let ended = db::operations::get(&session, operation).await?.is_none_or(|found| found.has_ended());
        drop(session);
        if ended || Instant::now() >= deadline || platform.stop.is_cancelled() {
            return Ok(());
        }
        tokio::time::sleep_until(deadline.min(Instant::now() + LOOK_AGAIN)).await;
    }
}

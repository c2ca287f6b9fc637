//! Runs operators' mutating calls: replays responses by `Idempotency-Key`, writes audit entries, and supports
//! `Prefer: wait`.
//!
//! Invariant: the change, its audit entry and the stored response are written in one transaction. The transaction
//! cannot include changes outside the database: `pointer.rs`, `host_files.rs` and `backup.rs` write an audit entry
//! before the change, in a separate transaction, and make the change in a task that the operator's client cannot
//! cancel. `host_files.rs` and `backup.rs` write another audit entry after the host's response. `pointer.rs` stores its
//! plan with the audit entry, so that a retry completes the change instead of repeating it.

use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use deadpool_postgres::{GenericClient, Transaction};
use http::{HeaderValue, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::call::ApiCall;
use crate::context::Platform;
use crate::db::idempotency::StoredResponse;
use crate::db::machine_row::MachineRow;
use crate::db::{self, DbError};
use crate::operators::{Operator, PLATFORM_SECRET_ACTOR};
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::{idempotency, request_id};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::IdpUserId;

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A response that can be stored and replayed.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: StatusCode,
    pub body: Value,
}

impl Reply {
    pub fn new(status: StatusCode, body: impl Serialize) -> Self {
        Self { status, body: json!(body) }
    }
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

/// One mutating call.
pub struct Mutation {
    /// The operator's name in the audit log. Each operator has a separate namespace for idempotency keys.
    actor: String,
    key: Option<String>,
    route: String,
    body_hash: Vec<u8>,
}

/// The content of an audit entry.
pub struct AuditChange {
    pub action: &'static str,
    pub target: String,
    pub before: Option<Value>,
    pub after: Option<Value>,
}

/// The result of a change, which [`Mutation::run`] stores: the response and, if anything changed, the audit entry.
pub struct MutationEffect {
    reply: Reply,
    change: Option<AuditChange>,
}

impl MutationEffect {
    pub fn changed(reply: Reply, change: AuditChange) -> Self {
        Self { reply, change: Some(change) }
    }

    /// Creates the result of a request whose effect was already in place.
    pub fn unchanged(reply: Reply) -> Self {
        Self { reply, change: None }
    }
}

/// The response that [`Mutation::run`] returns, and its origin.
pub enum MutationOutcome {
    /// This request was executed.
    Done(Reply),
    /// An earlier request with this key already received this response.
    Replayed(Reply),
}

impl MutationOutcome {
    pub fn into_reply(self) -> Reply {
        let (Self::Done(reply) | Self::Replayed(reply)) = self;
        reply
    }
}

impl Mutation {
    /// Reads the idempotency key, and the parts of the call that a repeated request must share.
    ///
    /// # Errors
    /// `invalid_request` if the idempotency key is invalid.
    pub fn from_call(call: &ApiCall, operator: &Operator) -> Result<Self, Problem> {
        let key = idempotency::read_key(&call.request.headers)?.map(str::to_owned);
        // Options in the query are part of the request's identity.
        let path =
            call.request.uri.path_and_query().map_or_else(|| call.request.uri.path(), |path| path.as_str());
        let route = format!("{} {path}", call.request.method);
        Ok(Self { actor: operator.actor().to_owned(), key, route, body_hash: call.body_hash() })
    }

    /// Returns the idempotency key to send to a host, if the operator sent one. It is different for each operator.
    pub fn derive_host_idempotency_key(&self) -> Option<String> {
        let key = self.key.as_ref()?;
        Some(hex::encode(Sha256::digest(format!("{}\t{key}", self.actor))))
    }

    /// Returns the operator's name in the audit log.
    pub fn actor(&self) -> &str {
        &self.actor
    }

    /// Finds the stored response to an earlier request with this key.
    ///
    /// # Errors
    /// `idempotency_mismatch` if the earlier request was a different one; `database_unavailable` if the database is
    /// unreachable.
    pub async fn replay(&self, client: &impl GenericClient) -> Result<Option<Reply>, Problem> {
        let Some(key) = &self.key else { return Ok(None) };
        let stored = self.find_stored(client, key).await?;
        Ok(stored.map(|stored| {
            let status = StatusCode::from_u16(stored.status).unwrap_or(StatusCode::OK);
            Reply::new(status, stored.response)
        }))
    }

    /// Finds the plan that an earlier attempt at this request stored, for a change outside the database.
    ///
    /// # Errors
    /// Same as [`Self::replay`]; `internal` if the plan is not a `T`.
    pub async fn find_plan<T: DeserializeOwned>(
        &self,
        client: &impl GenericClient,
    ) -> Result<Option<T>, Problem> {
        let Some(key) = &self.key else { return Ok(None) };
        let stored = self.find_stored(client, &plan_key(key)).await?;
        let plan = stored.map(|stored| serde_json::from_value(stored.response)).transpose();
        plan.map_err(|error| Problem::internal(&error))
    }

    /// Stores the plan for a change outside the database, in place of an earlier attempt's plan.
    ///
    /// # Errors
    /// [`DbError`] if the plan cannot be written.
    pub async fn store_plan(&self, tx: &Transaction<'_>, plan: &impl Serialize) -> Result<(), DbError> {
        let Some(key) = &self.key else { return Ok(()) };
        let stored = self.to_stored(&Reply::new(StatusCode::ACCEPTED, plan));
        db::idempotency::replace_response(tx, &self.actor, &plan_key(key), &stored).await
    }

    /// Finds what an earlier attempt at this request stored under `key`.
    async fn find_stored(
        &self,
        client: &impl GenericClient,
        key: &str,
    ) -> Result<Option<StoredResponse>, Problem> {
        let Some(stored) = db::idempotency::find_response(client, &self.actor, key).await? else {
            return Ok(None);
        };
        if stored.route != self.route || stored.body_hash != self.body_hash {
            return Err(Problem::new(
                Code::IdempotencyMismatch,
                "This Idempotency-Key was used for a different request.",
            ));
        }
        Ok(Some(stored))
    }

    fn to_stored(&self, reply: &Reply) -> StoredResponse {
        StoredResponse {
            route: self.route.clone(),
            body_hash: self.body_hash.clone(),
            status: reply.status.as_u16(),
            response: reply.body.clone(),
        }
    }

    /// Runs the change, and writes its audit entry and the stored response, in one transaction, unless the request is
    /// replayed.
    ///
    /// # Errors
    /// Same as [`Self::replay`] and `change`. On an error, nothing is changed.
    pub async fn run(
        &self,
        platform: &Platform,
        change: impl AsyncFnOnce(&Transaction<'_>) -> Result<MutationEffect, Problem>,
    ) -> Result<MutationOutcome, Problem> {
        let mut session = platform.db.session().await?;
        let tx = db::begin(&mut session).await?;
        self.run_in(tx, change).await
    }

    /// Like [`Self::run`], but with an advisory lock on the user, which serializes changes that may assign or release
    /// one of the user's slots.
    ///
    /// # Errors
    /// Same as [`Self::run`].
    pub async fn run_for_user(
        &self,
        platform: &Platform,
        user: &IdpUserId,
        change: impl AsyncFnOnce(&Transaction<'_>) -> Result<MutationEffect, Problem>,
    ) -> Result<Reply, Problem> {
        let mut session = platform.db.session().await?;
        let tx = db::begin(&mut session).await?;
        db::lock(&tx, &format!("user {user}")).await?;
        Ok(self.run_in(tx, change).await?.into_reply())
    }

    /// Writes an audit entry in a separate transaction, before a change outside the database.
    ///
    /// # Errors
    /// [`DbError`] if the entry cannot be written; the change must then not be made.
    pub async fn audit_before(&self, platform: &Platform, change: &AuditChange) -> Result<(), DbError> {
        let mut session = platform.db.session().await?;
        let tx = db::begin(&mut session).await?;
        write_audit(&tx, &self.actor, change).await?;
        db::commit(tx).await
    }

    async fn run_in(
        &self,
        tx: Transaction<'_>,
        change: impl AsyncFnOnce(&Transaction<'_>) -> Result<MutationEffect, Problem>,
    ) -> Result<MutationOutcome, Problem> {
        if let Some(reply) = self.begin(&tx).await? {
            return Ok(MutationOutcome::Replayed(reply));
        }
        let MutationEffect { reply, change } = change(&tx).await?;
        if let Some(change) = change {
            write_audit(&tx, &self.actor, &change).await?;
        }
        self.store(&tx, &reply).await?;
        db::commit(tx).await?;
        Ok(MutationOutcome::Done(reply))
    }

    /// Like [`Self::replay`], but in the change's transaction. A lock serializes requests with the same key.
    ///
    /// # Errors
    /// Same as [`Self::replay`].
    pub async fn begin(&self, tx: &Transaction<'_>) -> Result<Option<Reply>, Problem> {
        if let Some(key) = &self.key {
            db::lock(tx, &self.lock_name(key)).await?;
        }
        self.replay(tx).await
    }

    /// Returns the name of the lock for an idempotency key. For [`PLATFORM_SECRET_ACTOR`], the name must be the one
    /// that earlier releases use, because they may be running at the same time.
    fn lock_name(&self, key: &str) -> String {
        if self.actor == PLATFORM_SECRET_ACTOR {
            format!("idempotency {key}")
        } else {
            format!("idempotency {} {key}", self.actor)
        }
    }

    /// Stores the response for replays; must run before the commit.
    ///
    /// # Errors
    /// [`DbError`] if the response cannot be written.
    pub async fn store(&self, tx: &Transaction<'_>, reply: &Reply) -> Result<(), DbError> {
        let Some(key) = &self.key else { return Ok(()) };
        db::idempotency::store_response(tx, &self.actor, key, &self.to_stored(reply)).await
    }
}

/// Returns the key of a request's plan. No client can send it, because it contains a tab.
fn plan_key(key: &str) -> String {
    format!("plan\t{key}")
}

/// Writes the audit entry for a change.
pub async fn write_audit(tx: &Transaction<'_>, actor: &str, change: &AuditChange) -> Result<(), DbError> {
    let request_id = request_id::current();
    let AuditChange { action, target, before, after } = change;
    let (before, after) = (before.as_ref(), after.as_ref());
    let entry = db::audit::AuditEntry { actor, action, target, before, after, request_id: &request_id };
    db::audit::write(tx, &entry).await
}

/// Converts the reply into the response. With `Prefer: wait=N`, first waits until the operation has ended, N seconds
/// have passed, or the platform stops, and updates the machine's status and server type in the reply. If the database
/// fails during the wait, responds immediately with the reply as it is, because the change has been committed.
pub async fn respond(platform: &Platform, call: &ApiCall, mut reply: Reply) -> Response {
    let body_text = |name: &str| reply.body.get(name).and_then(Value::as_str).map(str::to_owned);
    let operation: Option<OperationId> = body_text("operationId").and_then(|id| id.parse().ok());
    let machine: Option<MachineId> = body_text("machineId").and_then(|id| id.parse().ok());
    let (Some(seconds), Some(operation), Some(machine)) = (call.wait_seconds(), operation, machine) else {
        return reply.into_response();
    };
    let after = match wait_and_reload(platform, operation, machine, Duration::from_secs(seconds)).await {
        Ok(after) => after,
        Err(error) => {
            tracing::warn!(%operation, error = %format_chain(&error), "database error while waiting for an operation");
            return reply.into_response();
        }
    };
    if let Some(row) = after {
        reply.body["status"] = json!(row.status);
        // The response to a resize has the requested type. After a failed resize, it must have the actual type.
        if reply.body.get("serverType").is_some() && row.resize_to.is_none() {
            reply.body["serverType"] = json!(row.server_type);
        }
    }
    let mut response = reply.into_response();
    if let Ok(applied) = HeaderValue::from_str(&format!("wait={seconds}")) {
        response.headers_mut().insert("preference-applied", applied);
    }
    response
}

/// Waits for the operation, and returns the machine's current row.
async fn wait_and_reload(
    platform: &Platform,
    operation: OperationId,
    machine: MachineId,
    timeout: Duration,
) -> Result<Option<MachineRow>, DbError> {
    wait_for_operation(platform, operation, timeout).await?;
    let session = platform.db.session().await?;
    db::machines::get(&session, machine).await
}

/// Waits until the operation has ended, the timeout has passed, or the platform stops.
async fn wait_for_operation(
    platform: &Platform,
    operation: OperationId,
    timeout: Duration,
) -> Result<(), DbError> {
    let deadline = Instant::now() + timeout;
    loop {
        let session = platform.db.session().await?;
        let has_ended =
            db::operations::get(&session, operation).await?.is_none_or(|operation| operation.has_ended());
        drop(session);
        if has_ended || Instant::now() >= deadline || platform.stop.is_cancelled() {
            return Ok(());
        }
        tokio::time::sleep_until(deadline.min(Instant::now() + POLL_INTERVAL)).await;
    }
}

//! POST `/vps/operations/:id/continue` and `…/abandon`: what an operator decides where an operation waits for them, or
//! does not get on.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::json;

use super::call::{Call, path_id};
use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, told};
use super::mutation::{Changed, Mutation, Reply};
use super::{fault, operation, restorable, undelete};
use crate::clock::rfc3339_ms;
use crate::http::openapi::{Operation, Parameter, Place, boolean, fields, matching, named, uuid};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::event::Event;
use crate::machine::id::OperationId;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::operations::OperationRow;
use crate::platform::db::{self, machine_changes};
use crate::platform::lifecycle::{self, EventContext};
use crate::platform::operations::last_backup::{ANSWERED, NEWER_SNAPSHOT};
use crate::platform::operations::{OperationKind, OperationOptions, Step, later_holder};
use crate::store::key::{SlotPrefix, SnapshotKey};
use crate::store::snapshot;

/// For the record of a snapshot that an operator names.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);

const ID: Parameter = Parameter { name: "id", place: Place::Path, schema: uuid, about: "The operation." };

enum Decision {
    /// The step that asks runs again: what it asked about may have changed.
    Retry,
    AcceptLoss,
    /// The new machine begins with this snapshot.
    Restore(SnapshotKey),
    Abandon,
}

impl Decision {
    fn action(&self) -> &'static str {
        match self {
            Self::Retry | Self::AcceptLoss | Self::Restore(_) => "operation.continue",
            Self::Abandon => "operation.abandon",
        }
    }
}

async fn go_ahead(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    let mut said = call.fields()?;
    let accepts = said.boolean("acceptLoss").unwrap_or(false);
    let snapshot: Option<SnapshotKey> = said.optional("snapshotKey");
    let is_twofold = accepts && snapshot.is_some();
    let decision = match snapshot {
        Some(key) => Decision::Restore(key),
        None if accepts => Decision::AcceptLoss,
        None => Decision::Retry,
    };
    let decision = said.finish(Some(decision))?;
    if is_twofold {
        return Err(Problem::field(
            "/snapshotKey",
            "cannot be combined with an accepted loss: choose one of the two",
        ));
    }
    decide(&platform, &Mutation::of(&call, &operator)?, &id, decision).await
}

async fn abandon(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    call.no_body()?;
    decide(&platform, &Mutation::of(&call, &operator)?, &id, Decision::Abandon).await
}

async fn decide(
    platform: &Platform,
    mutation: &Mutation,
    id: &str,
    decision: Decision,
) -> Result<Response, Problem> {
    let id: OperationId = path_id("operationId", id)?;
    let not_found = || Problem::new(Code::NotFound, format!("There is no operation {id}."));
    let mut session = platform.db.session().await?;
    let seen = db::operations::get(&session, id).await?.ok_or_else(not_found)?;
    let machine = db::machines::get(&session, seen.machine).await?.ok_or_else(not_found)?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply.into_response());
    }
    let is_undone = matches!(decision, Decision::Abandon) && seen.kind == OperationKind::Delete.as_str();
    if is_undone && machine.deleted_at.is_some() && !seen.has_ended() {
        drop(session);
        undelete::ensure_may_return(platform, &machine).await?;
        session = platform.db.session().await?;
    }
    if let Decision::Restore(key) = &decision {
        drop(session);
        let slot = SlotPrefix::new(&machine.user, &machine.slot);
        let side = snapshot::by_key(&platform.bucket, &slot, key.as_str());
        let side = tokio::time::timeout(STORE_TIMEOUT, side).await.map_err(|_| fault::store_unavailable())?;
        restorable::fits(platform, &side.map_err(fault::unusable)?, &machine.server_type).await?;
        session = platform.db.session().await?;
    }
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, &format!("user {}", machine.user)).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply.into_response());
    }
    // Machines are locked before their operations, everywhere.
    let machine = db::machines::lock(&tx, seen.machine).await?.ok_or_else(not_found)?;
    let was = db::operations::lock(&tx, id).await?.ok_or_else(not_found)?;
    if was.has_ended() {
        return Err(invalid(&was, &ended(&was)));
    }
    match &decision {
        Decision::Retry => {
            let options = OperationOptions { give_up_backup: false, ..was.options };
            resume(&tx, &was, options, "the operator had the step run again").await?;
        }
        Decision::AcceptLoss => accept_loss(&tx, &was).await?,
        Decision::Restore(key) => restore(&tx, &was, key).await?,
        Decision::Abandon => give_up(platform, &tx, &machine, &was).await?,
    }
    let now = db::operations::get(&tx, id).await?.ok_or_else(not_found)?;
    let reply = Reply::new(StatusCode::OK, operation::record(&tx, &now).await?);
    let (before, target) = (was.record(&[]), id.to_string());
    let after = Some(&reply.body);
    let changed = Changed { action: decision.action(), target: &target, before: Some(&before), after };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    platform.nudge.notify_one();
    platform.reconcile.notify_one();
    Ok(reply.into_response())
}

/// Accepts what the question says is lost. Where it asks whether an outdated deletion is repeated, that is all that is
/// confirmed: a last backup that is missing is asked about on its own.
async fn accept_loss(tx: &Transaction<'_>, was: &OperationRow) -> Result<(), Problem> {
    let asks = |code: &str| was.question.as_ref().is_some_and(|question| question["code"] == code);
    if asks(later_holder::UNVERIFIED_FENCE) {
        let options = OperationOptions { disregard_fence: true, ..was.options };
        return resume(tx, was, options, "the operator disregarded the fence").await;
    }
    if asks(later_holder::BEHIND_STORE) {
        resume(tx, was, was.options, "the operator confirmed the deletion").await?;
        return Ok(db::operations::add_fact(tx, was.id, later_holder::CONFIRMED, &json!(true)).await?);
    }
    if asks_for_snapshot(was) {
        resume(tx, was, was.options, "the operator chose the latest snapshot").await?;
        return Ok(db::operations::add_fact(tx, was.id, ANSWERED, &json!(true)).await?);
    }
    // Its host may claim for hours that the backup makes progress.
    let give_up_backup = was.question.is_none() && was.step == Step::LastBackup.as_str();
    let options = OperationOptions { accept_loss: true, give_up_backup, ..was.options };
    resume(tx, was, options, "the operator accepted the loss").await
}

fn asks_for_snapshot(was: &OperationRow) -> bool {
    was.question.as_ref().is_some_and(|question| question["code"] == NEWER_SNAPSHOT)
}

/// Sets the snapshot that the new machine begins with, where that is asked.
async fn restore(tx: &Transaction<'_>, was: &OperationRow, key: &SnapshotKey) -> Result<(), Problem> {
    if !asks_for_snapshot(was) {
        let detail = format!(
            "The {} does not ask which snapshot is restored, and nothing was changed; `svcctl operation abandon {}`, then \
             `svcctl recover` with `--snapshot`, begins with another one.",
            was.noun(),
            was.id
        );
        return Err(invalid(was, &detail));
    }
    let why = format!("the operator chose the snapshot {}", key.as_str());
    resume(tx, was, was.options, &why).await?;
    db::machine_changes::set_restore_snapshot(tx, was.machine, key.as_str()).await?;
    Ok(db::operations::add_fact(tx, was.id, ANSWERED, &json!(true)).await?)
}

/// Has the step that asks run again, with what was decided.
async fn resume(
    tx: &Transaction<'_>,
    was: &OperationRow,
    options: OperationOptions,
    why: &str,
) -> Result<(), Problem> {
    if was.question.is_none() && !options.give_up_backup {
        let detail = format!(
            "The {} does not wait for a decision: it is at {}. `svcctl operation show {} --wait` follows it.",
            was.noun(),
            was.step,
            was.id
        );
        return Err(invalid(was, &detail));
    }
    db::operations::resume(tx, was.id, options).await?;
    Ok(db::operations::log(tx, was.id, &was.step, "continued", Some(why)).await?)
}

/// Ends the operation in a way that leaves the slot as it was, as far as it can be.
async fn give_up(
    platform: &Platform,
    tx: &Transaction<'_>,
    machine: &MachineRow,
    was: &OperationRow,
) -> Result<(), Problem> {
    db::operations::log(tx, was.id, &was.step, "abandoned", None).await?;
    let kind: OperationKind =
        was.kind.parse().map_err(|_| invalid(was, "This release does not know its kind."))?;
    match kind {
        OperationKind::Provision | OperationKind::Recover => {
            let with = EventContext {
                failed_at: Some((&was.step, "the operator abandoned the operation")),
                ..EventContext::default()
            };
            let event = Event::OperationAbandoned;
            let change = lifecycle::apply(tx, &platform.mint, machine, &event, with).await;
            change.map_err(|error| fault::lifecycle(error, machine))?;
        }
        OperationKind::Delete if machine.registered_at.is_some() => {
            undelete::reinstate(platform, tx, machine).await?;
        }
        // Its server is switched on again before it ends.
        OperationKind::Resize => {
            return Ok(db::operations::skip_to(tx, was.id, Step::PowerOn.as_str()).await?);
        }
        OperationKind::RemoveServer => machine_changes::record_removal_abandoned(tx, machine.id).await?,
        OperationKind::Delete
        | OperationKind::Reinstate
        | OperationKind::PowerOn
        | OperationKind::PowerOff
        | OperationKind::Reboot => {}
    }
    // What the machine's change has not ended.
    Ok(db::operations::end(tx, was.id, "cancelled", Some("abandoned")).await?)
}

/// How an operation ended that nothing can be decided about any more.
fn ended(operation: &OperationRow) -> String {
    let how = match operation.state.as_str() {
        "cancelled" => "was cancelled",
        state => state,
    };
    let code = operation.error_code.as_ref().map(|code| format!(" ({code})")).unwrap_or_default();
    let at = operation.ended_at.map(|at| format!(" at {}", rfc3339_ms(at))).unwrap_or_default();
    format!(
        "The {} has ended, and nothing was changed: it {how}{code}{at}. `svcctl operation show {}` shows its steps.",
        operation.noun(),
        operation.id
    )
}

fn invalid(operation: &OperationRow, detail: &str) -> Problem {
    Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(operation.state))
        .with("allowed", json!([]))
}

/// The routes and their descriptions.
pub static CONTINUE: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "continueOperation",
        method: Method::POST,
        path: "/vps/operations/{id}/continue",
        summary: "Runs the step that waits for a decision again. `acceptLoss`: it goes ahead without what it asked for, and at any time during `last_backup`. `snapshotKey` answers `newer_snapshot`: the new machine begins with it.",
        credentials: &[OPERATOR],
        parameters: &[ID, IDEMPOTENCY_KEY],
        body: Some(|| {
            fields(&[], &[("acceptLoss", boolean()), ("snapshotKey", matching(SnapshotKey::PATTERN))])
        }),
        answers: &[told(200, "The operation runs again.", || named("Operation"))],
        problems: &[
            Code::NotFound,
            Code::InvalidState,
            Code::SnapshotUnusable,
            Code::DiskTooSmall,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(go_ahead),
};
pub static ABANDON: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "abandonOperation",
        method: Method::POST,
        path: "/vps/operations/{id}/abandon",
        summary: "Gives an operation up: the slot goes back to the machine it had, where that still exists.",
        credentials: &[OPERATOR],
        parameters: &[ID, IDEMPOTENCY_KEY],
        body: None,
        answers: &[told(200, "The operation has ended, or switches the server on and ends.", || {
            named("Operation")
        })],
        problems: &[Code::NotFound, Code::InvalidState, Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    },
    serve: || post(abandon),
};

//! POST `/vps/operations/:id/continue` and `…/abandon`: apply an operator's decision to an operation that is waiting
//! for one or is making no progress.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::json;

use super::call::{ApiCall, path_id};
use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, documented_json};
use super::mutation::{AuditChange, Mutation, MutationEffect, Reply};
use super::{problems, replacement_checks, undelete};
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::operations::OperationRow;
use crate::db::{self, machine_changes};
use crate::lifecycle::{self, EventContext};
use crate::operations::final_backup::{NEWER_SNAPSHOT, SNAPSHOT_CHOSEN};
use crate::operations::later_holder;
use crate::resource;
use svc_base::clock::rfc3339_ms;
use svc_http::openapi::{
    Operation, Parameter, ParameterLocation, boolean, request_object, schema_ref, text_matching, uuid,
};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::event::Event;
use svc_machine::id::OperationId;
use svc_machine::operation::{OperationKind, OperationOptions, Step};
use svc_store::key::{SlotPrefix, SnapshotKey};
use svc_store::snapshot;

/// Timeout for reading a snapshot's sidecar.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);

const ID: Parameter =
    Parameter { name: "id", location: ParameterLocation::Path, schema: uuid, description: "The operation." };

enum OperatorDecision {
    /// Runs the waiting step again, because its conditions may have changed.
    Retry,
    AcceptLoss,
    /// Restores this snapshot on the new machine.
    Restore(SnapshotKey),
    Abandon,
}

impl OperatorDecision {
    fn audit_action(&self) -> &'static str {
        match self {
            Self::Retry | Self::AcceptLoss | Self::Restore(_) => "operation.continue",
            Self::Abandon => "operation.abandon",
        }
    }
}

async fn continue_operation(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let mut body = call.request.json_fields()?;
    let accept_loss = body.boolean("acceptLoss").unwrap_or(false);
    let snapshot: Option<SnapshotKey> = body.optional("snapshotKey");
    let is_ambiguous = accept_loss && snapshot.is_some();
    let decision = match snapshot {
        Some(key) => OperatorDecision::Restore(key),
        None if accept_loss => OperatorDecision::AcceptLoss,
        None => OperatorDecision::Retry,
    };
    let decision = body.finish(Some(decision))?;
    if is_ambiguous {
        return Err(Problem::field("/snapshotKey", "cannot be combined with `--accept-loss`"));
    }
    apply_decision(&platform, &Mutation::from_call(&call, &operator)?, &id, decision).await
}

async fn abandon(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    call.ensure_empty_body()?;
    apply_decision(&platform, &Mutation::from_call(&call, &operator)?, &id, OperatorDecision::Abandon).await
}

async fn apply_decision(
    platform: &Platform,
    mutation: &Mutation,
    id: &str,
    decision: OperatorDecision,
) -> Result<Response, Problem> {
    let id: OperationId = path_id("operationId", id)?;
    let not_found = || Problem::new(Code::NotFound, format!("There is no operation {id}."));
    let session = platform.db.session().await?;
    let unlocked = db::operations::get(&session, id).await?.ok_or_else(not_found)?;
    let machine = db::machines::get(&session, unlocked.machine).await?.ok_or_else(not_found)?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply.into_response());
    }
    drop(session);
    let is_undelete =
        matches!(decision, OperatorDecision::Abandon) && unlocked.kind == OperationKind::Delete.as_str();
    if is_undelete && machine.deleted_at.is_some() && !unlocked.has_ended() {
        undelete::ensure_slot_is_free(platform, &machine).await?;
    }
    if let OperatorDecision::Restore(key) = &decision {
        let slot = SlotPrefix::new(&machine.user, &machine.slot);
        let record = snapshot::load(&platform.bucket, &slot, key.as_str());
        let record = tokio::time::timeout(STORE_TIMEOUT, record)
            .await
            .map_err(|_| svc_store::problem::unavailable())?;
        replacement_checks::ensure_fits_disk(
            platform,
            &record.map_err(problems::snapshot_unusable)?,
            &machine.server_type,
        )
        .await?;
    }
    let change = async |tx: &Transaction<'_>| {
        // Lock order: machines before their operations.
        let machine = db::machines::lock(tx, unlocked.machine).await?.ok_or_else(not_found)?;
        let operation = db::operations::lock(tx, id).await?.ok_or_else(not_found)?;
        if operation.has_ended() {
            return Err(invalid_state(&operation, &describe_end(&operation)));
        }
        match &decision {
            OperatorDecision::Retry => {
                let options = retry_options(&operation);
                resume_step(tx, &operation, options, "the operator retried the step").await?;
            }
            OperatorDecision::AcceptLoss => resume_with_loss_accepted(tx, &operation).await?,
            OperatorDecision::Restore(key) => choose_snapshot(tx, &operation, key).await?,
            OperatorDecision::Abandon => abandon_operation(platform, tx, &machine, &operation).await?,
        }
        let after = db::operations::get(tx, id).await?.ok_or_else(not_found)?;
        let reply = Reply::new(StatusCode::OK, resource::operation::load_with_log(tx, &after).await?);
        let change = AuditChange {
            action: decision.audit_action(),
            target: id.to_string(),
            before: Some(json!(svc_wire::operation::Operation::from(&operation))),
            after: Some(reply.body.clone()),
        };
        Ok(MutationEffect::changed(reply, change))
    };
    let reply = mutation.run_for_user(platform, &machine.user, change).await?;
    platform.runner_wake.notify_one();
    platform.reconciler_wake.notify_one();
    Ok(reply.into_response())
}

/// Returns the options for retrying the waiting step. A loss that was accepted in an earlier step remains accepted.
fn retry_options(operation: &OperationRow) -> OperationOptions {
    if operation.step == Step::FinalBackup.as_str() {
        operation.options.with_backup_retried()
    } else {
        OperationOptions { give_up_backup: false, ..operation.options }
    }
}

/// Accepts the loss that the question describes, without accepting any other:
/// - an unverified fence is disregarded;
/// - a deletion that may be outdated is confirmed, but a missing final backup is a separate question;
/// - a snapshot that is newer than the one that the pointer names is disregarded: the pointer's snapshot is restored.
async fn resume_with_loss_accepted(tx: &Transaction<'_>, operation: &OperationRow) -> Result<(), Problem> {
    let has_question =
        |code: &str| operation.question.as_ref().is_some_and(|question| question["code"] == code);
    if has_question(later_holder::UNVERIFIED_FENCE) {
        let options = OperationOptions { disregard_fence: true, ..operation.options };
        return resume_step(tx, operation, options, "the operator disregarded the fence").await;
    }
    if has_question(later_holder::BEHIND_STORE) {
        resume_step(tx, operation, operation.options, "the operator confirmed the deletion").await?;
        return Ok(db::operations::set_fact(
            tx,
            operation.id,
            later_holder::DELETION_CONFIRMED,
            &json!(true),
        )
        .await?);
    }
    if has_snapshot_question(operation) {
        resume_step(tx, operation, operation.options, "the operator chose the latest snapshot").await?;
        return Ok(db::operations::set_fact(tx, operation.id, SNAPSHOT_CHOSEN, &json!(true)).await?);
    }
    // An operator may give up on a backup even if there is no question, because the host may report progress for hours.
    let options = if operation.question.is_none() && operation.step == Step::FinalBackup.as_str() {
        operation.options.with_backup_given_up()
    } else {
        OperationOptions { accept_loss: true, give_up_backup: false, ..operation.options }
    };
    resume_step(tx, operation, options, "the operator accepted the loss").await
}

fn has_snapshot_question(operation: &OperationRow) -> bool {
    operation.question.as_ref().is_some_and(|question| question["code"] == NEWER_SNAPSHOT)
}

/// Sets the snapshot that the new machine restores, if the operation is waiting for this choice.
async fn choose_snapshot(
    tx: &Transaction<'_>,
    operation: &OperationRow,
    key: &SnapshotKey,
) -> Result<(), Problem> {
    if !has_snapshot_question(operation) {
        let detail = format!(
            "The {} is not waiting for a snapshot to be chosen, and nothing was changed. To restore a different snapshot, \
             abandon the operation with `svcctl operation abandon {}`, then run `svcctl recover` with `--snapshot`.",
            operation.noun(),
            operation.id
        );
        return Err(invalid_state(operation, &detail));
    }
    let reason = format!("the operator chose the snapshot {}", key.as_str());
    resume_step(tx, operation, operation.options, &reason).await?;
    db::machine_changes::set_restore_snapshot(tx, operation.machine, key.as_str()).await?;
    Ok(db::operations::set_fact(tx, operation.id, SNAPSHOT_CHOSEN, &json!(true)).await?)
}

/// Runs the waiting step again, with the options that the decision sets. An operator may also give up on the backup of
/// an operation that has no question.
async fn resume_step(
    tx: &Transaction<'_>,
    operation: &OperationRow,
    options: OperationOptions,
    reason: &str,
) -> Result<(), Problem> {
    if operation.question.is_none() && !options.give_up_backup {
        let detail = format!(
            "The {} is not waiting for a decision; its step is {}. Follow it with `svcctl operation show {} --wait`.",
            operation.noun(),
            operation.step,
            operation.id
        );
        return Err(invalid_state(operation, &detail));
    }
    db::operations::resume(tx, operation.id, options).await?;
    Ok(db::operations::log(tx, operation.id, &operation.step, "continued", Some(reason)).await?)
}

/// Abandons the operation and restores the slot's previous state as far as possible.
async fn abandon_operation(
    platform: &Platform,
    tx: &Transaction<'_>,
    machine: &MachineRow,
    operation: &OperationRow,
) -> Result<(), Problem> {
    db::operations::log(tx, operation.id, &operation.step, "abandoned", None).await?;
    let kind: OperationKind = operation.kind.parse().map_err(|_| {
        invalid_state(operation, "This platform release does not support operations of this kind.")
    })?;
    match kind {
        OperationKind::Provision | OperationKind::Recover => {
            let context = EventContext {
                failure: Some((&operation.step, "the operator abandoned the operation")),
                ..EventContext::default()
            };
            let event = Event::OperationAbandoned;
            let change = lifecycle::apply(tx, &platform.mint, machine, &event, context).await;
            change.map_err(|error| problems::lifecycle_problem(error, machine))?;
        }
        OperationKind::Delete if machine.registered_at.is_some() => {
            undelete::reinstate(platform, tx, machine).await?;
        }
        // The operation ends after it has powered the server on again.
        OperationKind::Resize => {
            return Ok(db::operations::skip_to_step(tx, operation.id, Step::PowerOn.as_str()).await?);
        }
        OperationKind::RemoveServer => machine_changes::record_removal_abandoned(tx, machine.id).await?,
        OperationKind::Delete
        | OperationKind::Reinstate
        | OperationKind::PowerOn
        | OperationKind::PowerOff
        | OperationKind::Reboot => {}
    }
    // If the change to the machine has already ended the operation, this has no effect.
    Ok(db::operations::end(tx, operation.id, "cancelled", Some("abandoned")).await?)
}

/// Describes how an operation ended, for an operator whose decision arrived too late.
fn describe_end(operation: &OperationRow) -> String {
    let how = match operation.state.as_str() {
        "cancelled" => "was cancelled",
        state => state,
    };
    let code = operation.error_code.as_ref().map(|code| format!(" ({code})")).unwrap_or_default();
    let at = operation.ended_at.map(|at| format!(" at {}", rfc3339_ms(at))).unwrap_or_default();
    format!(
        "The {} {how}{code}{at}, so this request changed nothing. `svcctl operation show {}` shows its steps.",
        operation.noun(),
        operation.id
    )
}

fn invalid_state(operation: &OperationRow, detail: &str) -> Problem {
    Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(operation.state))
        .with("allowed", json!([]))
}

pub static CONTINUE: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "continueOperation",
        method: Method::POST,
        path: "/vps/operations/{id}/continue",
        summary: "Runs the waiting step of an operation again. `acceptLoss` accepts the loss that the question describes; it \
                  also works at any time during `last_backup`. `snapshotKey` answers the question `newer_snapshot`: the new \
                  machine restores that snapshot.",
        credentials: &[OPERATOR],
        parameters: &[ID, IDEMPOTENCY_KEY],
        body: Some(|| {
            request_object(
                &[],
                &[("acceptLoss", boolean()), ("snapshotKey", text_matching(SnapshotKey::PATTERN))],
            )
        }),
        responses: &[documented_json(200, "The operation has resumed.", || schema_ref("Operation"))],
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
    serve: || post(continue_operation),
};
pub static ABANDON: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "abandonOperation",
        method: Method::POST,
        path: "/vps/operations/{id}/abandon",
        summary: "Abandons an operation: the slot returns to its previous machine if that machine still exists.",
        credentials: &[OPERATOR],
        parameters: &[ID, IDEMPOTENCY_KEY],
        body: None,
        responses: &[documented_json(
            200,
            "The operation has ended, or will end after it has powered the server on.",
            || schema_ref("Operation"),
        )],
        problems: &[Code::NotFound, Code::InvalidState, Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    },
    serve: || post(abandon),
};

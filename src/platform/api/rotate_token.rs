//! POST `/vps/:id/rotate-token` and `/vps/fleet/rotate-tokens`: requests the rotation of one host's token, or of all
//! hosts' tokens.
//!
//! A host receives its next token in the response to a heartbeat; [`crate::token_rotation`] defines the rules.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{Method, StatusCode};
use serde_json::json;

use super::call::ApiCall;
use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, documented_json};
use super::machine_change::{ChangeEffect, ChangeRequest, ChangeStart, LockScope, MachineChange};
use super::mutation::{AuditChange, Mutation, MutationEffect, Reply};
use crate::context::Platform;
use crate::db::upgrade_token;
use svc_http::openapi::{Operation, schema_of, schema_ref};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::MachineId;
use svc_wire::change::TokenRotations;
use svc_wire::machine::Machine;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    call.ensure_empty_body()?;
    Ok(rotate(&platform, id, &mutation).await?.into_response())
}

async fn rotate(platform: &Platform, id: MachineId, mutation: &Mutation) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    let change = match MachineChange::begin(&mut session, mutation, id, LockScope::Machine).await? {
        ChangeStart::Replayed(reply) => return Ok(reply),
        ChangeStart::Started(change) => change,
    };
    if !change.machine.is_active() || change.machine.registered_at.is_none() {
        let detail = "Only the token of a registered machine that holds its slot can be rotated.";
        return Err(Problem::new(Code::InvalidState, detail)
            .with("machineStatus", json!(change.machine.status_or_replaced())));
    }
    let effect = match change.machine.upgrade_token.requested_at {
        Some(_) => ChangeEffect::Unchanged,
        None => ChangeEffect::Changed("token.rotate"),
    };
    upgrade_token::request_rotation(&change.tx, id).await?;
    change.end(effect, StatusCode::OK, |after| Machine::from(after)).await
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "rotateToken",
        method: Method::POST,
        path: "/vps/{id}/rotate-token",
        summary: "Rotates a machine's UPGRADE_TOKEN at its next heartbeat.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: None,
        responses: &[documented_json(200, "The machine whose token will be rotated.", || {
            schema_ref("Machine")
        })],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};

async fn handle_fleet(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    call.ensure_empty_body()?;
    let mutation = Mutation::from_call(&call, &operator)?;
    let outcome = mutation
        .run(&platform, async |tx| {
            let rotations = TokenRotations { requested: upgrade_token::request_all_rotations(tx).await? };
            let reply = Reply::new(StatusCode::OK, rotations);
            let target = "fleet".to_owned();
            let after = Some(json!(rotations));
            let change = AuditChange { action: "token.rotate_all", target, before: None, after };
            Ok(MutationEffect::changed(reply, change))
        })
        .await?;
    Ok(outcome.into_reply().into_response())
}

pub static FLEET_ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "rotateTokens",
        method: Method::POST,
        path: "/vps/fleet/rotate-tokens",
        summary: "Rotates the UPGRADE_TOKEN of every registered machine that holds its slot.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY],
        body: None,
        responses: &[documented_json(
            200,
            "The number of new rotation requests.",
            schema_of::<TokenRotations>,
        )],
        problems: &[Code::InvalidRequest, Code::IdempotencyMismatch, Code::DatabaseUnavailable],
    },
    serve: || post(handle_fleet),
};

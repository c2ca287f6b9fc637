//! `/vps/deploy`: rolls out a release to many machines in batches. Rollouts can be started, listed, shown, paused,
//! resumed and aborted.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::{ApiCall, path_id};
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, READ, documented_json, handle_name, image_version,
};
use super::mutation::{AuditChange, Mutation, MutationEffect, Reply};
use super::problems;
use super::provision;
use crate::alarms::Alarm;
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::rollouts::{self, NewRollout, RolloutRow};
use crate::{db, resource, rollout_plan};
use svc_http::fields::Fields;
use svc_http::openapi::{
    DocumentedResponse, Operation, Parameter, ParameterLocation, boolean, request_object, schema_of,
    schema_ref, uuid,
};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::RolloutId;
use svc_machine::name::{Handle, ImageVersion};
use svc_store::bundle::{self, BundleUnusable};
use svc_wire::rollout::{RolloutList, RolloutState};

/// Maximum value of each count in a request: canary, batch size and failures.
const MAX_COUNT: u64 = 1000;
const MAX_HANDLES: usize = 1000;
/// Maximum number of listed rollouts.
const MAX_LISTED_ROLLOUTS: i64 = 20;
const DEFAULT_CANARY: u64 = 1;
const DEFAULT_BATCH_SIZE: u64 = 10;
const DEFAULT_MAX_FAILURES: u64 = 1;

struct RolloutRequest {
    version: ImageVersion,
    /// Handles of the machines to update; `None` means all machines.
    handles: Option<Vec<Handle>>,
    /// Handles of machines to exclude.
    except: Vec<Handle>,
    canary: u64,
    batch_size: u64,
    max_failures: u64,
    should_verify: bool,
}

pub async fn start(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let request = parse_request(call.request.json_fields()?)?;
    let mutation = Mutation::from_call(&call, &operator)?;
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply.into_response());
    }
    drop(session);
    check_release(&platform, &request.version).await?;
    Ok(create_rollout(&platform, &request, &mutation).await?.into_response())
}

fn parse_request(mut fields: Fields) -> Result<RolloutRequest, Problem> {
    let version = fields.required("imageVersion");
    let handles = read_handles(&mut fields, "handles");
    let except = read_handles(&mut fields, "except").unwrap_or_default();
    if let Some(duplicate) = handles.iter().flatten().find(|handle| except.contains(handle)) {
        fields.add_error("except", format!("must not contain {duplicate}, which is also in `handles`"));
    }
    let mut read_count = |name: &str, min: u64, default: u64| {
        let count = fields.optional_number(name).unwrap_or(default);
        if !(min..=MAX_COUNT).contains(&count) {
            fields.add_error(name, format!("must be {min} to {MAX_COUNT}"));
        }
        count
    };
    let canary = read_count("canary", 0, DEFAULT_CANARY);
    let batch_size = read_count("batchSize", 1, DEFAULT_BATCH_SIZE);
    let max_failures = read_count("maxFailures", 1, DEFAULT_MAX_FAILURES);
    let should_verify = fields.boolean("verify").unwrap_or(true);
    let request = version.map(|version| RolloutRequest {
        version,
        handles,
        except,
        canary,
        batch_size,
        max_failures,
        should_verify,
    });
    fields.finish(request)
}

/// Reads a list of handles, if the field is present and not null.
fn read_handles(fields: &mut Fields, name: &str) -> Option<Vec<Handle>> {
    let is_present = fields.has(name);
    let texts = fields.strings(name, MAX_HANDLES);
    if !is_present {
        return None;
    }
    let handles: Result<Vec<Handle>, _> = texts.iter().map(|text| text.parse()).collect();
    if texts.is_empty() || handles.is_err() {
        fields.add_error(name, "must be a non-empty list of valid handles");
    }
    handles.ok()
}

/// Rejects a release that is not published, or whose manifest hosts would reject, for example because it is missing,
/// expired or not signed with a trusted key.
async fn check_release(platform: &Platform, version: &ImageVersion) -> Result<(), Problem> {
    let digest = provision::find_bundle_digest(&platform.bucket, version).await?;
    let keys = platform.config.hosts.trusted_keys();
    match bundle::verify_published(&platform.bucket, version, &digest, &keys).await {
        Ok(_) => Ok(()),
        Err(BundleUnusable::Store(error)) => Err(error.into()),
        Err(error) => {
            Err(Problem::new(Code::Conflict, format!("Hosts cannot update to {version}: {error}.")))
        }
    }
}

async fn create_rollout(
    platform: &Platform,
    request: &RolloutRequest,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let outcome = mutation
        .run(platform, async |tx| {
            db::lock(tx, "rollouts").await?;
            let id = insert_rollout(tx, request).await?;
            let row = rollouts::get(tx, id).await?.ok_or_else(|| not_found(id))?;
            let rollout = json!(resource::rollout::load_with_machines(tx, &row).await?);
            let reply = Reply::new(StatusCode::ACCEPTED, &rollout);
            // Omit the machines: the rollout stores them, and a large fleet's list would add a megabyte to the audit
            // log.
            let mut after = rollout;
            after.as_object_mut().map(|rollout| rollout.remove("machines"));
            after["except"] = handle_names(&request.except);
            after["handles"] = request.handles.as_deref().map_or(Value::Null, handle_names);
            let change =
                AuditChange { action: "deploy", target: id.to_string(), before: None, after: Some(after) };
            Ok(MutationEffect::changed(reply, change))
        })
        .await?;
    Ok(outcome.into_reply())
}

fn handle_names(handles: &[Handle]) -> Value {
    json!(handles.iter().map(Handle::as_str).collect::<Vec<_>>())
}

/// Inserts the rollout with the machines that it will update. Rejects it if another rollout is open, if a handle is
/// unknown, or if a machine in `handles` cannot be updated.
async fn insert_rollout(tx: &Transaction<'_>, request: &RolloutRequest) -> Result<RolloutId, Problem> {
    if let Some(open) = rollouts::find_open(tx).await? {
        let problem = Problem::new(Code::Conflict, format!("Rollout {} has not ended yet.", open.id));
        return Err(problem.with("rolloutId", json!(open.id)));
    }
    for handle in &request.except {
        // If a mistyped handle were ignored, the rollout would update a machine that the operator meant to exclude.
        if db::machines::find_by_handle(tx, handle).await?.is_none() {
            return Err(problems::machine_not_found(handle.as_str()));
        }
    }
    let handles = request.handles.as_deref();
    let eligible = rollouts::list_eligible_machines(tx, handles, &request.except).await?;
    let ids: Vec<_> = eligible.iter().map(|(id, _)| *id).collect();
    if let Some(handles) = handles {
        if let Some(machine) = db::machines::find_other_with_handle(tx, handles, &ids).await? {
            return Err(ineligible_machine(&machine));
        }
        let is_unknown = |handle: &&Handle| !eligible.iter().any(|(_, name)| name == handle.as_str());
        if let Some(unknown) = handles.iter().find(is_unknown) {
            return Err(problems::machine_not_found(unknown.as_str()));
        }
    }
    let to_usize = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let batches =
        rollout_plan::assign_batches(eligible.len(), to_usize(request.canary), to_usize(request.batch_size));
    let machines: Vec<_> = ids.into_iter().zip(batches).collect();
    let to_i32 = |number: u64| i32::try_from(number).unwrap_or(i32::MAX);
    let rollout = NewRollout {
        image_version: &request.version,
        canary: to_i32(request.canary),
        batch_size: to_i32(request.batch_size),
        max_failures: to_i32(request.max_failures),
        should_verify: request.should_verify,
        machines: &machines,
    };
    Ok(rollouts::insert(tx, &rollout).await?)
}

/// Returns the problem for a machine that a rollout cannot update. A handle may have several machines, so the detail
/// names the machine by its id.
fn ineligible_machine(machine: &MachineRow) -> Problem {
    let MachineRow { id, handle, slot, .. } = machine;
    let (state, next_step) = match machine.powered_off_at {
        Some(_) => ("powered off", format!("power it on with `svcctl power on {id} --wait`")),
        None => (machine.status.as_str(), format!("see the reason with `svcctl status {id}`")),
    };
    let detail = format!(
        "Machine {id} of {handle} (slot {slot}) is {state}, and a rollout updates only running machines: {next_step}, or \
         leave out {handle}. Nothing was changed."
    );
    Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(machine.status))
        .with("allowed", json!([]))
}

fn not_found(id: RolloutId) -> Problem {
    Problem::new(Code::NotFound, format!("There is no rollout {id}."))
}

async fn list(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    call.request.query_fields().finish(Some(()))?;
    let session = platform.db.session().await?;
    let rollouts = rollouts::list_newest(&session, MAX_LISTED_ROLLOUTS).await?;
    let rollouts = resource::rollout::load_summaries(&session, &rollouts).await?;
    Ok(Json(RolloutList { rollouts }).into_response())
}

pub async fn show(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let id: RolloutId = path_id("rolloutId", &id)?;
    let session = platform.db.session().await?;
    let rollout = rollouts::get(&session, id).await?.ok_or_else(|| not_found(id))?;
    Ok(Json(resource::rollout::load_with_machines(&session, &rollout).await?).into_response())
}

/// An operator's command for a rollout.
#[derive(Debug, Clone, Copy)]
enum RolloutCommand {
    Pause,
    Resume,
    Abort,
}

impl RolloutCommand {
    fn audit_action(self) -> &'static str {
        match self {
            Self::Pause => "deploy.pause",
            Self::Resume => "deploy.resume",
            Self::Abort => "deploy.abort",
        }
    }

    /// Returns the resulting state, or `None` if the current state does not allow the command.
    fn next_state(self, from: RolloutState) -> Option<RolloutState> {
        match (self, from) {
            (Self::Pause, RolloutState::Running | RolloutState::Paused) => Some(RolloutState::Paused),
            (Self::Resume, RolloutState::Running | RolloutState::Paused) => Some(RolloutState::Running),
            (Self::Abort, RolloutState::Running | RolloutState::Paused | RolloutState::Aborted) => {
                Some(RolloutState::Aborted)
            }
            _ => None,
        }
    }
}

async fn execute_command(
    platform: &Platform,
    id: &str,
    request: Request,
    command: RolloutCommand,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(platform).await?;
    let fields = call.request.json_fields()?;
    let id: RolloutId = path_id("rolloutId", id)?;
    fields.finish(Some(()))?;
    let mutation = Mutation::from_call(&call, &operator)?;
    let outcome = mutation
        .run(platform, async |tx| {
            let before = rollouts::lock(tx, id).await?.ok_or_else(|| not_found(id))?;
            let Some(next) = command.next_state(before.state) else { return Err(rollout_ended(&before)) };
            if next == before.state {
                // Writing would overwrite the reason for a pause or the time of an abort, and might clear another
                // rollout's alarm.
                let rollout = resource::rollout::load_with_machines(tx, &before).await?;
                return Ok(MutationEffect::unchanged(Reply::new(StatusCode::OK, rollout)));
            }
            rollouts::set_state(tx, id, next, None).await?;
            if next != RolloutState::Paused {
                db::alarms::clear(tx, Alarm::RolloutHalted.as_str()).await?;
            }
            if (before.state, next) == (RolloutState::Paused, RolloutState::Running) {
                rollouts::restart_timeouts(tx, id).await?;
                rollouts::reset_verification(tx, id).await?;
            }
            let after = rollouts::get(tx, id).await?.ok_or_else(|| not_found(id))?;
            let reply = Reply::new(StatusCode::OK, resource::rollout::load_with_machines(tx, &after).await?);
            let record = |state: RolloutState| Some(json!({"state": state.as_str()}));
            let (target, before, after) = (id.to_string(), record(before.state), record(next));
            Ok(MutationEffect::changed(
                reply,
                AuditChange { action: command.audit_action(), target, before, after },
            ))
        })
        .await?;
    Ok(outcome.into_reply().into_response())
}

fn rollout_ended(rollout: &RolloutRow) -> Problem {
    let state = rollout.state.as_str();
    let detail = format!("The rollout is {state}, so it can no longer be paused, resumed or aborted.");
    Problem::new(Code::Conflict, detail).with("state", state.into())
}

async fn pause(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    execute_command(&platform, &id, request, RolloutCommand::Pause).await
}

async fn resume(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    execute_command(&platform, &id, request, RolloutCommand::Resume).await
}

async fn abort(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    execute_command(&platform, &id, request, RolloutCommand::Abort).await
}

pub static START: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "deploy",
        method: Method::POST,
        path: "/vps/deploy",
        summary: "Rolls out a release to machines: first a canary, then batches. The rollout stops if the canary or too \
                  many machines fail.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY],
        body: Some(request_schema),
        responses: &[documented_json(202, "The rollout has started.", || schema_ref("Rollout"))],
        problems: &[
            Code::BundleNotFound,
            Code::MachineNotFound,
            Code::InvalidState,
            Code::Conflict,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(start),
};

fn request_schema() -> Value {
    let count_schema = |min: u64| json!({ "type": "integer", "minimum": min, "maximum": MAX_COUNT });
    let handles_schema =
        || json!({ "type": "array", "items": handle_name(), "minItems": 1, "maxItems": MAX_HANDLES });
    request_object(
        &[("imageVersion", image_version())],
        &[
            ("handles", handles_schema()),
            ("except", handles_schema()),
            ("canary", count_schema(0)),
            ("batchSize", count_schema(1)),
            ("maxFailures", count_schema(1)),
            ("verify", boolean()),
        ],
    )
}

pub static LIST: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "listDeploys",
        method: Method::GET,
        path: "/vps/deploy",
        summary: "Lists the 20 newest rollouts, newest first. Only the first can be running or paused.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The rollouts, without their machines.", schema_of::<RolloutList>)],
        problems: &[Code::InvalidRequest, Code::DatabaseUnavailable],
    },
    serve: || get(list),
};

pub static SHOW: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "getDeploy",
        method: Method::GET,
        path: "/vps/deploy/{id}",
        summary: "Shows the progress of a rollout for each machine.",
        credentials: &[OPERATOR],
        parameters: &[ROLLOUT_ID],
        body: None,
        responses: &[documented_json(200, "The rollout.", || schema_ref("Rollout"))],
        problems: &[Code::NotFound, Code::DatabaseUnavailable],
    },
    serve: || get(show),
};

const ROLLOUT_ID: Parameter =
    Parameter { name: "id", location: ParameterLocation::Path, schema: uuid, description: "The rollout." };

const ROLLOUT_RESPONSE: DocumentedResponse = documented_json(200, "The rollout.", || schema_ref("Rollout"));

const fn command_operation(id: &'static str, path: &'static str, summary: &'static str) -> Operation {
    Operation {
        id,
        method: Method::POST,
        path,
        summary,
        credentials: &[OPERATOR],
        parameters: &[ROLLOUT_ID, IDEMPOTENCY_KEY],
        body: Some(|| request_object(&[], &[])),
        responses: &[ROLLOUT_RESPONSE],
        problems: &[Code::NotFound, Code::Conflict, Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    }
}

pub static PAUSE: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: command_operation(
        "pauseDeploy",
        "/vps/deploy/{id}/pause",
        "Pauses a rollout: no more updates start, and those in progress complete.",
    ),
    serve: || post(pause),
};
pub static RESUME: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: command_operation("resumeDeploy", "/vps/deploy/{id}/resume", "Resumes a paused rollout."),
    serve: || post(resume),
};
pub static ABORT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: command_operation(
        "abortDeploy",
        "/vps/deploy/{id}/abort",
        "Aborts a rollout; updated machines keep the new release.",
    ),
    serve: || post(abort),
};

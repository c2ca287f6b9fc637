//! `/vps/deploy`: a release for many machines, in batches: begun, listed, looked at, paused, resumed, aborted.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use deadpool_postgres::GenericClient;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::{Call, path_id};
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, READ, handle_name, image_version, told,
};
use super::fault;
use super::mutation::{Changed, Mutation, Reply};
use crate::http::fields::Fields;
use crate::http::openapi::{Answer, Operation, Parameter, Place, array, fields, named, object, uuid};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::id::RolloutId;
use crate::machine::name::{Handle, ImageVersion};
use crate::platform::context::Platform;
use crate::platform::db::rollouts::{self, NewRollout, RolloutRow, State as RolloutState};
use crate::platform::db::{self};
use crate::platform::rollouts::plan;
use crate::store::bundle::{self, BundleUnusable};

const MOST: u64 = 1000;
const MOST_HANDLES: usize = 1000;
/// Rollouts of the list.
const MOST_LISTED: i64 = 20;
const CANARY: u64 = 1;
const BATCH: u64 = 10;
const FAILURES: u64 = 1;

struct Wanted {
    version: ImageVersion,
    handles: Option<Vec<Handle>>,
    canary: u64,
    batch_size: u64,
    max_failures: u64,
}

pub async fn start(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    let wanted = wanted(call.fields()?)?;
    let mutation = Mutation::of(&call, &operator)?;
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply.into_response());
    }
    drop(session);
    check_release(&platform, &wanted.version).await?;
    Ok(begin(&platform, &wanted, &mutation).await?.into_response())
}

fn wanted(mut fields: Fields) -> Result<Wanted, Problem> {
    let version = fields.required("imageVersion");
    let named = fields.has("handles");
    let texts = fields.strings("handles", MOST_HANDLES);
    let handles: Result<Vec<Handle>, _> = texts.iter().map(|text| text.parse()).collect();
    if named && (texts.is_empty() || handles.is_err()) {
        fields.wrong("handles", "must name at least one handle, and only handles");
    }
    let mut number = |name: &str, least: u64, default: u64| {
        let number = fields.optional_number(name).unwrap_or(default);
        if !(least..=MOST).contains(&number) {
            fields.wrong(name, format!("must be {least} to {MOST}"));
        }
        number
    };
    let canary = number("canary", 0, CANARY);
    let batch_size = number("batchSize", 1, BATCH);
    let max_failures = number("maxFailures", 1, FAILURES);
    let handles = handles.ok().filter(|_| named);
    let built = version.map(|version| Wanted { version, handles, canary, batch_size, max_failures });
    fields.finish(built)
}

/// Hosts would refuse a release whose manifest is missing or not signed for them: better here, once, than there.
async fn check_release(platform: &Platform, version: &ImageVersion) -> Result<(), Problem> {
    let published = bundle::digest(&platform.bucket, version).await?;
    let Some(digest) = published else {
        return Err(Problem::new(Code::BundleNotFound, format!("Version {version} is not published.")));
    };
    let keys = platform.config.hosts.trusted_keys();
    match bundle::verify_published(&platform.bucket, version, &digest, &keys).await {
        Ok(_) => Ok(()),
        Err(BundleUnusable::Store(error)) => Err(error.into()),
        Err(why) => Err(Problem::new(Code::Conflict, format!("Hosts cannot update to {version}: {why}."))),
    }
}

async fn begin(platform: &Platform, wanted: &Wanted, mutation: &Mutation) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    db::lock(&tx, "rollouts").await?;
    if let Some(open) = rollouts::open(&tx).await? {
        let problem = Problem::new(Code::Conflict, format!("The rollout {} is under way.", open.id));
        return Err(problem.with("rolloutId", json!(open.id)));
    }
    let reachable = rollouts::reachable(&tx, wanted.handles.as_deref()).await?;
    for handle in wanted.handles.iter().flatten() {
        if !reachable.iter().any(|(_, of)| of == handle.as_str()) {
            return Err(no_target(&tx, handle).await?);
        }
    }
    let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let batches = plan::batches(reachable.len(), count(wanted.canary), count(wanted.batch_size));
    let machines: Vec<_> = reachable.iter().map(|(id, _)| *id).zip(batches).collect();
    let whole = |number: u64| i32::try_from(number).unwrap_or(i32::MAX);
    let new = NewRollout {
        image_version: &wanted.version,
        canary: whole(wanted.canary),
        batch_size: whole(wanted.batch_size),
        max_failures: whole(wanted.max_failures),
        machines: &machines,
    };
    let id = rollouts::insert(&tx, &new).await?;
    let row = rollouts::get(&tx, id).await?.ok_or_else(|| not_found(id))?;
    let reply = Reply::new(StatusCode::ACCEPTED, rollouts::record(&tx, &row).await?);
    let target = id.to_string();
    let changed = Changed { action: "deploy", target: &target, before: None, after: Some(&reply.body) };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    Ok(reply)
}

/// Why a rollout cannot reach the machine of a handle.
async fn no_target(client: &impl GenericClient, handle: &Handle) -> Result<Problem, Problem> {
    let Some(machine) = db::machines::of_handle(client, handle).await? else {
        return Ok(fault::machine_not_found(handle.as_str()));
    };
    let (state, next) = match machine.powered_off_at {
        Some(_) => ("switched off", format!("`svcctl power on {handle} --wait` first")),
        None => (machine.status.as_str(), format!("`svcctl status {handle}` says why")),
    };
    let detail = format!(
        "Machine {handle} is {state}, and a rollout reaches only running machines: {next}, or leave it out. Nothing was changed."
    );
    Ok(Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(machine.status))
        .with("allowed", json!([])))
}

fn not_found(id: RolloutId) -> Problem {
    Problem::new(Code::NotFound, format!("There is no rollout {id}."))
}

async fn list(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform).await?;
    call.query().finish(Some(()))?;
    let session = platform.db.session().await?;
    let rollouts = rollouts::newest(&session, MOST_LISTED).await?;
    Ok(Json(json!({ "rollouts": rollouts })).into_response())
}

pub async fn look(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform).await?;
    let id: RolloutId = path_id("rolloutId", &id)?;
    let session = platform.db.session().await?;
    let found = rollouts::get(&session, id).await?.ok_or_else(|| not_found(id))?;
    Ok(Json(rollouts::record(&session, &found).await?).into_response())
}

/// What an operator says to a rollout.
#[derive(Debug, Clone, Copy)]
enum Word {
    Pause,
    Resume,
    Abort,
}

impl Word {
    fn action(self) -> &'static str {
        match self {
            Self::Pause => "deploy.pause",
            Self::Resume => "deploy.resume",
            Self::Abort => "deploy.abort",
        }
    }

    /// What it leads to; `None` where the state does not allow it.
    fn leads_to(self, from: RolloutState) -> Option<RolloutState> {
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

async fn say(platform: &Platform, id: &str, request: Request, word: Word) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(platform).await?;
    let fields = call.fields()?;
    let id: RolloutId = path_id("rolloutId", id)?;
    fields.finish(Some(()))?;
    let mutation = Mutation::of(&call, &operator)?;
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply.into_response());
    }
    let before = rollouts::locked(&tx, id).await?.ok_or_else(|| not_found(id))?;
    let Some(next) = word.leads_to(before.state) else { return Err(ended(&before)) };
    rollouts::set_state(&tx, id, next, None).await?;
    if (before.state, next) == (RolloutState::Paused, RolloutState::Running) {
        rollouts::count_anew(&tx, id).await?;
    }
    let after = rollouts::get(&tx, id).await?.ok_or_else(|| not_found(id))?;
    let reply = Reply::new(StatusCode::OK, rollouts::record(&tx, &after).await?);
    if next == before.state {
        mutation.store(&tx, &reply).await?;
    } else {
        let (target, was) = (id.to_string(), json!({"state": before.state.as_str()}));
        let is = json!({"state": next.as_str()});
        let changed =
            Changed { action: word.action(), target: &target, before: Some(&was), after: Some(&is) };
        mutation.record(&tx, &reply, &changed).await?;
    }
    db::commit(tx).await?;
    Ok(reply.into_response())
}

fn ended(rollout: &RolloutRow) -> Problem {
    let state = rollout.state.as_str();
    Problem::new(Code::Conflict, format!("The rollout is {state}.")).with("state", state.into())
}

async fn pause(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    say(&platform, &id, request, Word::Pause).await
}

async fn resume(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    say(&platform, &id, request, Word::Resume).await
}

async fn abort(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    say(&platform, &id, request, Word::Abort).await
}

/// The routes and their descriptions.
pub static START: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "deploy",
        method: Method::POST,
        path: "/vps/deploy",
        summary: "Brings a release to machines: a canary first, then batches, stopping at failures.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY],
        body: Some(asked),
        answers: &[told(202, "The rollout has begun.", || named("Rollout"))],
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

fn asked() -> Value {
    let number = |least: u64| json!({ "type": "integer", "minimum": least, "maximum": MOST });
    let handles = json!({ "type": "array", "items": handle_name(), "minItems": 1, "maxItems": MOST_HANDLES });
    fields(
        &[("imageVersion", image_version())],
        &[("handles", handles), ("canary", number(0)), ("batchSize", number(1)), ("maxFailures", number(1))],
    )
}

pub static LIST: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "listDeploys",
        method: Method::GET,
        path: "/vps/deploy",
        summary: "The 20 newest rollouts, the newest first; one that is open is the first.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: None,
        answers: &[told(200, "The rollouts, without their machines.", listed)],
        problems: &[Code::InvalidRequest, Code::DatabaseUnavailable],
    },
    serve: || get(list),
};

fn listed() -> Value {
    object(&[("rollouts", array(named("RolloutSummary")))], &[])
}

pub static LOOK: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "getDeploy",
        method: Method::GET,
        path: "/vps/deploy/{id}",
        summary: "How far a rollout is, machine by machine.",
        credentials: &[OPERATOR],
        parameters: &[ROLLOUT_ID],
        body: None,
        answers: &[told(200, "The rollout.", || named("Rollout"))],
        problems: &[Code::NotFound, Code::DatabaseUnavailable],
    },
    serve: || get(look),
};

const ROLLOUT_ID: Parameter =
    Parameter { name: "id", place: Place::Path, schema: uuid, about: "The rollout." };

const THE_ROLLOUT: Answer = told(200, "The rollout.", || named("Rollout"));

const fn word(id: &'static str, path: &'static str, summary: &'static str) -> Operation {
    Operation {
        id,
        method: Method::POST,
        path,
        summary,
        credentials: &[OPERATOR],
        parameters: &[ROLLOUT_ID, IDEMPOTENCY_KEY],
        body: Some(|| fields(&[], &[])),
        answers: &[THE_ROLLOUT],
        problems: &[Code::NotFound, Code::Conflict, Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    }
}

pub static PAUSE: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: word("pauseDeploy", "/vps/deploy/{id}/pause", "Asks no further machine."),
    serve: || post(pause),
};
pub static RESUME: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: word("resumeDeploy", "/vps/deploy/{id}/resume", "Goes on where it was paused."),
    serve: || post(resume),
};
pub static ABORT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: word("abortDeploy", "/vps/deploy/{id}/abort", "Ends a rollout; machines stay as they are."),
    serve: || post(abort),
};

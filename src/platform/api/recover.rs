//! POST `/vps/recover`: replaces the slot's machine with a new one, restored from the slot's latest snapshot or from a
//! requested one.
//!
//! The snapshot is checked before any change. During a recovery, a request whose options match receives the running
//! operation, and a request with different options is rejected. An omitted option matches, except `allowEmpty`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deadpool_postgres::{GenericClient, Transaction};
use http::{Method, StatusCode};
use serde_json::json;

use super::call::ApiCall;
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, PREFER, documented_json, fallback_locations,
    idp_user_id, image_version, location, server_type, slot_name,
};
use super::locations::RequestedLocations;
use super::mutation::{self, AuditChange, Mutation, MutationEffect, Reply};
use super::replacement_checks::EmptyStart;
use super::{entitlement, problems, provision, replacement_checks, server_limit};
use crate::context::Platform;
use crate::copies;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::db::operation_log::LOCATION_CHANGE;
use crate::db::servers::ListedServerCount;
use crate::lifecycle::{self, Change, EventContext, MachineRequest};
use axum::routing::post;
use svc_http::openapi::{Operation, boolean, request_object, schema_of, text_matching};
use svc_http::problem::{Code, Problem};
use svc_machine::epoch::Epoch;
use svc_machine::event::{Event, RestoreMode};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::operation::OperationOptions;
use svc_machine::state::Status;
use svc_store::key::{SlotPrefix, SnapshotKey};
use svc_store::snapshot::{self, Sidecar, SnapshotUnusable};
use svc_wire::change::RecoveredMachine;
use svc_wire::machine::MachineKind;

struct RecoveryRequest {
    user: IdpUserId,
    slot: Slot,
    empty: EmptyStart,
    /// The snapshot to restore; `None` means the latest.
    snapshot_key: Option<SnapshotKey>,
    options: OperationOptions,
    /// The new machine starts without the owner's files, which stay in the file backup.
    without_files: bool,
    /// `None` means the current machine's type.
    server_type: Option<ServerType>,
    locations: RequestedLocations,
    /// `None` means the slot's recorded version, or the platform's default.
    image_version: Option<ImageVersion>,
}

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let request = parse_request(&call)?;
    let mutation = Mutation::from_call(&call, &operator)?;
    let reply = recover(&platform, &request, &mutation).await?;
    platform.runner_wake.notify_one();
    Ok(mutation::respond(&platform, &call, reply).await)
}

fn parse_request(call: &ApiCall) -> Result<RecoveryRequest, Problem> {
    let mut fields = call.request.json_fields()?;
    let user = fields.required("idpUserId");
    let slot = fields.optional("slot").unwrap_or_default();
    let empty = EmptyStart::read(&mut fields);
    let snapshot_key = fields.optional("snapshotKey");
    let options = OperationOptions {
        accept_loss: fields.boolean("acceptLoss").unwrap_or(false),
        replace_first: fields.boolean("replaceFirst").unwrap_or(false),
        ..OperationOptions::default()
    };
    let without_files = fields.boolean("withoutFiles").unwrap_or(false);
    let server_type = fields.optional("serverType");
    let locations = RequestedLocations::read(&mut fields);
    let image_version = fields.optional("imageVersion");
    let request = user.map(|user| RecoveryRequest {
        user,
        slot,
        empty,
        snapshot_key,
        options,
        without_files,
        server_type,
        locations,
        image_version,
    });
    fields.finish(request)
}

/// The properties of the new machine, looked up before any change.
struct RecoveryPlan {
    restore: RestoreMode,
    /// `None` means the snapshot that the pointer names or, if the machine starts empty, none.
    snapshot_key: Option<String>,
    /// A stored snapshot that is newer than the one to restore. A final backup by the host supersedes both.
    newer: Option<Sidecar>,
    image_version: ImageVersion,
    bundle_sha256: String,
    server_type: ServerType,
    /// The slot's highest epoch in the store.
    epoch_floor: Epoch,
    /// The number of servers in the provider's project; `None` if no limit is set.
    server_count: Option<ListedServerCount>,
}

async fn prepare_plan(
    platform: &Platform,
    request: &RecoveryRequest,
    machine: &MachineRow,
) -> Result<RecoveryPlan, Problem> {
    request.locations.ensure_known(platform).await?;
    let server_type = request.server_type.clone().unwrap_or_else(|| machine.server_type.clone());
    if server_type != machine.server_type {
        entitlement::ensure_machine_entitled(platform, &platform.db.session().await?, machine, &server_type)
            .await?;
    }
    let initial = find_initial_data(platform, request, machine).await?;
    if let Some(sidecar) = &initial.sidecar {
        replacement_checks::ensure_fits_disk(platform, sidecar, &server_type).await?;
    }
    let image_version = match &request.image_version {
        Some(version) => version.clone(),
        None => provision::find_slot_release(platform, &request.user, &request.slot).await?,
    };
    let bundle_sha256 = provision::find_bundle_digest(&platform.bucket, &image_version).await?;
    let slot_key = (&request.user, &request.slot);
    let accepts_loss = request.options.accept_loss;
    replacement_checks::ensure_no_unknown_holder(platform, slot_key, Some(machine), accepts_loss).await?;
    let epoch_floor = replacement_checks::find_epoch_floor(platform, &request.user, &request.slot).await?;
    let newer = match &initial.sidecar {
        Some(sidecar) => find_newer_snapshot(platform, machine, sidecar).await?,
        None => None,
    };
    let server_count = server_limit::count_for_limit(platform).await?;
    Ok(RecoveryPlan {
        restore: initial.restore,
        snapshot_key: initial.snapshot_key,
        newer,
        image_version,
        bundle_sha256,
        server_type,
        epoch_floor,
        server_count,
    })
}

/// Finds a snapshot that is newer than the one to restore, taken by the slot's last registered machine: a machine that
/// never registered has taken none.
async fn find_newer_snapshot(
    platform: &Platform,
    machine: &MachineRow,
    sidecar: &Sidecar,
) -> Result<Option<Sidecar>, Problem> {
    let predecessor = match machine.registered_at {
        Some(_) => None,
        None => db::machines::find_last_registered(&platform.db.session().await?, machine).await?,
    };
    let last_registered = predecessor.as_ref().unwrap_or(machine);
    Ok(copies::find_newer_for_machine(&platform.bucket, last_registered, &sidecar.snapshot_ref()).await)
}

async fn recover(
    platform: &Platform,
    request: &RecoveryRequest,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let machine =
        require_machine(db::machines::find_in_slot(&session, &request.user, &request.slot).await?, request)?;
    drop(session);
    // A running recovery needs no lookups. No row lock or session is held during requests to the store.
    let plan = if machine.status == Status::Recovering {
        None
    } else {
        Some(prepare_plan(platform, request, &machine).await?)
    };

    let change = async |tx: &Transaction<'_>| {
        let machine =
            require_machine(db::machines::lock_in_slot(tx, &request.user, &request.slot).await?, request)?;
        if machine.status == Status::Recovering {
            // The response is stored, so that a repeated request does not start another recovery after this one has
            // ended.
            let reply = respond_during_recovery(tx, &machine, request).await?;
            return Ok(MutationEffect::unchanged(reply));
        }
        let Some(plan) = plan else {
            return Err(slot_changed());
        };
        if request.without_files && request.options.replace_first {
            ensure_no_files_on_server(tx, &machine).await?;
        }
        replacement_checks::ensure_not_powered_off(&machine, request.options.accept_loss)?;
        replacement_checks::ensure_not_restarting(tx, &machine, request.options.accept_loss).await?;
        server_limit::ensure_room_for_replacement(platform, tx, plan.server_count, &machine).await?;
        let location = request.locations.location.clone().unwrap_or_else(|| machine.location.clone());
        let machine_request = MachineRequest {
            user: machine.user.clone(),
            slot: machine.slot.clone(),
            handle: machine.handle.clone(),
            kind: machine.kind,
            server_type: plan.server_type,
            fallback_locations: request.locations.fallback_for(platform, &location),
            location,
            image_version: plan.image_version,
            bundle_sha256: plan.bundle_sha256,
            https_port: platform.config.hosts.https_port,
            preview_ttl: preview_ttl(platform, &machine),
            restore_snapshot: plan.snapshot_key,
            should_restore_files: !request.without_files,
        };
        let event = Event::RecoverRequested { restore: plan.restore };
        let context = EventContext {
            successor: Some(&machine_request),
            options: request.options,
            epoch_floor: plan.epoch_floor,
            ..EventContext::default()
        };
        let change = lifecycle::apply(tx, &platform.mint, &machine, &event, context).await;
        let created = match change.map_err(|error| problems::lifecycle_problem(error, &machine))? {
            Change::Moved { created: Some(created) } => created,
            Change::Moved { created: None } | Change::Unchanged => return Err(slot_changed()),
        };
        let new_machine = db::machines::get(tx, created.machine).await?;
        let new_machine =
            new_machine.ok_or_else(|| problems::machine_not_found(&created.machine.to_string()))?;
        let recovered = RecoveredMachine {
            newer_snapshot: plan.newer.as_ref().map(copies::to_newer_snapshot),
            ..response_body(machine.id, &new_machine, created.operation)
        };
        let reply = Reply::new(StatusCode::ACCEPTED, recovered);
        let change = AuditChange {
            action: "recover",
            target: format!("{}/{}", request.user, request.slot),
            before: Some(machine.audit_record()),
            after: Some(new_machine.audit_record()),
        };
        Ok(MutationEffect::changed(reply, change))
    };
    mutation.run_for_user(platform, &request.user, change).await
}

/// Rejects a recovery without files that would first delete the server of the slot's last registered machine.
async fn ensure_no_files_on_server(tx: &Transaction<'_>, machine: &MachineRow) -> Result<(), Problem> {
    let last_registered = match machine.registered_at {
        Some(_) => Some(machine.clone()),
        None => db::machines::find_last_registered(tx, machine).await?,
    };
    if !last_registered.is_some_and(|machine| machine.has_server()) {
        return Ok(());
    }
    let detail = "cannot be combined with `--replace-first`: the old server may hold the only usable copy of the owner's \
                  files";
    Err(Problem::field("/withoutFiles", detail))
}

fn slot_changed() -> Problem {
    Problem::new(Code::Unavailable, "The slot has changed; try again.").retry_after(1)
}

fn preview_ttl(platform: &Platform, machine: &MachineRow) -> Option<std::time::Duration> {
    (machine.kind == MachineKind::Preview).then_some(platform.config.provisioning.preview_ttl)
}

fn require_machine(machine: Option<MachineRow>, request: &RecoveryRequest) -> Result<MachineRow, Problem> {
    machine
        .ok_or_else(|| problems::machine_not_found(&format!("in slot {} of {}", request.slot, request.user)))
}

/// The initial data of the new machine.
struct InitialData {
    restore: RestoreMode,
    /// `None` means the snapshot that the pointer names or, if the machine starts empty, none.
    snapshot_key: Option<String>,
    sidecar: Option<Sidecar>,
}

/// Finds the requested snapshot, which must be complete, or the latest one. A requested snapshot is found without the
/// pointer, but [`replacement_checks::find_epoch_floor`] rejects an unreadable pointer, because the fence is written
/// into it.
async fn find_initial_data(
    platform: &Platform,
    request: &RecoveryRequest,
    machine: &MachineRow,
) -> Result<InitialData, Problem> {
    let slot = SlotPrefix::new(&request.user, &request.slot);
    if let Some(key) = &request.snapshot_key {
        let sidecar = snapshot::load(&platform.bucket, &slot, key.as_str())
            .await
            .map_err(problems::snapshot_unusable)?;
        return Ok(InitialData {
            restore: RestoreMode::Required,
            snapshot_key: Some(sidecar.key.clone()),
            sidecar: Some(sidecar),
        });
    }
    match snapshot::find_latest(&platform.bucket, &slot).await {
        Ok(latest) => {
            let sidecar = snapshot::read_sidecar(&platform.bucket, &slot, &latest).await?;
            Ok(InitialData { restore: RestoreMode::Required, snapshot_key: None, sidecar: Some(sidecar) })
        }
        Err(SnapshotUnusable::Absent) => {
            replacement_checks::ensure_may_start_empty(platform, &request.user, &request.slot).await?;
            if request.empty == EmptyStart::Refused {
                return Err(unsaved_machine_problem(machine)
                    .unwrap_or_else(|| problems::snapshot_unusable(SnapshotUnusable::Absent)));
            }
            Ok(InitialData { restore: RestoreMode::Empty, snapshot_key: None, sidecar: None })
        }
        Err(error) => Err(problems::snapshot_unusable(error)),
    }
}

/// Returns a problem that advises taking a backup first, if the machine's server has the only copy of the slot's data.
fn unsaved_machine_problem(machine: &MachineRow) -> Option<Problem> {
    if machine.registered_at.is_none() || !machine.has_server() {
        return None;
    }
    let id = machine.id;
    let resume = match machine.status {
        Status::Running => String::new(),
        _ => format!("If its host is healthy, return it to service with `svcctl resume {id}`. "),
    };
    let detail = format!(
        "The slot has no snapshot, and only the server of machine {id} has the slot's data. {resume}Take a backup with `svcctl \
         backup now {id} --wait`, then recover the slot."
    );
    Some(Problem::new(Code::SnapshotUnusable, detail))
}

/// Responds to a request during a recovery. The recovery keeps its options, so a request with different ones is
/// rejected.
async fn respond_during_recovery(
    client: &impl GenericClient,
    machine: &MachineRow,
    request: &RecoveryRequest,
) -> Result<Reply, Problem> {
    let predecessor = db::machines::find_predecessor(client, machine.id).await?;
    let operation = db::operations::find_newest(client, machine.id, "recover").await?;
    let (Some(predecessor), Some(operation)) = (predecessor, operation) else {
        let id = machine.id;
        let detail = format!(
            "Machine {id} is recovering, but its predecessor or its recovery operation is not recorded."
        );
        return Err(Problem::new(Code::MachineNotFound, detail));
    };
    let has_changed_location = db::operation_log::has_outcome(client, operation.id, LOCATION_CHANGE).await?;
    let differences = differing_options(request, machine, operation.options, has_changed_location);
    if !differences.is_empty() {
        let detail = format!(
            "A recovery of the slot is running (operation {}), and its options cannot be changed. This request differs in: {}.",
            operation.id,
            differences.join(", ")
        );
        return Err(Problem::new(Code::InvalidState, detail)
            .with("machineStatus", json!(machine.status))
            .with("allowed", json!([]))
            .with("operationId", json!(operation.id)));
    }
    Ok(Reply::new(StatusCode::ACCEPTED, response_body(predecessor.id, machine, operation.id)))
}

/// Returns the names of the requested options that differ from those of the running recovery. `has_changed_location`
/// is true if the recovery has moved to another location at least once.
fn differing_options(
    request: &RecoveryRequest,
    machine: &MachineRow,
    options: OperationOptions,
    has_changed_location: bool,
) -> Vec<&'static str> {
    let is_candidate =
        |location: &Location| machine.location == *location || machine.fallback_locations.contains(location);
    let (server_type, image, snapshot) =
        (&request.server_type, &request.image_version, &request.snapshot_key);
    let location = request.locations.location.as_ref();
    [
        (
            "the snapshot",
            snapshot.as_ref().is_some_and(|key| machine.restore_snapshot.as_deref() != Some(key.as_str())),
        ),
        ("the server type", server_type.as_ref().is_some_and(|requested| *requested != machine.server_type)),
        ("the image version", image.as_ref().is_some_and(|requested| *requested != machine.image_version)),
        (
            "the location",
            location.is_some_and(|requested| {
                if has_changed_location { !is_candidate(requested) } else { *requested != machine.location }
            }),
        ),
        (
            "the fallback locations",
            request.locations.differs_in_fallback(
                &machine.location,
                &machine.fallback_locations,
                has_changed_location,
            ),
        ),
        ("`--allow-empty`", request.empty == EmptyStart::Refused && machine.restore == RestoreMode::Empty),
        ("`--accept-loss`", request.options.accept_loss && !options.accept_loss),
        ("`--replace-first`", request.options.replace_first && !options.replace_first),
        ("`--without-files`", request.without_files && machine.should_restore_files),
    ]
    .into_iter()
    .filter_map(|(name, differs)| differs.then_some(name))
    .collect()
}

fn response_body(predecessor: MachineId, machine: &MachineRow, operation: OperationId) -> RecoveredMachine {
    RecoveredMachine {
        old_machine_id: predecessor.into(),
        machine_id: machine.id.into(),
        slot: (&machine.slot).into(),
        kind: machine.kind.into(),
        status: machine.status.into(),
        epoch: machine.epoch.0.into(),
        operation_id: operation.into(),
        newer_snapshot: None,
    }
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "recover",
        method: Method::POST,
        path: "/vps/recover",
        summary: "Replaces the slot's machine with a new one, restored from the slot's latest snapshot or a requested one.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY, PREFER],
        body: Some(|| {
            request_object(
                &[("idpUserId", idp_user_id())],
                &[
                    ("slot", slot_name()),
                    ("allowEmpty", boolean()),
                    ("snapshotKey", text_matching(SnapshotKey::PATTERN)),
                    ("acceptLoss", boolean()),
                    ("replaceFirst", boolean()),
                    ("withoutFiles", boolean()),
                    ("serverType", server_type()),
                    ("location", location()),
                    ("fallbackLocations", fallback_locations()),
                    ("imageVersion", image_version()),
                ],
            )
        }),
        responses: &[documented_json(202, "The recovery is running.", schema_of::<RecoveredMachine>)],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::SnapshotUnusable,
            Code::DiskTooSmall,
            Code::ServerLimitReached,
            Code::SubscriptionRequired,
            Code::ServerTypeNotAllowed,
            Code::BundleNotFound,
            Code::StoreUnavailable,
            Code::Unavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};

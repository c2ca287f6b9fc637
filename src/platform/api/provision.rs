//! POST `/vps/provision`: creates a machine for a slot that has none, or whose machine has failed.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deadpool_postgres::{GenericClient, Transaction};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::ApiCall;
use super::confirmation::{Confirmation, RequiredConfirmation};
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, PREFER, documented_json, fallback_locations,
    handle_name, idp_user_id, image_version, kind, location, server_type, slot_name,
};
use super::locations::RequestedLocations;
use super::mutation::{self, AuditChange, Mutation, MutationEffect, Reply};
use super::replacement_checks::EmptyStart;
use super::{entitlement, problems, replacement_checks, server_limit};
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::db::operations::OperationRow;
use crate::lifecycle::{self, Change, CreatedOperation, EventContext, MachineRequest};
use crate::server_cost::{self, ServerLocations};
use axum::routing::post;
use svc_base::config::Flag;
use svc_http::openapi::{Operation, boolean, request_object, schema_of, text_matching};
use svc_http::problem::{Code, Problem};
use svc_machine::epoch::Epoch;
use svc_machine::event::{Event, RestoreMode};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::operation::OperationOptions;
use svc_machine::plan::Plan;
use svc_machine::state::Status;
use svc_store::key::SlotPrefix;
use svc_store::snapshot::{self, SnapshotUnusable};
use svc_store::{Bucket, StoreError, bundle};
use svc_wire::change::ProvisionedMachine;
use svc_wire::machine::MachineKind;
use svc_wire::quote::Price;

pub struct ProvisionRequest {
    pub user: IdpUserId,
    pub slot: Slot,
    pub handle: Handle,
    pub server_type: ServerType,
    /// The requested location, or the platform's default.
    pub location: Location,
    /// The locations as requested.
    pub locations: RequestedLocations,
    /// `None` means the slot's recorded version, or the platform's default.
    image_version: Option<ImageVersion>,
    pub kind: MachineKind,
    empty: EmptyStart,
    options: OperationOptions,
    confirmation: Confirmation,
}

impl ProvisionRequest {
    /// Returns whether the request adds a customer. The customer of a failed machine already exists.
    pub fn adds_customer(&self, existing: Option<&MachineRow>) -> bool {
        self.kind == MachineKind::Customer && existing.is_none()
    }

    /// Returns the confirmations that the request requires. `existing` is the slot's machine, which is replaced if it
    /// has failed.
    pub fn required_confirmation(&self, existing: Option<&MachineRow>) -> RequiredConfirmation {
        match existing {
            _ if self.kind != MachineKind::Customer => RequiredConfirmation::Nothing,
            None => RequiredConfirmation::CostAndConsent,
            Some(failed) if has_failed(failed) && failed.server_type != self.server_type => {
                RequiredConfirmation::Cost
            }
            Some(_) => RequiredConfirmation::Nothing,
        }
    }
}

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let request = parse_request(&platform, &call)?;
    let mutation = Mutation::from_call(&call, &operator)?;
    let reply = provision(&platform, &request, &mutation).await?;
    platform.runner_wake.notify_one();
    Ok(mutation::respond(&platform, &call, reply).await)
}

pub fn parse_request(platform: &Platform, call: &ApiCall) -> Result<ProvisionRequest, Problem> {
    let defaults = &platform.config.provisioning;
    let mut fields = call.request.json_fields()?;
    let user = fields.required("idpUserId");
    let slot = fields.optional("slot").unwrap_or_default();
    let handle = fields.required("handle");
    let server_type = fields.optional("serverType").unwrap_or_else(|| defaults.server_type.clone());
    let locations = RequestedLocations::read(&mut fields);
    let location = locations.location.clone().unwrap_or_else(|| defaults.location.clone());
    let image_version = fields.optional("imageVersion");
    let kind = fields.optional("kind").unwrap_or(MachineKind::Customer);
    let empty = EmptyStart::read(&mut fields);
    let confirmation = Confirmation::read(&mut fields);
    let accept_loss = fields.boolean("acceptLoss").unwrap_or(false);
    let options = OperationOptions { accept_loss, ..OperationOptions::default() };
    let request = user.zip(handle).map(|(user, handle)| ProvisionRequest {
        user,
        slot,
        handle,
        server_type,
        location,
        locations,
        image_version,
        kind,
        empty,
        options,
        confirmation,
    });
    fields.finish(request)
}

async fn provision(
    platform: &Platform,
    request: &ProvisionRequest,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let existing = check_admission(platform, &session, request).await?;
    drop(session);
    // These checks run before the transaction, so that no row lock or session is held during requests to the store.
    let plan = if existing.as_ref().is_none_or(has_failed) {
        request.locations.ensure_known(platform).await?;
        let plan = prepare_plan(platform, request, existing.as_ref()).await?;
        check_confirmation(platform, request, request.required_confirmation(existing.as_ref())).await?;
        Some((plan, server_limit::count_for_limit(platform).await?))
    } else {
        None
    };
    let change = async |tx: &Transaction<'_>| {
        check_admission(platform, tx, request).await?;
        let existing = db::machines::lock_in_slot(tx, &request.user, &request.slot).await?;
        if let Some(machine) = existing.as_ref().filter(|machine| !has_failed(machine)) {
            let operation = db::operations::list_for_machine(tx, machine.id).await?.into_iter().next();
            let reply =
                Reply::new(StatusCode::OK, response_body(machine, operation.map(|operation| operation.id)));
            return Ok(MutationEffect::unchanged(reply));
        }
        // If the slot has changed since the checks, the plan and the required confirmations are for its earlier state.
        let replaced = existing.as_ref().map(|failed| failed.id);
        let Some((plan, server_count)) = plan.filter(|(plan, _)| plan.replaces == replaced) else {
            return Err(Problem::new(Code::Unavailable, "The slot has changed; try again.").retry_after(1));
        };
        if let Some(failed) = &existing {
            replacement_checks::ensure_not_powered_off(failed, request.options.accept_loss)?;
            server_limit::ensure_room_for_replacement(platform, tx, server_count, failed).await?;
        } else {
            server_limit::ensure_room(platform, tx, server_count).await?;
        }
        let owner = db::slots::claim_handle(tx, &request.handle, &request.user).await?;
        if owner != request.user.as_str() {
            return Err(handle_taken(&request.handle));
        }
        let created = create_machine(platform, tx, request, plan, existing.as_ref()).await?;
        let machine =
            db::machines::get(tx, created.machine).await?.ok_or_else(|| machine_missing(created))?;
        let reply = Reply::new(StatusCode::ACCEPTED, response_body(&machine, Some(created.operation)));
        let mut after = machine.audit_record();
        after["allowEmpty"] = (request.empty == EmptyStart::Allowed).into();
        after["confirmed"] = request.confirmation.audit_record();
        let change = AuditChange {
            action: "provision",
            target: format!("{}/{}", request.user, request.slot),
            before: existing.as_ref().map(MachineRow::audit_record),
            after: Some(after),
        };
        Ok(MutationEffect::changed(reply, change))
    };
    mutation.run_for_user(platform, &request.user, change).await
}

/// The properties of the new machine, looked up before any change.
struct ProvisionPlan {
    image_version: ImageVersion,
    bundle_sha256: String,
    restore: RestoreMode,
    /// The slot's highest epoch in the store.
    epoch_floor: Epoch,
    /// The failed machine that the new one replaces.
    replaces: Option<MachineId>,
}

async fn prepare_plan(
    platform: &Platform,
    request: &ProvisionRequest,
    existing: Option<&MachineRow>,
) -> Result<ProvisionPlan, Problem> {
    let image_version = match &request.image_version {
        Some(version) => version.clone(),
        None => find_slot_release(platform, &request.user, &request.slot).await?,
    };
    let bundle_sha256 = find_bundle_digest(&platform.bucket, &image_version).await?;
    let restore = choose_restore_mode(platform, request).await?;
    let slot_key = (&request.user, &request.slot);
    let has_snapshot_or_may_start_empty =
        restore == RestoreMode::Required || request.empty == EmptyStart::Allowed;
    let accepts_loss = request.options.accept_loss && has_snapshot_or_may_start_empty;
    replacement_checks::ensure_no_unknown_holder(platform, slot_key, existing, accepts_loss).await?;
    let epoch_floor = replacement_checks::find_epoch_floor(platform, &request.user, &request.slot).await?;
    let replaces = existing.map(|failed| failed.id);
    Ok(ProvisionPlan { image_version, bundle_sha256, restore, epoch_floor, replaces })
}

/// Runs, for a quote, the checks that follow [`check_admission`], except the confirmation and server limit checks.
/// Returns the new machine's release.
pub async fn check_for_quote(
    platform: &Platform,
    request: &ProvisionRequest,
    existing: Option<&MachineRow>,
) -> Result<ImageVersion, Problem> {
    request.locations.ensure_known_for_quote(platform).await?;
    let plan = prepare_plan(platform, request, existing).await?;
    if let Some(failed) = existing {
        replacement_checks::ensure_not_powered_off(failed, request.options.accept_loss)?;
    }
    Ok(plan.image_version)
}

async fn check_confirmation(
    platform: &Platform,
    request: &ProvisionRequest,
    required: RequiredConfirmation,
) -> Result<(), Problem> {
    let ProvisionRequest { confirmation, server_type, location, .. } = request;
    confirmation.check_complete(required, platform.config.provisioning.confirmation)?;
    if required == RequiredConfirmation::Nothing || !confirmation.has_cost() {
        return Ok(());
    }
    let fallback = request.locations.fallback_for(platform, location);
    let locations = ServerLocations { location, fallback: &fallback };
    confirmation.check_cost(&server_cost::read_cost(platform, server_type, locations).await?)
}

/// Finds the release with which the slot's next machine starts: the recorded one, or the platform's default.
pub async fn find_slot_release(
    platform: &Platform,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<ImageVersion, Problem> {
    let recorded = db::slots::find_release(&platform.db.session().await?, user, slot).await?;
    Ok(recorded.unwrap_or_else(|| platform.config.provisioning.image_version.clone()))
}

async fn create_machine(
    platform: &Platform,
    tx: &deadpool_postgres::Transaction<'_>,
    request: &ProvisionRequest,
    plan: ProvisionPlan,
    failed: Option<&MachineRow>,
) -> Result<CreatedOperation, Problem> {
    let config = &platform.config;
    let machine_request = MachineRequest {
        user: request.user.clone(),
        slot: request.slot.clone(),
        handle: request.handle.clone(),
        kind: request.kind,
        server_type: request.server_type.clone(),
        location: request.location.clone(),
        fallback_locations: request.locations.fallback_for(platform, &request.location),
        image_version: plan.image_version,
        bundle_sha256: plan.bundle_sha256,
        https_port: config.hosts.https_port,
        preview_ttl: (request.kind == MachineKind::Preview).then_some(config.provisioning.preview_ttl),
        restore_snapshot: None,
        should_restore_files: true,
    };
    let restore = plan.restore;
    let context = EventContext {
        successor: Some(&machine_request),
        options: request.options,
        epoch_floor: plan.epoch_floor,
        ..EventContext::default()
    };
    let Some(failed) = failed else {
        let created =
            lifecycle::create_machine(tx, &platform.mint, &machine_request, restore, &context).await;
        return created.map_err(|error| match error {
            lifecycle::LifecycleError::Db(error) => error.into(),
            error => Problem::internal(&error),
        });
    };
    let event = Event::ProvisionRequested { restore };
    let change = lifecycle::apply(tx, &platform.mint, failed, &event, context).await;
    match change.map_err(|error| problems::lifecycle_problem(error, failed))? {
        Change::Moved { created: Some(created) } => Ok(created),
        Change::Moved { created: None } | Change::Unchanged => {
            Err(Problem::new(Code::Unavailable, "The slot has changed; try again.").retry_after(1))
        }
    }
}

/// Runs the checks that need only the configuration and the database. Returns the slot's machine, if any.
pub async fn check_admission(
    platform: &Platform,
    client: &impl GenericClient,
    request: &ProvisionRequest,
) -> Result<Option<MachineRow>, Problem> {
    let config = &platform.config.provisioning;
    if !config.enabled.is_on() {
        return Err(Problem::new(Code::Disabled, "Provisioning is disabled (CUSTOMER_VPS_ENABLED)."));
    }
    let existing = db::machines::find_in_slot(client, &request.user, &request.slot).await?;
    if existing.is_none()
        && let Some(deletion) =
            db::slot_operations::find_deletion_awaiting_backup(client, &request.user, &request.slot).await?
    {
        return Err(deletion_pending(&deletion));
    }
    if let Some(machine) = existing.as_ref().filter(|machine| machine.kind != request.kind) {
        let (existing_kind, requested_kind) = (machine.kind.as_str(), request.kind.as_str());
        let detail = format!(
            "The slot holds a {existing_kind} machine, but a {requested_kind} machine was requested; delete the \
             existing machine first."
        );
        return Err(Problem::new(Code::InvalidState, detail)
            .with("machineStatus", json!(machine.status))
            .with("kind", json!(existing_kind)));
    }
    match request.kind {
        MachineKind::Customer if config.billing_enforcement == Flag::On => {
            entitlement::ensure_entitled(client, &request.user, &request.slot, &request.server_type).await?;
        }
        MachineKind::Customer => {}
        MachineKind::Preview => {
            entitlement::ensure_plan_includes(Plan::Max, &request.server_type)?;
            let previews = db::machines::count_active_previews(client, &request.user).await?;
            if existing.is_none() && previews >= i64::from(config.preview_max_per_owner) {
                let detail = format!("The user already has {previews} previews; delete one first.");
                return Err(Problem::new(Code::PreviewLimitReached, detail).retry_after(3600));
            }
        }
    }
    let owner = db::slots::find_handle_owner(client, &request.handle).await?;
    if owner.is_some_and(|owner| owner != request.user.as_str()) {
        return Err(handle_taken(&request.handle));
    }
    Ok(existing)
}

/// Looks up the digest of a published bundle.
///
/// # Errors
/// `bundle_not_found` if there is none or it is unreadable; `store_unavailable` if a request to the store fails.
pub async fn find_bundle_digest(bucket: &Bucket, version: &ImageVersion) -> Result<String, Problem> {
    let detail = match bundle::read_digest(bucket, version).await {
        Ok(Some(digest)) => return Ok(digest),
        Ok(None) => format!("No bundle of version {version} is published."),
        Err(error @ StoreError::Corrupt { .. }) => {
            format!("The bundle of version {version} is damaged: {error}. Publish another version.")
        }
        Err(error) => return Err(error.into()),
    };
    Err(Problem::new(Code::BundleNotFound, detail))
}

/// Chooses whether to restore a snapshot. A slot that has a snapshot, or should have one, never starts empty, unless an
/// operator has emptied its pointer.
async fn choose_restore_mode(
    platform: &Platform,
    request: &ProvisionRequest,
) -> Result<RestoreMode, Problem> {
    let slot = SlotPrefix::new(&request.user, &request.slot);
    match snapshot::find_latest(&platform.bucket, &slot).await {
        Ok(latest) => {
            let sidecar = snapshot::read_sidecar(&platform.bucket, &slot, &latest).await?;
            replacement_checks::ensure_fits_disk(platform, &sidecar, &request.server_type).await?;
            Ok(RestoreMode::Required)
        }
        Err(SnapshotUnusable::Absent) => {
            replacement_checks::ensure_may_start_empty(platform, &request.user, &request.slot).await?;
            if request.empty == EmptyStart::Refused {
                let session = platform.db.session().await?;
                replacement_checks::ensure_no_unsaved_data(&session, &request.user, &request.slot).await?;
            }
            Ok(RestoreMode::Empty)
        }
        Err(error) => Err(problems::snapshot_unusable(error)),
    }
}

fn has_failed(machine: &MachineRow) -> bool {
    machine.status == Status::Failed
}

/// Returns the problem for a slot whose deleted machine is still taking the final backup that a new machine would
/// restore.
fn deletion_pending(deletion: &OperationRow) -> Problem {
    let OperationRow { id, machine, .. } = deletion;
    let subject = format!("The deletion of the slot's machine {machine} (operation {id})");
    let (problem, state) = if deletion.question.is_some() {
        let next_step =
            format!("see the question with `svcctl operation show {id}`, answer it, then provision again.");
        let detail = format!("{subject} is waiting for an operator's decision: {next_step}");
        (Problem::new(Code::InvalidState, detail), "waiting")
    } else {
        let next_step =
            format!("wait for the operation with `svcctl operation show {id} --wait`, then provision again.");
        let detail = format!("{subject} is still taking the final backup: {next_step}");
        (Problem::new(Code::InvalidState, detail).retry_after(5), "deleting")
    };
    problem.with("machineStatus", json!(state)).with("operationId", json!(id))
}

fn handle_taken(handle: &Handle) -> Problem {
    Problem::new(Code::HandleTaken, format!("The handle {handle} belongs to another user."))
}

fn machine_missing(created: CreatedOperation) -> Problem {
    problems::machine_not_found(&created.machine.to_string())
}

fn response_body(machine: &MachineRow, operation: Option<OperationId>) -> ProvisionedMachine {
    ProvisionedMachine {
        machine_id: machine.id.into(),
        idp_user_id: (&machine.user).into(),
        slot: (&machine.slot).into(),
        handle: (&machine.handle).into(),
        kind: machine.kind.into(),
        status: machine.status.into(),
        epoch: machine.epoch.0.into(),
        operation_id: operation.map(Into::into),
    }
}

pub fn body_schema() -> Value {
    request_object(
        &[("idpUserId", idp_user_id()), ("handle", handle_name())],
        &[
            ("slot", slot_name()),
            ("serverType", server_type()),
            ("location", location()),
            ("fallbackLocations", fallback_locations()),
            ("imageVersion", image_version()),
            ("kind", kind()),
            ("acceptLoss", boolean()),
            ("allowEmpty", boolean()),
            ("confirmedMonthlyCost", text_matching(Price::PATTERN)),
            ("confirmedOptIn", boolean()),
        ],
    )
}

/// The problems that provisioning may report.
const PROBLEMS: [Code; 16] = [
    Code::ConfirmationRequired,
    Code::PriceChanged,
    Code::Disabled,
    Code::SubscriptionRequired,
    Code::ServerTypeNotAllowed,
    Code::BundleNotFound,
    Code::HandleTaken,
    Code::InvalidState,
    Code::SnapshotUnusable,
    Code::DiskTooSmall,
    Code::PreviewLimitReached,
    Code::ServerLimitReached,
    Code::StoreUnavailable,
    Code::Unavailable,
    Code::DatabaseUnavailable,
    Code::IdempotencyMismatch,
];

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "provision",
        method: Method::POST,
        path: "/vps/provision",
        summary: "Creates the machine of a slot, or returns the existing one.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY, PREFER],
        body: Some(body_schema),
        responses: &[
            documented_json(202, "The machine is being created.", schema_of::<ProvisionedMachine>),
            documented_json(200, "The slot already has this machine.", schema_of::<ProvisionedMachine>),
        ],
        problems: &PROBLEMS,
    },
    serve: || post(handle),
};

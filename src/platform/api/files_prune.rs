//! GET and POST `/vps/slots/files-prune`: shows what pruning a slot's file backups would do, and requests it.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::{Method, StatusCode};
use serde_json::json;

use super::call::ApiCall;
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, documented_json, idp_user_id, slot_name,
};
use super::mutation::{AuditChange, Mutation, MutationEffect, Reply};
use super::pointer::{SLOT, USER};
use crate::context::Platform;
use crate::db::files_keys;
use crate::file_pruning::{self, PruneError};
use svc_base::untrusted_text::truncate_printable;
use svc_files::FilesError;
use svc_http::openapi::{Operation, request_object, schema_of};
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::name::{IdpUserId, Slot};
use svc_store::StoreError;
use svc_wire::files::{FilesPruneAccepted, FilesPrunePlan};

/// Timeout for computing a prune plan, including the wait while another plan is being computed. It is shorter than
/// `svcctl`'s default timeout.
const TIMEOUT: Duration = Duration::from_secs(20);

pub async fn show(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let mut query = call.request.query_fields();
    let user: Option<IdpUserId> = query.required("idpUserId");
    let slot = query.optional("slot").unwrap_or_else(Slot::primary);
    let user = query.finish(user)?;
    let session = platform.db.session().await?;
    if files_keys::find(&session, user.as_str(), slot.as_str()).await?.is_none() {
        return Err(no_file_backups(&user, &slot));
    }
    drop(session);
    let plan = file_pruning::prune_slot(&platform, &user, &slot, true);
    let plan = tokio::time::timeout(TIMEOUT, plan).await.map_err(|_| {
        let detail = "Computing the prune plan took too long, because the repository is large or another plan is \
                      being computed: try again later. The platform can still prune the repository.";
        Problem::new(Code::StoreUnavailable, detail)
    })?;
    let plan = plan.map_err(|error| to_problem(error, &user, &slot))?;
    let plan = FilesPrunePlan {
        kept_snapshots: plan.kept_snapshots,
        removed_snapshots: plan.removed_snapshots,
        marked_packs: plan.marked_packs,
        reclaimable_bytes: plan.reclaimable_bytes,
        deleted_packs: plan.deleted_packs,
    };
    Ok(Json(plan).into_response())
}

pub async fn start(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let mut fields = call.request.json_fields()?;
    let user: Option<IdpUserId> = fields.required("idpUserId");
    let slot = fields.optional("slot").unwrap_or_else(Slot::primary);
    let user = fields.finish(user)?;
    let mutation = Mutation::from_call(&call, &operator)?;
    let outcome = mutation
        .run(&platform, async |tx| {
            if !files_keys::request_prune(tx, user.as_str(), slot.as_str()).await? {
                return Err(no_file_backups(&user, &slot));
            }
            let requested =
                FilesPruneAccepted { idp_user_id: user.clone().into(), slot: slot.clone().into() };
            let change = AuditChange {
                action: "files.prune",
                target: format!("{user}/{slot}"),
                before: None,
                after: Some(json!(requested)),
            };
            Ok(MutationEffect::changed(Reply::new(StatusCode::ACCEPTED, requested), change))
        })
        .await?;
    Ok(outcome.into_reply().into_response())
}

fn no_file_backups(user: &IdpUserId, slot: &Slot) -> Problem {
    Problem::new(
        Code::NotFound,
        format!(
            "The platform has no key for the file backups of slot {user}/{slot}: no machine has saved files yet, or the \
             platform's database was restored from a copy older than the key."
        ),
    )
}

fn to_problem(error: PruneError, user: &IdpUserId, slot: &Slot) -> Problem {
    match error {
        PruneError::Db(error) => error.into(),
        error if is_permanent(&error) => {
            let reason = truncate_printable(&format_chain(&error));
            Problem::new(
                Code::Conflict,
                format!("The file backups of slot {user}/{slot} cannot be pruned: {reason}."),
            )
        }
        PruneError::Store(_) | PruneError::Files(FilesError::Store(_)) => {
            tracing::warn!(%user, %slot, error = %format_chain(&error), "cannot read the file backups of a slot");
            svc_store::problem::unavailable()
        }
        error => Problem::internal(&error),
    }
}

/// Returns whether the repository is damaged or cannot be opened, so that a retry would fail too.
fn is_permanent(error: &PruneError) -> bool {
    match error {
        PruneError::InvalidPointer | PruneError::Store(StoreError::Corrupt { .. }) => true,
        PruneError::Files(error) => {
            let is_unreadable = matches!(
                error,
                FilesError::Store(StoreError::Corrupt { .. })
                    | FilesError::WrongKey
                    | FilesError::UnsupportedVersion(_)
            );
            is_unreadable || error.is_damage()
        }
        _ => false,
    }
}

pub static SHOW: Endpoint = Endpoint {
    // This route requires `operate`, because it reads the repository's whole index.
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "showFilesPrune",
        method: Method::GET,
        path: "/vps/slots/files-prune",
        summary: "Shows what pruning a slot's file backups would do.",
        credentials: &[OPERATOR],
        parameters: &[USER, SLOT],
        body: None,
        responses: &[documented_json(200, "The plan.", schema_of::<FilesPrunePlan>)],
        problems: &[Code::NotFound, Code::Conflict, Code::StoreUnavailable, Code::DatabaseUnavailable],
    },
    serve: || get(show),
};

pub static START: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "pruneFiles",
        method: Method::POST,
        path: "/vps/slots/files-prune",
        summary: "Requests that a slot's file backups be pruned now, without waiting for the `FILES_PRUNE_SECONDS` interval.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY],
        body: Some(|| request_object(&[("idpUserId", idp_user_id())], &[("slot", slot_name())])),
        responses: &[documented_json(
            202,
            "Pruning begins within a few minutes or, if the slot is already being pruned, after the current run.",
            schema_of::<FilesPruneAccepted>,
        )],
        problems: &[Code::NotFound, Code::DatabaseUnavailable, Code::IdempotencyMismatch],
    },
    serve: || post(start),
};

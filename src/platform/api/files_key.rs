//! POST `/vps/:id/files-key`: returns the key with which a host encrypts its slot's file backups.
//!
//! GET `/vps/slots/files-key`: returns the same key to an operator. The key decrypts all of the owner's files, so this
//! route requires the scope `admin`, and each use is audited.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::Method;
use http::header::{CACHE_CONTROL, HeaderValue};
use serde::Serialize;
use serde_json::json;

use super::call::ApiCall;
use super::endpoint::{ADMIN, Access, Endpoint, HOST, MACHINE_ID, OPERATOR, documented_json};
use super::host_access::{authenticate_machine, check_slot_access};
use super::mutation::{self, AuditChange};
use super::pointer::{SLOT, USER};
use crate::context::Platform;
use crate::db;
use crate::files_keys::{self, FilesKeyError};
use crate::keys::KeyError;
use svc_files::{FilesError, RepositoryKey};
use svc_http::openapi::{Operation, request_object, schema_of, text_matching};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::id::MachineId;
use svc_machine::name::Slot;
use svc_store::StoreError;
use svc_store::key::SlotPrefix;
use svc_wire::files::{FilesAccess, FilesKey};

pub async fn get_for_host(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let machine = authenticate_machine(&call, &platform, &id).await?;
    let id = machine.id;
    let mut fields = call.request.json_fields()?;
    let offered_key: Option<RepositoryKey> = fields.optional("key");
    fields.finish(Some(()))?;
    platform.rate_limits.admit_credentials(id)?;
    check_slot_access(&platform, &machine).await?;
    let slot = (&machine.user, &machine.slot);
    let key = files_keys::load_or_create(&platform, slot, offered_key).await;
    let key = key.map_err(|error| files_key_problem(id, error))?;
    Ok(respond(FilesKey { key: key.password().clone() }))
}

pub async fn get_for_operator(
    State(platform): State<Arc<Platform>>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let mut query = call.request.query_fields();
    let user = query.required("idpUserId");
    let slot = query.optional("slot").unwrap_or_else(Slot::primary);
    let user = query.finish(user)?;
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let key = files_keys::find(&tx, &platform.seal, (&user, &slot)).await.map_err(key_unavailable)?;
    let key = key.ok_or_else(|| {
        let detail = format!(
            "The platform has no key for the file backups of slot {user}/{slot}. Check that {user} is the user's id, not the \
             handle. If it is, either no machine has saved files yet, or the platform's database was restored from a copy \
             older than the key. In the second case, try again after a day: by then, a machine that has \
             the key will have sent it."
        );
        Problem::new(Code::NotFound, detail)
    })?;
    let target = format!("{user}/{slot}");
    let change = AuditChange { action: "files.key", target, before: None, after: Some(json!({})) };
    mutation::write_audit(&tx, operator.actor(), &change).await?;
    db::commit(tx).await?;
    let repository = platform.config.store.restic_location(&SlotPrefix::new(&user, &slot).files());
    let key = FilesKey { key: key.password().clone() };
    Ok(respond(FilesAccess { idp_user_id: user.into(), slot: slot.into(), key, repository }))
}

fn respond(body: impl Serialize) -> Response {
    let mut response = Json(body).into_response();
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns the problem for a key that cannot be sent to a host. If a retry cannot succeed, for example because no known
/// key opens the repository, or the repository is damaged, the problem is a conflict with the error as its detail.
fn files_key_problem(machine: MachineId, error: FilesKeyError) -> Problem {
    let error = match error {
        // A retry may succeed once the database is reachable again or PLATFORM_KEY_PREVIOUS is set.
        FilesKeyError::Key(error) if !matches!(error, KeyError::Corrupt { .. }) => {
            return key_unavailable(error);
        }
        error => error,
    };
    let text = format_chain(&error);
    tracing::error!(%machine, error = text, "cannot provide the host with the key of its slot's file backups");
    match &error {
        FilesKeyError::Repository { source: FilesError::Store(source), .. }
            if !matches!(source, StoreError::Corrupt { .. }) =>
        {
            svc_store::problem::unavailable()
        }
        _ => Problem::new(Code::Conflict, text),
    }
}

fn key_unavailable(error: KeyError) -> Problem {
    match error {
        KeyError::Db(error) => error.into(),
        error => {
            tracing::error!(error = %format_chain(&error), "cannot provide the key of a slot's file backups");
            Problem::new(
                Code::Internal,
                "The key of the slot's file backups is unavailable; see the platform's log for the reason.",
            )
        }
    }
}

pub static FOR_HOST: Endpoint = Endpoint {
    access: Access::Machine,
    operation: Operation {
        id: "getHostFilesKey",
        method: Method::POST,
        path: "/vps/{id}/files-key",
        summary: "Returns the key with which a host encrypts its slot's file backups. The first request for a slot creates it.",
        credentials: &[HOST],
        parameters: &[MACHINE_ID],
        body: Some(|| {
            request_object(&[], &[("key", text_matching("^[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]$"))])
        }),
        responses: &[documented_json(200, "The key.", schema_of::<FilesKey>)],
        problems: &[
            Code::Forbidden,
            Code::RateLimited,
            Code::Superseded,
            Code::Conflict,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || post(get_for_host),
};

pub static FOR_OPERATOR: Endpoint = Endpoint {
    access: Access::Operator(ADMIN),
    operation: Operation {
        id: "getFilesKey",
        method: Method::GET,
        path: "/vps/slots/files-key",
        summary: "Returns the key of a slot's file backups, with which `restic` reads them. Audited.",
        credentials: &[OPERATOR],
        parameters: &[USER, SLOT],
        body: None,
        responses: &[documented_json(200, "The key.", schema_of::<FilesAccess>)],
        problems: &[Code::NotFound, Code::DatabaseUnavailable],
    },
    serve: || get(get_for_operator),
};

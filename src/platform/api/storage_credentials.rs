//! POST `/vps/:id/storage-credentials`: issues credentials for the host's slot in the object store.
//!
//! Credentials are issued only to the slot's current machine and to a machine whose final backup is pending.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, HeaderValue};

use super::call::ApiCall;
use super::endpoint::{Access, Endpoint, HOST, MACHINE_ID, documented_json};
use super::host_access::{SlotAccess, authenticate_machine, check_slot_access};
use crate::context::Platform;
use crate::store_access_issuer::SessionGrant;
use axum::routing::post;
use http::Method;
use svc_http::openapi::{Operation, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem, format_chain};
use svc_wire::storage::StorageCredentials;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let machine = authenticate_machine(&call, &platform, &id).await?;
    let id = machine.id;
    call.validate_optional_body()?;
    platform.rate_limits.admit_credentials(id)?;
    let grant = match check_slot_access(&platform, &machine).await? {
        SlotAccess::Current => SessionGrant::WorkingAndOutage,
        SlotAccess::FinalBackup => SessionGrant::WorkingOnly,
    };
    let access = platform.store_access.grant_access(&machine, grant).await.map_err(|error| {
        tracing::warn!(machine = %id, error = %format_chain(&error), "cannot issue storage credentials");
        svc_store::problem::unavailable()
    })?;
    let credentials = access.to_response().ok_or_else(|| {
        Problem::new(Code::Disabled, "The object store is a directory, which needs no credentials.")
    })?;
    let mut response = Json(credentials).into_response();
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Machine,
    operation: Operation {
        id: "renewStorageCredentials",
        method: Method::POST,
        path: "/vps/{id}/storage-credentials",
        summary: "Issues short-lived credentials for the slot's part of the object store.",
        credentials: &[HOST],
        parameters: &[MACHINE_ID],
        body: None,
        responses: &[documented_json(200, "The credentials.", schema_of::<StorageCredentials>)],
        problems: &[
            Code::Forbidden,
            Code::RateLimited,
            Code::Superseded,
            Code::Disabled,
            Code::StoreUnavailable,
            Code::InvalidRequest,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || post(handle),
};

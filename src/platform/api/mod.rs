//! The control API: each route, or group of related routes, has its own file. Errors are problem+json; `call.rs`
//! defines the order of the checks.

pub mod access;
pub mod alarm;
pub mod attention;
pub mod audit;
pub mod backup;
pub mod backup_file;
pub mod backups;
pub mod boot_failure;
pub mod boot_stage;
pub mod bundle;
pub mod call;
mod confirmation;
pub mod delete;
pub mod deploy;
pub mod discard;
pub mod endpoint;
pub mod entitlement;
pub mod fail;
pub mod files_key;
pub mod files_prune;
pub mod files_usage;
pub mod fleet;
pub mod heal;
pub mod health;
pub mod heartbeat;
pub mod host_access;
pub mod host_files;
pub mod list;
pub mod locations;
pub mod machine;
pub mod machine_change;
pub mod metrics;
pub mod mutation;
pub mod object;
pub mod operation;
pub mod operation_decision;
pub mod operators;
pub mod pointer;
pub mod power;
pub mod problems;
pub mod provision;
pub mod quote;
pub mod recover;
pub mod register;
mod rejected_host_tokens;
pub mod replacement_checks;
pub mod resize;
pub mod resume;
pub mod rotate_token;
pub mod schemas;
mod server_limit;
pub mod slots;
pub mod storage_credentials;
pub mod undelete;
pub mod usage;

use std::sync::{Arc, LazyLock};

use axum::extract::Request;
use axum::middleware;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Extension, Router};
use bytes::Bytes;
use http::Method;
use http::header::CONTENT_TYPE;
use serde_json::json;

use self::endpoint::{Access, Endpoint, documented_json};
use super::context::Platform;
use svc_http::buffered_request::BODY_LIMITS;
use svc_http::observe::{self, Listener};
use svc_http::openapi::Operation;
use svc_http::problem::{Code, Problem};

/// All routes, in OpenAPI document order.
pub static ENDPOINTS: [&Endpoint; 63] = [
    &provision::ENDPOINT,
    &quote::ENDPOINT,
    &register::ENDPOINT,
    &recover::ENDPOINT,
    &list::ENDPOINT,
    &fleet::ENDPOINT,
    &alarm::RELEASE,
    &machine::ENDPOINT,
    &delete::ENDPOINT,
    &resize::ENDPOINT,
    &power::ENDPOINT,
    &fail::ENDPOINT,
    &resume::ENDPOINT,
    &rotate_token::ENDPOINT,
    &rotate_token::FLEET_ENDPOINT,
    &undelete::ENDPOINT,
    &discard::ENDPOINT,
    &backup::BACKUP,
    &backup::DRILL,
    &backup::ACCEPT,
    &backups::ENDPOINT,
    &backup_file::ENDPOINT,
    &usage::ENDPOINT,
    &backup::VERIFY_FILES,
    &host_files::STATUS,
    &host_files::VERSIONS,
    &host_files::LIST,
    &host_files::SHOW_RESTORE,
    &host_files::RESTORE,
    &heartbeat::ENDPOINT,
    &storage_credentials::ENDPOINT,
    &files_key::FOR_HOST,
    &boot_stage::ENDPOINT,
    &boot_failure::ENDPOINT,
    &operation::ENDPOINT,
    &operation_decision::CONTINUE,
    &operation_decision::ABANDON,
    &deploy::START,
    &deploy::LIST,
    &deploy::SHOW,
    &deploy::PAUSE,
    &deploy::RESUME,
    &deploy::ABORT,
    &slots::LIST,
    &slots::PUT,
    &files_key::FOR_OPERATOR,
    &files_usage::ENDPOINT,
    &files_prune::SHOW,
    &files_prune::START,
    &pointer::SHOW,
    &pointer::REBUILD,
    &bundle::ENDPOINT,
    &operators::ADD,
    &operators::LIST,
    &operators::WHO_AM_I,
    &operators::ROTATE,
    &operators::REVOKE,
    &audit::ENDPOINT,
    &health::LIVE,
    &health::READY,
    &health::READY_TO_CONTROL,
    &metrics::ENDPOINT,
    &DESCRIPTION,
];

/// The OpenAPI document for all routes, including those of other routers. The caller of [`routes`] adds it as an
/// [`Extension`].
#[derive(Clone, Copy)]
pub struct OpenApi(pub &'static LazyLock<Bytes>);

static DESCRIPTION: Endpoint = Endpoint {
    access: Access::Open,
    operation: Operation {
        id: "describe",
        method: Method::GET,
        path: "/openapi.json",
        summary: "Returns this document.",
        credentials: &[],
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "OpenAPI 3.1.", || json!({ "type": "object" }))],
        problems: &[],
    },
    serve: || get(describe),
};

async fn describe(Extension(OpenApi(document)): Extension<OpenApi>) -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], Bytes::clone(document))
}

pub fn routes(platform: Arc<Platform>) -> Router {
    endpoint::routes(&ENDPOINTS)
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(Listener::Api, observe::layer))
        .with_state(platform)
}

async fn not_found(request: Request) -> Problem {
    BODY_LIMITS.drain(request.into_body()).await;
    Problem::new(Code::NotFound, "There is no such route.")
}

async fn method_not_allowed(request: Request) -> Problem {
    BODY_LIMITS.drain(request.into_body()).await;
    Problem::new(Code::MethodNotAllowed, "This route does not accept this method.")
}

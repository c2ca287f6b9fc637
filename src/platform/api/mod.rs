//! The control API: one route per file. Errors are problem+json; the order of checks is the contract's.

pub mod backup;
pub mod backups;
pub mod boot_failure;
pub mod boot_stage;
pub mod bundle;
pub mod call;
pub mod delete;
pub mod entitlement;
pub mod fail;
pub mod fault;
pub mod fields;
pub mod fleet;
pub mod health;
pub mod heartbeat;
pub mod list;
pub mod machine;
pub mod mutation;
pub mod operation;
pub mod provision;
pub mod recover;
pub mod register;
pub mod resize;
pub mod slots;
pub mod storage_credentials;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};

use super::context::Platform;
use crate::http::problem::{Code, Problem};
use crate::http::request_id;

pub fn router(platform: Arc<Platform>) -> Router {
    Router::new()
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/vps", get(list::handle))
        .route("/vps/provision", post(provision::handle))
        .route("/vps/register", post(register::handle))
        .route("/vps/recover", post(recover::handle))
        .route("/vps/fleet", get(fleet::handle))
        .route("/vps/slots", get(slots::list).put(slots::put))
        .route("/vps/operations/{id}", get(operation::handle))
        .route("/vps/{id}", get(machine::handle).delete(delete::handle))
        .route("/vps/{id}/heartbeat", post(heartbeat::handle))
        .route("/vps/{id}/boot-stage", post(boot_stage::handle))
        .route("/vps/{id}/storage-credentials", post(storage_credentials::handle))
        .route("/vps/{id}/boot-failure", post(boot_failure::handle))
        .route("/vps/{id}/resize", post(resize::handle))
        .route("/vps/{id}/fail", post(fail::handle))
        .route("/vps/{id}/backup", post(backup::handle))
        .route("/vps/{id}/backups", get(backups::handle))
        .route("/system-bundles/{version}/{file}", get(bundle::handle))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn(log))
        .layer(middleware::from_fn(request_id::layer))
        .with_state(platform)
}

async fn not_found(request: Request) -> Problem {
    call::discard(&mut request.into_body()).await;
    Problem::new(Code::NotFound, "There is no such route.")
}

async fn method_not_allowed(request: Request) -> Problem {
    call::discard(&mut request.into_body()).await;
    Problem::new(Code::MethodNotAllowed, "This route does not take that method.")
}

async fn log(request: Request, next: Next) -> Response {
    let start = Instant::now();
    let response = next.run(request).await;
    let ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(status = response.status().as_u16(), ms, "answered");
    response
}

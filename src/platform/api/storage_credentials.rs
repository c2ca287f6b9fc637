//! POST `/vps/:id/storage-credentials`: a host asks for new credentials for its slot of the object store.
//!
//! Only the slot's current machine gets them, and one that is being asked for its last backup, for a short while.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, HeaderValue};

use super::access::unauthorized;
use super::call::{Call, path_id};
use super::endpoint::{Access, Endpoint, HOST, MACHINE_ID, told};
use super::{fault, heartbeat};
use crate::http::openapi::{Operation, nullable, object, text, time};
use crate::http::problem::{Code, Problem, chain};
use crate::http::segments::Segments;
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::host_store::SessionGrant;
use axum::routing::post;
use http::Method;
use serde_json::Value;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let machine = call.host(&platform).await?;
    let id: MachineId = path_id("machineId", &id)?;
    if id != machine.id {
        return Err(Problem::new(Code::Forbidden, "This token is another machine's."));
    }
    call.nothing_needed()?;
    platform.rates.admit_credentials(id)?;
    let grant = if machine.is_active() {
        SessionGrant::WithOutage
    } else if heartbeat::still_needed(&platform, &machine).await? {
        SessionGrant::Working
    } else if machine.deleted_at.is_some() {
        return Err(unauthorized());
    } else {
        return Err(Problem::new(Code::Superseded, "Another machine has taken this one's place."));
    };
    let access = platform.host_store.access(&machine, grant).await.map_err(|error| {
        tracing::warn!(machine = %id, error = %chain(&error), "no credentials for a host");
        fault::store_unavailable()
    })?;
    let answer =
        access.wire().ok_or_else(|| Problem::new(Code::Disabled, "The store knows no credentials."))?;
    let mut response = Json(answer).into_response();
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Machine,
    operation: Operation {
        id: "renewStorageCredentials",
        method: Method::POST,
        path: "/vps/{id}/storage-credentials",
        summary: "New short-lived credentials for the slot's part of the object store.",
        credentials: &[HOST],
        parameters: &[MACHINE_ID],
        body: None,
        answers: &[told(200, "The credentials.", shape)],
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

fn shape() -> Value {
    object(
        &[
            ("accessKeyId", text()),
            ("secretAccessKey", text()),
            ("sessionToken", nullable(text())),
            ("expiresAt", nullable(time())),
            ("region", text()),
            ("endpoint", nullable(text())),
            ("bucket", text()),
            ("prefix", text()),
            ("outage", nullable(outage())),
        ],
        &[],
    )
}

/// The session with which a host stores snapshots while the platform is unreachable.
fn outage() -> Value {
    object(
        &[
            ("accessKeyId", text()),
            ("secretAccessKey", text()),
            ("sessionToken", nullable(text())),
            ("expiresAt", time()),
        ],
        &[],
    )
}

//! The control API under `/_sim/`, for other processes: JSON requests and responses, no token required.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;

use anyhow::Context;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::cloud::Cloud;
use super::faults::{CallRecord, FaultRule};
use super::inventory::Creation;
use super::view::{HostView, ServerView};

type Shared = State<Arc<Cloud>>;
type ControlResult = Result<Json<Value>, ControlError>;

pub(super) fn routes(cloud: Arc<Cloud>) -> Router {
    Router::new()
        .route("/_sim/servers", get(list_servers))
        .route("/_sim/servers/{name}/kill", post(kill_server))
        .route("/_sim/servers/{name}/lose", post(lose_server))
        .route("/_sim/servers/{name}/obey-shutdown", post(set_obeys_shutdown))
        .route("/_sim/hosts", get(list_hosts))
        .route("/_sim/hosts/{name}", get(get_host))
        .route("/_sim/hosts/{name}/start-from-disk", post(start_from_disk))
        .route("/_sim/hosts/{name}/stop", post(stop_unlisted))
        .route("/_sim/hosts/{name}/start-database", post(start_database))
        .route("/_sim/hosts/{name}/env", put(set_next_start_env))
        .route("/_sim/hosts/{name}/units/{unit}/start", post(run_unit))
        .route("/_sim/hosts/{name}/units/{unit}/stop", post(stop_service))
        .route("/_sim/next-server-env", put(set_next_server_env))
        .route("/_sim/faults", get(list_faults).post(add_fault).delete(clear_faults))
        .route("/_sim/calls", get(list_calls))
        .route("/_sim/creations", get(list_creations))
        .with_state(cloud)
}

/// An error from a control request. The response is 409 with the full error chain.
pub(super) struct ControlError(anyhow::Error);

impl From<anyhow::Error> for ControlError {
    fn from(error: anyhow::Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for ControlError {
    fn into_response(self) -> Response {
        (StatusCode::CONFLICT, Json(json!({"error": format!("{:#}", self.0)}))).into_response()
    }
}

async fn list_servers(State(cloud): Shared) -> Json<Vec<ServerView>> {
    Json(cloud.server_views())
}

async fn kill_server(State(cloud): Shared, Path(name): Path<String>) -> ControlResult {
    cloud.kill_server(&name).await?;
    Ok(Json(json!({})))
}

async fn lose_server(State(cloud): Shared, Path(name): Path<String>) -> ControlResult {
    cloud.lose_server(&name).await?;
    Ok(Json(json!({})))
}

#[derive(Deserialize)]
struct ShutdownBehavior {
    obeys: bool,
}

async fn set_obeys_shutdown(
    State(cloud): Shared,
    Path(name): Path<String>,
    Json(body): Json<ShutdownBehavior>,
) -> ControlResult {
    cloud.set_obeys_shutdown(&name, body.obeys)?;
    Ok(Json(json!({})))
}

async fn list_hosts(State(cloud): Shared) -> Result<Json<Vec<HostView>>, ControlError> {
    Ok(Json(cloud.host_views()?))
}

async fn get_host(State(cloud): Shared, Path(name): Path<String>) -> Result<Json<HostView>, ControlError> {
    let host = cloud.host_views()?.into_iter().find(|host| host.name == name);
    Ok(Json(host.with_context(|| format!("no server named {name} has been created"))?))
}

async fn start_from_disk(State(cloud): Shared, Path(name): Path<String>) -> ControlResult {
    cloud.start_from_disk(&name)?;
    Ok(Json(json!({})))
}

async fn stop_unlisted(State(cloud): Shared, Path(name): Path<String>) -> ControlResult {
    cloud.stop_unlisted(&name).await?;
    Ok(Json(json!({})))
}

async fn start_database(State(cloud): Shared, Path(name): Path<String>) -> ControlResult {
    Ok(Json(json!({"databaseUrl": cloud.start_database_only(&name).await?})))
}

/// Arguments and environment for a unit run; both are optional.
#[derive(Deserialize, Default)]
#[serde(default)]
struct UnitRun {
    args: Vec<String>,
    env: BTreeMap<String, String>,
}

/// Runs a unit. In the response, `code` is null if a signal terminated the process.
async fn run_unit(
    State(cloud): Shared,
    Path((name, unit)): Path<(String, String)>,
    body: Option<Json<UnitRun>>,
) -> ControlResult {
    let Json(run) = body.unwrap_or_default();
    let env: Vec<(String, String)> = run.env.into_iter().collect();
    let output = cloud.run_unit(&name, &unit, &run.args, &env).await?;
    Ok(Json(json!({
        "code": output.status.code(),
        "signal": output.status.signal(),
        "stdout": String::from_utf8_lossy(&output.stdout),
        "stderr": String::from_utf8_lossy(&output.stderr),
    })))
}

async fn stop_service(State(cloud): Shared, Path((name, unit)): Path<(String, String)>) -> ControlResult {
    cloud.guests.hosts()?.host(&name)?.stop_service(&unit).await?;
    Ok(Json(json!({})))
}

async fn set_next_start_env(
    State(cloud): Shared,
    Path(name): Path<String>,
    Json(env): Json<BTreeMap<String, String>>,
) -> ControlResult {
    cloud.guests.hosts()?.host(&name)?.set_next_start_env(env.into_iter().collect());
    Ok(Json(json!({})))
}

async fn set_next_server_env(
    State(cloud): Shared,
    Json(env): Json<BTreeMap<String, String>>,
) -> ControlResult {
    cloud.guests.hosts()?.set_next_server_env(env.into_iter().collect());
    Ok(Json(json!({})))
}

async fn list_faults(State(cloud): Shared) -> Json<Vec<FaultRule>> {
    Json(cloud.script().pending())
}

async fn add_fault(State(cloud): Shared, Json(rule): Json<FaultRule>) -> Json<Value> {
    cloud.script().add(rule);
    Json(json!({}))
}

async fn clear_faults(State(cloud): Shared) -> Json<Value> {
    cloud.script().clear();
    Json(json!({}))
}

async fn list_calls(State(cloud): Shared) -> Json<Vec<CallRecord>> {
    Json(cloud.script().calls().to_vec())
}

async fn list_creations(State(cloud): Shared) -> Json<Vec<Creation>> {
    Json(cloud.inventory().creations().to_vec())
}

//! The control over HTTP under `/_sim/`, for whoever is not in the simulator's process. JSON both ways, no token.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use serde_json::{Value, json};

use super::book::Creation;
use super::cloud::Cloud;
use super::faults::{CallRecord, FaultRule};
use super::view::ServerView;

type Shared = State<Arc<Cloud>>;
type Done = Result<Json<Value>, Failed>;

pub(super) fn routes(cloud: Arc<Cloud>) -> Router {
    Router::new()
        .route("/_sim/servers", get(servers))
        .route("/_sim/servers/{name}/kill", post(kill))
        .route("/_sim/servers/{name}/vanish", post(vanish))
        .route("/_sim/faults", get(faults).post(fault).delete(clear))
        .route("/_sim/calls", get(calls))
        .route("/_sim/creations", get(creations))
        .with_state(cloud)
}

/// An error of the control: 409 with its whole chain.
pub(super) struct Failed(anyhow::Error);

impl From<anyhow::Error> for Failed {
    fn from(error: anyhow::Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        (StatusCode::CONFLICT, Json(json!({"error": format!("{:#}", self.0)}))).into_response()
    }
}

async fn servers(State(cloud): Shared) -> Json<Vec<ServerView>> {
    Json(cloud.views())
}

async fn kill(State(cloud): Shared, Path(name): Path<String>) -> Done {
    cloud.kill(&name).await?;
    Ok(Json(json!({})))
}

async fn vanish(State(cloud): Shared, Path(name): Path<String>) -> Done {
    cloud.vanish(&name).await?;
    Ok(Json(json!({})))
}

async fn faults(State(cloud): Shared) -> Json<Vec<FaultRule>> {
    Json(cloud.script().pending())
}

async fn fault(State(cloud): Shared, Json(rule): Json<FaultRule>) -> Json<Value> {
    cloud.script().add(rule);
    Json(json!({}))
}

async fn clear(State(cloud): Shared) -> Json<Value> {
    cloud.script().clear();
    Json(json!({}))
}

async fn calls(State(cloud): Shared) -> Json<Vec<CallRecord>> {
    Json(cloud.script().calls().to_vec())
}

async fn creations(State(cloud): Shared) -> Json<Vec<Creation>> {
    Json(cloud.book().creations().to_vec())
}

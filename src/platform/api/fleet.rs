//! GET `/vps/fleet`: all active machines in one look, and those that need somebody.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use super::call::Call;
use crate::clock::{now_ms, rfc3339_ms};
use crate::http::problem::Problem;
use crate::platform::context::Platform;
use crate::platform::db::{self};
use crate::platform::fleet;

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform)?;
    call.query().finish(Some(()))?;
    let session = platform.db.session().await?;
    let rows = db::fleet::all(&session).await?;
    let mut body = fleet::summary(&rows);
    body["asOf"] = rfc3339_ms(now_ms()).into();
    Ok(Json(body).into_response())
}

//! GET `/vps/:id`: one machine with its operations, whatever has become of it.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};

use super::call::{Call, path_id};
use super::{fault, operation};
use crate::http::problem::Problem;
use crate::platform::context::Platform;
use crate::platform::db::{self};

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform)?;
    let id = path_id("machineId", &id)?;
    call.query().finish(Some(()))?;
    let session = platform.db.session().await?;
    let machine = db::machines::get(&session, id).await?;
    let machine = machine.ok_or_else(|| fault::machine_not_found(&id.to_string()))?;
    let mut record = machine.record();
    let mut operations = Vec::new();
    for one in db::operations::of_machine(&session, id).await? {
        operations.push(operation::record(&session, &one).await?);
    }
    record["operations"] = operations.into();
    Ok(Json(record).into_response())
}

//! GET `/vps/operations/:id`: returns an operation with the log of its steps.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use super::call::{ApiCall, path_id};
use super::endpoint::{Access, Endpoint, OPERATOR, READ, documented_json};
use crate::context::Platform;
use crate::{db, resource};
use axum::routing::get;
use http::Method;
use svc_http::openapi::{Operation, Parameter, ParameterLocation, schema_ref, uuid};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::OperationId;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let id: OperationId = path_id("operationId", &id)?;
    let session = platform.db.session().await?;
    let operation = db::operations::get(&session, id).await?;
    let operation =
        operation.ok_or_else(|| Problem::new(Code::NotFound, format!("There is no operation {id}.")))?;
    Ok(Json(resource::operation::load_with_log(&session, &operation).await?).into_response())
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "getOperation",
        method: Method::GET,
        path: "/vps/operations/{id}",
        summary: "Shows an operation with the log of its steps.",
        credentials: &[OPERATOR],
        parameters: &[Parameter {
            name: "id",
            location: ParameterLocation::Path,
            schema: uuid,
            description: "The operation.",
        }],
        body: None,
        responses: &[documented_json(200, "The operation.", || schema_ref("Operation"))],
        problems: &[Code::NotFound, Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

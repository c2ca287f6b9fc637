//! GET and HEAD `/vps/:id/backups/:name`: streams a snapshot's dump from the object store, with support for range
//! requests. A dump contains the owner's data, so each GET is audited before the dump is served.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::get;
use http::Method;
use serde_json::json;

use super::call::{ApiCall, path_id};
use super::endpoint::{Access, Endpoint, MACHINE_ID, OPERATE, OPERATOR};
use super::mutation::{self, AuditChange};
use super::{object, problems};
use crate::context::Platform;
use crate::db;
use svc_http::openapi::{Operation, Parameter, ParameterLocation, text_matching};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::MachineId;
use svc_store::key::SlotPrefix;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams((id, name)): PathParams<(String, String)>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let id: MachineId = path_id("machineId", &id)?;
    let mut session = platform.db.session().await?;
    let machine = db::machines::get(&session, id).await?;
    let machine = machine.ok_or_else(|| problems::machine_not_found(&id.to_string()))?;
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let not_found = || {
        let detail = format!("The slot has no snapshot {name}; `/vps/{id}/backups` lists its snapshots.");
        Problem::new(Code::NotFound, detail)
    };
    let key = format!("system/db/snapshots/{name}");
    let dump = slot.snapshot(&key).ok_or_else(not_found)?;
    if call.request.method == Method::GET {
        let tx = db::begin(&mut session).await?;
        let (target, after) = (format!("{}/{}", machine.user, machine.slot), json!({"key": key}));
        let change = AuditChange { action: "backup.read", target, before: None, after: Some(after) };
        mutation::write_audit(&tx, operator.actor(), &change).await?;
        db::commit(tx).await?;
    }
    drop(session);
    object::serve(&platform.bucket, &dump, "application/octet-stream", &call, not_found).await
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "getBackup",
        method: Method::GET,
        path: "/vps/{id}/backups/{name}",
        summary: "Serves a snapshot's dump, for `pg_restore`. Supports Range, If-Range and If-None-Match (RFC 9110).",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, NAME],
        body: None,
        responses: &object::RESPONSES,
        problems: &[
            Code::MachineNotFound,
            Code::NotFound,
            Code::RangeNotSatisfiable,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || get(handle),
};

const NAME: Parameter = Parameter {
    name: "name",
    location: ParameterLocation::Path,
    schema: || text_matching("^[^/]+\\.dump$"),
    description: "The last part of the snapshot's key.",
};

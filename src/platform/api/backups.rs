//! GET `/vps/:id/backups`: lists the verified snapshots of the machine's slot, newest first, including those that other
//! machines took.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::call::{ApiCall, path_id};
use super::endpoint::{Access, CURSOR, Endpoint, MACHINE_ID, OPERATOR, READ, documented_json};
use super::problems;
use crate::context::Platform;
use crate::db;
use axum::routing::get;
use http::Method;
use svc_http::openapi::{Operation, Parameter, ParameterLocation, boolean, schema_of, text_matching};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::id::MachineId;
use svc_store::bucket::StoreError;
use svc_store::key::{SlotPrefix, SnapshotCursor};
use svc_store::snapshot::SnapshotUnusable;
use svc_store::snapshots::{ListedSnapshot, PageWindow, SnapshotPage};
use svc_store::{pointer_io, snapshots};
use svc_wire::backup::{Backup, BackupPage};

const DEFAULT_PAGE_SIZE: usize = 50;
const MAX_PAGE_SIZE: usize = 200;
const STORE_TIMEOUT: Duration = Duration::from_secs(10);

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let id: MachineId = path_id("machineId", &id)?;
    let mut query = call.request.query_fields();
    let limit = query.number_in_range("limit", 1..=MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE);
    let before: Option<SnapshotCursor> = query.optional("cursor");
    let only_latest = query.optional::<bool>("latest").unwrap_or(false);
    query.finish(Some(()))?;

    let session = platform.report_db.session().await?;
    let machine = db::machines::get(&session, id).await?;
    drop(session);
    let machine = machine.ok_or_else(|| problems::machine_not_found(&id.to_string()))?;
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let load_page = async {
        let pointer = match pointer_io::read(&platform.bucket, &slot).await {
            Ok(pointer) => pointer,
            Err(StoreError::Corrupt { key, reason }) if only_latest => {
                return Err(problems::snapshot_unusable(SnapshotUnusable::Damaged { key, reason }));
            }
            // The snapshots can be listed without the pointer, which only marks the latest one.
            Err(error @ StoreError::Corrupt { .. }) => {
                tracing::warn!(machine = %id, error = %format_chain(&error), "pointer corrupt; listing snapshots without it");
                None
            }
            Err(error) => return Err(error.into()),
        };
        let latest = pointer.and_then(|pointer| pointer.value.snapshot);
        let page = if only_latest {
            let snapshot = match &latest {
                Some(latest) => snapshots::read_listed_snapshot(&platform.bucket, &slot, &latest.key).await?,
                None => None,
            };
            SnapshotPage { snapshots: snapshot.into_iter().collect(), next: None }
        } else {
            let taken_at = latest.as_ref().map(|latest| latest.taken_at);
            let window =
                PageWindow { before: before.as_ref().map(SnapshotCursor::as_str), latest: taken_at, limit };
            snapshots::list_page(&platform.bucket, &slot, window).await?
        };
        Ok::<_, Problem>((latest, page))
    };
    let (latest, page) = tokio::time::timeout(STORE_TIMEOUT, load_page)
        .await
        .map_err(|_| svc_store::problem::unavailable())??;
    let latest = latest.map(|latest| latest.key);
    let backups =
        page.snapshots.iter().map(|snapshot| backup_resource(snapshot, latest.as_deref())).collect();
    Ok(Json(BackupPage { latest, backups, next_cursor: page.next }).into_response())
}

fn backup_resource(snapshot: &ListedSnapshot, latest: Option<&str>) -> Backup {
    Backup {
        key: snapshot.key.clone(),
        size_bytes: snapshot.size_bytes,
        sha256: snapshot.sha256.clone(),
        taken_at: snapshot.taken_at.into(),
        verified_at: snapshot.verified_at.into(),
        epoch: snapshot.epoch.0.into(),
        machine_id: snapshot.machine_id.into(),
        latest: latest == Some(snapshot.key.as_str()),
    }
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "listBackups",
        method: Method::GET,
        path: "/vps/{id}/backups",
        summary: "Lists the verified snapshots of the machine's slot, newest first.",
        credentials: &[OPERATOR],
        parameters: &[
            MACHINE_ID,
            LIMIT,
            Parameter { schema: || text_matching(SnapshotCursor::PATTERN), ..CURSOR },
            LATEST,
        ],
        body: None,
        responses: &[documented_json(200, "A page of snapshots.", schema_of::<BackupPage>)],
        problems: &[
            Code::MachineNotFound,
            Code::SnapshotUnusable,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || get(handle),
};

const LATEST: Parameter = Parameter {
    name: "latest",
    location: ParameterLocation::Query,
    schema: boolean,
    description: "true: list only the snapshot that the pointer names.",
};

const LIMIT: Parameter = Parameter {
    name: "limit",
    location: ParameterLocation::Query,
    schema: || json!({ "type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": DEFAULT_PAGE_SIZE }),
    description: "Page size.",
};

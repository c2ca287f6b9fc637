//! GET `/vps/slots/files-usage`: shows how much storage a slot's file backups use, and the result of their last prune.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::Method;

use super::call::ApiCall;
use super::endpoint::{Access, Endpoint, OPERATOR, READ, documented_json};
use super::pointer::{SLOT, USER};
use crate::context::Platform;
use crate::db::files_keys;
use svc_files::FilesError;
use svc_files::usage::measure_usage;
use svc_http::openapi::{Operation, schema_of};
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::name::{IdpUserId, Slot};
use svc_store::key::SlotPrefix;
use svc_wire::files::FilesUsage;
use tokio::sync::Semaphore;

/// Limits the listings that run at the same time in this process.
static LISTING_PERMITS: Semaphore = Semaphore::const_new(2);
/// Timeout for listing the repository's objects, including the wait for other listings. It is shorter than `svcctl`'s
/// default timeout.
const TIMEOUT: Duration = Duration::from_secs(20);

pub async fn show(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let mut query = call.request.query_fields();
    let user: Option<IdpUserId> = query.required("idpUserId");
    let slot = query.optional("slot").unwrap_or_else(Slot::primary);
    let user = query.finish(user)?;
    let session = platform.report_db.session().await?;
    let last_prune = files_keys::find_last_prune(&session, user.as_str(), slot.as_str());
    let last_prune = last_prune.await?.ok_or_else(|| {
        Problem::new(
            Code::NotFound,
            format!(
                "The platform has no key for the file backups of slot {user}/{slot}. Check that {user} is the user's id, \
                 not the handle. If it is, either no machine has saved files yet, or the platform's database was \
                 restored from a copy older than the key."
            ),
        )
    })?;
    drop(session);
    let root = SlotPrefix::new(&user, &slot).files();
    let measured = tokio::time::timeout(TIMEOUT, async {
        let _permit = LISTING_PERMITS.acquire().await.expect("the semaphore is never closed");
        measure_usage(&platform.bucket, &root).await
    });
    let usage = measured.await.map_err(|_| {
        let detail = format!(
            "Listing the repository, or waiting for other listings, took more than {} s; try again later.",
            TIMEOUT.as_secs()
        );
        Problem::new(Code::StoreUnavailable, detail)
    })?;
    let usage = usage.map_err(|error| match error {
        FilesError::Store(_) => {
            tracing::warn!(%user, %slot, error = %format_chain(&error), "cannot list the file backups of a slot");
            svc_store::problem::unavailable()
        }
        error => Problem::internal(&error),
    })?;
    let usage = FilesUsage {
        snapshots: usage.snapshots,
        oldest_snapshot_at: usage.oldest_snapshot.map(Into::into),
        newest_snapshot_at: usage.newest_snapshot.map(Into::into),
        packs: usage.packs,
        pack_bytes: usage.pack_bytes,
        total_bytes: usage.total_bytes,
        pruned_at: last_prune.at.map(Into::into),
        prune_error: last_prune.error,
    };
    Ok(Json(usage).into_response())
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "showFilesUsage",
        method: Method::GET,
        path: "/vps/slots/files-usage",
        summary: "Shows how much storage a slot's file backups use, and the result of their last prune.",
        credentials: &[OPERATOR],
        parameters: &[USER, SLOT],
        body: None,
        responses: &[documented_json(200, "The usage.", schema_of::<FilesUsage>)],
        problems: &[Code::NotFound, Code::StoreUnavailable, Code::DatabaseUnavailable],
    },
    serve: || get(show),
};

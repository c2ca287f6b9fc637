//! `/api/files`: the owner's file backup, including its status, file history and restores.
//!
//! History requests are proxied to `history.sock`, where each is served by its own process. Restore requests are files
//! that trigger a systemd path unit.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode, header};
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use strum::VariantNames;

use crate::auth::{OWNER_OR_ADMIN, READERS, READERS_AND_PLATFORM};
use crate::body;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use crate::proxy::{Upstreams, proxy_download, proxy_to_history};
use svc_base::error_chain::format_chain;
use svc_base::fsx::FileError;
use svc_host::files::access::ResticAccess;
use svc_host::files::checks::FileChecks;
use svc_host::files::history::DownloadFormat;
use svc_host::files::home_path::HomePath;
use svc_host::files::restore_entry::{self, RestoreRequest};
use svc_host::files::status::FilesStatus;
use svc_host::system::activity;
use svc_host::system::blocking::run_blocking;
use svc_host::system::layout::Layout;
use svc_http::idempotency;
use svc_http::openapi::{
    Content, DocumentedResponse, Operation, Parameter, ParameterLocation, boolean, nullable, object,
    request_object, schema_of, string_enum, text, time,
};
use svc_http::problem::{Code, Problem};
use svc_wire::files::{
    DEFAULT_ENTRIES, DEFAULT_VERSIONS, FileBackupStatus, FileListing, FileRestore, FileRestoreAccepted,
    FileRestoreResponse, FileVersions, MAX_ENTRIES, MAX_PATH_CHARS, MAX_VERSIONS,
};

/// `Retry-After`, in seconds, while the key is unavailable, which requires operator action.
const RETRY_AFTER_SECONDS: u64 = 60;

/// `GET /api/files/status`
pub async fn show_status(State(layout): State<Layout>) -> Result<Response, Problem> {
    let status = run_blocking(move || {
        let status = FilesStatus::read(&layout)?.unwrap_or_default();
        Ok::<_, FileError>(status.to_report(&FileChecks::read(&layout)?))
    });
    Ok(Json(status.await?).into_response())
}

/// `GET /api/files/key`
pub async fn show_key(State(layout): State<Layout>) -> Result<Response, Problem> {
    let read = run_blocking(move || Ok::<_, Infallible>(read_key(&layout)));
    let ResticAccess { repository, password } = read.await??;
    let body = json!({ "repository": repository, "password": password.expose_secret() });
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(body)).into_response())
}

fn read_key(layout: &Layout) -> Result<ResticAccess, Problem> {
    let unavailable = |detail| Problem::new(Code::Unavailable, detail).retry_after(RETRY_AFTER_SECONDS);
    let access = ResticAccess::read(layout).map_err(|failure| {
        tracing::error!(error = ?failure.error, "cannot read the file-backup key");
        unavailable("The key of the file backup cannot be read; see the machine's log.")
    })?;
    let access = access.ok_or_else(|| Problem::new(Code::NotFound, "No files have been saved yet."))?;
    // Never reveal the key without an activity log entry.
    activity::append(layout, "the file-backup key was shown").map_err(|error| {
        tracing::error!(error = %format_chain(&error), "cannot record access to the file-backup key");
        unavailable("The request cannot be recorded in activity.log; see the machine's log.")
    })?;
    Ok(access)
}

/// `GET /api/files/versions` and `GET /api/files/at`
pub async fn forward(State(upstreams): State<Arc<Upstreams>>, request: Request) -> Response {
    proxy_to_history(&upstreams, request).await
}

/// `GET /api/files/download`
pub async fn download(State(upstreams): State<Arc<Upstreams>>, request: Request) -> Response {
    proxy_download(&upstreams, request).await
}

/// `GET /api/files/restore`
pub async fn show_restore(State(layout): State<Layout>) -> Result<Response, Problem> {
    let restore = run_blocking(move || restore_entry::read_current_state(&layout)).await?;
    Ok(Json(FileRestoreResponse { restore }).into_response())
}

/// `POST /api/files/restore`: requests a file or directory restore.
pub async fn restore(
    State(layout): State<Layout>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let mut fields = body::read_fields(&headers, body, DEFAULT_MAX_BODY_BYTES).await?;
    let path: Option<HomePath> = fields.required("path");
    let time = fields.optional_time("time");
    let into: Option<HomePath> = fields.optional("into");
    let replace = fields.boolean("replace").unwrap_or(false);
    let target = into.as_ref().or(path.as_ref());
    if target.is_some_and(HomePath::is_reserved) {
        let name = if into.is_some() { "into" } else { "path" };
        let detail = "overlaps a directory that is reserved for the machine; restore to another path";
        fields.add_error(name, detail);
    }
    let path = fields.finish(path)?;
    let into = into.map(|into| into.to_string());
    let mut request = RestoreRequest::new(path.to_string(), time, into, replace);
    if let Some(key) = idempotency::read_key(&headers)? {
        request = request.with_idempotency_key(key);
        let layout = layout.clone();
        let current = run_blocking(move || restore_entry::read_current_state(&layout)).await?;
        if let Some(earlier) = current.filter(|current| request.has_same_idempotency_key(&current.request_id))
        {
            return respond_to_retry(&request, earlier);
        }
    }
    let accepted = FileRestoreAccepted {
        request_id: request.request_id.clone(),
        requested_at: request.requested_at.into(),
    };
    if !run_blocking(move || request.submit(&layout)).await? {
        let detail = "Another restore is in progress; wait until it has ended.";
        return Err(Problem::new(Code::InvalidState, detail));
    }
    Ok((StatusCode::ACCEPTED, Json(accepted)).into_response())
}

/// Responds to a request that reuses the idempotency key of the pending or last restore, returning that restore instead
/// of starting another.
///
/// # Errors
/// 422 if the two requests differ.
fn respond_to_retry(request: &RestoreRequest, earlier: FileRestore) -> Result<Response, Problem> {
    if earlier.request_id != request.request_id {
        let detail = "This Idempotency-Key was used for a different request.";
        return Err(Problem::new(Code::IdempotencyMismatch, detail));
    }
    let accepted = FileRestoreAccepted { request_id: earlier.request_id, requested_at: earlier.requested_at };
    Ok((StatusCode::ACCEPTED, Json(accepted)).into_response())
}

fn path_schema() -> Value {
    json!({ "type": "string", "maxLength": MAX_PATH_CHARS, "pattern": HomePath::PATTERN })
}

const PATH: Parameter = Parameter {
    name: "path",
    location: ParameterLocation::RequiredQuery,
    schema: path_schema,
    description: "A path below `/home/svc`; a relative path is below `/home/svc/home`.",
};
const TIME: Parameter = Parameter::query(
    "time",
    time,
    "The last snapshot at or before this time is used; by default, the last one.",
);

pub static STATUS: Endpoint = Endpoint {
    operation: Operation {
        id: "showFileBackup",
        method: Method::GET,
        path: "/api/files/status",
        summary: "What the file backup has saved, what it leaves out, and what its checks have found.",
        credentials: READERS_AND_PLATFORM,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The state.", schema_of::<FileBackupStatus>)],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static KEY: Endpoint = Endpoint {
    operation: Operation {
        id: "showFileBackupKey",
        method: Method::GET,
        path: "/api/files/key",
        summary: "The location and the password of the file backup, for `restic`. The password decrypts all files.",
        credentials: OWNER_OR_ADMIN,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The location and the password.", || {
            object(&[("repository", text()), ("password", text())], &[])
        })],
        problems: &[Code::Forbidden, Code::NotFound, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

const READ_PROBLEMS: &[Code] =
    &[Code::Forbidden, Code::NotFound, Code::Conflict, Code::StoreUnavailable, Code::Unavailable];

pub static VERSIONS: Endpoint = Endpoint {
    operation: Operation {
        id: "listFileVersions",
        method: Method::GET,
        path: "/api/files/versions",
        summary: "The saved versions of a file or directory, newest first.",
        credentials: READERS_AND_PLATFORM,
        parameters: &[
            PATH,
            Parameter::query(
                "before",
                time,
                "Returns only versions before this time. To continue, pass the previous page's `nextBefore`.",
            ),
            Parameter::query(
                "limit",
                || json!({ "type": "integer", "minimum": 1, "maximum": MAX_VERSIONS, "default": DEFAULT_VERSIONS }),
                "Maximum number of versions.",
            ),
        ],
        body: None,
        responses: &[documented_json(200, "A page.", schema_of::<FileVersions>)],
        problems: READ_PROBLEMS,
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static LIST: Endpoint = Endpoint {
    operation: Operation {
        id: "listFilesAt",
        method: Method::GET,
        path: "/api/files/at",
        summary: "A file or directory as it was saved, and the directory's entries.",
        credentials: READERS_AND_PLATFORM,
        parameters: &[
            Parameter::query(
                "path",
                path_schema,
                "A path below `/home/svc`; a relative path is below `/home/svc/home`, which is the default.",
            ),
            TIME,
            Parameter::query(
                "cursor",
                || json!({ "type": "integer", "minimum": 0, "default": 0 }),
                "The `nextCursor` of the previous page.",
            ),
            Parameter::query(
                "limit",
                || json!({ "type": "integer", "minimum": 1, "maximum": MAX_ENTRIES, "default": DEFAULT_ENTRIES }),
                "Maximum number of entries.",
            ),
        ],
        body: None,
        responses: &[documented_json(200, "The entry.", schema_of::<FileListing>)],
        problems: READ_PROBLEMS,
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static DOWNLOAD: Endpoint = Endpoint {
    operation: Operation {
        id: "downloadFile",
        method: Method::GET,
        path: "/api/files/download",
        summary: "The content of a file as it was saved, or an archive of a file or directory.",
        credentials: READERS,
        parameters: &[
            PATH,
            TIME,
            Parameter::query(
                "format",
                || string_enum(DownloadFormat::VARIANTS),
                "`raw`: a file's content, the default for a file; `tar`: the default for a directory; or `zip`.",
            ),
        ],
        body: None,
        responses: &[DocumentedResponse {
            status: 200,
            description: "The content. If the connection ends early, the content is incomplete.",
            content: Content::Other("application/octet-stream"),
        }],
        problems: READ_PROBLEMS,
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static SHOW_RESTORE: Endpoint = Endpoint {
    operation: Operation {
        id: "showFileRestore",
        method: Method::GET,
        path: "/api/files/restore",
        summary: "The pending or last restore of a file or directory.",
        credentials: READERS_AND_PLATFORM,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The restore; `null` if there was none.", || {
            object(&[("restore", nullable(schema_of::<FileRestore>()))], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static RESTORE: Endpoint = Endpoint {
    operation: Operation {
        id: "restoreFile",
        method: Method::POST,
        path: "/api/files/restore",
        summary: "Restores a file or directory to its original path or, if that path exists, next to it under a \
                  different name; with `into`, to another path; with `replace`, in place of the existing entry, which \
                  is saved first and kept under another name.",
        credentials: READERS_AND_PLATFORM,
        parameters: &[Parameter {
            name: idempotency::HEADER,
            location: ParameterLocation::Header,
            schema: idempotency::key_schema,
            description: "A request with the key of the pending or last restore does not start another restore.",
        }],
        body: Some(|| {
            request_object(
                &[("path", path_schema())],
                &[("time", time()), ("into", path_schema()), ("replace", boolean())],
            )
        }),
        responses: &[documented_json(202, "The request is accepted.", schema_of::<FileRestoreAccepted>)],
        problems: &[Code::Forbidden, Code::Unavailable, Code::InvalidState, Code::IdempotencyMismatch],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

//! Declares the routes `/vps/:id/files/…`.

use axum::routing::{get, post};
use http::Method;
use serde_json::json;

use super::super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, documented_json,
};
use super::{list, list_versions, restore, show_restore, show_status};
use svc_http::openapi::{
    Operation, Parameter, ParameterLocation, boolean, nullable, object, request_object, schema_of,
    text_up_to, time,
};
use svc_http::problem::Code;
use svc_wire::files::{
    DEFAULT_ENTRIES, DEFAULT_VERSIONS, FileBackupStatus, FileListing, FileRestore, FileRestoreAccepted,
    FileVersions, MAX_ENTRIES, MAX_PATH_CHARS, MAX_VERSIONS,
};

const PROBLEMS: &[Code] = &[
    Code::MachineNotFound,
    Code::InvalidState,
    Code::NotFound,
    Code::HostUnreachable,
    Code::HostRefused,
    Code::HostResponseInvalid,
    Code::Unavailable,
    Code::DatabaseUnavailable,
];

/// [`PROBLEMS`] without `not_found`, because the state of a file backup always exists.
const STATUS_PROBLEMS: &[Code] = &[
    Code::MachineNotFound,
    Code::InvalidState,
    Code::HostUnreachable,
    Code::HostRefused,
    Code::HostResponseInvalid,
    Code::Unavailable,
    Code::DatabaseUnavailable,
];

const PATH_DESCRIPTION: &str = "A path below `/home/svc`; a relative path is below `/home/svc/home`.";

pub static STATUS: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "showFileBackup",
        method: Method::GET,
        path: "/vps/{id}/files/status",
        summary: "Shows what a machine's file backup has saved, what it excludes, and what its checks have found. Each read is \
                  audited.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID],
        body: None,
        responses: &[documented_json(200, "The state.", schema_of::<FileBackupStatus>)],
        problems: STATUS_PROBLEMS,
    },
    serve: || get(show_status),
};

pub static VERSIONS: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "listFileVersions",
        method: Method::GET,
        path: "/vps/{id}/files/versions",
        summary: "Lists the saved versions of a file or directory, newest first. Each read is audited.",
        credentials: &[OPERATOR],
        parameters: &[
            MACHINE_ID,
            Parameter {
                name: "path",
                location: ParameterLocation::RequiredQuery,
                schema: || text_up_to(MAX_PATH_CHARS),
                description: PATH_DESCRIPTION,
            },
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
        problems: PROBLEMS,
    },
    serve: || get(list_versions),
};

pub static LIST: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "listFilesAt",
        method: Method::GET,
        path: "/vps/{id}/files/at",
        summary: "Shows a file or directory as it was saved; for a directory, also its entries. Each read is audited.",
        credentials: &[OPERATOR],
        parameters: &[
            MACHINE_ID,
            Parameter::query("path", || text_up_to(MAX_PATH_CHARS), PATH_DESCRIPTION),
            Parameter::query(
                "time",
                time,
                "The last snapshot at or before this time is used; by default, the last one.",
            ),
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
        problems: PROBLEMS,
    },
    serve: || get(list),
};

pub static SHOW_RESTORE: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "showFileRestore",
        method: Method::GET,
        path: "/vps/{id}/files/restore",
        summary: "Shows the pending or last restore of a file or directory.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID],
        body: None,
        responses: &[documented_json(200, "The restore; `null` if there was none.", || {
            object(&[("restore", nullable(schema_of::<FileRestore>()))], &[])
        })],
        problems: PROBLEMS,
    },
    serve: || get(show_restore),
};

pub static RESTORE: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "restoreFile",
        method: Method::POST,
        path: "/vps/{id}/files/restore",
        summary: "Requests that a machine restore a file or directory to an earlier version. Nothing is deleted: a replaced \
                  file or directory is kept under another name.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| {
            let path = || text_up_to(MAX_PATH_CHARS);
            request_object(&[("path", path())], &[("time", time()), ("into", path()), ("replace", boolean())])
        }),
        responses: &[documented_json(
            202,
            "The host has accepted the request.",
            schema_of::<FileRestoreAccepted>,
        )],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::NotFound,
            Code::HostUnreachable,
            Code::HostRefused,
            Code::HostResponseInvalid,
            Code::Unavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(restore),
};

//! GET and HEAD `/system-bundles/<version>/…`: streams published bundles from the object store, with support for range
//! requests.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::get;
use http::Method;

use super::call::ApiCall;
use super::endpoint::{Access, Endpoint, HOST, OPERATOR, READ};
use super::object;
use crate::context::Platform;
use svc_http::openapi::{Operation, Parameter, ParameterLocation, string_enum, text};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::name::ImageVersion;
use svc_store::key::{self, BUNDLE_FILE};

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams((version, file)): PathParams<(String, String)>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator_or_host(&platform).await?;
    let suffix = file.strip_prefix(BUNDLE_FILE).filter(|s| ["", ".sha256", ".json", ".json.sig"].contains(s));
    let suffix =
        suffix.ok_or_else(|| Problem::new(Code::NotFound, "A bundle has no file with this name."))?;
    let not_found = || {
        Problem::new(Code::BundleNotFound, format!("Version {version} has no published file with this name."))
    };
    let image_version: ImageVersion = version.parse().map_err(|_| not_found())?;
    let media_type = match suffix {
        "" => "application/gzip",
        ".sha256" => "text/plain; charset=utf-8",
        ".json" => "application/json",
        _ => "application/octet-stream",
    };
    object::serve(&platform.bucket, &key::bundle(&image_version, suffix), media_type, &call, not_found).await
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::OperatorOrHost(READ),
    operation: Operation {
        id: "getBundle",
        method: Method::GET,
        path: "/system-bundles/{version}/{file}",
        summary: "Serves a file of a published host bundle. Supports Range, If-Range and If-None-Match (RFC 9110).",
        credentials: &[OPERATOR, HOST],
        parameters: &[VERSION, FILE],
        body: None,
        responses: &object::RESPONSES,
        problems: &[
            Code::Superseded,
            Code::NotFound,
            Code::BundleNotFound,
            Code::RangeNotSatisfiable,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || get(handle),
};

const VERSION: Parameter = Parameter {
    name: "version",
    location: ParameterLocation::Path,
    schema: text,
    description: "The image version.",
};
const FILE: Parameter = Parameter {
    name: "file",
    location: ParameterLocation::Path,
    schema: || {
        string_enum(
            &["", ".sha256", ".json", ".json.sig"]
                .map(|suffix| format!("{BUNDLE_FILE}{suffix}"))
                .each_ref()
                .map(String::as_str),
        )
    },
    description: "The archive, its checksum, its manifest or the manifest's signature.",
};

//! GET `/metrics`: returns this process's metrics and the installation's state from the database, for Prometheus.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{Method, header};

use super::call::ApiCall;
use super::endpoint::{Access, Endpoint, METRICS, OPERATOR};
use crate::context::Platform;
use crate::fleet_metrics;
use svc_base::metrics::{MEDIA_TYPE, MetricsHandle};
use svc_http::openapi::{Content, DocumentedResponse, Operation};
use svc_http::problem::{Code, Problem};

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Extension(metrics): Extension<MetricsHandle>,
    request: Request,
) -> Result<Response, Problem> {
    ApiCall::read(request).await?.authenticate_operator(&platform).await?;
    fleet_metrics::collect(&platform).await;
    Ok(([(header::CONTENT_TYPE, MEDIA_TYPE)], metrics.render()).into_response())
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(METRICS),
    operation: Operation {
        id: "metrics",
        method: Method::GET,
        path: "/metrics",
        summary: "Returns the metrics of this process and the state of the installation, in the Prometheus text format.",
        credentials: &[OPERATOR],
        parameters: &[],
        body: None,
        responses: &[DocumentedResponse {
            status: 200,
            description: "All series.",
            content: Content::Other("text/plain"),
        }],
        problems: &[Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

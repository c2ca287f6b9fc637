//! Authentication middleware: resolves the principal of each request once.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use jiff::Timestamp;

use super::apps::Registry;
use super::auth::{Denied, Identified, Ingress, Principal, PrincipalResolver};
use super::proxy::{self, Upstreams};
use svc_http::proof::Route;

/// Resolves the principal and stores the outcome for [`admit`](super::auth::admit). A request to the code host is
/// proxied regardless of its path.
pub async fn identify(
    State(resolver): State<Arc<PrincipalResolver>>,
    State(apps): State<Arc<Registry>>,
    State(upstreams): State<Arc<Upstreams>>,
    Extension(ingress): Extension<Ingress>,
    request: Request,
    next: Next,
) -> Response {
    let (head, body) = request.into_parts();
    let outcome = resolver.resolve(&head, ingress, Timestamp::now()).await;
    let outcome = outcome.and_then(|identified| require_installed_app(&apps, identified));
    let mut request = Request::from_parts(head, body);
    if let Ok(Identified { route: Some(Route::Code), .. }) = outcome {
        return proxy::proxy_to_code(&upstreams, request).await;
    }
    request.extensions_mut().insert(outcome);
    next.run(request).await
}

/// An app's token can outlive the app by up to an hour; its permissions must not.
fn require_installed_app(apps: &Registry, identified: Identified) -> Result<Identified, Denied> {
    let Principal::App { slug } = &identified.principal else { return Ok(identified) };
    let snapshot = apps.snapshot();
    match () {
        () if snapshot.is_installed(slug) => Ok(identified),
        () if snapshot.is_scanned => Err(Denied::AppNotInstalled),
        () => Err(Denied::AppsNotLoaded),
    }
}

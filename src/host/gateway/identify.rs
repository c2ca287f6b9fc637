//! Authentication middleware: resolves the principal of each request once.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use jiff::Timestamp;

use super::apps::Registry;
use super::auth::{AuthFailure, Authentication, Ingress, Principal, PrincipalResolver};
use super::proxy::{self, Upstreams};
use svc_http::proof::Route;

/// Resolves the principal and stores the outcome for [`admit`](super::auth::admit). A request whose proof is for the
/// code host is proxied to code-server, regardless of its path.
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
    let outcome = outcome.and_then(|authentication| require_installed_app(&apps, authentication));
    let mut request = Request::from_parts(head, body);
    if let Ok(Authentication { route: Some(Route::Code), .. }) = outcome {
        return proxy::proxy_to_code(&upstreams, request).await;
    }
    request.extensions_mut().insert(outcome);
    next.run(request).await
}

/// Rejects the token of a removed app: the token stays valid for up to an hour, but must no longer grant access.
fn require_installed_app(
    apps: &Registry,
    authentication: Authentication,
) -> Result<Authentication, AuthFailure> {
    let Principal::App { slug } = &authentication.principal else { return Ok(authentication) };
    let snapshot = apps.snapshot();
    match () {
        () if snapshot.is_installed(slug) => Ok(authentication),
        () if snapshot.is_scanned => Err(AuthFailure::AppNotInstalled),
        () => Err(AuthFailure::AppsNotLoaded),
    }
}

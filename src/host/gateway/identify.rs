//! Identifies the caller of a request.

use http::request::Parts;
use jiff::Timestamp;

use super::apps::Registry;
use super::auth::{AuthFailure, Authentication, Ingress, Principal, PrincipalResolver};

/// Resolves a request's principal.
///
/// # Errors
/// See [`AuthFailure`].
pub async fn identify(
    resolver: &PrincipalResolver,
    apps: &Registry,
    head: &Parts,
    ingress: Ingress,
) -> Result<Authentication, AuthFailure> {
    let authentication = resolver.resolve(head, ingress, Timestamp::now()).await?;
    require_installed_app(apps, authentication)
}

/// Rejects requests from removed apps. Their tokens stay valid for up to an hour but must no longer grant access.
fn require_installed_app(
    apps: &Registry,
    authentication: Authentication,
) -> Result<Authentication, AuthFailure> {
    let Principal::App { slug } = &authentication.principal else { return Ok(authentication) };
    let snapshot = apps.snapshot();
    if snapshot.is_installed(slug) {
        Ok(authentication)
    } else if snapshot.is_scanned {
        Err(AuthFailure::AppNotInstalled)
    } else {
        Err(AuthFailure::AppsNotLoaded)
    }
}

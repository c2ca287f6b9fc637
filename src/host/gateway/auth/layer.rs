//! The seam as middleware: every request is resolved once, and a route says whom it lets in.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;

use super::{Denied, Identified, Ingress, Principal};
use crate::host::gateway::proxy;
use crate::host::gateway::state::Gateway;
use crate::http::problem::{Code, Problem};
use crate::http::proof::Route;

/// Who asks, for handlers behind one of the `require_…` layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller(pub Principal);

/// Resolves the principal and keeps the outcome for the route to judge. What came for the code host goes there whole,
/// whatever its path.
pub async fn identify(
    State(gateway): State<Arc<Gateway>>,
    Extension(ingress): Extension<Ingress>,
    request: Request,
    next: Next,
) -> Response {
    let (head, body) = request.into_parts();
    let outcome = gateway.seam.resolve(&head, ingress, Timestamp::now()).await;
    let mut request = Request::from_parts(head, body);
    if let Ok(Identified { route: Some(Route::Code), .. }) = outcome {
        return proxy::to_code(&gateway, request).await;
    }
    request.extensions_mut().insert(outcome);
    next.run(request).await
}

/// Lets in anybody with a principal, save the platform, whose proofs are for internal routes alone.
pub async fn require_caller(request: Request, next: Next) -> Response {
    admit(request, next, |principal| *principal != Principal::Platform).await
}

/// Lets in the owner and the admin.
pub async fn require_owner(request: Request, next: Next) -> Response {
    admit(request, next, |principal| matches!(principal, Principal::Owner { .. } | Principal::Admin)).await
}

/// Lets in the platform alone.
pub async fn require_platform(request: Request, next: Next) -> Response {
    admit(request, next, |principal| *principal == Principal::Platform).await
}

async fn admit(mut request: Request, next: Next, allowed: impl FnOnce(&Principal) -> bool) -> Response {
    let outcome = request.extensions().get::<Result<Identified, Denied>>().cloned();
    match outcome.unwrap_or(Err(Denied::Missing)) {
        Ok(identified) if allowed(&identified.principal) => {
            request.extensions_mut().insert(Caller(identified.principal));
            next.run(request).await
        }
        Ok(_) => Problem::new(Code::Forbidden, "This credential is not for this route.").into_response(),
        Err(denied) => denied.into_response(),
    }
}

impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        let problem = match self {
            Self::Missing | Self::Bad | Self::Used => {
                Problem::new(Code::Unauthorized, "A valid proof or token is needed.")
            }
            Self::AnotherUser => Problem::new(Code::Forbidden, "This machine belongs to another user."),
            Self::AnotherRequest => Problem::new(Code::Forbidden, "The proof is for another request."),
            Self::Busy => Problem::new(Code::Unavailable, "Too many internal calls at once.").retry_after(30),
            Self::Unverifiable => {
                Problem::new(Code::Unavailable, "The token cannot be checked now.").retry_after(5)
            }
        };
        problem.into_response()
    }
}

//! The seam as middleware: every request is resolved once, and a route says whom it lets in.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;

use super::{Denied, Identified, Ingress, Principal};
use crate::host::gateway::state::Gateway;
use crate::host::gateway::{body, proxy};
use crate::http::openapi::Credential;
use crate::http::problem::{Code, Problem};
use crate::http::proof::Route;

/// Who asks, for handlers behind [`admit`].
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
    let outcome = outcome.and_then(|identified| of_installed_app(&gateway, identified));
    let mut request = Request::from_parts(head, body);
    if let Ok(Identified { route: Some(Route::Code), .. }) = outcome {
        return proxy::to_code(&gateway, request).await;
    }
    request.extensions_mut().insert(outcome);
    next.run(request).await
}

/// An app's token outlives the app by up to an hour; its rights do not.
fn of_installed_app(gateway: &Gateway, identified: Identified) -> Result<Identified, Denied> {
    let Principal::App { slug } = &identified.principal else { return Ok(identified) };
    let known = gateway.apps.known();
    match () {
        () if known.is_installed(slug) => Ok(identified),
        () if known.scanned => Err(Denied::NoSuchApp),
        () => Err(Denied::AppsUnknown),
    }
}

/// Lets in the principals of these credentials.
pub async fn admit(credentials: &[Credential], mut request: Request, next: Next) -> Response {
    let outcome = request.extensions().get::<Result<Identified, Denied>>().cloned();
    let refusal = match outcome.unwrap_or(Err(Denied::Missing)) {
        Ok(identified) if credentials.contains(&identified.principal.credential()) => {
            request.extensions_mut().insert(Caller(identified.principal));
            return next.run(request).await;
        }
        Ok(identified) => {
            let (given, wanted) = (identified.principal.credential().name, names(credentials));
            let detail = format!("This credential is the {given}'s; this route takes that of {wanted}.");
            Problem::new(Code::Forbidden, detail).into_response()
        }
        Err(denied) => denied.into_response(),
    };
    // A client that is still writing would not read the refusal.
    body::hear_out(request.into_body()).await;
    refusal
}

fn names(credentials: &[Credential]) -> String {
    credentials.iter().map(|one| one.name).collect::<Vec<_>>().join(" or ")
}

impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        let problem = match self {
            Self::Missing | Self::Bad | Self::Used => {
                Problem::new(Code::Unauthorized, "A valid proof or token is needed.")
            }
            Self::AnotherUser => Problem::new(Code::Forbidden, "This machine belongs to another user."),
            Self::Stranger => {
                Problem::new(Code::Forbidden, "This socket is for root and the machine's own two users.")
            }
            Self::AgentWithoutToken => {
                let detail = "An agent needs its token: name its apps in system/config.json, and it gets \
                              SVC_BRIDGE_SOCKET and SVC_BRIDGE_TOKEN.";
                Problem::new(Code::Unauthorized, detail)
            }
            Self::NoSuchApp => {
                Problem::new(Code::Forbidden, "This app is not installed: it has no folder among the apps.")
            }
            Self::AppsUnknown => {
                Problem::new(Code::Unavailable, "The apps are not known yet.").retry_after(1)
            }
            Self::AnotherRequest => Problem::new(Code::Forbidden, "The proof is for another request."),
            Self::Busy => Problem::new(Code::Unavailable, "Too many internal calls at once.").retry_after(30),
            Self::Unverifiable => {
                Problem::new(Code::Unavailable, "The token cannot be checked now.").retry_after(5)
            }
        };
        problem.into_response()
    }
}

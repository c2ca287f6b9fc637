//! Admits a request if its credential is one that its route accepts.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{AuthFailure, Authentication, Principal};
use crate::body;
use svc_http::openapi::Credential;
use svc_http::problem::{Code, Problem};

/// The authenticated principal, for handlers behind [`admit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller(pub Principal);

/// Admits a request whose principal has one of these credentials.
pub async fn admit(credentials: &[Credential], mut request: Request, next: Next) -> Response {
    let outcome = request.extensions().get::<Result<Authentication, AuthFailure>>().cloned();
    let refusal = match outcome.unwrap_or(Err(AuthFailure::Missing)) {
        Ok(authentication) if credentials.contains(&authentication.principal.credential()) => {
            request.extensions_mut().insert(Caller(authentication.principal));
            return next.run(request).await;
        }
        Ok(authentication) => {
            let (credential, accepted) =
                (authentication.principal.credential().name, join_names(credentials));
            let detail =
                format!("This route does not accept the credential `{credential}`; it requires {accepted}.");
            Problem::new(Code::Forbidden, detail).into_response()
        }
        Err(failure) => failure.into_response(),
    };
    // Drain the body: otherwise, a client that is still sending may not receive the response.
    body::LIMITS.drain(request.into_body()).await;
    refusal
}

fn join_names(credentials: &[Credential]) -> String {
    credentials.iter().map(|credential| format!("`{}`", credential.name)).collect::<Vec<_>>().join(" or ")
}

impl IntoResponse for AuthFailure {
    fn into_response(self) -> Response {
        let problem = match self {
            Self::Missing | Self::InvalidCredential | Self::Replayed => {
                Problem::new(Code::Unauthorized, "A valid proof or token is required.")
            }
            Self::WrongUser => Problem::new(Code::Forbidden, "This machine belongs to another user."),
            Self::UntrustedPeer => Problem::new(
                Code::Forbidden,
                "This socket accepts only processes that run as root, the gateway's user or the owner's user.",
            ),
            Self::AgentWithoutToken => {
                let detail = "An agent must send its token. If it has none, list its apps in system/config.json; its next \
                              dispatch then receives SVC_BRIDGE_SOCKET and SVC_BRIDGE_TOKEN.";
                Problem::new(Code::Unauthorized, detail)
            }
            Self::AppNotInstalled => Problem::new(
                Code::Forbidden,
                "This app is not installed: the apps directory has no directory for it.",
            ),
            Self::AppsNotLoaded => {
                Problem::new(Code::Unavailable, "The apps are not loaded yet.").retry_after(1)
            }
            Self::RequestMismatch => Problem::new(Code::Forbidden, "The proof is for a different request."),
            Self::ReplayCacheFull => {
                let detail = "Too many internal requests in a short time: try again later.";
                Problem::new(Code::Unavailable, detail).retry_after(30)
            }
            Self::KeysUnavailable => Problem::new(
                Code::Unavailable,
                "The issuer's keys are unavailable; the token cannot be verified.",
            )
            .retry_after(5),
        };
        problem.into_response()
    }
}

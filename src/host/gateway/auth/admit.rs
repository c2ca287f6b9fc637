//! Admits requests whose credential the route accepts.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};

use super::{AuthFailure, Authentication, Principal};
use svc_http::openapi::Credential;
use svc_http::problem::{Code, Problem};

/// The authenticated principal, for handlers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller(pub Arc<Principal>);

/// Admits a principal with one of these credentials.
///
/// # Errors
/// The response to a request without such a credential.
#[expect(clippy::result_large_err, reason = "the error is returned to the client at once")]
pub fn admit(
    credentials: &[Credential],
    outcome: Result<Authentication, AuthFailure>,
) -> Result<Caller, Response> {
    let principal = outcome.map_err(IntoResponse::into_response)?.principal;
    let credential = principal.credential();
    if credentials.contains(&credential) {
        return Ok(Caller(Arc::new(principal)));
    }
    let accepted = join_names(credentials);
    let detail =
        format!("This route does not accept the credential `{}`; it requires {accepted}.", credential.name);
    Err(Problem::new(Code::Forbidden, detail).into_response())
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

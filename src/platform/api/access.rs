//! Authenticates operators, and checks the access rules that the control API's routes declare.
//!
//! Invariants: a route declares its access rule next to its handler, and a route whose rule does not admit operators
//! rejects them. Named operators' tokens are looked up on every request, so that a revocation takes effect immediately
//! in every process.

use std::time::Duration;

use http::Method;
use serde_json::json;

use crate::context::Platform;
use crate::db;
use crate::db::operators::{TokenRow, TokenState};
use crate::operators::Operator;
use crate::tokens;
use svc_http::problem::{Code, Problem, format_chain};
use svc_wire::operator::Scope;

/// Minimum interval between updates of `last_used_at`, so that most requests write nothing.
const LAST_USED_INTERVAL: Duration = Duration::from_secs(300);

/// The callers that a route accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Anyone, without a token: the health routes and the API's description.
    Open,
    /// A machine's host, with one of the machine's own tokens.
    Machine,
    /// An operator with one of these scopes.
    Operator(&'static [Scope]),
    /// An operator with one of these scopes, or the host of a slot's current machine.
    OperatorOrHost(&'static [Scope]),
}

impl Access {
    /// Returns the accepted scopes, of which an operator needs at least one; `None` if the route rejects operators.
    pub fn scopes(self) -> Option<&'static [Scope]> {
        match self {
            Self::Operator(scopes) | Self::OperatorOrHost(scopes) => Some(scopes),
            Self::Open | Self::Machine => None,
        }
    }
}

/// Authenticates an operator and checks that they may call a route with this access rule.
///
/// # Errors
/// `unauthorized` if the token is unknown, expired or revoked, or if the route accepts no operators; `rate_limited` if
/// the operator sends too many requests; `forbidden` if the operator has none of the scopes; `database_unavailable` if
/// the token cannot be looked up.
pub async fn authorize(
    platform: &Platform,
    access: Access,
    method: &Method,
    token: &str,
) -> Result<Operator, Problem> {
    let Some(scopes) = access.scopes() else {
        tracing::error!(
            "the handler authenticates operators, but the route's access rule does not admit them"
        );
        return Err(unauthorized());
    };
    let operator = authenticate(platform, method, token).await.inspect_err(|problem| {
        if problem.code == Code::Unauthorized {
            platform.rate_limits.forget_accepted(token);
        }
    })?;
    platform.rate_limits.record_accepted(token);
    platform.rate_limits.admit_operator(&operator)?;
    if operator.scopes().has_any(scopes) {
        return Ok(operator);
    }
    Err(missing_scope(&operator, scopes))
}

async fn authenticate(platform: &Platform, method: &Method, token: &str) -> Result<Operator, Problem> {
    if tokens::is_same_secret(token, &platform.config.secret) {
        return Ok(Operator::PlatformSecret);
    }
    let id = tokens::parse_operator_token_id(token).ok_or_else(unauthorized)?;
    let pool = if method.is_safe() { &platform.report_db } else { &platform.db };
    let session = pool.session().await?;
    let row =
        db::operators::find_by_token(&session, id, LAST_USED_INTERVAL).await?.ok_or_else(unauthorized)?;
    if !tokens::matches_hash(token, &row.token_hash) {
        return Err(unauthorized());
    }
    let TokenRow { name, scopes, state, should_record_use, .. } = row;
    match state {
        TokenState::Valid => {}
        TokenState::Expired => {
            let detail = format!(
                "This token of operator {name} has expired: use a newer one, or have an operator with the scope `admin` \
                 issue one with `svcctl operator rotate {name}`."
            );
            return Err(Problem::new(Code::Unauthorized, detail));
        }
        TokenState::Revoked => {
            let detail = format!(
                "Operator {name} has been revoked: ask an operator with the scope `admin` to add a new operator with \
                 `svcctl operator add`."
            );
            return Err(Problem::new(Code::Unauthorized, detail));
        }
    }
    if should_record_use && let Err(error) = db::operators::record_use(&session, id, LAST_USED_INTERVAL).await
    {
        tracing::warn!(operator = %name, error = %format_chain(&error), "cannot record the token's last use");
    }
    Ok(Operator::Named { name, scopes })
}

fn missing_scope(operator: &Operator, scopes: &[Scope]) -> Problem {
    let needed: Vec<_> = scopes.iter().map(|scope| scope.as_str()).collect();
    let detail = format!(
        "Operator {} lacks the scope {}, which this request requires; the operator's scopes are: {}.",
        operator.actor(),
        needed.join(" or "),
        operator.scopes().names().join(", ")
    );
    Problem::new(Code::Forbidden, detail).with("missingScopes", json!(needed))
}

pub fn unauthorized() -> Problem {
    Problem::new(Code::Unauthorized, "Send a valid bearer token.")
}

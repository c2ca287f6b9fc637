//! Authentication: resolves each request's [`Principal`] once.
//!
//! Requests with an invalid token are rejected, never downgraded to a weaker identity. The owner is determined by
//! provisioning, never by anything in the request.

mod admit;
mod credential;
mod keyring;
mod peer;
mod replay;
mod resolve;

pub use admit::{Caller, admit};
pub use credential::{
    AGENT, ALL_EXCEPT_PLATFORM, OWNER_OR_ADMIN, PLATFORM, READERS, READERS_AND_PLATFORM, VIEWERS,
};
pub use resolve::PrincipalResolver;

use std::sync::Arc;

use svc_http::proof::Route;
use svc_machine::name::IdpUserId;

/// The authenticated caller of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Principal {
    /// The machine's owner.
    Owner { sub: IdpUserId },
    /// A process of the owner's user on this machine, such as a terminal, without the owner's proof. May read, use the
    /// bridge and restore files, but not change limits or start dispatches, for example.
    OwnerProcess { sub: IdpUserId },
    /// An agent running for a dispatch. May use the bridge for these apps.
    Agent { dispatch: String, apps: Arc<[String]> },
    /// An app, by slug. May use its own tables and load its own pages.
    App { slug: String },
    /// The platform, on routes that accept [`PLATFORM`]: `/_svc/internal/…`, `/api/usage`, and most of `/api/files`.
    Platform,
    /// An operator with `ADMIN_TOKEN`.
    Admin,
}

/// The listener that received the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ingress {
    /// The TLS port: callers are identified by a proof or a token.
    Public,
    /// The Unix socket for the machine's own users, identified by peer credentials.
    Trusted,
    /// The Unix socket for agents: only agent tokens are accepted.
    Agents,
}

/// A request's principal, and the route of its proof, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authentication {
    pub principal: Principal,
    pub route: Option<Route>,
}

/// Errors from authenticating a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthFailure {
    #[error("no credential")]
    Missing,
    #[error("invalid credential")]
    InvalidCredential,
    #[error("credential belongs to another user")]
    WrongUser,
    #[error("user not allowed on this socket")]
    UntrustedPeer,
    #[error("missing agent token")]
    AgentWithoutToken,
    #[error("app not installed")]
    AppNotInstalled,
    #[error("apps not loaded yet")]
    AppsNotLoaded,
    #[error("proof is for a different request")]
    RequestMismatch,
    #[error("proof already used")]
    Replayed,
    #[error("too many recent internal requests")]
    ReplayCacheFull,
    #[error("the issuer's keys cannot be fetched")]
    KeysUnavailable,
}

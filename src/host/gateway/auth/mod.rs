//! Authentication: resolves the [`Principal`] of each request once.
//!
//! A request with an invalid token is rejected; it never falls back to a weaker identity. The owner is determined by
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
    /// A process of the owner's user on this machine, such as a terminal, without the owner's proof: it may read, use
    /// the bridge and restore files, but not, for example, change limits or start dispatches.
    OwnerProcess { sub: IdpUserId },
    /// An agent running for a dispatch: it may use the bridge for these apps.
    Agent { dispatch: String, apps: Arc<[String]> },
    /// An app, by its slug: it may use its own tables and load its own pages.
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
    /// The Unix socket of the machine's own users, who are identified by peer credentials.
    Trusted,
    /// The Unix socket for agents: accepts only an agent's token.
    Agents,
}

/// A request's principal, and its proof's route, if it has a proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authentication {
    pub principal: Principal,
    pub route: Option<Route>,
}

/// The reason that a request could not be authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthFailure {
    #[error("no credential")]
    Missing,
    #[error("the credential is not valid")]
    InvalidCredential,
    #[error("the credential is for another user")]
    WrongUser,
    #[error("processes of this user may not use the socket")]
    UntrustedPeer,
    #[error("an agent must present its token")]
    AgentWithoutToken,
    #[error("the app is not installed")]
    AppNotInstalled,
    #[error("the apps are not loaded yet")]
    AppsNotLoaded,
    #[error("the proof is for a different request")]
    RequestMismatch,
    #[error("the proof was used before")]
    Replayed,
    #[error("too many internal requests in a short time")]
    ReplayCacheFull,
    #[error("the issuer's keys cannot be fetched")]
    KeysUnavailable,
}

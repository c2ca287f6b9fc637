//! Who is asking: one seam, [`Principal`], resolved once for each request.
//!
//! A token that is present decides alone: a bad one is refused, and never falls through to a weaker identity. Nothing
//! a client can write (headers, query, cookies, body) names the owner; only provisioning does.

mod keyring;
mod layer;
mod peer;
mod replay;
mod resolve;

pub use layer::{Caller, admit, identify};
pub use resolve::Seam;

use std::sync::Arc;

use crate::http::proof::Route;
use crate::machine::name::IdpUserId;

/// In whose name a request acts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Principal {
    /// The machine's owner.
    Owner { sub: IdpUserId },
    /// A process of the owner's user on this machine, such as a terminal, without a proof that the owner asks: it reads, and
    /// uses the bridge, but changes no limit and starts no dispatch.
    OwnersProcess { sub: IdpUserId },
    /// An agent that runs for a dispatch: the bridge of these apps, nothing else.
    Agent { dispatch: String, apps: Arc<[String]> },
    /// One app, by its slug: its own bridge and pages, nothing else.
    App { slug: String },
    /// The platform itself, on `/_svc/internal/…` and, reading, on `/api/usage`.
    Platform,
    /// An operator on this machine, by `ADMIN_TOKEN`.
    Admin,
}

/// By which listener a request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ingress {
    /// The TLS port: a proof or JWT, or nothing.
    Public,
    /// The unix socket of the machine's own users; the kernel says which of them it is.
    Trusted,
    /// The unix socket for agents: the token of one, or nothing.
    Agents,
}

/// A resolved request: the principal, and the platform's route where a proof named one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identified {
    pub principal: Principal,
    pub route: Option<Route>,
}

/// Why a request has no principal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    #[error("no credential")]
    Missing,
    #[error("the credential is not valid")]
    Bad,
    #[error("the credential is for another user")]
    AnotherUser,
    #[error("a process of this user may not use the socket")]
    Stranger,
    #[error("an agent needs its token")]
    AgentWithoutToken,
    #[error("the app is not installed")]
    NoSuchApp,
    #[error("the apps are not known yet")]
    AppsUnknown,
    #[error("the proof is for another request")]
    AnotherRequest,
    #[error("the proof was used before")]
    Used,
    #[error("too many internal calls at once")]
    Busy,
    #[error("the issuer's keys cannot be fetched")]
    Unverifiable,
}

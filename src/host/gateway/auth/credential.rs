//! Credentials accepted by routes, as described in the OpenAPI document.

use super::Principal;
use svc_http::openapi::{Credential, CredentialScheme};

pub const OWNER: Credential = Credential {
    name: "owner",
    scheme: CredentialScheme::Bearer,
    description: "A JWT from the configured issuer for this machine's owner. Through the platform's router, a \
                  browser's session works as well: the router replaces it with its own proof, x-svc-proof.",
};
pub const OWNER_PROCESS: Credential = Credential {
    name: "ownersProcess",
    scheme: CredentialScheme::Bearer,
    description: "No token: a process of the owner's user, such as a terminal, on the machine's Unix socket.",
};
pub const AGENT: Credential = Credential {
    name: "agent",
    scheme: CredentialScheme::Bearer,
    description: "The token of a running agent (SVC_BRIDGE_TOKEN), on the agents' Unix socket (SVC_BRIDGE_SOCKET).",
};
pub const APP: Credential = Credential {
    name: "app",
    scheme: CredentialScheme::Bearer,
    description: "An app's token, through the platform's router, which replaces it with a proof.",
};
pub const ADMIN: Credential = Credential {
    name: "admin",
    scheme: CredentialScheme::Bearer,
    description: "The machine's ADMIN_TOKEN, together with a proof.",
};
pub const PLATFORM: Credential = Credential {
    name: "platform",
    scheme: CredentialScheme::Header("x-svc-proof"),
    description: "A proof that the platform signs for this request. It names the route `internal`, the request's \
                  method and path, and a single-use id.",
};

/// The owner and operators with `ADMIN_TOKEN`.
pub const OWNER_OR_ADMIN: &[Credential] = &[OWNER, ADMIN];
/// Callers allowed to read the owner's apps, files and records.
pub const READERS: &[Credential] = &[OWNER, OWNER_PROCESS, ADMIN];
/// [`READERS`], plus the platform on behalf of its operators. All of them may also restore files.
pub const READERS_AND_PLATFORM: &[Credential] = &[OWNER, OWNER_PROCESS, ADMIN, PLATFORM];
/// Callers allowed to load app pages.
pub const VIEWERS: &[Credential] = &[OWNER, OWNER_PROCESS, APP, ADMIN];
/// All callers except the platform.
pub const ALL_EXCEPT_PLATFORM: &[Credential] = &[OWNER, OWNER_PROCESS, AGENT, APP, ADMIN];

impl Principal {
    /// This principal's credential.
    pub fn credential(&self) -> Credential {
        match self {
            Self::Owner { .. } => OWNER,
            Self::OwnerProcess { .. } => OWNER_PROCESS,
            Self::Agent { .. } => AGENT,
            Self::App { .. } => APP,
            Self::Admin => ADMIN,
            Self::Platform => PLATFORM,
        }
    }
}

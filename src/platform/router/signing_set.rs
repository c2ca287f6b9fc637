//! The signing keys that one platform process uses at one time. The control plane loads and rotates them.

use std::sync::Arc;

use svc_http::proof::{ProofKeys, Signer};

/// One process's current view of the signing keys.
pub struct SigningSet {
    /// The oldest active proof key. It signs for hosts that have not acknowledged `next`, except hosts that have
    /// acknowledged only a retired key.
    pub current: Arc<Signer>,
    /// The newest active proof key, if there are several. It signs for hosts that have acknowledged it.
    pub next: Option<Arc<Signer>>,
    /// Retired proof keys, newest first. They sign for hosts that were unreachable during the rotation and have no
    /// other key.
    pub retired: Vec<Arc<Signer>>,
    /// The public keys of all active proof keys, which hosts receive.
    pub public: ProofKeys,
    pub app: AppKeys,
}

/// The keys that sign app tokens and session cookies. Only routers verify these, so the newest key signs as soon as
/// every router has had time to read it.
pub struct AppKeys {
    pub current: Arc<Signer>,
    /// The public keys of all active app keys.
    pub public: ProofKeys,
}

impl SigningSet {
    /// Returns the key that signs for a host: the newest of `next`, `current` and the retired keys that the host has
    /// acknowledged, or `current` if it has acknowledged none of them. Until its first heartbeat, a host has
    /// acknowledged none, but it received `current` in its user-data.
    pub fn signer_for(&self, acknowledged: &[String]) -> &Signer {
        let is_acknowledged = |signer: &&Arc<Signer>| acknowledged.iter().any(|kid| kid == signer.kid());
        let newest_first = self.next.iter().chain([&self.current]).chain(&self.retired);
        newest_first.into_iter().find(is_acknowledged).unwrap_or(&self.current)
    }
}

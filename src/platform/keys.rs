//! The keys that sign proofs, as one process sees them now.

use std::sync::Arc;

use crate::http::proof::{ProofKeys, Signer};

pub struct SigningSet {
    pub current: Arc<Signer>,
    /// Takes over where the host has acknowledged it.
    pub next: Option<Arc<Signer>>,
    pub public: ProofKeys,
}

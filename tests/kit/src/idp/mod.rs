//! An identity provider on loopback: discovery, JWKS, key rotation, and valid or flawed session tokens.
//!
//! ```no_run
//! # fn f() -> anyhow::Result<()> {
//! use kit::idp::{Flaw, Idp, MintOptions};
//! let idp = Idp::start()?;
//! let environment = idp.env(); // IDP_ISSUER, IDP_AUDIENCE, IDP_JWKS_URL
//! let session = idp.mint("user_1", &MintOptions::default());
//! let expired = idp.mint("user_1", &MintOptions { ttl_seconds: -60, ..MintOptions::default() });
//! let forged = idp.mint("user_1", &MintOptions { flaw: Some(Flaw::BadSignature), ..MintOptions::default() });
//! idp.rotate(kit::idp::OldKeys::Withdrawn)?; // tokens minted earlier no longer verify
//! # Ok(()) }
//! ```
//!
//! Over HTTP: `/.well-known/openid-configuration`, `/.well-known/jwks.json`, and `/mint?sub=…&ttl=…&aud=…&azp=…&alg=…`,
//! which returns a token as text.

mod http;
mod keys;
mod mint;

pub use keys::Alg;
pub use mint::{Flaw, MintOptions};

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

use crate::net::ReopenableListener;
use keys::KeySet;

/// Whether a rotation keeps publishing the previous keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldKeys {
    /// They stay in the JWKS, so their tokens still verify.
    Published,
    Withdrawn,
}

/// The issuer; it stops serving on drop.
pub struct Idp {
    listener: ReopenableListener,
    state: Arc<State>,
}

struct State {
    keys: Mutex<KeySet>,
    jwks_fetches: AtomicUsize,
    jwks_status: Mutex<u16>,
}

impl Idp {
    /// The default token audience.
    pub const AUDIENCE: &str = "svc-test";

    pub fn start() -> Result<Self> {
        let keys = Mutex::new(KeySet::generate()?);
        let state = Arc::new(State { keys, jwks_fetches: AtomicUsize::new(0), jwks_status: Mutex::new(200) });
        let shared = Arc::clone(&state);
        let listener = ReopenableListener::open(move |stream| http::serve(Arc::clone(&shared), stream))?;
        Ok(Self { listener, state })
    }

    /// Returns the issuer URL, `http://127.0.0.1:<port>`.
    pub fn issuer(&self) -> String {
        format!("http://{}", self.listener.addr())
    }

    pub fn jwks_url(&self) -> String {
        format!("{}{}", self.issuer(), http::JWKS_PATH)
    }

    /// Returns the product's settings for this issuer.
    pub fn env(&self) -> Vec<(String, String)> {
        let pairs = [
            ("IDP_ISSUER", self.issuer()),
            ("IDP_AUDIENCE", Self::AUDIENCE.to_owned()),
            ("IDP_JWKS_URL", self.jwks_url()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).into()
    }

    /// Mints a token for a subject, signed with the newest key of the chosen algorithm.
    pub fn mint(&self, sub: &str, options: &MintOptions) -> String {
        mint::mint(&self.state.keys(), &self.issuer(), sub, options)
    }

    /// Generates new keys with new ids; from now on, they sign all tokens. (The RSA key stays the same and only gets a
    /// new id, because ring cannot generate RSA keys.)
    pub fn rotate(&self, old: OldKeys) -> Result<()> {
        let new = KeySet::generate()?;
        let mut keys = self.state.keys();
        *keys = match old {
            OldKeys::Published => new.followed_by(std::mem::take(&mut *keys)),
            OldKeys::Withdrawn => new,
        };
        Ok(())
    }

    /// Returns the id of the key that signs with this algorithm.
    pub fn kid(&self, alg: Alg) -> String {
        self.state.keys().current(alg).kid.clone()
    }

    /// Returns the number of JWKS requests, regardless of their responses.
    pub fn jwks_fetch_count(&self) -> usize {
        self.state.jwks_fetches.load(Ordering::SeqCst)
    }

    /// Sets the status of JWKS responses. Responses contain keys only if the status is 200.
    pub fn set_jwks_status(&self, status: u16) {
        *self.state.jwks_status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// Refuses connections until [`Idp::bring_up`].
    pub fn take_down(&self) {
        self.listener.close();
    }

    pub fn bring_up(&self) -> Result<()> {
        Ok(self.listener.reopen()?)
    }
}

impl State {
    fn keys(&self) -> std::sync::MutexGuard<'_, KeySet> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;

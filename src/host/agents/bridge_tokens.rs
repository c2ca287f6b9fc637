//! Bridge tokens for running agents. A token grants access to the bridge of the apps that the owner listed for the
//! agent, and is revoked when its dispatch ends. The gateway only holds tokens in memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::rand::{SecureRandom, SystemRandom};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

const TOKEN_BYTES: usize = 32;

type TokenDigest = [u8; 32];

/// Access granted by a token: the bridge of these apps, for as long as the dispatch runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeGrant {
    pub dispatch: String,
    pub apps: Arc<[String]>,
}

/// The set of valid tokens.
#[derive(Default)]
pub struct BridgeTokens {
    valid: Mutex<HashMap<TokenDigest, BridgeGrant>>,
}

/// A token, revoked on drop.
pub struct BridgeToken {
    pub secret: SecretString,
    digest: TokenDigest,
    tokens: Arc<BridgeTokens>,
}

impl BridgeTokens {
    /// Issues a token for the bridge of `apps`.
    ///
    /// # Errors
    /// If the system's random number generator fails.
    pub fn issue(self: &Arc<Self>, dispatch: &str, apps: &[String]) -> anyhow::Result<BridgeToken> {
        let mut bytes = [0; TOKEN_BYTES];
        SystemRandom::new()
            .fill(&mut bytes)
            .map_err(|_| anyhow::anyhow!("the system's random number generator failed"))?;
        let secret = SecretString::from(format!("svc_agent_{}", hex::encode(bytes)));
        let digest = hash_token(secret.expose_secret());
        let grant = BridgeGrant { dispatch: dispatch.to_owned(), apps: apps.into() };
        self.lock().insert(digest, grant);
        Ok(BridgeToken { secret, digest, tokens: Arc::clone(self) })
    }

    /// Looks up a token's grant; `None` if the token is invalid.
    pub fn find(&self, token: &str) -> Option<BridgeGrant> {
        // Looking up a digest leaks nothing about the token through timing.
        self.lock().get(&hash_token(token)).cloned()
    }

    /// Whether this dispatch still has a valid token.
    pub fn has_token_for(&self, dispatch: &str) -> bool {
        self.lock().values().any(|grant| grant.dispatch == dispatch)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TokenDigest, BridgeGrant>> {
        self.valid.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for BridgeToken {
    fn drop(&mut self) {
        self.tokens.lock().remove(&self.digest);
    }
}

fn hash_token(token: &str) -> TokenDigest {
    Sha256::digest(token).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_revoked_when_dropped() {
        let tokens = Arc::new(BridgeTokens::default());
        let apps = ["notes".to_owned()];
        let (token, other) = (tokens.issue("d1", &apps).unwrap(), tokens.issue("d2", &[]).unwrap());
        let grant = tokens.find(token.secret.expose_secret()).unwrap();
        assert_eq!(grant, BridgeGrant { dispatch: "d1".to_owned(), apps: apps.as_slice().into() });
        let secret = token.secret.expose_secret().to_owned();
        drop(token);
        assert!(tokens.find(&secret).is_none() && !tokens.has_token_for("d1"));
        assert!(tokens.find(other.secret.expose_secret()).is_some());
        assert!(tokens.find("").is_none());
    }
}

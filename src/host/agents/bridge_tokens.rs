//! Tokens of agents that run: each is for the bridge of the apps that the owner named for its agent, and for no longer
//! than its dispatch runs. They are known to this process alone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::rand::{SecureRandom, SystemRandom};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

/// Of a token, in bytes.
const LENGTH: usize = 32;

type TokenDigest = [u8; 32];

/// What a token is for: the bridge of these apps, while this dispatch runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeGrant {
    pub dispatch: String,
    pub apps: Arc<[String]>,
}

/// Which tokens are valid now.
#[derive(Default)]
pub struct AgentTokens {
    valid: Mutex<HashMap<TokenDigest, BridgeGrant>>,
}

/// A token, valid until this is dropped.
pub struct AgentToken {
    pub secret: SecretString,
    digest: TokenDigest,
    all: Arc<AgentTokens>,
}

impl AgentTokens {
    /// A new token for the bridge of `apps`.
    ///
    /// # Errors
    /// When the system has no random bytes.
    pub fn issue(self: &Arc<Self>, dispatch: &str, apps: &[String]) -> anyhow::Result<AgentToken> {
        let mut bytes = [0; LENGTH];
        SystemRandom::new()
            .fill(&mut bytes)
            .map_err(|_| anyhow::anyhow!("the system has no random bytes"))?;
        let secret = SecretString::from(format!("svc_agent_{}", hex::encode(bytes)));
        let digest = digest(secret.expose_secret());
        let grant = BridgeGrant { dispatch: dispatch.to_owned(), apps: apps.into() };
        self.lock().insert(digest, grant);
        Ok(AgentToken { secret, digest, all: Arc::clone(self) })
    }

    pub fn find(&self, token: &str) -> Option<BridgeGrant> {
        // What is looked up is a digest: how long that takes says nothing of the token.
        self.lock().get(&digest(token)).cloned()
    }

    /// Whether a token of this dispatch is still valid.
    pub fn has_dispatch(&self, dispatch: &str) -> bool {
        self.lock().values().any(|grant| grant.dispatch == dispatch)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TokenDigest, BridgeGrant>> {
        self.valid.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AgentToken {
    fn drop(&mut self) {
        self.all.lock().remove(&self.digest);
    }
}

fn digest(token: &str) -> TokenDigest {
    Sha256::digest(token).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_ends_with_its_dispatch() {
        let all = Arc::new(AgentTokens::default());
        let apps = ["notes".to_owned()];
        let (one, other) = (all.issue("d1", &apps).unwrap(), all.issue("d2", &[]).unwrap());
        let grant = all.find(one.secret.expose_secret()).unwrap();
        assert_eq!(grant, BridgeGrant { dispatch: "d1".to_owned(), apps: apps.as_slice().into() });
        let text = one.secret.expose_secret().to_owned();
        drop(one);
        assert!(all.find(&text).is_none() && !all.has_dispatch("d1"));
        assert!(all.find(other.secret.expose_secret()).is_some());
        assert!(all.find("").is_none());
    }
}

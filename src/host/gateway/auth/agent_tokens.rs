//! Tokens of agents that run: each is for the bridge of the apps that the owner named for its agent, and for no longer
//! than its dispatch runs. They are known to this process alone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::rand::{SecureRandom, SystemRandom};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

use super::Principal;

/// Of a token, in bytes.
const LENGTH: usize = 32;

type TokenDigest = [u8; 32];

/// Which tokens are valid now.
#[derive(Default)]
pub struct AgentTokens {
    valid: Mutex<HashMap<TokenDigest, Principal>>,
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
        let principal = Principal::Agent { dispatch: dispatch.to_owned(), apps: apps.into() };
        self.lock().insert(digest, principal);
        Ok(AgentToken { secret, digest, all: Arc::clone(self) })
    }

    pub fn find(&self, token: &str) -> Option<Principal> {
        // What is looked up is a digest: how long that takes says nothing of the token.
        self.lock().get(&digest(token)).cloned()
    }

    /// Whether a token of this principal is still valid.
    pub fn has(&self, principal: &Principal) -> bool {
        self.lock().values().any(|one| one == principal)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TokenDigest, Principal>> {
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
        let principal = all.find(one.secret.expose_secret()).unwrap();
        assert_eq!(principal, Principal::Agent { dispatch: "d1".to_owned(), apps: apps.as_slice().into() });
        let text = one.secret.expose_secret().to_owned();
        drop(one);
        assert!(all.find(&text).is_none() && !all.has(&principal));
        assert!(all.find(other.secret.expose_secret()).is_some());
        assert!(all.find("").is_none());
    }
}

//! The principals: the store's owner, and the sessions issued by STS, each with a token, an expiry, and possibly a
//! policy.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use s3s::auth::{S3Auth, SecretKey};
use s3s::{S3Result, s3_error};

use super::policy::Policy;

/// A session without its secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    pub access_key: String,
    /// The `RoleSessionName` from the AssumeRole call.
    pub name: String,
    pub policy: Option<String>,
    pub expires: SystemTime,
    /// The requested lifetime, which may differ from the actual one.
    pub requested_lifetime: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) info: SessionInfo,
    pub(super) secret: String,
    pub(super) token: String,
    pub(super) policy: Option<Policy>,
    pub(super) is_revoked: bool,
}

/// The owner's credentials, and all sessions.
#[derive(Debug)]
pub(super) struct Sessions {
    owner: (String, String),
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// By access key.
    sessions: BTreeMap<String, Session>,
    lifetime_override: Option<Duration>,
}

impl Sessions {
    pub(super) fn new(owner_key: &str, owner_secret: &str) -> Self {
        Self { owner: (owner_key.to_owned(), owner_secret.to_owned()), inner: Mutex::default() }
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_owner(&self, access_key: &str) -> bool {
        self.owner.0 == access_key
    }

    pub(super) fn set_lifetime(&self, lifetime: Option<Duration>) {
        self.inner().lifetime_override = lifetime;
    }

    pub(super) fn create(
        &self,
        name: &str,
        policy: Option<(String, Policy)>,
        requested_lifetime: Duration,
    ) -> Session {
        let mut inner = self.inner();
        let random_hex = || uuid::Uuid::new_v4().simple().to_string();
        let lifetime = inner.lifetime_override.unwrap_or(requested_lifetime);
        let (policy_text, policy) = policy.unzip();
        let session = Session {
            info: SessionInfo {
                access_key: format!("ASIA{}", &random_hex()[..16].to_ascii_uppercase()),
                name: name.to_owned(),
                policy: policy_text,
                expires: SystemTime::now() + lifetime,
                requested_lifetime,
            },
            secret: random_hex(),
            // Contains base64's special characters, like real tokens.
            token: format!("{}/{}+{}==", random_hex(), random_hex(), random_hex()),
            policy,
            is_revoked: false,
        };
        inner.sessions.insert(session.info.access_key.clone(), session.clone());
        session
    }

    pub(super) fn secrets(&self) -> Vec<(String, String)> {
        let inner = self.inner();
        inner.sessions.values().map(|session| (session.secret.clone(), session.token.clone())).collect()
    }

    pub(super) fn all(&self) -> Vec<SessionInfo> {
        self.inner().sessions.values().map(|session| session.info.clone()).collect()
    }

    /// Revokes the sessions with this name; returns how many there were.
    pub(super) fn revoke(&self, name: &str) -> usize {
        let mut inner = self.inner();
        let matching = inner.sessions.values_mut().filter(|session| session.info.name == name);
        matching.map(|session| session.is_revoked = true).count()
    }

    pub(super) fn expire_all(&self) {
        for session in self.inner().sessions.values_mut() {
            session.info.expires = SystemTime::UNIX_EPOCH;
        }
    }

    /// Returns the session for this access key. Fails if `token` is not its token, or the session is no longer valid.
    pub(super) fn find_valid(&self, access_key: &str, token: Option<&str>) -> S3Result<Session> {
        let session = self.inner().sessions.get(access_key).cloned();
        let session = session.ok_or_else(|| s3_error!(InvalidAccessKeyId))?;
        if token != Some(session.token.as_str()) {
            return Err(s3_error!(InvalidToken, "the session token is missing or wrong"));
        }
        if session.is_revoked {
            return Err(s3_error!(AccessDenied, "the session was revoked"));
        }
        if SystemTime::now() >= session.info.expires {
            return Err(s3_error!(ExpiredToken, "the session has expired"));
        }
        Ok(session)
    }
}

/// Provides the secret keys for signature checks; `access` checks whether a session is still valid.
pub(super) struct Auth(pub(super) Arc<Sessions>);

#[async_trait::async_trait]
impl S3Auth for Auth {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        if self.0.is_owner(access_key) {
            return Ok(self.0.owner.1.clone().into());
        }
        let secret = self.0.inner().sessions.get(access_key).map(|session| session.secret.clone());
        secret.map(SecretKey::from).ok_or_else(|| s3_error!(InvalidAccessKeyId))
    }
}

//! Who may ask: the bucket's owner, and the sessions that STS gave out, each with its token, its policy and its end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use s3s::auth::{S3Auth, SecretKey};
use s3s::{S3Result, s3_error};

use super::policy::Policy;

/// A session as a test sees it; its secrets stay inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    pub access_key: String,
    /// What the caller of AssumeRole named it.
    pub name: String,
    pub policy: Option<String>,
    pub expires: SystemTime,
    /// What was asked for, whatever was given.
    pub asked_life: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) info: SessionInfo,
    pub(super) secret: String,
    pub(super) token: String,
    pub(super) policy: Option<Policy>,
    pub(super) is_revoked: bool,
}

/// All that may ask.
#[derive(Debug)]
pub(super) struct Sessions {
    owner: (String, String),
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    sessions: BTreeMap<String, Session>,
    life: Option<Duration>,
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

    pub(super) fn set_life(&self, life: Option<Duration>) {
        self.inner().life = life;
    }

    pub(super) fn open(&self, name: &str, policy: Option<(String, Policy)>, asked_life: Duration) -> Session {
        let mut inner = self.inner();
        let hex = || uuid::Uuid::new_v4().simple().to_string();
        let life = inner.life.unwrap_or(asked_life);
        let (text, policy) = policy.unzip();
        let session = Session {
            info: SessionInfo {
                access_key: format!("ASIA{}", &hex()[..16].to_ascii_uppercase()),
                name: name.to_owned(),
                policy: text,
                expires: SystemTime::now() + life,
                asked_life,
            },
            secret: hex(),
            // With what base64 has, as real ones.
            token: format!("{}/{}+{}==", hex(), hex(), hex()),
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

    /// How many sessions it concerned.
    pub(super) fn revoke(&self, name: &str) -> usize {
        let mut inner = self.inner();
        let named = inner.sessions.values_mut().filter(|session| session.info.name == name);
        named.map(|session| session.is_revoked = true).count()
    }

    pub(super) fn expire_all(&self) {
        for session in self.inner().sessions.values_mut() {
            session.info.expires = SystemTime::UNIX_EPOCH;
        }
    }

    /// The session of this access key, if its token came with the request and it still holds.
    pub(super) fn check(&self, access_key: &str, token: Option<&str>) -> S3Result<Session> {
        let session = self.inner().sessions.get(access_key).cloned();
        let session = session.ok_or_else(|| s3_error!(InvalidAccessKeyId))?;
        if token != Some(session.token.as_str()) {
            return Err(s3_error!(InvalidToken, "the session token is missing, or another's"));
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

/// Signatures are checked of whoever is known; whether a session still holds is `access`'s to say.
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

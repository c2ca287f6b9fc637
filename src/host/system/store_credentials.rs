//! Object store credentials, renewed by the platform before they expire.
//!
//! The initial credentials come from `r2.env`. Renewed ones are written to a file for the next applet and the next
//! boot. A process runs at most one renewal at a time. Expiry is computed relative to the response's `Date` header, so
//! a wrong local clock doesn't affect it.
//!
//! The platform also issues an outage session, which lives longer but can only write snapshots. Backups fall back to it
//! while the platform is unreachable, but not when it refuses a renewal, and never again after it has withdrawn the
//! credentials.

pub mod state_file;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::StatusCode;
use jiff::{SignedDuration, Timestamp};
use object_store::aws::AwsCredential;
use secrecy::ExposeSecret;
use tokio::sync::Mutex;

use crate::system::config::PlatformAccess;
use crate::system::platform_response::{ProblemBody, read_body, response_date};
use svc_base::clock;
use svc_http::client::{self, Timeouts};
use svc_http::problem::format_chain;
use svc_http::request_id;
use svc_machine::id::MachineId;
use svc_store::credentials::{CredentialError, CredentialSource, TemporaryCredentials};
use svc_wire::storage::{StorageCredentials, StoreSession};

use self::state_file::StoredSession;
pub use self::state_file::StoredSessions;

/// Assumed session lifetime if unknown.
const DEFAULT_SESSION_TTL: SignedDuration = SignedDuration::from_hours(1);
/// Session age at which [`RenewingCredentials::refresh`] renews.
const MAX_OUTAGE_SESSION_AGE: SignedDuration = SignedDuration::from_mins(50);
/// Credentials are treated as expired this long before their actual expiry, to leave time for a request after it is
/// signed.
const EXPIRY_MARGIN: SignedDuration = SignedDuration::from_secs(30);
/// Maximum number of renewal attempts when no session is usable. Within [`RETRY_INTERVAL`] of a failed renewal, each
/// request for credentials makes only one attempt.
const MAX_ATTEMPTS: u32 = 4;
/// Delay after a failed renewal while the current or the outage session is usable.
const RETRY_INTERVAL: SignedDuration = SignedDuration::from_secs(30);

/// Whether an applet may use the outage session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutagePolicy {
    /// Store snapshots using the outage session. Used by backups.
    UseOutageSession,
    /// Fail while the platform is unreachable.
    RequirePlatform,
}

/// Credential source for a host.
pub struct RenewingCredentials {
    outage_policy: OutagePolicy,
    machine: MachineId,
    platform: PlatformAccess,
    client: reqwest::Client,
    file: PathBuf,
    state: Mutex<SourceState>,
}

struct SourceState {
    active: ActiveSession,
    /// Until this time, `current` doesn't renew a still usable session, and makes at most one attempt otherwise.
    not_before: Timestamp,
    /// Whether the platform was unreachable at the last failed renewal.
    was_unreachable: bool,
    /// Whether the platform has withdrawn the credentials. Final.
    is_withdrawn: bool,
}

/// The working session and its renewal time, plus the outage session.
#[derive(Clone)]
struct ActiveSession {
    credential: Arc<AwsCredential>,
    /// Expiry by the local clock.
    expires_at: Timestamp,
    renew_at: Timestamp,
    renewed_at: Option<Timestamp>,
    outage: Option<OutageSession>,
}

/// Session for storing snapshots while the platform is unreachable.
#[derive(Clone)]
struct OutageSession {
    credential: Arc<AwsCredential>,
    expires_at: Timestamp,
}

impl OutageSession {
    fn is_usable(&self, now: Timestamp) -> bool {
        now < self.expires_at.saturating_sub(EXPIRY_MARGIN).unwrap_or(Timestamp::MIN)
    }
}

impl ActiveSession {
    /// Schedules the renewal for when a third of the lifetime remains, or up to a sixth of the lifetime earlier, to
    /// spread out renewals across hosts.
    fn new(credential: AwsCredential, expires_at: Timestamp, lifetime: SignedDuration) -> Self {
        let third = lifetime.as_secs().max(0) / 3;
        let jitter = third * random_byte() / 512;
        let early = SignedDuration::from_secs(third + jitter);
        let renew_at = expires_at.saturating_sub(early).unwrap_or(Timestamp::MIN);
        Self { credential: Arc::new(credential), expires_at, renew_at, renewed_at: None, outage: None }
    }

    fn from_stored(stored: &StoredSessions) -> Self {
        let outage = stored.outage.as_ref();
        let outage = outage.map(|outage| OutageSession {
            expires_at: outage.expires_at,
            credential: Arc::new(outage.to_aws_credential()),
        });
        let session =
            Self::new(stored.session.to_aws_credential(), stored.session.expires_at, stored.lifetime());
        Self { renewed_at: stored.renewed_at, outage, ..session }
    }

    fn is_usable(&self, now: Timestamp) -> bool {
        // A session with a lifetime shorter than the margin stays usable until its renewal is due.
        now < self.expires_at.saturating_sub(EXPIRY_MARGIN).unwrap_or(Timestamp::MIN).max(self.renew_at)
    }
}

fn random_byte() -> i64 {
    i64::from(uuid::Uuid::new_v4().as_bytes()[0])
}

impl fmt::Debug for RenewingCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RenewingCredentials").field("machine", &self.machine).finish_non_exhaustive()
    }
}

impl RenewingCredentials {
    /// # Errors
    /// If the HTTP client can't be created.
    pub fn new(
        machine: MachineId,
        platform: PlatformAccess,
        file: PathBuf,
        initial: &TemporaryCredentials,
    ) -> anyhow::Result<Self> {
        let client = client::build(Timeouts::CALL)?;
        let initial =
            ActiveSession::new(initial.to_aws_credential(), initial.expires_at, DEFAULT_SESSION_TTL);
        let state = SourceState {
            active: initial,
            not_before: Timestamp::MIN,
            was_unreachable: false,
            is_withdrawn: false,
        };
        let outage_policy = OutagePolicy::RequirePlatform;
        Ok(Self { outage_policy, machine, platform, client, file, state: Mutex::new(state) })
    }

    #[must_use]
    pub fn with_outage_policy(self, outage_policy: OutagePolicy) -> Self {
        Self { outage_policy, ..self }
    }

    /// Returns the outage credential if this applet may use it and it hasn't expired.
    fn outage_credential(&self, state: &SourceState, now: Timestamp) -> Option<Arc<AwsCredential>> {
        if self.outage_policy == OutagePolicy::RequirePlatform {
            return None;
        }
        let outage = state.active.outage.as_ref().filter(|outage| outage.is_usable(now))?;
        Some(Arc::clone(&outage.credential))
    }

    /// Renews the credentials, falling back to the outage session if the platform is unreachable.
    async fn renew_or_use_outage_session(
        &self,
        state: &mut SourceState,
        now: Timestamp,
    ) -> Result<Arc<AwsCredential>, CredentialError> {
        let outage = self.outage_credential(state, now);
        // After a refusal (possibly by a proxy), only use the outage session if a new attempt can't reach the platform.
        if let Some(fallback) = outage.as_ref().filter(|_| state.was_unreachable && now < state.not_before) {
            return Ok(Arc::clone(fallback));
        }
        let failed_recently = now < state.not_before;
        let attempts = if outage.is_some() || failed_recently { 1 } else { MAX_ATTEMPTS };
        match (self.renew(state, attempts).await, outage) {
            (Ok(()), _) => Ok(Arc::clone(&state.active.credential)),
            (Err(error @ CredentialError::Unavailable(_)), Some(fallback)) => {
                tracing::warn!(%error, "platform unreachable; snapshots are stored but do not become the latest");
                Ok(fallback)
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Renews the sessions unless they're younger than `MAX_OUTAGE_SESSION_AGE`, so that the outage session is fresh
    /// when a platform outage begins. This costs the platform two STS calls per host and interval.
    pub async fn refresh(&self) -> Result<(), CredentialError> {
        let mut state = self.state.lock().await;
        if state.is_withdrawn {
            return Err(CredentialError::Withdrawn);
        }
        self.load_stored(&mut state);
        let now = Timestamp::now();
        let is_recent = |at: Timestamp| now.duration_since(at) < MAX_OUTAGE_SESSION_AGE && at <= now;
        if state.active.renewed_at.is_some_and(is_recent) {
            return Ok(());
        }
        self.renew(&mut state, 1).await
    }

    /// Loads sessions stored by another process on this machine, if their working session expires later than ours.
    fn load_stored(&self, state: &mut SourceState) {
        match StoredSessions::read(&self.file, self.machine) {
            Ok(Some(stored)) if stored.session.expires_at > state.active.expires_at => {
                state.active = ActiveSession::from_stored(&stored);
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(error = %format_chain(&error), "cannot read stored credentials"),
        }
    }

    /// Requests new sessions, making at most `attempts` attempts.
    async fn renew(&self, state: &mut SourceState, attempts: u32) -> Result<(), CredentialError> {
        let mut attempt = 1;
        loop {
            match self.request_sessions().await {
                Ok(active) => {
                    state.active = active;
                    state.not_before = Timestamp::MIN;
                    return Ok(());
                }
                Err(error @ CredentialError::Unavailable(_)) if attempt < attempts => {
                    tracing::info!(%error, attempt, "cannot renew object store credentials; retrying");
                    let pause_ms = 250 * u64::from(2_u32.pow(attempt)) + random_byte().unsigned_abs();
                    tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                    attempt += 1;
                }
                Err(error) => {
                    state.is_withdrawn |= matches!(error, CredentialError::Withdrawn);
                    state.was_unreachable = matches!(error, CredentialError::Unavailable(_));
                    let not_before = Timestamp::now().saturating_add(RETRY_INTERVAL);
                    state.not_before = not_before.unwrap_or(Timestamp::MAX);
                    return Err(error);
                }
            }
        }
    }

    async fn request_sessions(&self) -> Result<ActiveSession, CredentialError> {
        let unavailable = |error: reqwest::Error| CredentialError::Unavailable(format_chain(&error));
        let url = self.platform.url(&format!("/vps/{}/storage-credentials", self.machine));
        let token = self.platform.upgrade_token.current();
        let request = self.client.post(url).bearer_auth(token.expose_secret());
        let response = request_id::attach(request).send().await.map_err(unavailable)?;
        let now = clock::now_ms();
        let (status, date) = (response.status(), response_date(response.headers()));
        let body =
            read_body(response).await.map_err(|error| CredentialError::Unavailable(format_chain(&error)))?;
        if !status.is_success() {
            return Err(refusal_error(status, &body));
        }
        let sessions: StorageCredentials = serde_json::from_slice(&body)
            .map_err(|_| CredentialError::Unavailable("cannot parse the platform's response".to_owned()))?;
        let sent_at = date.unwrap_or(now);
        let outage = sessions.outage.map(|outage| to_stored(&outage, sent_at, now));
        let stored =
            StoredSessions::new(self.machine, to_stored(&sessions.session, sent_at, now), outage, now);
        tracing::info!(expires_at = %stored.session.expires_at, "renewed object store credentials");
        // Best effort: we already have the sessions, and the next process will request its own.
        if let Err(error) = tokio::task::block_in_place(|| stored.write(&self.file)) {
            tracing::warn!(error = %format_chain(&error), "cannot store renewed credentials");
        }
        Ok(ActiveSession::from_stored(&stored))
    }
}

#[async_trait]
impl CredentialSource for RenewingCredentials {
    async fn current(&self) -> Result<Arc<AwsCredential>, CredentialError> {
        let mut state = self.state.lock().await;
        if state.is_withdrawn {
            return Err(CredentialError::Withdrawn);
        }
        let now = Timestamp::now();
        if now >= state.active.renew_at {
            self.load_stored(&mut state);
        }
        if now < state.active.renew_at {
            return Ok(Arc::clone(&state.active.credential));
        }
        if !state.active.is_usable(now) {
            return self.renew_or_use_outage_session(&mut state, now).await;
        }
        if now >= state.not_before
            && let Err(error) = self.renew(&mut state, 1).await
        {
            if matches!(error, CredentialError::Withdrawn) {
                return Err(error);
            }
            tracing::warn!(%error, "cannot renew object store credentials; will retry later");
        }
        Ok(Arc::clone(&state.active.credential))
    }

    async fn replacement_for(&self, access_key: &str) -> Result<Arc<AwsCredential>, CredentialError> {
        let mut state = self.state.lock().await;
        if state.is_withdrawn {
            return Err(CredentialError::Withdrawn);
        }
        let now = Timestamp::now();
        if state.active.credential.key_id != access_key && state.active.is_usable(now) {
            return Ok(Arc::clone(&state.active.credential));
        }
        // The store has the final say on whether a session has expired.
        if let Some(outage) = state.active.outage.take_if(|outage| outage.credential.key_id == access_key) {
            tracing::warn!(expires_at = %outage.expires_at, "store rejected the outage session as expired");
        }
        self.renew_or_use_outage_session(&mut state, now).await
    }
}

/// Converts a session's expiry to the local clock. `sent_at` is the response time by the platform clock, and `now` the
/// same moment by ours.
fn to_stored(session: &StoreSession, sent_at: Timestamp, now: Timestamp) -> StoredSession {
    let lifetime = session.expires_at.duration_since(sent_at);
    StoredSession {
        access_key_id: session.access_key_id.clone(),
        secret_access_key: session.secret_access_key.expose_secret().to_owned(),
        session_token: session.session_token.as_ref().map(|token| token.expose_secret().to_owned()),
        expires_at: now.saturating_add(lifetime).unwrap_or(session.expires_at),
    }
}

fn refusal_error(status: StatusCode, body: &[u8]) -> CredentialError {
    let code = ProblemBody::parse(body).code;
    if code == "superseded" {
        CredentialError::Withdrawn
    } else if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        CredentialError::Unavailable(format!("the platform returned {status} {code}"))
    } else {
        CredentialError::Refused(format!("the platform returned {status} {code}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn active_session(lifetime: SignedDuration) -> (Timestamp, ActiveSession) {
        let now = Timestamp::now();
        let credential = AwsCredential { key_id: "a".into(), secret_key: "b".into(), token: None };
        (now, ActiveSession::new(credential, now.saturating_add(lifetime).unwrap(), lifetime))
    }

    #[test]
    fn short_session_is_renewed_in_its_middle_third() {
        let lifetime = SignedDuration::from_mins(15);
        let (now, active) = active_session(lifetime);
        let age = active.renew_at.duration_since(now);
        assert!(age >= lifetime / 3 && age <= lifetime * 2 / 3, "{age:?}");
    }
}

//! Credentials for the object store that are renewed at the platform before they run out.
//!
//! They begin with those of `r2.env`. What the platform gives in their place is kept in a file, so that the next applet
//! and the next boot begin with it. Within a process one renewal is under way at a time. Expiry is counted from the
//! moment that an answer came, by its own `Date`, so that a clock that is wrong does not spoil it.
//!
//! With them comes an outage session, which lives longer and can only store snapshots. A backup uses it while the platform
//! is unreachable; a refusal of the platform never leads to it.

pub mod state_file;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{StatusCode, header};
use jiff::{SignedDuration, Timestamp};
use object_store::aws::AwsCredential;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use tokio::sync::Mutex;

use crate::clock;
use crate::host::system::config::PlatformLink;
use crate::http::client::{self, Deadlines};
use crate::http::problem::chain;
use crate::http::request_id;
use crate::machine::id::MachineId;
use crate::store::credentials::{CredentialError, Source, Temporary};

use self::state_file::KeptSession;
pub use self::state_file::KeptSessions;

/// Assumed life of a session whose life is unknown.
const USUAL_LIFE: SignedDuration = SignedDuration::from_hours(1);
/// The age at which [`Renewed::refresh`] renews an outage session.
const MAX_OUTAGE_AGE: SignedDuration = SignedDuration::from_mins(50);
/// Before it, credentials count as run out: a request is not answered in the moment that it is signed.
const MARGIN: SignedDuration = SignedDuration::from_secs(30);
const ATTEMPTS: u32 = 4;
/// How long a renewal that failed is not tried again, while the credentials at hand still hold.
const PAUSE: SignedDuration = SignedDuration::from_secs(30);

/// Whether an applet may use the outage session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DuringOutage {
    /// A backup stores its snapshot.
    StoreSnapshots,
    /// Without the platform the store is unavailable.
    Wait,
}

/// The source of a host's credentials.
pub struct Renewed {
    during_outage: DuringOutage,
    machine: MachineId,
    platform: PlatformLink,
    client: reqwest::Client,
    file: PathBuf,
    state: Mutex<State>,
}

struct State {
    held: Held,
    /// A renewal is due, and is not tried before this moment.
    not_before: Timestamp,
    /// Never cleared once set.
    is_withdrawn: bool,
}

/// Credentials and their renewal time.
#[derive(Clone)]
struct Held {
    key: Arc<AwsCredential>,
    /// By this machine's clock.
    expires_at: Timestamp,
    renew_at: Timestamp,
    renewed_at: Option<Timestamp>,
    outage: Option<Outage>,
}

/// The session for storing snapshots while the platform is unreachable.
#[derive(Clone)]
struct Outage {
    key: Arc<AwsCredential>,
    expires_at: Timestamp,
}

impl Outage {
    fn is_usable(&self, now: Timestamp) -> bool {
        now < self.expires_at.saturating_sub(MARGIN).unwrap_or(Timestamp::MIN)
    }
}

impl Held {
    /// Renewal is due when a third of the life is left, or somewhat earlier, so that not all hosts ask at once.
    fn new(key: AwsCredential, expires_at: Timestamp, life: SignedDuration) -> Self {
        let third = life.as_secs().max(0) / 3;
        let early = SignedDuration::from_secs(third) + SignedDuration::from_secs(third * random() / 512);
        let renew_at = expires_at.saturating_sub(early).unwrap_or(Timestamp::MIN);
        Self { key: Arc::new(key), expires_at, renew_at, renewed_at: None, outage: None }
    }

    fn of(kept: &KeptSessions) -> Self {
        let outage = kept.outage.as_ref();
        let outage = outage.map(|it| Outage { expires_at: it.expires_at, key: Arc::new(it.signing()) });
        let session = Self::new(kept.session.signing(), kept.session.expires_at, kept.life());
        Self { renewed_at: kept.renewed_at, outage, ..session }
    }

    fn is_usable(&self, now: Timestamp) -> bool {
        // What lives shorter than the margin is used to its end.
        now < self.expires_at.saturating_sub(MARGIN).unwrap_or(Timestamp::MIN).max(self.renew_at)
    }
}

fn random() -> i64 {
    i64::from(uuid::Uuid::new_v4().as_bytes()[0])
}

impl fmt::Debug for Renewed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewed").field("machine", &self.machine).finish_non_exhaustive()
    }
}

impl Renewed {
    /// # Errors
    /// When no client can be made.
    pub fn new(
        machine: MachineId,
        platform: PlatformLink,
        file: PathBuf,
        first: &Temporary,
    ) -> anyhow::Result<Self> {
        let client = client::build(Deadlines::CALL)?;
        let first = Held::new(first.signing(), first.expires_at, USUAL_LIFE);
        let state = State { held: first, not_before: Timestamp::MIN, is_withdrawn: false };
        let during_outage = DuringOutage::Wait;
        Ok(Self { during_outage, machine, platform, client, file, state: Mutex::new(state) })
    }

    #[must_use]
    pub fn during_outage(self, during_outage: DuringOutage) -> Self {
        Self { during_outage, ..self }
    }

    /// The key of the outage session, where this applet may use it and it has not expired.
    fn outage_key(&self, state: &State, now: Timestamp) -> Option<Arc<AwsCredential>> {
        if self.during_outage == DuringOutage::Wait {
            return None;
        }
        let outage = state.held.outage.as_ref().filter(|outage| outage.is_usable(now))?;
        Some(Arc::clone(&outage.key))
    }

    /// New credentials; while the platform is unreachable, those of the outage session.
    async fn renew_or_outage(
        &self,
        state: &mut State,
        now: Timestamp,
    ) -> Result<Arc<AwsCredential>, CredentialError> {
        let outage = self.outage_key(state, now);
        if let Some(key) = outage.as_ref().filter(|_| now < state.not_before) {
            return Ok(Arc::clone(key));
        }
        let attempts = if outage.is_some() { 1 } else { ATTEMPTS };
        match (self.renew(state, attempts).await, outage) {
            (Ok(()), _) => Ok(Arc::clone(&state.held.key)),
            (Err(error @ CredentialError::Unavailable(_)), Some(key)) => {
                tracing::warn!(%error, "the platform is unreachable: snapshots are stored, and none becomes the latest");
                Ok(key)
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Renews the sessions where the last ones are older than `MAX_OUTAGE_AGE`, so that an outage of the platform begins
    /// with a young outage session. Of each host it costs the platform two calls of STS in that time.
    ///
    /// # Errors
    /// [`CredentialError`].
    pub async fn refresh(&self) -> Result<(), CredentialError> {
        let mut state = self.state.lock().await;
        if state.is_withdrawn {
            return Err(CredentialError::Withdrawn);
        }
        self.take_kept(&mut state);
        let now = Timestamp::now();
        let is_young = |at: Timestamp| now.duration_since(at) < MAX_OUTAGE_AGE && at <= now;
        if state.held.renewed_at.is_some_and(is_young) {
            return Ok(());
        }
        self.renew(&mut state, 1).await
    }

    /// What another process of this machine has got, if it holds longer.
    fn take_kept(&self, state: &mut State) {
        match KeptSessions::read(&self.file, self.machine) {
            Ok(Some(kept)) if kept.session.expires_at > state.held.expires_at => state.held = Held::of(&kept),
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the kept credentials are not readable"),
        }
    }

    /// Asks until there is an answer, within the bounds of `attempts`.
    async fn renew(&self, state: &mut State, attempts: u32) -> Result<(), CredentialError> {
        let mut attempt = 1;
        loop {
            match self.ask().await {
                Ok(held) => {
                    state.held = held;
                    state.not_before = Timestamp::MIN;
                    return Ok(());
                }
                Err(error @ CredentialError::Unavailable(_)) if attempt < attempts => {
                    tracing::info!(%error, attempt, "retrying");
                    let pause = 250 * u64::from(2_u32.pow(attempt)) + random().unsigned_abs();
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                    attempt += 1;
                }
                Err(error) => {
                    state.is_withdrawn |= matches!(error, CredentialError::Withdrawn);
                    let later = Timestamp::now().saturating_add(PAUSE);
                    state.not_before = later.unwrap_or(Timestamp::MAX);
                    return Err(error);
                }
            }
        }
    }

    async fn ask(&self) -> Result<Held, CredentialError> {
        let unavailable = |error: reqwest::Error| CredentialError::Unavailable(chain(&error));
        let url = self.platform.url(&format!("/vps/{}/storage-credentials", self.machine));
        let token = self.platform.upgrade_token.current();
        let request = self.client.post(url).bearer_auth(token.expose_secret());
        let answer = request_id::onward(request).send().await.map_err(unavailable)?;
        let now = clock::now_ms();
        let (status, date) = (answer.status(), date(answer.headers()));
        let body = answer.bytes().await.map_err(unavailable)?;
        if !status.is_success() {
            return Err(refusal(status, &body));
        }
        let given: Given = serde_json::from_slice(&body)
            .map_err(|_| CredentialError::Unavailable("the platform's answer is not readable".to_owned()))?;
        let sent_at = date.unwrap_or(now);
        let outage = given.outage.map(|outage| outage.kept(sent_at, now));
        let kept = KeptSessions::new(self.machine, given.session.kept(sent_at, now), outage, now);
        tracing::info!(expires_at = %kept.session.expires_at, "the platform renewed the credentials for the object store");
        // A failed write is only logged: this process has the sessions, and the next one requests its own.
        if let Err(error) = tokio::task::block_in_place(|| kept.write(&self.file)) {
            tracing::warn!(%error, "could not keep the renewed credentials");
        }
        Ok(Held::of(&kept))
    }
}

#[async_trait]
impl Source for Renewed {
    async fn current(&self) -> Result<Arc<AwsCredential>, CredentialError> {
        let mut state = self.state.lock().await;
        if state.is_withdrawn {
            return Err(CredentialError::Withdrawn);
        }
        let now = Timestamp::now();
        if now >= state.held.renew_at {
            self.take_kept(&mut state);
        }
        if now < state.held.renew_at {
            return Ok(Arc::clone(&state.held.key));
        }
        if !state.held.is_usable(now) {
            return self.renew_or_outage(&mut state, now).await;
        }
        if now >= state.not_before
            && let Err(error) = self.renew(&mut state, 1).await
        {
            if matches!(error, CredentialError::Withdrawn) {
                return Err(error);
            }
            tracing::warn!(%error, "could not renew the credentials for the object store yet");
        }
        Ok(Arc::clone(&state.held.key))
    }

    async fn instead_of(&self, access_key: &str) -> Result<Arc<AwsCredential>, CredentialError> {
        let mut state = self.state.lock().await;
        if state.is_withdrawn {
            return Err(CredentialError::Withdrawn);
        }
        let now = Timestamp::now();
        if state.held.key.key_id != access_key && state.held.is_usable(now) {
            return Ok(Arc::clone(&state.held.key));
        }
        // The store knows best what has expired.
        if let Some(outage) = state.held.outage.take_if(|outage| outage.key.key_id == access_key) {
            tracing::warn!(expires_at = %outage.expires_at, "the store rejected the outage session as expired");
        }
        self.renew_or_outage(&mut state, now).await
    }
}

/// The answer of the route. Where the store is was said by `r2.env`.
#[derive(Deserialize)]
struct Given {
    #[serde(flatten)]
    session: GivenSession,
    /// Not known to a platform of an earlier release.
    outage: Option<GivenSession>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct GivenSession {
    access_key_id: String,
    secret_access_key: SecretString,
    session_token: Option<SecretString>,
    expires_at: Timestamp,
}

impl GivenSession {
    /// With its end by this machine's clock: `sent_at` is the time of the answer by the platform's.
    fn kept(&self, sent_at: Timestamp, now: Timestamp) -> KeptSession {
        let life = self.expires_at.duration_since(sent_at);
        KeptSession {
            access_key_id: self.access_key_id.clone(),
            secret_access_key: self.secret_access_key.expose_secret().to_owned(),
            session_token: self.session_token.as_ref().map(|token| token.expose_secret().to_owned()),
            expires_at: now.saturating_add(life).unwrap_or(self.expires_at),
        }
    }
}

/// The moment of an answer by the clock of who sent it.
fn date(headers: &header::HeaderMap) -> Option<Timestamp> {
    let text = headers.get(header::DATE)?.to_str().ok()?;
    let parsed = jiff::fmt::rfc2822::parse(text).ok()?;
    Some(parsed.timestamp())
}

fn refusal(status: StatusCode, body: &[u8]) -> CredentialError {
    #[derive(Deserialize)]
    struct Problem {
        code: String,
    }
    let code = serde_json::from_slice::<Problem>(body).map_or_else(|_| String::new(), |problem| problem.code);
    if code == "superseded" {
        CredentialError::Withdrawn
    } else if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        CredentialError::Unavailable(format!("the platform answered {status} {code}"))
    } else {
        CredentialError::Refused(format!("the platform answered {status} {code}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(life: SignedDuration) -> (Timestamp, Held) {
        let now = Timestamp::now();
        let key = AwsCredential { key_id: "a".into(), secret_key: "b".into(), token: None };
        (now, Held::new(key, now.saturating_add(life).unwrap(), life))
    }

    #[test]
    fn short_session_is_renewed_in_its_last_two_thirds() {
        let life = SignedDuration::from_mins(15);
        let (now, held) = held(life);
        let age = held.renew_at.duration_since(now);
        assert!(age >= life / 3 && age <= life * 2 / 3, "{age:?}");
    }
}

//! A host's access to the object store: its endpoint, and credentials for the host's own slot.
//!
//! With `sts`, no host ever holds a credential that reaches another slot or deletes anything. Its working session
//! lives for a quarter of an hour, so that a replaced machine loses it soon. A host also has an outage session, for
//! when the platform is unreachable: it lives longer, adds snapshots, and cannot make one the latest. With `static`,
//! every host holds the platform's own credentials.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use secrecy::ExposeSecret;
use url::Url;

use super::db::machine_row::MachineRow;
use crate::vars;
use svc_base::chain::chain;
use svc_base::clock::rfc3339_ms;
use svc_base::config::{Env, Flag, env_line};
use svc_base::variable::Variable;
use svc_machine::epoch::Epoch;
use svc_machine::name::Slot;
use svc_store::config::{S3Config, StoreConfig};
use svc_store::credentials::TemporaryCredentials;
use svc_store::key::SlotPrefix;
use svc_store::policy::{self, SnapshotWrites};
use svc_store::sts::{Sts, StsError};
use svc_store::vars::{
    AWS_ACCESS_KEY_ID, AWS_CREDENTIAL_EXPIRATION, AWS_REGION, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN,
    OBJECT_STORE_ENDPOINT, OBJECT_STORE_URL,
};
use svc_wire::storage::{StorageCredentials, StoreLocation, StoreSession};

/// Lifetime of the working session: the shortest that STS grants.
const WORKING_SESSION_TTL: Duration = Duration::from_secs(900);
/// AWS grants at most 12 hours, other stores up to 7 days.
const MAX_OUTAGE_TTL: Duration = Duration::from_secs(7 * 24 * 3600);
/// The working session must not wait longer: the host's own deadline is 10 s.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(3);
/// Every role grants this lifetime; a longer one may exceed the role's maximum.
const COMMON_MAX_TTL: Duration = Duration::from_secs(3600);

/// `STORE_HOST_CREDENTIALS`.
#[derive(Debug, Clone)]
pub enum HostCredentials {
    Static,
    Sts(StsConfig),
}

/// `STS_*`.
#[derive(Debug, Clone)]
pub struct StsConfig {
    pub endpoint: Url,
    pub role_arn: String,
    /// How long hosts can store snapshots while the platform is unreachable.
    pub outage_ttl: Duration,
    /// `STORE_WRITE_ONCE`.
    pub writes: SnapshotWrites,
}

impl HostCredentials {
    pub fn read(env: &mut Env, store: Option<&StoreConfig>) -> Option<Self> {
        let variable = &vars::STORE_HOST_CREDENTIALS;
        let is_sts = match env.text(variable).as_deref() {
            Some("static") => false,
            Some("sts") => true,
            None if env.is_set(&vars::STS_ROLE_ARN) => true,
            // A directory has no credentials.
            None if matches!(store, Some(StoreConfig::Directory(_))) => false,
            None => {
                env.mistake(
                    variable,
                    "is required without STS_ROLE_ARN: sts, or static, which gives every host \
                    the platform's own credentials",
                );
                return None;
            }
            Some(_) => {
                env.mistake(variable, "must be sts or static");
                return None;
            }
        };
        if !is_sts {
            return Some(Self::Static);
        }
        let role_arn = env.required::<String>(&vars::STS_ROLE_ARN);
        let outage_ttl = Duration::from_secs(env.or_default(&vars::STS_DURATION_SECONDS));
        if !(WORKING_SESSION_TTL..=MAX_OUTAGE_TTL).contains(&outage_ttl) {
            env.mistake(&vars::STS_DURATION_SECONDS, "must be 900 to 604800");
        }
        let StoreConfig::S3(s3) = store? else {
            env.mistake(variable, "sts needs an s3:// store");
            return None;
        };
        let writes = match env.flag(&vars::STORE_WRITE_ONCE) {
            Flag::On => SnapshotWrites::Once,
            Flag::Off => SnapshotWrites::Any,
        };
        let endpoint = endpoint(env, s3);
        Some(Self::Sts(StsConfig { endpoint: endpoint?, role_arn: role_arn?, outage_ttl, writes }))
    }
}

/// `STS_ENDPOINT`, or the store's own endpoint, or AWS's for the region.
fn endpoint(env: &mut Env, s3: &S3Config) -> Option<Url> {
    if env.is_set(&vars::STS_ENDPOINT) {
        return env.web_url(&vars::STS_ENDPOINT);
    }
    let text = match (&s3.endpoint, s3.region.as_str()) {
        (Some(endpoint), _) => endpoint.clone(),
        (None, "auto") => {
            env.mistake(&AWS_REGION, "is required for AWS's own STS");
            return None;
        }
        (None, region) if region.starts_with("cn-") => format!("https://sts.{region}.amazonaws.com.cn"),
        (None, region) => format!("https://sts.{region}.amazonaws.com"),
    };
    text.parse().map_err(|why| env.mistake(&vars::STS_ENDPOINT, why)).ok()
}

/// The sessions that a host gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionGrant {
    /// Only the working session.
    Working,
    /// Also an outage session.
    WithOutage,
}

/// Grants hosts their store access.
pub struct HostStore {
    store: StoreConfig,
    sts: Option<StsSessions>,
}

struct StsSessions {
    sts: Sts,
    outage_ttl: Duration,
    partition: String,
    writes: SnapshotWrites,
}

impl StsSessions {
    fn outage_policy(&self, bucket: &str, slot: &SlotPrefix, epoch: Epoch) -> String {
        let from = Timestamp::now();
        let ttl = SignedDuration::try_from(self.outage_ttl).unwrap_or(SignedDuration::MAX);
        let window =
            policy::SessionWindow { from, until: from.saturating_add(ttl).unwrap_or(Timestamp::MAX) };
        policy::outage_policy(&self.partition, bucket, (slot, epoch), window, self.writes)
    }

    /// A session that stores snapshots of the machine's epoch. `None` if it would live no longer than the working
    /// session, or if STS grants none.
    async fn outage(&self, bucket: &str, machine: &MachineRow) -> Option<TemporaryCredentials> {
        if self.outage_ttl <= WORKING_SESSION_TTL {
            return None;
        }
        let slot = SlotPrefix::new(&machine.user, &machine.slot);
        let policy = self.outage_policy(bucket, &slot, machine.epoch);
        let name = format!("svc-outage-{}", machine.id);
        let session = self.assume(&name, &policy, self.outage_ttl);
        match tokio::time::timeout(OUTAGE_TIMEOUT, session).await {
            Ok(Ok(session)) => Some(session),
            Ok(Err(error)) => {
                tracing::warn!(machine = %machine.id, error = %chain(&error), "no outage session for a host");
                None
            }
            Err(_) => {
                tracing::warn!(machine = %machine.id, "no outage session for a host: STS call timed out");
                None
            }
        }
    }

    /// If the role does not grant this lifetime, falls back to the one that every role grants.
    async fn assume(
        &self,
        session: &str,
        policy: &str,
        life: Duration,
    ) -> Result<TemporaryCredentials, StsError> {
        match self.sts.assume_role(session, policy, life).await {
            Err(StsError::Refused { code, message, .. })
                if life > COMMON_MAX_TTL && code == "ValidationError" =>
            {
                tracing::warn!(
                    message,
                    seconds = life.as_secs(),
                    "STS does not grant sessions of STS_DURATION_SECONDS"
                );
                self.sts.assume_role(session, policy, COMMON_MAX_TTL).await
            }
            end => end,
        }
    }
}

impl HostStore {
    /// # Errors
    /// When no STS client can be made.
    pub fn new(store: &StoreConfig, credentials: &HostCredentials) -> anyhow::Result<Self> {
        let sts = match (store, credentials) {
            (StoreConfig::S3(s3), HostCredentials::Sts(config)) => {
                let role = config.role_arn.clone();
                // A separate AWS cloud has its own partition name, which the role contains.
                let partition =
                    role.split(':').nth(1).filter(|name| name.starts_with("aws")).unwrap_or("aws");
                let partition = partition.to_owned();
                let sts = Sts::new(config.endpoint.clone(), s3.region.clone(), role, s3.credential())?;
                Some(StsSessions { sts, outage_ttl: config.outage_ttl, partition, writes: config.writes })
            }
            _ => None,
        };
        Ok(Self { store: store.clone(), sts })
    }

    /// Gives hosts another endpoint than the platform's own.
    #[must_use]
    pub fn reached_by_hosts_at(mut self, endpoint: Option<&Url>) -> Self {
        if let (StoreConfig::S3(s3), Some(endpoint)) = (&mut self.store, endpoint) {
            s3.endpoint = Some(endpoint.to_string());
        }
        self
    }

    /// Whether hosts hold credentials that reach every slot.
    pub fn shares_platform_credentials(&self) -> bool {
        self.sts.is_none() && matches!(self.store, StoreConfig::S3(_))
    }

    /// Whether the store prevents hosts from overwriting snapshots; `None` without sessions.
    pub fn snapshot_writes(&self) -> Option<SnapshotWrites> {
        self.sts.as_ref().map(|assumer| assumer.writes)
    }

    /// The slot of [`Self::try_session`], which no user has.
    pub fn probe_slot() -> SlotPrefix {
        SlotPrefix::new(&"svc-doctor".parse().expect("a user's id"), &Slot::primary())
    }

    /// Requests a machine's session for an unused slot; `None` if hosts get the platform's own credentials.
    pub async fn try_session(&self) -> Option<Result<TemporaryCredentials, StsError>> {
        let (StoreConfig::S3(s3), Some(assumer)) = (&self.store, &self.sts) else { return None };
        let policy = policy::slot_policy(&assumer.partition, &s3.bucket, &Self::probe_slot(), assumer.writes);
        Some(assumer.sts.assume_role("svc-doctor", &policy, WORKING_SESSION_TTL).await)
    }

    /// Requests an outage session like [`Self::try_session`]; `None` if hosts get none.
    pub async fn try_outage_session(&self) -> Option<Result<TemporaryCredentials, StsError>> {
        let (StoreConfig::S3(s3), Some(assumer)) = (&self.store, &self.sts) else { return None };
        if assumer.outage_ttl <= WORKING_SESSION_TTL {
            return None;
        }
        let policy = assumer.outage_policy(&s3.bucket, &Self::probe_slot(), Epoch(1));
        Some(assumer.sts.assume_role("svc-doctor", &policy, assumer.outage_ttl).await)
    }

    /// The store access of a machine's host.
    ///
    /// # Errors
    /// [`StsError`] of the working session.
    pub async fn access(&self, machine: &MachineRow, grant: SessionGrant) -> Result<StoreAccess, StsError> {
        let prefix = SlotPrefix::new(&machine.user, &machine.slot);
        let (mut session, mut outage) = (None, None);
        if let (StoreConfig::S3(s3), Some(assumer)) = (&self.store, &self.sts) {
            let policy = policy::slot_policy(&assumer.partition, &s3.bucket, &prefix, assumer.writes);
            let name = format!("svc-{}", machine.id);
            let working = assumer.assume(&name, &policy, WORKING_SESSION_TTL);
            let extra = async {
                match grant {
                    SessionGrant::Working => None,
                    SessionGrant::WithOutage => assumer.outage(&s3.bucket, machine).await,
                }
            };
            let (given, extra) = tokio::join!(working, extra);
            session = Some(given?);
            outage = extra;
        }
        Ok(StoreAccess { store: self.store.clone(), prefix, session, outage })
    }
}

/// One machine's access. It holds credentials and has no Debug.
pub struct StoreAccess {
    store: StoreConfig,
    prefix: SlotPrefix,
    session: Option<TemporaryCredentials>,
    outage: Option<TemporaryCredentials>,
}

impl StoreAccess {
    fn credentials(&self, s3: &S3Config) -> TemporaryCredentials {
        self.session.clone().unwrap_or_else(|| TemporaryCredentials {
            access_key: s3.access_key.clone(),
            secret_key: s3.secret_key.clone(),
            session_token: s3.session_token.clone(),
            // A host with short-lived credentials renews them, and so follows a change of the setting.
            expires_at: s3.expires_at.unwrap_or_else(in_an_hour),
        })
    }

    /// The content of `r2.env`.
    pub fn env_file(&self) -> String {
        let s3 = match &self.store {
            StoreConfig::S3(s3) => s3,
            StoreConfig::Directory(dir) => {
                return env_line(OBJECT_STORE_URL.name, &format!("file://{}", dir.display()));
            }
        };
        let credentials = self.credentials(s3);
        let mut text = String::new();
        let mut line = |variable: &Variable, value: &str| text.push_str(&env_line(variable.name, value));
        line(&OBJECT_STORE_URL, &format!("s3://{}", s3.bucket));
        line(&AWS_REGION, &s3.region);
        line(&AWS_ACCESS_KEY_ID, &credentials.access_key);
        line(&AWS_SECRET_ACCESS_KEY, credentials.secret_key.expose_secret());
        if let Some(endpoint) = &s3.endpoint {
            line(&OBJECT_STORE_ENDPOINT, endpoint);
        }
        if let Some(token) = &credentials.session_token {
            line(&AWS_SESSION_TOKEN, token.expose_secret());
        }
        if self.session.is_some() {
            line(&AWS_CREDENTIAL_EXPIRATION, &rfc3339_ms(credentials.expires_at));
        }
        text
    }

    /// The response of the route; `None` if the store is a directory, which has no credentials.
    pub fn wire(&self) -> Option<StorageCredentials> {
        let StoreConfig::S3(s3) = &self.store else { return None };
        Some(StorageCredentials {
            session: wire_session(self.credentials(s3)),
            location: StoreLocation {
                region: s3.region.clone(),
                endpoint: s3.endpoint.clone(),
                bucket: s3.bucket.clone(),
                prefix: format!("{}/", self.prefix.root()),
            },
            outage: self.outage.clone().map(wire_session),
        })
    }
}

fn wire_session(session: TemporaryCredentials) -> StoreSession {
    StoreSession {
        access_key_id: session.access_key,
        secret_access_key: session.secret_key,
        session_token: session.session_token,
        expires_at: session.expires_at,
    }
}

fn in_an_hour() -> Timestamp {
    Timestamp::now().saturating_add(SignedDuration::from_hours(1)).unwrap_or(Timestamp::MAX)
}

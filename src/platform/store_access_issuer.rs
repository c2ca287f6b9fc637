//! Grants hosts access to the object store: its endpoint, and credentials for each host's own slot.
//!
//! With `sts`, no host receives credentials that can reach another slot or delete objects. A host's working session
//! lasts 15 minutes, so that a replaced machine soon loses access. A host also has an outage session, for when the
//! platform is unreachable: it lasts longer and can add snapshots, but cannot publish them as the latest. With
//! `static`, every host holds the platform's own credentials.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use secrecy::ExposeSecret;
use url::Url;

use super::db::machine_row::MachineRow;
use crate::vars;
use svc_base::clock::rfc3339_ms;
use svc_base::config::{Env, Flag, format_env_line};
use svc_base::error_chain::format_chain;
use svc_base::variable::Variable;
use svc_machine::epoch::Epoch;
use svc_machine::name::Slot;
use svc_store::config::{S3Config, StoreConfig};
use svc_store::credentials::TemporaryCredentials;
use svc_store::key::SlotPrefix;
use svc_store::policy::{self, Overwrites};
use svc_store::sts::{Sts, StsError};
use svc_store::vars::{
    AWS_ACCESS_KEY_ID, AWS_CREDENTIAL_EXPIRATION, AWS_REGION, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN,
    OBJECT_STORE_ENDPOINT, OBJECT_STORE_URL,
};
use svc_wire::storage::{StorageCredentials, StoreLocation, StoreSession};

/// The working session's lifetime: the shortest lifetime that STS grants.
const WORKING_SESSION_TTL: Duration = Duration::from_secs(900);
/// Maximum lifetime of the outage session: AWS grants at most 12 hours, other stores up to 7 days.
const MAX_OUTAGE_TTL: Duration = Duration::from_secs(7 * 24 * 3600);
/// Timeout for requesting an outage session. A host waits 10 s for both sessions.
const OUTAGE_SESSION_TIMEOUT: Duration = Duration::from_secs(3);
/// Fallback lifetime, which every role grants; a longer lifetime may exceed the role's maximum.
const FALLBACK_SESSION_TTL: Duration = Duration::from_secs(3600);

/// The setting `STORE_HOST_CREDENTIALS`.
#[derive(Debug, Clone)]
pub enum HostCredentials {
    /// Hosts receive the platform's own credentials; none if the store is a directory.
    Static,
    /// Hosts receive sessions that are limited to their own slot.
    Sts(StsConfig),
}

/// The settings `STS_*`.
#[derive(Debug, Clone)]
pub struct StsConfig {
    pub endpoint: Url,
    pub role_arn: String,
    /// How long hosts can store snapshots while the platform is unreachable.
    pub outage_ttl: Duration,
    /// The setting `STORE_WRITE_ONCE`.
    pub overwrites: Overwrites,
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
                env.add_error(
                    variable,
                    "is required without STS_ROLE_ARN: set STS_ROLE_ARN to use sts, or set this to static, which gives \
                     every host the platform's own credentials",
                );
                return None;
            }
            Some(_) => {
                env.add_error(variable, "must be sts or static");
                return None;
            }
        };
        if !is_sts {
            return Some(Self::Static);
        }
        let role_arn = env.required::<String>(&vars::STS_ROLE_ARN);
        let outage_ttl = Duration::from_secs(env.or_default(&vars::STS_DURATION_SECONDS));
        if !(WORKING_SESSION_TTL..=MAX_OUTAGE_TTL).contains(&outage_ttl) {
            env.add_error(&vars::STS_DURATION_SECONDS, "must be between 900 and 604800");
        }
        let StoreConfig::S3(s3) = store? else {
            env.add_error(variable, "sts requires an s3:// store");
            return None;
        };
        let overwrites = match env.flag(&vars::STORE_WRITE_ONCE) {
            Flag::On => Overwrites::Denied,
            Flag::Off => Overwrites::Allowed,
        };
        let endpoint = read_sts_endpoint(env, s3);
        Some(Self::Sts(StsConfig { endpoint: endpoint?, role_arn: role_arn?, outage_ttl, overwrites }))
    }
}

/// Reads `STS_ENDPOINT`; the default is the store's own endpoint, or AWS's endpoint for the region.
fn read_sts_endpoint(env: &mut Env, s3: &S3Config) -> Option<Url> {
    if env.is_set(&vars::STS_ENDPOINT) {
        return env.web_url(&vars::STS_ENDPOINT);
    }
    let text = match (&s3.endpoint, s3.region.as_str()) {
        (Some(endpoint), _) => endpoint.clone(),
        (None, "auto") => {
            env.add_error(&AWS_REGION, "is required for AWS's own STS");
            return None;
        }
        (None, region) if region.starts_with("cn-") => format!("https://sts.{region}.amazonaws.com.cn"),
        (None, region) => format!("https://sts.{region}.amazonaws.com"),
    };
    text.parse().map_err(|error| env.add_error(&vars::STS_ENDPOINT, error)).ok()
}

/// The sessions that a host receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionGrant {
    /// Only the working session.
    WorkingOnly,
    /// Also an outage session, if STS grants one within `OUTAGE_SESSION_TIMEOUT`.
    WorkingAndOutage,
}

/// Grants hosts access to the object store.
pub struct StoreAccessIssuer {
    store: StoreConfig,
    sts: Option<SessionIssuer>,
}

struct SessionIssuer {
    sts: Sts,
    outage_ttl: Duration,
    partition: String,
    overwrites: Overwrites,
}

impl SessionIssuer {
    fn outage_policy(&self, bucket: &str, slot: &SlotPrefix, epoch: Epoch) -> String {
        let from = Timestamp::now();
        let ttl = SignedDuration::try_from(self.outage_ttl).unwrap_or(SignedDuration::MAX);
        let window =
            policy::SessionWindow { from, until: from.saturating_add(ttl).unwrap_or(Timestamp::MAX) };
        policy::outage_policy(&self.partition, bucket, (slot, epoch), window, self.overwrites)
    }

    /// Requests a session that can store snapshots for the machine's epoch. Returns `None` if it would last no longer
    /// than the working session, or if STS does not grant it within `OUTAGE_SESSION_TIMEOUT`.
    async fn request_outage_session(
        &self,
        bucket: &str,
        machine: &MachineRow,
    ) -> Option<TemporaryCredentials> {
        if self.outage_ttl <= WORKING_SESSION_TTL {
            return None;
        }
        let slot = SlotPrefix::new(&machine.user, &machine.slot);
        let policy = self.outage_policy(bucket, &slot, machine.epoch);
        let name = format!("svc-outage-{}", machine.id);
        let session = self.request_session(&name, &policy, self.outage_ttl);
        match tokio::time::timeout(OUTAGE_SESSION_TIMEOUT, session).await {
            Ok(Ok(session)) => Some(session),
            Ok(Err(error)) => {
                tracing::warn!(machine = %machine.id, error = %format_chain(&error), "cannot get an outage session for a host");
                None
            }
            Err(_) => {
                tracing::warn!(machine = %machine.id, "cannot get an outage session for a host: the STS call timed out");
                None
            }
        }
    }

    /// Requests a session. If the role does not grant the lifetime `ttl`, falls back to the lifetime that every role
    /// grants.
    async fn request_session(
        &self,
        session_name: &str,
        policy: &str,
        ttl: Duration,
    ) -> Result<TemporaryCredentials, StsError> {
        match self.sts.assume_role(session_name, policy, ttl).await {
            Err(StsError::ErrorResponse { code, message, .. })
                if ttl > FALLBACK_SESSION_TTL && code == "ValidationError" =>
            {
                tracing::warn!(
                    message,
                    seconds = ttl.as_secs(),
                    "STS does not grant sessions that last STS_DURATION_SECONDS"
                );
                self.sts.assume_role(session_name, policy, FALLBACK_SESSION_TTL).await
            }
            result => result,
        }
    }
}

impl StoreAccessIssuer {
    /// Prepares the kind of access selected by `credentials`.
    ///
    /// # Errors
    /// If the STS client cannot be created.
    pub fn new(store: &StoreConfig, credentials: &HostCredentials) -> anyhow::Result<Self> {
        let sts = match (store, credentials) {
            (StoreConfig::S3(s3), HostCredentials::Sts(config)) => {
                let role = config.role_arn.clone();
                // AWS partitions other than `aws` have names such as `aws-cn`; the role's ARN contains the name.
                let partition =
                    role.split(':').nth(1).filter(|name| name.starts_with("aws")).unwrap_or("aws");
                let partition = partition.to_owned();
                let sts = Sts::new(&config.endpoint, s3.region.clone(), role, s3.credential())?;
                Some(SessionIssuer {
                    sts,
                    outage_ttl: config.outage_ttl,
                    partition,
                    overwrites: config.overwrites,
                })
            }
            _ => None,
        };
        Ok(Self { store: store.clone(), sts })
    }

    /// Sets the store's endpoint for hosts; `None` keeps the platform's.
    #[must_use]
    pub fn with_host_endpoint(mut self, endpoint: Option<&Url>) -> Self {
        if let (StoreConfig::S3(s3), Some(endpoint)) = (&mut self.store, endpoint) {
            s3.endpoint = Some(endpoint.to_string());
        }
        self
    }

    /// Returns whether hosts hold credentials that reach every slot.
    pub fn shares_platform_credentials(&self) -> bool {
        self.sts.is_none() && matches!(self.store, StoreConfig::S3(_))
    }

    /// Returns whether host sessions may overwrite objects that hosts write only once; `None` without sessions.
    pub fn overwrites(&self) -> Option<Overwrites> {
        self.sts.as_ref().map(|issuer| issuer.overwrites)
    }

    /// Returns the unused slot for which the doctor's probes request sessions.
    pub fn probe_slot() -> SlotPrefix {
        SlotPrefix::new(&"svc-doctor".parse().expect("the user's id is valid"), &Slot::primary())
    }

    /// Requests a working session for the unused slot; `None` if hosts receive no sessions.
    pub async fn probe_session(&self) -> Option<Result<TemporaryCredentials, StsError>> {
        let (StoreConfig::S3(s3), Some(issuer)) = (&self.store, &self.sts) else { return None };
        let policy =
            policy::slot_policy(&issuer.partition, &s3.bucket, &Self::probe_slot(), issuer.overwrites);
        Some(issuer.sts.assume_role("svc-doctor", &policy, WORKING_SESSION_TTL).await)
    }

    /// Requests an outage session for the unused slot; `None` if hosts receive no outage sessions.
    pub async fn probe_outage_session(&self) -> Option<Result<TemporaryCredentials, StsError>> {
        let (StoreConfig::S3(s3), Some(issuer)) = (&self.store, &self.sts) else { return None };
        if issuer.outage_ttl <= WORKING_SESSION_TTL {
            return None;
        }
        let policy = issuer.outage_policy(&s3.bucket, &Self::probe_slot(), Epoch(1));
        Some(issuer.sts.assume_role("svc-doctor", &policy, issuer.outage_ttl).await)
    }

    /// Grants a machine's host its access to the store.
    ///
    /// # Errors
    /// [`StsError`] if STS does not grant the working session.
    pub async fn grant_access(
        &self,
        machine: &MachineRow,
        grant: SessionGrant,
    ) -> Result<StoreAccess, StsError> {
        let prefix = SlotPrefix::new(&machine.user, &machine.slot);
        let (mut session, mut outage) = (None, None);
        if let (StoreConfig::S3(s3), Some(issuer)) = (&self.store, &self.sts) {
            let policy = policy::slot_policy(&issuer.partition, &s3.bucket, &prefix, issuer.overwrites);
            let name = format!("svc-{}", machine.id);
            let working = issuer.request_session(&name, &policy, WORKING_SESSION_TTL);
            let outage_session = async {
                match grant {
                    SessionGrant::WorkingOnly => None,
                    SessionGrant::WorkingAndOutage => {
                        issuer.request_outage_session(&s3.bucket, machine).await
                    }
                }
            };
            let (granted, outage_granted) = tokio::join!(working, outage_session);
            session = Some(granted?);
            outage = outage_granted;
        }
        Ok(StoreAccess { store: self.store.clone(), prefix, session, outage })
    }
}

/// One machine's access to the store. Does not implement `Debug`, because it holds credentials.
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
            // Static credentials have an expiry, too: a host that had a session renews them, and so receives a session
            // again if the setting is changed back.
            expires_at: s3.expires_at.unwrap_or_else(one_hour_from_now),
        })
    }

    /// Renders the content of `r2.env`.
    pub fn to_env_file(&self) -> String {
        let s3 = match &self.store {
            StoreConfig::S3(s3) => s3,
            StoreConfig::Directory(dir) => {
                return format_env_line(OBJECT_STORE_URL.name, &format!("file://{}", dir.display()));
            }
        };
        let credentials = self.credentials(s3);
        let mut text = String::new();
        let mut line =
            |variable: &Variable, value: &str| text.push_str(&format_env_line(variable.name, value));
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

    /// Converts the access to the API response; `None` if the store is a directory, which has no credentials.
    pub fn to_response(&self) -> Option<StorageCredentials> {
        let StoreConfig::S3(s3) = &self.store else { return None };
        Some(StorageCredentials {
            session: to_wire_session(self.credentials(s3)),
            location: StoreLocation {
                region: s3.region.clone(),
                endpoint: s3.endpoint.clone(),
                bucket: s3.bucket.clone(),
                prefix: format!("{}/", self.prefix.root()),
            },
            outage: self.outage.clone().map(to_wire_session),
        })
    }
}

fn to_wire_session(session: TemporaryCredentials) -> StoreSession {
    StoreSession {
        access_key_id: session.access_key,
        secret_access_key: session.secret_key,
        session_token: session.session_token,
        expires_at: session.expires_at,
    }
}

fn one_hour_from_now() -> Timestamp {
    Timestamp::now().saturating_add(SignedDuration::from_hours(1)).unwrap_or(Timestamp::MAX)
}

//! The platform's configuration, from environment variables; every mistake is reported at once.
//!
//! Owns names, defaults and checks of the variables. The invariant: a value that got here is usable as it is.

mod connections;
mod keys;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use url::Url;

use super::db;
use super::host_settings::HostSettings;
use super::host_store::HostCredentials;
use super::platform_key::PlatformKeys;
use super::rates::RateConfig;
use super::router::RouterConfig;
use super::token_rotation::TokenTiming;
use crate::config::{ConfigError, Env, Flag};
use crate::machine::name::{ImageVersion, Location, ServerType};
use crate::store::config::StoreConfig;

pub use self::connections::Connections;

/// All settings of `svc-platform`.
pub struct PlatformConfig {
    pub api: Listen,
    pub router: Listen,
    pub routing: RouterConfig,
    pub database: tokio_postgres::Config,
    /// Derive what must be re-derivable: tokens of hosts, the key that seals signing keys.
    pub keys: PlatformKeys,
    /// The bearer token with every scope.
    pub secret: SecretString,
    pub provisioning: Provisioning,
    pub hosts: HostSettings,
    pub provider: ProviderConfig,
    pub store: StoreConfig,
    pub host_credentials: HostCredentials,
    pub connections: Connections,
    pub rates: RateConfig,
    pub timing: Timing,
}

/// One listener; without a certificate it speaks plain HTTP.
pub struct Listen {
    pub address: SocketAddr,
    pub tls: Option<TlsFiles>,
}

pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// What the provision route decides by.
pub struct Provisioning {
    pub enabled: Flag,
    pub billing_enforcement: Flag,
    pub image_version: ImageVersion,
    pub server_type: ServerType,
    pub location: Location,
    /// Where a server is created when the provider has no capacity in its location, in this order.
    pub fallback_locations: Vec<Location>,
    pub preview_max_per_owner: u32,
    pub preview_ttl: Duration,
}

pub struct ProviderConfig {
    pub api_url: Url,
    pub token: SecretString,
    pub image: String,
    /// How long a create whose answer was lost may still show up.
    pub ambiguous_wait: Duration,
}

/// Of `PLATFORM_SECRET`: it cannot be guessed, and it has every scope.
pub const MIN_SECRET_CHARS: usize = 32;

/// The locations that an operator may name for one machine.
pub const MAX_FALLBACK_LOCATIONS: usize = 8;

/// Intervals and deadlines of the control plane's own work.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    pub registration_ttl: Duration,
    /// How long a host may be unreachable before its last backup is passed over.
    pub last_backup_deadline: Duration,
    /// How long a last backup may make no progress before an operator is asked.
    pub last_backup_stall: Duration,
    /// How long a last backup may take in all before an operator is asked.
    pub last_backup_limit: Duration,
    /// How long, beyond the time for a shutdown, a provider may fail to switch a replaced server off before the
    /// replacement goes ahead: the fence protects the data.
    pub power_off_retry: Duration,
    /// How long a replaced server is kept after its successor's first healthy heartbeat.
    pub predecessor_keep: Duration,
    /// How long a deleted machine's server is kept.
    pub delete_grace: Duration,
    /// How far this process's clock may be from the database's.
    pub max_clock_skew: Duration,
    /// How often the runner looks for due operations without a nudge.
    pub poll: Duration,
    /// How long a step stays with a process that has gone silent.
    pub lease: Duration,
    pub reconcile: Duration,
    /// How long a host may take to shut down before its power is cut.
    pub resize_shutdown: Duration,
    /// From then on, how long a change of type may take before it is given up.
    pub resize_change: Duration,
    /// How long a resized host may take to be switched on, and again to say that it is well.
    pub resize_health: Duration,
    /// An operation that makes no progress for this long ends as failed.
    pub operation_deadline: Duration,
    /// So does one that takes this long in all, and a boot that has not led to a registration by then.
    pub operation_limit: Duration,
    /// How long a host must have been silent before its server counts as gone.
    pub server_silence: Duration,
    /// How long the provider is not asked again for the server of a machine because of its heartbeats.
    pub server_check: Duration,
    /// How long a server of ours that belongs to no known machine is left alone.
    pub orphan_grace: Duration,
    /// How long a host may say nothing of an update that it was asked for.
    pub rollout_silence: Duration,
    pub keys: KeyTiming,
    pub tokens: TokenTiming,
    pub retention: Retention,
}

/// How long rows stay that nothing needs any more.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Ended operations with their logs, and ended rollouts.
    pub operations: Duration,
    pub audit: Duration,
}

/// When proof keys change.
#[derive(Debug, Clone, Copy)]
pub struct KeyTiming {
    /// The age at which a key gets a successor.
    pub rotate: Duration,
    /// How long an old key stays after every host has acknowledged the new one.
    pub overlap: Duration,
    /// A host without a heartbeat for this long is not waited for.
    pub max_silence: Duration,
}

impl PlatformConfig {
    /// # Errors
    /// Every mistake in the environment.
    pub fn read(mut env: Env) -> Result<Self, ConfigError> {
        let built = Self::build(&mut env);
        env.finish(built)
    }

    /// The listener of the API alone.
    pub fn api(env: &mut Env) -> Listen {
        listen(env, "PLATFORM", SocketAddr::from(([127, 0, 0, 1], 8080)))
    }

    fn build(env: &mut Env) -> Option<Self> {
        let api = Self::api(env);
        let router = listen(env, "ROUTER", SocketAddr::from(([0, 0, 0, 0], 8443)));
        let routing = RouterConfig::read(env);
        let database = database(env);
        let keys = keys::read(env);
        let secret = platform_secret(env);
        let provisioning = provisioning(env);
        let hosts = HostSettings::read(env);
        let provider = provider(env);
        let store = StoreConfig::read(env);
        let host_credentials = HostCredentials::read(env, store.as_ref());
        let connections = Connections::read(env);
        let rates = RateConfig::read(env);
        let timing = Timing {
            registration_ttl: seconds(env, "REGISTRATION_TTL_SECONDS", 1800),
            last_backup_deadline: seconds(env, "LAST_BACKUP_DEADLINE_SECONDS", 60),
            last_backup_stall: seconds(env, "LAST_BACKUP_STALL_SECONDS", 300),
            last_backup_limit: seconds(env, "LAST_BACKUP_LIMIT_SECONDS", 43_200),
            power_off_retry: seconds(env, "POWER_OFF_RETRY_SECONDS", 120),
            predecessor_keep: seconds(env, "PREDECESSOR_KEEP_SECONDS", 86_400),
            delete_grace: seconds(env, "DELETE_GRACE_SECONDS", 86_400),
            max_clock_skew: Duration::from_millis(env.or("MAX_CLOCK_SKEW_MS", 2000)),
            poll: Duration::from_millis(env.or("PLATFORM_POLL_MS", 500).max(10)),
            lease: seconds(env, "PLATFORM_LEASE_SECONDS", 15).max(Duration::from_secs(1)),
            reconcile: seconds(env, "RECONCILE_SECONDS", 30).max(Duration::from_secs(1)),
            resize_shutdown: seconds(env, "RESIZE_SHUTDOWN_SECONDS", 90),
            resize_change: seconds(env, "RESIZE_CHANGE_SECONDS", 600),
            resize_health: seconds(env, "RESIZE_HEALTH_SECONDS", 600),
            operation_deadline: seconds(env, "OPERATION_DEADLINE_SECONDS", 7200),
            operation_limit: seconds(env, "OPERATION_LIMIT_SECONDS", 86_400),
            server_check: seconds(env, "SERVER_CHECK_SECONDS", 60),
            server_silence: seconds(env, "SERVER_GONE_SILENCE_SECONDS", 120),
            orphan_grace: seconds(env, "ORPHAN_GRACE_SECONDS", 86_400),
            rollout_silence: seconds(env, "ROLLOUT_SILENCE_SECONDS", 1800),
            keys: KeyTiming {
                rotate: seconds(env, "PROOF_KEY_ROTATE_SECONDS", 30 * 86_400).max(Duration::from_secs(1)),
                overlap: seconds(env, "PROOF_KEY_OVERLAP_SECONDS", 120).max(Duration::from_secs(1)),
                max_silence: seconds(env, "PROOF_KEY_SILENCE_SECONDS", 86_400).max(Duration::from_secs(1)),
            },
            tokens: TokenTiming {
                rotate: seconds(env, "UPGRADE_TOKEN_ROTATE_SECONDS", 30 * 86_400).max(Duration::from_secs(1)),
                overlap: seconds(env, "UPGRADE_TOKEN_OVERLAP_SECONDS", 3600),
            },
            retention: Retention {
                operations: days(env, "OPERATION_RETENTION_DAYS", 400),
                audit: days(env, "AUDIT_RETENTION_DAYS", 3653),
            },
        };
        Some(Self {
            api,
            router,
            routing: routing?,
            database: database?,
            keys: keys?,
            secret: secret?,
            provisioning: provisioning?,
            hosts: hosts?,
            provider: provider?,
            store: store?,
            host_credentials: host_credentials?,
            connections,
            rates,
            timing,
        })
    }
}

fn seconds(env: &mut Env, name: &str, default: u64) -> Duration {
    Duration::from_secs(env.or(name, default))
}

fn days(env: &mut Env, name: &str, default: u64) -> Duration {
    Duration::from_secs(env.or(name, default).clamp(1, 36_500) * 86_400)
}

fn listen(env: &mut Env, name: &str, default: SocketAddr) -> Listen {
    let address = env.or(&format!("{name}_LISTEN"), default);
    let (cert, key) = (format!("{name}_TLS_CERT_FILE"), format!("{name}_TLS_KEY_FILE"));
    let tls = match (env.path(&cert), env.path(&key)) {
        (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
        (None, None) => None,
        (Some(_), None) => {
            env.mistake(&key, format!("is required with {cert}"));
            None
        }
        (None, Some(_)) => {
            env.mistake(&cert, format!("is required with {key}"));
            None
        }
    };
    Listen { address, tls }
}

fn database(env: &mut Env) -> Option<tokio_postgres::Config> {
    let name = "PLATFORM_DATABASE_URL";
    let url = env.required_secret(name)?;
    // The parser's own message can quote the password.
    let Ok(config) = url.expose_secret().parse() else {
        env.mistake(name, "must be postgres://user:password@host:port/database");
        return None;
    };
    db::usable(&config).map_err(|why| env.mistake(name, why)).ok()?;
    Some(config)
}

fn platform_secret(env: &mut Env) -> Option<SecretString> {
    let name = "PLATFORM_SECRET";
    let secret = env.required_secret(name)?;
    if secret.expose_secret().chars().count() < MIN_SECRET_CHARS {
        env.mistake(
            name,
            format!("must have at least {MIN_SECRET_CHARS} characters, as `openssl rand -hex 32` makes"),
        );
        return None;
    }
    Some(secret)
}

fn provisioning(env: &mut Env) -> Option<Provisioning> {
    let enabled = env.flag("CUSTOMER_VPS_ENABLED", Flag::Off);
    let billing_enforcement = env.flag("BILLING_ENFORCEMENT", Flag::On);
    let image_version = env.required("CUSTOMER_VPS_IMAGE_VERSION");
    let server_type = named(env, "PROVIDER_SERVER_TYPE", "cpx22");
    let location = named(env, "PROVIDER_LOCATION", "nbg1");
    let fallback_locations = fallback_locations(env);
    let preview_max_per_owner = env.or("PREVIEW_MAX_PER_OWNER", 8);
    let preview_ttl = Duration::from_secs(env.or::<u64>("PREVIEW_TTL_HOURS", 72).saturating_mul(3600));
    Some(Provisioning {
        enabled,
        billing_enforcement,
        image_version: image_version?,
        server_type: server_type?,
        location: location?,
        fallback_locations: fallback_locations?,
        preview_max_per_owner,
        preview_ttl,
    })
}

/// `nbg1,hel1`, in the order in which they are tried.
fn fallback_locations(env: &mut Env) -> Option<Vec<Location>> {
    let name = "PROVIDER_FALLBACK_LOCATIONS";
    let text = env.text(name).unwrap_or_default();
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    match names.map(str::parse).collect::<Result<Vec<Location>, _>>() {
        Ok(locations) if locations.len() <= MAX_FALLBACK_LOCATIONS => Some(locations),
        Ok(_) => {
            env.mistake(name, format!("must name at most {MAX_FALLBACK_LOCATIONS} locations"));
            None
        }
        Err(why) => {
            env.mistake(name, why);
            None
        }
    }
}

fn named<T: std::str::FromStr<Err: std::fmt::Display>>(
    env: &mut Env,
    name: &str,
    default: &str,
) -> Option<T> {
    if env.is_set(name) { env.optional(name) } else { default.parse().ok() }
}

pub(super) fn url(env: &mut Env, name: &str) -> Option<Url> {
    let url: Url = env.optional(name)?;
    if !matches!(url.scheme(), "http" | "https") {
        env.mistake(name, "must be an http or https URL");
        return None;
    }
    Some(url)
}

fn provider(env: &mut Env) -> Option<ProviderConfig> {
    let default = Url::parse("https://api.hetzner.cloud/v1").expect("a literal URL");
    let api_url = if env.is_set("PROVIDER_API_URL") { url(env, "PROVIDER_API_URL") } else { Some(default) };
    let token = env.required_secret("PROVIDER_API_TOKEN");
    let image = env.or("PROVIDER_IMAGE", "debian-12".to_owned());
    let ambiguous_wait = seconds(env, "PROVIDER_AMBIGUOUS_WAIT_SECONDS", 60);
    Some(ProviderConfig { api_url: api_url?, token: token?, image, ambiguous_wait })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Vec<(&'static str, &'static str)> {
        vec![
            ("PLATFORM_DATABASE_URL", "postgres://u:hunter2@127.0.0.1/svc"),
            ("PLATFORM_KEY", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="),
            ("PLATFORM_SECRET", "an-operators-secret-of-32-letters"),
            ("PLATFORM_PUBLIC_URL", "http://127.0.0.1:1"),
            ("CUSTOMER_VPS_IMAGE_VERSION", "v1"),
            ("PROVIDER_API_TOKEN", "token"),
            ("OBJECT_STORE_URL", "s3://bucket"),
            ("AWS_ACCESS_KEY_ID", "a"),
            ("AWS_SECRET_ACCESS_KEY", "s"),
            ("STORE_HOST_CREDENTIALS", "static"),
            ("APP_HOST", "app.test"),
            ("CODE_HOST", "code.test"),
            ("IDP_ISSUER", "https://idp.test"),
            ("IDP_AUDIENCE", "svc"),
            ("IDP_SIGN_IN_URL", "https://idp.test/sign-in"),
        ]
    }

    #[test]
    fn short_platform_secret_is_refused_without_showing_it() {
        let short = mistakes_with(&[("PLATFORM_SECRET", "hunter2-of-31-characters-0123456")]);
        assert!(short.is_empty(), "{short:?}");
        let short = mistakes_with(&[("PLATFORM_SECRET", "hunter2-of-31-characters-012345")]);
        assert_eq!(short.len(), 1, "{short:?}");
        assert!(short[0].starts_with("PLATFORM_SECRET: must have at least 32 characters"), "{short:?}");
        assert!(!short[0].contains("hunter2"), "{short:?}");
    }

    fn mistakes_with(changes: &[(&'static str, &'static str)]) -> Vec<String> {
        let mut pairs = whole();
        for (name, value) in changes {
            pairs.retain(|(known, _)| known != name);
            if !value.is_empty() {
                pairs.push((name, value));
            }
        }
        PlatformConfig::read(Env::from_pairs(pairs)).err().map(|error| error.mistakes).unwrap_or_default()
    }

    #[test]
    fn the_smallest_configuration_has_the_documented_defaults() {
        let config = PlatformConfig::read(Env::from_pairs(whole())).map_err(|e| e.to_string()).ok().unwrap();
        assert_eq!(config.api.address.to_string(), "127.0.0.1:8080");
        assert_eq!(config.router.address.to_string(), "0.0.0.0:8443");
        assert_eq!(config.provisioning.enabled, Flag::Off);
        assert_eq!(config.provisioning.server_type.as_str(), "cpx22");
        let url = config.hosts.bundle_url.of(&config.provisioning.image_version);
        assert_eq!(url, "http://127.0.0.1:1/system-bundles/v1/svc-host-bundle.tar.gz");
    }

    #[test]
    fn all_mistakes_are_named_at_once_and_no_value_is_quoted() {
        let mistakes = mistakes_with(&[
            ("PLATFORM_DATABASE_URL", "postgres://u:hunter2@[/svc"),
            ("PLATFORM_KEY", "hunter2"),
            ("PLATFORM_KEY_PREVIOUS", "hunter2-too"),
            ("PLATFORM_SECRET", ""),
            ("PLATFORM_TLS_CERT_FILE", "/cert"),
            ("PROVIDER_SERVER_TYPE", "CPX"),
            ("PLATFORM_PUBLIC_URL", "ftp://x"),
            ("REGISTRATION_TTL_SECONDS", "soon"),
        ]);
        assert_eq!(mistakes.len(), 8, "{mistakes:#?}");
        assert!(!mistakes.concat().contains("hunter2"), "{mistakes:#?}");
    }

    #[test]
    fn hosts_get_short_lived_credentials_wherever_a_role_is_named() {
        let credentials = |changes: &[(&'static str, &'static str)]| {
            let mut pairs = whole();
            for (name, value) in changes {
                pairs.retain(|(known, _)| known != name);
                pairs.push((name, value));
            }
            let pairs = pairs.into_iter().filter(|(_, value)| !value.is_empty());
            PlatformConfig::read(Env::from_pairs(pairs)).map(|config| config.host_credentials)
        };
        let role = ("STS_ROLE_ARN", "arn:aws:iam::123456789012:role/svc-host");
        let unsaid = ("STORE_HOST_CREDENTIALS", "");
        let Ok(HostCredentials::Sts(sts)) = credentials(&[unsaid, role, ("AWS_REGION", "eu-central-1")])
        else {
            panic!("the role alone is enough");
        };
        assert_eq!(sts.endpoint.as_str(), "https://sts.eu-central-1.amazonaws.com/");
        assert_eq!(sts.outage_ttl, Duration::from_secs(43_200));
        let Ok(HostCredentials::Sts(sts)) =
            credentials(&[unsaid, role, ("OBJECT_STORE_ENDPOINT", "http://127.0.0.1:9000")])
        else {
            panic!("the store's own endpoint serves STS as well");
        };
        assert_eq!(sts.endpoint.as_str(), "http://127.0.0.1:9000/");
        assert!(matches!(credentials(&[role]), Ok(HostCredentials::Static)), "what is said is done");
        for (changes, named) in [
            (&[unsaid][..], "STORE_HOST_CREDENTIALS"),
            (&[("STORE_HOST_CREDENTIALS", "sts"), ("AWS_REGION", "eu-central-1")], "STS_ROLE_ARN"),
            (
                &[unsaid, role, ("AWS_REGION", "eu-central-1"), ("STS_DURATION_SECONDS", "899")],
                "STS_DURATION_SECONDS",
            ),
            (&[unsaid, role], "AWS_REGION"),
            (&[("STORE_HOST_CREDENTIALS", "none")], "STORE_HOST_CREDENTIALS"),
        ] {
            let Err(error) = credentials(changes) else { panic!("{changes:?} is a mistake") };
            assert!(error.mistakes.len() == 1 && error.mistakes[0].starts_with(named), "{error}");
        }
    }
}

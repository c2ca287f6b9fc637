//! The platform's configuration, read from environment variables. All invalid settings are reported together.
//!
//! Invariant: every value in a [`PlatformConfig`] has been validated.

mod connections;
pub mod host_trust;
mod keys;
mod provisioning;
pub mod router;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use url::Url;

use super::db;
use super::db::kept_servers::ServerRetention;
use super::host_settings::HostSettings;
use super::platform_key::PlatformKeys;
use super::rate_limits::RateLimitConfig;
use super::store_access_issuer::HostCredentials;
use super::token_rotation::TokenTiming;
use crate::vars;
use svc_base::config::{ConfigError, Env, check_operator_secret};
use svc_base::variable::Variable;
use svc_router::config::RouterConfig;
use svc_router::host_trust::HostTrust;
use svc_store::config::StoreConfig;

pub use self::connections::ConnectionLimits;
pub use self::provisioning::{MAX_FALLBACK_LOCATIONS, ProviderConfig, Provisioning};

/// All settings of `svc-platform`.
pub struct PlatformConfig {
    pub api: ListenerConfig,
    pub router: ListenerConfig,
    pub routing: RouterConfig,
    pub database: tokio_postgres::Config,
    /// The root keys. Host and operator tokens, and the key that seals all keys in the database, are derived from them.
    pub keys: PlatformKeys,
    /// The bearer token that has every scope.
    pub secret: SecretString,
    pub provisioning: Provisioning,
    pub hosts: HostSettings,
    /// How hosts' TLS certificates are verified.
    pub trust: HostTrust,
    pub provider: ProviderConfig,
    pub store: StoreConfig,
    pub host_credentials: HostCredentials,
    pub connections: ConnectionLimits,
    pub rate_limits: RateLimitConfig,
    pub timing: Timing,
}

impl PlatformConfig {
    /// Returns a warning if `HOST_DOMAIN` belongs to the same site as one of the platform's public hosts or the sign-in
    /// page.
    pub fn shared_site_warning(&self) -> Option<String> {
        let domain = self.hosts.domain.as_ref()?;
        let RouterConfig { app_host, code_host, sign_in, .. } = &self.routing;
        let (site, names): (Vec<&str>, Vec<&str>) = [
            (vars::APP_HOST.name, app_host.name()),
            (vars::CODE_HOST.name, code_host.name()),
            (vars::IDP_SIGN_IN_URL.name, sign_in.host_str().unwrap_or_default()),
        ]
        .into_iter()
        .filter_map(|(name, host)| Some((domain.shared_site(host)?, name)))
        .unzip();
        let site = site.first()?;
        Some(format!(
            "HOST_DOMAIN ({}) belongs to the same site ({site}) as {}: an owner with root access to a \
             machine that is reachable by its name can serve pages of that site and set cookies for {site}",
            domain.as_str(),
            names.join(" and ")
        ))
    }

    /// Returns a warning if the platform cannot reach new machines at `CUSTOMER_VPS_HTTPS_PORT`. A simulated
    /// provider, recognized by its URL, may use any port.
    pub fn host_port_warning(&self) -> Option<String> {
        let (port, provider) = (self.hosts.https_port, vars::PROVIDER_API_URL.default_value::<Url>());
        let is_unreachable = port != 443 && self.provider.api_url.host() == provider.host();
        is_unreachable.then(|| {
            format!("CUSTOMER_VPS_HTTPS_PORT is {port}, but new machines accept HTTPS only on port 443")
        })
    }
}

/// Settings for a listener. Without a certificate, it serves plain HTTP.
pub struct ListenerConfig {
    pub address: SocketAddr,
    pub tls: Option<TlsFiles>,
}

pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// Intervals and timeouts of the control plane.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Timeout for a host's registration, counted from the creation of its server, or from the host's last report of
    /// progress.
    pub registration_ttl: Duration,
    /// How long a host may be unreachable before its final backup is skipped.
    pub final_backup_unreachable_timeout: Duration,
    /// Time without progress after which a final backup waits for an operator.
    pub final_backup_stall_timeout: Duration,
    /// Total time after which a final backup waits for an operator.
    pub final_backup_limit: Duration,
    /// How long powering off a replaced or deleted machine's server is retried after the shutdown timeout. After that,
    /// the operation continues: in a replacement, the fence protects the data.
    pub power_off_retry_timeout: Duration,
    /// Retention period for a replaced server after its successor's first healthy heartbeat.
    pub predecessor_retention: Duration,
    /// Retention period for a deleted machine's server.
    pub delete_grace: Duration,
    /// Interval at which each slot's file backups are pruned; if zero, they are pruned only on request.
    pub files_prune_interval: Duration,
    /// Maximum difference between this process's clock and the database's.
    pub max_clock_skew: Duration,
    /// Interval at which the runner polls for due operations.
    pub poll_interval: Duration,
    /// Duration of a lease: a process that does not renew it within this time loses its operation.
    pub lease_ttl: Duration,
    /// Interval between passes of the reconciler.
    pub reconcile_interval: Duration,
    /// Timeout for a host's shutdown, after which its power is cut.
    pub shutdown_timeout: Duration,
    /// Timeout for cutting the power and changing the server type after the shutdown. When it expires, the change is
    /// abandoned.
    pub server_type_change_timeout: Duration,
    /// Timeout for powering on a resized server, for restarting a server, and for the host's first healthy heartbeat
    /// after its server was powered on.
    pub host_return_timeout: Duration,
    /// Time without progress after which an operation fails, unless it is a deletion, is waiting for an operator, or is
    /// blocked by a problem with the provider account.
    pub operation_stall_timeout: Duration,
    /// Maximum duration of an operation, with the same exceptions. Also limits a boot that keeps reporting progress.
    pub operation_limit: Duration,
    /// Minimum time without a heartbeat after which a host's server may be considered gone.
    pub heartbeat_timeout: Duration,
    /// Minimum interval between heartbeat-triggered lookups of a machine's server at the provider.
    pub server_check_interval: Duration,
    /// How long a server with this installation's label but without a known machine is kept after it was first seen. It
    /// is then deleted only if an operator has released it.
    pub orphan_grace: Duration,
    /// How long a host may go without reporting progress after an update request.
    pub rollout_progress_timeout: Duration,
    pub keys: KeyTiming,
    pub tokens: TokenTiming,
    pub retention: Retention,
}

impl Timing {
    /// Returns the retention periods for the servers of machines that have left their slots.
    pub fn server_retention(&self) -> ServerRetention {
        ServerRetention {
            replaced: self.predecessor_retention,
            deleted: self.delete_grace,
            unregistered: self.heartbeat_timeout,
        }
    }
}

/// Retention periods for rows that are no longer needed.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Ended operations with their logs, and ended rollouts.
    pub operations: Duration,
    pub audit: Duration,
}

/// The signing key rotation schedule.
#[derive(Debug, Clone, Copy)]
pub struct KeyTiming {
    /// Age at which a key gets a successor.
    pub rotation_age: Duration,
    /// How long an old key remains active after every host that the rotation waits for has acknowledged the new one.
    /// Also the age at which a new app key starts to sign.
    pub overlap: Duration,
    /// Time without a heartbeat after which rotation no longer waits for a host.
    pub max_heartbeat_gap: Duration,
}

impl PlatformConfig {
    /// Reads and validates all settings.
    ///
    /// # Errors
    /// An error that lists every invalid setting in the environment.
    pub fn read(mut env: Env) -> Result<Self, ConfigError> {
        let config = Self::build(&mut env);
        env.finish(config)
    }

    /// Reads only the settings of the API's listener.
    pub fn read_api_listener(env: &mut Env) -> ListenerConfig {
        read_listener(
            env,
            &vars::PLATFORM_LISTEN,
            &vars::PLATFORM_TLS_CERT_FILE,
            &vars::PLATFORM_TLS_KEY_FILE,
        )
    }

    fn build(env: &mut Env) -> Option<Self> {
        let api = Self::read_api_listener(env);
        let router =
            read_listener(env, &vars::ROUTER_LISTEN, &vars::ROUTER_TLS_CERT_FILE, &vars::ROUTER_TLS_KEY_FILE);
        let routing = router::read(env);
        let database = read_database(env);
        let keys = keys::read(env);
        let secret = read_platform_secret(env);
        let provisioning = provisioning::read_provisioning(env);
        let hosts = HostSettings::read(env);
        let trust = host_trust::read(env, hosts.as_ref().and_then(|hosts| hosts.domain.clone()));
        let provider = provisioning::read_provider(env);
        let store = StoreConfig::read(env);
        let host_credentials = HostCredentials::read(env, store.as_ref());
        let connections = ConnectionLimits::read(env);
        let rate_limits = RateLimitConfig::read(env);
        let timing = Timing {
            registration_ttl: read_seconds(env, &vars::REGISTRATION_TTL_SECONDS),
            final_backup_unreachable_timeout: read_seconds(env, &vars::LAST_BACKUP_DEADLINE_SECONDS),
            final_backup_stall_timeout: read_seconds(env, &vars::LAST_BACKUP_STALL_SECONDS),
            final_backup_limit: read_seconds(env, &vars::LAST_BACKUP_LIMIT_SECONDS),
            power_off_retry_timeout: read_seconds(env, &vars::POWER_OFF_RETRY_SECONDS),
            predecessor_retention: read_seconds(env, &vars::PREDECESSOR_KEEP_SECONDS),
            delete_grace: read_seconds(env, &vars::DELETE_GRACE_SECONDS),
            files_prune_interval: Duration::from_secs(env.or_default(&vars::FILES_PRUNE_SECONDS)),
            max_clock_skew: Duration::from_millis(env.or_default(&vars::MAX_CLOCK_SKEW_MS)),
            poll_interval: Duration::from_millis(env.or_default::<u64>(&vars::PLATFORM_POLL_MS).max(10)),
            lease_ttl: read_seconds(env, &vars::PLATFORM_LEASE_SECONDS).max(Duration::from_secs(1)),
            reconcile_interval: read_seconds(env, &vars::RECONCILE_SECONDS).max(Duration::from_secs(1)),
            shutdown_timeout: read_seconds(env, &vars::RESIZE_SHUTDOWN_SECONDS),
            server_type_change_timeout: read_seconds(env, &vars::RESIZE_CHANGE_SECONDS),
            host_return_timeout: read_seconds(env, &vars::RESIZE_HEALTH_SECONDS),
            operation_stall_timeout: read_seconds(env, &vars::OPERATION_DEADLINE_SECONDS),
            operation_limit: read_seconds(env, &vars::OPERATION_LIMIT_SECONDS),
            server_check_interval: read_seconds(env, &vars::SERVER_CHECK_SECONDS),
            heartbeat_timeout: read_seconds(env, &vars::SERVER_GONE_SILENCE_SECONDS),
            orphan_grace: read_seconds(env, &vars::ORPHAN_GRACE_SECONDS),
            rollout_progress_timeout: read_seconds(env, &vars::ROLLOUT_SILENCE_SECONDS),
            keys: KeyTiming {
                rotation_age: read_seconds(env, &vars::PROOF_KEY_ROTATE_SECONDS).max(Duration::from_secs(1)),
                overlap: read_seconds(env, &vars::PROOF_KEY_OVERLAP_SECONDS).max(Duration::from_secs(1)),
                max_heartbeat_gap: read_seconds(env, &vars::PROOF_KEY_SILENCE_SECONDS)
                    .max(Duration::from_secs(1)),
            },
            tokens: TokenTiming {
                rotation_age: read_seconds(env, &vars::UPGRADE_TOKEN_ROTATE_SECONDS)
                    .max(Duration::from_secs(1)),
                overlap: read_seconds(env, &vars::UPGRADE_TOKEN_OVERLAP_SECONDS),
            },
            retention: Retention {
                operations: read_days(env, &vars::OPERATION_RETENTION_DAYS),
                audit: read_days(env, &vars::AUDIT_RETENTION_DAYS),
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
            trust: trust?,
            provider: provider?,
            store: store?,
            host_credentials: host_credentials?,
            connections,
            rate_limits,
            timing,
        })
    }
}

fn read_seconds(env: &mut Env, variable: &Variable) -> Duration {
    Duration::from_secs(env.or_default(variable))
}

fn read_days(env: &mut Env, variable: &Variable) -> Duration {
    Duration::from_secs(env.or_default::<u64>(variable).clamp(1, 36_500) * 86_400)
}

fn read_listener(env: &mut Env, address: &Variable, cert: &Variable, key: &Variable) -> ListenerConfig {
    let address = env.or_default(address);
    let tls = match (env.path(cert), env.path(key)) {
        (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
        (None, None) => None,
        (Some(_), None) => {
            env.add_error(key, format!("is required with {}", cert.name));
            None
        }
        (None, Some(_)) => {
            env.add_error(cert, format!("is required with {}", key.name));
            None
        }
    };
    ListenerConfig { address, tls }
}

fn read_database(env: &mut Env) -> Option<tokio_postgres::Config> {
    let variable = &vars::PLATFORM_DATABASE_URL;
    let url = env.required_secret(variable)?;
    // The parser's own message can contain the password.
    let Ok(config) = url.expose_secret().parse() else {
        env.add_error(variable, "must be postgres://user:password@host:port/database");
        return None;
    };
    db::check_supported(&config).map_err(|reason| env.add_error(variable, reason)).ok()?;
    Some(config)
}

fn read_platform_secret(env: &mut Env) -> Option<SecretString> {
    let variable = &vars::PLATFORM_SECRET;
    let secret = env.required_secret(variable)?;
    check_operator_secret(secret.expose_secret()).map_err(|reason| env.add_error(variable, reason)).ok()?;
    Some(secret)
}

#[cfg(test)]
mod tests {
    use svc_base::config::Flag;

    use super::*;

    fn complete_env() -> Vec<(&'static str, &'static str)> {
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
    fn short_platform_secret_is_rejected_without_showing_it() {
        let long_enough = errors_with(&[("PLATFORM_SECRET", "hunter2-of-32-characters-0123456")]);
        assert!(long_enough.is_empty(), "{long_enough:?}");
        let short = errors_with(&[("PLATFORM_SECRET", "hunter2-of-31-characters-012345")]);
        assert_eq!(short.len(), 1, "{short:?}");
        assert!(short[0].starts_with("PLATFORM_SECRET: must have at least 32 characters"), "{short:?}");
        assert!(!short[0].contains("hunter2"), "{short:?}");
    }

    #[test]
    fn platform_secret_unfit_for_a_header_is_rejected() {
        let passphrase = errors_with(&[("PLATFORM_SECRET", "hunter2 of 32 characters 0123456")]);
        assert!(passphrase.is_empty(), "{passphrase:?}");
        for secret in [
            "hünter2-of-32-characters-0123456",
            "hunter2-of-32-characters-012345\n",
            " hunter2-of-32-characters-012345",
        ] {
            let errors = errors_with(&[("PLATFORM_SECRET", secret)]);
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].starts_with("PLATFORM_SECRET: must be printable ASCII"), "{errors:?}");
            assert!(!errors[0].contains("nter2"), "{errors:?}");
        }
    }

    /// Returns the errors reported for a complete environment with these changes; an empty value removes the variable.
    fn errors_with(changes: &[(&'static str, &'static str)]) -> Vec<String> {
        let mut pairs = complete_env();
        for (name, value) in changes {
            pairs.retain(|(existing, _)| existing != name);
            if !value.is_empty() {
                pairs.push((name, value));
            }
        }
        PlatformConfig::read(Env::from_pairs(pairs)).err().map(|error| error.errors).unwrap_or_default()
    }

    #[test]
    fn minimal_configuration_has_documented_defaults() {
        let config =
            PlatformConfig::read(Env::from_pairs(complete_env())).map_err(|e| e.to_string()).ok().unwrap();
        assert_eq!(config.api.address.to_string(), "127.0.0.1:8080");
        assert_eq!(config.router.address.to_string(), "0.0.0.0:8443");
        assert_eq!(config.provisioning.enabled, Flag::Off);
        assert_eq!(config.provisioning.server_type.as_str(), "cpx22");
        let url = config.hosts.bundle_url.for_version(&config.provisioning.image_version);
        assert_eq!(url, "http://127.0.0.1:1/system-bundles/v1/svc-host-bundle.tar.gz");
    }

    #[test]
    fn host_port_other_than_443_warns_unless_simulated() {
        let warning = |changes: &[(&'static str, &'static str)]| {
            let pairs = complete_env().into_iter().chain(changes.iter().copied());
            PlatformConfig::read(Env::from_pairs(pairs)).ok().unwrap().host_port_warning()
        };
        let port = ("CUSTOMER_VPS_HTTPS_PORT", "8443");
        assert_eq!(warning(&[]), None);
        assert!(warning(&[port]).unwrap().starts_with("CUSTOMER_VPS_HTTPS_PORT is 8443, "));
        assert_eq!(warning(&[port, ("PROVIDER_API_URL", "http://127.0.0.1:1/v1")]), None);
    }

    #[test]
    fn database_hosts_must_not_mix_sockets_and_names() {
        let errors_of = |hosts| errors_with(&[("PLATFORM_DATABASE_URL", hosts)]);
        for hosts in ["host=/run/a,/run/b user=u", "host=a.example,b.example user=u"] {
            assert!(errors_of(hosts).is_empty(), "{hosts}");
        }
        let errors = errors_of("host=/run/a,b.example user=u");
        assert!(errors.concat().contains("must not name both sockets and hosts"), "{errors:?}");
    }

    #[test]
    fn all_errors_are_reported_without_values() {
        let errors = errors_with(&[
            ("PLATFORM_DATABASE_URL", "postgres://u:hunter2@[/svc"),
            ("PLATFORM_KEY", "hunter2"),
            ("PLATFORM_KEY_PREVIOUS", "hunter2-too"),
            ("PLATFORM_SECRET", ""),
            ("PLATFORM_TLS_CERT_FILE", "/cert"),
            ("PROVIDER_SERVER_TYPE", "CPX"),
            ("PLATFORM_PUBLIC_URL", "ftp://x"),
            ("REGISTRATION_TTL_SECONDS", "soon"),
        ]);
        assert_eq!(errors.len(), 8, "{errors:#?}");
        assert!(!errors.concat().contains("hunter2"), "{errors:#?}");
    }

    #[test]
    fn role_arn_selects_sts_unless_static_is_explicit() {
        let credentials = |changes: &[(&'static str, &'static str)]| {
            let mut pairs = complete_env();
            for (name, value) in changes {
                pairs.retain(|(existing, _)| existing != name);
                pairs.push((name, value));
            }
            let pairs = pairs.into_iter().filter(|(_, value)| !value.is_empty());
            PlatformConfig::read(Env::from_pairs(pairs)).map(|config| config.host_credentials)
        };
        let role = ("STS_ROLE_ARN", "arn:aws:iam::123456789012:role/svc-host");
        let unset = ("STORE_HOST_CREDENTIALS", "");
        let Ok(HostCredentials::Sts(sts)) = credentials(&[unset, role, ("AWS_REGION", "eu-central-1")])
        else {
            panic!("STS_ROLE_ARN should select sts");
        };
        assert_eq!(sts.endpoint.as_str(), "https://sts.eu-central-1.amazonaws.com/");
        assert_eq!(sts.outage_ttl, Duration::from_secs(43_200));
        let Ok(HostCredentials::Sts(sts)) =
            credentials(&[unset, role, ("OBJECT_STORE_ENDPOINT", "http://127.0.0.1:9000")])
        else {
            panic!("OBJECT_STORE_ENDPOINT should be the default for STS_ENDPOINT");
        };
        assert_eq!(sts.endpoint.as_str(), "http://127.0.0.1:9000/");
        assert!(
            matches!(credentials(&[role]), Ok(HostCredentials::Static)),
            "an explicit setting takes precedence"
        );
        for (changes, variable) in [
            (&[unset][..], "STORE_HOST_CREDENTIALS"),
            (&[("STORE_HOST_CREDENTIALS", "sts"), ("AWS_REGION", "eu-central-1")], "STS_ROLE_ARN"),
            (
                &[unset, role, ("AWS_REGION", "eu-central-1"), ("STS_DURATION_SECONDS", "899")],
                "STS_DURATION_SECONDS",
            ),
            (&[unset, role], "AWS_REGION"),
            (&[("STORE_HOST_CREDENTIALS", "none")], "STORE_HOST_CREDENTIALS"),
        ] {
            let Err(error) = credentials(changes) else { panic!("{changes:?} should be rejected") };
            assert!(error.errors.len() == 1 && error.errors[0].starts_with(variable), "{error}");
        }
    }
}

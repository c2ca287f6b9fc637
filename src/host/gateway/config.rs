//! Gateway configuration: listen address, machine owner, accepted credentials, database, and timeouts.
//!
//! Disabling authentication is rejected on anything but a development machine.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use url::Url;

use svc_base::config::{ConfigError, Env, check_operator_secret};
use svc_base::variable::Variable;
use svc_host::system::config::{DatabaseUrl, Identity, environment, read_initial_proof_keys};
use svc_host::system::layout::Layout;
use svc_host::system::vars;
use svc_http::jwt::TrustedIssuer;
use svc_http::proof::ProofKeys;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;

/// PostgreSQL's maximum. It rejects longer timeouts for an app role, so the app couldn't be registered.
const MAX_STATEMENT_TIMEOUT_MS: u64 = 2_147_483_647;

/// The complete, validated configuration.
#[derive(Debug, Clone)]
pub struct Config {
    pub layout: Layout,
    pub listen: SocketAddr,
    pub owner: ConfiguredOwner,
    pub admin_token: Option<SecretString>,
    /// Issuer of the owner's bearer tokens, if configured.
    pub issuer: Option<TrustedIssuer>,
    pub postgres: tokio_postgres::Config,
    /// Timeout for a single statement run by an app role. Whole transactions get a few seconds more.
    pub statement_timeout: Duration,
    /// How long change events are retained.
    pub changes_retention: Duration,
    /// Operator-provided certificate chain file.
    pub certificate_file: Option<PathBuf>,
    /// Initial backoff after a failed certificate request.
    pub acme_initial_backoff: Duration,
}

/// The machine's provisioned owner, or the fixed owner of a development machine without authentication.
#[derive(Debug, Clone)]
pub enum ConfiguredOwner {
    Provisioned { identity: Identity, proof_keys: ProofKeys },
    Development,
}

impl Config {
    /// # Errors
    /// Reports all configuration errors at once.
    pub fn load(layout: Layout) -> Result<Self, ConfigError> {
        let env = environment(&layout);
        Self::read(env, layout)
    }

    fn read(mut env: Env, layout: Layout) -> Result<Self, ConfigError> {
        let listen = env.or_default(&vars::GATEWAY_LISTEN);
        let owner = read_owner(&mut env, listen);
        let admin_token = read_admin_token(&mut env);
        let issuer = read_issuer(&mut env);
        let statement_timeout = read_statement_timeout(&mut env);
        let retention_seconds = env.or_default(&vars::BRIDGE_CHANGES_KEEP_SECONDS);
        if retention_seconds == 0 {
            env.add_error(&vars::BRIDGE_CHANGES_KEEP_SECONDS, "must be at least 1");
        }
        let certificate_file = env.path(&vars::GATEWAY_TLS_CERT_FILE);
        let acme_retry_seconds = env.or_default(&vars::ACME_RETRY_SECONDS);
        if acme_retry_seconds == 0 {
            env.add_error(&vars::ACME_RETRY_SECONDS, "must be at least 1");
        }
        let database = DatabaseUrl::read(&mut env);
        let postgres = database.as_ref().and_then(|url| match url.config() {
            Ok(config) => Some(config),
            Err(error) => {
                error.errors.iter().for_each(|error| env.add_error(&vars::DATABASE_URL, error.as_str()));
                None
            }
        });
        let config = (|| {
            Some(Self {
                layout,
                listen,
                owner: owner?,
                admin_token,
                issuer,
                postgres: postgres?,
                statement_timeout,
                changes_retention: Duration::from_secs(retention_seconds),
                certificate_file,
                acme_initial_backoff: Duration::from_secs(acme_retry_seconds),
            })
        })();
        env.finish(config)
    }
}

impl Config {
    /// Returns the machine id, or `None` on a development machine.
    pub fn machine_id(&self) -> Option<MachineId> {
        match &self.owner {
            ConfiguredOwner::Provisioned { identity, .. } => Some(identity.machine),
            ConfiguredOwner::Development => None,
        }
    }

    /// Returns the machine's epoch, or [`Epoch::NONE`] on a development machine.
    pub fn epoch(&self) -> Epoch {
        match &self.owner {
            ConfiguredOwner::Provisioned { identity, .. } => identity.epoch,
            ConfiguredOwner::Development => Epoch::NONE,
        }
    }
}

/// Returns the admin token, or `None` if it's unset or invalid. Invalid tokens are ignored rather than rejected because
/// earlier releases started with them.
fn read_admin_token(env: &mut Env) -> Option<SecretString> {
    let token = env.secret(&vars::ADMIN_TOKEN)?;
    let checked = check_operator_secret(token.expose_secret());
    checked.map_err(|reason| tracing::error!("ADMIN_TOKEN is ignored: it {reason}")).ok()?;
    Some(token)
}

/// Reads the timeout for app statements. Excessive timeouts are clamped rather than rejected because earlier releases
/// started with them.
fn read_statement_timeout(env: &mut Env) -> Duration {
    let timeout_ms: u64 = env.or_default(&vars::BRIDGE_STATEMENT_TIMEOUT_MS);
    if timeout_ms == 0 {
        env.add_error(&vars::BRIDGE_STATEMENT_TIMEOUT_MS, "must be at least 1");
    }
    if timeout_ms > MAX_STATEMENT_TIMEOUT_MS {
        tracing::error!("BRIDGE_STATEMENT_TIMEOUT_MS is clamped to its maximum, {MAX_STATEMENT_TIMEOUT_MS}");
    }
    Duration::from_millis(timeout_ms.min(MAX_STATEMENT_TIMEOUT_MS))
}

/// Reads the issuer of the owner's bearer tokens. If any of `IDP_ISSUER`, `IDP_AUDIENCE` and `IDP_JWKS_URL` is set, the
/// first two are required.
fn read_issuer(env: &mut Env) -> Option<TrustedIssuer> {
    if ![&vars::IDP_ISSUER, &vars::IDP_AUDIENCE, &vars::IDP_JWKS_URL]
        .iter()
        .any(|variable| env.is_set(variable))
    {
        return None;
    }
    let issuer: Option<String> = env.required(&vars::IDP_ISSUER);
    let audiences: Option<String> = env.required(&vars::IDP_AUDIENCE);
    let jwks_url = read_jwks_url(env, issuer.as_deref());
    let audiences: Vec<String> = audiences?
        .split(',')
        .map(str::trim)
        .filter(|audience| !audience.is_empty())
        .map(str::to_owned)
        .collect();
    if audiences.is_empty() {
        env.add_error(&vars::IDP_AUDIENCE, "must name at least one audience; separate several with commas");
        return None;
    }
    Some(TrustedIssuer { issuer: issuer?, audiences, jwks_url: jwks_url? })
}

/// Returns the issuer's JWKS URL. If `IDP_JWKS_URL` (or the issuer, when that is unset) is a URL with a scheme other
/// than `http` or `https`, the issuer is ignored rather than rejected because earlier releases started with such a
/// configuration.
fn read_jwks_url(env: &mut Env, issuer: Option<&str>) -> Option<Url> {
    if env.is_set(&vars::IDP_JWKS_URL) {
        let url: Url = env.optional(&vars::IDP_JWKS_URL)?;
        let is_web_url = matches!(url.scheme(), "http" | "https");
        if !is_web_url {
            tracing::error!("IDP_ISSUER is ignored: IDP_JWKS_URL is not an http or https URL");
        }
        return is_web_url.then_some(url);
    }
    let issuer = issuer?;
    let derived_url = TrustedIssuer::default_jwks_url(issuer);
    if derived_url.is_none() {
        let reason = "is required, because IDP_ISSUER is not an http or https URL";
        if Url::parse(issuer).is_ok() {
            tracing::error!("IDP_ISSUER is ignored: IDP_JWKS_URL {reason}");
        } else {
            env.add_error(&vars::IDP_JWKS_URL, reason);
        }
    }
    derived_url
}

const IDENTITY_VARIABLES: [&Variable; 4] =
    [&vars::SVC_USER_ID, &vars::SVC_MACHINE_ID, &vars::SVC_HANDLE, &vars::SVC_EPOCH];

fn read_owner(env: &mut Env, listen: SocketAddr) -> Option<ConfiguredOwner> {
    let auth = env.flag(&vars::GATEWAY_AUTH);
    let production = env.flag(&vars::SVC_PRODUCTION);
    let environment_name = env.or_default::<String>(&vars::SVC_ENVIRONMENT);
    if !["production", "local", "development"].contains(&environment_name.as_str()) {
        env.add_error(&vars::SVC_ENVIRONMENT, "must be production, development or local");
    }
    if auth.is_on() {
        let identity = Identity::read(env);
        let proof_keys = read_initial_proof_keys(env);
        return Some(ConfiguredOwner::Provisioned { identity: identity?, proof_keys: proof_keys? });
    }
    let mut reject = |reason: &str| env.add_error(&vars::GATEWAY_AUTH, format!("cannot be off: {reason}"));
    if production.is_on() {
        reject("SVC_PRODUCTION is not false");
    }
    if environment_name == "production" {
        reject("SVC_ENVIRONMENT is not local or development");
    }
    if !listen.ip().is_loopback() {
        reject("GATEWAY_LISTEN is not a loopback address");
    }
    if let Some(variable) = IDENTITY_VARIABLES.into_iter().find(|variable| env.is_set(variable)) {
        env.add_error(
            &vars::GATEWAY_AUTH,
            format!("cannot be off: an identity is configured ({})", variable.name),
        );
    }
    Some(ConfiguredOwner::Development)
}

#[cfg(test)]
mod tests {
    use svc_base::config::MIN_SECRET_CHARS;

    use super::*;

    const PROVISIONED: [(&str, &str); 6] = [
        ("SVC_MACHINE_ID", "0192d1f0-0000-7000-8000-000000000001"),
        ("SVC_USER_ID", "user_1"),
        ("SVC_HANDLE", "ada"),
        ("SVC_EPOCH", "1"),
        ("SVC_PROOF_KEYS", r#"{"keys":[]}"#),
        ("DATABASE_URL", "postgres://postgres:pw@127.0.0.1:5432/svc"),
    ];
    const DEV: [(&str, &str); 5] = [
        ("GATEWAY_AUTH", "off"),
        ("SVC_PRODUCTION", "false"),
        ("SVC_ENVIRONMENT", "local"),
        ("GATEWAY_LISTEN", "127.0.0.1:0"),
        ("DATABASE_URL", "postgres://postgres:pw@127.0.0.1:5432/svc"),
    ];

    fn read(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::read(Env::from_pairs(pairs.iter().copied()), Layout::new("/"))
    }

    fn with_changes<'a>(
        base: &[(&'a str, &'a str)],
        changes: &[(&'a str, &'a str)],
    ) -> Vec<(&'a str, &'a str)> {
        base.iter().chain(changes).copied().collect()
    }

    #[test]
    fn read_accepts_provisioned_machine() {
        let config = read(&PROVISIONED).unwrap();
        let ConfiguredOwner::Provisioned { identity, .. } = config.owner else { panic!("not provisioned") };
        assert_eq!(identity.user.as_str(), "user_1");
        assert_eq!(config.listen.port(), 443);
    }

    #[test]
    fn read_reports_all_errors_without_values() {
        let error = read(&[("GATEWAY_LISTEN", "x"), ("DATABASE_URL", "s3cret")]).unwrap_err().to_string();
        for name in ["GATEWAY_LISTEN", "SVC_USER_ID", "SVC_MACHINE_ID", "SVC_PROOF_KEYS", "DATABASE_URL"] {
            assert!(error.contains(name), "{name} in {error}");
        }
        assert!(!error.contains("s3cret"), "{error}");
    }

    #[test]
    fn read_limits_statement_timeout_and_rejects_zero() {
        let read_with_timeout =
            |timeout: &str| read(&with_changes(&PROVISIONED, &[("BRIDGE_STATEMENT_TIMEOUT_MS", timeout)]));
        assert_eq!(read_with_timeout("1").unwrap().statement_timeout.as_millis(), 1);
        for timeout in ["2147483647", "2147483648"] {
            let config = read_with_timeout(timeout).unwrap();
            assert_eq!(config.statement_timeout.as_millis(), 2_147_483_647, "{timeout}");
        }
        let error = read_with_timeout("0").unwrap_err().to_string();
        assert!(error.contains("BRIDGE_STATEMENT_TIMEOUT_MS"), "{error}");
    }

    #[test]
    fn development_owner_requires_all_conditions() {
        assert!(matches!(read(&DEV).unwrap().owner, ConfiguredOwner::Development));
        assert!(read(&DEV[..1]).is_err(), "GATEWAY_AUTH=off alone was accepted");
        for change in [
            ("SVC_PRODUCTION", "true"),
            ("SVC_ENVIRONMENT", "production"),
            ("SVC_ENVIRONMENT", "staging"),
            ("SVC_USER_ID", "user_1"),
            ("SVC_MACHINE_ID", "0192d1f0-0000-7000-8000-000000000001"),
            ("GATEWAY_LISTEN", "0.0.0.0:443"),
        ] {
            assert!(read(&with_changes(&DEV, &[change])).is_err(), "{change:?}");
        }
    }

    #[test]
    fn invalid_admin_token_is_ignored() {
        let is_accepted = |text: &str| {
            read(&with_changes(&PROVISIONED, &[("ADMIN_TOKEN", text)])).unwrap().admin_token.is_some()
        };
        assert!(is_accepted(&"x".repeat(MIN_SECRET_CHARS)));
        for short in ["", "x", &"x".repeat(MIN_SECRET_CHARS - 1)] {
            assert!(!is_accepted(short), "{short:?}");
        }
        let valid = "x y".repeat(MIN_SECRET_CHARS);
        assert!(is_accepted(&valid));
        for invalid in [format!("{valid}ü"), format!("{valid}\n"), format!(" {valid}")] {
            assert!(!is_accepted(&invalid), "{invalid:?} was accepted, but cannot be sent in a header");
        }
    }

    #[test]
    fn read_requires_owner_if_auth_is_on() {
        let dev_with_auth = with_changes(&DEV, &[("GATEWAY_AUTH", "on")]);
        assert!(read(&dev_with_auth).is_err());
    }

    #[test]
    fn read_rejects_issuer_without_audience() {
        let read_with_audience = |audience: &'static str| {
            let issuer = [("IDP_ISSUER", "https://idp.example"), ("IDP_AUDIENCE", audience)];
            read(&with_changes(&PROVISIONED, &issuer))
        };
        assert_eq!(read_with_audience("a, b").unwrap().issuer.unwrap().audiences, ["a", "b"]);
        let error = read_with_audience(",").unwrap_err().to_string();
        assert!(error.contains("IDP_AUDIENCE"), "{error}");
    }

    #[test]
    fn read_ignores_issuer_with_non_http_jwks_url() {
        let read_with_urls = |issuer: &str, jwks_url: &str| {
            let idp = [("IDP_ISSUER", issuer), ("IDP_AUDIENCE", "a"), ("IDP_JWKS_URL", jwks_url)];
            let idp: Vec<_> = idp.into_iter().filter(|(_, value)| !value.is_empty()).collect();
            read(&with_changes(&PROVISIONED, &idp))
        };
        for (issuer, jwks_url) in [("idp.example:8443", ""), ("urn:idp", ""), ("urn:idp", "ftp://idp/keys")] {
            let config = read_with_urls(issuer, jwks_url).unwrap();
            assert!(config.issuer.is_none(), "{issuer} {jwks_url}");
        }
        for (issuer, jwks_url) in [("idp.example", ""), ("https://idp.example", "keys")] {
            let error = read_with_urls(issuer, jwks_url).unwrap_err().to_string();
            assert!(error.contains("IDP_JWKS_URL"), "{issuer} {jwks_url}: {error}");
        }
        let config = read_with_urls("urn:idp", "https://idp.example/keys").unwrap();
        assert_eq!(config.issuer.unwrap().jwks_url.as_str(), "https://idp.example/keys");
    }
}

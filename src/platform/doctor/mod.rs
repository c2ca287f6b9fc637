//! `svcctl doctor platform`: checks the platform's configuration and each of its dependencies.
//!
//! The checks do not need a running platform. They write only temporary objects to the store, and delete them
//! afterwards.

mod bundle;
mod configuration;
mod database;
mod file_pruning;
mod identity;
mod platform_key;
mod provider;
mod sessions;
mod store;

pub use self::sessions::{SESSION_ISOLATION, SESSION_WRITE_ONCE, SESSIONS, probe_store};

use std::path::Path;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

use super::config::PlatformConfig;
use crate::vars;
use svc_base::config::Env;
use svc_base::diagnosis::{self, Check, Finding, Findings};

const CHECK_TIMEOUT: Duration = Duration::from_secs(20);

/// The findings, and the running platform's URL and secret for further checks, if both are set and valid.
pub struct DoctorReport {
    pub findings: Vec<Finding>,
    pub api_access: Option<(Url, SecretString)>,
}

/// Checks the platform that the environment and `file` configure; the environment takes precedence.
pub async fn run_checks(file: Option<&Path>) -> DoctorReport {
    let mut env = Env::from_process_and_file(file);
    // These are read before validation, because the platform may be healthy even if this process has an invalid
    // setting.
    let url: Option<Url> = env.text(&vars::PLATFORM_PUBLIC_URL).and_then(|url| url.parse().ok());
    let api_access = url.zip(env.secret(&vars::PLATFORM_SECRET));
    let mut findings = configuration::check_env_file(file);
    let config = match PlatformConfig::read(env) {
        Ok(config) => config,
        Err(error) => {
            let errors = error.errors.into_iter().fold(Findings::new("configuration"), |findings, error| {
                let next = "correct the setting as described in docs/reference/configuration.md: until then, svc-platform \
                            does not start";
                findings.problem(error, next)
            });
            findings.extend(errors.into_list());
            for check in [
                "database",
                "platform-key",
                "store",
                "store-protection",
                "host-credentials",
                "file-pruning",
                "bundle",
                "provider",
                "identity-provider",
                "tls",
            ] {
                let skipped = Findings::new(check).skipped("the configuration is invalid");
                findings.extend(skipped.into_list());
            }
            return DoctorReport { findings, api_access };
        }
    };
    let checks = vec![
        Check::new("configuration", CHECK_TIMEOUT, async { configuration::check_settings(&config) }),
        Check::new("database", CHECK_TIMEOUT, database::check(&config)),
        Check::new("platform-key", CHECK_TIMEOUT, platform_key::check(&config)),
        Check::new("store", CHECK_TIMEOUT, store::check(&config)),
        Check::new("store-protection", CHECK_TIMEOUT, store::check_protection(&config)),
        Check::new("host-credentials", CHECK_TIMEOUT, store::check_host_credentials(&config)),
        Check::new("file-pruning", CHECK_TIMEOUT, file_pruning::check(&config)),
        Check::new("bundle", CHECK_TIMEOUT, bundle::check(&config)),
        Check::new("provider", CHECK_TIMEOUT, provider::check(&config)),
        Check::new("identity-provider", CHECK_TIMEOUT, identity::check(&config)),
        Check::new("tls", CHECK_TIMEOUT, async { configuration::check_certificates(&config) }),
    ];
    findings.extend(diagnosis::run_checks(checks).await);
    DoctorReport { findings, api_access }
}

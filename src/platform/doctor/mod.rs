//! `svcctl doctor` for a platform, from its configuration: whether each thing that it stands on bears.
//!
//! Changes nothing but one object of its own in the store, which it deletes again. Needs no platform that runs.

mod bundle;
mod database;
mod identity;
mod platform_key;
mod provider;
mod serving;
mod store;

use std::path::Path;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

use super::config::PlatformConfig;
use crate::config::Env;
use crate::diagnosis::{self, Check, Finding, Findings};

const ASKED: Duration = Duration::from_secs(20);

/// What was found, and how the platform itself is asked about the rest.
pub struct Examined {
    pub findings: Vec<Finding>,
    pub operator: Option<(Url, SecretString)>,
}

/// Looks at what the environment, and below it `file`, says of a platform.
pub async fn examine(file: Option<&Path>) -> Examined {
    let mut env = Env::from_process_over(file);
    // Read before the whole is judged: the platform may run well with what this process was given wrongly.
    let url: Option<Url> = env.text("PLATFORM_PUBLIC_URL").and_then(|url| url.parse().ok());
    let operator = url.zip(env.secret("PLATFORM_SECRET"));
    let mut findings = serving::env_file(file);
    let config = match PlatformConfig::read(env) {
        Ok(config) => config,
        Err(error) => {
            let wrong = error.mistakes.into_iter().fold(Findings::new("configuration"), |found, mistake| {
                found.problem(
                    mistake,
                    "docs/reference/configuration.md has each variable; svc-platform will not start",
                )
            });
            findings.extend(wrong.into_list());
            for check in [
                "database",
                "platform-key",
                "store",
                "store-protection",
                "host-credentials",
                "bundle",
                "provider",
                "identity-provider",
                "tls",
            ] {
                let skipped = Findings::new(check).skipped("the configuration is wrong");
                findings.extend(skipped.into_list());
            }
            return Examined { findings, operator };
        }
    };
    let checks = vec![
        Check::new("configuration", ASKED, async { serving::settings(&config) }),
        Check::new("database", ASKED, database::check(&config)),
        Check::new("platform-key", ASKED, platform_key::check(&config)),
        Check::new("store", ASKED, store::check(&config)),
        Check::new("store-protection", ASKED, store::protection(&config)),
        Check::new("host-credentials", ASKED, store::host_credentials(&config)),
        Check::new("bundle", ASKED, bundle::check(&config)),
        Check::new("provider", ASKED, provider::check(&config)),
        Check::new("identity-provider", ASKED, identity::check(&config)),
        Check::new("tls", ASKED, async { serving::certificates(&config) }),
    ];
    findings.extend(diagnosis::run_checks(checks).await);
    Examined { findings, operator }
}

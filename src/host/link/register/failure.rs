//! The report that a boot failed: bounded, in one line, and without any secret of this machine.

use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;

use super::call::Platform;
use crate::applet::{Exit, Failure, OrExit};
use crate::config::Env;
use crate::host::system::config;
use crate::host::system::config::{DatabaseUrl, Identity, PlatformLink};
use crate::host::system::layout::Layout;

const LONGEST_MESSAGE: usize = 500;
const DEADLINE: Duration = Duration::from_secs(60);
/// Shorter ones would hide words of the message, and are no secrets.
const SHORTEST_SECRET: usize = 6;
const HIDDEN: &str = "[hidden]";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    Bundle,
    Database,
    Restore,
    Gateway,
    Register,
}

#[derive(Serialize)]
struct Report {
    stage: Stage,
    message: String,
}

/// # Errors
/// [`Failure`]; 77 when the platform does not accept the token, 75 when it does not answer.
pub async fn report(layout: &Layout, stage: Stage, message: &str) -> Result<(), Failure> {
    let mut env = config::environment(layout);
    let identity = Identity::read(&mut env);
    let platform = PlatformLink::read(&mut env, layout);
    let token = env.required_secret("REGISTRATION_TOKEN");
    let secrets = secrets(&mut env);
    let parts = identity.zip(platform).zip(token);
    let ((identity, platform), token) = env.finish(parts)?;
    let report = Report { stage, message: clean(message, &secrets) };
    let body = serde_json::to_string(&report).or_exit(Exit::Internal)?;
    let platform = Platform::new(&platform, &token).or_exit(Exit::Config)?;
    platform.boot_failure(identity.machine, &body, DEADLINE).await.map_err(super::failure)
}

/// Every secret that the env files of a machine hold.
fn secrets(env: &mut Env) -> Vec<SecretString> {
    const NAMES: [&str; 6] = [
        "REGISTRATION_TOKEN",
        "UPGRADE_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "ADMIN_TOKEN",
        "DATABASE_URL",
    ];
    let mut secrets: Vec<SecretString> = NAMES.iter().filter_map(|name| env.secret(name)).collect();
    let password = env.secret("DATABASE_URL").map(DatabaseUrl).and_then(|url| url.config().ok());
    let password = password.as_ref().and_then(|config| config.get_password());
    secrets.extend(password.map(|password| String::from_utf8_lossy(password).into_owned().into()));
    secrets
}

fn clean(message: &str, secrets: &[SecretString]) -> String {
    let mut message = message.to_owned();
    let mut secrets: Vec<&str> = secrets.iter().map(SecretString::expose_secret).collect();
    // The longest first: one may contain another.
    secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    for secret in secrets.into_iter().filter(|secret| secret.len() >= SHORTEST_SECRET) {
        message = message.replace(secret, HIDDEN);
    }
    let line = message.chars().map(|c| if c.is_control() { ' ' } else { c });
    line.take(LONGEST_MESSAGE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_bounded_line_without_secrets() {
        let mut env = Env::from_pairs([
            ("UPGRADE_TOKEN", "token-of-the-machine"),
            ("DATABASE_URL", "postgres://postgres:hunter2hunter2@127.0.0.1/svc"),
        ]);
        let secrets = secrets(&mut env);
        let said = "connect postgres://postgres:hunter2hunter2@127.0.0.1/svc\nwith hunter2hunter2 and token-of-the-machine";
        let cleaned = clean(said, &secrets);
        assert_eq!(cleaned, "connect [hidden] with [hidden] and [hidden]");
        assert_eq!(clean(&"x".repeat(9999), &secrets).len(), LONGEST_MESSAGE);
    }
}

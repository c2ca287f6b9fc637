//! Reports a failed boot as a single bounded line, with this machine's secrets redacted.

use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};

use super::client::RegistrationClient;
use crate::system::config;
use crate::system::config::{DatabaseUrl, Identity, PlatformAccess};
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::config::Env;
use svc_base::variable::Variable;
use svc_wire::registration::{BootFailureReport, BootStageName};

const MAX_MESSAGE_CHARS: usize = 500;
const REPORT_TIMEOUT: Duration = Duration::from_secs(60);
/// Shorter values aren't secrets, and redacting them would garble the message.
const MIN_SECRET_BYTES: usize = 6;
const REDACTED: &str = "[hidden]";

/// Reports the failed boot to the platform.
///
/// # Errors
/// [`Failure`]: exit code 78 if the configuration is invalid or the HTTP client can't be created, 77 if the platform
/// rejects the token, 75 if it stays unavailable until the timeout, 70 for any other response.
pub async fn report(layout: &Layout, stage: BootStageName, message: &str) -> Result<(), Failure> {
    let mut env = config::environment(layout);
    let identity = Identity::read(&mut env);
    let platform = PlatformAccess::read(&mut env, layout);
    let token = env.required_secret(&vars::REGISTRATION_TOKEN);
    let secrets = read_secrets(&mut env);
    let parts = identity.zip(platform).zip(token);
    let ((identity, platform), token) = env.finish(parts)?;
    let report = BootFailureReport { stage: stage.to_string(), message: redact(message, &secrets) };
    let platform = RegistrationClient::new(&platform, &token).or_exit(Exit::Config)?;
    platform.report_boot_failure(identity.machine, &report, REPORT_TIMEOUT).await.map_err(super::to_failure)
}

/// Collects the secrets from the env files of this machine's services.
fn read_secrets(env: &mut Env) -> Vec<SecretString> {
    const VARIABLES: [&Variable; 6] = [
        &vars::REGISTRATION_TOKEN,
        &vars::UPGRADE_TOKEN,
        &svc_store::vars::AWS_SECRET_ACCESS_KEY,
        &svc_store::vars::AWS_SESSION_TOKEN,
        &vars::ADMIN_TOKEN,
        &vars::DATABASE_URL,
    ];
    let mut secrets: Vec<SecretString> =
        VARIABLES.iter().filter_map(|variable| env.secret(variable)).collect();
    let password = env.secret(&vars::DATABASE_URL).map(DatabaseUrl).and_then(|url| url.config().ok());
    let password = password.as_ref().and_then(|config| config.get_password());
    secrets.extend(password.map(|password| String::from_utf8_lossy(password).into_owned().into()));
    secrets
}

fn redact(message: &str, secrets: &[SecretString]) -> String {
    let mut message = message.to_owned();
    let mut secrets: Vec<&str> = secrets.iter().map(SecretString::expose_secret).collect();
    // Longest first, as one secret may contain another.
    secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    for secret in secrets.into_iter().filter(|secret| secret.len() >= MIN_SECRET_BYTES) {
        message = message.replace(secret, REDACTED);
    }
    let line = message.chars().map(|c| if c.is_control() { ' ' } else { c });
    line.take(MAX_MESSAGE_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redact_returns_one_line_without_secrets() {
        let mut env = Env::from_pairs([
            ("UPGRADE_TOKEN", "token-of-the-machine"),
            ("DATABASE_URL", "postgres://postgres:hunter2hunter2@127.0.0.1/svc"),
        ]);
        let secrets = read_secrets(&mut env);
        let message = "connect postgres://postgres:hunter2hunter2@127.0.0.1/svc\nwith hunter2hunter2 and token-of-the-machine";
        let redacted = redact(message, &secrets);
        assert_eq!(redacted, "connect [hidden] with [hidden] and [hidden]");
        assert_eq!(redact(&"x".repeat(9999), &secrets).len(), MAX_MESSAGE_CHARS);
    }
}

//! Opens the platform and the object store that arguments and environment name.

use std::path::Path;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

use super::api::ApiClient;
use super::args::Global;
use super::vars;
use svc_base::applet::Failure;
use svc_base::config::Env;
use svc_store::Bucket;
use svc_store::config::StoreConfig;

/// The object store of the environment.
///
/// # Errors
/// Every invalid setting.
pub fn open_store() -> Result<Bucket, Failure> {
    let mut env = Env::from_process();
    let store = StoreConfig::read(&mut env);
    Ok(env.finish(store)?.open()?)
}

/// The platform of the arguments or the environment.
///
/// # Errors
/// Every invalid setting.
pub fn connect(global: &Global) -> Result<ApiClient, Failure> {
    let mut env = Env::from_process();
    let base = match &global.platform_url {
        Some(url) => Some(url.clone()),
        None => env.required::<Url>(&vars::PLATFORM_PUBLIC_URL),
    };
    if base.as_ref().is_some_and(|base| !is_private(base)) {
        env.mistake(
            &vars::PLATFORM_PUBLIC_URL,
            "must be https (plain http only to this machine): it carries the secret",
        );
    }
    let secret = match &global.secret_file {
        Some(file) => secret_from(&mut env, "--secret-file", file),
        None => env.required_secret(&vars::PLATFORM_SECRET),
    };
    let (base, secret) = env.finish(base.zip(secret))?;
    Ok(ApiClient::new(base, &secret, Duration::from_secs(global.timeout))?)
}

/// The secret in a file. An unreadable or empty file is recorded as a mistake.
pub fn secret_from(env: &mut Env, flag: &str, file: &Path) -> Option<SecretString> {
    match std::fs::read_to_string(file) {
        Ok(text) if !text.trim().is_empty() => Some(SecretString::from(text.trim())),
        Ok(_) => {
            env.option_mistake(flag, "the file is empty");
            None
        }
        Err(error) => {
            env.option_mistake(flag, format!("{}: {error}", file.display()));
            None
        }
    }
}

/// Whether a secret may be sent to this URL: HTTPS, or plain HTTP to this machine.
pub fn is_private(base: &Url) -> bool {
    let here = match base.host() {
        Some(url::Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    };
    base.scheme() == "https" || (base.scheme() == "http" && here)
}

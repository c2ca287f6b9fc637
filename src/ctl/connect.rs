//! Connects to the platform and object store configured by arguments or the environment.

use std::path::Path;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

use super::api::ApiClient;
use super::args::GlobalOptions;
use super::vars;
use svc_base::applet::Failure;
use svc_base::config::Env;
use svc_store::Bucket;
use svc_store::config::StoreConfig;

/// Error for platform URLs that fail [`can_carry_secret`].
pub const HTTPS_REQUIRED: &str =
    "must be https, because requests contain the secret (plain http is allowed only to this machine)";

/// Opens the object store configured in the environment.
///
/// # Errors
/// If settings are missing or invalid (the error lists all of them), or the store can't be opened.
pub fn open_store() -> Result<Bucket, Failure> {
    let mut env = Env::from_process();
    let store = StoreConfig::read(&mut env);
    Ok(env.finish(store)?.open()?)
}

/// Creates a client for the platform configured by arguments or the environment.
///
/// # Errors
/// If settings are missing or invalid (the error lists all of them), or the client can't be created.
pub fn connect(global: &GlobalOptions) -> Result<ApiClient, Failure> {
    let mut env = Env::from_process();
    let base = match &global.platform_url {
        Some(url) => Some(url.clone()),
        None => env.required::<Url>(&vars::PLATFORM_PUBLIC_URL),
    };
    if base.as_ref().is_some_and(|base| !can_carry_secret(base)) {
        match &global.platform_url {
            Some(_) => env.add_option_error("--platform-url", HTTPS_REQUIRED),
            None => env.add_error(&vars::PLATFORM_PUBLIC_URL, HTTPS_REQUIRED),
        }
    }
    let secret = match &global.secret_file {
        Some(file) => read_secret(&mut env, "--secret-file", file),
        None => env.required_secret(&vars::PLATFORM_SECRET),
    };
    let (base, secret) = env.finish(base.zip(secret))?;
    Ok(ApiClient::new(base, &secret, Duration::from_secs(global.timeout))?)
}

/// Reads a secret from a file, recording an error if it's unreadable or empty.
pub fn read_secret(env: &mut Env, flag: &str, file: &Path) -> Option<SecretString> {
    match std::fs::read_to_string(file) {
        Ok(text) if !text.trim().is_empty() => Some(SecretString::from(text.trim())),
        Ok(_) => {
            env.add_option_error(flag, format!("{} is empty", file.display()));
            None
        }
        Err(error) => {
            env.add_option_error(flag, format!("{}: {error}", file.display()));
            None
        }
    }
}

/// Whether requests to this URL may carry a secret: HTTPS, or plain HTTP to a loopback host.
pub fn can_carry_secret(base: &Url) -> bool {
    let is_loopback = match base.host() {
        Some(url::Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    };
    base.scheme() == "https" || (base.scheme() == "http" && is_loopback)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_names_option_with_plain_http_url() {
        let platform_url = Some("http://platform.test".parse().unwrap());
        let global = GlobalOptions { platform_url, secret_file: None, json: false, timeout: 30 };
        let failure = connect(&global).err().unwrap();
        let message = failure.error.to_string();
        assert!(message.contains("--platform-url: must be https"), "{message}");
    }
}

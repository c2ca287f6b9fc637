//! Checks the env files by parsing them the way the applets do. Reports every error, but never the invalid value.

use crate::system::config;
use crate::system::config::{DatabaseUrl, Identity, PlatformAccess, services_env};
use crate::system::layout::Layout;
use crate::system::vars;
use svc_base::config::Env;
use svc_base::diagnosis::Findings;
use svc_store::config::StoreConfig;

const NEXT_STEP: &str = "provisioning writes these files: restore the value, or recover the slot";

pub fn check(layout: &Layout) -> Findings {
    let mut findings = Findings::new("configuration");
    if has_conflicting_platform_urls(layout) {
        findings = findings.problem(
            "PLATFORM_INTERNAL_URL differs between update.env and host.env: updates come from the platform in \
             update.env",
            "as root, set PLATFORM_INTERNAL_URL to the platform's address in both files",
        );
    }
    match read_identity(services_env(layout), layout) {
        Ok(identity) => findings.or_ok(format!(
            "machine {} of {}, slot {}, epoch {}",
            identity.machine, identity.user, identity.slot, identity.epoch
        )),
        Err(errors) => {
            errors.into_iter().fold(findings, |findings, error| findings.problem(error, NEXT_STEP))
        }
    }
}

/// Whether root's env file and the services' env file point to different platforms. Unreadable files are ignored.
fn has_conflicting_platform_urls(layout: &Layout) -> bool {
    let platform_url = |file| Env::default().with_file(file).text(&vars::PLATFORM_INTERNAL_URL);
    let (services, root) = (platform_url(&layout.host_env()), platform_url(&layout.update_env()));
    services.zip(root).is_some_and(|(services, root)| services != root)
}

/// Reads the identity, along with the platform, proof key, store and database settings so that their errors are
/// reported too. Returns the identity, or all errors.
fn read_identity(mut env: Env, layout: &Layout) -> Result<Identity, Vec<String>> {
    let identity = Identity::read(&mut env);
    let platform = PlatformAccess::read(&mut env, layout);
    let keys = config::read_initial_proof_keys(&mut env);
    let store = StoreConfig::read(&mut env);
    let url = DatabaseUrl::read(&mut env);
    let database = match url.as_ref().map(DatabaseUrl::config) {
        Some(Err(error)) => {
            error.errors.iter().for_each(|error| env.add_error(&vars::DATABASE_URL, error.as_str()));
            None
        }
        Some(Ok(_)) => Some(()),
        None => None,
    };
    let built = platform.zip(keys).zip(store).zip(database).zip(identity).map(|(_, identity)| identity);
    env.finish(built).map_err(|error| error.errors)
}

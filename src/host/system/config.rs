//! Configuration shared by all host applets: `host.env`, `r2.env` and `boot.env`, overridden by the process
//! environment.

use std::fmt;
use std::path::PathBuf;

use secrecy::SecretString;
use url::Url;

use super::epoch;
use super::layout::Layout;
use super::root_settings;
use super::upgrade_token::UpgradeToken;
use crate::system::vars;
use svc_base::config::{ConfigError, Env};
use svc_base::telemetry;
use svc_http::proof::ProofKeys;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Slot};

/// Returns a host applet's environment: the process environment, then the env files below `SVC_ROOT`. As root, only the
/// settings in [`root_settings::ALLOWED_FROM_OTHERS`] are accepted from files that other users can write, and root's
/// own file takes precedence.
pub fn environment(layout: &Layout) -> Env {
    if nix::unistd::geteuid().is_root() {
        let root_env = Env::from_process().with_file(&layout.update_env());
        return root_settings::with_untrusted_files(root_env, &service_files(layout));
    }
    services_env(layout)
}

/// Returns the environment of the machine's services. Never includes root's own file, even when called as root.
pub fn services_env(layout: &Layout) -> Env {
    let files = service_files(layout);
    if nix::unistd::geteuid().is_root() {
        return root_settings::with_untrusted_files(Env::from_process(), &files);
    }
    files.iter().fold(Env::from_process(), |env, file| env.with_file(file))
}

fn service_files(layout: &Layout) -> [PathBuf; 3] {
    [layout.host_env(), layout.store_env(), layout.boot_env()]
}

/// Initializes an applet's log with the machine id. Configuration errors surface later, when the configuration is read.
pub fn init_log(applet: &'static str, layout: &Layout) {
    let machine = environment(layout).text(&vars::SVC_MACHINE_ID).and_then(|id| id.parse().ok());
    telemetry::init_on_machine(applet, machine);
}

/// This machine's identity and owner, as written at provisioning.
#[derive(Debug, Clone)]
pub struct Identity {
    pub machine: MachineId,
    pub user: IdpUserId,
    pub handle: Handle,
    pub slot: Slot,
    pub epoch: Epoch,
}

impl Identity {
    pub fn read(env: &mut Env) -> Option<Self> {
        let machine = env.required(&vars::SVC_MACHINE_ID);
        let user = env.required(&vars::SVC_USER_ID);
        let handle = env.required(&vars::SVC_HANDLE);
        let slot = env.or_default(&vars::SVC_SLOT);
        let epoch = env.required(&vars::SVC_EPOCH);
        Some(Self { machine: machine?, user: user?, handle: handle?, slot, epoch: epoch? })
    }

    /// Reads the identity with the current epoch, which the platform may have raised.
    pub fn read_current(env: &mut Env, layout: &Layout) -> Option<Self> {
        let identity = Self::read(env)?;
        Some(Self { epoch: epoch::current(layout, identity.epoch), ..identity })
    }
}

/// Platform address and credential.
#[derive(Debug, Clone)]
pub struct PlatformAccess {
    pub base: Url,
    pub upgrade_token: UpgradeToken,
}

impl PlatformAccess {
    pub fn read(env: &mut Env, layout: &Layout) -> Option<Self> {
        let base = env.required(&vars::PLATFORM_INTERNAL_URL);
        let initial = env.required_secret(&vars::UPGRADE_TOKEN);
        let machine = env.text(&vars::SVC_MACHINE_ID).and_then(|id| id.parse().ok());
        let upgrade_token = initial.map(|initial| match machine {
            Some(machine) => UpgradeToken::rotating(initial, layout, machine),
            None => UpgradeToken::fixed(initial),
        });
        Some(Self { base: base?, upgrade_token: upgrade_token? })
    }

    /// Returns `base` joined with a path that starts with `/`.
    pub fn url(&self, path: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("{}{path}", self.base.path().trim_end_matches('/')));
        url
    }
}

/// Reads the initial proof keys from `SVC_PROOF_KEYS`.
pub fn read_initial_proof_keys(env: &mut Env) -> Option<ProofKeys> {
    let text: String = env.required(&vars::SVC_PROOF_KEYS)?;
    // serde's message quotes the value, so only report the position.
    let parse_error = |error: serde_json::Error| {
        format!("must be a JWK set (error at line {}, column {})", error.line(), error.column())
    };
    serde_json::from_str(&text).map_err(|error| env.add_error(&vars::SVC_PROOF_KEYS, parse_error(error))).ok()
}

/// Reads the release version from user-data.
pub fn read_image_version(env: &mut Env) -> Option<ImageVersion> {
    env.required(&vars::SVC_IMAGE_VERSION)
}

/// `DATABASE_URL`, redacted in `Debug` output.
#[derive(Clone)]
pub struct DatabaseUrl(pub SecretString);

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DatabaseUrl(…)")
    }
}

impl DatabaseUrl {
    pub fn read(env: &mut Env) -> Option<Self> {
        env.required_secret(&vars::DATABASE_URL).map(Self)
    }

    /// # Errors
    /// If the URL is invalid. The error doesn't quote it.
    pub fn config(&self) -> Result<tokio_postgres::Config, ConfigError> {
        use secrecy::ExposeSecret;
        self.0.expose_secret().parse().map_err(|_| ConfigError {
            errors: vec!["DATABASE_URL: must be postgres://user:password@host:port/database".to_owned()],
        })
    }
}

/// Reads the maximum time between verifications of a snapshot or pack, in days.
pub fn read_verify_within_days(env: &mut Env) -> u32 {
    let days = env.or_default(&vars::VERIFY_WITHIN_DAYS);
    if days == 0 {
        env.add_error(&vars::VERIFY_WITHIN_DAYS, "must be at least 1");
    }
    days
}

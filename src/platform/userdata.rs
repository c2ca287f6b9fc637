//! User-data of a new server: `#cloud-config` in JSON, with the env files of the host and the stages of its first boot.
//!
//! Everything in it can be made again from the row and the configuration, so that a create can be repeated after a
//! kill. It holds credentials: it exists as a secret and is never logged.

use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

use super::db::machine_row::MachineRow;
use super::host_settings::HostSettings;
use super::host_store::StoreAccess;
use super::tokens::{Purpose, TokenMint};
use crate::config::env_line;
use crate::http::proof::ProofKeys;

/// What the provider takes at most.
pub const LARGEST: usize = 32 << 10;

/// The first boot on a real machine: the same stages that the units run later, by shell.
const FIRST_BOOT: &str = include_str!("first-boot.sh");

#[derive(Debug, thiserror::Error)]
#[error("the user-data would have {size} bytes, more than the {LARGEST} that the provider takes")]
pub struct TooLarge {
    pub size: usize,
}

/// # Errors
/// [`TooLarge`].
pub fn render(
    machine: &MachineRow,
    hosts: &HostSettings,
    store: &StoreAccess,
    keys: &ProofKeys,
    mint: &TokenMint,
) -> Result<SecretString, TooLarge> {
    let files = [
        ("/opt/svc/env/host.env", host_env(machine, hosts, keys, mint)),
        ("/opt/svc/env/r2.env", store.env_file()),
        ("/opt/svc/env/boot.env", boot_env(machine, hosts, mint)),
    ];
    let files: Vec<_> = files
        .into_iter()
        .map(|(path, content)| json!({"path": path, "permissions": "0600", "owner": "root:root", "content": content}))
        .collect();
    let config = json!({"write_files": files, "runcmd": [["sh", "-ec", FIRST_BOOT]]});
    let text = format!("#cloud-config\n{config}\n");
    if text.len() > LARGEST {
        return Err(TooLarge { size: text.len() });
    }
    Ok(text.into())
}

fn host_env(machine: &MachineRow, hosts: &HostSettings, keys: &ProofKeys, mint: &TokenMint) -> String {
    let keys = serde_json::to_string(keys).expect("keys are strings");
    let upgrade = mint.token(machine.id, Purpose::Upgrade);
    let mut text = lines(&[
        ("SVC_MACHINE_ID", &machine.id.to_string()),
        ("SVC_USER_ID", machine.user.as_str()),
        ("SVC_HANDLE", machine.handle.as_str()),
        ("SVC_SLOT", machine.slot.as_str()),
        ("SVC_EPOCH", &machine.epoch.to_string()),
        ("SVC_IMAGE_VERSION", machine.image_version.as_str()),
        ("PLATFORM_INTERNAL_URL", hosts.internal_url.as_str().trim_end_matches('/')),
        ("UPGRADE_TOKEN", upgrade.expose_secret()),
        ("SVC_PROOF_KEYS", &keys),
    ]);
    for (name, value) in &hosts.idp {
        text.push_str(&env_line(name, value));
    }
    text
}

fn boot_env(machine: &MachineRow, hosts: &HostSettings, mint: &TokenMint) -> String {
    let token = mint.token(machine.id, Purpose::Registration);
    lines(&[
        ("REGISTRATION_TOKEN", token.expose_secret()),
        ("SVC_HOST_BUNDLE_URL", &hosts.bundle_url.of(&machine.image_version)),
        ("SVC_BUNDLE_SHA256", &machine.bundle_sha256),
        ("SVC_IMAGE_VERSION", machine.image_version.as_str()),
        ("SVC_RESTORE_MODE", machine.restore.as_str()),
    ])
}

fn lines(pairs: &[(&str, &str)]) -> String {
    pairs.iter().map(|(name, value)| env_line(name, value)).collect()
}

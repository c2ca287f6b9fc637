//! Renders the user-data of a new server: `#cloud-config` in JSON, with the host's env files and first-boot files.
//!
//! The content can be rendered again from the row, the configuration, the current proof keys and new store credentials,
//! so that a create request can be repeated after a crash. It contains credentials, so it is a secret and is never
//! logged.

use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

use super::db::machine_row::MachineRow;
use super::host_settings::HostSettings;
use super::store_access_issuer::StoreAccess;
use super::tokens::{Purpose, TokenMint};
use svc_base::config::{format_env_line, parse_env_file};
use svc_http::networks::Networks;
use svc_http::proof::ProofKeys;

/// Maximum size of user-data that the provider accepts.
pub const MAX_BYTES: usize = 32 << 10;

const FIREWALL: &str = "/etc/nftables.conf";
/// The rule that admits connections to a machine's services: SSH and the gateway.
const SERVED_PORTS_RULE: &str = "tcp dport { 22, 443 } accept";

/// Path, mode and content of the files that do not depend on the machine. The script must be written last: when it
/// runs, it assumes that all files have been written.
const FIXED_FILES: [(&str, &str, &str); 5] = [
    (
        "/etc/systemd/system/svc-first-boot.service",
        "0644",
        include_str!("../../cloud-init/svc-first-boot.service"),
    ),
    (FIREWALL, "0755", include_str!("../../cloud-init/nftables.conf")),
    ("/etc/sysctl.d/60-svc.conf", "0644", include_str!("../../cloud-init/sysctl.conf")),
    ("/etc/systemd/journald.conf.d/60-svc.conf", "0644", include_str!("../../cloud-init/journald.conf")),
    ("/opt/svc/first-boot.sh", "0755", include_str!("../../cloud-init/first-boot.sh")),
];

/// Repeats an interrupted first boot: cloud-init marks a module as done before it runs the module, and a power cut may
/// happen in between. `bootcmd` runs at every boot. Until all files have been written, this command makes cloud-init
/// write them again; after that, it starts the first-boot service again until the first boot is complete.
const RESUME_COMMAND: &str = "sem=/var/lib/cloud/instance/sem/config_; if test ! -e /opt/svc/user-data-written; then \
    rm -f ${sem}write_files ${sem}runcmd ${sem}scripts_user; elif test ! -e /opt/svc/first-boot-complete; then \
    systemctl enable --now --no-block svc-first-boot.service; fi";

/// The reason user-data cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error("the user-data is {size} bytes long, but the provider accepts at most {MAX_BYTES}")]
    TooLarge { size: usize },
    #[error(
        "the value of {name} contains a line break or another control character, which {path} cannot store"
    )]
    ControlCharacter { path: &'static str, name: String },
}

/// Renders the user-data of a machine's server. `expects_files`: whether the machine must restore the slot's saved
/// files, so that an empty file backup counts as a loss.
///
/// # Errors
/// [`RenderError`] if the user-data is too large, or a value cannot be stored in an env file.
pub fn render(
    machine: &MachineRow,
    hosts: &HostSettings,
    store: &StoreAccess,
    keys: &ProofKeys,
    mint: &TokenMint,
    expects_files: bool,
) -> Result<SecretString, RenderError> {
    let env_files = [
        ("/opt/svc/env/host.env", host_env(machine, hosts, keys, mint)),
        ("/opt/svc/env/r2.env", store.to_env_file()),
        ("/opt/svc/env/boot.env", boot_env(machine, mint, expects_files)),
        ("/opt/svc/env/update.env", update_env(machine, hosts)),
    ];
    for (path, content) in &env_files {
        if let Some(name) = find_variable_with_control_character(content) {
            return Err(RenderError::ControlCharacter { path, name });
        }
    }
    // cloud-init writes the files before the users exist; `first-boot.sh` sets their owners.
    let file = |path: &str, mode: &str, content: &str| json!({"path": path, "permissions": mode, "owner": "root:root", "content": content});
    let env_files = env_files.iter().map(|(path, content)| file(path, "0600", content));
    let fixed = FIXED_FILES.iter().map(|(path, mode, content)| {
        let content = strip_comments(content);
        if *path == FIREWALL {
            file(path, mode, &restrict_gateway_access(&content, &hosts.egress))
        } else {
            file(path, mode, &content)
        }
    });
    let config = json!({
        "write_files": env_files.chain(fixed).collect::<Vec<_>>(),
        "bootcmd": [["sh", "-c", RESUME_COMMAND]],
        "runcmd": [["systemctl", "daemon-reload"], ["systemctl", "enable", "--now", "--no-block", "svc-first-boot.service"]],
    });
    let text = format!("#cloud-config\n{}\n", escape_for_yaml(&config.to_string()));
    if text.len() > MAX_BYTES {
        return Err(RenderError::TooLarge { size: text.len() });
    }
    Ok(text.into())
}

/// Changes the firewall rules so that only these networks can reach the gateway. Without networks, the rules are
/// unchanged.
fn restrict_gateway_access(rules: &str, egress: &Networks) -> String {
    if egress.is_empty() {
        return rules.to_owned();
    }
    let (v4, v6) = egress.by_family();
    let v4 = v4.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let v6 = v6.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut admit_rules = "tcp dport 22 accept".to_owned();
    for (family, networks) in [("ip", v4), ("ip6", v6)] {
        if !networks.is_empty() {
            admit_rules.push_str(&format!("\n    {family} saddr {{ {networks} }} tcp dport 443 accept"));
        }
    }
    rules.replace(SERVED_PORTS_RULE, &admit_rules)
}

/// Returns the name of the first variable in an env file whose value contains a line break or another control
/// character.
fn find_variable_with_control_character(content: &str) -> Option<String> {
    let has_control = |line: &str| line.chars().any(char::is_control);
    let control_line = content.split('\n').position(has_control);
    // A value's quotes must be closed on the same line, so a line break in a value makes the env file unreadable.
    let number = control_line.or_else(|| parse_env_file(content).err().map(|number| number - 1))?;
    let line = content.split('\n').nth(number).unwrap_or_default();
    Some(line.split('=').next().unwrap_or_default().to_owned())
}

/// Escapes JSON so that it has the same meaning in YAML 1.1, which cloud-init reads: YAML rejects some characters that
/// JSON strings may contain, or treats them as line breaks.
fn escape_for_yaml(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            c => text.push(c),
        }
    }
    text
}

/// Removes comments and empty lines, except the first line, because the size of user-data is limited.
fn strip_comments(text: &str) -> String {
    let lines = text.lines().enumerate().filter(|(number, line)| {
        *number == 0 || !(line.trim().is_empty() || line.trim_start().starts_with('#'))
    });
    lines.map(|(_, line)| format!("{line}\n")).collect()
}

fn host_env(machine: &MachineRow, hosts: &HostSettings, keys: &ProofKeys, mint: &TokenMint) -> String {
    let keys = serde_json::to_string(keys).expect("keys are strings");
    let upgrade = mint.first_token(machine.id, Purpose::Upgrade, &machine.upgrade_token.hash);
    let mut text = env_lines(&[
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
    // The certificate authority's settings are omitted, because the size of user-data is limited. They arrive with the
    // response to the first heartbeat; a machine does not need them earlier.
    if let Some(domain) = &hosts.domain {
        text.push_str(&format_env_line("SVC_HOST_NAME", &domain.host_name(machine.id)));
    }
    for (name, value) in &hosts.idp {
        text.push_str(&format_env_line(name, value));
    }
    text
}

fn boot_env(machine: &MachineRow, mint: &TokenMint, expects_files: bool) -> String {
    let token = mint.first_token(machine.id, Purpose::Registration, &machine.registration_token_hash);
    let mut text = env_lines(&[
        ("REGISTRATION_TOKEN", token.expose_secret()),
        ("SVC_IMAGE_VERSION", machine.image_version.as_str()),
        ("SVC_RESTORE_MODE", machine.restore.as_str()),
    ]);
    if let Some(key) = &machine.restore_snapshot {
        text.push_str(&format_env_line("SVC_RESTORE_SNAPSHOT", key));
    }
    if !machine.should_restore_files {
        text.push_str(&format_env_line("SVC_RESTORE_FILES", "false"));
    } else if expects_files {
        text.push_str(&format_env_line("SVC_EXPECT_FILES", "true"));
    }
    text
}

/// Renders `update.env`, the settings for programs that run as root. Unlike the other env files, this one stays owned
/// by root, so that no other user can change it.
fn update_env(machine: &MachineRow, hosts: &HostSettings) -> String {
    let bundle_url = hosts.bundle_url.for_version(&machine.image_version);
    let mut text = env_lines(&[
        ("PLATFORM_INTERNAL_URL", hosts.internal_url.as_str().trim_end_matches('/')),
        ("SVC_MACHINE_ID", &machine.id.to_string()),
        ("SVC_HOST_BUNDLE_URL", &bundle_url),
        ("SVC_BUNDLE_SHA256", &machine.bundle_sha256),
    ]);
    if let Some(keys) = &hosts.bundle_public_keys {
        text.push_str(&format_env_line("SVC_BUNDLE_PUBLIC_KEYS", keys));
        text.push_str(&format_env_line("SVC_BUNDLE_KEYS_SEQUENCE", &hosts.bundle_keys_sequence.to_string()));
    }
    // The host sends its token only to the platform, at either of its URLs.
    if hosts.is_platform_url(&bundle_url) {
        text.push_str(&format_env_line("SVC_HOST_BUNDLE_WITH_TOKEN", "yes"));
    }
    if let Some(image) = &hosts.postgres_image {
        text.push_str(&format_env_line("SVC_POSTGRES_IMAGE", image));
    }
    text
}

fn env_lines(pairs: &[(&str, &str)]) -> String {
    pairs.iter().map(|(name, value)| format_env_line(name, value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &str = include_str!("../../cloud-init/nftables.conf");

    #[test]
    fn firewall_admits_only_listed_networks_to_gateway() {
        assert_eq!(restrict_gateway_access(RULES, &Networks::default()), RULES);
        let rules = |list: &str| restrict_gateway_access(RULES, &list.parse().unwrap());
        assert!(RULES.contains(SERVED_PORTS_RULE), "the rule to replace exists");
        let both = rules("203.0.113.0/24,198.51.100.7,2001:db8::/32,203.0.113.9");
        assert!(!both.contains(SERVED_PORTS_RULE), "{both}");
        for rule in [
            "    tcp dport 22 accept\n",
            "    ip saddr { 198.51.100.7/32, 203.0.113.0/24 } tcp dport 443 accept\n",
            "    ip6 saddr { 2001:db8::/32 } tcp dport 443 accept\n",
        ] {
            assert!(both.contains(rule), "{rule}: {both}");
        }
        assert_eq!(both.matches("443").count(), 2, "{both}");
        let only_v6 = rules("2001:db8::/32");
        assert!(!only_v6.contains("ip saddr {") && only_v6.contains("ip6 saddr {"), "{only_v6}");
    }
}

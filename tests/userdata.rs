//! A server's user-data fits within the size limit, cloud-init accepts it, and its script is POSIX shell.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::Result;
use jiff::Timestamp;
use kit::checkers;
use secrecy::{ExposeSecret, SecretSlice, SecretString};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use svc::http::proof::ProofKeys;
use svc::machine::epoch::Epoch;
use svc::machine::event::RestoreMode;
use svc::machine::state::Status;
use svc::platform::db::machine_row::MachineRow;
use svc::platform::host_settings::{BundleUrl, HostSettings, MAX_EGRESS_NETWORKS};
use svc::platform::store_access_issuer::{HostCredentials, SessionGrant, StoreAccessIssuer};
use svc::platform::token_rotation::UpgradeToken;
use svc::platform::tokens::{Generation, TokenMint};
use svc::platform::userdata;
use svc::store::config::{S3Config, StoreConfig};
use svc::wire::heartbeat::{AcmeSettings, ExternalAccount};
use svc::wire::machine::MachineKind;

/// The variable inputs to a user-data document.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UserDataInput {
    pub user: String,
    pub handle: String,
    pub slot: String,
    pub version: String,
    pub platform: String,
    /// The platform's public URL, if it differs from `platform`.
    pub public: Option<String>,
    pub bundle: String,
    pub bundle_sha256: String,
    pub session_token: String,
    pub issuer: String,
    pub store: String,
    pub proof_keys: usize,
    pub bundle_keys: usize,
    #[serde(default)]
    pub egress: String,
}

impl UserDataInput {
    pub fn typical() -> Self {
        Self {
            user: "user_demo".into(),
            handle: "ada".into(),
            slot: "primary".into(),
            version: "v1".into(),
            platform: "https://platform.example".into(),
            public: None,
            bundle: "https://platform.example/system-bundles/v1/svc-host-bundle.tar.gz".into(),
            bundle_sha256: "ab".repeat(32),
            session_token: "session".into(),
            issuer: "https://idp.example".into(),
            store: "https://store.example".into(),
            proof_keys: 1,
            bundle_keys: 1,
            egress: String::new(),
        }
    }

    /// Uses names of maximum length, URLs of over 2,000 characters, and a session token twice as long as any seen from
    /// AWS.
    fn with_maximum_lengths() -> Self {
        let url = |host: &str| format!("https://{host}.example/{}", "p".repeat(2000));
        Self {
            user: "u".repeat(128),
            handle: "h".repeat(39),
            slot: "s".repeat(32),
            version: "v".repeat(64),
            platform: url("platform"),
            public: None,
            bundle: url("bundles"),
            bundle_sha256: "ab".repeat(32),
            session_token: "t".repeat(4096),
            issuer: url("idp"),
            store: url("store"),
            proof_keys: 4,
            bundle_keys: 4,
            egress: max_egress(),
        }
    }

    pub async fn render(&self) -> String {
        self.try_render().await.unwrap()
    }

    /// Like [`Self::render`], but returns an error if the platform rejects an input.
    pub async fn try_render(&self) -> Result<String> {
        let hosts = HostSettings {
            public_url: self.public.as_ref().unwrap_or(&self.platform).parse()?,
            internal_url: self.platform.parse()?,
            bundle_url: BundleUrl::Exact(self.bundle.parse()?),
            https_port: 443,
            domain: Some(
                format!("{}.example", vec!["d".repeat(51); 4].join("."))
                    .parse()
                    .expect("the domain is valid"),
            ),
            acme: Some(AcmeSettings {
                directory_url: format!("https://acme.example/{}", "d".repeat(200)),
                contact: Some(format!("mailto:{}@example.com", "o".repeat(200))),
                external_account: Some(ExternalAccount {
                    key_id: "k".repeat(100),
                    hmac_key: SecretString::from("m".repeat(100)),
                }),
            }),
            idp: ["IDP_ISSUER", "IDP_AUDIENCE", "IDP_JWKS_URL"]
                .map(|name| (name, self.issuer.clone()))
                .into(),
            store_endpoint: Some(self.store.parse()?),
            bundle_public_keys: Some(vec!["k".repeat(44); self.bundle_keys].join(",")),
            bundle_keys_sequence: 1,
            egress: self.egress.parse()?,
            postgres_image: Some("docker.io/library/postgres:16".to_owned()),
        };
        let store = StoreConfig::S3(S3Config {
            bucket: "b".repeat(63),
            endpoint: None,
            region: "eu-central-1".into(),
            access_key: "A".repeat(128),
            secret_key: SecretString::from("s".repeat(128)),
            session_token: Some(SecretString::from(self.session_token.clone())),
            expires_at: Some(Timestamp::UNIX_EPOCH),
        });
        let store = StoreAccessIssuer::new(&store, &HostCredentials::Static)?;
        let store = store.with_host_endpoint(hosts.store_endpoint.as_ref());
        let machine = self.machine()?;
        let access = store.grant_access(&machine, SessionGrant::WorkingOnly).await?;
        let keys = vec![json!({"kid": "k".repeat(36), "x": "x".repeat(43)}); self.proof_keys];
        let keys: ProofKeys = serde_json::from_value(json!({"keys": keys}))?;
        let mint = TokenMint::new(&SecretSlice::from(vec![7_u8; 32]));
        Ok(userdata::render(&machine, &hosts, &access, &keys, &mint, false)?.expose_secret().to_owned())
    }

    fn machine(&self) -> Result<MachineRow> {
        Ok(MachineRow {
            id: "019a0000-0000-7000-8000-000000000001".parse()?,
            user: self.user.parse()?,
            slot: self.slot.parse()?,
            handle: self.handle.parse()?,
            kind: MachineKind::Customer,
            status: Status::Provisioning,
            failure: None,
            epoch: Epoch::NONE.next(),
            restore: RestoreMode::Required,
            server_type: "cpx22".parse()?,
            resize_to: None,
            location: "nbg1".parse()?,
            image_version: self.version.parse()?,
            bundle_sha256: self.bundle_sha256.clone(),
            provider_server_id: None,
            public_ipv4: None,
            https_port: 443,
            tls_pin: None,
            registration_token_hash: Vec::new(),
            registration_expires_at: None,
            registration_body_hash: None,
            registered_at: None,
            upgrade_token: UpgradeToken {
                hash: Vec::new(),
                generation: Generation::FIRST,
                rotated_at: Timestamp::UNIX_EPOCH,
                requested_at: None,
                previous: None,
            },
            heartbeat_at: None,
            health: None,
            last_update: None,
            checks: None,
            restore_snapshot: Some("system/db/snapshots/2026-11-21T05-28-32.385Z-1.dump".to_owned()),
            should_restore_files: false,
            unrestored_snapshot: None,
            last_backup: None,
            proof_kids: Vec::new(),
            certificate: None,
            files: None,
            replaced_by: None,
            retired_at: None,
            deleted_at: None,
            create_requested_at: None,
            server_deleted_at: None,
            power_on_requested_at: None,
            backup_taken_at: None,
            power_off_requested_at: None,
            proven_at: None,
            final_backup_at: None,
            unsaved_since: None,
            has_unsaved_files_only: false,
            discard_requested_at: None,
            removal_abandoned_at: None,
            boot_progress: None,
            preview_expires_at: None,
            powered_off_at: None,
            attention: serde_json::json!([]),
            server_missing_since: None,
            fallback_locations: Vec::new(),
            boot_stages: Value::Null,
            created_at: Timestamp::UNIX_EPOCH,
            updated_at: Timestamp::UNIX_EPOCH,
        })
    }
}

/// Returns the maximum number of networks, each of maximum length.
fn max_egress() -> String {
    let networks = (0..MAX_EGRESS_NETWORKS)
        .map(|n| format!("2001:1111:2222:3333:4444:5555:6666:{:04x}", 0x1001 + 2 * n));
    networks.collect::<Vec<_>>().join(",")
}

/// Parses the document, which is JSON after its first line; cloud-init reads it as YAML.
pub fn parse_user_data(text: &str) -> Value {
    serde_json::from_str(text.strip_prefix("#cloud-config\n").unwrap()).unwrap()
}

fn find_file<'a>(document: &'a Value, path: &str) -> &'a Value {
    let files = document["write_files"].as_array().unwrap();
    files
        .iter()
        .find(|file| file["path"] == path)
        .unwrap_or_else(|| panic!("the user-data has no file {path}"))
}

#[tokio::test]
async fn user_data_with_maximum_lengths_fits() {
    let text = UserDataInput::with_maximum_lengths().render().await;
    println!("{} bytes, typically {}", text.len(), UserDataInput::typical().render().await.len());
    assert!(text.len() < userdata::MAX_BYTES, "{}", text.len());
}

#[tokio::test]
async fn secrets_are_only_in_files_with_mode_0600() {
    let document = parse_user_data(&UserDataInput::typical().render().await);
    for (name, secret) in [("host", "svcu_"), ("boot", "svcr_"), ("r2", &"s".repeat(128))] {
        let file = find_file(&document, &format!("/opt/svc/env/{name}.env"));
        assert!(file["content"].as_str().unwrap().contains(secret), "{name}");
        assert_eq!((&file["permissions"], &file["owner"]), (&json!("0600"), &json!("root:root")), "{name}");
        for key in ["runcmd", "bootcmd"] {
            assert!(!document[key].to_string().contains(secret), "{name} in {key}");
        }
        for file in document["write_files"].as_array().unwrap() {
            let has_secret = file["content"].as_str().unwrap().contains(secret);
            assert!(!has_secret || file["permissions"] == "0600", "{name} in {}", file["path"]);
        }
    }
    assert_eq!(find_file(&document, "/opt/svc/env/update.env")["permissions"], "0600");
}

/// The platform's package must not import the host's declarations, so the names are compared here.
#[tokio::test]
async fn user_data_sets_only_variables_that_hosts_declare() {
    let declared: BTreeSet<&str> = [svc::host::system::vars::SECTIONS, svc::store::vars::SECTIONS]
        .into_iter()
        .flatten()
        .flat_map(|section| section.variables)
        .map(|variable| variable.name)
        .collect();
    let script = include_str!("../cloud-init/first-boot.sh");
    let document = parse_user_data(&UserDataInput::typical().render().await);
    let mut count = 0;
    for name in ["host", "r2", "boot", "update"] {
        let env = find_file(&document, &format!("/opt/svc/env/{name}.env"))["content"].as_str().unwrap();
        for variable in env.lines().map(|line| line.split('=').next().unwrap()) {
            let is_read =
                declared.contains(variable) || script.contains(&format!("$(read_env {name} {variable})"));
            assert!(is_read, "no program on a machine reads {variable} in {name}.env");
            count += 1;
        }
    }
    assert!(count > 25, "{count} variables");
}

#[tokio::test]
async fn hosts_get_their_own_store_endpoint() {
    let document = parse_user_data(&UserDataInput::typical().render().await);
    let env = find_file(&document, "/opt/svc/env/r2.env")["content"].as_str().unwrap();
    assert!(env.contains("OBJECT_STORE_ENDPOINT=\"https://store.example/\"\n"), "{env}");
}

/// Power may fail after cloud-init has recorded that it wrote the files, but before all of them are on disk. Until the
/// first-boot script has confirmed that all files exist, the `bootcmd` command removes cloud-init's records of writing
/// the files and starting the script.
#[tokio::test]
async fn files_are_rewritten_until_the_script_confirms_them() {
    let document = parse_user_data(&UserDataInput::typical().render().await);
    let files = document["write_files"].as_array().unwrap();
    assert_eq!(files.last().unwrap()["path"], "/opt/svc/first-boot.sh", "the script must be the last file");
    let root = tempfile::tempdir().unwrap();
    let under_root = |path: &str| root.path().join(path.trim_start_matches('/'));
    let (sem, opt) = (under_root("/var/lib/cloud/instance/sem"), under_root("/opt/svc"));
    for dir in [&sem, &opt] {
        std::fs::create_dir_all(dir).unwrap();
    }
    let boot = || {
        for name in ["write_files", "runcmd", "scripts_user", "users_groups"] {
            std::fs::write(sem.join(format!("config_{name}")), "").unwrap();
        }
        let script = document["bootcmd"][0][2].as_str().unwrap();
        let script = script.replace("/var/lib", &under_root("/var/lib").display().to_string());
        let script = script.replace("/opt/svc", &opt.display().to_string()).replace("systemctl", "echo");
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (String::from_utf8(output.stdout).unwrap(), std::fs::read_dir(&sem).unwrap().count())
    };
    assert_eq!(boot(), (String::new(), 1));
    std::fs::write(opt.join("user-data-written"), "").unwrap();
    assert_eq!(boot(), ("enable --now --no-block svc-first-boot.service\n".to_owned(), 4));
    std::fs::write(opt.join("first-boot-complete"), "").unwrap();
    assert_eq!(boot(), (String::new(), 4));
}

/// Checks the delivered script, which has no comments, with `sh -n`, and its source with shellcheck.
#[tokio::test]
async fn first_boot_script_is_posix_shell() {
    let document = parse_user_data(&UserDataInput::typical().render().await);
    let script = find_file(&document, "/opt/svc/first-boot.sh")["content"].as_str().unwrap();
    assert!(script.starts_with("#!/bin/sh\nset -eu\n"), "{script}");
    let syntax_check = Command::new("sh").args(["-n", "-c", script]).output().unwrap();
    assert!(syntax_check.status.success(), "{}", String::from_utf8_lossy(&syntax_check.stderr));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/cloud-init/first-boot.sh");
    let checked = checkers::shellcheck().unwrap().args(["--shell=sh", source]).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

/// Checks user-data with cloud-init's own command, from the release that machines boot.
fn check_with_cloud_init(text: &str) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("user-data");
    std::fs::write(&file, text).unwrap();
    let mut schema = checkers::cloud_init_schema().unwrap();
    let output = schema.arg("--config-file").arg(&file).output().unwrap();
    let messages = [output.stdout, output.stderr].concat();
    let messages = String::from_utf8_lossy(&messages).into_owned();
    if output.status.success() && messages.starts_with("Valid cloud-config") { Ok(()) } else { Err(messages) }
}

#[tokio::test]
async fn cloud_init_accepts_user_data() {
    for input in [UserDataInput::typical(), UserDataInput::with_maximum_lengths()] {
        check_with_cloud_init(&input.render().await).unwrap();
    }
    let error =
        check_with_cloud_init("#cloud-config\n{\"write_files\": [{\"pat\": \"/a\"}], \"runcmd\": 3}\n")
            .unwrap_err();
    assert!(error.contains("'path' is a required property") && error.contains("runcmd"), "{error}");
}

/// Checks that nft parses the machines' rules for various egress networks.
#[tokio::test]
async fn nft_accepts_the_firewall_rules() {
    if Command::new("nft").arg("--version").output().is_err() {
        kit::skip::record("nft is not installed");
        return;
    }
    for egress in [
        String::new(),
        "203.0.113.0/24".to_owned(),
        "2001:db8::/32".to_owned(),
        "10.0.0.0/8,10.1.0.0/16,203.0.113.7,203.0.113.6,2001:db8::1,2001:db8::/64".to_owned(),
        max_egress(),
    ] {
        let rendered = UserDataInput { egress: egress.clone(), ..UserDataInput::typical() }.render().await;
        let document = parse_user_data(&rendered);
        let rules = find_file(&document, "/etc/nftables.conf")["content"].as_str().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nftables.conf");
        std::fs::write(&path, rules).unwrap();
        // Runs in a private network namespace, because even a check needs the privilege to change rules.
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "nft", "-c", "-f"]).arg(&path);
        let checked = command.output().unwrap();
        let text = String::from_utf8_lossy(&checked.stderr);
        if text.contains("unshare failed") || text.contains("Operation not permitted") {
            kit::skip::record(format_args!("this user cannot create a network namespace: {text}"));
            return;
        }
        assert!(checked.status.success(), "{egress}: {text}\n{rules}");
    }
}

/// Runs the commands from docs/operating/network.md, "Admit only the platform to :443", with `dir` in place of `/etc`.
/// Returns whether they succeeded, and their stderr.
fn run_documented_commands(dir: &std::path::Path, admit: &str) -> Result<(bool, String)> {
    let page = include_str!("../docs/operating/network.md");
    let section = page.split("## Admit only the platform to :443").nth(1).unwrap();
    let block = section.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    let (_, commands) = block.split_once('\n').unwrap();
    let commands = commands.replace("/etc/", &format!("{}/", dir.display()));
    let stubs = "nft() { :; }\nsystemctl() { :; }\nsvcctl() { :; }\n";
    let script = format!("{stubs}admit='{admit}'\n{commands}");
    let output = Command::new("/bin/sh").arg("-c").arg(script).output()?;
    Ok((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[tokio::test]
async fn documented_commands_change_admitted_networks() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let conf = dir.path().join("nftables.conf");
    for egress in ["", "203.0.113.0/24", "203.0.113.0/24,2001:db8::/32"] {
        let input = UserDataInput { egress: egress.to_owned(), ..UserDataInput::typical() };
        let document = parse_user_data(&input.render().await);
        let rules_file = find_file(&document, "/etc/nftables.conf")["content"].as_str().unwrap();
        std::fs::write(&conf, rules_file)?;
        for admit in [
            "ip saddr { 198.51.100.0/24 } tcp dport 443 accept",
            "ip saddr { 198.51.100.7 } tcp dport 443 accept; ip6 saddr { 2001:db8:1::/48 } tcp dport 443 accept",
            "ip6 saddr { 2001:db8:2::/48 } tcp dport 443 accept",
        ] {
            for _ in 0..2 {
                assert_eq!(
                    run_documented_commands(dir.path(), admit)?,
                    (true, String::new()),
                    "{egress}: {admit}"
                );
            }
            let rules = std::fs::read_to_string(&conf)?;
            let rule = format!("    tcp dport 22 accept; {admit}");
            let port_rules: Vec<_> = rules.lines().filter(|line| line.contains("tcp dport")).collect();
            assert_eq!(port_rules, [rule.as_str()], "{egress}: {rules}");
        }
    }
    std::fs::write(&conf, "table inet own { }\n")?;
    let (succeeded, stderr) =
        run_documented_commands(dir.path(), "ip saddr { 198.51.100.7 } tcp dport 443 accept")?;
    assert!(!succeeded && stderr.contains("nothing was changed"), "{stderr}");
    assert_eq!(std::fs::read_to_string(&conf)?, "table inet own { }\n");
    Ok(())
}

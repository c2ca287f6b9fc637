//! The first machine: bundle, provisioning, boot behind the restore gate, the owner's rows, a backup, updates.

use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reqwest::StatusCode;
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::slot::BUCKET;
use super::stack::{CONFIRM_FLAGS, HANDLE, IMAGE_VERSION, Stack, USER, eventually};
use super::web;
use crate::bundle;
use crate::child;

/// The titles of the rows inserted before the backup, sorted.
pub const TITLES: [&str; 3] = ["first", "second", "third"];
/// A server type in the `builder` plan.
const LARGER_SERVER_TYPE: &str = "cpx32";
pub const LATER_TITLE: &str = "zz after the backup";

/// The fields of the platform's record that the scenario uses.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineRecord {
    #[serde(rename = "machineId")]
    pub id: String,
    /// The server's name at the provider.
    #[serde(skip)]
    pub server: String,
    pub status: String,
    pub epoch: u64,
    #[serde(rename = "publicIpv4")]
    pub ip: Ipv4Addr,
    pub https_port: u16,
    pub tls_spki_sha256: String,
    pub registered_at: String,
    pub image_version: String,
}

impl MachineRecord {
    pub fn parse(record: &str) -> Result<Self> {
        let mut machine: Self = serde_json::from_str(record)
            .with_context(|| format!("cannot parse the record of a running machine: {record}"))?;
        machine.server = format!("svc-{}", machine.id);
        Ok(machine)
    }
}

pub async fn publish(stack: &Stack) -> Result<((), String)> {
    stack.svcctl(&["slot", "set", USER, "--plan", "starter"]).await?.ensure_success()?;
    let (svc, out) = (stack.svc.clone(), stack.dir.join("bundle"));
    let built =
        tokio::task::spawn_blocking(move || bundle::build_minimal(&svc, IMAGE_VERSION, &out)).await??;
    let dir = built.dir.display().to_string();
    stack.svcctl(&["bundle", "publish", &dir, "--image-version", IMAGE_VERSION]).await?.ensure_success()?;
    let key = format!("system-bundles/{IMAGE_VERSION}/{}", bundle::ARCHIVE);
    let stored = stack.store.read(BUCKET, &key).context("no bundle in the store")?;
    ensure!(
        hex::encode(Sha256::digest(&stored)) == built.sha256,
        "the stored bundle differs from the built one"
    );
    let mib = built.size_bytes / (1 << 20);
    Ok(((), format!("slot {USER}/primary on starter; {key}, {mib} MiB")))
}

pub async fn provision(stack: &Stack) -> Result<(MachineRecord, String)> {
    let args = ["--json", "provision", USER, "--handle", HANDLE, "--wait=200"];
    let run = stack.svcctl(&[&args[..], &CONFIRM_FLAGS].concat()).await?.ensure_success()?;
    let machine = MachineRecord::parse(&run.stdout)?;
    ensure!(machine.status == "running", "the machine is {}", machine.status);
    ensure!(machine.epoch == 1, "the first machine has epoch {}", machine.epoch);
    Ok((machine.clone(), format!("machine {} is running at {}", machine.id, machine.ip)))
}

/// Checks the results of the first boot.
pub async fn check_boot(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let servers = stack.provider.servers();
    ensure!(servers.len() == 1 && servers[0].name == machine.server, "the provider has {servers:?}");
    ensure!(
        machine.tls_spki_sha256.len() == 64 && !machine.registered_at.is_empty(),
        "not registered: {machine:?}"
    );
    ensure!(machine.image_version == IMAGE_VERSION, "the machine is running {}", machine.image_version);
    let disk = stack.provider.disk(&machine.server)?;
    ensure!(disk.join("opt/svc/restore-complete").exists(), "the gate's marker is missing");
    for unit in ["svc-update", "svc-restore", "svc-gateway", "svc-register", "svc-sync-agent"] {
        ensure!(disk.join(format!("var/log/{unit}.log")).exists(), "{unit} has not run");
    }
    let fence = stack.slot.read_pointer(&stack.store)?;
    ensure!(fence["fenceEpoch"] == 1 && fence["snapshot"].is_null(), "the first fence is {fence}");
    let (ip, port) = (machine.ip, machine.https_port);
    let live = web::get_from_host(ip, port, "/livez", None).await?;
    ensure!(live.status.is_success(), "/livez: {}", live.status);
    for bearer in [None, Some("not.a.token")] {
        let response = web::get_from_host(ip, port, "/api/apps", bearer).await?;
        ensure!(
            response.status == StatusCode::UNAUTHORIZED,
            "a request without a valid proof got {}",
            response.status
        );
    }
    check_single_registration(stack, machine, &disk).await?;
    Ok((
        (),
        "bundle, gate, gateway, registration; registers only once; refuses requests without a proof"
            .to_owned(),
    ))
}

/// Checks that a used registration token is not accepted again.
async fn check_single_registration(stack: &Stack, machine: &MachineRecord, disk: &Path) -> Result<()> {
    let env = std::fs::read_to_string(disk.join("opt/svc/env/boot.env"))?;
    let token = env.lines().find_map(|line| line.strip_prefix("REGISTRATION_TOKEN="));
    let token = token.context("no REGISTRATION_TOKEN in boot.env")?.trim_matches('"');
    let body = json!({"machineId": machine.id, "imageVersion": IMAGE_VERSION, "bundleSha256": "0".repeat(64), "tlsSpkiSha256": "0".repeat(64)});
    let client = reqwest::Client::builder().timeout(Duration::from_secs(20)).no_proxy().build()?;
    let response =
        client.post(format!("{}/vps/register", stack.api)).bearer_auth(token).json(&body).send().await?;
    ensure!(response.status() == StatusCode::UNAUTHORIZED, "a second registration got {}", response.status());
    Ok(())
}

pub async fn insert_and_find_rows(stack: &Stack) -> Result<((), String)> {
    let owner = stack.owner_token();
    for title in TITLES {
        // The router loads a new machine within a second.
        let insert = || stack.web.insert_note(&owner, title);
        let row = if title == TITLES[0] {
            eventually("a row is inserted", Duration::from_secs(5), insert).await?
        } else {
            insert().await?
        };
        ensure!(row["title"] == title && row["id"].is_string(), "inserted {title}, got {row}");
    }
    let titles = stack.web.list_titles(&owner).await?;
    ensure!(titles == TITLES, "unexpected rows: {titles:?}");
    let anonymous = stack.web.get("/api/apps", None, "application/json").await?;
    ensure!(
        anonymous.status == StatusCode::UNAUTHORIZED,
        "a request without an identity got {}",
        anonymous.status
    );
    let response =
        stack.web.get("/api/apps", Some(&stack.session_token("user_other")), "application/json").await?;
    ensure!(
        response.status == StatusCode::SERVICE_UNAVAILABLE,
        "a user without a machine got {}",
        response.status
    );
    Ok(((), format!("{} rows inserted and found through the app host", titles.len())))
}

/// Takes a backup; returns the snapshot's key.
pub async fn backup(stack: &Stack, machine: &MachineRecord) -> Result<(String, String)> {
    let run = stack.svcctl(&["--json", "backup", "now", HANDLE, "--wait=120"]).await?.ensure_success()?;
    let report: serde_json::Value = run.json()?;
    let pointer = stack.slot.read_pointer(&stack.store)?;
    let snapshot = &pointer["snapshot"];
    ensure!(pointer["fenceEpoch"] == 1 && snapshot["epoch"] == 1, "the pointer is {pointer}");
    ensure!(
        snapshot["machineId"] == machine.id.as_str(),
        "the pointer names machine {}",
        snapshot["machineId"]
    );
    let key = snapshot["key"].as_str().context("no key in the pointer")?.to_owned();
    ensure!(report["key"] == key.as_str() && report["latest"] == true, "svcctl reported {report}");
    let dump = stack.slot.read(&stack.store, &key)?;
    let sha256 = hex::encode(Sha256::digest(&dump));
    ensure!(
        snapshot["sizeBytes"] == dump.len() && snapshot["sha256"] == sha256.as_str(),
        "{key} differs from the pointer"
    );
    let sidecar = stack.slot.read_json(&stack.store, &format!("{key}.json"))?;
    ensure!(
        sidecar["sha256"] == sha256.as_str() && sidecar["key"] == key.as_str(),
        "the sidecar is {sidecar}"
    );
    let notes = sidecar["tables"]
        .as_array()
        .and_then(|tables| tables.iter().find(|t| t["name"] == "app_notes.notes"));
    ensure!(notes.is_some_and(|t| t["rows"] == TITLES.len()), "the sidecar counts {}", sidecar["tables"]);
    let listed = list_dump(stack, &dump).await?;
    ensure!(
        listed.contains("TABLE DATA app_notes notes"),
        "pg_restore -l does not show the notes:\n{listed}"
    );
    let detail =
        format!("{key}, {} bytes; object, sidecar and pointer agree; pg_restore reads it", dump.len());
    Ok((key, detail))
}

/// A release with the same content as the first.
const NEXT_VERSION: &str = "demo-2";
/// A release whose gateway does not start.
const BROKEN_VERSION: &str = "demo-3";

/// Updates the running machine, which keeps its rows and reports the new release.
pub async fn update(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    publish_signed(stack, NEXT_VERSION, stack.svc.clone()).await?;
    // Without a shell, which the minimal bundle lacks, the release cannot be verified: see ctl::verify_rollout.
    let args = ["--json", "deploy", "start", NEXT_VERSION, "--no-verify", "--yes", "--wait=200"];
    let rollout: serde_json::Value = stack.svcctl(&args).await?.ensure_success()?.json()?;
    ensure!(rollout["state"] == "succeeded" && rollout["totals"]["updated"] == 1, "the rollout is {rollout}");
    ensure!(read_record(stack).await?["imageVersion"] == NEXT_VERSION, "the record has a different release");
    check_running_release(stack, machine, NEXT_VERSION).await?;
    Ok(((), format!("{IMAGE_VERSION} to {NEXT_VERSION}, signed; the rows were kept")))
}

/// Deploys a release whose gateway does not start: the machine rolls back, and rollout, host and fleet report it.
pub async fn roll_back(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let svc = stack.dir.join("broken-svc");
    let script = format!(
        "#!/bin/sh\nname=$(basename \"$0\")\ncase $name in\n  svc-gateway) echo broken >&2; exit 70 ;;\n  \
         svc-*) exec {svc} \"$name\" \"$@\" ;;\n  *) exec {svc} \"$@\" ;;\nesac\n",
        svc = stack.svc.canonicalize()?.display()
    );
    std::fs::write(&svc, script)?;
    std::fs::set_permissions(&svc, std::fs::Permissions::from_mode(0o755))?;
    publish_signed(stack, BROKEN_VERSION, svc).await?;
    let run = stack.svcctl(&["--json", "deploy", "start", BROKEN_VERSION, "--yes", "--wait=200"]).await?;
    ensure!(run.exit_code == Some(69), "svcctl exited with {:?}: {}", run.exit_code, run.stderr);
    let rollout: serde_json::Value = serde_json::from_str(&run.stdout)?;
    ensure!(
        rollout["state"] == "stopped" && rollout["why"] == "the canary failed",
        "the rollout is {rollout}"
    );
    let last_update = &read_record(stack).await?["lastUpdate"];
    ensure!(
        last_update["version"] == BROKEN_VERSION && last_update["outcome"] == "rolled_back",
        "the host reported {last_update}"
    );
    let fleet: serde_json::Value = stack.svcctl(&["--json", "fleet"]).await?.ensure_success()?.json()?;
    let reasons = &fleet["attention"][0]["reasons"];
    let is_reported =
        reasons.as_array().is_some_and(|reasons| reasons.iter().any(|reason| reason == "update_rolled_back"));
    ensure!(is_reported, "the fleet is {fleet}");
    check_running_release(stack, machine, NEXT_VERSION).await?;
    let status = stack.provider.run_unit(&machine.server, "svc-update", &["status", "--json"]).await?;
    let status: serde_json::Value = serde_json::from_slice(&status.stdout)?;
    ensure!(status["quarantined"][0]["version"] == BROKEN_VERSION, "svc-update status: {status}");
    Ok((
        (),
        format!(
            "{BROKEN_VERSION} failed at {}; rolled back to {NEXT_VERSION}, reported by fleet and rollout",
            last_update["stage"]
        ),
    ))
}

async fn read_record(stack: &Stack) -> Result<serde_json::Value> {
    stack.svcctl(&["--json", "status", HANDLE]).await?.ensure_success()?.json()
}

/// Checks that the machine's current release is `version`, and that it serves the owner's rows.
async fn check_running_release(stack: &Stack, machine: &MachineRecord, version: &str) -> Result<()> {
    let current = std::fs::read_link(stack.provider.disk(&machine.server)?.join("opt/svc/current"))?;
    ensure!(current.ends_with(version), "the current release is {}", current.display());
    let owner = stack.owner_token();
    let titles =
        eventually("the rows are found", Duration::from_secs(10), || stack.web.list_titles(&owner)).await?;
    ensure!(titles == TITLES, "unexpected rows: {titles:?}");
    Ok(())
}

/// Publishes a minimal bundle with a signed manifest.
pub async fn publish_signed(stack: &Stack, version: &'static str, svc: PathBuf) -> Result<()> {
    let (out, key) = (stack.dir.join(version), stack.signing_key.clone());
    let built = tokio::task::spawn_blocking(move || {
        let options = bundle::Options::new(&svc, version, &out)?;
        bundle::build(&bundle::Options { signing_keys: vec![key], ..options })
    });
    let dir = built.await??.dir.display().to_string();
    let output = stack
        .svcctl(&["bundle", "publish", &dir, "--image-version", version])
        .await?
        .ensure_success()?
        .stdout;
    ensure!(!output.contains("cannot update"), "{output}");
    Ok(())
}

/// Changes the server type. Server, disk and rows stay the same, and nothing is restored.
pub async fn resize(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    stack.svcctl(&["slot", "set", USER, "--plan", "builder"]).await?.ensure_success()?;
    let before = stack.provider.server_by_name(&machine.server).context("the provider has no such server")?;
    let marker = stack.provider.disk(&machine.server)?.join("opt/svc/restore-complete");
    let restored_at = std::fs::metadata(&marker)?.modified()?;
    let run = stack
        .svcctl(&["--json", "resize", HANDLE, LARGER_SERVER_TYPE, "--yes", "--wait=200"])
        .await?
        .ensure_success()?;
    let record: serde_json::Value = run.json()?;
    ensure!(
        record["status"] == "running" && record["serverType"] == LARGER_SERVER_TYPE,
        "the record is {record}"
    );
    ensure!(
        record["machineId"] == machine.id.as_str() && record["epoch"] == machine.epoch,
        "the record is {record}"
    );
    let after = stack.provider.server_by_name(&machine.server).context("the provider has no such server")?;
    ensure!(after.server_type == LARGER_SERVER_TYPE && after.id == before.id, "the provider has {after:?}");
    ensure!(
        after.disk_gb == before.disk_gb,
        "the disk changed from {} GB to {} GB",
        before.disk_gb,
        after.disk_gb
    );
    ensure!(std::fs::metadata(&marker)?.modified()? == restored_at, "the machine was restored again");
    let owner = stack.owner_token();
    let titles =
        eventually("the rows are found", Duration::from_secs(5), || stack.web.list_titles(&owner)).await?;
    ensure!(titles == TITLES, "unexpected rows: {titles:?}");
    let from = before.server_type;
    Ok((
        (),
        format!("{from} to {LARGER_SERVER_TYPE} on the same disk; {} rows, nothing restored", titles.len()),
    ))
}

/// Lists a dump's contents with PostgreSQL's own tool.
async fn list_dump(stack: &Stack, dump: &[u8]) -> Result<String> {
    let file = stack.dir.join("backup.dump");
    tokio::fs::write(&file, dump).await?;
    let mut command = stack.pg.client_command("pg_restore");
    command.arg("-l").arg(file);
    tokio::task::spawn_blocking(move || child::run(command, Duration::from_secs(60))).await?
}

pub async fn insert_later_row(stack: &Stack) -> Result<((), String)> {
    let owner = stack.owner_token();
    stack.web.insert_note(&owner, LATER_TITLE).await?;
    let titles = stack.web.list_titles(&owner).await?;
    ensure!(titles.len() == TITLES.len() + 1, "unexpected rows: {titles:?}");
    Ok(((), "one more row, which is in no backup".to_owned()))
}

//! A machine with a running release and a fake service manager, and a source for newer releases.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
use axum::Router;
use axum::routing::get;
use http::StatusCode;
use kit::bundle::{Manifest, SigningKey};
use serde_json::Value;

use super::bundle::{self, BundleSource};
use super::machine::{Machine, RunResult, RunningApplet};

pub const OLD_VERSION: &str = "2026.1.0";
pub const NEW_VERSION: &str = "2026.2.0";
pub const CREATED_AT: &str = "2026-01-02T03:04:05.000Z";
const EXPIRES_AT: &str = "2126-01-02T03:04:05.000Z";

/// A fake `systemctl` that records its calls. A restart sets the gateway's state: failed if the current release
/// contains `app/broken`, activating if it contains `app/crashing`, otherwise active. Any other unit has the state in
/// its own file or, without such a file, the gateway's. With `app/crashing`, a restarted unit has already been
/// restarted automatically three times. As with systemd 252, only `reset-failed` resets this count. A started backup
/// succeeds immediately, unless the file `backup` contains a command.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$*" >>"$SVC_ROOT/calls"
case "$1 $3" in
  "start svc-db-backup-request.service")
    if [ -e "$SVC_ROOT/backup" ]; then sh "$SVC_ROOT/backup" >>"$SVC_ROOT/backup.log" 2>&1 &
    else
      key=system/db/snapshots/$(date -u +%Y-%m-%dT%H-%M-%S.%3NZ)-1.dump
      echo "{\"timestamp\":\"$(date -u +%Y-%m-%dT%H:%M:%S.%3NZ)\",\"status\":\"success\",\"key\":\"$key\"}" \
        >"$SVC_ROOT/var/lib/svc/last-backup.json"
    fi ;;
esac
case $1 in
  reset-failed) rm -f "$SVC_ROOT/restarts-$2" ;;
  restart)
    state=active
    if [ -e "$SVC_ROOT/opt/svc/current/app/broken" ]; then state=failed; fi
    if [ -e "$SVC_ROOT/opt/svc/current/app/crashing" ]; then state=activating; echo 3 >"$SVC_ROOT/restarts-$2"; fi
    echo $state >"$SVC_ROOT/gateway" ;;
  show)
    if [ -e "$SVC_ROOT/state-$3" ]; then state=$SVC_ROOT/state-$3; else state=$SVC_ROOT/gateway; fi
    echo "ActiveState=$(cat "$state")"; echo Result=exit-code
    echo "NRestarts=$(cat "$SVC_ROOT/restarts-$3" 2>/dev/null || echo 0)" ;;
esac
"#;

pub fn signing_key() -> Result<SigningKey> {
    SigningKey::from_pem(include_bytes!("../kit/src/bundle/ed25519-test-only.txt"))
}

/// A release to publish: its archive, and its manifest, which [`Self::serve`] signs.
pub struct PublishedRelease {
    pub archive: Vec<u8>,
    pub manifest: Manifest,
}

impl PublishedRelease {
    pub fn new(version: &str, extra_files: &[(&str, &str)]) -> Result<Self> {
        let unit = format!("systemd/system/svc-{version}.service");
        let files: Vec<(&str, &str)> =
            [(unit.as_str(), "[Unit]\n")].into_iter().chain(extra_files.iter().copied()).collect();
        let archive = bundle::build_bundle_with(version, &files)?;
        let manifest = Manifest {
            version: 1,
            image_version: version.to_owned(),
            sha256: bundle::digest(&archive),
            size_bytes: archive.len() as u64,
            min_version: None,
            created_at: CREATED_AT.to_owned(),
            expires_at: EXPIRES_AT.to_owned(),
            trusted_keys: None,
            removes: Vec::new(),
        };
        Ok(Self { archive, manifest })
    }

    pub fn serve(&self, source: &BundleSource) -> Result<()> {
        let manifest = self.manifest.render()?;
        let version = &self.manifest.image_version;
        let path = |suffix: &str| format!("/{version}/svc-host-bundle.tar.gz{suffix}");
        source.put(&path(".json"), Some(manifest.clone().into_bytes()));
        source.put(&path(".json.sig"), Some(signing_key()?.signature_line(manifest.as_bytes()).into_bytes()));
        source.put(&path(""), Some(self.archive.clone()));
        Ok(())
    }
}

/// A machine that runs [`OLD_VERSION`], and a source for newer releases.
pub struct UpdateFixture {
    pub machine: Machine,
    pub source: BundleSource,
    env: Vec<(&'static str, String)>,
}

impl UpdateFixture {
    pub async fn new() -> Result<Self> {
        Self::for_machine(Machine::bare(1)?).await
    }

    /// Like [`UpdateFixture::new`], but for a machine that may have a database and a store.
    pub async fn for_machine(machine: Machine) -> Result<Self> {
        let old = PublishedRelease::new(OLD_VERSION, &[])?;
        let source = BundleSource::start(old.archive.clone()).await?;
        let base = format!("http://{}", source.addr);
        machine.write_boot_env(&[("SVC_IMAGE_VERSION", OLD_VERSION)])?;
        let url = format!("{base}/system-bundles/{OLD_VERSION}/svc-host-bundle.tar.gz");
        machine.write_update_env(&url, &old.manifest.sha256)?;
        machine.set_env_vars("host.env", &[("PLATFORM_INTERNAL_URL", &base)])?;
        machine
            .set_env_vars("update.env", &[("SVC_BUNDLE_PUBLIC_KEYS", &signing_key()?.public_key_base64())])?;
        fs::write(machine.path("opt/svc/restore-complete"), "")?;
        fs::create_dir_all(machine.path("var/lib/svc"))?;
        let systemctl = machine.path("systemctl");
        fs::write(&systemctl, SYSTEMCTL)?;
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755))?;
        fs::write(machine.path("gateway"), "active\n")?;
        let listen = start_gateway(&machine).await?;
        let env = vec![
            ("SVC_SYSTEMCTL", systemctl.display().to_string()),
            ("GATEWAY_LISTEN", listen),
            ("SVC_UPDATE_HEALTH_SECONDS", "5".to_owned()),
        ];
        let fixture = Self { machine, source, env };
        fixture.run(&["boot"], None).await?.expect(0);
        Ok(fixture)
    }

    pub async fn with_release(published: &PublishedRelease) -> Result<Self> {
        let fixture = Self::new().await?;
        published.serve(&fixture.source)?;
        Ok(fixture)
    }

    pub async fn run(&self, args: &[&str], failpoints: Option<&str>) -> Result<RunResult> {
        let running = self.spawn_with(args, failpoints)?;
        tokio::task::spawn_blocking(move || running.wait()).await?
    }

    pub fn spawn(&self, args: &[&str]) -> Result<RunningApplet> {
        self.spawn_with(args, None)
    }

    pub fn spawn_with(&self, args: &[&str], failpoints: Option<&str>) -> Result<RunningApplet> {
        let args: Vec<&str> = ["svc-update"].iter().chain(args).copied().collect();
        let mut env: Vec<(&str, &str)> =
            self.env.iter().map(|(name, value)| (*name, value.as_str())).collect();
        env.extend(failpoints.map(|points| ("FAILPOINTS", points)));
        self.machine.spawn(&args, &env)
    }

    pub async fn apply(&self, version: &str) -> Result<RunResult> {
        self.run(&["apply", "--version", version], None).await
    }

    pub fn request_update(&self, version: &str) -> Result<()> {
        let request = serde_json::json!({"imageVersion": version, "requestId": "update-request-1"});
        let path = self.machine.path("var/lib/svc/requests/update");
        svc::fsx::write_atomic(&path, request.to_string().as_bytes(), 0o600)?;
        Ok(())
    }

    pub fn last_update(&self) -> Result<Value> {
        let text =
            fs::read(self.machine.path("var/lib/svc/update/last.json")).context("last.json is missing")?;
        Ok(serde_json::from_slice(&text)?)
    }

    pub async fn status(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.run(&["status", "--json"], None).await?.expect(0).stdout)?)
    }

    /// Asserts that the given release is current and running with its units, and that no journal, request or partial
    /// release remains.
    pub fn assert_running(&self, version: &str) -> Result<()> {
        let opt = self.machine.path("opt/svc");
        assert_eq!(fs::read_link(opt.join("current"))?, std::path::Path::new("releases").join(version));
        let mut units: Vec<String> = fs::read_dir(self.machine.path("etc/systemd/system"))?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        units.sort();
        assert_eq!(units, [format!("svc-{version}.service")]);
        assert_eq!(fs::read_to_string(self.machine.path("gateway"))?, "active\n");
        for path in ["var/lib/svc/update/journal.json", "var/lib/svc/requests/update"] {
            assert!(!self.machine.path(path).exists(), "{path} still exists");
        }
        let partial = fs::read_dir(opt.join("releases"))?.flatten();
        let partial: Vec<_> = partial
            .map(|entry| entry.file_name())
            .filter(|name| name.to_string_lossy().starts_with('.'))
            .collect();
        assert!(partial.is_empty(), "{partial:?}");
        Ok(())
    }

    /// Sets the command that runs when the backup unit is started.
    pub fn set_backup_command(&self, command: &str) -> Result<()> {
        Ok(fs::write(self.machine.path("backup"), command)?)
    }

    /// Sets the number of times that the service manager has restarted a unit.
    pub fn set_restarts(&self, unit: &str, count: u32) -> Result<()> {
        Ok(fs::write(self.machine.path(&format!("restarts-{unit}")), format!("{count}\n"))?)
    }

    pub fn set_env(&mut self, name: &'static str, value: &str) {
        self.env.push((name, value.to_owned()));
    }

    /// Returns the calls to the service manager in order, except those to `show`.
    pub fn service_calls(&self) -> Result<Vec<String>> {
        let calls = fs::read_to_string(self.machine.path("calls"))?;
        Ok(calls.lines().filter(|line| !line.starts_with("show")).map(str::to_owned).collect())
    }

    /// Asserts that the old release is running, and that no service was started, stopped or restarted.
    pub fn assert_untouched(&self) -> Result<()> {
        self.assert_running(OLD_VERSION)?;
        assert_eq!(self.service_calls()?, ["daemon-reload"], "there must be only the boot's calls");
        Ok(())
    }

    pub fn history(&self) -> Result<Vec<Value>> {
        let text = fs::read_to_string(self.machine.path("var/lib/svc/update/history.jsonl"))?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }
}

/// Serves `/readyz` with the state from the fake service manager.
async fn start_gateway(machine: &Machine) -> Result<String> {
    let state = machine.path("gateway");
    let ready = move || async move {
        let is_active = fs::read_to_string(&state).is_ok_and(|state| state == "active\n");
        if is_active { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
    };
    let listen =
        super::platform::start_gateway_with_routes(machine, Router::new().route("/readyz", get(ready)))
            .await?;
    Ok(listen.to_string())
}

//! `svcctl doctor` against a running host and platform: it must find each triggered problem and print no secrets.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kit::bundle::{self, Manifest, SigningKey};
use kit::ca::Ca;
use kit::s3::{Fault, FaultRule};
use kit::scenario::{CONFIRM_FLAGS, RouterTransport, Stack, eventually};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::report::{Report, run_report, set_variable, unset_variable};

/// A stack with one running machine.
pub struct Fleet {
    pub stack: Stack,
    pub machine: Value,
    pub disk: PathBuf,
    _dir: tempfile::TempDir,
}

impl Fleet {
    pub async fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("svc-ctl-").tempdir_in("/tmp").unwrap();
        kit::child::remove_on_exit(dir.path());
        let svc = Path::new(env!("CARGO_BIN_EXE_svc"));
        let stack = Stack::start(svc, dir.path(), RouterTransport::Plain).await.unwrap().0;
        let svcctl = async |args: &[&str]| stack.svcctl(args).await.unwrap().ensure_success().unwrap();
        svcctl(&["slot", "set", "user_demo", "--plan", "starter"]).await;
        let built = bundle::build_minimal(svc, "demo-1", &dir.path().join("out")).unwrap();
        svcctl(&["bundle", "publish", built.dir.to_str().unwrap(), "--image-version", "demo-1"]).await;
        let provision = ["--json", "provision", "user_demo", "--handle", "ada", "--wait=200"];
        let run = svcctl(&[&provision[..], &CONFIRM_FLAGS].concat()).await;
        let machine: Value = run.json().unwrap();
        let server = format!("svc-{}", machine["machineId"].as_str().unwrap());
        let disk = stack.provider.disk(&server).unwrap();
        Self { stack, machine, disk, _dir: dir }
    }

    pub fn server_name(&self) -> String {
        format!("svc-{}", self.machine["machineId"].as_str().unwrap())
    }

    /// Returns the environment of a shell on the machine.
    pub fn host_env(&self) -> Vec<(String, String)> {
        let listen = format!(
            "{}:{}",
            self.machine["publicIpv4"].as_str().unwrap(),
            self.machine["httpsPort"].as_u64().unwrap()
        );
        [("SVC_ROOT", self.disk.display().to_string()), ("GATEWAY_LISTEN", listen)]
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec()
    }

    /// Creates a role without privileges, and returns the platform's database URL with that role.
    async fn create_unprivileged_database_url(&self) -> String {
        let url =
            &self.stack.platform_env().iter().find(|(name, _)| name == "PLATFORM_DATABASE_URL").unwrap().1;
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let role = format!("unprivileged_{}", std::process::id());
        client.batch_execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'unprivileged'")).await.unwrap();
        let mut url: url::Url = url.parse().unwrap();
        url.set_username(&role).unwrap();
        url.set_password(Some("unprivileged")).unwrap();
        url.into()
    }

    async fn check_host(&self) -> Report {
        let report = run_report(&self.stack.svc, &["doctor"], &self.host_env()).await;
        assert_eq!(report.json["subject"], "host", "{}", report.text);
        self.assert_no_secret(&report);
        report
    }

    async fn check_platform(&self, changes: &[(&str, &str)], args: &[&str]) -> Report {
        let mut env = self.stack.platform_env().to_vec();
        env.retain(|(name, _)| !changes.iter().any(|(changed, _)| changed == name));
        let changes = changes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        env.extend(changes.filter(|(_, value)| !value.is_empty()));
        let args: Vec<&str> = ["doctor", "platform"].into_iter().chain(args.iter().copied()).collect();
        let report = run_report(&self.stack.svc, &args, &env).await;
        self.assert_no_secret(&report);
        report
    }

    /// Publishes a signed manifest for the bundle; the default digest is that of the bundle's archive.
    fn publish_manifest(&self, key: &SigningKey, expires_at: &str, digest: Option<String>) {
        let store = &self.stack.store;
        let object = |suffix: &str| format!("system-bundles/demo-1/svc-host-bundle.tar.gz{suffix}");
        let sum = store.read(kit::scenario::BUCKET, &object(".sha256")).unwrap();
        let archive_digest = String::from_utf8(sum).unwrap().split_whitespace().next().unwrap().to_owned();
        let manifest = Manifest {
            version: 1,
            image_version: "demo-1".to_owned(),
            sha256: digest.unwrap_or(archive_digest),
            size_bytes: 1,
            min_version: None,
            created_at: "2026-01-01T00:00:00.000Z".to_owned(),
            expires_at: expires_at.to_owned(),
            trusted_keys: None,
            removes: Vec::new(),
        };
        let manifest = manifest.render().unwrap();
        store.write(kit::scenario::BUCKET, &object(".json.sig"), key.signature_line(manifest.as_bytes()));
        store.write(kit::scenario::BUCKET, &object(".json"), manifest);
    }

    /// Asserts that the output contains none of the machine's or the platform's secrets.
    #[track_caller]
    fn assert_no_secret(&self, report: &Report) {
        let mut secrets = vec![self.stack.secret.clone(), self.stack.key.clone()];
        secrets.push(self.stack.database_password().to_owned());
        secrets.push(self.stack.store.secret_key().to_owned());
        for file in ["host.env", "r2.env", "boot.env"] {
            let text = fs::read_to_string(self.env_file(file)).unwrap_or_default();
            for line in text.lines() {
                let Some((name, value)) = line.split_once('=') else { continue };
                if ["TOKEN", "SECRET", "DATABASE_URL"].iter().any(|part| name.contains(part)) {
                    secrets.push(value.trim_matches('"').to_owned());
                }
            }
        }
        for secret in secrets.iter().filter(|secret| secret.len() > 7) {
            assert!(!report.text.contains(secret), "a secret is printed: {}", report.text);
        }
    }

    fn env_file(&self, name: &str) -> PathBuf {
        self.disk.join("opt/svc/env").join(name)
    }

    /// Checks the host with a file changed, or removed if `content` returns `None`, and then restores the file.
    async fn check_with(&self, path: &str, content: impl FnOnce(&str) -> Option<String>) -> Report {
        let path = self.disk.join(path);
        let before = fs::read_to_string(&path).ok();
        let mode = fs::metadata(&path).map(|meta| meta.permissions()).ok();
        match content(before.as_deref().unwrap_or_default()) {
            Some(text) => fs::write(&path, text).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).ok();
        let report = self.check_host().await;
        match before {
            Some(text) => fs::write(&path, text).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        if let Some(mode) = mode {
            fs::set_permissions(&path, mode).unwrap();
        }
        report
    }
}

/// Starts a server that responds to every request with success and this `Date` header.
async fn start_server_with_date(date: &'static str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // The request is read first, because clients ignore a response that precedes it.
            tokio::io::AsyncReadExt::read(&mut stream, &mut [0; 4096]).await.ok();
            let response =
                format!("HTTP/1.1 200 OK\r\ndate: {date}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            stream.write_all(response.as_bytes()).await.ok();
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_finds_each_host_problem_and_names_the_remedy() {
    let fleet = Fleet::start().await;
    let host = "opt/svc/env/host.env";
    let healthy = fleet.check_host().await;
    assert_eq!((healthy.exit_code, &healthy.json["ok"]), (Some(0), &true.into()), "{}", healthy.text);
    for check in [
        "configuration",
        "env-files",
        "secrets",
        "gate",
        "release",
        "database",
        "gateway",
        "tls-key",
        "platform",
        "clock",
        "store",
    ] {
        assert_eq!(healthy.levels(check), ["ok"], "{check}: {}", healthy.text);
    }
    healthy.expect("backup", "warning", "no backup on this machine yet");
    healthy.expect("units", "skipped", "systemd is not running here");
    healthy.expect("ports", "skipped", "SVC_ROOT is not /");

    // The text output also contains the findings.
    let mut command = Command::new(&fleet.stack.svc);
    let output =
        command.args(["svcctl", "doctor"]).env_clear().envs(fleet.host_env()).output().await.unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains("ok       database") && printed.contains("host: "), "{printed}");

    fs::set_permissions(fleet.disk.join(host), fs::Permissions::from_mode(0o644)).unwrap();
    fleet.check_host().await.expect("env-files", "problem", "mode 0644");
    fs::set_permissions(fleet.disk.join(host), fs::Permissions::from_mode(0o600)).unwrap();
    let users = "svc-gateway:x:64999:64999::/:/usr/sbin/nologin\nroot:x:0:0::/root:/bin/sh\n";
    fs::create_dir_all(fleet.disk.join("etc")).unwrap();
    let wrong_owner = fleet.check_with("etc/passwd", |_| Some(users.to_owned())).await;
    wrong_owner.expect("env-files", "problem", "not by svc-gateway");

    let incomplete = fleet.check_with(host, |text| Some(unset_variable(text, "SVC_EPOCH"))).await;
    incomplete.expect("configuration", "problem", "SVC_EPOCH");
    let remote_url = "postgres://svc:a-password-of-theirs@192.0.2.7/svc?connect_timeout=1";
    let remote = fleet.check_with(host, |text| Some(set_variable(text, "DATABASE_URL", remote_url))).await;
    remote.expect("database", "problem", "on 192.0.2.7, not on this machine");
    assert!(!remote.text.contains("a-password-of-theirs"), "{}", remote.text);

    let unreachable = fleet
        .check_with(host, |text| Some(set_variable(text, "PLATFORM_INTERNAL_URL", "http://127.0.0.1:9")))
        .await;
    unreachable.expect("platform", "problem", "cannot be reached");
    unreachable.expect("clock", "skipped", "cannot be reached");
    unreachable.expect("configuration", "problem", "differs between update.env and host.env");
    let url = start_server_with_date("Thu, 01 Jan 2026 00:00:00 GMT").await;
    let ahead = fleet.check_with(host, |text| Some(set_variable(text, "PLATFORM_INTERNAL_URL", &url))).await;
    ahead.expect("clock", "problem", "ahead of the platform's");

    let new_identity = svc::http::tls::generate_self_signed(&["other.test".to_owned()]).unwrap();
    let (cert, key) = (new_identity.cert_pem.clone(), new_identity.key_pem.clone());
    let original = fs::read_to_string(fleet.disk.join("var/lib/svc/tls/cert.pem")).unwrap();
    fs::write(fleet.disk.join("var/lib/svc/tls/cert.pem"), cert).unwrap();
    let mismatched = fleet.check_with("var/lib/svc/tls/key.pem", |_| Some(key)).await;
    mismatched.expect("tls-key", "problem", "differs from the registered one");
    // The running gateway still uses the old key, which does not match the new key's pin.
    mismatched.expect("gateway", "problem", "not ready");
    fs::write(fleet.disk.join("var/lib/svc/tls/cert.pem"), original).unwrap();
    let unregistered = fleet.check_with("var/lib/svc/register.json", |_| None).await;
    unregistered.expect("tls-key", "problem", "has not registered");

    let closed = fleet.check_with("opt/svc/restore-complete", |_| None).await;
    closed.expect("gate", "problem", "closed");
    let current = fleet.disk.join("opt/svc/current");
    let target = fs::read_link(&current).unwrap();
    fs::remove_file(&current).unwrap();
    fleet.check_host().await.expect("release", "problem", "does not name a release");
    std::os::unix::fs::symlink(target, &current).unwrap();
    // With systemd, a release needs its own client tools, because only root can use those in the database's container.
    let systemd = fleet.disk.join("run/systemd/system");
    fs::create_dir_all(&systemd).unwrap();
    fleet.check_host().await.expect("release", "problem", "no PostgreSQL client tools");
    fs::remove_dir(&systemd).unwrap();

    healthy.expect("update", "ok", "no update on this machine yet");
    let state = r#"{"version":1,"previous":null,"quarantined":[{"version":"demo-2","at":"2026-01-01T00:00:00.000Z","why":"the gateway was not ready"}]}"#;
    let quarantined = fleet.check_with("var/lib/svc/update/releases.json", |_| Some(state.to_owned())).await;
    quarantined.expect("update", "warning", "release demo-2 is quarantined: the gateway was not ready");
    let outcome = |how: &str| {
        format!(
            r#"{{"version":"demo-2","outcome":"{how}","stage":"health","error":"not ready","at":"2026-01-01T00:00:00.000Z"}}"#
        )
    };
    let last_update_file = "var/lib/svc/update/last.json";
    let rolled_back = fleet.check_with(last_update_file, |_| Some(outcome("rolled_back"))).await;
    rolled_back.expect("update", "warning", "ended with outcome rolled_back in stage health: not ready");
    let failed = fleet.check_with(last_update_file, |_| Some(outcome("failed"))).await;
    failed.expect("update", "problem", "with outcome failed");

    let static_keys = fleet
        .check_with("opt/svc/env/r2.env", |text| Some(unset_variable(text, "AWS_CREDENTIAL_EXPIRATION")))
        .await;
    static_keys.expect("store", "warning", "every slot");
    // An expired session is renewed on its next use; it is a problem only if the last renewal was long ago.
    let file = fleet.disk.join("var/lib/svc/store-credentials.json");
    let is_stored = async || anyhow::Ok(fs::metadata(&file).map(drop)?);
    kit::scenario::eventually("the agent renews the session", Duration::from_secs(60), is_stored)
        .await
        .unwrap();
    let stored = fs::read_to_string(&file).unwrap();
    let expired_at = "2026-01-01T00:00:00.000Z";
    let now = svc::clock::rfc3339_ms(jiff::Timestamp::now());
    for (renewed_at, level, part) in
        [(expired_at, "problem", "expired at"), (&now, "ok", "renewed on its next use")]
    {
        let mut sessions: Value = serde_json::from_str(&stored).unwrap();
        sessions["expiresAt"] = expired_at.into();
        sessions["renewedAt"] = renewed_at.into();
        fs::write(&file, sessions.to_string()).unwrap();
        let expired = fleet
            .check_with("opt/svc/env/r2.env", |text| {
                Some(set_variable(text, "AWS_CREDENTIAL_EXPIRATION", expired_at))
            })
            .await;
        expired.expect("store", level, part);
    }
    fs::write(&file, stored).unwrap();
    fleet.stack.store.add_fault(FaultRule::new(Fault::Status(403)).key("system/db/latest").always());
    fleet.stack.store.add_fault(FaultRule::new(Fault::Status(403)).query("list-type=2").always());
    fleet.check_host().await.expect("store", "problem", "");
    fleet.stack.store.heal();
    fleet.stack.store.take_down();
    fleet.check_host().await.expect("store", "problem", "");
    fleet.stack.store.bring_up().unwrap();

    let backup = |status: &str, key: &str| {
        format!(
            r#"{{"timestamp":"2026-01-01T00:00:00.000Z","status":"{status}","stage":"done","key":"{key}","error":"the store refused"}}"#
        )
    };
    let old = "system/db/snapshots/2026-01-01T00-00-00.000Z-1.dump";
    // The agent must not report these results, because the platform would mistake one of them for the result of the
    // backup requested below.
    fleet.stack.provider.stop_service(&fleet.server_name(), "svc-sync-agent").await.unwrap();
    let last_backup_file = "var/lib/svc/last-backup.json";
    fleet
        .check_with(last_backup_file, |_| Some(backup("success", old)))
        .await
        .expect("backup", "problem", "min old");
    let failed = fleet.check_with(last_backup_file, |_| Some(backup("error", ""))).await;
    failed.expect("backup", "problem", "the store refused");
    fleet.stack.provider.run_unit(&fleet.server_name(), "svc-sync-agent", &[]).await.unwrap();
    fleet.stack.svcctl(&["backup", "now", "ada", "--wait=120"]).await.unwrap().ensure_success().unwrap();
    // The pointer moves before the host writes the result.
    let result = || async { Ok(fs::metadata(fleet.disk.join(last_backup_file))?) };
    eventually("the backup result is written", Duration::from_secs(30), result).await.unwrap();
    fleet.check_host().await.expect("backup", "ok", "0 min old");
    fleet.stack.provider.stop_service(&fleet.server_name(), "svc-gateway").await.unwrap();
    fleet.check_host().await.expect("gateway", "problem", "not ready");
    // These checks run near the end, because a gateway or an agent that finds `superseded.json` exits.
    let failure =
        r#"{"version": 1, "since": "2026-11-28T09:04:00Z", "error": "401 Unauthorized", "isRefused": true}"#;
    let refused = fleet.check_with("var/lib/svc/heartbeat-failure.json", |_| Some(failure.to_owned())).await;
    refused.expect("platform", "problem", "all heartbeats since 2026-11-28T09:04:00Z have failed: 401");
    let replaced = fleet.check_with("var/lib/svc/superseded.json", |_| Some("{}".to_owned())).await;
    replaced.expect("platform", "problem", "has been replaced or deleted");
    let pid = fs::read_to_string(fleet.disk.join("var/lib/postgresql/16/main/postmaster.pid")).unwrap();
    let pid = nix::unistd::Pid::from_raw(pid.lines().next().unwrap().parse().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let file = fleet.disk.join("var/lib/postgresql/16/main/postmaster.pid");
    let has_stopped = async || {
        anyhow::ensure!(!file.exists(), "PostgreSQL is still running");
        anyhow::Ok(())
    };
    kit::scenario::eventually("PostgreSQL stops", Duration::from_secs(60), has_stopped).await.unwrap();
    let stopped = fleet.check_host().await;
    stopped.expect("database", "problem", "connect to the database");
    assert_eq!(stopped.levels("release"), ["ok"], "unrelated checks must not be affected: {}", stopped.text);
    fleet.stack.stop().await;
}

#[tokio::test]
async fn doctor_keeps_findings_if_api_cannot_be_called() {
    let svc = Path::new(env!("CARGO_BIN_EXE_svc"));
    let cases = [("http://platform.example", "must be https"), ("http://127.0.0.1:9", "SSL_CERT_FILE")];
    for (url, part) in cases {
        let env = [
            ("PLATFORM_PUBLIC_URL", url),
            ("PLATFORM_SECRET", "an-operators-secret-of-32-letters"),
            ("SSL_CERT_FILE", "/nonexistent/roots.pem"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let report = run_report(svc, &["doctor", "platform"], &env).await;
        report.expect("configuration", "problem", "PLATFORM_KEY");
        report.expect("platform", "problem", part);
        report.expect("fleet", "skipped", "cannot call the platform API");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_finds_each_platform_problem_and_names_the_remedy() {
    let fleet = Fleet::start().await;
    let foreign_object = "system-doctor/another-run/created.json";
    fleet.stack.store.write(kit::scenario::BUCKET, foreign_object, "{}");
    let healthy = fleet.check_platform(&[], &[]).await;
    assert_eq!(healthy.exit_code, Some(0), "{}", healthy.text);
    let passed = "configuration database store host-credentials file-pruning provider identity-provider platform fleet";
    for check in passed.split(' ') {
        assert_eq!(healthy.levels(check), ["ok"], "{check}: {}", healthy.text);
    }
    healthy.expect("tls", "skipped", "no listener");
    let remaining = fleet.stack.store.objects(kit::scenario::BUCKET, "system-doctor/");
    assert!(
        remaining.iter().all(|object| object.key == foreign_object),
        "a probe object remains: {remaining:?}"
    );

    let unreachable = "http://127.0.0.1:9";
    let database = "postgres://u:a-password-of-theirs@127.0.0.1:9/platform";
    let broken = fleet
        .check_platform(
            &[
                ("PLATFORM_DATABASE_URL", database),
                ("PROVIDER_API_TOKEN", "another-token"),
                ("IDP_JWKS_URL", unreachable),
                ("STS_ENDPOINT", unreachable),
                ("CUSTOMER_VPS_IMAGE_VERSION", "never-published"),
                ("CUSTOMER_VPS_ENABLED", "false"),
                ("PLATFORM_PUBLIC_URL", unreachable),
                ("PLATFORM_LISTEN", "0.0.0.0:8080"),
            ],
            &[],
        )
        .await;
    assert!(!broken.text.contains("a-password-of-theirs"), "{}", broken.text);
    broken.expect("database", "problem", "");
    broken.expect("provider", "problem", "");
    broken.expect("identity-provider", "problem", "cannot fetch the keys");
    broken.expect("host-credentials", "problem", "STS");
    broken.expect("bundle", "problem", "not published");
    broken.expect("configuration", "warning", "provisioning is disabled");
    broken.expect("configuration", "warning", "in clear text");
    broken.expect("platform", "problem", "cannot be reached");
    broken.expect("fleet", "skipped", "cannot be reached");
    assert_eq!(broken.levels("store"), ["ok"], "{}", broken.text);

    healthy.expect("bundle", "warning", "no signed manifest");
    let key = SigningKey::read(&fleet.stack.signing_key).unwrap();
    fleet.publish_manifest(&key, "2126-01-02T03:04:05.000Z", None);
    assert_eq!(fleet.check_platform(&[], &[]).await.levels("bundle"), ["ok"]);
    let keyless = fleet.check_platform(&[("BUNDLE_PUBLIC_KEYS", "")], &[]).await;
    keyless.expect("bundle", "warning", "cannot be updated by a rollout");
    assert_eq!(keyless.levels("bundle"), ["warning"], "{}", keyless.text);
    fleet.publish_manifest(&key, "2026-01-02T03:04:05.000Z", None);
    fleet.check_platform(&[], &[]).await.expect("bundle", "problem", "expired at 2026-01-02");
    fleet.publish_manifest(&key, "2126-01-02T03:04:05.000Z", Some("0".repeat(64)));
    fleet.check_platform(&[], &[]).await.expect("bundle", "problem", "for another archive");
    let untrusted_key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap().serialize_pem();
    let untrusted_key = SigningKey::from_pem(untrusted_key.as_bytes()).unwrap();
    fleet.publish_manifest(&untrusted_key, "2126-01-02T03:04:05.000Z", None);
    fleet.check_platform(&[], &[]).await.expect("bundle", "problem", "not signed by a key that is trusted");

    let changed =
        [("STORE_HOST_CREDENTIALS", "static"), ("PLATFORM_SECRET", "another-secret-of-32-characters-x")];
    let changed = fleet.check_platform(&changed, &[]).await;
    changed.expect("host-credentials", "warning", "static");
    changed.expect("fleet", "problem", "does not accept this secret");
    let incomplete = fleet.check_platform(&[("PLATFORM_KEY", ""), ("APP_HOST", "")], &[]).await;
    ["PLATFORM_KEY", "APP_HOST"].iter().for_each(|name| incomplete.expect("configuration", "problem", name));
    incomplete.expect("database", "skipped", "the configuration is invalid");

    let unprivileged_url = fleet.create_unprivileged_database_url().await;
    let denied = fleet.check_platform(&[("PLATFORM_DATABASE_URL", &unprivileged_url)], &[]).await;
    denied.expect("database", "problem", "cannot read the schema's version");

    // The settings can also come from a file, which must not be world-readable.
    let file = fleet.stack.dir.join("platform.env");
    let lines = fleet.stack.platform_env();
    let lines: String = lines.iter().map(|(name, value)| svc::config::format_env_line(name, value)).collect();
    fs::write(&file, lines).unwrap();
    for (mode, level) in [(0o644, "problem"), (0o640, "ok")] {
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        let args = ["doctor", "platform", "--env-file", file.to_str().unwrap()];
        let from_file = run_report(&fleet.stack.svc, &args, &[]).await;
        from_file.expect("env-file", level, &format!("mode 0{mode:o}"));
        assert_eq!(from_file.levels("database"), ["ok"], "{}", from_file.text);
    }
    let env = [("PLATFORM_ENV_FILE".to_owned(), file.display().to_string())];
    let from_variable = run_report(&fleet.stack.svc, &["doctor", "platform"], &env).await;
    from_variable.expect("env-file", "ok", "mode 0640");

    let authority = Ca::new().unwrap();
    let (_, key) = authority.issue(&["app.test"]).unwrap();
    let cert = authority.issue_for(&["app.test"], &key, jiff::SignedDuration::from_secs(-60)).unwrap();
    let (cert_file, key_file) = (fleet.stack.dir.join("old.pem"), fleet.stack.dir.join("old.key"));
    fs::write(&cert_file, cert).unwrap();
    fs::write(&key_file, key).unwrap();
    let files = [
        ("ROUTER_TLS_CERT_FILE", cert_file.to_str().unwrap()),
        ("ROUTER_TLS_KEY_FILE", key_file.to_str().unwrap()),
    ];
    fleet.check_platform(&files, &[]).await.expect("tls", "problem", "expires at ");

    // With stale reads, the probe object is missing right after it is written.
    let stale_reads = FaultRule::new(Fault::StaleRead).method("GET").key("system-doctor/").always();
    fleet.stack.store.add_fault(stale_reads);
    fleet.check_platform(&[], &[]).await.expect("store", "problem", "");
    fleet.stack.store.heal();
    fleet.stack.store.take_down();
    // The platform reuses the result of its last readiness probe for this long.
    let readiness_ttl = Duration::from_secs(1);
    tokio::time::sleep(readiness_ttl).await;
    let down = fleet.check_platform(&[], &[]).await;
    down.expect("store", "problem", "");
    down.expect("platform", "problem", "store failing");
    fleet.stack.store.bring_up().unwrap();
    tokio::time::sleep(readiness_ttl).await;

    let failed = ["fail", "ada", "--reason", "disk errors", "--yes"];
    fleet.stack.svcctl(&failed).await.unwrap().ensure_success().unwrap();
    let attention = fleet.check_platform(&[], &[]).await;
    attention.expect("fleet", "warning", "ada (primary) is failed");
    let api_report = run_report(&fleet.stack.svc, &["doctor", "api"], fleet.stack.operator_env()).await;
    api_report.expect("fleet", "warning", "ada (primary) is failed");
    api_report.expect("platform", "ok", "is running");
    fleet.stack.stop().await;
}

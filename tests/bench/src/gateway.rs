//! A gateway in its own directory, as on a user's machine, and a key that signs proofs as the platform does.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::peers::wrk::Request;
use super::process::ServerProcess;
use kit::net;

const USER: &str = "user_bench";
const READY_TIMEOUT: Duration = Duration::from_secs(30);
const KEY_ID: &str = "bench";

/// A machine's directory, in which a gateway can be started.
pub struct Machine {
    root: TempDir,
    id: String,
    key: Ed25519KeyPair,
    database_url: String,
}

/// A running gateway.
pub struct Gateway {
    pub address: SocketAddr,
    pub process: ServerProcess,
    /// Time from exec to listening.
    pub startup_time: Duration,
    client: reqwest::Client,
}

impl Machine {
    pub fn new(database_url: &str) -> Result<Self> {
        let key =
            Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).ok().context("cannot generate a key")?;
        let key = Ed25519KeyPair::from_pkcs8(key.as_ref()).ok().context("cannot parse the generated key")?;
        // In `/tmp`, because the path of a Unix socket is limited to 107 bytes.
        let root = tempfile::Builder::new().prefix("svc-bench-").tempdir_in("/tmp")?;
        kit::child::remove_on_exit(root.path());
        let id = uuid::Uuid::now_v7().to_string();
        Ok(Self { root, id, key, database_url: database_url.to_owned() })
    }

    /// Installs an app's manifest in the owner's apps directory.
    pub fn install_app(&self, slug: &str, tables: &Value) -> Result<()> {
        let dir = self.root.path().join("home/svc/home/apps").join(slug);
        std::fs::create_dir_all(&dir)?;
        let manifest = json!({ "name": slug, "slug": slug, "version": "1.0.0", "runtime": "static",
            "build": { "output": "dist" }, "storage": { "tables": tables } });
        Ok(std::fs::write(dir.join("svc.json"), manifest.to_string())?)
    }

    /// Installs the apps `app0`, `app1` and so on, each with two tables.
    pub fn install_apps(&self, count: usize) -> Result<()> {
        let columns =
            json!({ "title": "text", "body": "text", "done": "boolean", "rank": "bigint", "extra": "jsonb" });
        let tables = json!({ "items": { "columns": columns.clone() }, "notes": { "columns": columns } });
        (0..count).try_for_each(|app| self.install_app(&format!("app{app}"), &tables))
    }

    /// Creates the directory of an app's pages if necessary; returns its path.
    pub fn create_output_dir(&self, slug: &str) -> Result<PathBuf> {
        let dir = self.root.path().join("home/svc/home/apps").join(slug).join("dist");
        std::fs::create_dir_all(&dir)?;
        Ok(dir)
    }

    /// Returns the path of a socket on which a service of the owner listens, such as `shell.sock`; creates its
    /// directory if necessary.
    pub fn owner_socket_path(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.path().join("run/svc/owner");
        std::fs::create_dir_all(&dir)?;
        Ok(dir.join(name))
    }

    /// Signs a proof for the owner, as the platform's router does; it is valid for one minute.
    pub fn sign_proof(&self) -> String {
        let now = jiff::Timestamp::now().as_second();
        let encode = |value: Value| B64.encode(value.to_string());
        let signing_input = format!(
            "{}.{}",
            encode(json!({ "alg": "EdDSA", "typ": "JWT", "kid": KEY_ID })),
            encode(json!({ "iss": "svc-platform", "aud": self.id, "sub": USER, "handle": "ada",
                "slot": "primary", "route": "shell", "iat": now, "exp": now + 60 }))
        );
        format!("{signing_input}.{}", B64.encode(self.key.sign(signing_input.as_bytes())))
    }

    pub fn start(&self, svc: &Path) -> Result<Gateway> {
        let address = SocketAddr::from(([127, 0, 0, 1], net::free_port()?));
        let keys = json!({ "keys": [{ "kid": KEY_ID, "x": B64.encode(self.key.public_key()) }] });
        let mut command = Command::new(svc);
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.arg("svc-gateway").env_clear().env("PATH", path).env("SVC_ROOT", self.root.path());
        command.envs([
            ("SVC_MACHINE_ID", self.id.as_str()),
            ("SVC_USER_ID", USER),
            ("SVC_HANDLE", "ada"),
            ("SVC_EPOCH", "1"),
            ("SVC_PROOF_KEYS", &keys.to_string()),
            ("DATABASE_URL", &self.database_url),
            ("GATEWAY_LISTEN", &address.to_string()),
        ]);
        let (process, startup_time) =
            ServerProcess::start(command, address, &self.root.path().join("gateway.log"))?;
        // Accepts any certificate, because the router benchmark measures pinning.
        let client = reqwest::Client::builder()
            .tls_danger_accept_invalid_certs(true)
            .timeout(READY_TIMEOUT)
            .no_proxy();
        Ok(Gateway { address, process, startup_time, client: client.build()? })
    }
}

impl Gateway {
    /// Waits until this many apps are ready.
    pub async fn wait_until_ready(&self, machine: &Machine, apps: usize) -> Result<()> {
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let request = self.client.get(format!("https://{}/api/apps", self.address));
            let response = request.header("x-svc-proof", machine.sign_proof()).send().await?;
            let body = response.text().await?;
            let listed: Value = serde_json::from_str(&body).unwrap_or_default();
            let ready =
                listed["apps"].as_array().into_iter().flatten().filter(|app| app["status"] == "ready");
            if ready.count() == apps {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{apps} apps did not become ready: {body}\n{}",
                self.process.log_tail()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn bridge_url(&self) -> String {
        format!("https://{}/api/bridge/query", self.address)
    }

    /// Returns the request for one query to the bridge. A load generator can send it until its proof expires after a
    /// minute.
    pub fn bridge_request(&self, machine: &Machine, body: String) -> Request {
        let headers =
            [("Content-Type", "application/json".to_owned()), ("X-Svc-Proof", machine.sign_proof())];
        Request {
            url: self.bridge_url(),
            headers: headers.map(|(name, value)| (name.to_owned(), value)).into(),
            body: Some(body),
        }
    }

    /// Sends one query to the bridge; returns its response.
    pub async fn query(&self, machine: &Machine, body: &str) -> Result<Value> {
        let request = self.client.post(self.bridge_url()).header("content-type", "application/json");
        let response =
            request.header("x-svc-proof", machine.sign_proof()).body(body.to_owned()).send().await?;
        let status = response.status();
        let text = response.text().await?;
        ensure!(status.is_success(), "{body}: {status}: {text}");
        serde_json::from_str(&text).context("cannot parse the bridge's response")
    }
}

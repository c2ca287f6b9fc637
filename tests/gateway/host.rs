//! A customer machine's directory with a running gateway, and the platform's access to it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use jiff::Timestamp;
use kit::child::OwnedChild;
use kit::pg::TestDatabase;
use nix::sys::signal::Signal;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use svc::http::client::{Timeouts, build_with_tls};
use svc::http::proof::{Claims, ISSUER, ProofKeys, Route, Signer};
use svc::http::tls::{ChainCheck, Identity, pinned_client_config};
use svc::machine::id::MachineId;
use tempfile::TempDir;

use crate::contract::{self, Exchange};

pub const USER: &str = "user_owner";
/// The URL of a database that does not exist, for a gateway that needs none. Nothing listens on this port.
pub const UNREACHABLE_DATABASE: &str = "postgres://postgres:x@127.0.0.1:1/svc";
const WAIT_TIMEOUT: Duration = Duration::from_secs(40);

/// A machine's directory, its identity, and the environment of its gateway, which need not be running.
pub struct Machine {
    root: TempDir,
    pub id: MachineId,
    pub signer: Signer,
    pub env: BTreeMap<String, String>,
}

/// A machine with its gateway running.
pub struct Host {
    pub machine: Machine,
    pub address: String,
    client: reqwest::Client,
    child: OwnedChild,
}

/// Returns a unique name, because roles are shared by the whole database server.
pub fn unique_name(name: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("{name}-{}-{}", std::process::id() % 10_000, COUNT.fetch_add(1, Ordering::Relaxed))
}

pub fn signer(kid: &str) -> Signer {
    Signer::from_pkcs8(kid, &Signer::generate_pkcs8().expect("random bytes are available"))
        .expect("the generated key is valid")
}

impl Machine {
    pub fn new(database_url: &str) -> Result<Self> {
        let root = tempfile::tempdir()?;
        let (id, signer) = (MachineId::new(), signer("k1"));
        let keys = ProofKeys { keys: vec![signer.public_key()] };
        let pairs = [
            ("SVC_MACHINE_ID", id.to_string()),
            ("SVC_USER_ID", USER.to_owned()),
            ("SVC_HANDLE", "ada".to_owned()),
            ("SVC_EPOCH", "1".to_owned()),
            ("SVC_PROOF_KEYS", serde_json::to_string(&keys)?),
            ("DATABASE_URL", database_url.to_owned()),
            ("GATEWAY_LISTEN", "127.0.0.1:0".to_owned()),
        ];
        let env = pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(Self { root, id, signer, env })
    }

    pub fn path(&self, relative: &str) -> PathBuf {
        self.root.path().join(relative)
    }

    pub fn write(&self, relative: &str, content: &str) -> Result<()> {
        Ok(svc::fsx::write_atomic(&self.path(relative), content.as_bytes(), 0o644)?)
    }

    /// Binds a socket in the owner's runtime directory for the gateway to connect to.
    pub fn bind_owner_socket(&self, name: &str) -> Result<UnixListener> {
        let dir = self.path("run/svc/owner");
        std::fs::create_dir_all(&dir)?;
        Ok(UnixListener::bind(dir.join(name))?)
    }

    /// Writes an app's manifest to the owner's apps directory.
    pub fn add_app(&self, slug: &str, tables: &Value) -> Result<()> {
        self.write(&format!("home/svc/home/apps/{slug}/svc.json"), &manifest(slug, tables).to_string())
    }

    pub fn claims(&self, route: Route) -> Claims {
        let now = Timestamp::now().as_second();
        Claims {
            iss: ISSUER.into(),
            aud: self.id,
            sub: USER.parse().expect("the user id is valid"),
            handle: "ada".parse().expect("the handle is valid"),
            slot: "primary".parse().expect("the slot is valid"),
            route,
            app: None,
            method: None,
            path: None,
            jti: None,
            iat: now,
            exp: now + 30,
        }
    }

    /// Returns the command that runs the gateway.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.arg("svc-gateway").env_clear().env("PATH", path).env("SVC_ROOT", self.root.path());
        command.envs(&self.env).stdin(Stdio::null());
        if let Some(filter) = std::env::var_os("RUST_LOG") {
            command.env("RUST_LOG", filter);
        }
        command
    }

    /// Runs a gateway that is expected to exit.
    pub fn run_to_end(&self) -> Result<Output> {
        let mut child = self.command().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if kit::child::wait_until(&mut child, Instant::now() + WAIT_TIMEOUT).is_none() {
            child.kill()?;
            child.wait()?;
            bail!("the gateway is still running");
        }
        Ok(child.wait_with_output()?)
    }

    /// Starts the gateway and waits for its readiness message.
    pub fn start(self) -> Result<Host> {
        let notify = self.path("notify.sock");
        let _ = std::fs::remove_file(&notify);
        let socket = UnixDatagram::bind(&notify)?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.path("gateway.log"))?;
        let mut command = self.command();
        command.env("NOTIFY_SOCKET", &notify).stdout(log.try_clone()?).stderr(log);
        let mut child = OwnedChild::spawn(&mut command)?;
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let mut buffer = [0_u8; 1024];
        let address = loop {
            if let Ok(size) = socket.recv(&mut buffer) {
                let message = String::from_utf8_lossy(&buffer[..size]).into_owned();
                let status = message.lines().find_map(|line| line.strip_prefix("STATUS=listening on "));
                if let Some(address) = status.filter(|_| message.contains("READY=1")) {
                    break address.to_owned();
                }
            }
            if let Some(status) = child.status() {
                bail!(
                    "the gateway exited with {status}: {}",
                    std::fs::read_to_string(self.path("gateway.log"))?
                );
            }
            ensure!(Instant::now() < deadline, "timed out: the gateway is not ready");
        };
        svc::http::tls::install_provider();
        let tls =
            Identity::read(&self.path("var/lib/svc/tls/cert.pem"), &self.path("var/lib/svc/tls/key.pem"))?;
        let config = pinned_client_config(tls.pin()?, ChainCheck::PinOnly)?;
        let timeouts = Timeouts { total: Some(WAIT_TIMEOUT), idle: WAIT_TIMEOUT, ..Timeouts::CALL };
        Ok(Host { client: build_with_tls(timeouts, config)?, machine: self, address, child })
    }
}

pub fn manifest(slug: &str, tables: &Value) -> Value {
    json!({ "name": slug, "slug": slug, "version": "1.0.0", "runtime": "static",
        "build": { "output": "dist" }, "storage": { "tables": tables } })
}

/// Starts a machine with this database and one app, and waits until the app is registered.
pub async fn host_with_app(database: &TestDatabase, slug: &str, tables: &Value) -> Result<Host> {
    let machine = Machine::new(&database.url())?;
    machine.add_app(slug, tables)?;
    let host = machine.start()?;
    host.wait_until_registered(slug).await?;
    Ok(host)
}

impl Host {
    /// Returns a request without credentials.
    pub fn unsigned_request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("https://{}{path}", self.address))
    }

    pub fn proof(&self, route: Route) -> String {
        self.machine.signer.sign(&self.machine.claims(route))
    }

    /// Returns a request from the owner, as the platform forwards it.
    pub fn owner_request(&self, method: Method, path: &str) -> RequestBuilder {
        self.unsigned_request(method, path).header("x-svc-proof", self.proof(Route::Shell))
    }

    pub async fn get(&self, path: &str) -> Result<(StatusCode, Value)> {
        send_json(self.owner_request(Method::GET, path)).await
    }

    pub async fn query(&self, body: &Value) -> Result<(StatusCode, Value)> {
        send_json(self.owner_request(Method::POST, "/api/bridge/query").json(body)).await
    }

    /// Sends a query verbatim and returns the body as text, because its numbers may not fit a native type.
    pub async fn raw_query(&self, body: &str) -> Result<(StatusCode, String)> {
        let request = self.owner_request(Method::POST, "/api/bridge/query").body(body.to_owned());
        let response = request.header("content-type", "application/json").send().await?;
        Ok((response.status(), response.text().await?))
    }

    /// Returns the gateway's peak memory use in bytes.
    pub fn peak_memory_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.pid()))?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM line")?;
        Ok(peak.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
    }

    /// Sends a query that must succeed, and returns its `data`.
    pub async fn query_data(&self, body: &Value) -> Result<Value> {
        let (status, mut response) = self.query(body).await?;
        ensure!(status.is_success(), "{body}: {status} {response}");
        Ok(response["data"].take())
    }

    pub async fn wait_until_registered(&self, slug: &str) -> Result<()> {
        self.wait_until(&format!("app {slug} is registered"), async || {
            let (_, apps) = self.get("/api/apps").await?;
            let apps = apps["apps"].as_array().cloned().unwrap_or_default();
            Ok(apps.iter().any(|app| app["slug"] == slug && app["status"] == "ready"))
        })
        .await
    }

    pub async fn wait_until(
        &self,
        description: &str,
        mut condition: impl AsyncFnMut() -> Result<bool>,
    ) -> Result<()> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !condition().await? {
            ensure!(Instant::now() < deadline, "timed out waiting for: {description}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.machine.path("gateway.log")).unwrap_or_default()
    }

    /// Sends a raw request over the trusted socket and returns the whole response.
    pub fn send_over_socket(&self, request: &str) -> Result<String> {
        let mut stream = UnixStream::connect(self.socket())?;
        stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
        stream.write_all(request.replace('\n', "\r\n").as_bytes())?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    }

    pub fn socket(&self) -> PathBuf {
        self.machine.path("run/svc/gateway/gateway.sock")
    }

    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    pub fn terminate(&self) -> Result<()> {
        self.child.signal(Signal::SIGTERM)
    }

    pub async fn wait_for_exit(&mut self) -> Result<ExitStatus> {
        let status = self.child.wait_async(WAIT_TIMEOUT).await;
        status.with_context(|| format!("timed out: the gateway is still running\n{}", self.log()))
    }

    /// Kills the gateway and starts it again on the same machine.
    pub fn restart(mut self) -> Result<Self> {
        self.child.kill()?;
        self.machine.start()
    }
}

/// Sends a request and checks the exchange against the gateway's OpenAPI document. Returns a body that is not JSON as a
/// string.
pub async fn send_json(request: RequestBuilder) -> Result<(StatusCode, Value)> {
    let (client, request) = request.build_split();
    let request = request?;
    let (method, path) = (request.method().clone(), request.url().path().to_owned());
    let is_json = request.headers().get("content-type").is_some_and(|kind| kind == "application/json");
    let request_body =
        request.body().and_then(reqwest::Body::as_bytes).filter(|_| is_json).map(<[u8]>::to_vec);
    let response = client.execute(request).await.context("no response from the gateway")?;
    let (status, headers) = (response.status(), response.headers().clone());
    let text = response.text().await?;
    contract::gateway().check(&Exchange {
        method: &method,
        path: &path,
        request_body: request_body.as_deref(),
        status: status.as_u16(),
        headers: &headers,
        response_body: &text,
    });
    Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
}

//! Provides the environment of a platform test: a database, a store, a provider, and platform processes that the test
//! may kill.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use kit::child::OwnedChild;
use kit::pg::{TestDatabase, test_database_from};
use kit::provider::{Power, ServerView, Simulator, SimulatorOptions};
use kit::s3::S3Server;
use reqwest::Method;
use serde_json::{Value, json};
use svc::config::parse_env_file;
use svc::http::client::{self, Timeouts};

use crate::contract::{self, Exchange};

pub const SECRET: &str = "operator-secret-of-32-characters";
pub const BUCKET: &str = "fleet";
pub const DIGEST: &str = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8";
const WAIT_TIMEOUT: Duration = Duration::from_secs(40);

/// The servers that a platform process needs, and the processes' log.
pub struct Stack {
    pub database: TestDatabase,
    pub store: S3Server,
    pub provider: Simulator,
    client: reqwest::Client,
    dir: tempfile::TempDir,
}

impl Stack {
    pub async fn start() -> Self {
        Self::start_with_provider(|_| SimulatorOptions::record()).await
    }

    /// Starts the environment with custom provider options, which may refer to the environment's directory.
    pub async fn start_with_provider(provider_options: impl FnOnce(&Path) -> SimulatorOptions) -> Self {
        svc::http::tls::install_provider();
        let database = test_database_from("platform", |url| async move {
            svc::platform::db::migrate::run(&url.parse()?).await
        });
        let database = database.await.expect("the test database must start");
        let dir = tempfile::tempdir().expect("the temporary directory must be created");
        let store = S3Server::start(dir.path()).expect("the S3 server must start");
        store.create_bucket(BUCKET);
        publish_unsigned(&store, "v1");
        let provider =
            Simulator::start(provider_options(dir.path())).await.expect("the provider simulator must start");
        let timeouts = Timeouts { total: Some(Duration::from_secs(70)), ..Timeouts::CALL };
        let timeouts = Timeouts { idle: Duration::from_secs(70), ..timeouts };
        let client = client::build(timeouts).expect("the client configuration must be valid");
        Self { database, store, provider, client, dir }
    }

    /// Returns the complete configuration for a platform process, with short intervals and timeouts.
    pub fn settings(&self) -> Vec<(String, String)> {
        let mut settings = self.store.env(BUCKET);
        settings.extend(self.store.sts_env());
        for (name, value) in [
            ("PLATFORM_LISTEN", "127.0.0.1:0"),
            ("ROUTER_LISTEN", "127.0.0.1:0"),
            ("PLATFORM_DATABASE_URL", &self.database.url()),
            ("PLATFORM_KEY", &"07".repeat(32)),
            ("PLATFORM_SECRET", SECRET),
            ("PLATFORM_PUBLIC_URL", "http://platform.example"),
            ("APP_HOST", "app.test"),
            ("CODE_HOST", "code.test"),
            ("IDP_ISSUER", "https://idp.test"),
            ("IDP_AUDIENCE", "svc"),
            ("IDP_SIGN_IN_URL", "https://idp.test/sign-in"),
            ("CUSTOMER_VPS_ENABLED", "true"),
            ("CUSTOMER_VPS_IMAGE_VERSION", "v1"),
            ("CUSTOMER_VPS_HTTPS_PORT", &self.provider.https_port().to_string()),
            ("PROVIDER_API_URL", &self.provider.base_url()),
            ("PROVIDER_API_TOKEN", self.provider.token()),
            ("PLATFORM_LEASE_SECONDS", "2"),
            ("PLATFORM_POLL_MS", "500"),
            ("RECONCILE_SECONDS", "1"),
            ("SERVER_GONE_SILENCE_SECONDS", "1"),
            ("SERVER_CHECK_SECONDS", "0"),
            ("PROVIDER_AMBIGUOUS_WAIT_SECONDS", "2"),
            ("LAST_BACKUP_DEADLINE_SECONDS", "1"),
            ("LAST_BACKUP_STALL_SECONDS", "3"),
            ("PREDECESSOR_KEEP_SECONDS", "0"),
            ("DELETE_GRACE_SECONDS", "0"),
            ("RESIZE_SHUTDOWN_SECONDS", "2"),
            ("RESIZE_CHANGE_SECONDS", "8"),
            ("RESIZE_HEALTH_SECONDS", "30"),
            ("RUST_LOG", "info"),
        ] {
            settings.push((name.to_owned(), value.to_owned()));
        }
        settings
    }

    pub fn start_platform(&self) -> Process {
        self.start_platform_with(&[])
    }

    /// Starts a platform process with additional or changed settings.
    pub fn start_platform_with(&self, extra_env: &[(&str, &str)]) -> Process {
        self.start_process(self.command(extra_env))
    }

    pub fn start_process(&self, mut command: Command) -> Process {
        command.stdout(Stdio::piped());
        let mut child = OwnedChild::spawn(&mut command).expect("the platform must start");
        let mut lines = BufReader::new(child.take_stdout().expect("the output must be piped")).lines();
        let base = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("listening api ").map(str::to_owned));
        let base = base.unwrap_or_else(|| panic!("the platform did not start:\n{}", self.log()));
        let router = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("listening router ").map(str::to_owned))
            .unwrap_or_default();
        std::thread::spawn(move || lines.for_each(drop));
        Process { child, base, router }
    }

    pub fn command(&self, extra_env: &[(&str, &str)]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))
            .expect("the log must be writable");
        command.arg("svc-platform").env_clear().envs(self.settings()).envs(extra_env.iter().copied());
        command.stdin(Stdio::null()).stderr(log);
        command
    }

    /// Returns the log of all processes.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn request(&self, process: &Process, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, format!("{}{path}", process.base))
    }

    pub async fn try_post(&self, process: &Process, path: &str, body: &Value) -> anyhow::Result<ApiResponse> {
        let request = self.request(process, Method::POST, path).bearer_auth(SECRET).json(body);
        ApiResponse::read(request.send().await?).await
    }

    pub async fn post(&self, process: &Process, path: &str, body: &Value) -> ApiResponse {
        self.send(self.request(process, Method::POST, path).bearer_auth(SECRET).json(body)).await
    }

    pub async fn get(&self, process: &Process, path: &str) -> ApiResponse {
        self.send(self.request(process, Method::GET, path).bearer_auth(SECRET)).await
    }

    pub async fn delete(&self, process: &Process, path: &str) -> ApiResponse {
        self.send(self.request(process, Method::DELETE, path).bearer_auth(SECRET)).await
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> ApiResponse {
        let (client, request) = request.build_split();
        let request = request.expect("the request must be valid");
        let (method, path) = (request.method().clone(), request.url().path().to_owned());
        let is_json = request.headers().get("content-type").is_some_and(|kind| kind == "application/json");
        let request_body =
            request.body().and_then(reqwest::Body::as_bytes).filter(|_| is_json).map(<[u8]>::to_vec);
        let response = async { ApiResponse::read(client.execute(request).await?).await };
        let response = response.await.unwrap_or_else(|error| panic!("{error:#}\n{}", self.log()));
        contract::platform().check(&Exchange {
            method: &method,
            path: &path,
            request_body: request_body.as_deref(),
            status: response.status,
            headers: &response.headers,
            response_body: &response.text,
        });
        response
    }

    pub async fn subscribe(&self, process: &Process, user: &str) {
        self.set_slot(process, &json!({"idpUserId": user, "plan": "max", "status": "active"})).await;
    }

    /// Writes a slot's subscription.
    pub async fn set_slot(&self, process: &Process, body: &Value) {
        let request = self.request(process, Method::PUT, "/vps/slots").bearer_auth(SECRET).json(body);
        let response = self.send(request).await;
        assert_eq!(response.status, 200, "{response:?}");
    }

    /// Subscribes the user's slot and provisions it. Returns the body of the 202 response.
    pub async fn provision(&self, process: &Process, user: &str) -> Value {
        self.subscribe(process, user).await;
        let response = self.post(process, "/vps/provision", &provision_body(user)).await;
        assert_eq!(response.status, 202, "{response:?}");
        response.body
    }

    /// Starts a machine and registers it as its host would.
    pub async fn start_machine(&self, process: &Process, user: &str) -> UserDataSettings {
        let provisioned = self.provision(process, user).await;
        let host_settings = self
            .wait_for_host_settings(
                process,
                provisioned["machineId"].as_str().expect("the response must contain the machine's id"),
            )
            .await;
        let response = self.register(process, &host_settings).await;
        assert_eq!(response.status, 200, "{response:?}\n{}", self.log());
        host_settings
    }

    /// Waits until the platform has recorded the machine's server. Returns its host's settings.
    pub async fn wait_for_host_settings(&self, process: &Process, machine: &str) -> UserDataSettings {
        let is_recorded = || async {
            let record = self.get(process, &format!("/vps/{machine}")).await;
            (!record.body["providerServerId"].is_null()).then_some(())
        };
        self.eventually("the server is recorded", is_recorded).await;
        UserDataSettings::from_server(
            &self
                .provider
                .server_by_name(&format!("svc-{machine}"))
                .expect("the provider must have the server"),
        )
    }

    pub async fn register(&self, process: &Process, host_settings: &UserDataSettings) -> ApiResponse {
        self.register_as(process, &host_settings.registration_token, &registration(&host_settings.machine, 1))
            .await
    }

    pub async fn register_as(&self, process: &Process, token: &str, body: &Value) -> ApiResponse {
        self.send(self.request(process, Method::POST, "/vps/register").bearer_auth(token).json(body)).await
    }

    /// Reports a failed boot, at the stage `restore`, as the machine's host would.
    pub async fn report_boot_failure(&self, process: &Process, host_settings: &UserDataSettings) {
        let path = format!("/vps/{}/boot-failure", host_settings.machine);
        let report =
            self.request(process, Method::POST, &path).bearer_auth(&host_settings.registration_token);
        let body = json!({"stage": "restore", "message": "damaged"});
        let response = self.send(report.json(&body)).await;
        assert_eq!(response.status, 202, "{response:?}");
    }

    /// Sends a heartbeat as the machine's host would.
    pub async fn send_heartbeat(
        &self,
        process: &Process,
        host_settings: &UserDataSettings,
        body: &Value,
    ) -> ApiResponse {
        let request =
            self.request(process, Method::POST, &format!("/vps/{}/heartbeat", host_settings.machine));
        self.send(request.bearer_auth(&host_settings.upgrade_token).json(body)).await
    }

    /// Sends a heartbeat from every running server to a platform that may have been killed.
    pub async fn try_send_heartbeats(&self, base: String) {
        for server in self.provider.servers().iter().filter(|server| server.status == Power::Running) {
            let host_settings = UserDataSettings::from_server(server);
            self.try_send_heartbeat(&base, &host_settings, &heartbeat_of(&host_settings)).await;
        }
    }

    /// Sends a heartbeat to a platform that may have been killed. Returns the response, if any.
    pub async fn try_send_heartbeat(
        &self,
        base: &str,
        host_settings: &UserDataSettings,
        body: &Value,
    ) -> Option<Value> {
        let request = self.client.post(format!("{base}/vps/{}/heartbeat", host_settings.machine));
        request.bearer_auth(&host_settings.upgrade_token).json(body).send().await.ok()?.json().await.ok()
    }

    /// Waits until the process has loaded its routes.
    pub async fn wait_for_routes(&self, process: &Process) {
        let is_ready = || async { (self.get(process, "/readyz").await.status == 200).then_some(()) };
        self.eventually("the routes are loaded", is_ready).await;
    }

    /// Polls until the check returns a value.
    pub async fn eventually<T, F: Future<Output = Option<T>>>(
        &self,
        condition: &str,
        mut check: impl FnMut() -> F,
    ) -> T {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(value) = check().await {
                return value;
            }
            assert!(
                Instant::now() < deadline,
                "timed out after {WAIT_TIMEOUT:?} waiting for this condition: {condition}\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Asserts that, after at most 15 s, only this machine's server remains. Until then, servers of earlier machines
    /// may be awaiting deletion.
    pub fn assert_only_server(&self, machine: &str) {
        self.assert_servers(&[format!("svc-{machine}")]);
    }

    /// Asserts that, after at most 15 s, no server remains.
    pub fn assert_no_server(&self) {
        self.assert_servers(&[]);
    }

    fn assert_servers(&self, expected: &[String]) {
        let deadline = Instant::now() + Duration::from_secs(15);
        loop {
            let names: Vec<_> = self.provider.servers().into_iter().map(|server| server.name).collect();
            if names == expected {
                return;
            }
            assert!(Instant::now() < deadline, "{names:?} instead of {expected:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Publishes a placeholder bundle and a checksum file that does not match it, without a signed manifest.
pub fn publish_unsigned(store: &S3Server, version: &str) {
    let key = format!("system-bundles/{version}/svc-host-bundle.tar.gz");
    store.write(BUCKET, &key, "0123456789");
    store.write(BUCKET, &format!("{key}.sha256"), format!("{DIGEST}  svc-host-bundle.tar.gz\n"));
}

pub fn provision_body(user: &str) -> Value {
    json!({"idpUserId": user, "handle": format!("h-{}", user.replace('_', "-"))})
}

/// Returns a registration body; `n` makes it unique.
pub fn registration(machine: &str, n: u32) -> Value {
    json!({"machineId": machine, "imageVersion": "v1", "bundleSha256": DIGEST,
        "tlsSpkiSha256": format!("{n:064x}"), "bootMs": 1234})
}

pub fn heartbeat() -> Value {
    json!({"imageVersion": "v1", "epoch": 1, "health": {"gateway": "ok", "database": "ok"}, "lastBackup": null,
        "disk": {"totalBytes": 10, "freeBytes": 5}, "proofKids": []})
}

/// Returns the body of a healthy host's heartbeat, with the host's own epoch.
pub fn heartbeat_of(host_settings: &UserDataSettings) -> Value {
    let mut body = heartbeat();
    body["epoch"] = json!(host_settings.epoch.parse::<u32>().expect("the epoch must be a number"));
    body
}

/// The settings that a server's user-data passes to its host.
#[derive(Debug, Clone)]
pub struct UserDataSettings {
    pub machine: String,
    pub registration_token: String,
    pub upgrade_token: String,
    pub restore_mode: String,
    pub epoch: String,
    pub user_data: String,
    /// The variables from all env files.
    pub settings: BTreeMap<String, String>,
}

impl UserDataSettings {
    pub fn from_server(server: &ServerView) -> Self {
        let config: Value = serde_json::from_str(
            server.user_data.strip_prefix("#cloud-config\n").expect("the user-data must be cloud-config"),
        )
        .expect("the user-data must be JSON");
        let mut settings = BTreeMap::new();
        let files = config["write_files"].as_array().expect("the user-data must list files");
        for file in
            files.iter().filter(|file| file["path"].as_str().is_some_and(|path| path.ends_with(".env")))
        {
            assert_eq!(file["permissions"], "0600");
            settings.extend(
                parse_env_file(file["content"].as_str().expect("the file must have content"))
                    .expect("the env file must be valid"),
            );
        }
        let variable = |name: &str| settings.get(name).cloned().unwrap_or_default();
        Self {
            machine: variable("SVC_MACHINE_ID"),
            registration_token: variable("REGISTRATION_TOKEN"),
            upgrade_token: variable("UPGRADE_TOKEN"),
            restore_mode: variable("SVC_RESTORE_MODE"),
            epoch: variable("SVC_EPOCH"),
            user_data: server.user_data.clone(),
            settings,
        }
    }

    /// Returns a variable from the env files, or an empty string if it is not set.
    pub fn setting(&self, name: &str) -> String {
        self.settings.get(name).cloned().unwrap_or_default()
    }
}

#[derive(Debug, Clone)]
pub struct ApiResponse {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
    pub body: Value,
}

impl ApiResponse {
    async fn read(response: reqwest::Response) -> anyhow::Result<Self> {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let text = response.text().await.context("cannot read the response body")?;
        let body = serde_json::from_str(&text).unwrap_or_default();
        Ok(Self { status, headers, text, body })
    }

    /// Asserts that the response is a problem with the given status and code.
    #[track_caller]
    pub fn assert_problem(&self, status: u16, code: &str) {
        assert_eq!((self.status, self.body["code"].as_str()), (status, Some(code)), "{self:?}");
        assert_eq!(self.headers["content-type"], "application/problem+json");
        assert_eq!(self.body["status"], status);
        for member in ["type", "title", "detail", "requestId"] {
            assert!(self.body[member].is_string(), "{member}: {self:?}");
        }
        assert_eq!(
            self.headers["x-request-id"],
            self.body["requestId"].as_str().expect("the request id must be a string")
        );
    }
}

pub struct Process {
    child: OwnedChild,
    /// The base URL of the control API.
    pub base: String,
    /// The base URL of the router.
    pub router: String,
}

impl Process {
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    pub fn kill(&mut self) {
        self.child.kill().ok();
    }

    pub async fn wait_for_exit(&mut self) -> ExitStatus {
        self.child.wait_async(WAIT_TIMEOUT).await.expect("the platform must exit before the timeout")
    }

    /// Waits until the process has been killed, by the test or at its fail point.
    pub async fn wait_until_killed(&mut self) {
        let status = self.wait_for_exit().await;
        assert_eq!(status.signal(), Some(9), "{status}");
    }

    /// Like [`Self::wait_until_killed`], but for a fail point that the process reaches only while hosts send requests.
    pub async fn wait_until_killed_while<F: Future<Output = ()>>(
        &mut self,
        mut send: impl FnMut(String) -> F,
    ) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while self.child.status().is_none() {
            assert!(Instant::now() < deadline, "the platform did not reach its fail point");
            send(self.base.clone()).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.wait_until_killed().await;
    }
}

//! All services in a scenario, on their own ports and in their own directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::platform::Platform;
use super::program::{CommandOutput, Program};
use super::slot::{BUCKET, SlotObjects};
use super::web::WebClient;
use crate::bundle::SigningKey;
use crate::ca::Ca;
use crate::fetch::target_dir;
use crate::idp::{Idp, MintOptions};
use crate::net;
use crate::pg::{PgBinaries, PgOptions, PgServer};
use crate::provider::{HostSettings, MachineSettings, Simulator, SimulatorOptions};
use crate::s3::S3Server;
use crate::stores::StoreKind;
use crate::vm::HOST_FROM_GUEST;

pub const USER: &str = "user_demo";
/// The `svcctl provision` options that confirm the provisioning for a new customer.
pub const CONFIRM_FLAGS: [&str; 2] = ["--confirm-cost", "--confirm-opt-in"];
pub const HANDLE: &str = "ada";
pub const IMAGE_VERSION: &str = "demo-1";

/// A key for tests only, which nothing else trusts.
const SIGNING_KEY: &str = include_str!("../bundle/ed25519-test-only.txt");
const MAX_PRINTED_LOG_LINES: usize = 25;

/// The kind of server that the simulated provider runs.
#[derive(Debug, Clone)]
pub enum HostBackend {
    /// Processes on this machine.
    Processes,
    VirtualMachines(MachineSettings),
}

/// The transport for the router's public listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterTransport {
    /// As in production: TLS, with a certificate from the test CA.
    Tls,
    /// For manual use: names that resolve to loopback in browsers and curl, without a certificate.
    Plain,
}

impl RouterTransport {
    pub fn app_host(self) -> &'static str {
        match self {
            Self::Tls => "app.svc-demo.test",
            Self::Plain => "app.localhost",
        }
    }

    pub fn code_host(self) -> &'static str {
        match self {
            Self::Tls => "code.svc-demo.test",
            Self::Plain => "code.localhost",
        }
    }
}

pub struct Stack {
    pub dir: PathBuf,
    pub svc: PathBuf,
    pub pg: PgBinaries,
    pub store: S3Server,
    pub slot: SlotObjects,
    idp: Idp,
    pub provider: Simulator,
    pub ca: Ca,
    pub web: WebClient,
    /// Like [`Self::web`], for the owner's code-server.
    pub code: WebClient,
    pub api: String,
    pub transport: RouterTransport,
    /// The operators' bearer token.
    pub secret: String,
    /// `PLATFORM_KEY`, from which the hosts' tokens are derived.
    pub key: String,
    /// The private key that signs bundles; hosts trust its public key.
    pub signing_key: PathBuf,
    operator: Program,
    platform_env: Vec<(String, String)>,
    /// Timeout for one `svcctl` invocation.
    pub(super) svcctl_timeout: Duration,
    platform: Platform,
    database: PgServer,
}

impl Stack {
    /// Starts all services. Also returns a line with their addresses.
    pub async fn start(svc: &Path, dir: &Path, transport: RouterTransport) -> Result<(Self, String)> {
        Self::start_with(svc, dir, transport, &[]).await
    }

    /// Like [`Self::start`], with extra settings for every product process: platform, hosts and `svcctl`.
    pub async fn start_with(
        svc: &Path,
        dir: &Path,
        transport: RouterTransport,
        extra_env: &[(&str, &str)],
    ) -> Result<(Self, String)> {
        Self::start_with_backend(svc, dir, transport, HostBackend::Processes, extra_env).await
    }

    /// Like [`Self::start_with`], with the given kind of server. Virtual machines get no settings except their
    /// user-data.
    pub async fn start_with_backend(
        svc: &Path,
        dir: &Path,
        transport: RouterTransport,
        backend: HostBackend,
        extra_env: &[(&str, &str)],
    ) -> Result<(Self, String)> {
        let store = StoreKind::Kit.start(dir, BUCKET).await?;
        Self::start_with_store(svc, dir, transport, backend, store, extra_env).await
    }

    /// Like [`Self::start_with_backend`], with the given object store.
    pub async fn start_with_store(
        svc: &Path,
        dir: &Path,
        transport: RouterTransport,
        backend: HostBackend,
        store: S3Server,
        extra_env: &[(&str, &str)],
    ) -> Result<(Self, String)> {
        let extra_env = extra_env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        // The crypto provider is installed once per process; later attempts fail harmlessly.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let pg = tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&target_dir())).await??;
        let database = PgServer::start(&pg, PgOptions::default()).await?;
        database.create_database("platform").await?;
        let idp = Idp::start()?;
        let uses_vms = matches!(backend, HostBackend::VirtualMachines(_));
        let options = match backend {
            HostBackend::VirtualMachines(settings) => SimulatorOptions::machine(settings),
            HostBackend::Processes => {
                let mut hosts = HostSettings::new(svc.to_owned(), pg.clone(), dir.join("hosts"));
                // The defaults, 30 s and 180 s, would slow down the scenario.
                hosts.extra_env.push(("HEARTBEAT_SECONDS".to_owned(), "5".to_owned()));
                hosts.extra_env.push(("SVC_UPDATE_HEALTH_SECONDS".to_owned(), "60".to_owned()));
                hosts.extra_env.extend(extra_env.clone());
                SimulatorOptions::process(hosts)
            }
        };
        let provider = Simulator::start(options).await?;
        let ca = Ca::new()?;
        let secret = uuid::Uuid::new_v4().simple().to_string();
        let api = format!("http://127.0.0.1:{}", net::free_port()?);

        let mut env = store.env(BUCKET);
        let mut set = |name: &str, value: &str| env.push((name.to_owned(), value.to_owned()));
        set("PLATFORM_PUBLIC_URL", &api);
        set("PLATFORM_SECRET", &secret);
        env.extend(extra_env);
        let signing_key = PathBuf::from(write_file(dir, "bundle-key.pem", SIGNING_KEY)?);
        let public_key = SigningKey::read(&signing_key)?.public_key_base64();
        env.push(("BUNDLE_PUBLIC_KEYS".to_owned(), public_key));
        let operator = Program::new(svc, env.clone());
        env.extend(idp.env());
        env.extend(store.sts_env());
        let mut set = |name: &str, value: &str| env.push((name.to_owned(), value.to_owned()));
        set("PLATFORM_LISTEN", api.trim_start_matches("http://"));
        set("PLATFORM_DATABASE_URL", &database.url("platform"));
        let key = uuid::Uuid::new_v4().simple().to_string().repeat(2);
        set("PLATFORM_KEY", &key);
        set("PLATFORM_POLL_MS", "100");
        set("CUSTOMER_VPS_ENABLED", "true");
        set("CUSTOMER_VPS_IMAGE_VERSION", IMAGE_VERSION);
        set("CUSTOMER_VPS_HTTPS_PORT", &provider.https_port().to_string());
        set("PROVIDER_API_URL", &provider.base_url());
        set("PROVIDER_API_TOKEN", provider.token());
        set("LAST_BACKUP_DEADLINE_SECONDS", if uses_vms { "60" } else { "5" });
        set("SERVER_CHECK_SECONDS", if uses_vms { "60" } else { "1" });
        set("SERVER_GONE_SILENCE_SECONDS", if uses_vms { "120" } else { "15" });
        if uses_vms {
            // In a guest, 127.0.0.1 is the guest itself.
            let from_guest = |url: &str| url.replace("127.0.0.1", HOST_FROM_GUEST);
            set("PLATFORM_INTERNAL_URL", &from_guest(&api));
            set("SVC_HOST_BUNDLE_BASE_URL", &from_guest(&api));
            set("HOST_OBJECT_STORE_ENDPOINT", &from_guest(&store.endpoint()));
        }
        set("APP_HOST", transport.app_host());
        set("CODE_HOST", transport.code_host());
        set("IDP_SIGN_IN_URL", &format!("{}/sign-in", idp.issuer()));
        set("ROUTER_LISTEN", "127.0.0.1:0");
        if transport == RouterTransport::Tls {
            let (cert, key) = ca.issue(&[transport.app_host(), transport.code_host()])?;
            set("ROUTER_TLS_CERT_FILE", &write_file(dir, "router.pem", &cert)?);
            set("ROUTER_TLS_KEY_FILE", &write_file(dir, "router.key", &key)?);
        }
        let platform_env = env.clone();
        let platform = Platform::start(&Program::new(svc, env), &dir.join("platform.log")).await?;
        let router = format!("{}://{}", platform.scheme, platform.router);
        let web = WebClient::new(&ca.root_pem(), &platform.scheme, transport.app_host(), platform.router)?;
        let code = WebClient::new(&ca.root_pem(), &platform.scheme, transport.code_host(), platform.router)?;

        let summary =
            format!("platform {api}, router {router}, provider, store, database, identity provider");
        let stack = Self {
            dir: dir.to_owned(),
            svc: svc.to_owned(),
            pg,
            store,
            slot: SlotObjects::primary(USER),
            idp,
            provider,
            ca,
            web,
            code,
            api,
            transport,
            secret,
            key,
            signing_key,
            operator,
            platform_env,
            svcctl_timeout: Duration::from_secs(if uses_vms { 900 } else { 230 }),
            platform,
            database,
        };
        Ok((stack, summary))
    }

    /// Runs `svcctl` as the operator.
    pub async fn svcctl(&self, args: &[&str]) -> Result<CommandOutput> {
        self.svcctl_with_timeout(self.svcctl_timeout, args).await
    }

    pub async fn svcctl_with_timeout(&self, timeout: Duration, args: &[&str]) -> Result<CommandOutput> {
        self.operator.run("svcctl", args, timeout).await
    }

    /// The platform's own settings.
    pub fn platform_env(&self) -> &[(String, String)] {
        &self.platform_env
    }

    /// The environment for `svcctl`.
    pub fn operator_env(&self) -> &[(String, String)] {
        self.operator.env()
    }

    pub fn router_url(&self) -> String {
        format!("{}://{}", self.platform.scheme, self.platform.router)
    }

    pub fn issuer(&self) -> String {
        self.idp.issuer()
    }

    pub fn platform_database_url(&self) -> String {
        self.database.url("platform")
    }

    /// The superuser password of the platform's database server.
    pub fn database_password(&self) -> &str {
        self.database.password()
    }

    /// The log of the platform's database server.
    pub fn database_log(&self) -> String {
        self.database.log()
    }

    /// Waits for the platform to exit unexpectedly.
    pub async fn wait_for_platform_exit(&mut self) -> Result<()> {
        let status = self.platform.wait().await?;
        bail!("the platform exited: {status}");
    }

    /// Returns a session token for the owner.
    pub fn owner_token(&self) -> String {
        self.session_token(USER)
    }

    /// Returns a session token for `user`.
    pub fn session_token(&self, user: &str) -> String {
        self.idp.mint(user, &MintOptions::default())
    }

    /// Prints the end of each log, to explain a failure.
    pub fn print_logs(&self) {
        let mut logs = vec![self.dir.join("platform.log")];
        let hosts = fs::read_dir(self.dir.join("hosts")).into_iter().flatten().flatten();
        for host in hosts {
            let host_logs = fs::read_dir(host.path().join("var/log")).into_iter().flatten().flatten();
            logs.extend(host_logs.map(|log| log.path()));
        }
        logs.sort();
        for log in logs {
            let text = fs::read(&log).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            if !lines.is_empty() {
                println!("--- {}", log.strip_prefix(&self.dir).unwrap_or(&log).display());
                let start = lines.len().saturating_sub(MAX_PRINTED_LOG_LINES);
                lines[start..].iter().for_each(|line| println!("{line}"));
            }
        }
    }

    /// Stops the platform gracefully, then the servers. All other services stop on drop.
    pub async fn stop(self) {
        let Self { platform, provider, .. } = self;
        if let Err(error) = platform.stop().await {
            println!("      (the platform did not drain: {error:#})");
        }
        provider.stop().await;
    }
}

fn write_file(dir: &Path, name: &str, text: &str) -> Result<String> {
    let path = dir.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.display().to_string())
}

/// Repeats `check` until it succeeds or the timeout expires.
pub async fn eventually<T, F>(description: &str, timeout: Duration, mut check: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let deadline = tokio::time::Instant::now() + timeout;
    loop {
        match check().await {
            Ok(value) => return Ok(value),
            Err(error) if tokio::time::Instant::now() >= deadline => {
                bail!("timed out after {} s waiting until {description}: {error:#}", timeout.as_secs());
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

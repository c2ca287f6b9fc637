//! All real parts of one story, on ports and in a directory of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::platform::Platform;
use super::program::{Program, Run};
use super::slot::{BUCKET, Slot};
use super::web::Web;
use crate::bundle::SigningKey;
use crate::ca::Ca;
use crate::fetch::target_dir;
use crate::idp::{Idp, MintOptions};
use crate::net;
use crate::pg::{PgBinaries, PgOptions, PgServer};
use crate::provider::{HostSettings, MachineSettings, Simulator, SimulatorOptions};
use crate::s3::S3Server;
use crate::vm::HOST_FROM_GUEST;

pub const USER: &str = "user_story";
pub const HANDLE: &str = "ada";
pub const IMAGE_VERSION: &str = "story-1";

/// Of tests alone: nothing else trusts it.
const SIGNING_KEY: &str = include_str!("../bundle/ed25519-test-only.txt");
const LOG_LINES: usize = 25;

/// What the provider's servers are.
#[derive(Debug, Clone)]
pub enum Ground {
    /// Processes of this machine.
    Processes,
    /// Virtual machines.
    Machines(MachineSettings),
}

/// How the router is reached from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// As in production: TLS, here with a certificate of our own CA.
    Tls,
    /// For people: names that browsers and curl find on loopback by themselves, without a certificate.
    Plain,
}

impl Front {
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
    pub slot: Slot,
    idp: Idp,
    pub provider: Simulator,
    pub ca: Ca,
    pub web: Web,
    /// As [`Self::web`], for the owner's code-server.
    pub code: Web,
    pub api: String,
    pub front: Front,
    /// The operators' bearer token.
    pub secret: String,
    /// `PLATFORM_KEY`, from which the hosts' tokens are derived.
    pub key: String,
    /// Whose public half hosts trust.
    pub signing_key: PathBuf,
    operator: Program,
    platform_env: Vec<(String, String)>,
    /// The longest that a call of `svcctl` may take.
    patience: Duration,
    platform: Platform,
    database: PgServer,
}

impl Stack {
    /// Starts everything; gives a line that says what runs.
    pub async fn start(svc: &Path, dir: &Path, front: Front) -> Result<(Self, String)> {
        Self::start_with(svc, dir, front, &[]).await
    }

    /// [`Self::start`] with further settings for every process of ours: platform, hosts and `svcctl`.
    pub async fn start_with(
        svc: &Path,
        dir: &Path,
        front: Front,
        more: &[(&str, &str)],
    ) -> Result<(Self, String)> {
        Self::start_on(svc, dir, front, Ground::Processes, more).await
    }

    /// [`Self::start_with`] on servers of another kind. Virtual machines get no settings beyond their user-data.
    pub async fn start_on(
        svc: &Path,
        dir: &Path,
        front: Front,
        ground: Ground,
        more: &[(&str, &str)],
    ) -> Result<(Self, String)> {
        let more = more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        // Installed once per process; a second story finds it there.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let pg = tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&target_dir())).await??;
        let database = PgServer::start(&pg, PgOptions::default()).await?;
        database.create_database("platform").await?;
        let store = S3Server::start(dir)?;
        store.create_bucket(BUCKET);
        let idp = Idp::start()?;
        let machines = matches!(ground, Ground::Machines(_));
        let servers = match ground {
            Ground::Machines(settings) => SimulatorOptions::machine(settings),
            Ground::Processes => {
                let mut hosts = HostSettings::new(svc.to_owned(), pg.clone(), dir.join("hosts"));
                // Nobody here wants to wait half a minute for a host's word.
                hosts.extra_env.push(("HEARTBEAT_SECONDS".to_owned(), "5".to_owned()));
                hosts.extra_env.push(("SVC_UPDATE_HEALTH_SECONDS".to_owned(), "60".to_owned()));
                hosts.extra_env.extend(more.clone());
                SimulatorOptions::process(hosts)
            }
        };
        let provider = Simulator::start(servers).await?;
        let ca = Ca::new()?;
        let secret = uuid::Uuid::new_v4().simple().to_string();
        let api = format!("http://127.0.0.1:{}", net::free_port()?);

        let mut env = store.env(BUCKET);
        let mut set = |name: &str, value: &str| env.push((name.to_owned(), value.to_owned()));
        set("PLATFORM_PUBLIC_URL", &api);
        set("PLATFORM_SECRET", &secret);
        env.extend(more);
        let signing_key = PathBuf::from(written(dir, "bundle-key.pem", SIGNING_KEY)?);
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
        set("LAST_BACKUP_DEADLINE_SECONDS", if machines { "60" } else { "5" });
        set("SERVER_CHECK_SECONDS", if machines { "60" } else { "1" });
        set("SERVER_GONE_SILENCE_SECONDS", if machines { "120" } else { "15" });
        if machines {
            // There, 127.0.0.1 is the machine itself.
            let from_guest = |url: &str| url.replace("127.0.0.1", HOST_FROM_GUEST);
            set("PLATFORM_INTERNAL_URL", &from_guest(&api));
            set("SVC_HOST_BUNDLE_BASE_URL", &from_guest(&api));
            set("HOST_OBJECT_STORE_ENDPOINT", &from_guest(&store.endpoint()));
        }
        set("APP_HOST", front.app_host());
        set("CODE_HOST", front.code_host());
        set("IDP_SIGN_IN_URL", &format!("{}/sign-in", idp.issuer()));
        set("ROUTER_LISTEN", "127.0.0.1:0");
        if front == Front::Tls {
            let (cert, key) = ca.issue(&[front.app_host(), front.code_host()])?;
            set("ROUTER_TLS_CERT_FILE", &written(dir, "router.pem", &cert)?);
            set("ROUTER_TLS_KEY_FILE", &written(dir, "router.key", &key)?);
        }
        let platform_env = env.clone();
        let platform = Platform::start(&Program::new(svc, env), &dir.join("platform.log")).await?;
        let router = format!("{}://{}", platform.scheme, platform.router);
        let web = Web::new(&ca.root_pem(), &platform.scheme, front.app_host(), platform.router)?;
        let code = Web::new(&ca.root_pem(), &platform.scheme, front.code_host(), platform.router)?;

        let said = format!("platform {api}, router {router}, provider, store, database, identity provider");
        let stack = Self {
            dir: dir.to_owned(),
            svc: svc.to_owned(),
            pg,
            store,
            slot: Slot::primary(USER),
            idp,
            provider,
            ca,
            web,
            code,
            api,
            front,
            secret,
            key,
            signing_key,
            operator,
            platform_env,
            patience: Duration::from_secs(if machines { 900 } else { 230 }),
            platform,
            database,
        };
        Ok((stack, said))
    }

    /// `svcctl` as the operator calls it.
    pub async fn svcctl(&self, args: &[&str]) -> Result<Run> {
        self.svcctl_within(self.patience, args).await
    }

    pub async fn svcctl_within(&self, patience: Duration, args: &[&str]) -> Result<Run> {
        self.operator.run("svcctl", args, patience).await
    }

    /// The platform's own settings.
    pub fn platform_env(&self) -> &[(String, String)] {
        &self.platform_env
    }

    /// The environment that `svcctl` has here.
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

    /// The password of every database of the platform's server.
    pub fn database_password(&self) -> &str {
        self.database.password()
    }

    /// What the platform's server itself has logged.
    pub fn database_log(&self) -> String {
        self.database.log()
    }

    /// Waits until the platform ends without having been asked to.
    pub async fn wait_for_platform_exit(&mut self) -> Result<()> {
        let status = self.platform.ended().await?;
        bail!("the platform ended by itself: {status}");
    }

    /// A session token of the owner.
    pub fn owner(&self) -> String {
        self.session(USER)
    }

    /// A session token of any user of the identity provider.
    pub fn session(&self, user: &str) -> String {
        self.idp.mint(user, &MintOptions::default())
    }

    /// The end of each log, for a story that failed.
    pub fn print_logs(&self) {
        let mut logs = vec![self.dir.join("platform.log")];
        let hosts = fs::read_dir(self.dir.join("hosts")).into_iter().flatten().flatten();
        for host in hosts {
            let of_host = fs::read_dir(host.path().join("var/log")).into_iter().flatten().flatten();
            logs.extend(of_host.map(|log| log.path()));
        }
        logs.sort();
        for log in logs {
            let text = fs::read(&log).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            if !lines.is_empty() {
                println!("--- {}", log.strip_prefix(&self.dir).unwrap_or(&log).display());
                lines[lines.len().saturating_sub(LOG_LINES)..].iter().for_each(|line| println!("{line}"));
            }
        }
    }

    /// Ends the platform in order, then the servers; the rest goes with the values.
    pub async fn stop(self) {
        let Self { platform, provider, .. } = self;
        if let Err(error) = platform.stop().await {
            println!("      (the platform did not drain: {error:#})");
        }
        provider.stop().await;
    }
}

fn written(dir: &Path, name: &str, text: &str) -> Result<String> {
    let path = dir.join(name);
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(path.display().to_string())
}

/// Looks again and again until `look` finds something.
pub async fn eventually<T, F>(what: &str, within: Duration, mut look: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let deadline = tokio::time::Instant::now() + within;
    loop {
        match look().await {
            Ok(found) => return Ok(found),
            Err(error) if tokio::time::Instant::now() >= deadline => {
                bail!("{what}: not within {} s: {error:#}", within.as_secs());
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

//! A platform with machines, and their owners' browser sessions, for the router and footprint benchmarks.
//!
//! The machines exist only as database rows. nginx or a WebSocket echo server responds in place of a gateway; the
//! bridge benchmark measures the gateway itself.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use reqwest::Certificate;
use sha2::{Digest, Sha256};

use super::connections::Endpoint;
use super::peers::nginx::Pem;
use kit::ca::Ca;
use kit::fetch::target_dir;
use kit::idp::{Idp, MintOptions};
use kit::pg::{Durability, PgBinaries, PgOptions, PgServer};
use kit::provider::{Simulator, SimulatorOptions};
use kit::s3::S3Server;
use kit::scenario::Platform;
use kit::scenario::Program;

const APP_HOST: &str = "app.svc-bench.test";
const CODE_HOST: &str = "code.svc-bench.test";
const BUCKET: &str = "svc-bench";
const TIMEOUT: Duration = Duration::from_secs(20);

/// A self-signed identity, like that of a gateway.
pub struct Identity {
    pub cert_pem: String,
    pub key_pem: String,
    pub pin: String,
}

impl Identity {
    pub fn generate() -> Result<Self> {
        let key = KeyPair::generate()?;
        let params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])?;
        let cert = params.self_signed(&key)?;
        let pin = hex::encode(Sha256::digest(key.subject_public_key_info()));
        Ok(Self { cert_pem: cert.pem(), key_pem: key.serialize_pem(), pin })
    }
}

pub struct Site {
    pub ca: Ca,
    /// The public listener's certificate, used by all routers.
    pub router_pem: Pem,
    program: Program,
    log: PathBuf,
    platform: Option<Platform>,
    database: PgServer,
    idp: Idp,
    _store: S3Server,
    _provider: Simulator,
}

impl Site {
    /// Starts everything except the platform.
    pub async fn prepare(svc: &Path, dir: &Path) -> Result<Self> {
        let pg = PgBinaries::locate_or_fetch(&target_dir())?;
        let options = PgOptions { durability: Durability::FsyncOn, ..PgOptions::default() };
        let database = PgServer::start(&pg, options).await?;
        database.create_database("platform").await?;
        let store = S3Server::start(dir)?;
        store.create_bucket(BUCKET);
        let provider = Simulator::start(SimulatorOptions::record()).await?;
        let idp = Idp::start()?;
        let ca = Ca::new()?;
        let (cert, key) = ca.issue(&[APP_HOST, CODE_HOST])?;
        let router_pem = Pem::write(dir, "front", &cert, &key)?;
        let mut env = store.env(BUCKET);
        env.extend(store.sts_env());
        env.extend(idp.env());
        let database_url = database.url("platform");
        let secret = uuid::Uuid::new_v4().simple().to_string();
        let cert_file = router_pem.cert.display().to_string();
        let key_file = router_pem.key.display().to_string();
        let (sign_in_url, provider_url) = (format!("{}/sign-in", idp.issuer()), provider.base_url());
        let settings = [
            ("PLATFORM_PUBLIC_URL", "http://127.0.0.1:1"),
            ("PLATFORM_SECRET", &secret),
            ("PLATFORM_LISTEN", "127.0.0.1:0"),
            ("PLATFORM_DATABASE_URL", &database_url),
            ("PLATFORM_KEY", &secret.repeat(2)),
            ("CUSTOMER_VPS_IMAGE_VERSION", "bench"),
            ("PROVIDER_API_URL", &provider_url),
            ("PROVIDER_API_TOKEN", provider.token()),
            // The machines exist only as rows; without reconciliation, their missing servers are not detected.
            ("RECONCILE_SECONDS", "86400"),
            ("APP_HOST", APP_HOST),
            // The whole load comes from one user, whose requests are counted as usual but never throttled.
            ("ROUTER_USER_REQUESTS_PER_SECOND", "1000000"),
            ("CODE_HOST", CODE_HOST),
            ("IDP_SIGN_IN_URL", &sign_in_url),
            ("ROUTER_LISTEN", "127.0.0.1:0"),
            ("ROUTER_TLS_CERT_FILE", &cert_file),
            ("ROUTER_TLS_KEY_FILE", &key_file),
        ];
        env.extend(settings.map(|(name, value)| (name.to_owned(), value.to_owned())));
        Ok(Self {
            ca,
            router_pem,
            program: Program::new(svc, env),
            log: dir.join("platform.log"),
            platform: None,
            database,
            idp,
            _store: store,
            _provider: provider,
        })
    }

    /// Starts the platform, or restarts it; sessions and machines persist in its database.
    pub async fn start(&mut self) -> Result<()> {
        self.stop().await?;
        self.platform = Some(Platform::start(&self.program, &self.log).await?);
        Ok(())
    }

    pub async fn stop(&mut self) -> Result<()> {
        match self.platform.take() {
            Some(platform) => platform.stop().await,
            None => Ok(()),
        }
    }

    fn running_platform(&self) -> Result<&Platform> {
        self.platform.as_ref().context("the platform is not running")
    }

    pub fn pid(&self) -> Result<u32> {
        Ok(self.running_platform()?.pid())
    }

    pub fn router_address(&self) -> Result<SocketAddr> {
        Ok(self.running_platform()?.router)
    }

    /// Registers a running machine at `address` for a user.
    pub async fn register_machine(&self, user: &str, address: SocketAddr, identity: &Identity) -> Result<()> {
        let (id, pin) = (uuid::Uuid::now_v7(), &identity.pin);
        let (ip, port) = (address.ip(), address.port());
        let sql = format!(
            "INSERT INTO handles VALUES ('{user}', '{user}'); \
             INSERT INTO user_machines (machine_id, idp_user_id, slot, handle, kind, status, epoch, restore_mode, \
             server_type, location, image_version, bundle_sha256, public_ipv4, https_port, tls_spki_sha256, \
             registration_token_hash, upgrade_token_hash, registered_at) VALUES ('{id}', '{user}', 'primary', \
             '{user}', 'customer', 'running', 1, 'empty', 'cpx22', 'nbg1', 'bench', 'x', '{ip}', {port}, '{pin}', \
             'x', 'x', now())"
        );
        let client = self.database.connect("platform").await?;
        client.batch_execute(&sql).await.context("cannot register a machine")
    }

    /// Opens a session as a browser does, once the router has loaded the user's machine. Returns the session cookie.
    pub async fn open_session(&self, user: &str) -> Result<String> {
        let token = self.idp.mint(user, &MintOptions::default());
        let router = self.router_address()?;
        let client = reqwest::Client::builder()
            .tls_certs_only([Certificate::from_pem(self.ca.root_pem().as_bytes())?])
            .resolve(APP_HOST, router)
            .timeout(TIMEOUT)
            .no_proxy()
            .build()?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let request = client.get(format!("https://{APP_HOST}:{}/_svc/slots", router.port()));
            let request =
                request.header("accept", "text/html").header("cookie", format!("__session={token}"));
            let slots = request.send().await?;
            let status = slots.status();
            if slots.text().await?.contains("primary") {
                break;
            }
            ensure!(Instant::now() < deadline, "the router did not load {user}'s machine ({status})");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let request = client.get(format!("https://{APP_HOST}:{}/", router.port()));
        let request = request.header("accept", "text/html").header("cookie", format!("__session={token}"));
        let response = request.send().await?;
        for line in response.headers().get_all("set-cookie") {
            let pair = line.to_str()?.split(';').next().unwrap_or_default();
            if pair.starts_with("__Host-svc_session=") {
                return Ok(pair.to_owned());
            }
        }
        bail!("no session was opened: {} {}", response.status(), response.text().await?)
    }

    /// Returns an endpoint that trusts this site's certificate authority.
    pub fn endpoint(&self, address: SocketAddr, cookie: &str) -> Result<Endpoint> {
        Endpoint::new(address, APP_HOST, cookie, &self.ca.root_pem())
    }

    pub fn host(&self) -> &'static str {
        APP_HOST
    }
}

//! A platform with two running machines, and a browser's sessions with their owners: what the router is measured with.
//!
//! The machines are rows as registration leaves them. Behind one is nginx, behind the other a WebSocket that echoes;
//! what a host does with a request is measured elsewhere.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use reqwest::Certificate;
use sha2::{Digest, Sha256};

use super::peers::nginx::Pem;
use super::wire::Door;
use crate::ca::Ca;
use crate::fetch::target_dir;
use crate::idp::{Idp, MintOptions};
use crate::pg::{Durability, PgBinaries, PgOptions, PgServer};
use crate::provider::{Simulator, SimulatorOptions};
use crate::s3::S3Server;
use crate::story::platform::Platform;
use crate::story::program::Program;

const APP_HOST: &str = "app.svc-bench.test";
const CODE_HOST: &str = "code.svc-bench.test";
const BUCKET: &str = "svc-bench";
const PATIENCE: Duration = Duration::from_secs(20);

/// A self-signed identity, as a host makes it.
pub struct Identity {
    pub cert_pem: String,
    pub key_pem: String,
    pub pin: String,
}

impl Identity {
    pub fn fresh() -> Result<Self> {
        let key = KeyPair::generate()?;
        let params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])?;
        let cert = params.self_signed(&key)?;
        let pin = hex::encode(Sha256::digest(key.subject_public_key_info()));
        Ok(Self { cert_pem: cert.pem(), key_pem: key.serialize_pem(), pin })
    }
}

pub struct Site {
    pub ca: Ca,
    /// The front's certificate, for every router.
    pub front: Pem,
    program: Program,
    log: PathBuf,
    platform: Option<Platform>,
    database: PgServer,
    idp: Idp,
    _store: S3Server,
    _provider: Simulator,
}

impl Site {
    /// Starts everything but the platform.
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
        let front = Pem::write(dir, "front", &cert, &key)?;
        let mut env = store.env(BUCKET);
        env.extend(store.sts_env());
        env.extend(idp.env());
        let database_url = database.url("platform");
        let key = uuid::Uuid::new_v4().simple().to_string();
        let (cert, private) = (front.cert.display().to_string(), front.key.display().to_string());
        let (sign_in, base) = (format!("{}/sign-in", idp.issuer()), provider.base_url());
        let own = [
            ("PLATFORM_PUBLIC_URL", "http://127.0.0.1:1"),
            ("PLATFORM_SECRET", &key),
            ("PLATFORM_LISTEN", "127.0.0.1:0"),
            ("PLATFORM_DATABASE_URL", &database_url),
            ("PLATFORM_KEY", &key.repeat(2)),
            ("CUSTOMER_VPS_IMAGE_VERSION", "bench"),
            ("PROVIDER_API_URL", &base),
            ("PROVIDER_API_TOKEN", provider.token()),
            // The machines are rows alone, whose servers nobody should miss.
            ("RECONCILE_SECONDS", "86400"),
            ("APP_HOST", APP_HOST),
            // One user is the whole load here: counted as always, and never refused.
            ("ROUTER_USER_REQUESTS_PER_SECOND", "1000000"),
            ("CODE_HOST", CODE_HOST),
            ("IDP_SIGN_IN_URL", &sign_in),
            ("ROUTER_LISTEN", "127.0.0.1:0"),
            ("ROUTER_TLS_CERT_FILE", &cert),
            ("ROUTER_TLS_KEY_FILE", &private),
        ];
        env.extend(own.map(|(name, value)| (name.to_owned(), value.to_owned())));
        Ok(Self {
            ca,
            front,
            program: Program::new(svc, env),
            log: dir.join("platform.log"),
            platform: None,
            database,
            idp,
            _store: store,
            _provider: provider,
        })
    }

    /// Starts the platform, in the place of the one that runs; sessions and machines are in its database.
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

    fn running(&self) -> Result<&Platform> {
        self.platform.as_ref().context("the platform is not started")
    }

    pub fn pid(&self) -> Result<u32> {
        Ok(self.running()?.pid())
    }

    pub fn router(&self) -> Result<SocketAddr> {
        Ok(self.running()?.router)
    }

    /// Registers a running machine for a user, behind `address`.
    pub async fn machine(&self, user: &str, address: SocketAddr, identity: &Identity) -> Result<()> {
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
        client.batch_execute(&sql).await.context("register a machine")
    }

    /// Opens a user's session as a browser does, once the router knows the machine; gives its cookie.
    pub async fn session(&self, user: &str) -> Result<String> {
        let token = self.idp.mint(user, &MintOptions::default());
        let router = self.router()?;
        let client = reqwest::Client::builder()
            .tls_certs_only([Certificate::from_pem(self.ca.root_pem().as_bytes())?])
            .resolve(APP_HOST, router)
            .timeout(PATIENCE)
            .no_proxy()
            .build()?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let request = client.get(format!("https://{APP_HOST}:{}/_svc/slots", router.port()));
            let request =
                request.header("accept", "text/html").header("cookie", format!("__session={token}"));
            let slots = request.send().await?;
            let status = slots.status();
            if slots.text().await?.contains("primary") {
                break;
            }
            ensure!(Instant::now() < deadline, "the router does not learn of {user}'s machine ({status})");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let request = client.get(format!("https://{APP_HOST}:{}/", router.port()));
        let request = request.header("accept", "text/html").header("cookie", format!("__session={token}"));
        let answer = request.send().await?;
        for line in answer.headers().get_all("set-cookie") {
            let pair = line.to_str()?.split(';').next().unwrap_or_default();
            if pair.starts_with("__Host-svc_session=") {
                return Ok(pair.to_owned());
            }
        }
        bail!("no session was opened: {} {}", answer.status(), answer.text().await?)
    }

    /// A way to a front that has this site's certificate.
    pub fn door(&self, address: SocketAddr, cookie: &str) -> Result<Door> {
        Door::new(address, APP_HOST, cookie, &self.ca.root_pem())
    }

    pub fn host(&self) -> &'static str {
        APP_HOST
    }
}

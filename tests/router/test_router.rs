//! A router with its database and identity provider, and a client.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use http::{HeaderMap, StatusCode};
use kit::idp::{Idp, MintOptions};
use kit::pg::TestDatabase;
use reqwest::RequestBuilder;
use serde_json::Value;
use svc::config::Env;
use svc::http::proof::{Claims, ProofKeys, Signer};
use svc::http::server::ListenerLimits;
use svc::http::shards::Shards;
use svc::platform::config;
use svc::router::route_freshness::RouteFreshness;
use svc::router::signing_set::{AppKeys, SigningSet};
use svc::router::{RouterContext, UserDigests, start_router};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_postgres::{Client, NoTls};
use tokio_util::sync::CancellationToken;

use super::machine::TestMachine;

use crate::contract::{self, Exchange};

pub const APP_HOST: &str = "app.test";
pub const CODE_HOST: &str = "code.test";
/// Maximum time for the router to apply a change.
pub const ROUTE_UPDATE_TIMEOUT: Duration = Duration::from_secs(1);

/// A running router, with its identity provider and database.
pub struct TestRouter {
    pub idp: Arc<Idp>,
    pub database: Arc<TestDatabase>,
    pub sql: Client,
    pub addr: SocketAddr,
    pub keys: ProofKeys,
    pub signing: watch::Sender<Arc<SigningSet>>,
    /// Signs app tokens.
    pub app_signer: Arc<Signer>,
    settings: Vec<(String, String)>,
    client: reqwest::Client,
    stop: CancellationToken,
}

/// A complete response.
#[derive(Debug)]
pub struct RouterResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl RouterResponse {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// Returns the value of a cookie set by the response.
    pub fn cookie(&self, name: &str) -> Option<String> {
        let lines = self.headers.get_all("set-cookie").iter().filter_map(|line| line.to_str().ok());
        let mut pairs = lines.filter_map(|line| line.split(';').next()?.split_once('='));
        pairs.find(|(found, _)| *found == name).map(|(_, value)| value.to_owned())
    }

    pub fn location(&self) -> &str {
        self.headers.get("location").and_then(|to| to.to_str().ok()).unwrap_or_default()
    }
}

impl TestRouter {
    pub async fn start() -> Result<Self> {
        Self::start_with(&[], None).await
    }

    /// Starts a router with additional settings. If `database_proxy` is set, the router connects to the database
    /// through that address.
    pub async fn start_with(settings: &[(&str, &str)], database_proxy: Option<SocketAddr>) -> Result<Self> {
        svc::http::tls::install_provider();
        let idp = Arc::new(Idp::start()?);
        let db = Arc::new(database_with_schema().await?);
        let mut pairs = idp.env();
        let defaults = [
            ("APP_HOST", APP_HOST),
            ("CODE_HOST", CODE_HOST),
            ("IDP_SIGN_IN_URL", "https://idp.test/in?x=1"),
        ];
        pairs.extend(
            defaults.iter().chain(settings).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
        );
        let proof_signer = signer("k1");
        let public = ProofKeys { keys: vec![proof_signer.public_key()] };
        let (app_signer, app) = app_keys();
        let set = SigningSet { current: proof_signer, next: None, retired: Vec::new(), public, app };
        let (signing, _) = watch::channel(Arc::new(set));
        let mut config: tokio_postgres::Config = match database_proxy {
            None => db.url().parse()?,
            Some(addr) => {
                let mut url = url::Url::parse(&db.url())?;
                url.set_ip_host(addr.ip()).ok().context("cannot set the host of the database URL")?;
                url.set_port(Some(addr.port())).ok().context("cannot set the port of the database URL")?;
                url.as_str().parse()?
            }
        };
        config.connect_timeout(Duration::from_secs(2));
        Self::start_instance(idp, db, config, pairs, (signing, app_signer)).await
    }

    /// Starts a second router on the same database, in this process.
    pub async fn start_second_router(&self) -> Result<Self> {
        self.start_with_pairs(self.settings.clone()).await
    }

    /// Starts another router on the same database, with the given settings in place of all host settings.
    pub async fn start_router_with(&self, settings: &[(&str, &str)]) -> Result<Self> {
        let is_host_setting = |name: &str| name.starts_with("CUSTOMER_VPS_") || name == "HOST_DOMAIN";
        let mut pairs: Vec<_> =
            self.settings.iter().filter(|(name, _)| !is_host_setting(name)).cloned().collect();
        pairs.extend(settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self.start_with_pairs(pairs).await
    }

    async fn start_with_pairs(&self, settings: Vec<(String, String)>) -> Result<Self> {
        let (idp, db) = (Arc::clone(&self.idp), Arc::clone(&self.database));
        let config = db.url().parse()?;
        let signing = (self.signing.clone(), Arc::clone(&self.app_signer));
        Self::start_instance(idp, db, config, settings, signing).await
    }

    async fn start_instance(
        idp: Arc<Idp>,
        db: Arc<TestDatabase>,
        database: tokio_postgres::Config,
        settings: Vec<(String, String)>,
        (signing, app_signer): (watch::Sender<Arc<SigningSet>>, Arc<Signer>),
    ) -> Result<Self> {
        let mut env = Env::from_pairs(settings.iter().map(|(name, value)| (&**name, &**value)));
        let config = config::router::read(&mut env);
        let domain = env.optional(&svc::platform::vars::HOST_DOMAIN);
        let trust = config::host_trust::read(&mut env, domain);
        let (config, trust) = env.finish(config.zip(trust))?;
        let keys = signing.borrow().public.clone();
        let signing_keys = signing.subscribe();
        let user_digests = UserDigests::new(&vec![7; 32].into(), None);
        let stop = CancellationToken::new();
        let manager = deadpool_postgres::Manager::new(database.clone(), NoTls);
        let pool = deadpool_postgres::Pool::builder(manager).max_size(4).build()?;
        let freshness = Arc::new(RouteFreshness::new(config.max_staleness));
        let context = RouterContext {
            pool,
            database,
            config,
            trust,
            signing_keys,
            user_digests,
            freshness,
            stop: stop.clone(),
        };
        let router = start_router(context)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let limits = ListenerLimits { drain_timeout: Duration::ZERO, ..ListenerLimits::default() };
        tokio::spawn(router.serve(Shards::start()?, listener, None, limits, stop.clone()));
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .timeout(Duration::from_secs(60))
            .build()?;
        let sql = db.connect().await?;
        Ok(Self { idp, database: db, sql, addr, keys, signing, app_signer, settings, client, stop })
    }

    /// Starts a router and a running machine for `user`, and waits until the router routes to it.
    pub async fn start_with_machine(user: &str) -> Result<(Self, TestMachine)> {
        let router = Self::start().await?;
        let machine = TestMachine::start().await?;
        router.add_machine(&machine, user, "primary", "running").await?;
        router.wait_for_status(user, StatusCode::OK).await;
        Ok((router, machine))
    }

    /// Inserts the machine's row.
    pub async fn add_machine(
        &self,
        machine: &TestMachine,
        user: &str,
        slot: &str,
        status: &str,
    ) -> Result<()> {
        let sql = insert_machine_sql(machine, user, slot, status);
        Ok(self.sql.batch_execute(&sql).await?)
    }

    pub async fn set_status(&self, machine: &TestMachine, status: &str) -> Result<()> {
        let sql = format!("UPDATE user_machines SET status = '{status}' WHERE machine_id = '{}'", machine.id);
        Ok(self.sql.batch_execute(&sql).await?)
    }

    pub fn token(&self, user: &str) -> String {
        self.idp.mint(user, &MintOptions::default())
    }

    pub fn get(&self, host: &str, path: &str) -> RequestBuilder {
        self.client.get(format!("http://{}{path}", self.addr)).header("host", host)
    }

    pub fn request(&self, method: http::Method, host: &str, path: &str) -> RequestBuilder {
        self.client.request(method, format!("http://{}{path}", self.addr)).header("host", host)
    }

    pub fn post(&self, host: &str, path: &str) -> RequestBuilder {
        self.client.post(format!("http://{}{path}", self.addr)).header("host", host)
    }

    /// Sends a `GET` request with the user's token.
    pub async fn fetch(&self, user: &str, path: &str) -> RouterResponse {
        send(self.get(APP_HOST, path).bearer_auth(self.token(user))).await
    }

    /// Opens a session by loading a page with the provider's cookie. Returns the session cookie as `name=value`.
    pub async fn open_session(&self, host: &str, user: &str) -> String {
        let cookie = format!("__session={}", self.token(user));
        let response = send(self.get(host, "/").header("accept", "text/html").header("cookie", cookie)).await;
        let name = if host == APP_HOST { "svc_session" } else { "svc_code_session" };
        let value = response.cookie(name).unwrap_or_else(|| panic!("no session in {response:?}"));
        format!("{name}={value}")
    }

    /// Waits until the user's requests get the given status, for at most [`ROUTE_UPDATE_TIMEOUT`].
    pub async fn wait_for_status(&self, user: &str, status: StatusCode) {
        let (started, token) = (Instant::now(), self.token(user));
        loop {
            let response = send(self.get(APP_HOST, "/").bearer_auth(&token)).await;
            if response.status == status {
                return;
            }
            let elapsed = started.elapsed();
            assert!(elapsed < ROUTE_UPDATE_TIMEOUT, "not {status} after {elapsed:?}: {response:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Verifies the forwarded proof as the machine would, and returns its claims.
    pub fn verify_proof(&self, machine: &TestMachine, headers: &HeaderMap) -> Claims {
        let proofs: Vec<_> = headers.get_all("x-svc-proof").iter().collect();
        assert_eq!(proofs.len(), 1, "the request must carry exactly one proof");
        self.keys.verify(proofs[0].to_str().unwrap(), machine.id, jiff::Timestamp::now()).unwrap()
    }
}

impl Drop for TestRouter {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub fn signer(kid: &str) -> Arc<Signer> {
    Arc::new(Signer::from_pkcs8(kid, &Signer::generate_pkcs8().unwrap()).unwrap())
}

pub fn app_keys() -> (Arc<Signer>, AppKeys) {
    let signer = signer("app-k1");
    let public = ProofKeys { keys: vec![signer.public_key()] };
    (Arc::clone(&signer), AppKeys { current: signer, public })
}

/// Returns the statements that insert the machine's row.
pub fn insert_machine_sql(machine: &TestMachine, user: &str, slot: &str, status: &str) -> String {
    let handle = user.replace('_', "-");
    let TestMachine { id, pin, addr, .. } = machine;
    format!(
        "INSERT INTO handles VALUES ('{handle}', '{user}') ON CONFLICT DO NOTHING; \
         INSERT INTO user_machines (machine_id, idp_user_id, slot, handle, kind, status, epoch, restore_mode, \
         server_type, location, image_version, bundle_sha256, public_ipv4, https_port, tls_spki_sha256, \
         registration_token_hash, upgrade_token_hash) VALUES ('{id}', '{user}', '{slot}', '{handle}', 'customer', \
         '{status}', 1, 'empty', 'cpx22', 'nbg1', 'v1', 'x', '{ip}', {port}, '{pin}', 'x', 'x')",
        ip = machine.ip(),
        port = addr.port(),
    )
}

/// Sends a request and reads the whole response. Checks responses of built-in routes against the API contract.
pub async fn send(request: RequestBuilder) -> RouterResponse {
    let (client, request) = request.build_split();
    let request = request.expect("the request is valid");
    let (method, path) = (request.method().clone(), request.url().path().to_owned());
    let response = client.execute(request).await.expect("the router should respond");
    let (status, headers) = (response.status(), response.headers().clone());
    let body = response.text().await.expect("the body should be complete");
    if path.starts_with("/_svc") {
        contract::platform().check(&Exchange {
            method: &method,
            path: &path,
            request_body: None,
            status: status.as_u16(),
            headers: &headers,
            response_body: &body,
        });
    }
    RouterResponse { status, headers, body }
}

async fn database_with_schema() -> Result<TestDatabase> {
    kit::pg::test_database_from("platform", |url| async move {
        svc::platform::db::migrate::run(&url.parse()?).await?;
        Ok(())
    })
    .await
}

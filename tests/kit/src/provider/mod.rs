//! A simulator of the cloud provider: the Hetzner Cloud API v1 over HTTP on loopback.
//!
//! It keeps the API's rules (unique names, one action at a time, power and disk rules, rate limit, pages) and plays
//! scripted faults. What a server *is* beyond its record is chosen by [`SimulatorKind`].
//!
//! ```no_run
//! # async fn f() -> anyhow::Result<()> {
//! use kit::provider::{Fault, FaultRule, Simulator, SimulatorOptions};
//! let provider = Simulator::start(SimulatorOptions::record()).await?;
//! provider.fault(FaultRule::once("POST", "/servers", Fault::LostReplyAfterCommit));
//! // … drive the platform against provider.base_url() with provider.token() …
//! assert_eq!(provider.servers().len(), 1);
//! # Ok(()) }
//! ```

mod address;
mod api;
mod book;
mod catalog;
mod cloud;
mod control;
mod faults;
mod guest;
mod labels;
mod listener;
mod rate;
mod refusal;
mod view;
mod wire;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use self::address::Addresses;
use self::book::Book;
pub use self::book::{Creation, Power};
use self::cloud::Cloud;
use self::faults::Script;
pub use self::faults::{CallRecord, Fault, FaultRule};
use self::guest::Guests;
use self::rate::Bucket;
pub use self::rate::RateLimit;
pub use self::view::ServerView;

/// What a server is.
#[derive(Debug, Clone, Default)]
pub enum SimulatorKind {
    /// A record; nothing runs.
    #[default]
    Record,
}

/// How a simulator behaves.
#[derive(Debug, Clone)]
pub struct SimulatorOptions {
    pub kind: SimulatorKind,
    /// The API token; a random one unless given.
    pub token: Option<String>,
    /// How long an action runs before it takes effect.
    pub action_time: Duration,
    pub rate_limit: RateLimit,
    /// The project's quota.
    pub server_limit: usize,
}

impl SimulatorOptions {
    pub fn record() -> Self {
        Self {
            kind: SimulatorKind::Record,
            token: None,
            action_time: Duration::from_millis(20),
            rate_limit: RateLimit::default(),
            server_limit: 1000,
        }
    }
}

/// A running simulator; dropped, it is gone with all that ran in its servers.
pub struct Simulator {
    cloud: Arc<Cloud>,
    address: std::net::SocketAddr,
    https_port: u16,
    listener: JoinHandle<()>,
}

impl Simulator {
    pub async fn start(options: SimulatorOptions) -> Result<Self> {
        let addresses = Addresses::choose()?;
        let https_port = addresses.https_port();
        let guests = match options.kind {
            SimulatorKind::Record => Guests::None,
        };
        let cloud = Arc::new(Cloud {
            book: Mutex::new(Book::new(addresses, options.server_limit)),
            script: Mutex::new(Script::default()),
            bucket: Mutex::new(Bucket::new(options.rate_limit)),
            guests,
            token: options.token.unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string()),
            action_time: options.action_time,
        });
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.context("the simulator's listener")?;
        let address = listener.local_addr()?;
        let (api, control) = (api::routes(Arc::clone(&cloud)), control::routes(Arc::clone(&cloud)));
        let serve = listener::serve(listener, Arc::clone(&cloud), api, control);
        Ok(Self { cloud, address, https_port, listener: tokio::spawn(serve) })
    }

    /// `http://127.0.0.1:<port>/v1`, the adapter's base.
    pub fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// `http://127.0.0.1:<port>/_sim`, the control's base.
    pub fn control_url(&self) -> String {
        format!("http://{}/_sim", self.address)
    }

    pub fn token(&self) -> &str {
        &self.cloud.token
    }

    /// The port on which every host of this simulator shall serve HTTPS (`CUSTOMER_VPS_HTTPS_PORT`).
    pub fn https_port(&self) -> u16 {
        self.https_port
    }

    /// The servers that the provider has now, the oldest first.
    pub fn servers(&self) -> Vec<ServerView> {
        self.cloud.views()
    }

    pub fn server_by_name(&self, name: &str) -> Option<ServerView> {
        self.servers().into_iter().find(|server| server.name == name)
    }

    /// Every server that was ever made.
    pub fn creations(&self) -> Vec<Creation> {
        self.cloud.book().creations().to_vec()
    }

    /// Scripts a fault.
    pub fn fault(&self, rule: FaultRule) {
        self.cloud.script().add(rule);
    }

    pub fn clear_faults(&self) {
        self.cloud.script().clear();
    }

    /// Scripted faults that did not happen yet.
    pub fn pending_faults(&self) -> Vec<FaultRule> {
        self.cloud.script().pending()
    }

    /// Every API call so far.
    pub fn calls(&self) -> Vec<CallRecord> {
        self.cloud.script().calls().to_vec()
    }

    /// How many API calls of this method had this in their path.
    pub fn call_count(&self, method: &str, path_contains: &str) -> usize {
        let matches = |call: &&CallRecord| call.method == method && call.path.contains(path_contains);
        self.cloud.script().calls().iter().filter(matches).count()
    }

    /// The machine dies: every process of it is killed at once, and the provider shows it as off.
    pub async fn kill_server(&self, name: &str) -> Result<()> {
        self.cloud.kill(name).await
    }

    /// The machine dies and the provider knows nothing of it any more; its disk is kept.
    pub async fn vanish_server(&self, name: &str) -> Result<()> {
        self.cloud.vanish(name).await
    }

    /// Waits until the server shows this power state.
    pub async fn wait_for_power(&self, name: &str, power: Power) -> Result<ServerView> {
        for _ in 0..1500 {
            if let Some(server) = self.server_by_name(name).filter(|server| server.status == power) {
                return Ok(server);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("{name} is not {power:?} within 30 s: {:?}", self.server_by_name(name))
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

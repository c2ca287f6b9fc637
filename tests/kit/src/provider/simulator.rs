//! The simulator's public interface.

use std::path::PathBuf;
use std::process::Output;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::address::Addresses;
use super::cloud::Cloud;
use super::faults::{CallRecord, FaultRule, FaultScript};
use super::guest::Guests;
use super::host::{HostSettings, Hosts};
use super::inventory::{Creation, Inventory, Power};
use super::machines::{MachineSettings, Machines};
use super::rate::{RateLimit, TokenBucket};
use super::view::{HostView, ServerView};
use super::{api, control, listener};
use crate::vm::Machine;

/// The kind of guest behind the records of a simulator's servers.
#[derive(Debug, Clone)]
pub enum SimulatorKind {
    /// None: a server is only a record.
    Record,
    /// A host that consists of child processes.
    Process(HostSettings),
    /// A virtual machine.
    Machine(MachineSettings),
}

#[derive(Debug, Clone)]
pub struct SimulatorOptions {
    pub kind: SimulatorKind,
    /// The API token; random by default.
    pub token: Option<String>,
    /// Time between an action's start and its effect.
    pub action_duration: Duration,
    pub rate_limit: RateLimit,
    /// The project's server quota.
    pub server_limit: usize,
}

impl SimulatorOptions {
    pub fn record() -> Self {
        Self {
            kind: SimulatorKind::Record,
            token: None,
            action_duration: Duration::from_millis(20),
            rate_limit: RateLimit::default(),
            server_limit: 1000,
        }
    }

    pub fn process(settings: HostSettings) -> Self {
        Self { kind: SimulatorKind::Process(settings), ..Self::record() }
    }

    pub fn machine(settings: MachineSettings) -> Self {
        Self { kind: SimulatorKind::Machine(settings), ..Self::record() }
    }
}

/// A running simulator. Dropping it kills all of its guests.
pub struct Simulator {
    cloud: Arc<Cloud>,
    address: std::net::SocketAddr,
    https_port: u16,
    listener: JoinHandle<()>,
}

impl Simulator {
    pub async fn start(options: SimulatorOptions) -> Result<Self> {
        // Runs on the kit's own runtime, because a test may block its thread on a program that calls the simulator.
        crate::runtime::handle().spawn(Self::start_on_this_runtime(options)).await?
    }

    async fn start_on_this_runtime(options: SimulatorOptions) -> Result<Self> {
        let addresses = Addresses::in_random_network()?;
        let https_port = addresses.https_port();
        let guests = match options.kind {
            SimulatorKind::Record => Guests::RecordsOnly,
            SimulatorKind::Process(settings) => Guests::Processes(Hosts::new(settings, https_port)),
            SimulatorKind::Machine(settings) => Guests::Machines(Machines::new(settings, https_port)),
        };
        let cloud = Arc::new(Cloud {
            inventory: Mutex::new(Inventory::new(addresses, options.server_limit)),
            script: Mutex::new(FaultScript::default()),
            bucket: Mutex::new(TokenBucket::new(options.rate_limit)),
            guests,
            token: options.token.unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string()),
            action_duration: options.action_duration,
        });
        let listener = TcpListener::bind(("127.0.0.1", 0)).await;
        let listener = listener.context("cannot bind the simulator's listener")?;
        let address = listener.local_addr()?;
        let (api, control) = (api::routes(Arc::clone(&cloud)), control::routes(Arc::clone(&cloud)));
        let serve = listener::serve(listener, Arc::clone(&cloud), api, control);
        Ok(Self { cloud, address, https_port, listener: tokio::spawn(serve) })
    }

    /// Base URL of the API, `http://127.0.0.1:<port>/v1`.
    pub fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Base URL of the control API, `http://127.0.0.1:<port>/_sim`.
    pub fn control_url(&self) -> String {
        format!("http://{}/_sim", self.address)
    }

    pub fn token(&self) -> &str {
        &self.cloud.token
    }

    /// HTTPS port of all hosts in this simulator (`CUSTOMER_VPS_HTTPS_PORT`).
    pub fn https_port(&self) -> u16 {
        self.https_port
    }

    /// The provider's current servers, oldest first.
    pub fn servers(&self) -> Vec<ServerView> {
        self.cloud.server_views()
    }

    pub fn server_by_name(&self, name: &str) -> Option<ServerView> {
        self.servers().into_iter().find(|server| server.name == name)
    }

    /// All servers created so far, including those that have been deleted.
    pub fn creations(&self) -> Vec<Creation> {
        self.cloud.inventory().creations().to_vec()
    }

    pub fn add_fault(&self, rule: FaultRule) {
        self.cloud.script().add(rule);
    }

    pub fn clear_faults(&self) {
        self.cloud.script().clear();
    }

    /// Rules whose faults have not all occurred yet.
    pub fn pending_faults(&self) -> Vec<FaultRule> {
        self.cloud.script().pending()
    }

    /// All API calls so far.
    pub fn calls(&self) -> Vec<CallRecord> {
        self.cloud.script().calls().to_vec()
    }

    /// Number of API calls with this method whose path contains `path_contains`.
    pub fn call_count(&self, method: &str, path_contains: &str) -> usize {
        let matches = |call: &&CallRecord| call.method == method && call.path.contains(path_contains);
        self.cloud.script().calls().iter().filter(matches).count()
    }

    /// Cuts the power to a server. The provider reports it as off.
    pub async fn kill_server(&self, name: &str) -> Result<()> {
        self.cloud.kill_server(name).await
    }

    /// Cuts the power to a server, and removes it from the provider. The disk is kept.
    pub async fn lose_server(&self, name: &str) -> Result<()> {
        self.cloud.lose_server(name).await
    }

    /// Hides these servers from reads, while they keep running; an empty list makes all servers visible again.
    pub fn hide_servers(&self, names: &[String]) {
        self.cloud.inventory().hidden = names.iter().cloned().collect();
    }

    /// Sets server prices, as a percentage of the catalog's prices.
    pub fn set_price_percent(&self, percent: u32) {
        self.cloud.inventory().price_percent = percent;
    }

    /// Sets whether the server's operating system reacts to the power button, which it does by default.
    pub fn set_obeys_shutdown(&self, name: &str, obeys: bool) -> Result<()> {
        self.cloud.set_obeys_shutdown(name, obeys)
    }

    /// Powers on a server that is off.
    pub fn power_on(&self, name: &str) -> Result<()> {
        self.cloud.power_on(name)
    }

    /// Returns a server's virtual machine, even if the server has been deleted.
    pub fn machine(&self, name: &str) -> Result<Arc<Machine>> {
        self.cloud.guests.machine(name)
    }

    /// Waits up to 30 s for the server to reach this power state.
    pub async fn wait_for_power(&self, name: &str, power: Power) -> Result<ServerView> {
        for _ in 0..1500 {
            if let Some(server) = self.server_by_name(name).filter(|server| server.status == power) {
                return Ok(server);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("{name} did not become {power:?} within 30 s: {:?}", self.server_by_name(name))
    }
}

/// Operations on hosts that consist of processes; with any other kind of guest, each of them fails.
impl Simulator {
    /// All hosts, whether or not the provider lists them.
    pub fn hosts(&self) -> Result<Vec<HostView>> {
        self.cloud.host_views()
    }

    /// The directory that serves as the host's `/`.
    pub fn disk(&self, name: &str) -> Result<PathBuf> {
        Ok(self.cloud.guests.hosts()?.host(name)?.disk())
    }

    /// Returns the output of a unit's processes, and the init's messages.
    pub fn unit_log(&self, name: &str, unit: &str) -> Result<String> {
        let log = self.disk(name)?.join("var/log").join(format!("{unit}.log"));
        let bytes = std::fs::read(&log).with_context(|| log.display().to_string())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Waits until the host's init has finished: the gateway and the sync agent are ready, and the machine is
    /// registered. Fails if the boot fails, the host is off, or the timeout expires.
    pub async fn wait_until_booted(&self, name: &str, timeout: Duration) -> Result<()> {
        self.cloud.guests.hosts()?.host(name)?.wait_until_booted(timeout).await
    }

    /// Starts a lost or deleted server from its disk, at its old address, without listing it at the provider.
    pub fn start_from_disk(&self, name: &str) -> Result<()> {
        self.cloud.start_from_disk(name)
    }

    /// Cuts the power to a host that the provider does not list.
    pub async fn stop_unlisted(&self, name: &str) -> Result<()> {
        self.cloud.stop_unlisted(name).await
    }

    /// Runs a unit like `systemctl start`: a oneshot to completion, a service until it is ready.
    pub async fn run_unit(&self, name: &str, unit: &str, args: &[&str]) -> Result<Output> {
        self.run_unit_with(name, unit, args, &[]).await
    }

    /// Like [`Self::run_unit`], with extra environment variables, such as `FAILPOINTS`, for a oneshot.
    pub async fn run_unit_with(
        &self,
        name: &str,
        unit: &str,
        args: &[&str],
        env: &[(&str, &str)],
    ) -> Result<Output> {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        self.cloud.run_unit(name, unit, &args, &to_owned_env(env)).await
    }

    /// Stops a service like `systemctl stop`.
    pub async fn stop_service(&self, name: &str, service: &str) -> Result<()> {
        self.cloud.guests.hosts()?.host(name)?.stop_service(service).await
    }

    /// Starts only PostgreSQL on the disk of a host that is off; returns its database URL.
    pub async fn start_database_only(&self, name: &str) -> Result<String> {
        self.cloud.start_database_only(name).await
    }

    /// Sets extra environment variables, such as `FAILPOINTS`, for all processes of the host's next start only.
    pub fn set_next_start_env(&self, name: &str, env: &[(&str, &str)]) -> Result<()> {
        self.cloud.guests.hosts()?.host(name)?.set_next_start_env(to_owned_env(env));
        Ok(())
    }

    /// Like [`Self::set_next_start_env`], for the first start of the next server to be created.
    pub fn set_next_server_env(&self, env: &[(&str, &str)]) -> Result<()> {
        self.cloud.guests.hosts()?.set_next_server_env(to_owned_env(env));
        Ok(())
    }
}

impl Simulator {
    /// Cuts the power to all servers and waits until none of their processes is running.
    pub async fn stop(self) {
        match self.cloud.guests.hosts() {
            Ok(hosts) => hosts.stop().await,
            Err(_) => self.cloud.guests.kill_all(),
        }
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        self.listener.abort();
        self.cloud.guests.kill_all();
    }
}

fn to_owned_env(env: &[(&str, &str)]) -> Vec<(String, String)> {
    env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

//! A run's provider: in memory, or the kit's simulator behind the production adapter.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use jiff::Timestamp;
use kit::provider::{Fault, FaultRule, Power, RateLimit, Simulator, SimulatorOptions};
use svc::http::client::{self, Timeouts};
use svc::provider::Provider;
use svc::provider::hetzner::{CallLimits, Hetzner};

use super::memory_provider::{InMemoryProvider, MACHINE_LABEL, ServerCreation, SharedProvider};
use super::plan::{ProviderCall, ProviderFault};
use super::violation::BrokenRule;

pub enum RunProvider {
    InMemory(Arc<InMemoryProvider>),
    Http { simulator: Box<Simulator>, created: Mutex<Vec<ServerCreation>> },
}

impl RunProvider {
    pub fn in_memory(broken_rule: Option<BrokenRule>) -> Self {
        Self::InMemory(InMemoryProvider::new(broken_rule))
    }

    pub async fn over_http() -> Result<Self> {
        let rate_limit = RateLimit { limit: 3600, per_second: 100.0 };
        let options = SimulatorOptions { rate_limit, ..SimulatorOptions::record() };
        Ok(Self::Http { simulator: Box::new(Simulator::start(options).await?), created: Mutex::default() })
    }

    pub fn provider(&self) -> Arc<dyn Provider> {
        match self {
            Self::InMemory(provider) => Arc::new(SharedProvider(Arc::clone(provider))),
            Self::Http { simulator, .. } => {
                let client = client::build(Timeouts::CALL).expect("the client should be created");
                let base = simulator.base_url().parse().expect("the base URL is valid");
                let limits = CallLimits {
                    initial_backoff: Duration::from_millis(10),
                    max_backoff: Duration::from_millis(50),
                    max_rate_wait: Duration::from_millis(50),
                    ..CallLimits::default()
                };
                let token = simulator.token().to_owned().into();
                Arc::new(Hetzner::with_limits(client, base, &token, limits).expect("the token is valid"))
            }
        }
    }

    /// Returns the machines that currently have a server.
    pub fn machines_with_servers(&self) -> Vec<String> {
        match self {
            Self::InMemory(provider) => provider.machines_with_servers(),
            Self::Http { simulator, .. } => simulator
                .servers()
                .into_iter()
                .map(|server| server.labels.get(MACHINE_LABEL).cloned().unwrap_or_default())
                .collect(),
        }
    }

    /// Returns the machines whose servers are powered on.
    pub fn powered_on(&self) -> Vec<String> {
        match self {
            Self::InMemory(provider) => provider.powered_on(),
            Self::Http { simulator, .. } => {
                let running =
                    simulator.servers().into_iter().filter(|server| server.status == Power::Running);
                running.filter_map(|server| server.labels.get(MACHINE_LABEL).cloned()).collect()
            }
        }
    }

    /// Returns the created servers, oldest first. Over HTTP, a server that is created and deleted between two calls is
    /// missing.
    pub fn created_servers(&self) -> Vec<ServerCreation> {
        match self {
            Self::InMemory(provider) => provider.created_servers(),
            Self::Http { simulator, created } => {
                let mut created = created.lock().unwrap_or_else(PoisonError::into_inner);
                for server in simulator.servers() {
                    if !created.iter().any(|existing| existing.name == server.name) {
                        created.push(ServerCreation { name: server.name, user_data: server.user_data });
                    }
                }
                created.clone()
            }
        }
    }

    pub fn had_duplicate(&self) -> bool {
        match self {
            Self::InMemory(provider) => provider.had_duplicate(),
            Self::Http { simulator, .. } => {
                // A machine's second server is allowed only after the first has been deleted.
                let creations = simulator.creations();
                let mut last_ends: BTreeMap<String, Option<Timestamp>> = BTreeMap::new();
                creations.into_iter().any(|creation| {
                    let label = creation.labels.get(MACHINE_LABEL).cloned().unwrap_or_default();
                    let earlier = last_ends.insert(label, creation.ended);
                    earlier.is_some_and(|ended| ended.is_none_or(|ended| ended > creation.created))
                })
            }
        }
    }

    pub async fn lose_server(&self, name: &str) {
        match self {
            Self::InMemory(provider) => provider.lose_server(name),
            // The server may already have disappeared.
            Self::Http { simulator, .. } => drop(simulator.lose_server(name).await),
        }
    }

    pub fn add_fault(&self, call: ProviderCall, fault: ProviderFault, times: u8) {
        match self {
            Self::InMemory(provider) => provider.add_fault(call, fault, times),
            Self::Http { simulator, .. } => simulator.add_fault(fault_rule(call, fault, times)),
        }
    }

    pub fn clear_faults(&self) {
        match self {
            Self::InMemory(provider) => provider.clear_faults(),
            Self::Http { simulator, .. } => simulator.clear_faults(),
        }
    }
}

fn fault_rule(call: ProviderCall, fault: ProviderFault, times: u8) -> FaultRule {
    let (method, path) = match call {
        ProviderCall::Create => ("POST", "/v1/servers"),
        ProviderCall::Read => ("GET", "/v1/"),
        ProviderCall::Delete => ("DELETE", "/v1/servers"),
        ProviderCall::Action => ("POST", "/actions/"),
    };
    let status = |status, code: &str| Fault::Status { status, code: code.to_owned(), reset_in_seconds: None };
    let fault = match fault {
        ProviderFault::RateLimited => status(429, "rate_limit_exceeded"),
        ProviderFault::ServerError => status(503, "unavailable"),
        ProviderFault::LostResponse => Fault::LostReplyAfterCommit,
        // The simulator has no fault for a late call or a partial list, so over HTTP both become a lost request.
        ProviderFault::Late | ProviderFault::Partial => Fault::LostRequest,
        ProviderFault::Slow => Fault::SlowReply { ms: 200 },
        ProviderFault::Refused => status(422, "unsupported_error"),
        ProviderFault::ActionError => Fault::ActionError,
        ProviderFault::NoCapacity => status(412, "resource_unavailable"),
        ProviderFault::Locked => status(423, "locked"),
    };
    FaultRule::times(u32::from(times), method, path, fault)
}

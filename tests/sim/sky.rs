//! The provider of a run: at the port, or the kit's simulator behind the production adapter.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use kit::provider::{Fault, FaultRule, Power, RateLimit, Simulator, SimulatorOptions};
use svc::http::client::{self, Deadlines};
use svc::provider::Provider;
use svc::provider::hetzner::{CallLimits, Hetzner};

use super::cloud::{AtThePort, Cloud, Made};
use super::plan::{Call, CloudFault};
use super::violation::Broken;

pub enum Sky {
    Port(Arc<Cloud>),
    Wire { simulator: Box<Simulator>, made: Mutex<Vec<Made>> },
}

impl Sky {
    pub fn port(broken: Option<Broken>) -> Self {
        Self::Port(Cloud::new(broken))
    }

    pub async fn wire() -> Result<Self> {
        let rate_limit = RateLimit { limit: 3600, per_second: 100.0 };
        let options = SimulatorOptions { rate_limit, ..SimulatorOptions::record() };
        Ok(Self::Wire { simulator: Box::new(Simulator::start(options).await?), made: Mutex::default() })
    }

    pub fn provider(&self) -> Arc<dyn Provider> {
        match self {
            Self::Port(cloud) => Arc::new(AtThePort(Arc::clone(cloud))),
            Self::Wire { simulator, .. } => {
                let client = client::build(Deadlines::CALL).expect("a client");
                let base = simulator.base_url().parse().expect("a URL");
                let limits = CallLimits {
                    initial_backoff: Duration::from_millis(10),
                    max_backoff: Duration::from_millis(50),
                    max_rate_wait: Duration::from_millis(50),
                    ..CallLimits::default()
                };
                let token = simulator.token().to_owned().into();
                Arc::new(Hetzner::with_limits(client, base, &token, limits).expect("a token"))
            }
        }
    }

    /// Machines that have a server now.
    pub fn live(&self) -> Vec<String> {
        match self {
            Self::Port(cloud) => cloud.live(),
            Self::Wire { simulator, .. } => simulator
                .servers()
                .into_iter()
                .map(|server| server.labels.get("svc-machine").cloned().unwrap_or_default())
                .collect(),
        }
    }

    /// Of those, the ones whose servers are switched on.
    pub fn on(&self) -> Vec<String> {
        match self {
            Self::Port(cloud) => cloud.on(),
            Self::Wire { simulator, .. } => {
                let on = simulator.servers().into_iter().filter(|server| server.status == Power::Running);
                on.filter_map(|server| server.labels.get("svc-machine").cloned()).collect()
            }
        }
    }

    /// Servers that were made, the oldest first; at the wire, those that were there at one of these looks.
    pub fn made(&self) -> Vec<Made> {
        match self {
            Self::Port(cloud) => cloud.made(),
            Self::Wire { simulator, made } => {
                let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
                for server in simulator.servers() {
                    if !made.iter().any(|known| known.name == server.name) {
                        made.push(Made { name: server.name, user_data: server.user_data });
                    }
                }
                made.clone()
            }
        }
    }

    pub fn had_doubles(&self) -> bool {
        match self {
            Self::Port(cloud) => cloud.had_doubles(),
            Self::Wire { simulator, .. } => {
                // A second server of a name can only come after the end of the first.
                let mut open = BTreeSet::new();
                simulator.creations().into_iter().any(|it| it.ended.is_none() && !open.insert(it.name))
            }
        }
    }

    pub async fn vanish(&self, name: &str) {
        match self {
            Self::Port(cloud) => cloud.vanish(name),
            // Gone already is as good.
            Self::Wire { simulator, .. } => drop(simulator.vanish_server(name).await),
        }
    }

    pub fn fault(&self, call: Call, fault: CloudFault, times: u8) {
        match self {
            Self::Port(cloud) => cloud.fault(call, fault, times),
            Self::Wire { simulator, .. } => simulator.fault(rule(call, fault, times)),
        }
    }

    pub fn heal(&self) {
        match self {
            Self::Port(cloud) => cloud.heal(),
            Self::Wire { simulator, .. } => simulator.clear_faults(),
        }
    }
}

fn rule(call: Call, fault: CloudFault, times: u8) -> FaultRule {
    let (method, path) = match call {
        Call::Create => ("POST", "/v1/servers"),
        Call::Look => ("GET", "/v1/"),
        Call::Delete => ("DELETE", "/v1/servers"),
        Call::Act => ("POST", "/actions/"),
    };
    let status = |status, code: &str| Fault::Status { status, code: code.to_owned(), reset_in_seconds: None };
    let fault = match fault {
        CloudFault::RateLimited => status(429, "rate_limit_exceeded"),
        CloudFault::ServerError => status(503, "unavailable"),
        CloudFault::LostReply => Fault::LostReplyAfterCommit,
        CloudFault::Late => Fault::LostRequest,
        CloudFault::Slow => Fault::SlowReply { ms: 200 },
        CloudFault::Refused => status(422, "unsupported_error"),
        CloudFault::ActionError => Fault::ActionError,
        // The kit's provider lists the truth: over HTTP, a lost request takes its place.
        CloudFault::Partial => Fault::LostRequest,
        CloudFault::NoCapacity => status(412, "resource_unavailable"),
        CloudFault::Locked => status(423, "locked"),
    };
    FaultRule::times(u32::from(times), method, path, fault)
}

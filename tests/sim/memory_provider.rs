//! Simulates the provider in memory: its state, its rules, and a plan's faults.
//!
//! It replaces the adapter and the kit's simulator in most runs, because an HTTP exchange in a dev build costs as much
//! as a whole step; with `Backends::Http`, plans run through both.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use secrecy::ExposeSecret;
use svc::machine::name::{Location, ServerType};
use svc::provider::{
    Action, ActionId, ActionStatus, Amount, Cause, CreatedServer, DeleteOutcome, ErrorKind, Provider,
    ProviderError, Server, ServerId, ServerOrder, ServerPrices, ServerStatus, ServerTypeInfo,
};

use super::plan::{ProviderCall, ProviderFault};
use super::violation::BrokenRule;

const ACTION_DURATION: Duration = Duration::from_millis(15);
const LATE_DELAY: Duration = Duration::from_millis(120);
const SLOW_DELAY: Duration = Duration::from_millis(200);
pub const MACHINE_LABEL: &str = "svc-machine";
const LOCATIONS: [&str; 3] = ["nbg1", "hel1", "fsn1"];
const SERVER_TYPE_DISKS_GB: [(&str, u32); 4] = [("cpx12", 40), ("cpx22", 80), ("cpx32", 160), ("cpx52", 480)];

/// A server that was created, and its user-data, from which a host is built.
#[derive(Debug, Clone)]
pub struct ServerCreation {
    pub name: String,
    pub user_data: String,
}

pub struct InMemoryProvider {
    state: Mutex<ProviderState>,
    broken_rule: Option<BrokenRule>,
}

#[derive(Default)]
struct ProviderState {
    last_id: i64,
    servers: BTreeMap<i64, Server>,
    actions: BTreeMap<i64, PendingAction>,
    created: Vec<ServerCreation>,
    faults: Vec<(ProviderCall, ProviderFault, u8)>,
    had_duplicate: bool,
}

struct PendingAction {
    action: Action,
    server: i64,
    ends_at: Instant,
    effect: Effect,
    should_fail: bool,
}

#[derive(Debug, Clone)]
enum Effect {
    Power(ServerStatus),
    Type(ServerType),
}

impl InMemoryProvider {
    pub fn new(broken_rule: Option<BrokenRule>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), broken_rule })
    }

    pub fn add_fault(&self, call: ProviderCall, fault: ProviderFault, times: u8) {
        self.state().faults.push((call, fault, times));
    }

    pub fn clear_faults(&self) {
        self.state().faults.clear();
    }

    /// Returns the machines that currently have a server, from the servers' labels.
    pub fn machines_with_servers(&self) -> Vec<String> {
        let machine = |server: &Server| server.labels.get(MACHINE_LABEL).cloned().unwrap_or_default();
        self.state().servers.values().map(machine).collect()
    }

    /// Returns the machines whose servers are powered on.
    pub fn powered_on(&self) -> Vec<String> {
        let state = self.state();
        let running = state.servers.values().filter(|server| server.status == ServerStatus::Running);
        running.filter_map(|server| server.labels.get(MACHINE_LABEL).cloned()).collect()
    }

    /// Returns every server ever created, oldest first.
    pub fn created_servers(&self) -> Vec<ServerCreation> {
        self.state().created.clone()
    }

    /// Returns whether a machine ever had two servers at once.
    pub fn had_duplicate(&self) -> bool {
        self.state().had_duplicate
    }

    /// Removes a server without a request.
    pub fn lose_server(&self, name: &str) {
        self.state().servers.retain(|_, server| server.name != name);
    }

    fn state(&self) -> MutexGuard<'_, ProviderState> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.apply_due_actions();
        state
    }

    /// Returns the next fault for this kind of call, and counts it as used.
    fn take_fault(&self, call: ProviderCall) -> Option<ProviderFault> {
        let mut state = self.state();
        // A duplicate name needs a retry after a lost response, which few plans contain.
        if self.broken_rule == Some(BrokenRule::ProviderAcceptsDuplicateNames)
            && call == ProviderCall::Create
            && state.last_id % 2 == 0
        {
            return Some(ProviderFault::LostResponse);
        }
        let index = state.faults.iter().position(|(fault_call, _, _)| *fault_call == call)?;
        let fault = state.faults[index].1;
        state.faults[index].2 -= 1;
        if state.faults[index].2 == 0 {
            state.faults.remove(index);
        }
        Some(fault)
    }

    /// Returns whether the next list of servers will be incomplete.
    fn is_next_list_incomplete(&self) -> bool {
        let next = |state: &ProviderState| {
            state.faults.iter().find(|(call, _, _)| *call == ProviderCall::Read).map(|(_, fault, _)| *fault)
        };
        next(&self.state()) == Some(ProviderFault::Partial)
    }

    fn add_server(&self, order: &ServerOrder) -> Result<Server, ProviderError> {
        let must_be_unique = self.broken_rule != Some(BrokenRule::ProviderAcceptsDuplicateNames);
        let mut state = self.state();
        if must_be_unique && state.servers.values().any(|server| server.name == order.name) {
            return Err(failure("create server", ErrorKind::Conflict, 409, "uniqueness_error"));
        }
        state.last_id += 1;
        let id = state.last_id;
        let server = Server {
            id: ServerId(id),
            name: order.name.clone(),
            status: ServerStatus::Running,
            public_ipv4: Some(Ipv4Addr::new(127, 201, (id / 250) as u8, (id % 250 + 1) as u8)),
            server_type: order.server_type.clone(),
            disk_gb: disk_size_gb(&order.server_type).unwrap_or(80),
            labels: order.labels.clone(),
            is_locked: false,
        };
        state.created.push(ServerCreation {
            name: order.name.clone(),
            user_data: order.user_data.expose_secret().to_owned(),
        });
        let label = |server: &Server| server.labels.get(MACHINE_LABEL).cloned();
        state.had_duplicate |= state.servers.values().any(|other| label(other) == label(&server));
        state.servers.insert(id, server.clone());
        Ok(server)
    }

    fn create(&self, order: &ServerOrder) -> Result<CreatedServer, ProviderError> {
        Ok(CreatedServer { server: self.add_server(order)?, actions: Vec::new() })
    }

    async fn call_read<T>(
        &self,
        call: &'static str,
        read: impl FnOnce(&ProviderState) -> T,
    ) -> Result<T, ProviderError> {
        match self.take_fault(ProviderCall::Read) {
            Some(ProviderFault::RateLimited) => {
                Err(failure(call, ErrorKind::Transient, 429, "rate_limit_exceeded"))
            }
            Some(ProviderFault::ServerError) => Err(failure(call, ErrorKind::Transient, 503, "")),
            Some(ProviderFault::Slow) => {
                tokio::time::sleep(SLOW_DELAY).await;
                Ok(read(&self.state()))
            }
            _ => Ok(read(&self.state())),
        }
    }

    async fn start_action(
        &self,
        call: &'static str,
        id: ServerId,
        effect: Effect,
    ) -> Result<Action, ProviderError> {
        let unclear_outcome =
            if matches!(effect, Effect::Type(_)) { ErrorKind::Ambiguous } else { ErrorKind::Transient };
        let fault = self.take_fault(ProviderCall::Action);
        match fault {
            Some(ProviderFault::RateLimited) => {
                return Err(failure(call, ErrorKind::Transient, 429, "rate_limit_exceeded"));
            }
            Some(ProviderFault::ServerError) => return Err(failure(call, unclear_outcome, 503, "")),
            Some(ProviderFault::Refused) => {
                return Err(failure(call, ErrorKind::Refused, 422, "unsupported_error"));
            }
            _ => {}
        }
        let started = self.state().begin_action(call, id, effect, fault == Some(ProviderFault::ActionError));
        match fault {
            Some(ProviderFault::Slow) => {
                tokio::time::sleep(SLOW_DELAY).await;
                started
            }
            Some(ProviderFault::LostResponse) => Err(failure(call, unclear_outcome, 504, "")),
            _ => started,
        }
    }
}

impl ProviderState {
    fn apply_due_actions(&mut self) {
        let now = Instant::now();
        let Self { servers, actions, .. } = self;
        for pending in actions.values_mut().filter(|pending| pending.ends_at <= now) {
            if pending.action.status != ActionStatus::Running {
                continue;
            }
            let Some(server) = servers.get_mut(&pending.server).filter(|_| !pending.should_fail) else {
                let (code, message) = ("action_failed".to_owned(), "Action failed".to_owned());
                pending.action.status = ActionStatus::Error { code, message };
                continue;
            };
            match &pending.effect {
                Effect::Power(status) => server.status = *status,
                Effect::Type(to) => server.server_type = to.clone(),
            }
            pending.action.status = ActionStatus::Success;
        }
        let is_busy = |id: i64| {
            let mut running =
                actions.values().filter(|pending| pending.action.status == ActionStatus::Running);
            running.any(|pending| pending.server == id)
        };
        for (id, server) in servers {
            server.is_locked = is_busy(*id);
        }
    }

    fn begin_action(
        &mut self,
        call: &'static str,
        id: ServerId,
        effect: Effect,
        should_fail: bool,
    ) -> Result<Action, ProviderError> {
        let Some(server) = self.servers.get(&id.0) else {
            return Err(failure(call, ErrorKind::NotFound, 404, "not_found"));
        };
        if server.is_locked {
            return Err(failure(call, ErrorKind::Transient, 423, "locked"));
        }
        if let Effect::Type(to) = &effect {
            let refused = |code| Err(failure(call, ErrorKind::Refused, 422, code));
            if server.status != ServerStatus::Off {
                return refused("server_not_stopped");
            }
            if server.server_type == *to || disk_size_gb(to).is_none_or(|disk| disk < server.disk_gb) {
                return refused("invalid_server_type");
            }
        }
        self.last_id += 1;
        let action =
            Action { id: ActionId(self.last_id), command: call.to_owned(), status: ActionStatus::Running };
        let pending = PendingAction {
            action: action.clone(),
            server: id.0,
            ends_at: Instant::now() + ACTION_DURATION,
            effect,
            should_fail,
        };
        self.actions.insert(self.last_id, pending);
        Ok(action)
    }
}

fn disk_size_gb(server_type: &ServerType) -> Option<u32> {
    SERVER_TYPE_DISKS_GB.iter().find(|(name, _)| *name == server_type.as_str()).map(|(_, disk)| *disk)
}

fn failure(call: &'static str, kind: ErrorKind, status: u16, code: &str) -> ProviderError {
    let cause = Cause::Response { status, code: code.to_owned(), message: "a planned fault".to_owned() };
    ProviderError::new(call, kind, cause)
}

/// The provider shared by all processes in a run.
pub struct SharedProvider(pub Arc<InMemoryProvider>);

#[async_trait]
impl Provider for SharedProvider {
    async fn create(&self, order: &ServerOrder) -> Result<CreatedServer, ProviderError> {
        const CALL: &str = "create server";
        match self.0.take_fault(ProviderCall::Create) {
            Some(ProviderFault::RateLimited) => {
                Err(failure(CALL, ErrorKind::Transient, 429, "rate_limit_exceeded"))
            }
            Some(ProviderFault::ServerError) => Err(failure(CALL, ErrorKind::Ambiguous, 503, "")),
            Some(ProviderFault::Refused) => Err(failure(CALL, ErrorKind::Refused, 422, "unsupported_error")),
            Some(ProviderFault::NoCapacity) => {
                Err(failure(CALL, ErrorKind::Account, 412, "resource_unavailable"))
            }
            Some(ProviderFault::LostResponse) => {
                let _ = self.0.add_server(order);
                Err(failure(CALL, ErrorKind::Ambiguous, 504, ""))
            }
            Some(ProviderFault::Late) => {
                let (provider, order) = (Arc::clone(&self.0), order.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(LATE_DELAY).await;
                    // Fails if another order has already taken the name.
                    let _ = provider.add_server(&order);
                });
                Err(failure(CALL, ErrorKind::Ambiguous, 504, ""))
            }
            Some(ProviderFault::Slow) => {
                let created = self.0.create(order);
                tokio::time::sleep(SLOW_DELAY).await;
                created
            }
            Some(ProviderFault::ActionError | ProviderFault::Partial | ProviderFault::Locked) | None => {
                self.0.create(order)
            }
        }
    }

    async fn find(&self, name: &str) -> Result<Option<Server>, ProviderError> {
        let finds_nothing = matches!(
            self.0.broken_rule,
            Some(BrokenRule::ProviderAcceptsDuplicateNames | BrokenRule::ProviderDeletesNothing)
        );
        let has_name = |server: &&Server| server.name == name && !finds_nothing;
        self.0.call_read("find server", |state| state.servers.values().find(has_name).cloned()).await
    }

    async fn list_by_label(&self, selector: &str) -> Result<Vec<Server>, ProviderError> {
        let (label, value) = selector.split_once('=').map_or((selector, None), |(l, v)| (l, Some(v)));
        let finds_nothing = matches!(
            self.0.broken_rule,
            Some(BrokenRule::ProviderAcceptsDuplicateNames | BrokenRule::ProviderDeletesNothing)
        );
        let matches_selector = |server: &&Server| {
            let actual = server.labels.get(label);
            !finds_nothing && actual.is_some_and(|actual| value.is_none_or(|value| value == actual))
        };
        let is_incomplete = self.0.is_next_list_incomplete();
        let is_listed = |(nth, _): &(usize, Server)| !is_incomplete || nth % 2 == 1;
        let all: Vec<Server> = self
            .0
            .call_read("list servers", |state| {
                state.servers.values().filter(matches_selector).cloned().collect()
            })
            .await?;
        Ok(all.into_iter().enumerate().filter(is_listed).map(|(_, server)| server).collect())
    }

    async fn get(&self, id: ServerId) -> Result<Option<Server>, ProviderError> {
        self.0.call_read("get server", |state| state.servers.get(&id.0).cloned()).await
    }

    async fn delete(&self, id: ServerId) -> Result<DeleteOutcome, ProviderError> {
        const CALL: &str = "delete server";
        let fault = self.0.take_fault(ProviderCall::Delete);
        match fault {
            Some(ProviderFault::RateLimited) => {
                return Err(failure(CALL, ErrorKind::Transient, 429, "rate_limit_exceeded"));
            }
            Some(ProviderFault::ServerError) => return Err(failure(CALL, ErrorKind::Transient, 503, "")),
            Some(ProviderFault::Locked) => return Err(failure(CALL, ErrorKind::Transient, 423, "locked")),
            _ => {}
        }
        if self.0.broken_rule == Some(BrokenRule::ProviderDeletesNothing) {
            return Ok(DeleteOutcome::Done);
        }
        let existed = {
            let mut state = self.0.state();
            if state.servers.get(&id.0).is_some_and(|server| server.is_locked) {
                return Err(failure(CALL, ErrorKind::Transient, 423, "locked"));
            }
            state.servers.remove(&id.0).is_some()
        };
        match fault {
            Some(ProviderFault::LostResponse) => return Err(failure(CALL, ErrorKind::Transient, 504, "")),
            Some(ProviderFault::Slow) => tokio::time::sleep(SLOW_DELAY).await,
            _ => {}
        }
        Ok(if existed { DeleteOutcome::Done } else { DeleteOutcome::WasAbsent })
    }

    async fn get_action(&self, id: ActionId) -> Result<Action, ProviderError> {
        let find = |state: &ProviderState| state.actions.get(&id.0).map(|pending| pending.action.clone());
        let action = self.0.call_read("get action", find).await?;
        action.ok_or_else(|| failure("get action", ErrorKind::NotFound, 404, "not_found"))
    }

    async fn power_on(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.0.start_action("poweron", id, Effect::Power(ServerStatus::Running)).await
    }

    async fn power_off(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.0.start_action("poweroff", id, Effect::Power(ServerStatus::Off)).await
    }

    async fn shutdown(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.0.start_action("shutdown", id, Effect::Power(ServerStatus::Off)).await
    }

    async fn reboot(&self, id: ServerId) -> Result<Action, ProviderError> {
        self.0.start_action("reboot", id, Effect::Power(ServerStatus::Running)).await
    }

    async fn change_type(&self, id: ServerId, to: &ServerType) -> Result<Action, ProviderError> {
        self.0.start_action("change_type", id, Effect::Type(to.clone())).await
    }

    async fn has_location(&self, _: &Location) -> Result<bool, ProviderError> {
        Ok(true)
    }

    async fn get_server_type(&self, name: &ServerType) -> Result<Option<ServerTypeInfo>, ProviderError> {
        let info = |disk_gb| ServerTypeInfo { name: name.clone(), cores: 2, memory_gb: 4.0, disk_gb };
        self.0.call_read("get server type", |_| disk_size_gb(name).map(info)).await
    }

    async fn get_prices(&self, _: &ServerType) -> Result<ServerPrices, ProviderError> {
        let amount = |net_micros| Amount { net_micros, gross_micros: net_micros };
        let in_every_location = |price| LOCATIONS.map(|name| (name.to_owned(), amount(price))).into();
        let prices = || ServerPrices {
            currency: "EUR".to_owned(),
            servers: in_every_location(8_000_000),
            public_ipv4: in_every_location(500_000),
        };
        self.0.call_read("get prices", |_| prices()).await
    }

    async fn count_servers(&self) -> Result<u64, ProviderError> {
        self.0.call_read("count servers", |state| state.servers.len() as u64).await
    }
}

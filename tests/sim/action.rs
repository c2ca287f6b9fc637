//! Applies a plan's actions to a run.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use secrecy::SecretString;
use serde_json::{Value, json};

use super::check::has_leftovers;
use super::database_state::{DatabaseState, MachineRow, OperationRow};
use super::host::Host;
use super::ledger::{Ledger, RequestRecord};
use super::plan::{Action, PROCESSES, SLOTS, Step};
use super::process::{ApiResponse, Process, SECRET, build_request};
use super::simulation::Simulation;

/// A request that can be sent to any process.
#[derive(Debug, Clone)]
struct PlannedRequest {
    operation: &'static str,
    method: &'static str,
    path: String,
    token: SecretString,
    body: Option<Value>,
    key: Option<String>,
    accepted_loss: AcceptedLoss,
}

/// The data that an operator agrees to lose by sending a request.
#[derive(Debug, Clone)]
enum AcceptedLoss {
    None,
    Slot(String),
    Machine(String),
}

impl PlannedRequest {
    fn with_accepted_loss(self, accept_loss: bool, accepted_loss: AcceptedLoss) -> Self {
        if accept_loss { Self { accepted_loss, ..self } } else { self }
    }
}

impl Simulation<'_> {
    /// Performs one step. If it sends a request, waits for all background tasks, for at most the step's `wait_ms`.
    pub async fn perform_step(&mut self, step: &Step) -> Result<()> {
        match &step.action {
            Action::BackUp { host, stops_after } => {
                if let Some(host) = self.host(*host) {
                    let (store, ledger, rows) =
                        (Arc::clone(&self.store), self.ledger.clone(), self.rows.clone());
                    let (stops_after, broken_rule) = (*stops_after, self.broken_rule);
                    self.counts.started_backups += 1;
                    self.tasks.spawn(async move {
                        let server = host.server.clone();
                        let end = host.back_up(store, rows, stops_after, broken_rule).await;
                        ledger.log(format!("backup of {server}: {end}"));
                    });
                    tokio::time::sleep(Duration::from_millis(step.wait_ms.min(60))).await;
                }
            }
            Action::LoseServer { host } => {
                if let Some(host) = self.host(*host) {
                    self.provider.lose_server(&host.server).await;
                    self.rows.record_lost_disk(&host.machine);
                }
            }
            Action::FailProvider { call, fault, times } => self.provider.add_fault(*call, *fault, *times),
            Action::FailStore { is_write, fault, times } => self.store.add_fault(*is_write, *fault, *times),
            Action::BreakPointer { slot, is_lost } => {
                let (user, slot) = SLOTS[*slot];
                self.store.break_pointer(&format!("{user}/{slot}"), *is_lost).await;
            }
            Action::Write { host } => {
                if let Some(host) = self.host(*host) {
                    self.write_row(&host).await?;
                }
            }
            Action::CutDatabaseConnections => self.database.cut_connections().await?,
            Action::SaveDatabase => self.database.save().await?,
            Action::RestoreDatabase => self.restore_database().await?,
            Action::Crash { process } => {
                self.counts.planned_crashes += 1;
                self.processes[*process].switch.kill();
            }
            Action::CrashAt { process, kill_point, calls_to_skip } => {
                self.counts.planned_crashes += 1;
                self.processes[*process].switch.arm(*kill_point, *calls_to_skip);
            }
            Action::Stop { process } => {
                let process = Arc::clone(&self.processes[*process]);
                self.tasks.spawn(async move { process.stop().await });
            }
            Action::Start { process } => {
                if !self.processes[*process].is_alive() {
                    self.start_process(*process);
                }
            }
            Action::AdvanceTime { seconds, expire_leases } => {
                self.database.advance_time(*seconds, *expire_leases).await?;
            }
            Action::WaitForOperations => self.wait_for_operations().await?,
            _ => {
                if let Action::Register { host, .. } = &step.action
                    && let Some(host) = self.host(*host)
                    && !self.boot(&host).await
                {
                    return Ok(());
                }
                if let Some(planned) = self.plan_request(step) {
                    self.send_planned(planned, step).await;
                }
            }
        }
        Ok(())
    }

    /// Returns the host of the n-th server, counted from the newest.
    fn host(&mut self, nth: usize) -> Option<Host> {
        let hosts = self.hosts();
        (!hosts.is_empty()).then(|| hosts[hosts.len() - 1 - nth % hosts.len()].clone())
    }

    /// Boots the host, which restores its slot's data before it registers. Returns whether it succeeded.
    async fn boot(&self, host: &Host) -> bool {
        let booted = host.boot(&self.store, &self.rows).await;
        if !matches!(booted, Ok(true)) {
            self.ledger.log(format!("{} did not boot: {booted:?}", host.server));
        }
        booted.unwrap_or(false)
    }

    /// Writes a row as if through the router. The machine must be running and its server powered on, both when the row
    /// is written and when it is acknowledged.
    async fn write_row(&self, host: &Host) -> Result<()> {
        if !self.is_serving(&host.machine).await? {
            return Ok(());
        }
        let Some(row) = self.rows.write(&host.machine) else { return Ok(()) };
        if self.is_serving(&host.machine).await? {
            self.ledger.log(format!("{} has row {row}", host.server));
        } else {
            self.rows.remove_unacknowledged(row);
        }
        Ok(())
    }

    async fn is_serving(&self, machine: &str) -> Result<bool> {
        let database_state = DatabaseState::read(&self.database.client).await?;
        Ok(database_state.machine(machine).is_some_and(MachineRow::is_running)
            && self.provider.powered_on().iter().any(|powered_on| powered_on == machine))
    }

    /// Returns the id of the n-th machine, counted from the newest.
    fn machine(&self, nth: usize) -> Option<String> {
        let machines = self.ledger.machines();
        (!machines.is_empty()).then(|| machines[machines.len() - 1 - nth % machines.len()].clone())
    }

    fn plan_request(&mut self, step: &Step) -> Option<PlannedRequest> {
        let operator_request = |operation, method, path: String, body: Option<Value>| {
            // The key contains the request, so it is never reused with a different one.
            let key =
                step.key.map(|key| format!("{operation} {path} {} {key}", body.clone().unwrap_or_default()));
            PlannedRequest {
                operation,
                method,
                path,
                token: SECRET.to_owned().into(),
                body,
                key,
                accepted_loss: AcceptedLoss::None,
            }
        };
        let host_request = |operation, path: String, token: &str, body: Value| PlannedRequest {
            operation,
            method: "POST",
            path,
            token: token.to_owned().into(),
            body: Some(body),
            key: None,
            accepted_loss: AcceptedLoss::None,
        };
        Some(match &step.action {
            Action::Subscribe { slot } => {
                let (user, slot) = SLOTS[*slot];
                let body = json!({"idpUserId": user, "slot": slot, "plan": "max", "status": "active"});
                operator_request("subscribe", "PUT", "/vps/slots".to_owned(), Some(body))
            }
            Action::Provision { slot, accept_loss } => {
                let (user, slot) = SLOTS[*slot];
                let handle = user.replace('_', "-");
                let body = json!({"idpUserId": user, "slot": slot, "handle": handle, "acceptLoss": accept_loss,
                    "allowEmpty": accept_loss});
                let planned = operator_request("provision", "POST", "/vps/provision".to_owned(), Some(body));
                planned.with_accepted_loss(*accept_loss, AcceptedLoss::Slot(format!("{user}/{slot}")))
            }
            Action::Recover { slot, allow_empty, accept_loss } => {
                let (user, slot) = SLOTS[*slot];
                let body = json!({"idpUserId": user, "slot": slot, "allowEmpty": allow_empty,
                    "acceptLoss": accept_loss});
                let planned = operator_request("recover", "POST", "/vps/recover".to_owned(), Some(body));
                planned.with_accepted_loss(*accept_loss, AcceptedLoss::Slot(format!("{user}/{slot}")))
            }
            Action::Resize { machine, to } => {
                let path = format!("/vps/{}/resize", self.machine(*machine)?);
                operator_request("resize", "POST", path, Some(json!({"serverType": to})))
            }
            Action::Fail { machine } => {
                let path = format!("/vps/{}/fail", self.machine(*machine)?);
                operator_request("fail", "POST", path, Some(json!({"reason": "chosen by the plan"})))
            }
            Action::Delete { machine, accept_loss } => {
                let machine = self.machine(*machine)?;
                let planned = operator_request(
                    "delete",
                    "DELETE",
                    format!("/vps/{machine}?acceptLoss={accept_loss}"),
                    None,
                );
                planned.with_accepted_loss(*accept_loss, AcceptedLoss::Machine(machine))
            }
            Action::Undelete { machine } => operator_request(
                "undelete",
                "POST",
                format!("/vps/{}/undelete", self.machine(*machine)?),
                None,
            ),
            Action::Resume { machine } => {
                operator_request("resume", "POST", format!("/vps/{}/resume", self.machine(*machine)?), None)
            }
            Action::Discard { machine, accept_loss } => {
                let machine = self.machine(*machine)?;
                let body = json!({"acceptLoss": accept_loss});
                let planned =
                    operator_request("discard", "POST", format!("/vps/{machine}/discard"), Some(body));
                planned.with_accepted_loss(*accept_loss, AcceptedLoss::Machine(machine))
            }
            Action::Abandon { operation } => {
                let operations = self.ledger.operations();
                let id = operations.iter().rev().nth(*operation)?;
                operator_request("abandon", "POST", format!("/vps/operations/{id}/abandon"), None)
            }
            Action::RebuildPointer { slot } => {
                let (user, slot) = SLOTS[*slot];
                let body = json!({"idpUserId": user, "slot": slot});
                operator_request("rebuild", "POST", "/vps/slots/pointer/rebuild".to_owned(), Some(body))
            }
            Action::Register { host, host_key } => {
                let host = self.host(*host)?;
                self.ledger.record_registration_attempt(&host.machine);
                let path = "/vps/register".to_owned();
                host_request("register", path, &host.registration_token, host.registration_body(*host_key))
            }
            Action::Heartbeat { host } => {
                let host = self.host(*host)?;
                let path = format!("/vps/{}/heartbeat", host.machine);
                host_request(
                    "heartbeat",
                    path,
                    &host.upgrade_token,
                    host.heartbeat_body(self.ledger.registration(&host.machine).as_ref()),
                )
            }
            Action::BootFailure { host } => {
                let host = self.host(*host)?;
                let path = format!("/vps/{}/boot-failure", host.machine);
                let body = json!({"stage": "restore", "message": "chosen by the plan"});
                host_request("boot-failure", path, &host.registration_token, body)
            }
            _ => return None,
        })
    }

    async fn send_planned(&mut self, planned: PlannedRequest, step: &Step) {
        let copies = if step.is_sent_twice { 2 } else { 1 };
        let lost_prefix = self.find_accepted_loss_prefix(&planned.accepted_loss).await;
        for copy in 0..copies {
            let process_index = (step.process_index + copy) % PROCESSES;
            let process = Arc::clone(&self.processes[process_index]);
            let (ledger, planned) = (self.ledger.clone(), planned.clone());
            let acceptance = lost_prefix.clone().map(|prefix| self.rows.accept_loss(prefix));
            self.counts.requests += 1;
            self.tasks.spawn(async move {
                send_request(&process, process_index, &ledger, &planned).await;
                drop(acceptance);
            });
        }
        // A request that takes longer than the wait overlaps the next one.
        let _ = tokio::time::timeout(Duration::from_millis(step.wait_ms), self.wait_for_tasks()).await;
    }

    /// Returns the prefix of the slot whose data the request is allowed to lose.
    async fn find_accepted_loss_prefix(&self, accepted_loss: &AcceptedLoss) -> Option<String> {
        match accepted_loss {
            AcceptedLoss::None => None,
            AcceptedLoss::Slot(prefix) => Some(prefix.clone()),
            AcceptedLoss::Machine(machine) => {
                let database_state = DatabaseState::read(&self.database.client).await.ok()?;
                database_state.machine(machine).map(MachineRow::prefix)
            }
        }
    }

    /// Waits until every background task has ended.
    async fn wait_for_tasks(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }

    /// Sends a heartbeat through the process with the given index. Returns the response.
    pub async fn send_heartbeat(&self, host: &Host, process_index: usize) -> Option<ApiResponse> {
        let path = format!("/vps/{}/heartbeat", host.machine);
        let token = host.upgrade_token.clone().into();
        let body = Some(host.heartbeat_body(self.ledger.registration(&host.machine).as_ref()));
        let (key, accepted_loss) = (None, AcceptedLoss::None);
        let planned =
            PlannedRequest { operation: "heartbeat", method: "POST", path, token, body, key, accepted_loss };
        send_request(&self.processes[process_index], process_index, &self.ledger, &planned).await
    }

    /// Boots the host and registers it with its own key.
    pub async fn register(&self, host: &Host, process_index: usize) -> Option<ApiResponse> {
        if !self.boot(host).await {
            return None;
        }
        self.ledger.record_registration_attempt(&host.machine);
        let token = host.registration_token.clone().into();
        let (path, body) = ("/vps/register".to_owned(), Some(host.registration_body(0)));
        let (key, accepted_loss) = (None, AcceptedLoss::None);
        let planned =
            PlannedRequest { operation: "register", method: "POST", path, token, body, key, accepted_loss };
        send_request(&self.processes[process_index], process_index, &self.ledger, &planned).await
    }

    /// Rebuilds a broken pointer, as an operator would.
    async fn rebuild_pointer(&self, prefix: &str) {
        let (user, slot) = prefix.split_once('/').expect("a slot prefix contains a slash");
        let body = Some(json!({"idpUserId": user, "slot": slot}));
        let (token, path) = (SECRET.to_owned().into(), "/vps/slots/pointer/rebuild".to_owned());
        let (key, accepted_loss) = (None, AcceptedLoss::None);
        let planned =
            PlannedRequest { operation: "rebuild", method: "POST", path, token, body, key, accepted_loss };
        send_request(&self.processes[0], 0, &self.ledger, &planned).await;
    }

    /// Answers an operation's question, as an operator would, accepting the loss for about half of the operations.
    async fn answer_question(&self, operation_id: &str, machine: &str, database_state: &DatabaseState) {
        let accepts_loss = operation_id.bytes().last().is_some_and(|last| last % 2 == 0);
        let (operation, body) =
            if accepts_loss { ("continue", Some(json!({"acceptLoss": true}))) } else { ("abandon", None) };
        let acceptance = database_state
            .machine(machine)
            .filter(|_| accepts_loss)
            .map(|row| self.rows.accept_loss(row.prefix()));
        let (token, path) = (SECRET.to_owned().into(), format!("/vps/operations/{operation_id}/{operation}"));
        let (key, accepted_loss) = (None, AcceptedLoss::None);
        let planned = PlannedRequest { operation, method: "POST", path, token, body, key, accepted_loss };
        send_request(&self.processes[0], 0, &self.ledger, &planned).await;
        drop(acceptance);
    }

    /// Waits, for a bounded time, until every running operation is waiting for a host.
    async fn wait_for_operations(&mut self) -> Result<()> {
        for _ in 0..20 {
            let database_state = DatabaseState::read(&self.database.client).await?;
            let is_busy = |operation: &OperationRow| {
                operation.state == "running"
                    && !matches!(operation.step.as_str(), "await_registration" | "await_health")
            };
            if !database_state.operations.iter().any(is_busy) {
                return Ok(());
            }
            self.wake_workers();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Wakes the runner and the reconciler of every process.
    pub fn wake_workers(&self) {
        self.processes.iter().for_each(|process| process.wake_workers());
    }

    /// Clears the faults, restarts every process that is not alive, and advances the clock until no work remains,
    /// for a limited number of rounds.
    pub async fn settle(&mut self) -> Result<()> {
        self.provider.clear_faults();
        self.store.clear_faults();
        let _ = tokio::time::timeout(Duration::from_secs(20), self.wait_for_tasks()).await;
        for process in 0..PROCESSES {
            self.processes[process].switch.disarm();
            if !self.processes[process].is_alive() {
                self.start_process(process);
            }
        }
        for prefix in self.store.broken_pointers() {
            self.rebuild_pointer(&prefix).await;
        }
        let mut quiet_rounds = 0;
        // With a deliberately broken rule, the platform may never settle.
        let max_rounds = if self.broken_rule.is_some() { 100 } else { 400 };
        for round in 0..max_rounds {
            self.wake_workers();
            tokio::time::sleep(Duration::from_millis(30)).await;
            let database_state = DatabaseState::read(&self.database.client).await?;
            let live = self.provider.machines_with_servers();
            let has_lost_server =
                |machine: &MachineRow| machine.is_running() && !live.contains(&machine.machine_id);
            let in_progress = database_state.operations.iter().any(|operation| operation.state == "running");
            let is_quiet = !in_progress
                && !has_leftovers(&database_state, &live, &self.ledger)
                && !database_state.machines.iter().any(has_lost_server);
            if is_quiet {
                quiet_rounds += 1;
                if quiet_rounds == 2 {
                    return Ok(());
                }
            } else {
                quiet_rounds = 0;
            }
            for operation in database_state
                .operations
                .iter()
                .filter(|operation| operation.question.is_some() && operation.state == "running")
            {
                self.answer_question(&operation.operation_id, &operation.machine_id, &database_state).await;
            }
            // Booting hosts register. Other active hosts send heartbeats unless they are running and proven. Operations
            // that wait for any other host time out.
            for host in self.hosts().to_vec() {
                let Some(machine) =
                    database_state.machine(&host.machine).filter(|_| live.contains(&host.machine))
                else {
                    continue;
                };
                if machine.is_booting() {
                    self.register(&host, round % PROCESSES).await;
                } else if machine.is_active() && (machine.status != "running" || machine.proven_at.is_none())
                {
                    self.send_heartbeat(&host, round % PROCESSES).await;
                }
            }
            self.database.advance_time(10, false).await?;
        }
        self.ledger.log("the platform did not settle");
        let database_state = DatabaseState::read(&self.database.client).await?;
        for operation in database_state.operations.iter().filter(|operation| operation.state == "running") {
            self.ledger.log(format!("in progress: {operation:?}"));
        }
        Ok(())
    }
}

async fn send_request(
    process: &Process,
    process_index: usize,
    ledger: &Ledger,
    planned: &PlannedRequest,
) -> Option<ApiResponse> {
    let request_id = ledger.next_request_id();
    let PlannedRequest { operation, method, path, token, body, key, .. } = planned;
    let request = build_request(method, path, token, body.as_ref(), &request_id, key.as_deref());
    let response = process.send_api(request).await;
    let result = match &response {
        Some(ApiResponse { status, body }) => format!("{status} {body}"),
        None => "no response".to_owned(),
    };
    ledger.log(format!("p{process_index} {operation} {path} {}: {result}", key.as_deref().unwrap_or("")));
    if let Some(response) = &response {
        if let ("register", 200, Some(body)) = (*operation, response.status, body) {
            ledger.record_registration(body);
        }
        if let ("heartbeat", 200, Some(epoch)) =
            (*operation, response.status, response.body["epoch"].as_u64())
        {
            let machine = path.split('/').nth(2).unwrap_or_default();
            ledger.record_epoch(machine, epoch as u32);
        }
        ledger.record_response(
            RequestRecord { operation, key: key.clone(), request_id, status: response.status },
            response,
        );
    } else {
        ledger.record_no_response(RequestRecord { operation, key: key.clone(), request_id, status: 0 });
    }
    response
}

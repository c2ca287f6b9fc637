//! Runs three real platform processes on one database with a hundred overlapping requests, and kills the processes with
//! kill -9 throughout.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::join_all;
use kit::long_tests::Figures;
use reqwest::Method;
use serde_json::{Value, json};
use svc::http::client::{self, Timeouts};

use super::check::{self, CallerView, Observations};
use super::database_state::{DatabaseState, read_audit};
use super::host::Host;
use super::ledger::{Ledger, RequestRecord};
use super::memory_provider::ServerCreation;
use super::process::ApiResponse;
use super::rng::Rng;
use super::run_database::StoredTimes;
use crate::platform::stack::{Process, SECRET, Stack};

const PROCESSES: usize = 3;
const USERS: usize = 9;
const REQUESTS: u32 = 100;
/// Maximum number of attempts per request. The pauses between them take 6 s, longer than a killed process needs to
/// restart.
const MAX_ATTEMPTS: usize = 150;

struct Fleet {
    stack: Stack,
    client: reqwest::Client,
    base_urls: Mutex<Vec<String>>,
    ledger: Ledger,
}

struct CampaignRequest {
    operation: &'static str,
    method: Method,
    path: String,
    token: String,
    body: Option<Value>,
    key: Option<String>,
}

impl Fleet {
    /// Sends the request, each time to a random process, until there is a response other than a 503. Returns `None`
    /// after [`MAX_ATTEMPTS`] attempts.
    async fn request_until_response(&self, rng: &mut Rng, planned: &CampaignRequest) -> Option<ApiResponse> {
        for _ in 0..MAX_ATTEMPTS {
            let base_url = rng.pick(&self.base_urls.lock().unwrap_or_else(PoisonError::into_inner));
            let request_id = self.ledger.next_request_id();
            let mut request =
                self.client.request(planned.method.clone(), format!("{base_url}{}", planned.path));
            request = request.bearer_auth(&planned.token).header("x-request-id", &request_id);
            if let Some(key) = &planned.key {
                request = request.header("idempotency-key", key);
            }
            if let Some(body) = &planned.body {
                request = request.json(body);
            }
            let exchange = async {
                let response = request.send().await?;
                let status = response.status().as_u16();
                anyhow::Ok(ApiResponse { status, body: response.json().await.unwrap_or_default() })
            };
            let result = exchange.await;
            let status = result.as_ref().map_or(0, |response| response.status);
            let record =
                RequestRecord { operation: planned.operation, key: planned.key.clone(), request_id, status };
            match result {
                Ok(response) => {
                    self.ledger
                        .log(format!("{} {}: {} {}", planned.operation, planned.path, status, response.body));
                    self.ledger.record_response(record, &response);
                    if status != 503 {
                        return Some(response);
                    }
                }
                Err(_) => self.ledger.record_no_response(record),
            }
            tokio::time::sleep(Duration::from_millis(40)).await;
        }
        None
    }

    async fn send_as_operator(
        &self,
        rng: &mut Rng,
        operation: &'static str,
        method: Method,
        path: String,
        body: Option<Value>,
    ) -> ApiResponse {
        let key = Some(format!("{operation} {}", rng.next()));
        let planned = CampaignRequest { operation, method, path, token: SECRET.to_owned(), body, key };
        let mut second_rng = Rng::new(rng.next());
        let (first, second) = match rng.below(3) {
            // The request is sent twice concurrently, each time to a random process.
            0 => tokio::join!(
                self.request_until_response(rng, &planned),
                self.request_until_response(&mut second_rng, &planned)
            ),
            1 => {
                let first = self.request_until_response(rng, &planned).await;
                (first, self.request_until_response(&mut second_rng, &planned).await)
            }
            _ => (self.request_until_response(rng, &planned).await, None),
        };
        first.or(second).unwrap_or_else(|| panic!("no response to {operation}\n{}", self.stack.log()))
    }

    /// Sends one user's requests, as an operator would. They are random, so some are refused. Returns the number of
    /// requests.
    async fn send_requests(&self, user_number: usize, seed: u64) -> u32 {
        let mut rng = Rng::new(seed ^ (user_number as u64) << 32);
        let user = format!("user_{user_number}");
        let slot = json!({"idpUserId": user, "plan": "max", "status": "active"});
        let provision = json!({"idpUserId": user, "handle": format!("user-{user_number}"), "acceptLoss": true,
            "allowEmpty": true});
        let recover = json!({"idpUserId": user, "allowEmpty": true, "acceptLoss": true});
        let path = |path: &str| path.to_owned();
        self.send_as_operator(&mut rng, "subscribe", Method::PUT, path("/vps/slots"), Some(slot.clone()))
            .await;
        let provisioned = self.send_as_operator(
            &mut rng,
            "provision",
            Method::POST,
            path("/vps/provision"),
            Some(provision.clone()),
        );
        let mut machine = provisioned.await.body["machineId"].as_str().unwrap_or_default().to_owned();
        let mut request_count = 2;
        let requests_per_user = REQUESTS.div_ceil(USERS as u32);
        while request_count < requests_per_user {
            request_count += 1;
            let (operation, method, path, body) = match rng.pick_weighted(&[3, 3, 2, 2, 2, 1]) {
                0 => ("provision", Method::POST, path("/vps/provision"), Some(provision.clone())),
                1 => ("recover", Method::POST, path("/vps/recover"), Some(recover.clone())),
                2 => {
                    let to = rng.pick(&["cpx22", "cpx32", "cpx52"]);
                    let body = Some(json!({"serverType": to}));
                    ("resize", Method::POST, format!("/vps/{machine}/resize"), body)
                }
                3 => ("delete", Method::DELETE, format!("/vps/{machine}?acceptLoss=true"), None),
                4 => {
                    let body = Some(json!({"reason": "chosen by the campaign"}));
                    ("fail", Method::POST, format!("/vps/{machine}/fail"), body)
                }
                _ => ("subscribe", Method::PUT, path("/vps/slots"), Some(slot.clone())),
            };
            let response = self.send_as_operator(&mut rng, operation, method, path, body).await;
            if let Some(new_machine) = response.body["machineId"].as_str() {
                new_machine.clone_into(&mut machine);
            }
            // Some requests follow each other closely; others find a running machine.
            tokio::time::sleep(Duration::from_millis(rng.pick(&[0, 50, 400, 900]))).await;
        }
        request_count
    }

    /// Runs the 12 newest hosts until the future is dropped: in each round, each host registers or sends a heartbeat.
    async fn run_hosts(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        let mut hosts: Vec<Host> = Vec::new();
        loop {
            for server in self.stack.provider.servers() {
                if !hosts.iter().any(|host| host.server == server.name) {
                    hosts.push(Host::from_creation(&ServerCreation {
                        name: server.name,
                        user_data: server.user_data,
                    }));
                }
            }
            let newest: Vec<Host> = hosts.iter().rev().take(12).cloned().collect();
            for host in newest {
                let (operation, path, token, body) = if rng.percent(60) {
                    self.ledger.record_registration_attempt(&host.machine);
                    (
                        "register",
                        "/vps/register".to_owned(),
                        &host.registration_token,
                        host.registration_body(0),
                    )
                } else {
                    let path = format!("/vps/{}/heartbeat", host.machine);
                    (
                        "heartbeat",
                        path,
                        &host.upgrade_token,
                        host.heartbeat_body(self.ledger.registration(&host.machine).as_ref()),
                    )
                };
                let body = Some(body);
                let token = token.clone();
                let planned =
                    CampaignRequest { operation, method: Method::POST, path, token, body, key: None };
                // A host without a response retries later.
                let _ = tokio::time::timeout(
                    Duration::from_secs(1),
                    self.request_until_response(&mut rng, &planned),
                )
                .await;
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    fn start_process(self: &Arc<Self>, process_index: usize) -> Process {
        let process = self.stack.start_platform();
        process
            .base
            .clone_into(&mut self.base_urls.lock().unwrap_or_else(PoisonError::into_inner)[process_index]);
        process
    }
}

/// Kills and restarts processes until `end` is signaled. Returns the processes, all running, and the number of kills.
async fn kill_repeatedly(
    fleet: Arc<Fleet>,
    mut processes: Vec<Process>,
    seed: u64,
    mut end: tokio::sync::oneshot::Receiver<()>,
) -> (Vec<Process>, u32) {
    let mut rng = Rng::new(seed);
    let mut kills = 0;
    loop {
        let delay = Duration::from_millis(40 + rng.below(300) as u64);
        if tokio::time::timeout(delay, &mut end).await.is_ok() {
            return (processes, kills);
        }
        let victim = rng.below(PROCESSES);
        processes[victim].kill();
        kills += 1;
        tokio::time::sleep(Duration::from_millis(rng.pick(&[0, 100, 400]))).await;
        let process_fleet = Arc::clone(&fleet);
        let started = tokio::task::spawn_blocking(move || process_fleet.start_process(victim)).await;
        processes[victim] = started.expect("the process should start");
    }
}

/// Runs a campaign and returns the number of kills.
async fn run_campaign(seed: u64) -> Result<u32> {
    let stack = Stack::start().await;
    let client = client::build(Timeouts { total: Some(Duration::from_secs(15)), ..Timeouts::CALL })?;
    let base_urls = Mutex::new(vec![String::new(); PROCESSES]);
    let fleet = Arc::new(Fleet { stack, client, base_urls, ledger: Ledger::new() });
    let process_fleet = Arc::clone(&fleet);
    let processes =
        tokio::task::spawn_blocking(move || (0..PROCESSES).map(|n| process_fleet.start_process(n)).collect())
            .await?;
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let killer = tokio::spawn(kill_repeatedly(Arc::clone(&fleet), processes, seed, stopped));
    let host_fleet = Arc::clone(&fleet);
    let hosts = tokio::spawn(async move { host_fleet.run_hosts(seed).await });

    let request_count: u32 = join_all((0..USERS).map(|user_number| fleet.send_requests(user_number, seed)))
        .await
        .into_iter()
        .sum();
    let _ = stop.send(());
    let (_processes, kills) = killer.await?;
    assert!(request_count >= REQUESTS && kills > 3, "{request_count} requests, {kills} kills");

    let database = fleet.stack.database.connect().await?;
    let times = StoredTimes::read(&database).await?;
    let has_settled = settle(&fleet, &database, &times).await?;
    hosts.abort();
    let database_state = DatabaseState::read(&database).await?;
    let live = machines_with_servers(&fleet.stack);
    let caller_view = CallerView::from_ledger(&fleet.ledger);
    let mut violations =
        check::check_always(&database_state, &mut Observations::default(), &fleet.ledger, &caller_view);
    violations.extend(check::check_settled(
        &database_state,
        &live,
        &read_audit(&database).await?,
        &fleet.ledger,
    ));
    let log = || format!("{}\n{}", fleet.ledger.lines().join("\n"), fleet.stack.log());
    assert!(
        has_settled && violations.is_empty(),
        "seed {seed} violated {violations:?}\n{database_state:#?}\n{}",
        log()
    );
    for machine in database_state.machines.iter().filter(|machine| machine.is_running()) {
        let servers = live.iter().filter(|id| **id == machine.machine_id).count();
        assert_eq!(servers, 1, "{machine:?}\n{}", log());
    }
    let running = database_state.machines.iter().filter(|machine| machine.is_running()).count();
    println!(
        "seed {seed}: {request_count} requests, {kills} kills, {} machines, {running} running",
        database_state.machines.len()
    );
    Ok(kills)
}

fn machines_with_servers(stack: &Stack) -> Vec<String> {
    let machine =
        |server: kit::provider::ServerView| server.labels.get(super::memory_provider::MACHINE_LABEL).cloned();
    stack.provider.servers().into_iter().filter_map(machine).collect()
}

/// Advances the time until no operation is running and no server remains to be deleted. Returns whether that state was
/// reached.
async fn settle(fleet: &Fleet, database: &tokio_postgres::Client, times: &StoredTimes) -> Result<bool> {
    for _ in 0..300 {
        let database_state = DatabaseState::read(database).await.context("cannot read the database state")?;
        let in_progress = database_state.operations.iter().any(|operation| operation.state == "running");
        if !in_progress
            && !check::has_leftovers(&database_state, &machines_with_servers(&fleet.stack), &fleet.ledger)
        {
            return Ok(true);
        }
        times.advance(database, 3, false).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(false)
}

#[tokio::test(flavor = "multi_thread")]
async fn hundred_overlapping_requests_survive_random_kills() {
    run_campaign(1).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: ten campaigns"]
async fn long_ten_campaigns_find_no_violation() -> Result<()> {
    let mut figures = Figures::new("killed platform processes");
    for seed in 2..12 {
        figures.kills_survived += u64::from(run_campaign(seed).await?);
    }
    figures.record()
}

//! Holds one run: the processes, provider, store and hosts that share a database, and what the checks observed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use axum::body::Body;
use http::Request;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use sha2::{Digest, Sha256};
use svc::store::Bucket;
use tokio::task::JoinSet;

use super::check::{self, Observations};
use super::database_state::{DatabaseState, OperationRow, read_audit};
use super::host::{BUNDLE_SHA256, Host};
use super::ledger::Ledger;
use super::plan::{PROCESSES, SLOTS};
use super::process::Process;
use super::rows::Rows;
use super::run_database::RunDatabase;
use super::run_provider::RunProvider;
use super::store::{Store, StoreConnection};
use super::violation::{BrokenRule, Violation};

pub struct Simulation<'a> {
    pub database: &'a RunDatabase,
    pub provider: RunProvider,
    pub store: Arc<Store>,
    pub processes: Vec<Arc<Process>>,
    pub ledger: Ledger,
    pub rows: Rows,
    pub broken_rule: Option<BrokenRule>,
    /// Background requests, backups and shutdowns.
    pub tasks: JoinSet<()>,
    observations: Observations,
    hosts: Vec<Host>,
    /// The process whose routes were checked last.
    last_checked_process: usize,
    pub counts: Counts,
}

/// Coverage counters: the checks are meaningful only if these counts are high enough.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub requests: u32,
    pub running_machines: u32,
    pub routed_requests: u32,
    pub successful_resizes: u32,
    /// A crash planned at a kill point may not happen.
    pub planned_crashes: u32,
    pub started_backups: u32,
    pub acknowledged_rows: u32,
    pub database_restores: u32,
}

impl<'a> Simulation<'a> {
    pub async fn new(
        database: &'a RunDatabase,
        provider: RunProvider,
        objects: Option<Arc<dyn ObjectStore>>,
        broken_rule: Option<BrokenRule>,
    ) -> Result<Self> {
        database.clear().await?;
        let store = Store::new(objects.unwrap_or_else(|| Arc::new(InMemory::new())), broken_rule);
        publish_bundle(&store).await?;
        for (user, _) in SLOTS {
            let sql = "INSERT INTO sessions (token_hash, host, idp_user_id, expires_at) \
                       VALUES ($1, 'app', $2, now() + interval '1 day') ON CONFLICT DO NOTHING";
            database
                .client
                .execute(sql, &[&Sha256::digest(session_cookie(database, user)).to_vec(), &user])
                .await?;
        }
        let processes =
            (0..PROCESSES).map(|_| Arc::new(Process::start(database, provider.provider(), &store))).collect();
        Ok(Self {
            database,
            provider,
            store,
            processes,
            ledger: Ledger::new(),
            rows: Rows::default(),
            broken_rule,
            tasks: JoinSet::new(),
            observations: Observations::default(),
            hosts: Vec::new(),
            last_checked_process: 0,
            counts: Counts::default(),
        })
    }

    pub fn start_process(&mut self, process_index: usize) {
        let process = Process::start(self.database, self.provider.provider(), &self.store);
        self.processes[process_index] = Arc::new(process);
    }

    /// Returns every host that ever existed, oldest first.
    pub fn hosts(&mut self) -> &[Host] {
        let created = self.provider.created_servers();
        self.hosts.extend(created.iter().skip(self.hosts.len()).map(Host::from_creation));
        for host in &mut self.hosts {
            host.epoch = self.ledger.epoch_of(&host.machine).unwrap_or(host.epoch);
        }
        &self.hosts
    }

    /// Checks the invariants of the current state.
    pub async fn check_now(&mut self) -> Result<BTreeSet<Violation>> {
        // Servers and responses are read first, because the database state may be newer than they are, but not older.
        let live = self.provider.machines_with_servers();
        let caller_view = check::CallerView::from_ledger(&self.ledger);
        let database_state = DatabaseState::read(&self.database.client).await?;
        let fences = self.store.fences().await;
        let mut violations =
            check::check_always(&database_state, &mut self.observations, &self.ledger, &caller_view);
        violations.extend(check::check_fences(&database_state, &live, &fences));
        violations.extend(self.store.violations().await);
        let lost = self.rows.missing_rows(&self.provider.machines_with_servers());
        if !lost.is_empty() {
            self.ledger.log(format!("rows {lost:?} are lost"));
            violations.insert(Violation::LostRows);
        }
        if self.provider.had_duplicate() {
            violations.insert(Violation::DuplicateServer);
        }
        if self.is_misrouted(&database_state).await? {
            violations.insert(Violation::RoutedWhileNotRunning);
        }
        Ok(violations)
    }

    /// Returns whether requests from a user without a running machine are still forwarded after the time allowed for a
    /// change.
    async fn is_misrouted(&mut self, database_state: &DatabaseState) -> Result<bool> {
        self.last_checked_process = (self.last_checked_process + 1) % PROCESSES;
        let process = Arc::clone(&self.processes[self.last_checked_process]);
        for user in users() {
            let has_running_machine = |database_state: &DatabaseState| {
                let mut machines = database_state.machines.iter();
                machines.any(|machine| machine.idp_user_id == user && machine.is_running())
            };
            let mut routed = self.is_routed(&process, user).await;
            self.counts.routed_requests += u32::from(routed && has_running_machine(database_state));
            // A change must take effect within a second, but this computer may be busy.
            for _ in 0..60 {
                if !routed || has_running_machine(&DatabaseState::read(&self.database.client).await?) {
                    routed = false;
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
                routed = self.is_routed(&process, user).await;
            }
            if routed {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether a user's request is forwarded. No host is listening, so a forwarded request gets a 502 or 504,
    /// and any other gets a 503.
    async fn is_routed(&self, process: &Process, user: &str) -> bool {
        let request = Request::builder()
            .uri("/")
            .header("host", "app.test")
            .header("accept", "application/json")
            .header("cookie", format!("svc_session={}", session_cookie(self.database, user)))
            .body(Body::empty())
            .expect("the request is valid");
        process.send_public(request).await.is_some_and(|response| matches!(response.status, 502 | 504))
    }

    /// Checks the additional invariants after settling.
    pub async fn check_settled(&mut self) -> Result<BTreeSet<Violation>> {
        let mut violations = BTreeSet::new();
        let database_state = DatabaseState::read(&self.database.client).await?;
        let audit = read_audit(&self.database.client).await?;
        violations.extend(check::check_settled(
            &database_state,
            &self.provider.machines_with_servers(),
            &audit,
            &self.ledger,
        ));
        let resized =
            |operation: &&OperationRow| operation.kind == "resize" && operation.state == "succeeded";
        self.counts.successful_resizes += database_state.operations.iter().filter(resized).count() as u32;
        self.counts.acknowledged_rows += u32::try_from(self.rows.acknowledged_count())?;
        self.counts.running_machines +=
            database_state.machines.iter().filter(|machine| machine.is_running()).count() as u32;
        let are_deletions_suspended = check::are_deletions_suspended(
            &database_state,
            &self.provider.machines_with_servers(),
            &self.ledger,
        );
        for host in self.hosts().to_vec() {
            let Some(machine) = database_state.machine(&host.machine) else { continue };
            let expected = Some((200, Some(!machine.is_active())));
            // A machine that may get its slot back is not notified that it is superseded; its writers remain stopped.
            let is_kept = database_state.must_keep_server(machine) || are_deletions_suspended;
            let expected_while_kept = is_kept.then_some((200, Some(false)));
            let mut response = None;
            // The reconciler soon detects that a deleted machine cannot get its slot back.
            for _ in 0..30 {
                let received = self.send_heartbeat(&host, 0).await;
                response = received.map(|response| (response.status, response.body["superseded"].as_bool()));
                if response == expected || (is_kept && response == expected_while_kept) {
                    break;
                }
                self.wake_workers();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            if response != expected && (!is_kept || response != expected_while_kept) {
                self.ledger.log(format!("{} got the response {response:?}", host.server));
                violations.insert(Violation::HostNotNotified);
            }
        }
        Ok(violations)
    }

    /// Kills the platform's processes, restores its saved database if there is one, starts the processes again, and
    /// sends heartbeats from the registered hosts whose servers are powered on.
    pub async fn restore_database(&mut self) -> Result<()> {
        for process in &self.processes {
            process.switch.kill();
        }
        self.tasks.shutdown().await;
        self.database.cut_connections().await?;
        if self.database.restore().await? {
            self.ledger.record_restore();
            self.observations = Observations::default();
            self.counts.database_restores += 1;
        }
        for process in 0..PROCESSES {
            self.start_process(process);
        }
        let powered_on = self.provider.powered_on();
        for host in self.hosts().to_vec() {
            if powered_on.contains(&host.machine) && self.ledger.is_registered(&host.machine) {
                self.send_heartbeat(&host, 0).await;
            }
        }
        Ok(())
    }

    /// Kills all processes and background tasks, and returns the counts.
    pub async fn finish(mut self) -> Counts {
        for process in &self.processes {
            process.switch.kill();
        }
        self.tasks.shutdown().await;
        self.counts
    }
}

/// Returns each user once.
fn users() -> BTreeSet<&'static str> {
    SLOTS.iter().map(|(user, _)| *user).collect()
}

/// Creates a session cookie as a router would.
fn session_cookie(database: &RunDatabase, user: &str) -> String {
    let claims = serde_json::json!({ "iss": "svc-session", "jti": user, "host": "app" });
    format!("svcs_{}", database.keys.borrow().app.current.sign_json(&claims))
}

async fn publish_bundle(store: &Arc<Store>) -> Result<()> {
    let bucket = Bucket::new(Arc::new(StoreConnection { store: Arc::clone(store), switch: None }));
    let key = "system-bundles/v1/svc-host-bundle.tar.gz";
    bucket.put(&key.into(), "0123456789").await?;
    let digest = format!("{BUNDLE_SHA256}  svc-host-bundle.tar.gz\n");
    bucket.put(&format!("{key}.sha256").into(), digest).await?;
    Ok(())
}

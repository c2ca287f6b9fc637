//! Records the requests and responses of all callers, and the violations that they reveal.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::Value;

use super::process::ApiResponse;
use super::violation::Violation;

/// A request and its response status.
#[derive(Debug, Clone)]
pub struct RequestRecord {
    pub operation: &'static str,
    pub key: Option<String>,
    pub request_id: String,
    /// 0 if there was no response, or if the restored database may lack the request.
    pub status: u16,
}

#[derive(Debug, Default)]
struct LedgerState {
    lines: Vec<String>,
    records: Vec<RequestRecord>,
    /// The first successful response for each idempotency key.
    first_responses: BTreeMap<String, (u16, Value)>,
    machines: Vec<String>,
    operations: BTreeSet<String>,
    registration_attempts: BTreeSet<String>,
    /// The first accepted registration of each machine, unless a restore of the platform's database may have lost it.
    accepted: BTreeMap<String, Value>,
    ended: BTreeSet<String>,
    violations: BTreeSet<Violation>,
    request_count: u32,
    /// The epochs assigned by heartbeat responses.
    epochs: BTreeMap<String, u32>,
    /// The accepted registration that each host has recorded; a restore of the platform's database does not affect it.
    registered: BTreeMap<String, Value>,
    was_restored: bool,
}

#[derive(Debug, Clone)]
pub struct Ledger {
    state: Arc<Mutex<LedgerState>>,
    started_at: Instant,
}

impl Ledger {
    pub fn new() -> Self {
        Self { state: Arc::default(), started_at: Instant::now() }
    }

    fn state(&self) -> MutexGuard<'_, LedgerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn log(&self, line: impl std::fmt::Display) {
        let elapsed_ms = self.started_at.elapsed().as_millis();
        self.state().lines.push(format!("{elapsed_ms:>6} ms  {line}"));
    }

    pub fn lines(&self) -> Vec<String> {
        self.state().lines.clone()
    }

    pub fn next_request_id(&self) -> String {
        let mut state = self.state();
        state.request_count += 1;
        format!("request-{}", state.request_count)
    }

    /// Records a response, the machines and operations that it names, and the violations that it reveals.
    pub fn record_response(&self, record: RequestRecord, response: &ApiResponse) {
        let mut state = self.state();
        if response.status == 500 {
            state.violations.insert(Violation::InternalError);
        }
        if (200..300).contains(&response.status) {
            if let Some(key) = &record.key {
                let current = (response.status, response.body.clone());
                let first =
                    state.first_responses.entry(key.clone()).or_insert_with(|| current.clone()).clone();
                if first != current {
                    state.violations.insert(Violation::ReplayDiffers);
                }
            }
            let text_field = |name: &str| response.body[name].as_str().map(str::to_owned);
            if let Some(operation) = text_field("operationId") {
                state.operations.insert(operation);
            }
            state.ended.extend(text_field("oldMachineId"));
            if record.operation == "delete" {
                state.ended.extend(text_field("machineId"));
            }
            if let Some(machine) = text_field("machineId")
                && !state.machines.contains(&machine)
            {
                state.machines.push(machine);
            }
        }
        state.records.push(record);
    }

    /// Records a request without a response, which may have taken effect.
    pub fn record_no_response(&self, record: RequestRecord) {
        self.state().records.push(record);
    }

    /// Records a host's registration as accepted; a second one with a different body is a violation.
    pub fn record_registration(&self, body: &Value) {
        let mut state = self.state();
        let machine = body["machineId"].as_str().unwrap_or_default().to_owned();
        state.registered.entry(machine.clone()).or_insert_with(|| body.clone());
        if state.accepted.entry(machine).or_insert_with(|| body.clone()) != body {
            state.violations.insert(Violation::RegisteredTwice);
        }
    }

    /// Returns whether the host's registration was accepted.
    pub fn is_registered(&self, machine: &str) -> bool {
        self.state().registered.contains_key(machine)
    }

    /// Returns a host's accepted registration.
    pub fn registration(&self, machine: &str) -> Option<Value> {
        self.state().registered.get(machine).cloned()
    }

    pub fn record_registration_attempt(&self, machine: &str) {
        self.state().registration_attempts.insert(machine.to_owned());
    }

    /// Returns the machines whose hosts have sent a registration.
    pub fn registration_attempts(&self) -> BTreeSet<String> {
        self.state().registration_attempts.clone()
    }

    /// Returns the machines named by responses, in the order of the responses.
    pub fn machines(&self) -> Vec<String> {
        self.state().machines.clone()
    }

    /// Returns the machines that callers know to have been replaced or deleted.
    pub fn ended_machines(&self) -> BTreeSet<String> {
        self.state().ended.clone()
    }

    pub fn operations(&self) -> BTreeSet<String> {
        self.state().operations.clone()
    }

    /// Records the epoch that a heartbeat response assigned to a host.
    pub fn record_epoch(&self, machine: &str, epoch: u32) {
        self.state().epochs.insert(machine.to_owned(), epoch);
    }

    pub fn epoch_of(&self, machine: &str) -> Option<u32> {
        self.state().epochs.get(machine).copied()
    }

    /// Records that the platform's database was restored from an older copy, and discards the responses that the copy
    /// may lack.
    pub fn record_restore(&self) {
        let mut state = self.state();
        state.was_restored = true;
        // Accepted requests may be missing from the copy, and repeating one with the same key may return a different
        // response.
        state.records.iter_mut().for_each(|record| record.status = 0);
        state.first_responses.clear();
        state.operations.clear();
        state.accepted.clear();
        state.ended.clear();
    }

    pub fn was_restored(&self) -> bool {
        self.state().was_restored
    }

    pub fn records(&self) -> Vec<RequestRecord> {
        self.state().records.clone()
    }

    pub fn violations(&self) -> BTreeSet<Violation> {
        self.state().violations.clone()
    }
}

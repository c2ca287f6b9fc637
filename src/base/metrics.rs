//! Metrics: names, help texts and labels, and the output for Prometheus.
//!
//! Owns every metric name; the values are recorded where the events happen. Invariants: a series has a help text and
//! a type, a label has few values (never a machine, a user or a path), and recording in an existing series does not
//! allocate.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use metrics::{Counter, Gauge, Histogram, Label};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;

/// The media type of [`Scrape::text`].
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Buckets for requests and calls, in seconds.
const CALL_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
/// Buckets for operations and their steps, in seconds.
const WORK_BUCKETS: [f64; 11] = [0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 7200.0];
/// Interval at which recorded durations are sorted into their buckets if there are no scrapes.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(10);

pub static HTTP_REQUESTS: Counters<4> = Counters::new(
    "svc_http_requests_total",
    "Requests answered, by listener, method, route template and class of status.",
    ["listener", "method", "route", "status"],
);
pub static HTTP_DURATION: Durations<2> = Durations::new(
    "svc_http_request_duration_seconds",
    "Time to the head of the answer; bodies that stream go on after it.",
    ["listener", "route"],
);
pub static DISPATCHES: Counters<1> = Counters::new(
    "svc_dispatches_total",
    "Dispatches ended, by outcome: success, error, or limited (refused because a cost limit was reached).",
    ["outcome"],
);
pub static DISPATCHES_RUNNING: Gauges<0> = Gauges::new("svc_dispatches_running", "Agents that run.", []);
pub static DISPATCHES_QUEUED: Gauges<0> =
    Gauges::new("svc_dispatches_queued", "Dispatches that wait for their turn.", []);
pub static OPERATIONS: Counters<2> =
    Counters::new("svc_operations_total", "Operations ended, by kind and outcome.", ["kind", "outcome"]);
pub static OPERATION_DURATION: Durations<1> =
    Durations::new("svc_operation_duration_seconds", "From the filing of an operation to its end.", ["kind"]);
pub static OPERATION_STEPS: Counters<3> = Counters::new(
    "svc_operation_steps_total",
    "Runs of a step by this process: done, waiting, failed or lost (another process has it).",
    ["kind", "step", "outcome"],
);
pub static OPERATION_STEP_DURATION: Durations<2> = Durations::new(
    "svc_operation_step_duration_seconds",
    "One run of a step; a step that waits is run again and again.",
    ["kind", "step"],
);
pub static OPERATIONS_IN_PROGRESS: Gauges<1> =
    Gauges::new("svc_operations_in_progress", "Operations under way in the whole installation.", ["kind"]);
pub static ROLLOUTS: Counters<1> =
    Counters::new("svc_rollouts_total", "Rollouts that ended by themselves, by state.", ["state"]);
pub static ROLLOUT_MACHINES: Counters<1> =
    Counters::new("svc_rollout_machines_total", "Machines of rollouts that ended, by how.", ["state"]);
pub static CLOCK_SKEW: Gauges<0> =
    Gauges::new("svc_clock_skew_seconds", "How far this process's clock is ahead of the database's.", []);
pub static ROUTES_AGE: Gauges<0> = Gauges::new(
    "svc_router_routes_age_seconds",
    "Since the router last read its routes; above a few seconds the database is unreachable and routes are stale.",
    [],
);
pub static RETENTION_DELETED: Counters<1> = Counters::new(
    "svc_retention_deleted_total",
    "Rows that the reconciler deleted because their retention had ended, by table.",
    ["table"],
);
pub static OPERATIONS_UNKNOWN: Gauges<0> = Gauges::new(
    "svc_operations_unknown",
    "Operations under way of a kind or at a step that this release does not know; a newer one runs them.",
    [],
);
pub static ALARMS: Gauges<1> = Gauges::new(
    "svc_alarms",
    "Alarms of the fleet as `svcctl fleet` shows them: 1 where one stands, by its name.",
    ["alarm"],
);
pub static OPERATIONS_OVERDUE: Gauges<0> = Gauges::new(
    "svc_operations_overdue",
    "Operations that have been under way for longer than 30 minutes.",
    [],
);
pub static MACHINES: Gauges<1> =
    Gauges::new("svc_machines", "Active machines of the whole installation, by status.", ["status"]);
pub static MACHINES_BY_HEALTH: Gauges<1> = Gauges::new(
    "svc_machines_by_health",
    "Active machines by their hosts' own word; silent: none for two minutes, unknown: never any.",
    ["health"],
);
pub static MACHINES_NEEDING_ATTENTION: Gauges<0> =
    Gauges::new("svc_machines_needing_attention", "Machines that `svcctl fleet` lists with a reason.", []);
pub static BACKUP_AGE: Gauges<1> = Gauges::new(
    "svc_backup_age_seconds",
    "Age of the last verified snapshot over all slots with data: the oldest, and the median.",
    ["over"],
);
pub static BACKUP_NEVER: Gauges<0> =
    Gauges::new("svc_backups_never", "Slots with data and without any verified snapshot.", []);
pub static FLEET_READ: Gauges<0> = Gauges::new(
    "svc_fleet_read_timestamp_seconds",
    "When the figures of the whole installation were last read from the database.",
    [],
);
pub static PROVIDER_CALLS: Counters<2> = Counters::new(
    "svc_provider_calls_total",
    "Exchanges with the cloud provider, by call and outcome.",
    ["call", "outcome"],
);
pub static PROVIDER_DURATION: Durations<1> = Durations::new(
    "svc_provider_call_duration_seconds",
    "One exchange with the cloud provider, without the wait for the rate budget.",
    ["call"],
);
pub static PROVIDER_BUDGET: Gauges<0> = Gauges::new(
    "svc_provider_budget_calls",
    "Calls that the provider's rate limit still allows, as all processes together know it.",
    [],
);
pub static STORE_CALLS: Counters<2> = Counters::new(
    "svc_store_calls_total",
    "Calls to the object store for whole objects, and requests that list keys (`call=\"list\"`), by call and outcome.",
    ["call", "outcome"],
);
pub static STORE_DURATION: Durations<1> = Durations::new(
    "svc_store_call_duration_seconds",
    "One call to the object store with its own retries.",
    ["call"],
);
pub static RECONCILER_RUNS: Counters<2> = Counters::new(
    "svc_reconciler_runs_total",
    "Runs of the reconciler's parts in this process.",
    ["part", "outcome"],
);
pub static RECONCILER_SUCCESS: Gauges<1> = Gauges::new(
    "svc_reconciler_last_success_timestamp_seconds",
    "When a part of the reconciler last ended well in this process.",
    ["part"],
);
pub static UPSTREAM_FAILURES: Counters<1> = Counters::new(
    "svc_router_upstream_failures_total",
    "Requests that a running machine did not answer, by reason.",
    ["reason"],
);
pub static SESSIONS_OPENED: Counters<1> =
    Counters::new("svc_router_sessions_opened_total", "Browser sessions opened, by host.", ["host"]);
pub static POOL_CONNECTIONS: Gauges<1> = Gauges::new(
    "svc_database_pool_connections",
    "Connections of this process's pools to its database; limit: how many there may be.",
    ["state"],
);
pub static POOL_WAITING: Gauges<0> =
    Gauges::new("svc_database_pool_waiting", "Tasks of this process that wait for a connection.", []);
pub static BRIDGE_ACTIONS: Counters<2> = Counters::new(
    "svc_bridge_actions_total",
    "Requests to the bridge, by action and outcome (ok, or the problem's code).",
    ["action", "outcome"],
);
pub static BRIDGE_SQLSTATES: Counters<1> = Counters::new(
    "svc_bridge_sqlstates_total",
    "Statements that the database refused, by class of SQLSTATE.",
    ["class"],
);
pub static BRIDGE_WAITS: Counters<1> = Counters::new(
    "svc_bridge_pool_waits_total",
    "Requests that found all connections of their app busy: served later, or given up.",
    ["outcome"],
);
pub static PROOFS: Counters<1> = Counters::new(
    "svc_gateway_proofs_total",
    "Proofs and tokens that came with requests: verified, or refused.",
    ["outcome"],
);
pub static APPS: Gauges<0> = Gauges::new("svc_gateway_apps", "Apps that the gateway serves.", []);
pub static LISTENERS: Gauges<0> =
    Gauges::new("svc_gateway_change_listeners", "Open streams of changes (SSE).", []);
pub static RECORDS_STUCK: Gauges<0> =
    Gauges::new("svc_records_stuck", "1 while the disk refuses the kernel's records.", []);
pub static RECORDS_WAITING: Gauges<0> =
    Gauges::new("svc_records_waiting_bytes", "Lines of records that are accepted and not written yet.", []);
pub static SNAPSHOT_TAKEN: Gauges<0> = Gauges::new(
    "svc_backup_last_success_timestamp_seconds",
    "When the last verified snapshot of this machine was taken.",
    [],
);
pub static BACKUP_OK: Gauges<0> = Gauges::new(
    "svc_backup_last_run_success",
    "1 where the last backup of this machine succeeded, 0 where it failed.",
    [],
);
pub static CHECK_OK: Gauges<1> = Gauges::new(
    "svc_snapshot_check_last_success",
    "1 where the last look at snapshots found them as they were written, 0 where it did not: verify reads them again, \
     drill restores the latest.",
    ["check"],
);
pub static CHECK_AT: Gauges<1> = Gauges::new(
    "svc_snapshot_check_last_timestamp_seconds",
    "When the last look at snapshots ended.",
    ["check"],
);
static BUILD: Gauges<2> = Gauges::new("svc_build_info", "1, with what runs here.", ["version", "commit"]);
static RESIDENT: Gauges<0> =
    Gauges::new("process_resident_memory_bytes", "Resident memory of this process.", []);
static OPEN_FDS: Gauges<0> = Gauges::new("process_open_fds", "Open file descriptors of this process.", []);
static STARTED: Gauges<0> =
    Gauges::new("process_start_time_seconds", "When this process started, in Unix time.", []);

/// The series of one metric by label values, created on first use.
struct Family<H, const N: usize> {
    name: &'static str,
    help: &'static str,
    labels: [&'static str; N],
    handles: RwLock<BTreeMap<[&'static str; N], H>>,
}

impl<H: Clone, const N: usize> Family<H, N> {
    const fn new(name: &'static str, help: &'static str, labels: [&'static str; N]) -> Self {
        Self { name, help, labels, handles: RwLock::new(BTreeMap::new()) }
    }

    fn with(
        &self,
        values: [&'static str; N],
        make: impl FnOnce(&Self, Vec<Label>) -> H,
        record: impl FnOnce(&H),
    ) {
        if let Some(handle) = self.handles.read().unwrap_or_else(PoisonError::into_inner).get(&values) {
            return record(handle);
        }
        let labels =
            self.labels.iter().zip(values).map(|(name, value)| Label::from_static_parts(name, value));
        let handle = make(self, labels.collect());
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        record(handles.entry(values).or_insert(handle));
    }
}

/// A metric that only increases while the process runs.
pub struct Counters<const N: usize>(Family<Counter, N>);

impl<const N: usize> Counters<N> {
    const fn new(name: &'static str, help: &'static str, labels: [&'static str; N]) -> Self {
        Self(Family::new(name, help, labels))
    }

    pub fn add_one(&self, values: [&'static str; N]) {
        self.add(values, 1);
    }

    pub fn add(&self, values: [&'static str; N], count: u64) {
        let make = |family: &Family<_, N>, labels: Vec<Label>| {
            metrics::describe_counter!(family.name, family.help);
            metrics::counter!(family.name, labels)
        };
        self.0.with(values, make, |counter| counter.increment(count));
    }
}

/// A metric that goes up and down.
pub struct Gauges<const N: usize>(Family<Gauge, N>);

impl<const N: usize> Gauges<N> {
    const fn new(name: &'static str, help: &'static str, labels: [&'static str; N]) -> Self {
        Self(Family::new(name, help, labels))
    }

    pub fn set(&self, values: [&'static str; N], value: f64) {
        let make = |family: &Family<_, N>, labels: Vec<Label>| {
            metrics::describe_gauge!(family.name, family.help);
            metrics::gauge!(family.name, labels)
        };
        self.0.with(values, make, |gauge| gauge.set(value));
    }

    /// Sets the gauge to the current Unix time.
    pub fn set_to_now(&self, values: [&'static str; N]) {
        self.set(values, unix_now());
    }
}

/// A histogram of durations, in seconds.
pub struct Durations<const N: usize>(Family<Histogram, N>);

impl<const N: usize> Durations<N> {
    const fn new(name: &'static str, help: &'static str, labels: [&'static str; N]) -> Self {
        Self(Family::new(name, help, labels))
    }

    pub fn record(&self, values: [&'static str; N], duration: Duration) {
        let make = |family: &Family<_, N>, labels: Vec<Label>| {
            metrics::describe_histogram!(family.name, family.help);
            metrics::histogram!(family.name, labels)
        };
        self.0.with(values, make, |histogram| histogram.record(duration.as_secs_f64()));
    }
}

/// Interns a text from a small fixed set, such as route templates, as a label value.
pub fn label(text: &str) -> &'static str {
    static INTERNED: RwLock<BTreeSet<&'static str>> = RwLock::new(BTreeSet::new());
    if let Some(interned) = INTERNED.read().unwrap_or_else(PoisonError::into_inner).get(text) {
        return interned;
    }
    let leaked: &'static str = Box::leak(text.to_owned().into_boxed_str());
    INTERNED.write().unwrap_or_else(PoisonError::into_inner).insert(leaked);
    leaked
}

/// The metrics of this process. Values recorded before [`install`] are lost.
#[derive(Clone)]
pub struct Scrape(PrometheusHandle);

/// Starts recording, for the lifetime of the process.
///
/// # Errors
/// If a recorder is installed already.
pub fn install() -> anyhow::Result<Scrape> {
    let work = [OPERATION_DURATION.0.name, OPERATION_STEP_DURATION.0.name];
    let mut builder = PrometheusBuilder::new().set_buckets(&CALL_BUCKETS)?;
    for name in work {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), &WORK_BUCKETS)?;
    }
    let recorder = builder.build_recorder();
    let scrape = Scrape(recorder.handle());
    metrics::set_global_recorder(recorder)?;
    STARTED.set_to_now([]);
    BUILD.set([env!("CARGO_PKG_VERSION"), crate::applet::build().commit], 1.0);
    Ok(scrape)
}

impl Scrape {
    /// All series in Prometheus' text format 0.0.4.
    pub fn text(&self) -> String {
        measure_process();
        self.0.run_upkeep();
        self.0.render()
    }

    /// Bounds the memory of recorded durations until `stop`, even without scrapes.
    pub fn spawn_upkeep(&self, stop: CancellationToken) {
        let handle = self.0.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(UPKEEP_INTERVAL) => handle.run_upkeep(),
                }
            }
        });
    }
}

fn measure_process() {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<f64>().ok());
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    if let (Some(pages), Some(page)) = (pages, page) {
        RESIDENT.set([], pages * page as f64);
    }
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        // One of them belongs to this read.
        OPEN_FDS.set([], open.count().saturating_sub(1) as f64);
    }
}

fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

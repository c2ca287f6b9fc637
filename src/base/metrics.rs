//! Records metrics and exposes them to Prometheus.
//!
//! Metrics are declared in `families.rs` and recorded where the events happen. Invariants: every series has a help text
//! and a type, labels are low-cardinality (never a machine, user or path), and recording a count or gauge in an
//! existing series doesn't allocate.

mod families;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use metrics::{Counter, Gauge, Histogram, Label};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;

pub use self::families::*;

/// Media type of [`MetricsHandle::render`] output.
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Buckets for requests and calls, in seconds.
const CALL_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
/// Buckets for operations and their steps, in seconds.
const OPERATION_BUCKETS: [f64; 11] = [0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 7200.0];
/// How often recorded durations are drained into their buckets, regardless of scrapes.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(10);

/// A metric's series keyed by label values, created on first use.
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

    fn with_handle(
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

/// A monotonic counter, starting from zero in each process.
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
        self.0.with_handle(values, make, |counter| counter.increment(count));
    }
}

/// A value that can go up and down.
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
        self.0.with_handle(values, make, |gauge| gauge.set(value));
    }

    /// Sets the gauge to the current Unix time.
    pub fn set_to_now(&self, values: [&'static str; N]) {
        self.set(values, unix_now_seconds());
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
        self.0.with_handle(values, make, |histogram| histogram.record(duration.as_secs_f64()));
    }
}

/// Interns a label value from a small fixed set, such as the route templates.
pub fn intern_label(text: &str) -> &'static str {
    static INTERNED: RwLock<BTreeSet<&'static str>> = RwLock::new(BTreeSet::new());
    if let Some(interned) = INTERNED.read().unwrap_or_else(PoisonError::into_inner).get(text) {
        return interned;
    }
    let leaked: &'static str = Box::leak(text.to_owned().into_boxed_str());
    INTERNED.write().unwrap_or_else(PoisonError::into_inner).insert(leaked);
    leaked
}

/// This process's metrics. A series first recorded before [`install`] never shows up in the output, because its cached
/// handle discards all values.
#[derive(Clone)]
pub struct MetricsHandle(PrometheusHandle);

/// Starts recording for the lifetime of the process.
///
/// # Errors
/// If a recorder is already installed.
pub fn install() -> anyhow::Result<MetricsHandle> {
    let operation_metrics = [OPERATION_DURATION.0.name, OPERATION_STEP_DURATION.0.name];
    let mut builder = PrometheusBuilder::new().set_buckets(&CALL_BUCKETS)?;
    for name in operation_metrics {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), &OPERATION_BUCKETS)?;
    }
    let recorder = builder.build_recorder();
    let handle = MetricsHandle(recorder.handle());
    metrics::set_global_recorder(recorder)?;
    STARTED_AT.set_to_now([]);
    BUILD.set([env!("CARGO_PKG_VERSION"), crate::applet::build().commit], 1.0);
    Ok(handle)
}

impl MetricsHandle {
    /// Renders all series in the Prometheus text format 0.0.4.
    pub fn render(&self) -> String {
        measure_process();
        self.0.run_upkeep();
        self.0.render()
    }

    /// Periodically drains recorded durations into their buckets until `stop` is cancelled, to bound memory even
    /// without scrapes.
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
    let page_size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    if let (Some(pages), Some(page_size)) = (pages, page_size) {
        RESIDENT_MEMORY.set([], pages * page_size as f64);
    }
    if let Ok(fds) = std::fs::read_dir("/proc/self/fd") {
        // Don't count the descriptor of the listing itself.
        OPEN_FDS.set([], fds.count().saturating_sub(1) as f64);
    }
}

fn unix_now_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

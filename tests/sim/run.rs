//! Runs a seed: executes its plan, collects violations, and reduces a failing plan to its shortest failing prefix.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use object_store::ObjectStore;

use super::plan::{Step, generate_plan};
use super::run_database::RunDatabase;
use super::run_provider::RunProvider;
use super::simulation::{Counts, Simulation};
use super::violation::{BrokenRule, Violation};

/// The result of running a plan.
pub enum RunResult {
    Passed(Counts),
    Violated { violations: BTreeSet<Violation>, steps_run: usize, log: Vec<String> },
}

/// How the provider and the object store are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backends {
    /// The provider and the store are in memory, and are called directly.
    InProcess,
    /// The production adapter and store client use the kit's provider and S3 server over HTTP.
    Http,
}

pub async fn run_plan(
    database: &RunDatabase,
    backends: Backends,
    steps: &[Step],
    broken_rule: Option<BrokenRule>,
) -> Result<RunResult> {
    let (provider, objects, _s3) = match backends {
        Backends::InProcess => (RunProvider::in_memory(broken_rule), None, None),
        Backends::Http => {
            let (objects, s3) = start_s3()?;
            (RunProvider::over_http().await?, Some(objects), Some(s3))
        }
    };
    let mut simulation = Simulation::new(database, provider, objects, broken_rule).await?;
    for (number, step) in steps.iter().enumerate() {
        simulation.ledger.log(format!("{number:>2}. p{} {:?}", step.process_index, step.action));
        simulation.perform_step(step).await?;
        let violations = simulation.check_now().await?;
        if !violations.is_empty() {
            let log = simulation.ledger.lines();
            simulation.finish().await;
            return Ok(RunResult::Violated { violations, steps_run: number + 1, log });
        }
    }
    simulation.ledger.log("the faults are cleared");
    simulation.settle().await?;
    let mut violations = simulation.check_now().await?;
    if violations.is_empty() {
        violations = simulation.check_settled().await?;
    }
    let log = simulation.ledger.lines();
    let counts = simulation.finish().await;
    Ok(if violations.is_empty() {
        RunResult::Passed(counts)
    } else {
        RunResult::Violated { violations, steps_run: steps.len(), log }
    })
}

type StoreWithServer = (Arc<dyn ObjectStore>, kit::s3::S3Server);

fn start_s3() -> Result<StoreWithServer> {
    let server = kit::s3::S3Server::start(&std::env::temp_dir())?;
    server.create_bucket("fleet");
    let pairs = server.env("fleet");
    let pairs = pairs.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let mut env = svc::config::Env::from_pairs(pairs);
    let config = svc::store::config::StoreConfig::read(&mut env).expect("the store's settings are complete");
    Ok((Arc::clone(config.open()?.raw()), server))
}

/// Runs seeds, several at a time, and panics with the log of the first violation. With `SVC_SIM_SEED`, runs only that
/// seed, or none if it is outside the range; `SVC_SIM_FROM` resumes a long run at that seed.
pub async fn assert_seeds_find_no_violation(
    seeds: std::ops::Range<u64>,
    backends: Backends,
    concurrency: usize,
) -> Counts {
    let seeds = match (read_seed("SVC_SIM_SEED"), read_seed("SVC_SIM_FROM")) {
        (Some(seed), _) if seeds.contains(&seed) => seed..seed + 1,
        (None, Some(from)) => seeds.start.max(from)..seeds.end,
        (None, None) => seeds,
        (Some(_), _) => 0..0,
    };
    if seeds.is_empty() {
        return Counts::default();
    }
    let next = Arc::new(AtomicU64::new(seeds.start));
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..concurrency.min((seeds.end - seeds.start) as usize) {
        let (next, end) = (Arc::clone(&next), seeds.end);
        workers.spawn(async move {
            let database = RunDatabase::new(None).await.expect("the database should be created");
            let mut counts = Counts::default();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= end {
                    return counts;
                }
                let result = run_plan(&database, backends, &generate_plan(seed), None).await;
                match result.expect("the run should complete") {
                    RunResult::Passed(seed_counts) => counts.add(seed_counts),
                    RunResult::Violated { violations, steps_run, log } => {
                        let report = render_report(seed, &violations, steps_run, &log);
                        let shortest = find_shortest_failure(&database, backends, seed, steps_run).await;
                        panic!("{report}{shortest}");
                    }
                }
            }
        });
    }
    let mut counts = Counts::default();
    while let Some(ended) = workers.join_next().await {
        match ended {
            Ok(worker_counts) => counts.add(worker_counts),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
    counts
}

fn read_seed(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number")))
}

fn render_report(seed: u64, violations: &BTreeSet<Violation>, steps_run: usize, log: &[String]) -> String {
    let mut text = format!("seed {seed} violated {violations:?} after {steps_run} steps:\n");
    for line in log {
        let _ = writeln!(text, "  {line}");
    }
    let _ = writeln!(text, "replay: SVC_SIM_SEED={seed} cargo xtask test sim::runs");
    text
}

/// Finds the shortest failing prefix of the plan by bisection. A seed does not determine the timing, so an attempt may
/// pass by chance.
async fn find_shortest_failure(
    database: &RunDatabase,
    backends: Backends,
    seed: u64,
    steps_run: usize,
) -> String {
    let steps = generate_plan(seed);
    let (mut passing_len, mut failing_len, mut last) = (0, steps_run, None);
    while passing_len + 1 < failing_len {
        let middle = (passing_len + failing_len) / 2;
        match run_plan(database, backends, &steps[..middle], None).await {
            Ok(RunResult::Violated { violations, steps_run, log }) => {
                failing_len = steps_run.min(middle);
                last = Some(render_report(seed, &violations, steps_run, &log));
            }
            Ok(RunResult::Passed(_)) | Err(_) => passing_len = middle,
        }
    }
    match last {
        Some(report) => format!("the shortest prefix that failed again has {failing_len} steps:\n{report}"),
        None => "no shorter prefix failed again\n".to_owned(),
    }
}

/// Runs seeds with a broken rule until one detects the `expected` violation. Every detected violation must be the
/// expected one or one of its `consequences`.
pub async fn find_violation(
    broken_rule: BrokenRule,
    seeds: impl Iterator<Item = u64>,
    expected: Violation,
    consequences: &[Violation],
) -> Option<u64> {
    let database = RunDatabase::new(Some(broken_rule)).await.expect("the database should be created");
    for seed in seeds {
        let result = run_plan(&database, Backends::InProcess, &generate_plan(seed), Some(broken_rule))
            .await
            .expect("the run should complete");
        let RunResult::Violated { violations, log, .. } = result else { continue };
        let is_expected =
            violations.iter().all(|violation| *violation == expected || consequences.contains(violation));
        assert!(is_expected, "seed {seed} found {violations:?}:\n{}", log.join("\n"));
        if violations.contains(&expected) {
            return Some(seed);
        }
    }
    None
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.running_machines += other.running_machines;
        self.routed_requests += other.routed_requests;
        self.successful_resizes += other.successful_resizes;
        self.planned_crashes += other.planned_crashes;
        self.started_backups += other.started_backups;
        self.acknowledged_rows += other.acknowledged_rows;
        self.database_restores += other.database_restores;
    }
}

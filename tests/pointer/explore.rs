//! Runs several actors on one scheduled store many times, in different orders and with different faults.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kit::long_tests::Figures;
use svc::machine::epoch::Epoch;
use svc::store::snapshot_with_sidecar::SnapshotWithSidecar;
use svc::store::{Bucket, snapshot};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::actors::{self, BrokenRule, ExternalState, slot};
use super::history::{History, Violation};
use super::schedule::{Choices, ExhaustiveChoices, SeededChoices};
use super::scheduled_store::{Call, CallOutcome, Conditions, ScheduledStore, Server, Turn};

/// The simulated time between two events, longer than any retry delay of a writer. The clock does not advance while an
/// actor can run.
const EVENT_INTERVAL: Duration = Duration::from_secs(5);

/// The actors in a run, and its fault budget.
#[derive(Debug, Clone)]
struct Scenario {
    roles: Vec<Role>,
    broken_rule: Option<BrokenRule>,
    conditions: Conditions,
    faults: u32,
    crashes: u32,
    /// The weight of a successful call relative to each of its faults. With a low weight, all faults would occur at the
    /// start.
    success_weight: usize,
}

#[derive(Debug, Clone, Copy)]
enum Role {
    Platform {
        epoch: u32,
    },
    Host {
        epoch: u32,
        backups: u32,
    },
    /// Performs only the last step of a backup.
    Advance {
        epoch: u32,
    },
    Reader {
        reads: u32,
    },
}

impl Scenario {
    /// Three epochs of a slot; two platform processes concurrently write the second epoch's fence.
    fn full() -> Self {
        let roles = vec![
            Role::Platform { epoch: 1 },
            Role::Host { epoch: 1, backups: 3 },
            Role::Platform { epoch: 2 },
            Role::Platform { epoch: 2 },
            Role::Host { epoch: 2, backups: 2 },
            Role::Platform { epoch: 3 },
            Role::Host { epoch: 3, backups: 1 },
            Role::Reader { reads: 3 },
        ];
        Self {
            roles,
            broken_rule: None,
            conditions: Conditions::Honored,
            faults: 12,
            crashes: 3,
            success_weight: 16,
        }
    }

    fn with_broken_rule(broken_rule: BrokenRule) -> Self {
        Self { broken_rule: Some(broken_rule), ..Self::full() }
    }
}

struct ScenarioRun {
    scenario: Scenario,
    server: Arc<Server>,
    external: Arc<ExternalState>,
    /// The snapshots for [`Role::Advance`], by actor.
    recorded: HashMap<usize, SnapshotWithSidecar>,
    actors: Vec<JoinHandle<()>>,
    turns: mpsc::UnboundedReceiver<Turn>,
    waiting: Vec<Turn>,
}

/// The result of one run.
struct RunResult {
    violations: Vec<Violation>,
    writes: u32,
    /// The number of faulty calls and crashes.
    faults: u32,
    log: Vec<String>,
}

/// A possible next event.
#[derive(Debug, Clone, Copy)]
enum Event {
    Call { waiting: usize, outcome: CallOutcome },
    Crash { waiting: usize, outcome: CallOutcome },
    ApplyLate { late: usize },
}

fn run_scenario(scenario: &Scenario, choices: &mut dyn Choices) -> RunResult {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(ScenarioRun::execute(scenario.clone(), choices))
}

/// Stores the dump and sidecar for every [`Role::Advance`] before the run starts.
async fn store_snapshots(server: &Server, roles: &[Role]) -> HashMap<usize, SnapshotWithSidecar> {
    let mut recorded = HashMap::new();
    for (actor, role) in roles.iter().enumerate() {
        let Role::Advance { epoch } = role else { continue };
        let taken_at = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(actor as i64);
        let sidecar = actors::sidecar(Epoch(*epoch), taken_at);
        let record = async |bucket: Bucket| {
            bucket.put(&slot().snapshot(&sidecar.key).unwrap(), &b"dump"[..]).await.unwrap();
            recorded.insert(actor, snapshot::write_sidecar(&bucket, &slot(), &sidecar, None).await.unwrap());
        };
        server.prepare(record).await;
    }
    recorded
}

impl ScenarioRun {
    async fn execute(scenario: Scenario, choices: &mut dyn Choices) -> RunResult {
        let (server, turns) = Server::new(slot(), scenario.conditions);
        let fault_budget = scenario.faults + scenario.crashes;
        let recorded = store_snapshots(&server, &scenario.roles).await;
        let mut run = Self {
            recorded,
            scenario,
            server,
            external: ExternalState::new(),
            actors: Vec::new(),
            turns,
            waiting: Vec::new(),
        };
        run.actors = (0..run.scenario.roles.len()).map(|actor| run.spawn_actor(actor)).collect();
        let mut log = Vec::new();
        loop {
            // Every actor runs until it waits for a turn: the paused clock advances only when none can run.
            tokio::time::sleep(EVENT_INTERVAL).await;
            while let Ok(turn) = run.turns.try_recv() {
                run.waiting.push(turn);
            }
            run.waiting.retain(|turn| !turn.reply.is_closed());
            run.waiting.sort_by_key(|turn| turn.actor);
            let events = run.possible_events();
            if events.is_empty() {
                break;
            }
            let next = events[choices.pick(events.len())];
            log.push(run.describe(next));
            run.apply(next).await;
        }
        run.actors.iter().for_each(JoinHandle::abort);
        let history = run.server.history.lock().unwrap();
        let faults = fault_budget - run.scenario.faults - run.scenario.crashes;
        RunResult { violations: history.violations.clone(), writes: history.writes, faults, log }
    }

    fn spawn_actor(&self, actor: usize) -> JoinHandle<()> {
        let bucket = Bucket::new(Arc::new(ScheduledStore { actor, server: Arc::clone(&self.server) }));
        let (external, server) = (Arc::clone(&self.external), Arc::clone(&self.server));
        let with_history =
            move |update: &mut dyn FnMut(&mut History)| update(&mut server.history.lock().unwrap());
        let broken_rule = self.scenario.broken_rule;
        match self.scenario.roles[actor] {
            Role::Platform { epoch } => {
                tokio::spawn(actors::run_platform(bucket, external, epoch, broken_rule))
            }
            Role::Host { epoch, backups } => {
                tokio::spawn(actors::run_host(bucket, external, with_history, (epoch, backups), broken_rule))
            }
            Role::Advance { .. } => {
                tokio::spawn(actors::run_advance(bucket, with_history, self.recorded[&actor].clone()))
            }
            Role::Reader { reads } => tokio::spawn(actors::run_reader(bucket, with_history, reads)),
        }
    }

    /// Returns the possible events, successful calls first.
    fn possible_events(&self) -> Vec<Event> {
        let successes =
            (0..self.waiting.len()).map(|waiting| Event::Call { waiting, outcome: CallOutcome::Done });
        let mut events: Vec<Event> =
            successes.flat_map(|event| std::iter::repeat_n(event, self.scenario.success_weight)).collect();
        events.extend((0..self.server.late_put_count()).map(|late| Event::ApplyLate { late }));
        for (waiting, turn) in self.waiting.iter().enumerate() {
            let outcomes: &[CallOutcome] = match turn.call {
                Call::Get => &CallOutcome::GET_FAULTS,
                Call::List => &CallOutcome::LIST_FAULTS,
                Call::Put => &CallOutcome::PUT_FAULTS,
            };
            if self.scenario.faults > 0 {
                events.extend(outcomes.iter().map(|&outcome| Event::Call { waiting, outcome }));
            }
            if self.scenario.crashes > 0 {
                events.push(Event::Crash { waiting, outcome: CallOutcome::Lost });
                if turn.call == Call::Put {
                    events.push(Event::Crash { waiting, outcome: CallOutcome::NoResponse });
                }
            }
        }
        events
    }

    fn describe(&self, next: Event) -> String {
        match next {
            Event::Call { waiting, .. } | Event::Crash { waiting, .. } => {
                let turn = &self.waiting[waiting];
                format!("{:?} {:?}: {next:?}", self.scenario.roles[turn.actor], turn.call)
            }
            Event::ApplyLate { .. } => format!("{next:?}"),
        }
    }

    async fn apply(&mut self, next: Event) {
        match next {
            Event::Call { waiting, outcome } => {
                self.scenario.faults -= u32::from(outcome != CallOutcome::Done);
                // Cannot fail: the turns of dropped calls have just been removed.
                let _ = self.waiting.remove(waiting).reply.send(outcome);
            }
            Event::Crash { waiting, outcome } => {
                self.scenario.crashes -= 1;
                let turn = self.waiting.remove(waiting);
                let actor = turn.actor;
                let _ = turn.reply.send(outcome);
                // The call completes before its caller is aborted.
                tokio::task::yield_now().await;
                self.actors[actor].abort();
                self.actors[actor] = self.spawn_actor(actor);
            }
            Event::ApplyLate { late } => self.server.apply_late(late).await,
        }
    }
}

/// Runs seeds until one produces the violation, and returns that seed.
fn find_violating_seed(scenario: &Scenario, violation: Violation, max_seeds: u64) -> Option<u64> {
    (0..max_seeds)
        .find(|&seed| run_scenario(scenario, &mut SeededChoices(seed)).violations.contains(&violation))
}

fn assert_no_violation(seed: u64, result: &RunResult) {
    assert!(result.violations.is_empty(), "seed {seed}: {:?}\n{}", result.violations, result.log.join("\n"));
}

fn assert_invariants_hold(scenario: &Scenario, seeds: std::ops::Range<u64>) -> Figures {
    let (mut writes, mut faults) = (0, 0);
    for seed in seeds.clone() {
        let result = run_scenario(scenario, &mut SeededChoices(seed));
        assert_no_violation(seed, &result);
        writes += u64::from(result.writes);
        faults += u64::from(result.faults);
    }
    let runs = seeds.end - seeds.start;
    println!("{runs} runs, {writes} pointer writes");
    assert!(writes > 3 * runs, "too few writes: {writes} in {runs} runs");
    Figures { faults_injected: faults, ..Figures::new("interleavings of the pointer's calls") }
}

#[test]
fn pointer_invariants_hold_under_random_orders_and_faults() {
    assert_invariants_hold(&Scenario::full(), 0..2000);
}

#[test]
fn pointer_invariants_hold_when_if_match_never_fails() {
    assert_invariants_hold(&Scenario { conditions: Conditions::CreateOnly, ..Scenario::full() }, 0..2000);
}

#[test]
#[ignore = "a long campaign: cargo xtask test --long"]
fn pointer_invariants_hold_under_many_more_orders() -> anyhow::Result<()> {
    assert_invariants_hold(&Scenario::full(), 3000..50_000).record()?;
    assert_invariants_hold(&Scenario { conditions: Conditions::CreateOnly, ..Scenario::full() }, 3000..50_000)
        .record()
}

/// Runs every interleaving of the scenario's calls, with every allowed fault at every position. Returns the number of
/// runs.
fn assert_invariants_hold_in_every_order(scenario: &Scenario) -> u64 {
    let (mut choices, mut runs) = (ExhaustiveChoices::default(), 0_u64);
    loop {
        let result = run_scenario(scenario, &mut choices);
        assert!(result.violations.is_empty(), "{:?}\n{}", result.violations, result.log.join("\n"));
        runs += 1;
        if !choices.next_run() {
            println!("{runs} orders");
            return runs;
        }
    }
}

/// Returns a scenario in which the old host's last write is concurrent with the successor's fence.
fn replacement_scenario(conditions: Conditions) -> Scenario {
    let roles = vec![Role::Advance { epoch: 0 }, Role::Platform { epoch: 1 }];
    Scenario { roles, broken_rule: None, conditions, faults: 0, crashes: 0, success_weight: 1 }
}

#[test]
fn pointer_invariants_hold_in_random_replacement_orders() {
    for conditions in [Conditions::Honored, Conditions::CreateOnly] {
        assert_invariants_hold_without_faults(&replacement_scenario(conditions), 0..1000);
    }
}

#[test]
#[ignore = "a long campaign: cargo xtask test --long"]
fn pointer_invariants_hold_in_every_replacement_order() {
    for conditions in [Conditions::Honored, Conditions::CreateOnly] {
        assert!(assert_invariants_hold_in_every_order(&replacement_scenario(conditions)) > 500);
    }
}

fn assert_invariants_hold_without_faults(scenario: &Scenario, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let result = run_scenario(scenario, &mut SeededChoices(seed));
        assert_no_violation(seed, &result);
        assert!(result.writes > 0, "seed {seed}: no actor has written the pointer");
    }
}

/// Two platforms' fences and a host's first backup, with up to one fault and one crash at random positions.
#[test]
fn pointer_invariants_hold_with_one_fault_and_one_crash() {
    let roles =
        vec![Role::Platform { epoch: 1 }, Role::Host { epoch: 1, backups: 1 }, Role::Platform { epoch: 2 }];
    for conditions in [Conditions::Honored, Conditions::CreateOnly] {
        let scenario = Scenario {
            roles: roles.clone(),
            broken_rule: None,
            conditions,
            faults: 1,
            crashes: 1,
            success_weight: 4,
        };
        for seed in 0..1500 {
            let result = run_scenario(&scenario, &mut SeededChoices(seed));
            assert!(
                result.violations.is_empty(),
                "seed {seed}: {:?}\n{}",
                result.violations,
                result.log.join("\n")
            );
        }
    }
}

#[test]
fn store_that_ignores_conditions_is_detected() {
    let scenario = Scenario { conditions: Conditions::Ignored, ..Scenario::full() };
    assert!(find_violating_seed(&scenario, Violation::LostUpdate, 200).is_some());
}

#[test]
fn every_faulty_writer_is_detected() {
    for (broken_rule, violation) in [
        (BrokenRule::FenceCheck, Violation::StaleSnapshot),
        (BrokenRule::WriteOrder, Violation::IncompleteSnapshot),
        (BrokenRule::WriteOrder, Violation::DamagedRead),
        (BrokenRule::ErrorReporting, Violation::FalseSuccess),
        (BrokenRule::MonotonicFence, Violation::FenceLowered),
        (BrokenRule::SnapshotRetention, Violation::SnapshotDropped),
    ] {
        let seed = find_violating_seed(&Scenario::with_broken_rule(broken_rule), violation, 500);
        println!("{broken_rule:?} is detected as {violation:?} by seed {seed:?}");
        assert!(seed.is_some(), "{broken_rule:?} is not detected as {violation:?}");
    }
}

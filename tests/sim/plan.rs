//! Generates a seed's plan: the actions of a run, as data that can be printed and shortened.

use super::rng::Rng;

/// Users and their slots. One user has two slots, because the platform serializes a user's requests.
pub const SLOTS: [(&str, &str); 3] = [("user_a", "primary"), ("user_a", "second"), ("user_b", "primary")];
pub const PROCESSES: usize = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Subscribe {
        slot: usize,
    },
    Provision {
        slot: usize,
        accept_loss: bool,
    },
    Recover {
        slot: usize,
        allow_empty: bool,
        accept_loss: bool,
    },
    /// Here and in the next actions, `machine` counts back from the newest of all machines that responses have named.
    Resize {
        machine: usize,
        to: &'static str,
    },
    Fail {
        machine: usize,
    },
    Delete {
        machine: usize,
        accept_loss: bool,
    },
    Undelete {
        machine: usize,
    },
    Resume {
        machine: usize,
    },
    Discard {
        machine: usize,
        accept_loss: bool,
    },
    /// `operation` counts back from the newest of all operations that responses have named.
    Abandon {
        operation: usize,
    },
    RebuildPointer {
        slot: usize,
    },
    /// The owner's app writes a row, which is acknowledged. Here and in the next actions, `host` counts back from the
    /// newest of all hosts that ever existed. Hosts without a server are included, because a clone of one may still be
    /// running.
    Write {
        host: usize,
    },
    Register {
        host: usize,
        host_key: u8,
    },
    Heartbeat {
        host: usize,
    },
    BootFailure {
        host: usize,
    },
    /// The backup may stop after the dump, or after the sidecar.
    BackUp {
        host: usize,
        stops_after: Option<u8>,
    },
    LoseServer {
        host: usize,
    },
    FailProvider {
        call: ProviderCall,
        fault: ProviderFault,
        times: u8,
    },
    FailStore {
        is_write: bool,
        fault: StoreFault,
        times: u8,
    },
    /// `system/db/latest` is deleted if `is_lost`, and otherwise overwritten with invalid JSON.
    BreakPointer {
        slot: usize,
        is_lost: bool,
    },
    /// Closes every connection to the database.
    CutDatabaseConnections,
    /// Copies the platform's database for a later restore.
    SaveDatabase,
    /// Kills the platform's processes, replaces their database with the copy, if there is one, and starts them again.
    RestoreDatabase,
    Crash {
        process: usize,
    },
    /// Kills the process at a later call of this kind, before or after the call's effect. `calls_to_skip` is the number
    /// of calls that pass first.
    CrashAt {
        process: usize,
        kill_point: KillPoint,
        calls_to_skip: u8,
    },
    Stop {
        process: usize,
    },
    Start {
        process: usize,
    },
    /// Moves the stored times that affect decisions into the past. With `expire_leases`, every current holder loses its
    /// lease.
    AdvanceTime {
        seconds: u32,
        expire_leases: bool,
    },
    /// Waits, for a bounded time, until every running operation is waiting for a host.
    WaitForOperations,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderCall {
    Create,
    Read,
    Delete,
    Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderFault {
    RateLimited,
    /// The call fails with 5xx and has no effect.
    ServerError,
    /// The call takes effect, but the response is lost.
    LostResponse,
    /// The response is lost, and the call takes effect a little later.
    Late,
    /// The call takes effect, but the response is late.
    Slow,
    Refused,
    /// The call is accepted, but its action fails.
    ActionError,
    /// The list omits every other server.
    Partial,
    /// The location has no capacity.
    NoCapacity,
    /// Another action has locked the server.
    Locked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreFault {
    Unavailable,
    LostResponse,
    Slow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillPoint {
    BeforeProvider,
    AfterProvider,
    BeforeStore,
    AfterStore,
}

#[derive(Debug, Clone)]
pub struct Step {
    /// The process that receives the request.
    pub process_index: usize,
    pub action: Action,
    /// Whether the request is also sent to another process concurrently, with the same key.
    pub is_sent_twice: bool,
    /// One of a few keys, so that keys are reused.
    pub key: Option<u8>,
    /// The maximum wait for the response before the next step.
    pub wait_ms: u64,
}

/// Generates the plan for a seed.
pub fn generate_plan(seed: u64) -> Vec<Step> {
    let mut rng = Rng::new(seed);
    let length = 20 + rng.below(21);
    // The remaining runs have few faults, so that more of their operations complete.
    let has_many_faults = rng.percent(60);
    let mut steps: Vec<Step> =
        (0..SLOTS.len()).map(|slot| build_step(&mut rng, Action::Subscribe { slot })).collect();
    for step in &mut steps {
        step.wait_ms = 2000;
    }
    while steps.len() < length {
        if rng.percent(80) {
            let action = pick_action(&mut rng, has_many_faults);
            steps.push(build_step(&mut rng, action));
            continue;
        }
        for action in pick_machine_lifecycle(&mut rng) {
            steps.push(build_step(&mut rng, action));
            if rng.percent(25) {
                let between = pick_action(&mut rng, has_many_faults);
                steps.push(build_step(&mut rng, between));
            }
        }
    }
    steps.truncate(length);
    if rng.percent(10) {
        let saved = SLOTS.len() + rng.below(length / 2);
        let restored = saved + 1 + rng.below(length - saved);
        for (index, action) in [(saved, Action::SaveDatabase), (restored, Action::RestoreDatabase)] {
            let step = build_step(&mut rng, action);
            steps.insert(index.min(steps.len()), step);
        }
    }
    steps
}

/// Picks a typical sequence of actions on a slot, so that runs reach machines with data that could be lost.
fn pick_machine_lifecycle(rng: &mut Rng) -> Vec<Action> {
    let slot = rng.below(SLOTS.len());
    let (newest, previous) = (0, 1);
    let boot = [Action::WaitForOperations, Action::Register { host: newest, host_key: 0 }];
    let back_up = |host| Action::BackUp { host, stops_after: None };
    let is_recovery = rng.percent(40);
    let accept_loss = rng.percent(ACCEPT_LOSS_PERCENT);
    let mut actions = if is_recovery {
        vec![
            back_up(newest),
            Action::WaitForOperations,
            Action::Recover { slot, allow_empty: false, accept_loss },
            back_up(newest),
        ]
    } else if rng.percent(65) {
        vec![Action::Provision { slot, accept_loss }]
    } else {
        vec![Action::Delete { machine: 0, accept_loss }, Action::Provision { slot, accept_loss }]
    };
    actions.extend(boot);
    actions.push(Action::Write { host: newest });
    if rng.percent(20) {
        let resize = Action::Resize { machine: 0, to: rng.pick(&["cpx32", "cpx52"]) };
        actions.extend([resize, Action::WaitForOperations, Action::Heartbeat { host: newest }]);
    }
    if is_recovery || rng.percent(15) {
        actions.push(back_up(previous));
    }
    if rng.percent(50) {
        actions.push(back_up(newest));
    }
    if rng.percent(15) {
        actions.push(Action::Register { host: newest, host_key: 1 });
    }
    actions
}

/// The percentage of requests in which an operator accepts a loss.
const ACCEPT_LOSS_PERCENT: u64 = 30;

fn build_step(rng: &mut Rng, action: Action) -> Step {
    let is_sent_twice = rng.percent(12);
    let key = (is_sent_twice || rng.percent(45)).then(|| rng.below(2) as u8);
    let wait_ms = [0, 2, 15, 60, 250][rng.pick_weighted(&[2, 3, 3, 3, 1])];
    Step { process_index: rng.below(PROCESSES), action, is_sent_twice, key, wait_ms }
}

fn pick_action(rng: &mut Rng, has_many_faults: bool) -> Action {
    let fault_weight = u32::from(has_many_faults);
    let weights = [
        1,
        7,
        5,
        5,
        3,
        4,
        14,
        3,
        2,
        7,
        1 + fault_weight,
        1 + 4 * fault_weight,
        3 * fault_weight,
        fault_weight,
        2 * fault_weight,
        3 * fault_weight,
        1,
        3 * fault_weight,
        2,
        8,
        10,
        3,
        2,
        1,
        2,
        1 + fault_weight,
        fault_weight,
    ];
    let machine = rng.below(64);
    let slot = rng.below(SLOTS.len());
    // Mostly one of the newest hosts, which have the most activity.
    let host = if rng.percent(70) { rng.below(3) } else { rng.below(64) };
    let process = rng.below(PROCESSES);
    match rng.pick_weighted(&weights) {
        0 => Action::Subscribe { slot },
        1 => Action::Provision { slot, accept_loss: rng.percent(ACCEPT_LOSS_PERCENT) },
        2 => Action::Recover {
            slot,
            allow_empty: rng.percent(70),
            accept_loss: rng.percent(ACCEPT_LOSS_PERCENT),
        },
        3 => Action::Resize { machine, to: rng.pick(&["cpx22", "cpx32", "cpx52"]) },
        4 => Action::Fail { machine },
        5 => Action::Delete { machine, accept_loss: rng.percent(ACCEPT_LOSS_PERCENT) },
        6 => Action::Register { host, host_key: u8::from(rng.percent(25)) },
        7 => Action::Heartbeat { host },
        8 => Action::BootFailure { host },
        9 => Action::BackUp { host, stops_after: rng.percent(25).then(|| 1 + rng.below(2) as u8) },
        10 => Action::LoseServer { host },
        11 => pick_provider_fault(rng),
        12 => Action::FailStore {
            is_write: rng.percent(60),
            fault: rng.pick(&[StoreFault::Unavailable, StoreFault::LostResponse, StoreFault::Slow]),
            times: 1 + rng.below(3) as u8,
        },
        13 => Action::CutDatabaseConnections,
        14 => Action::Crash { process },
        15 => {
            use KillPoint::{AfterProvider, AfterStore, BeforeProvider, BeforeStore};
            let kill_point =
                rng.pick(&[BeforeProvider, AfterProvider, AfterProvider, BeforeStore, AfterStore]);
            Action::CrashAt { process, kill_point, calls_to_skip: rng.below(3) as u8 }
        }
        16 => Action::Stop { process },
        17 => Action::Start { process },
        18 => {
            Action::AdvanceTime { seconds: rng.pick(&[1, 5, 30, 90, 1000]), expire_leases: rng.percent(40) }
        }
        19 => Action::WaitForOperations,
        20 => Action::Write { host },
        21 => Action::Undelete { machine },
        22 => Action::Resume { machine },
        23 => Action::Discard { machine, accept_loss: rng.percent(ACCEPT_LOSS_PERCENT) },
        24 => Action::Abandon { operation: rng.below(3) },
        25 => Action::RebuildPointer { slot },
        _ => Action::BreakPointer { slot, is_lost: rng.percent(60) },
    }
}

fn pick_provider_fault(rng: &mut Rng) -> Action {
    use ProviderFault::{
        ActionError, Late, Locked, LostResponse, NoCapacity, Partial, RateLimited, Refused, ServerError, Slow,
    };
    let call = rng.pick(&[
        ProviderCall::Create,
        ProviderCall::Create,
        ProviderCall::Create,
        ProviderCall::Read,
        ProviderCall::Delete,
        ProviderCall::Action,
    ]);
    let fault = match call {
        ProviderCall::Create => {
            rng.pick(&[RateLimited, ServerError, LostResponse, LostResponse, Late, Slow, Refused, NoCapacity])
        }
        ProviderCall::Read => rng.pick(&[RateLimited, ServerError, Slow, Partial, Partial]),
        ProviderCall::Delete => rng.pick(&[RateLimited, ServerError, LostResponse, Slow, Locked]),
        ProviderCall::Action => {
            rng.pick(&[RateLimited, ServerError, LostResponse, Slow, Refused, ActionError])
        }
    };
    Action::FailProvider { call, fault, times: 1 + rng.below(3) as u8 }
}

#[test]
fn plan_is_determined_by_its_seed() {
    assert_eq!(format!("{:?}", generate_plan(7)), format!("{:?}", generate_plan(7)));
    assert_ne!(format!("{:?}", generate_plan(7)), format!("{:?}", generate_plan(8)));
    let lengths: std::collections::BTreeSet<usize> = (0..200).map(|seed| generate_plan(seed).len()).collect();
    assert!(lengths.iter().all(|length| (20..=42).contains(length)), "{lengths:?}");
}

//! The actions of a run: a seed's plan, as data that can be printed and shortened.

use super::rng::Rng;

/// Users and their slots. One user has two slots, because the platform serialises a user's requests.
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
        empty: bool,
        accept_loss: bool,
    },
    /// Any machine that a response ever named.
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
    /// Any operation that a response ever named.
    Abandon {
        operation: usize,
    },
    RebuildPointer {
        slot: usize,
    },
    /// The owner's app writes a row, which is acknowledged.
    Write {
        host: usize,
    },
    /// Any host that ever existed, even if its server no longer does: a copy of its disk may still run.
    Register {
        host: usize,
        body: u8,
    },
    Heartbeat {
        host: usize,
    },
    BootFailure {
        host: usize,
    },
    /// The backup may stop after the dump, or after the side record.
    BackUp {
        host: usize,
        stops_after: Option<u8>,
    },
    ServerVanishes {
        host: usize,
    },
    FailProvider {
        call: Call,
        fault: CloudFault,
        times: u8,
    },
    StoreFails {
        write: bool,
        fault: StoreFault,
        times: u8,
    },
    /// `system/db/latest` is deleted, or overwritten with invalid JSON.
    PointerBreaks {
        slot: usize,
        is_lost: bool,
    },
    /// Closes every connection to the database.
    CutDatabase,
    /// Copies the platform's database for a later restore.
    SaveDatabase,
    /// Stops the platform, replaces its database by the copy, and starts it again.
    DatabaseRestored,
    Crash {
        process: usize,
    },
    /// Kills the process at its `nth` next call of this kind, before or after the call's effect.
    CrashAt {
        process: usize,
        moment: Moment,
        nth: u8,
    },
    Stop {
        process: usize,
    },
    Start {
        process: usize,
    },
    /// Moves all stored times into the past. With `leases`, every current holder loses its lease.
    TimePasses {
        seconds: u32,
        leases: bool,
    },
    /// Waits until the operations are idle, for a bounded time.
    Rest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Create,
    Read,
    Delete,
    Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloudFault {
    RateLimited,
    /// 5xx, without effect.
    ServerError,
    /// Takes effect; the response is lost.
    LostReply,
    /// The response is lost; takes effect a little later.
    Late,
    /// Takes effect; the response is late.
    Slow,
    Refused,
    /// Accepted; the action fails.
    ActionError,
    /// The list omits every other server.
    Partial,
    /// A temporary error of the account: no capacity at the location.
    NoCapacity,
    /// The server is locked by something else.
    Locked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreFault {
    Unavailable,
    LostReply,
    Slow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    BeforeProvider,
    AfterProvider,
    BeforeStore,
    AfterStore,
}

#[derive(Debug, Clone)]
pub struct Step {
    /// The process that receives the request.
    pub via: usize,
    pub action: Action,
    /// Whether the request is also sent to another process concurrently, with the same key.
    pub twice: bool,
    /// One of a few keys, so that keys are reused.
    pub key: Option<u8>,
    /// The maximum wait for the response before the next step.
    pub wait_ms: u64,
}

/// The plan of a seed.
pub fn plan(seed: u64) -> Vec<Step> {
    let mut rng = Rng::new(seed);
    let length = 20 + rng.below(21);
    // A run has either faults or many requests; with both, few operations would complete.
    let troubled = rng.percent(60);
    let mut steps: Vec<Step> =
        (0..SLOTS.len()).map(|slot| step(&mut rng, Action::Subscribe { slot })).collect();
    for step in &mut steps {
        step.wait_ms = 2000;
    }
    while steps.len() < length {
        if rng.percent(80) {
            let action = action(&mut rng, troubled);
            steps.push(step(&mut rng, action));
            continue;
        }
        for action in machine_life(&mut rng) {
            steps.push(step(&mut rng, action));
            if rng.percent(25) {
                let between = self::action(&mut rng, troubled);
                steps.push(step(&mut rng, between));
            }
        }
    }
    steps.truncate(length);
    if rng.percent(10) {
        let saved = SLOTS.len() + rng.below(length / 2);
        let restored = saved + 1 + rng.below(length - saved);
        for (at, action) in [(saved, Action::SaveDatabase), (restored, Action::DatabaseRestored)] {
            let step = step(&mut rng, action);
            steps.insert(at.min(steps.len()), step);
        }
    }
    steps
}

/// A typical sequence of actions on a slot, so that runs reach machines with data that could be lost.
fn machine_life(rng: &mut Rng) -> Vec<Action> {
    let slot = rng.below(SLOTS.len());
    let (newest, before) = (0, 1);
    let comes_up = [Action::Rest, Action::Register { host: newest, body: 0 }];
    let backs_up = |host| Action::BackUp { host, stops_after: None };
    let recovers = rng.percent(40);
    let accept_loss = rng.percent(ACCEPT_LOSS_PERCENT);
    let mut life = if recovers {
        vec![
            backs_up(newest),
            Action::Rest,
            Action::Recover { slot, empty: false, accept_loss },
            backs_up(newest),
        ]
    } else if rng.percent(65) {
        vec![Action::Provision { slot, accept_loss }]
    } else {
        vec![Action::Delete { machine: 0, accept_loss }, Action::Provision { slot, accept_loss }]
    };
    life.extend(comes_up);
    life.push(Action::Write { host: newest });
    if rng.percent(20) {
        let resize = Action::Resize { machine: 0, to: rng.pick(&["cpx32", "cpx52"]) };
        life.extend([resize, Action::Rest, Action::Heartbeat { host: newest }]);
    }
    if recovers || rng.percent(15) {
        life.push(backs_up(before));
    }
    if rng.percent(50) {
        life.push(backs_up(newest));
    }
    if rng.percent(15) {
        life.push(Action::Register { host: newest, body: 1 });
    }
    life
}

/// The percentage of requests in which an operator accepts a loss.
const ACCEPT_LOSS_PERCENT: u64 = 30;

fn step(rng: &mut Rng, action: Action) -> Step {
    let twice = rng.percent(12);
    let key = (twice || rng.percent(45)).then(|| rng.below(2) as u8);
    let wait_ms = [0, 2, 15, 60, 250][rng.pick_weighted(&[2, 3, 3, 3, 1])];
    Step { via: rng.below(PROCESSES), action, twice, key, wait_ms }
}

fn action(rng: &mut Rng, troubled: bool) -> Action {
    let trouble = u32::from(troubled);
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
        1 + trouble,
        1 + 4 * trouble,
        3 * trouble,
        trouble,
        2 * trouble,
        3 * trouble,
        1,
        3 * trouble,
        2,
        8,
        10,
        3,
        2,
        1,
        2,
        1 + trouble,
        trouble,
    ];
    let machine = rng.below(64);
    let slot = rng.below(SLOTS.len());
    // Mostly one of the newest machines, which have the most activity.
    let host = if rng.percent(70) { rng.below(3) } else { rng.below(64) };
    let process = rng.below(PROCESSES);
    match rng.pick_weighted(&weights) {
        0 => Action::Subscribe { slot },
        1 => Action::Provision { slot, accept_loss: rng.percent(ACCEPT_LOSS_PERCENT) },
        2 => Action::Recover { slot, empty: rng.percent(70), accept_loss: rng.percent(ACCEPT_LOSS_PERCENT) },
        3 => Action::Resize { machine, to: rng.pick(&["cpx22", "cpx32", "cpx52"]) },
        4 => Action::Fail { machine },
        5 => Action::Delete { machine, accept_loss: rng.percent(ACCEPT_LOSS_PERCENT) },
        6 => Action::Register { host, body: u8::from(rng.percent(25)) },
        7 => Action::Heartbeat { host },
        8 => Action::BootFailure { host },
        9 => Action::BackUp { host, stops_after: rng.percent(25).then(|| 1 + rng.below(2) as u8) },
        10 => Action::ServerVanishes { host },
        11 => provider_fails(rng),
        12 => Action::StoreFails {
            write: rng.percent(60),
            fault: rng.pick(&[StoreFault::Unavailable, StoreFault::LostReply, StoreFault::Slow]),
            times: 1 + rng.below(3) as u8,
        },
        13 => Action::CutDatabase,
        14 => Action::Crash { process },
        15 => {
            use Moment::{AfterProvider, AfterStore, BeforeProvider, BeforeStore};
            let moment = rng.pick(&[BeforeProvider, AfterProvider, AfterProvider, BeforeStore, AfterStore]);
            Action::CrashAt { process, moment, nth: rng.below(3) as u8 }
        }
        16 => Action::Stop { process },
        17 => Action::Start { process },
        18 => Action::TimePasses { seconds: rng.pick(&[1, 5, 30, 90, 1000]), leases: rng.percent(40) },
        19 => Action::Rest,
        20 => Action::Write { host },
        21 => Action::Undelete { machine },
        22 => Action::Resume { machine },
        23 => Action::Discard { machine, accept_loss: rng.percent(ACCEPT_LOSS_PERCENT) },
        24 => Action::Abandon { operation: rng.below(3) },
        25 => Action::RebuildPointer { slot },
        _ => Action::PointerBreaks { slot, is_lost: rng.percent(60) },
    }
}

fn provider_fails(rng: &mut Rng) -> Action {
    use CloudFault::{
        ActionError, Late, Locked, LostReply, NoCapacity, Partial, RateLimited, Refused, ServerError, Slow,
    };
    let call = rng.pick(&[Call::Create, Call::Create, Call::Create, Call::Read, Call::Delete, Call::Action]);
    let fault = match call {
        Call::Create => {
            rng.pick(&[RateLimited, ServerError, LostReply, LostReply, Late, Slow, Refused, NoCapacity])
        }
        Call::Read => rng.pick(&[RateLimited, ServerError, Slow, Partial, Partial]),
        Call::Delete => rng.pick(&[RateLimited, ServerError, LostReply, Slow, Locked]),
        Call::Action => rng.pick(&[RateLimited, ServerError, LostReply, Slow, Refused, ActionError]),
    };
    Action::FailProvider { call, fault, times: 1 + rng.below(3) as u8 }
}

#[test]
fn plan_is_determined_by_its_seed() {
    assert_eq!(format!("{:?}", plan(7)), format!("{:?}", plan(7)));
    assert_ne!(format!("{:?}", plan(7)), format!("{:?}", plan(8)));
    let lengths: std::collections::BTreeSet<usize> = (0..200).map(|seed| plan(seed).len()).collect();
    assert!(lengths.iter().all(|length| (20..=42).contains(length)), "{lengths:?}");
}

//! Runs of several actors on one staged store, each in another order and with other faults.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kit::long::Figures;
use svc::machine::epoch::Epoch;
use svc::store::snapshot::Recorded;
use svc::store::{Bucket, snapshot};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::actors::{self, Careless, Outside, slot};
use super::history::{History, Violation};
use super::schedule::{Choices, Exhaustive, Seeded};
use super::staged::{Call, Conditions, Fate, Server, Staged, Turn};

/// Longer than any pause that a writer makes before it tries again; the clock stands still while anybody can go on.
const ALL_PAUSES: Duration = Duration::from_secs(5);

/// Who takes part, and how much may go wrong.
#[derive(Debug, Clone)]
struct Scene {
    roles: Vec<Role>,
    careless: Option<Careless>,
    conditions: Conditions,
    faults: u32,
    crashes: u32,
    /// How much likelier a call goes well than each of its faults happens: else all faults happen at the beginning.
    calm: usize,
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
    /// The last step of a backup alone.
    Advance {
        epoch: u32,
    },
    Reader {
        looks: u32,
    },
}

impl Scene {
    /// Three lives of a slot, the fence of the second written by two platform processes at once.
    fn whole() -> Self {
        let roles = vec![
            Role::Platform { epoch: 1 },
            Role::Host { epoch: 1, backups: 3 },
            Role::Platform { epoch: 2 },
            Role::Platform { epoch: 2 },
            Role::Host { epoch: 2, backups: 2 },
            Role::Platform { epoch: 3 },
            Role::Host { epoch: 3, backups: 1 },
            Role::Reader { looks: 3 },
        ];
        Self { roles, careless: None, conditions: Conditions::Honoured, faults: 12, crashes: 3, calm: 16 }
    }

    fn careless(careless: Careless) -> Self {
        Self { careless: Some(careless), ..Self::whole() }
    }
}

struct Stage {
    scene: Scene,
    server: Arc<Server>,
    outside: Arc<Outside>,
    /// The snapshots of [`Role::Advance`], by actor.
    recorded: HashMap<usize, Recorded>,
    actors: Vec<JoinHandle<()>>,
    turns: mpsc::UnboundedReceiver<Turn>,
    waiting: Vec<Turn>,
}

/// What one run showed.
struct Shown {
    violations: Vec<Violation>,
    writes: u32,
    /// Calls that went wrong, and writers that died.
    faults: u32,
    log: Vec<String>,
}

/// One thing that can happen next.
#[derive(Debug, Clone, Copy)]
enum Next {
    Call { waiting: usize, fate: Fate },
    Crash { waiting: usize, fate: Fate },
    Land { late: usize },
}

fn play(scene: &Scene, choices: &mut dyn Choices) -> Shown {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(Stage::play(scene.clone(), choices))
}

/// Dump and side record of every [`Role::Advance`], in the store before anything begins.
async fn prepared(server: &Server, roles: &[Role]) -> HashMap<usize, Recorded> {
    let mut recorded = HashMap::new();
    for (actor, role) in roles.iter().enumerate() {
        let Role::Advance { epoch } = role else { continue };
        let at = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(actor as i64);
        let side = actors::side_record(Epoch(*epoch), at);
        let record = async |bucket: Bucket| {
            bucket.put(&slot().snapshot(&side.key).unwrap(), &b"dump"[..]).await.unwrap();
            recorded.insert(actor, snapshot::record(&bucket, &slot(), &side, None).await.unwrap());
        };
        server.prepare(record).await;
    }
    recorded
}

impl Stage {
    async fn play(scene: Scene, choices: &mut dyn Choices) -> Shown {
        let (server, turns) = Server::new(slot(), scene.conditions);
        let bad = scene.faults + scene.crashes;
        let recorded = prepared(&server, &scene.roles).await;
        let mut stage = Self {
            recorded,
            scene,
            server,
            outside: Outside::new(),
            actors: Vec::new(),
            turns,
            waiting: Vec::new(),
        };
        stage.actors = (0..stage.scene.roles.len()).map(|actor| stage.enter(actor)).collect();
        let mut log = Vec::new();
        loop {
            // Everybody goes on until they wait for a turn: the paused clock moves only when nobody can.
            tokio::time::sleep(ALL_PAUSES).await;
            while let Ok(turn) = stage.turns.try_recv() {
                stage.waiting.push(turn);
            }
            stage.waiting.retain(|turn| !turn.go.is_closed());
            stage.waiting.sort_by_key(|turn| turn.actor);
            let open = stage.open();
            if open.is_empty() {
                break;
            }
            let next = open[choices.pick(open.len())];
            log.push(stage.told(next));
            stage.happen(next).await;
        }
        stage.actors.iter().for_each(JoinHandle::abort);
        let history = stage.server.history.lock().unwrap();
        let faults = bad - stage.scene.faults - stage.scene.crashes;
        Shown { violations: history.violations.clone(), writes: history.writes, faults, log }
    }

    fn enter(&self, actor: usize) -> JoinHandle<()> {
        let bucket = Bucket::new(Arc::new(Staged { actor, server: Arc::clone(&self.server) }));
        let (outside, server) = (Arc::clone(&self.outside), Arc::clone(&self.server));
        let history = move |tell: &mut dyn FnMut(&mut History)| tell(&mut server.history.lock().unwrap());
        let careless = self.scene.careless;
        match self.scene.roles[actor] {
            Role::Platform { epoch } => tokio::spawn(actors::platform(bucket, outside, epoch, careless)),
            Role::Host { epoch, backups } => {
                tokio::spawn(actors::host(bucket, outside, history, (epoch, backups), careless))
            }
            Role::Advance { .. } => {
                tokio::spawn(actors::advance(bucket, history, self.recorded[&actor].clone()))
            }
            Role::Reader { looks } => tokio::spawn(actors::reader(bucket, history, looks)),
        }
    }

    /// Everything that can happen now, what goes well first.
    fn open(&self) -> Vec<Next> {
        let good = (0..self.waiting.len()).map(|waiting| Next::Call { waiting, fate: Fate::Done });
        let mut open: Vec<Next> = good.flat_map(|next| std::iter::repeat_n(next, self.scene.calm)).collect();
        open.extend((0..self.server.late()).map(|late| Next::Land { late }));
        for (waiting, turn) in self.waiting.iter().enumerate() {
            let fates: &[Fate] = match turn.call {
                Call::Get => &Fate::OF_GET,
                Call::List => &Fate::OF_LIST,
                Call::Put => &Fate::OF_PUT,
            };
            if self.scene.faults > 0 {
                open.extend(fates.iter().map(|&fate| Next::Call { waiting, fate }));
            }
            if self.scene.crashes > 0 {
                open.push(Next::Crash { waiting, fate: Fate::Lost });
                if turn.call == Call::Put {
                    open.push(Next::Crash { waiting, fate: Fate::Unanswered });
                }
            }
        }
        open
    }

    fn told(&self, next: Next) -> String {
        match next {
            Next::Call { waiting, .. } | Next::Crash { waiting, .. } => {
                let turn = &self.waiting[waiting];
                format!("{:?} {:?}: {next:?}", self.scene.roles[turn.actor], turn.call)
            }
            Next::Land { .. } => format!("{next:?}"),
        }
    }

    async fn happen(&mut self, next: Next) {
        match next {
            Next::Call { waiting, fate } => {
                self.scene.faults -= u32::from(fate != Fate::Done);
                // Whoever waited may have been ended meanwhile.
                let _ = self.waiting.remove(waiting).go.send(fate);
            }
            Next::Crash { waiting, fate } => {
                self.scene.crashes -= 1;
                let turn = self.waiting.remove(waiting);
                let actor = turn.actor;
                let _ = turn.go.send(fate);
                // The call has its fate before its caller dies.
                tokio::task::yield_now().await;
                self.actors[actor].abort();
                self.actors[actor] = self.enter(actor);
            }
            Next::Land { late } => self.server.land(late).await,
        }
    }
}

/// Plays seeds until one shows this violation; the number of seeds that it took.
fn seeds_until(scene: &Scene, violation: Violation, most: u64) -> Option<u64> {
    (0..most).find(|&seed| play(scene, &mut Seeded(seed)).violations.contains(&violation))
}

fn hold(scene: &Scene, seeds: std::ops::Range<u64>) -> Figures {
    let (mut writes, mut faults) = (0, 0);
    for seed in seeds.clone() {
        let shown = play(scene, &mut Seeded(seed));
        assert!(shown.violations.is_empty(), "seed {seed}: {:?}\n{}", shown.violations, shown.log.join("\n"));
        writes += u64::from(shown.writes);
        faults += u64::from(shown.faults);
    }
    let runs = seeds.end - seeds.start;
    println!("{runs} runs, {writes} writes of the pointer");
    assert!(writes > 3 * runs, "the runs get somewhere: {writes} writes in {runs} runs");
    Figures { faults_tried: faults, ..Figures::new("orders of the pointer's calls") }
}

#[test]
fn the_pointer_holds_under_random_orders_and_faults() {
    hold(&Scene::whole(), 0..2000);
}

#[test]
fn pointer_holds_where_if_match_refuses_nothing() {
    hold(&Scene { conditions: Conditions::CreateAlone, ..Scene::whole() }, 0..2000);
}

#[test]
#[ignore = "a long campaign: cargo xtask test --long"]
fn the_pointer_holds_under_many_more_orders_and_faults() -> anyhow::Result<()> {
    hold(&Scene::whole(), 3000..50_000).record()?;
    hold(&Scene { conditions: Conditions::CreateAlone, ..Scene::whole() }, 3000..50_000).record()
}

/// Every order of the scene's calls, with every fault that it allows at every place.
fn hold_in_every_order(scene: &Scene) -> u64 {
    let (mut choices, mut runs) = (Exhaustive::default(), 0_u64);
    loop {
        let shown = play(scene, &mut choices);
        assert!(shown.violations.is_empty(), "{:?}\n{}", shown.violations, shown.log.join("\n"));
        runs += 1;
        if !choices.next_run() {
            println!("{runs} orders");
            return runs;
        }
    }
}

/// The old host's last write and the successor's fence at once.
fn replacement(conditions: Conditions) -> Scene {
    let roles = vec![Role::Advance { epoch: 0 }, Role::Platform { epoch: 1 }];
    Scene { roles, careless: None, conditions, faults: 0, crashes: 0, calm: 1 }
}

#[test]
fn pointer_holds_in_random_orders_of_a_replacement() {
    for conditions in [Conditions::Honoured, Conditions::CreateAlone] {
        hold_without_faults(&replacement(conditions), 0..1000);
    }
}

#[test]
#[ignore = "a long campaign: cargo xtask test --long"]
fn pointer_holds_in_every_order_of_a_replacement() {
    for conditions in [Conditions::Honoured, Conditions::CreateAlone] {
        assert!(hold_in_every_order(&replacement(conditions)) > 500);
    }
}

fn hold_without_faults(scene: &Scene, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let shown = play(scene, &mut Seeded(seed));
        assert!(shown.violations.is_empty(), "seed {seed}: {:?}\n{}", shown.violations, shown.log.join("\n"));
        assert!(shown.writes > 0, "seed {seed} gets somewhere");
    }
}

/// A platform's fence and the host's first backup after it, with one fault and one crash somewhere.
#[test]
fn pointer_holds_with_one_fault_and_one_crash() {
    let roles =
        vec![Role::Platform { epoch: 1 }, Role::Host { epoch: 1, backups: 1 }, Role::Platform { epoch: 2 }];
    for conditions in [Conditions::Honoured, Conditions::CreateAlone] {
        let scene =
            Scene { roles: roles.clone(), careless: None, conditions, faults: 1, crashes: 1, calm: 4 };
        for seed in 0..1500 {
            let shown = play(&scene, &mut Seeded(seed));
            assert!(
                shown.violations.is_empty(),
                "seed {seed}: {:?}\n{}",
                shown.violations,
                shown.log.join("\n")
            );
        }
    }
}

#[test]
fn a_store_that_ignores_conditions_is_caught() {
    let scene = Scene { conditions: Conditions::Ignored, ..Scene::whole() };
    assert!(seeds_until(&scene, Violation::WentBack, 200).is_some());
}

#[test]
fn every_careless_writer_is_caught() {
    for (careless, violation) in [
        (Careless::Fence, Violation::FencedOff),
        (Careless::Order, Violation::Unverified),
        (Careless::Order, Violation::SeenDamaged),
        (Careless::Success, Violation::FalseSuccess),
        (Careless::Lowering, Violation::FenceLowered),
        (Careless::Tombstone, Violation::Forgotten),
    ] {
        let seeds = seeds_until(&Scene::careless(careless), violation, 500);
        println!("{careless:?} is caught as {violation:?} by seed {seeds:?}");
        assert!(seeds.is_some(), "{careless:?} is not caught as {violation:?}");
    }
}

//! How a rollout goes on, pure: from what is known of its machines to what is to be done now.
//!
//! Reads no clock and no database. The invariants: at most one batch is asked at a time, the canary first and alone; a
//! batch begins only when every machine of the one before has ended; nothing is asked after the canary failed or as many
//! have failed as may; and a machine that is asked ends by its word, its end, or its silence.

use crate::machine::id::MachineId;

/// Where a machine of a rollout stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stand {
    Waiting,
    Asked,
    Updated,
    Failed,
    Skipped,
}

impl Stand {
    pub const ALL: [Self; 5] = [Self::Waiting, Self::Asked, Self::Updated, Self::Failed, Self::Skipped];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Asked => "asked",
            Self::Updated => "updated",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

impl std::str::FromStr for Stand {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|stand| stand.as_str() == text).ok_or_else(|| text.to_owned())
    }
}

/// What is known of a machine now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub machine: MachineId,
    pub batch: i32,
    pub stand: Stand,
    /// It runs, and holds its slot.
    pub is_running: bool,
    /// Its host says that it runs this release, and that it is well.
    pub is_there: bool,
    /// What its host said since it was asked: why the update did not come about.
    pub refused: Option<String>,
    /// It is waited for no longer: it has been silent, or at it, for too long.
    pub is_overdue: bool,
}

/// Whether machines are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    Goes,
    /// Paused, stopped or aborted: what was asked still ends.
    Stands,
}

/// What is to be written and done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    Settle { machine: MachineId, stand: Stand, error: Option<String> },
    Ask { machine: MachineId },
    Stop { why: String },
    Succeed,
}

/// What is to be done now.
pub fn next(pace: Pace, max_failures: usize, members: &[Member]) -> Vec<Effect> {
    let mut effects = Vec::new();
    let mut stands: Vec<(i32, Stand)> = Vec::new();
    for member in members {
        let settled = if member.stand == Stand::Asked { settle(member) } else { None };
        let stand = settled.as_ref().map_or(member.stand, |(stand, _)| *stand);
        stands.push((member.batch, stand));
        if let Some((stand, error)) = settled {
            effects.push(Effect::Settle { machine: member.machine, stand, error });
        }
    }
    if pace == Pace::Stands {
        return effects;
    }
    let failed = stands.iter().filter(|(_, stand)| *stand == Stand::Failed).count();
    if stands.iter().any(|(batch, stand)| *batch == 0 && *stand == Stand::Failed) {
        effects.push(Effect::Stop { why: "the canary failed".to_owned() });
        return effects;
    }
    if failed >= max_failures {
        effects.push(Effect::Stop { why: format!("{failed} machines failed") });
        return effects;
    }
    if stands.iter().any(|(_, stand)| *stand == Stand::Asked) {
        return effects;
    }
    let next = stands.iter().filter(|(_, stand)| *stand == Stand::Waiting).map(|(batch, _)| *batch).min();
    let Some(next) = next else {
        effects.push(Effect::Succeed);
        return effects;
    };
    for member in members.iter().filter(|member| member.batch == next && member.stand == Stand::Waiting) {
        let machine = member.machine;
        effects.push(if !member.is_running {
            let error = Some("it does not run".to_owned());
            Effect::Settle { machine, stand: Stand::Skipped, error }
        } else if member.is_there {
            Effect::Settle { machine, stand: Stand::Updated, error: None }
        } else {
            Effect::Ask { machine }
        });
    }
    effects
}

fn settle(member: &Member) -> Option<(Stand, Option<String>)> {
    if !member.is_running {
        return Some((Stand::Skipped, Some("it does not run any more".to_owned())));
    }
    if let Some(why) = &member.refused {
        return Some((Stand::Failed, Some(why.clone())));
    }
    if member.is_there {
        return Some((Stand::Updated, None));
    }
    member.is_overdue.then(|| (Stand::Failed, Some("its host said nothing of the update in time".to_owned())))
}

/// The batch of each machine, in order: the canary, then batches.
pub fn batches(machines: usize, canary: usize, size: usize) -> impl Iterator<Item = i32> {
    (0..machines).map(move |at| {
        let batch = if at < canary { 0 } else { 1 + (at - canary) / size.max(1) };
        i32::try_from(batch).unwrap_or(i32::MAX)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// How a machine answers once it is asked.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Host {
        Updates,
        GoesBack,
        Silent,
        Dies,
        /// Was there before it was asked.
        There,
        /// Never ran.
        Down,
    }

    fn host() -> impl Strategy<Value = Host> {
        prop_oneof![
            6 => Just(Host::Updates),
            1 => Just(Host::GoesBack),
            1 => Just(Host::Silent),
            1 => Just(Host::Dies),
            1 => Just(Host::There),
            1 => Just(Host::Down),
        ]
    }

    fn member(batch: i32, host: Host) -> Member {
        Member {
            machine: MachineId::new(),
            batch,
            stand: Stand::Waiting,
            is_running: host != Host::Down,
            is_there: host == Host::There,
            refused: None,
            is_overdue: false,
        }
    }

    fn answer(member: &mut Member, host: Host) {
        match host {
            Host::Updates | Host::There => member.is_there = true,
            Host::GoesBack => member.refused = Some("rolled back".to_owned()),
            Host::Silent => member.is_overdue = true,
            Host::Dies | Host::Down => member.is_running = false,
        }
    }

    proptest! {
        #[test]
        fn a_rollout_ends_and_asks_no_more_than_it_may(
            hosts in proptest::collection::vec(host(), 0..24),
            (canary, size, most) in (0_usize..4, 1_usize..6, 1_usize..4),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 400),
            pauses in proptest::collection::vec(any::<bool>(), 400),
        ) {
            let mut members: Vec<Member> = batches(hosts.len(), canary, size)
                .zip(&hosts)
                .map(|(batch, host)| member(batch, *host))
                .collect();
            let mut ended = None;
            for (which, paused) in order.iter().zip(pauses) {
                let pace = if paused { Pace::Stands } else { Pace::Goes };
                let before = members.clone();
                for effect in next(pace, most, &members) {
                    let of = |id: MachineId| before.iter().position(|member| member.machine == id).unwrap();
                    match effect {
                        Effect::Settle { machine, stand, error } => {
                            let at = of(machine);
                            prop_assert!(matches!(before[at].stand, Stand::Asked | Stand::Waiting));
                            prop_assert!(!matches!(stand, Stand::Waiting | Stand::Asked));
                            prop_assert_eq!(error.is_none(), stand == Stand::Updated);
                            members[at].stand = stand;
                        }
                        Effect::Ask { machine } => {
                            prop_assert_eq!(pace, Pace::Goes);
                            let at = of(machine);
                            prop_assert_eq!(before[at].stand, Stand::Waiting);
                            members[at].stand = Stand::Asked;
                        }
                        Effect::Stop { .. } | Effect::Succeed => {
                            prop_assert_eq!(pace, Pace::Goes);
                            ended = Some(effect);
                        }
                    }
                }
                let asked: Vec<_> = members.iter().filter(|member| member.stand == Stand::Asked).collect();
                let batches: BTreeSet<i32> = asked.iter().map(|member| member.batch).collect();
                prop_assert!(batches.len() <= 1 && asked.len() <= size.max(canary));
                if let Some(batch) = batches.first() {
                    let earlier = members.iter().filter(|member| member.batch < *batch);
                    prop_assert!(earlier.into_iter().all(|member| !matches!(member.stand, Stand::Waiting | Stand::Asked)));
                    let failed = members.iter().filter(|member| member.batch < *batch && member.stand == Stand::Failed);
                    let failed: Vec<_> = failed.collect();
                    prop_assert!(failed.len() < most && failed.iter().all(|member| member.batch != 0));
                }
                if ended.is_some() {
                    break;
                }
                let asked: Vec<usize> = (0..members.len()).filter(|at| members[*at].stand == Stand::Asked).collect();
                if !asked.is_empty() {
                    let at = asked[which.index(asked.len())];
                    answer(&mut members[at], hosts[at]);
                }
            }
            let failed = members.iter().filter(|member| member.stand == Stand::Failed).count();
            match ended {
                Some(Effect::Succeed) => {
                    prop_assert!(failed < most);
                    prop_assert!(members.iter().all(|member| !matches!(member.stand, Stand::Waiting | Stand::Asked)));
                    for (member, host) in members.iter().zip(&hosts) {
                        prop_assert_eq!(member.stand == Stand::Updated, matches!(host, Host::Updates | Host::There));
                    }
                }
                Some(Effect::Stop { .. }) => prop_assert!(failed >= 1),
                other => prop_assert!(false, "it did not end: {:?}", other),
            }
        }
    }
}
